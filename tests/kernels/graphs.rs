//! Passes over blocks that are launched as graphs give the bits of launches one by one.

use finetune::error::Result;
use finetune::ops::{BlockGraphs, GraphCounts, selftest};
use finetune::recipe::enums::Recompute;

use super::{Blocks, OTHERS, WHOLE, address_pool, alone, batch, blocks};

/// More families whose blocks launch alone.
const MORE: [&str; 4] = [
    r#""model_type": "cohere", "use_qk_norm": false"#,
    r#""model_type": "glm""#,
    r#""model_type": "olmo""#,
    r#""model_type": "phi3", "sliding_window": 32"#,
];

impl Blocks {
    /// Returns the bits of a pass, launched as graphs or one by one.
    fn bits_of(&mut self, graphs: Option<&BlockGraphs>, tokens: usize) -> Result<Vec<u32>> {
        self.engine.store.zero_gradients()?;
        self.graphs = graphs.cloned();
        let results = self.pass_over(&batch(tokens))?;
        Ok(self.bits(&results))
    }
}

/// Runs steps with other inputs, adapters and random streams, each as graphs and one by one.
/// Returns the calls of the graphs.
fn same_bits(blocks: &mut Blocks, what: &str) -> GraphCounts {
    let graphs = BlockGraphs::default();
    for step in 0..6 {
        blocks.refill(&format!("step {step}"));
        let wanted = blocks.bits_of(None, 50).unwrap();
        let found = blocks.bits_of(Some(&graphs), 50).unwrap();
        assert!(found == wanted, "{what}, step {step}: {:?}", graphs.counts());
    }
    graphs.counts()
}

#[test]
fn graphs_give_the_bits_of_single_launches() {
    let _alone = alone();
    selftest::emulate().unwrap();
    address_pool::switch(true);
    for family in WHOLE.iter().chain(&MORE).chain(&OTHERS) {
        for (dropout, recompute) in [(0.0, Recompute::None), (0.0, Recompute::Block), (0.1, Recompute::Block)] {
            let what = format!("{family}, dropout {dropout}, recompute {recompute:?}");
            let mut blocks = blocks(family, dropout, recompute);
            let config = &blocks.engine.config;
            let alone = config.launches_alone(1);
            assert_eq!(alone, !OTHERS.contains(family), "{what}");
            let counts = same_bits(&mut blocks, &what);
            println!("{what}: {counts:?}");
        }
    }
}
