use super::*;
use crate::error::Result;
use crate::model::SavedBytes;
use crate::recipe::{AdapterKind, AdapterSection, Recompute, TargetModules};

/// Returns the workspace of a step beside blocks that keep nothing.
fn workspace_of(step: &GpuStep<'_>, recompute: Recompute) -> Workspace {
    let saved = vec![SavedBytes::default(); step.shape_of.len()];
    step.workspace(&ActivationMemory::new(&saved, recompute))
}

/// DoRA dequantizes one matrix at a time, other products all matrices of their group. Its norms
/// take no memory of a matrix's size.
#[test]
fn the_block_that_needs_most_counts() -> Result<()> {
    let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    let config = ModelConfig::from_json(text, "config.json")?;
    let parts = ["gate", "up", "down"].map(|part| format!("mlp.{part}_proj"));
    let names = |blocks: &[usize]| -> Vec<String> {
        let of = |block: &usize| parts.clone().map(|part| format!("model.layers.{block}.{part}"));
        blocks.iter().flat_map(of).collect()
    };
    let all = names(&[0, 1, 2]).into_iter().map(|name| format!("{name}.weight")).collect::<Vec<_>>();
    let quantized: HashSet<&str> = all.iter().map(String::as_str).collect();
    let workspace = |quantized: &HashSet<&str>, dora: &[usize]| -> Result<u64> {
        let section = AdapterSection {
            kind: AdapterKind::Dora,
            target_modules: TargetModules::Named(names(dora)),
            ..AdapterSection::default()
        };
        let adapter = || AdapterSetup::from_recipe(&section, ("base", &config), &[]);
        let adapter = (!dora.is_empty()).then(adapter).transpose()?;
        let of_token = (1, DType::F32);
        let step = GpuStep::new(&config, quantized, adapter.as_ref(), of_token, Fp8Weights::default());
        Ok(workspace_of(&step, Recompute::None).all)
    };
    let plain = workspace(&quantized, &[])?;
    assert!(workspace(&quantized, &[0, 1, 2])? < plain);
    for dora in [[0, 1], [1, 2], [0, 2]] {
        assert_eq!(workspace(&quantized, &dora)?, plain);
    }
    let (dense, matrix) = (HashSet::new(), (64 * 16 * F32) as u64);
    assert!(workspace(&dense, &[0, 1, 2])? < workspace(&dense, &[])? + matrix / 2);
    Ok(())
}

/// At the products of gate and up: their inputs and gradients, A of both adapters, the gradients
/// of their inner activations, and of A.
#[test]
fn adapters_with_one_input_copy_their_a() -> Result<()> {
    let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    let config = ModelConfig::from_json(text, "config.json")?;
    let (tokens, none) = (1000, HashSet::new());
    let workspace = |r: usize| -> Result<u64> {
        let target_modules = TargetModules::Named(vec!["gate_proj".into(), "up_proj".into()]);
        let section = AdapterSection { target_modules, r, ..AdapterSection::default() };
        let adapter = AdapterSetup::from_recipe(&section, ("base", &config), &[])?;
        let of_batch = (tokens, DType::BF16);
        let step = GpuStep::new(&config, &none, Some(&adapter), of_batch, Fp8Weights::default());
        Ok(workspace_of(&step, Recompute::None).all - GEMM_WORKSPACE as u64)
    };
    let (through, rank) = (tokens * (2 * 64 + 2 * 16) * 2, 2 * 64);
    let (a, du, da) = (rank * 16 * 2, tokens * rank * 2, rank * 16 * 4);
    assert_eq!(workspace(64)?, (through + a + du + da) as u64);
    Ok(())
}

