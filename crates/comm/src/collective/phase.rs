//! Phases of a rank, which its peers' messages name.

use super::named_values::named_values;

named_values! {
    /// The parts of a run in which a rank can fail.
    pub enum Phase {
        /// Ranks connect and compare their runs.
        Meet = "meet",
        /// Read the weights.
        Load = "load",
        /// Begin a step and read its rows.
        Data = "data",
        /// Forward through the blocks.
        Forward = "forward",
        /// The head's loss and gradient.
        Loss = "loss",
        /// Backward through the blocks.
        Backward = "backward",
        /// The gradient norm.
        Norm = "norm",
        /// The optimizer's update.
        Update = "update",
        /// All-gather the updated parameters.
        AllGatherParams = "spread",
        /// Evaluation on held-out rows.
        Evaluate = "evaluate",
        /// Print and log the results of a step or an evaluation.
        Report = "report",
        /// Write a checkpoint.
        Save = "save",
        /// Gather and write the result.
        Output = "output",
    }
}
