//! Errors of a failed device: step, phase and settings that may help.

use crate::collective::Phase;
use crate::error::{DeviceFault, Error};
use crate::planning::Plan;
use crate::units;

/// Largest number of settings in a hint; the first ones cost least.
const ADVICE: usize = 4;

/// Adds the step, the phase and a hint to `error` if it comes from the device; returns other errors
/// unchanged.
pub(crate) fn explained(mut error: Error, plan: &Plan, phase: Phase) -> Error {
    let Some(fault) = error.device_fault() else { return error };
    if let Some(doing) = doing(phase, error.step()) {
        error = error.during(doing);
    }
    if fault == DeviceFault::OutOfMemory {
        let planned = units::bytes(plan.memory.total());
        let (cause, bytes) = plan.memory.grows_in(phase);
        let why = format!(
            "the plan estimated {planned} for a step; this phase needs memory for {cause}, planned as {}",
            units::bytes(bytes)
        );
        error = error.because(why).hint(hint(&plan.memory_advice(phase)));
    }
    error.because("everything saved before is intact")
}

/// Names the failed part; none if the error does so itself, as that of an evaluation does.
fn doing(phase: Phase, step: Option<u64>) -> Option<String> {
    let part = match (phase, step) {
        (Phase::Meet | Phase::Load, _) => return Some("cannot load the model".into()),
        (Phase::Save, _) => return Some("cannot save a checkpoint".into()),
        (Phase::Output, _) => return Some("cannot write the result".into()),
        (Phase::Evaluate, _) => return None,
        (Phase::Data, _) => "beginning",
        (Phase::Report, _) => "report",
        (Phase::Forward, _) => "forward",
        (Phase::Loss, _) => "loss",
        (Phase::Backward, _) => "backward",
        (Phase::Norm, _) => "gradient norm",
        (Phase::Update, _) => "optimizer's update",
        (Phase::AllGatherParams, _) => "all-gather of new weights",
    };
    Some(match step {
        Some(step) => format!("step {step} failed in its {part}"),
        None => format!("a step failed in its {part}"),
    })
}

/// Returns a hint on needing less memory. `settings` are command-line flags with the memory of
/// each.
fn hint(settings: &[String]) -> String {
    if settings.is_empty() {
        return "use a smaller model or a larger GPU; `nvidia-smi` shows the memory of other processes"
            .into();
    }
    format!(
        "these need less memory, the cheapest first: {}; `--resume` accepts another `train.recompute`, \
         `parallel.offload` or split into micro-batches, other changes need a new run",
        settings[..settings.len().min(ADVICE)].join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_is_named() {
        for phase in Phase::ALL {
            let text = doing(phase, Some(12));
            assert_eq!(text.is_none(), phase == Phase::Evaluate, "{phase:?}: {text:?}");
        }
        assert_eq!(doing(Phase::Update, Some(12)).unwrap(), "step 12 failed in its optimizer's update");
    }

    #[test]
    fn the_settings_that_cost_least_are_named() {
        let settings = ["a", "b", "c", "d", "e"].map(|key| format!("`--set {key}=1`"));
        let text = hint(&settings);
        assert!(text.contains("`--set a=1`, `--set b=1`, `--set c=1`, `--set d=1`;"), "{text}");
        assert!(hint(&[]).contains("larger GPU"));
    }
}
