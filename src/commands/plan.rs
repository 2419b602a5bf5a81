//! `finetune plan`: what a run would need, without loading weights.

use super::{print, print_json, terminal, working_folder};
use crate::cli::PlanArgs;
use crate::data::{Dataset, Sampler};
use crate::error::Result;
use crate::plan::{ParamCache, Rows, StepInputs, sampler_options};
use crate::recipe::Recipe;
use crate::run::sizing_inputs::{SizedModel, engine_on, room_of, timed_on, world_of};
use crate::setup::Resolver;
use crate::sizing::hardware::Hardware;
use crate::sizing::price::Price;
use crate::sizing::{SizingRequest, explorer};

/// Plans the run.
pub(super) fn run(args: &PlanArgs) -> Result<()> {
    let (terminal, folder) = (terminal(&args.common), working_folder()?);
    let mut recipe = Recipe::load(&args.layers(&folder)?)?;
    let hardware = args.on.as_deref().map(|on| Hardware::parse(on, &folder)).transpose()?;
    let prices = args.price.iter().map(|price| Price::parse(price)).collect::<Result<Vec<_>>>()?;
    let finder = Resolver::new(args.common.offline, &terminal)?.leaving_weights();
    let found = SizedModel::find(&mut recipe, &finder, &terminal)?;
    let engine = engine_on(hardware.as_ref(), args, &recipe)?;
    let calibration = args.calibration.as_ref().map(|file| folder.join(file));
    let world = world_of(hardware.as_ref(), args);
    let timed = timed_on(hardware.as_ref(), calibration.as_deref(), &engine, world.all)?;
    let steps = match &found.train {
        Some(data) => Some(Sampler::new(data, sampler_options(&recipe, world.all))?.total_steps()),
        None => recipe.train.max_steps,
    };
    let inputs = StepInputs {
        base: &found.base,
        adapter_setup: found.adapter_setup.as_ref(),
        rows: found.train.as_ref().map_or(Rows::Full, Rows::Of),
        new_tokens: &found.new_tokens,
        engine: &engine,
        room: room_of(hardware.as_ref()),
        params: &ParamCache::default(),
    };
    let typed = recipe.clone();
    inputs.split_rows(&mut recipe, world)?;
    let held_out = found.held_out.iter().flat_map(Dataset::examples);
    let request = SizingRequest {
        typed: &typed,
        recipe: &recipe,
        inputs,
        world,
        timed: timed.as_ref().map(|(hardware, rates)| (hardware, rates)),
        prices: &prices,
        steps,
        held_out_tokens: held_out.map(|row| row.ids.len() as u64).sum(),
    };
    let sizing = request.answer()?;
    if let Some(file) = &args.html {
        explorer::write(&sizing, &folder.join(file))?;
        terminal.line(format!("wrote {}", file.display()));
    }
    if !args.json {
        return print(&sizing.text());
    }
    print_json(&sizing)
}
