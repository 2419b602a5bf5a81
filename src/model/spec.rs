//! The parameters of a model: names as in Hugging Face checkpoints, shapes, segment and role.
//! The order is fixed (embedding, blocks, head), so everything that walks parameters agrees on it.

use super::ModelConfig;

/// A part of the model whose weights are used together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    /// The token embedding.
    Embed,
    /// The decoder block of this number.
    Block(usize),
    /// Final norm and output layer.
    Head,
}

/// What a parameter is to the optimizer and to initialization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix: decayed.
    Weight,
    /// A token table: decayed.
    Embedding,
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
    /// Where it is used.
    pub segment: Segment,
    /// What it is.
    pub role: Role,
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

    /// The module's name: the parameter's without `.weight` or `.bias`.
    pub fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(module, _)| module)
    }
}

/// What kind of module an adapter would target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleKind {
    /// A linear layer of a block.
    Linear,
    /// The token embedding.
    Embedding,
    /// The output layer.
    Head,
    /// An RMS norm's gain.
    Norm,
}

/// A named module, as PEFT sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Name such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// The shape of its weight: [out, in], [vocab, hidden] of a token table, [n] of a norm.
    pub shape: Vec<usize>,
    /// What it is, which decides what an adapter can attach to it.
    pub kind: ModuleKind,
}

impl Module {
    /// The width of its output: the rows of its weight.
    pub fn out_features(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// The width of its input: the columns of its weight, 0 for a norm.
    pub fn in_features(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(0)
    }
}

/// Every parameter of the model, in order. A tied head has none of its own.
pub fn parameters(config: &ModelConfig) -> Vec<ParamSpec> {
    let d = config.hidden_size;
    let mut specs = vec![ParamSpec {
        name: "model.embed_tokens.weight".into(),
        shape: vec![config.vocab_size, d],
        segment: Segment::Embed,
        role: Role::Embedding,
    }];
    for layer in 0..config.num_layers() {
        block(config, layer, &mut specs);
    }
    specs.push(ParamSpec {
        name: "model.norm.weight".into(),
        shape: vec![d],
        segment: Segment::Head,
        role: Role::Norm,
    });
    if !config.tie_word_embeddings {
        specs.push(ParamSpec {
            name: "lm_head.weight".into(),
            shape: vec![config.vocab_size, d],
            segment: Segment::Head,
            role: Role::Weight,
        });
    }
    specs
}

fn block(config: &ModelConfig, layer: usize, specs: &mut Vec<ParamSpec>) {
    let (d, f, heads) = (config.hidden_size, config.intermediate_size, config.heads);
    let mut push = |name: &str, shape: Vec<usize>, role: Role| {
        let name = format!("model.layers.{layer}.{name}");
        specs.push(ParamSpec { name, shape, segment: Segment::Block(layer), role });
    };
    let mut linear = |name: &str, out: usize, input: usize, bias: bool| {
        push(&format!("{name}.weight"), vec![out, input], Role::Weight);
        if bias {
            push(&format!("{name}.bias"), vec![out], Role::Bias);
        }
    };
    if config.fused {
        linear("self_attn.qkv_proj", heads.qkv_width(), d, config.qkv_bias);
    } else {
        linear("self_attn.q_proj", heads.q_width(), d, config.qkv_bias);
        linear("self_attn.k_proj", heads.kv_width(), d, config.qkv_bias);
        linear("self_attn.v_proj", heads.kv_width(), d, config.qkv_bias);
    }
    linear("self_attn.o_proj", d, heads.q_width(), config.o_bias);
    if config.fused {
        linear("mlp.gate_up_proj", 2 * f, d, config.mlp_bias);
    } else {
        linear("mlp.gate_proj", f, d, config.mlp_bias);
        linear("mlp.up_proj", f, d, config.mlp_bias);
    }
    linear("mlp.down_proj", d, f, config.mlp_bias);
    let mut norm = |name: &str, len: usize| push(&format!("{name}.weight"), vec![len], Role::Norm);
    if config.qk_norm {
        norm("self_attn.q_norm", heads.head_dim);
        norm("self_attn.k_norm", heads.head_dim);
    }
    norm("input_layernorm", d);
    norm("post_attention_layernorm", d);
    if config.post_norms {
        norm("pre_feedforward_layernorm", d);
        norm("post_feedforward_layernorm", d);
    }
}

/// Every module of the model that an adapter could name, in order; a tied head is a module too.
pub fn modules(config: &ModelConfig) -> Vec<Module> {
    let mut modules: Vec<Module> = parameters(config)
        .iter()
        .filter(|spec| spec.role != Role::Bias)
        .map(|spec| Module {
            name: spec.module().to_string(),
            shape: spec.shape.clone(),
            kind: match (spec.role, spec.segment) {
                (Role::Norm, _) => ModuleKind::Norm,
                (Role::Embedding, _) => ModuleKind::Embedding,
                (_, Segment::Head) => ModuleKind::Head,
                _ => ModuleKind::Linear,
            },
        })
        .collect();
    if config.tie_word_embeddings {
        modules.push(Module {
            name: "lm_head".into(),
            shape: vec![config.vocab_size, config.hidden_size],
            kind: ModuleKind::Head,
        });
    }
    modules
}
