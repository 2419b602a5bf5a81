//! Phases of a rank, which its peers' messages name.

/// The parts of a run in which a rank can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Ranks connect and compare their runs.
    Meet,
    /// Read the weights.
    Load,
    /// Begin a step and read its rows.
    Data,
    /// Forward through the blocks.
    Forward,
    /// The head's loss and gradient.
    Loss,
    /// Backward through the blocks.
    Backward,
    /// The gradient norm.
    Norm,
    /// The optimizer's update.
    Update,
    /// All-gather the updated parameters.
    AllGatherParams,
    /// Evaluation on held-out rows.
    Evaluate,
    /// Print and log the results of a step or an evaluation.
    Report,
    /// Write a checkpoint.
    Save,
    /// Gather and write the result.
    Output,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Phase; 13] = [
        Phase::Meet,
        Phase::Load,
        Phase::Data,
        Phase::Forward,
        Phase::Loss,
        Phase::Backward,
        Phase::Norm,
        Phase::Update,
        Phase::AllGatherParams,
        Phase::Evaluate,
        Phase::Report,
        Phase::Save,
        Phase::Output,
    ];

    /// Name of the phase, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Meet => "meet",
            Phase::Load => "load",
            Phase::Data => "data",
            Phase::Forward => "forward",
            Phase::Loss => "loss",
            Phase::Backward => "backward",
            Phase::Norm => "norm",
            Phase::Update => "update",
            Phase::AllGatherParams => "spread",
            Phase::Evaluate => "evaluate",
            Phase::Report => "report",
            Phase::Save => "save",
            Phase::Output => "output",
        }
    }
}
