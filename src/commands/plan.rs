//! `finetune plan`: estimates memory, time and cost of a run without loading weights.

use super::{print, print_json, terminal, working_folder};
use crate::cli::PlanArgs;
use crate::data::{Dataset, Sampler};
use crate::error::{Error, Result};
use crate::loading::Resolver;
use crate::planning::sizing::hardware::Hardware;
use crate::planning::sizing::inputs::{SizedModel, engine_on, measured_for, room_of, timed_on, world_of};
use crate::planning::sizing::price::Price;
use crate::planning::sizing::rates::Calibration;
use crate::planning::sizing::{Sizing, SizingRequest, explorer};
use crate::planning::{ParamCache, Rows, StepInputs, decide_accumulation, decide_rows, sampler_options};
use crate::recipe::Recipe;

/// Parses `--price`. A price is per time, so the speed of the hardware must be known.
fn prices(args: &PlanArgs) -> Result<Vec<Price>> {
    if let (Some(price), None, None) = (args.price.first(), &args.on, &args.calibration) {
        return Err(Error::user(format!("cannot use the price {price:?} (`--price`)"))
            .because("a price is per time, and the speed of this machine is unknown")
            .hint("give the hardware with `--on`, or a `--calibration` of this machine"));
    }
    args.price.iter().map(|price| Price::parse(price)).collect()
}

/// Plans the run.
pub(super) fn run(args: &PlanArgs) -> Result<()> {
    let (terminal, folder) = (terminal(&args.common), working_folder()?);
    let mut recipe = Recipe::load(&args.layers(&folder)?)?;
    recipe.written.overruled().iter().for_each(|text| terminal.line(text));
    let hardware = args.on.as_deref().map(|on| Hardware::parse(on, &folder)).transpose()?;
    hardware.as_ref().and_then(Hardware::unusual).into_iter().for_each(|text| terminal.warn(text));
    let prices = prices(args)?;
    let resolver = Resolver::new(args.common.offline, &terminal)?.leaving_weights();
    let model = SizedModel::find(&mut recipe, &resolver, &terminal)?;
    let gpus = args.devices.gpus.as_ref().map(|gpus| gpus.0.as_slice());
    let ranks = args.devices.ranks.map(usize::from);
    let engine = engine_on(hardware.as_ref(), gpus, ranks, &recipe)?;
    let calibration =
        args.calibration.as_ref().map(|file| measured_for(&folder.join(file), &engine)).transpose()?;
    let speeds = calibration.as_ref().map(Calibration::source);
    let world = world_of(hardware.as_ref(), gpus, ranks);
    let measured = calibration.map(|calibration| calibration.rates);
    let timed = timed_on(hardware.as_ref(), measured, &engine, world.all);
    decide_rows(&mut recipe, world.all, None)?;
    decide_accumulation(&mut recipe, model.train.as_ref(), world.all)?;
    let sampler = model.train.as_ref().map(|data| Sampler::new(data, sampler_options(&recipe, world.all)));
    let sampler = sampler.transpose()?;
    let steps = sampler.as_ref().map_or(recipe.train.max_steps, |sampler| Some(sampler.total_steps()));
    let inputs = StepInputs {
        base: &model.base,
        adapter_setup: model.adapter_setup.as_ref(),
        row_lengths: model.train.as_ref().map_or(Rows::Full, Rows::Of),
        new_tokens: &model.new_tokens,
        engine: &engine,
        budget: room_of(hardware.as_ref()),
        params: &ParamCache::default(),
    };
    let typed = recipe.clone();
    inputs.split_rows(&mut recipe, world)?;
    let held_out = model.held_out.iter().flat_map(Dataset::examples);
    let request = SizingRequest {
        typed: &typed,
        recipe: &recipe,
        inputs,
        world,
        timed: timed.as_ref().map(|(hardware, rates)| (hardware, rates)),
        speeds: speeds.as_deref(),
        prices: &prices,
        steps,
        steps_of_epoch: sampler.as_ref().map(Sampler::steps_per_epoch),
        held_out_tokens: held_out.map(|row| row.ids.len() as u64).sum(),
    };
    let sizing = request.answer()?;
    if let Some(file) = &args.html {
        explorer::write(&sizing, &folder.join(file))?;
        terminal.line(format!("wrote {}", file.display()));
    }
    if args.json {
        print_json(&sizing)?;
    } else {
        print(&if args.full { sizing.text() } else { sizing.answer_first() })?;
    }
    fits_or_error(&sizing)
}

/// Returns an error if the plan does not fit, so that scripts see it in the exit code.
fn fits_or_error(sizing: &Sizing) -> Result<()> {
    if sizing.fits != Some(false) {
        return Ok(());
    }
    let error = Error::user("the plan does not fit").because(sizing.memory_in_short());
    Err(match sizing.alternative() {
        Some(way) => error.hint(format!("this fits: {way}")),
        None => error.hint("give a smaller model, or more or larger devices"),
    })
}