/// With many tokens, the peak of a block is at a product without a panel of its own.
#[test]
fn the_panel_of_down_proj_is_kept_before_a_norm_of_its_output() -> Result<()> {
    let workspace = |family: &str, recompute| -> Result<u64> {
        let text = format!(
            r#"{{"model_type": "{family}", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}}"#
        );
        let config = ModelConfig::from_json(&text, "config.json")?;
        let layout = BlockLayout::new(&config, 0);
        let names = |block| layout.linears().map(move |module| format!("{}.weight", module.name_in(block)));
        let names: Vec<String> = names(0).chain(names(1)).collect();
        let quantized = names.iter().map(String::as_str).collect();
        let of_batch = (1000, DType::BF16);
        let step = GpuStep::new(&config, &quantized, None, of_batch, Fp8Weights::default());
        Ok(workspace_of(&step, recompute).all)
    };
    let panel = (64 * 16 * 2) as u64;
    let [gemma, llama] = ["gemma2", "llama"].map(|family| workspace(family, Recompute::Block));
    assert_eq!(gemma?, llama? + panel);
    assert_eq!(workspace("gemma2", Recompute::None)?, workspace("llama", Recompute::None)?);
    Ok(())
}

/// Without tokens panels alone need memory: the two of neighbouring products, of which a run with
/// too little memory does without the second. Sizes of matrices are those of config.json, by hand.
#[test]
fn panels_ahead_are_those_of_the_products_in_their_order() -> Result<()> {
    let workspace = |family: &str| -> Result<[u64; 2]> {
        let text = format!(
            r#"{{"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, {family}}}"#
        );
        let config = ModelConfig::from_json(&text, "config.json")?;
        let layout = BlockLayout::new(&config, 0);
        let quantized = layout.linears().filter(|module| !module.part.is_gate());
        let names: Vec<String> = quantized.map(|module| format!("{}.weight", module.name_in(0))).collect();
        let names = names.iter().map(String::as_str).collect();
        let step = GpuStep::new(&config, &names, None, (0, DType::BF16), Fp8Weights::default());
        let Workspace { all, required } = workspace_of(&step, Recompute::None);
        Ok([all, required].map(|bytes| bytes - GEMM_WORKSPACE as u64))
    };
    let bytes = |out: usize, inputs: usize| (2 * out * inputs) as u64;
    let gemma = r#""model_type": "gemma4_text", "layer_types": ["full_attention"], "num_key_value_heads": 2,
        "head_dim": 8, "global_head_dim": 8, "intermediate_size": 24"#;
    // Gemma 4 E2B: the gate of the per-layer input before its projection.
    let e2b = format!(r#"{gemma}, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 8"#);
    let (gate, projection) = (bytes(64, 16), bytes(16, 64));
    assert_eq!(workspace(&e2b)?, [gate + projection, gate]);
    // An MLP before experts of width 64: `o_proj` waits beside the backward of the experts.
    let both = format!(
        r#"{gemma}, "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 64"#
    );
    let (gate_up, o) = (bytes(2 * 64, 16), bytes(16, 4 * 8));
    assert_eq!(workspace(&both)?, [gate_up + o, gate_up]);
    // Without an MLP nothing waits beside experts, whose products make their own panels.
    let experts = r#""model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64"#;
    assert_eq!(workspace(experts)?, [gate_up, gate_up]);
    // Latents: the queries' projection before that of keys and values.
    let latents = r#""model_type": "deepseek_v3", "num_key_value_heads": 4, "intermediate_size": 24, "q_lora_rank": 32,
        "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1"#;
    let (q, kv) = (bytes(4 * (8 + 4), 32), bytes(4 * (8 + 8), 24));
    assert_eq!(workspace(latents)?, [q + kv, q.max(kv)]);
    // The first product of a pass makes its own panel, and the last one begins none.
    let dense = r#""model_type": "llama", "num_key_value_heads": 4, "intermediate_size": 4"#;
    let (qkv, o) = (bytes(3 * 16, 16), bytes(16, 16));
    assert_eq!(workspace(dense)?, [qkv + o, qkv]);
    Ok(())
}
