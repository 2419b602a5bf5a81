//! What a rank is doing, as its peers' messages name it.

/// The parts of a run in which a rank can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Ranks meet and compare what they are about to run.
    Meet,
    /// Weights are read.
    Load,
    /// A step begins: its rows are taken.
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
    /// New values go to the ranks that compute with them.
    AllGatherParams,
    /// Evaluation on held-out rows.
    Evaluate,
    /// What a step or an evaluation came to is shown and logged.
    Report,
    /// A checkpoint is written.
    Save,
    /// The result is gathered and written.
    Output,
}

impl Phase {
    /// All of them.
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

    /// As people read it.
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
