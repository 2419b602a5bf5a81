//! Passes over blocks that are launched as graphs give the bits of launches one by one.

use std::collections::BTreeSet;
use std::path::Path;

use finetune::error::Result;
use finetune::model::ModelConfig;
use finetune::ops::{BlockGraphs, GraphCounts, selftest};
use finetune::quant::QuantFormat;
use finetune::recipe::enums::{QuantKind, Recompute};
use finetune::runtime::planned_failure::PlannedFailure;
use serde_json::Value;

use super::exhaustive::each_third;
use super::{Blocks, OTHERS, WHOLE, address_pool, alone, batch, blocks, logits, write_model};

/// More families whose blocks launch alone.
const MORE: [&str; 16] = [
    r#""model_type": "arcee""#,
    r#""model_type": "cohere", "use_qk_norm": false"#,
    r#""model_type": "cohere2""#,
    r#""model_type": "ernie4_5""#,
    r#""model_type": "exaone4""#,
    r#""model_type": "glm4""#,
    r#""model_type": "ministral""#,
    r#""model_type": "nemotron""#,
    r#""model_type": "seed_oss""#,
    r#""model_type": "smollm3""#,
    r#""model_type": "stablelm", "use_parallel_residual": true"#,
    r#""model_type": "granitemoehybrid", "layer_types": ["full_attention", "full_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 192"#,
    r#""model_type": "lfm2", "full_attn_idxs": [1], "block_ff_dim": 192"#,
    // The second block has no experts.
    r#""model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "mlp_only_layers": [1]"#,
    r#""model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 2"#,
    r#""model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 0, "moe_layer_end_index": 0"#,
];

impl Blocks {
    /// Returns the bits of a pass, launched as graphs or one by one. The first sequence has `len`
    /// tokens.
    fn bits_of(&mut self, graphs: Option<&BlockGraphs>, len: usize) -> Result<Vec<u32>> {
        self.engine.store.zero_gradients()?;
        self.graphs = graphs.cloned();
        let results = self.run_pass(&batch(len))?;
        Ok(self.bits(&results))
    }

    /// Begins a step with other inputs, adapters and random streams, and runs it as graphs. Checks
    /// the bits if it `is_checked`.
    fn step(&mut self, name: &str, graphs: &BlockGraphs, len: usize, is_checked: bool) {
        self.refill(name);
        let actual = self.bits_of(Some(graphs), len).unwrap();
        if is_checked {
            let wanted = self.bits_of(None, len).unwrap();
            assert!(actual == wanted, "{name}: {:?}", graphs.counts());
        }
    }

    /// Runs steps with these lengths of the first sequence. Returns the calls of the graphs.
    fn steps(&mut self, graphs: &BlockGraphs, lengths: &[usize]) -> GraphCounts {
        for (number, len) in lengths.iter().enumerate() {
            // Two passes are launched one by one. From the third on, a pass without graphs follows.
            self.step(&format!("step {number}"), graphs, *len, number > 1);
        }
        graphs.counts()
    }
}

/// The tests of this file share the process's allocator and emulator.
fn begin() -> std::sync::MutexGuard<'static, ()> {
    let alone = alone();
    selftest::emulate().unwrap();
    address_pool::begin(0);
    alone
}

#[test]
fn families_give_the_bits_of_single_launches() {
    let _alone = begin();
    for family in each_third(WHOLE.iter().chain(&MORE), 0) {
        let mut blocks = blocks(family, 0.0, Recompute::Block);
        assert!(blocks.engine.config.launches_alone(1), "{family}");
        let counts = blocks.steps(&BlockGraphs::default(), &[50; 4]);
        assert!(counts.made > 0 && counts.launched > 0, "{family}: {counts:?}");
    }
    for family in OTHERS {
        let mut blocks = blocks(family, 0.0, Recompute::None);
        assert!(!blocks.engine.config.launches_alone(1), "{family}");
        assert_eq!(blocks.steps(&BlockGraphs::default(), &[50]), GraphCounts::default(), "{family}");
    }
    address_pool::end();
}

/// Every family of the golden models whose blocks launch alone is in the test above.
#[test]
fn all_families_whose_blocks_launch_alone_are_compared() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let type_of = |config: &str| -> Option<String> {
        let config: Value = serde_json::from_str(config).unwrap();
        config["model_type"].as_str().map(str::to_owned)
    };
    let compared: BTreeSet<_> =
        WHOLE.iter().chain(&MORE).filter_map(|family| type_of(&format!("{{{family}}}"))).collect();
    let folders = ["models", "families/models"].map(|folder| std::fs::read_dir(golden.join(folder)).unwrap());
    let mut missing = BTreeSet::new();
    for folder in folders.into_iter().flatten() {
        let text = std::fs::read_to_string(folder.unwrap().path().join("config.json")).unwrap();
        let config = ModelConfig::from_json(&text, "config.json").unwrap();
        if (0..config.num_layers()).any(|layer| config.launches_alone(layer)) {
            missing.extend(type_of(&text).filter(|of| !compared.contains(of)));
        }
    }
    assert_eq!(missing, BTreeSet::new());
}

/// The numbers of dropout change in each step, and its copies divide a pass into parts.
#[test]
fn graphs_follow_dropout_and_other_lengths() {
    let _alone = begin();
    let mut dropping = blocks(WHOLE[0], 0.1, Recompute::Block);
    let counts = dropping.steps(&BlockGraphs::default(), &[50; 5]);
    assert!(counts.launched > 0 && counts.changed > 0, "{counts:?}");
    let mut plain = blocks(WHOLE[0], 0.0, Recompute::None);
    let counts = plain.steps(&BlockGraphs::default(), &[50, 50, 50, 20, 50, 20, 20, 70]);
    assert!(counts.launched > 0 && counts.one_by_one > 0, "{counts:?}");
    address_pool::end();
}

/// Panels of quantized weights are made on the one queue that a graph has.
#[test]
fn graphs_dequantize() {
    let _alone = begin();
    for recompute in [Recompute::None, Recompute::Block] {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), WHOLE[3]);
        let mut base = logits::base(folder.path());
        base.format = Some(QuantFormat::of_kind(QuantKind::Nf4, 64, true));
        let counts = Blocks::new(base, 0.0, recompute).steps(&BlockGraphs::default(), &[50; 4]);
        assert!(counts.launched > 0, "{recompute:?}: {counts:?}");
    }
    address_pool::end();
}

/// A pass that fails returns the error, and the steps behind it give their bits.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
fn a_failure_leaves_graphs_right() {
    let _alone = begin();
    let (mut blocks, graphs) = (blocks(WHOLE[3], 0.1, Recompute::Block), BlockGraphs::default());
    blocks.steps(&graphs, &[50; 3]);
    let fatal = [(PlannedFailure::Launch, 0), (PlannedFailure::Launch, 12), (PlannedFailure::Request, 9)];
    for (kind, after) in fatal {
        blocks.refill("fails");
        kind.plan_after(after);
        assert!(blocks.bits_of(Some(&graphs), 50).is_err(), "{kind:?} {after}");
        assert!(!kind.cancel(), "{kind:?} {after}");
        blocks.step("goes on", &graphs, 50, true);
        blocks.step("goes on again", &graphs, 50, true);
    }
    // After these the driver succeeds at its second attempt.
    for kind in [PlannedFailure::Module, PlannedFailure::Product] {
        kind.plan_after(3);
        blocks.step(&format!("{kind:?}"), &graphs, 50, true);
        assert!(!kind.cancel(), "{kind:?}");
    }
    address_pool::end();
}
