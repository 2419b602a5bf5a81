use super::*;
use crate::error::Result;
use crate::recipe::{AdapterKind, AdapterSection, TargetModules};

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
        Ok(step.workspace(Recompute::None, &[]))
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
        Ok(step.workspace(Recompute::None, &[]) - GEMM_WORKSPACE as u64)
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
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}}"#
        );
        let config = ModelConfig::from_json(&text, "config.json")?;
        let layout = BlockLayout::new(&config, 0);
        let names: Vec<String> =
            layout.linears().map(|module| format!("{}.weight", module.name_in(0))).collect();
        let quantized = names.iter().map(String::as_str).collect();
        let of_batch = (1000, DType::BF16);
        let step = GpuStep::new(&config, &quantized, None, of_batch, Fp8Weights::default());
        Ok(step.workspace(recompute, &[]))
    };
    let panel = (64 * 16 * 2) as u64;
    let [gemma, llama] = ["gemma2", "llama"].map(|family| workspace(family, Recompute::Block));
    assert_eq!(gemma?, llama? + panel);
    assert_eq!(workspace("gemma2", Recompute::None)?, workspace("llama", Recompute::None)?);
    Ok(())
}
