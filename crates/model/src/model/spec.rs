//! The parameters and modules of a model: names as in Hugging Face checkpoints, shapes and roles,
//! all derived from `layout`. The order is fixed (embedding, blocks, head), so all code that
//! iterates over parameters agrees on it.

use super::ModelConfig;
use super::block_part::BlockPart;
use super::layout::{ModelPart, NamedModule, Segment, model_modules};

/// The role of a parameter for the optimizer and for initialization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix: decayed.
    Weight,
    /// A matrix whose few outputs decide about all values of a token, such as that of a router of
    /// experts: decayed, not quantized.
    Gate,
    /// A token table: decayed.
    Embedding,
    /// A parameter of a recurrence or a router that is neither bias nor matrix, or sinks of
    /// attention: decayed, not quantized.
    Recurrence,
    /// Values beside the weights that no optimizer updates: f32 in every run.
    Buffer,
    /// A norm's gain: not decayed.
    Norm,
    /// A bias: not decayed.
    Bias,
}

/// One parameter of the model: its name, shape and use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name in the checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape of the tensor, as in the checkpoint.
    pub shape: Vec<usize>,
    /// The module that it belongs to.
    pub part: ModelPart,
    /// The role for the optimizer.
    pub role: Role,
}

impl Role {
    /// Returns true for a matrix.
    pub fn is_matrix(self) -> bool {
        matches!(self, Role::Weight | Role::Gate | Role::Embedding)
    }

    /// Returns true if weight decay applies to it, as in transformers' Trainer.
    pub fn is_decayed(self) -> bool {
        self.is_matrix() || self == Role::Recurrence
    }
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True for a parameter without elements (none exists).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the segment that uses it.
    pub fn segment(&self) -> Segment {
        self.part.segment()
    }

    /// Returns the module's name: the parameter's without `.weight` or `.bias`.
    pub fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(module, _)| module)
    }
}

/// The kind of a module that an adapter could target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleKind {
    /// A linear layer of a block.
    Linear,
    /// A linear layer of a block that is never quantized, because its few outputs decide about all
    /// values of a token.
    Gate,
    /// A router of experts: a linear layer that is adapted only by its name, and never quantized.
    Router,
    /// The token embedding.
    Embedding,
    /// The output layer.
    Head,
    /// A norm's gain and bias.
    Norm,
}

impl ModuleKind {
    /// Returns true for a linear layer of a block, also a router or another gate.
    pub fn is_layer_of_block(self) -> bool {
        matches!(self, ModuleKind::Linear | ModuleKind::Gate | ModuleKind::Router)
    }
}

/// A named module, as in PEFT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Name such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// The shape of its weight: `[out, in]`; `[vocab, hidden]` for a token table; `[n]` for a norm.
    pub shape: Vec<usize>,
    /// The kind, which decides the adapters that can attach to it.
    pub kind: ModuleKind,
}

impl Module {
    /// Returns the width of its output: the rows of its weight.
    pub fn out_features(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Returns the width of its input: the columns of its weight, 0 for a norm.
    pub fn in_features(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(0)
    }
}

/// Returns every parameter of the model, in order. A tied head has none of its own.
pub fn parameters(config: &ModelConfig) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    for NamedModule { name, part, weight, bias } in model_modules(config) {
        if part == ModelPart::LmHead && config.tie_word_embeddings {
            continue;
        }
        let role = match part {
            ModelPart::EmbedTokens | ModelPart::EmbedPerLayer => Role::Embedding,
            ModelPart::Block { part: BlockPart::DeltaStep, .. } => Role::Bias,
            ModelPart::Block { part, .. } if part.is_buffer() => Role::Buffer,
            ModelPart::Block { part, .. } if part.is_bias_of_experts() => Role::Bias,
            ModelPart::Block { part, .. } if part.is_apart() => Role::Recurrence,
            ModelPart::Block { part, .. } if part.is_gate() => Role::Gate,
            norm if norm.is_norm() => Role::Norm,
            _ => Role::Weight,
        };
        let parameter = match part {
            ModelPart::Block { part, .. } => part.parameter(&name),
            _ => format!("{name}.weight"),
        };
        specs.push(ParamSpec { name: parameter, shape: weight.dims(), part, role });
        if bias {
            let shape = vec![weight.out()];
            specs.push(ParamSpec { name: format!("{name}.bias"), shape, part, role: Role::Bias });
        }
    }
    specs
}

/// Returns every module of the model that an adapter could name, in order, also a tied head.
pub fn modules(config: &ModelConfig) -> Vec<Module> {
    let kind = |part: ModelPart| match part {
        ModelPart::EmbedTokens | ModelPart::EmbedPerLayer => ModuleKind::Embedding,
        ModelPart::LmHead => ModuleKind::Head,
        ModelPart::Block { part, .. } if part.is_router() => ModuleKind::Router,
        ModelPart::Block { part, .. } if part.is_gate() => ModuleKind::Gate,
        norm if norm.is_norm() => ModuleKind::Norm,
        _ => ModuleKind::Linear,
    };
    let module =
        |NamedModule { name, part, weight, .. }| Module { name, shape: weight.dims(), kind: kind(part) };
    let is_adaptable = |part| !matches!(part, ModelPart::Block { part, .. } if part.is_apart());
    model_modules(config).into_iter().filter(|module| is_adaptable(module.part)).map(module).collect()
}
