//! `finetune verify-resume`: checks on the user's own recipe that a killed and resumed run leaves
//! the same bytes as an uninterrupted one.

use super::{print, terminal, working_folder};
use crate::cli::VerifyResumeArgs;
use crate::collective::launch::{Flags, Launch};
use crate::error::{Error, Result};
use crate::recipe::{Recipe, StepInterval};
use crate::verify::verify_resume::ResumeTrial;

/// Trains twice and compares the output folders.
pub(super) fn run(args: &VerifyResumeArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let flags = Flags { ranks_here: args.devices.ranks.map(usize::from), ..Flags::default() };
    let launch = Launch::detect(&flags, &|name| std::env::var_os(name))?;
    if launch.master.is_some() {
        let (all, source) = (launch.world_size, launch.source.name());
        return Err(Error::user("cannot verify the resume over several processes")
            .because(format!(
                "the world size is {all}, from {source}; this command starts and kills the processes itself"
            ))
            .hint("run it outside of the launcher, with `--gpus` or `--ranks`"));
    }
    // Errors in the recipe are reported once, here.
    let recipe = Recipe::load(&args.layers(&working_folder()?)?)?;
    // Saves after every step if the recipe saves too rarely for a kill to leave a checkpoint.
    let save_steps = match recipe.checkpoint.save_steps {
        StepInterval::Every(steps) if steps < args.steps => steps,
        _ => 1,
    };
    let set = [
        format!("train.max_steps={}", args.steps),
        format!("checkpoint.save_steps={save_steps}"),
        "log.tensorboard=false".to_owned(),
        // Two runs cannot share one address, and nobody follows these.
        "log.metrics_address=\"\"".to_owned(),
        "log.command=[]".to_owned(),
        "alerts.rules=[]".to_owned(),
        "alerts.command=[]".to_owned(),
        "alerts.webhook=".to_owned(),
    ];
    let trial = ResumeTrial { args, set: &set, terminal: &terminal };
    print(&format!("{}\n", trial.run()?))
}
