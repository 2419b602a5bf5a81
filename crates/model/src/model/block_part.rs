//! The modules of a block by their role, independent of a family's names for them.

/// The role of a module in its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockPart {
    /// The projection to queries.
    QProj,
    /// The projection to keys.
    KProj,
    /// The projection to values.
    VProj,
    /// One projection to queries, keys and values, side by side in this order.
    QkvProj,
    /// The projection of attention's output.
    OProj,
    /// The MLP's projection to the input of its activation.
    GateProj,
    /// The MLP's projection to the factor of the activated gate. Without a gate, the projection to
    /// the input of its activation.
    UpProj,
    /// One projection to gate and up, side by side in this order.
    GateUpProj,
    /// The MLP's projection back to the width of the model.
    DownProj,
    /// The norm on each head's query.
    QNorm,
    /// The norm on each head's key.
    KNorm,
    /// The norm before attention.
    AttnNorm,
    /// The norm on attention's output, before the residual sum (Gemma, OLMo 2).
    AttnPostNorm,
    /// The norm before the MLP.
    MlpNorm,
    /// The norm on the MLP's output, before the residual sum (Gemma, OLMo 2).
    MlpPostNorm,
}

/// Linear layers of a block that read the same input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearGroup {
    /// Queries, keys and values.
    Qkv,
    /// Attention's output projection.
    O,
    /// The MLP's gate and up, or up alone.
    GateUp,
    /// The MLP's second projection.
    Down,
}

impl BlockPart {
    /// Returns the group of layers with the same input as this one; `None` for a norm.
    pub fn group(self) -> Option<LinearGroup> {
        match self {
            BlockPart::QProj | BlockPart::KProj | BlockPart::VProj | BlockPart::QkvProj => {
                Some(LinearGroup::Qkv)
            }
            BlockPart::OProj => Some(LinearGroup::O),
            BlockPart::GateProj | BlockPart::UpProj | BlockPart::GateUpProj => Some(LinearGroup::GateUp),
            BlockPart::DownProj => Some(LinearGroup::Down),
            BlockPart::QNorm
            | BlockPart::KNorm
            | BlockPart::AttnNorm
            | BlockPart::AttnPostNorm
            | BlockPart::MlpNorm
            | BlockPart::MlpPostNorm => None,
        }
    }
}
