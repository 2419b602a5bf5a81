//! Bytes that ranks send in a step, against the formulas (table in
//! crates/engine/src/parallel/placement.rs), and how many segments are gathered at a time.

use std::path::Path;
use std::sync::Arc;

use crate::logits;
use crate::training::{batch, trainer_options};
use candle_core::{DType, Device};
use finetune::collective::{Collective, Op, Traffic, in_process};
use finetune::data::Step;
use finetune::engine::{Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::model;
use finetune::parallel::{Bucket, DeviceMesh, GradReduceOptions, ShardingStrategy};
use finetune::recipe::enums::{Attention, Recompute};
use finetune::runtime::thread_pool;
use finetune::weights::EMBED_TOKENS;

/// Measurements of one rank: bytes and calls of a step after the first, elements it trains, and the
/// most segments gathered at a time.
struct Seen {
    sent: Traffic,
    /// Of the blocks, and of embedding and head.
    elements: [u64; 2],
    /// Of the bucket with the embedding.
    embedding: u64,
    tied: bool,
    most: usize,
    own_elements: usize,
    layers: u64,
    formula: u64,
}

fn run(strategy: ShardingStrategy, ranks: usize, turns: usize) -> Vec<Seen> {
    run_model("models/tiny-llama", strategy, (ranks, turns), Recompute::Block)
}

fn run_model(
    model: &str,
    strategy: ShardingStrategy,
    (ranks, turns): (usize, usize),
    recompute: Recompute,
) -> Vec<Seen> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model);
    let rank = |end| -> Result<Seen> {
        let world: Arc<dyn Collective> = Arc::new(end);
        let options = EngineOptions {
            mesh: DeviceMesh::new(strategy, world)?,
            reducing: GradReduceOptions {
                accumulates: turns > 1,
                dtype: DType::F32,
                block_dtype: DType::F32,
            },
            ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
        };
        let engine = logits::base(&folder).engine(Trains::All, &options)?;
        let mut trainer = Trainer::new(engine, TrainerOptions { recompute, ..trainer_options() })?;
        let step = Step::new((0..(ranks * turns) as u32).map(batch).collect(), 1.0);
        trainer.step(&step)?;
        let before = options.mesh.traffic();
        trainer.step(&step)?;
        let strategy = &trainer.engine.store;
        let mut elements = [0; 2];
        let (mut own_elements, mut embedding) = (0, 0);
        for bucket in strategy.trainable() {
            let end = !matches!(bucket.segment, model::Segment::Block(_));
            elements[usize::from(end)] += bucket.elements() as u64;
            own_elements += bucket.own().len();
            if bucket.entries.iter().any(|entry| entry.desc.name == EMBED_TOKENS) {
                embedding = bucket.elements() as u64;
            }
        }
        let layers = trainer.engine.config.num_layers();
        Ok(Seen {
            sent: options.mesh.traffic().since(&before),
            elements,
            embedding,
            tied: trainer.engine.config.tie_word_embeddings,
            most: strategy.most_gathered(),
            own_elements,
            layers: layers as u64,
            formula: strategy.sent_by_formula(turns as u64, &recompute.stored(layers, true)),
        })
    };
    in_process::run_ranks(in_process::InProcessWorld::new(ranks).communicators(), |end| {
        thread_pool::in_own_pool(1, || rank(end))
    })
    .unwrap()
}

/// Returns the bytes that a rank of `n` sends of `bytes` in one round of a ring.
fn part(bytes: u64, n: usize) -> u64 {
    bytes / n as u64 * (n as u64 - 1)
}

#[test]
fn every_byte_sent_is_in_the_formula() {
    for ranks in [2, 3, 4] {
        for turns in [1, 2] {
            let a = turns as u64;
            for kind in [
                ShardingStrategy::Ddp,
                ShardingStrategy::Zero1,
                ShardingStrategy::Zero2,
                ShardingStrategy::Fsdp,
                ShardingStrategy::Hsdp(ranks.min(2)),
            ] {
                if matches!(kind, ShardingStrategy::Hsdp(size) if ranks % size != 0) {
                    continue;
                }
                for seen in run(kind, ranks, turns) {
                    let [blocks, ends] = seen.elements.map(|elements| 4 * elements);
                    let all = blocks + ends;
                    // A tied table is gathered for the embedding and for the head.
                    assert!(!seen.tied, "tiny-llama has a head of its own");
                    let n = ranks;
                    // Losses; squares of sharded gradients.
                    let (loss, squares) = (2 * part(8, n), 2 * part(8, n));
                    let wanted = match kind {
                        ShardingStrategy::Single => 0,
                        ShardingStrategy::Ddp => 2 * part(all, n) + loss,
                        ShardingStrategy::Zero1 => 2 * part(all, n) + loss + squares,
                        ShardingStrategy::Zero2 => (a + 1) * part(all, n) + loss + squares,
                        ShardingStrategy::Fsdp => {
                            a * (2 * part(blocks, n) + part(ends, n) + part(all, n)) + loss + squares
                        }
                        ShardingStrategy::Hsdp(s) => {
                            let across = 2 * part(all / s as u64, n / s);
                            let inside = 2 * part(blocks, s) + part(ends, s) + part(all, s);
                            a * (inside + across) + loss + 2 * part(8, s)
                        }
                    };
                    assert_eq!(seen.sent.total_bytes(), wanted, "{kind:?} on {ranks} ranks, {turns} turns");
                    assert_eq!(seen.formula, wanted, "{kind:?}: what a plan says");
                    let sharded = matches!(kind, ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_));
                    assert_eq!(seen.most, if sharded { 2 } else { 0 }, "{kind:?}: segments whole at a time");
                    let copies = if let ShardingStrategy::Hsdp(s) = kind { ranks / s } else { 1 };
                    let owned = if kind == ShardingStrategy::Ddp { 1 } else { ranks / copies };
                    assert_eq!(
                        seen.own_elements as u64 * 4 * owned as u64,
                        all,
                        "{kind:?}: what a rank updates"
                    );
                }
            }
        }
    }
}

/// A model of 7 blocks.
const E2B: &str = "families/models/tiny-gemma4-e2b";

/// A block that is recomputed with later ones is gathered once more. Two blocks are whole at a
/// time.
#[test]
fn recomputing_runs_of_blocks_gathers_them_again() {
    let sent = |recompute: &str| {
        let recompute = recompute.parse().unwrap();
        let seen = run_model(E2B, ShardingStrategy::Fsdp, (2, 1), recompute).remove(0);
        assert_eq!((seen.sent.total_bytes(), seen.most), (seen.formula, 2), "{recompute}");
        seen.sent.total_bytes()
    };
    let [block, two, three] = ["block", "every:2", "every:3"].map(sent);
    assert!(block < two && two < three, "{block}, {two}, {three} bytes");
}

/// A tied head gathers the embedding, and not the table of per-layer inputs.
#[test]
fn a_tied_head_leaves_the_table_of_per_layer_inputs() {
    let (n, a) = (2, 2);
    for seen in run_model(E2B, ShardingStrategy::Fsdp, (n, a as usize), Recompute::Block) {
        assert!(seen.tied);
        let [blocks, ends] = seen.elements.map(|elements| 4 * elements);
        let embedding = 4 * seen.embedding;
        assert!(embedding > 0 && ends > 2 * embedding, "the table is the larger one: {embedding} of {ends}");
        // `layer_scalar` of each block does not train; its bucket is filled up to 512 values.
        let scalars = seen.layers * 4 * 512;
        let gathered = 2 * part(blocks + scalars, n) + part(ends, n) + part(embedding, n);
        let wanted = a * (gathered + part(blocks + ends, n)) + 4 * part(8, n);
        assert_eq!((seen.sent.total_bytes(), seen.formula), (wanted, wanted));
    }
}

/// Returns bytes of values, f32 masters and gradients as stored, and 8 bytes of moments for each
/// parameter that the rank updates.
fn own_parts(strategy: ShardingStrategy, ranks: usize, dtype: DType) -> Vec<(u64, u64)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let rank = |end| -> Result<(u64, u64)> {
        let world: Arc<dyn Collective> = Arc::new(end);
        let options = EngineOptions {
            mesh: DeviceMesh::new(strategy, world)?,
            ..EngineOptions::alone(Device::Cpu, dtype, Attention::Flash, 0)
        };
        let engine = logits::base(&folder).engine(Trains::All, &options)?;
        let of = |bucket: &Bucket| bucket.kept_bytes().iter().sum::<usize>() + 8 * bucket.own().len();
        let bytes: usize = engine.store.trainable().map(of).sum();
        let all: usize = engine.store.trainable().map(Bucket::elements).sum();
        Ok((bytes as u64, all as u64))
    };
    in_process::run_ranks(in_process::InProcessWorld::new(ranks).communicators(), |end| {
        thread_pool::in_own_pool(1, || rank(end))
    })
    .unwrap()
}

/// ZeRO's table (arXiv 1910.02054, figure 1) in bytes a parameter, with gradients in f32. With bf16
/// values: 18, 6 + 12/N, 2 + 16/N and 18/N; where f32 values are their own masters: 16, 8 + 8/N, 4
/// + 12/N and 16/N.
#[test]
fn a_rank_keeps_the_bytes_of_the_table() {
    for (dtype, value, master) in [(DType::F32, 4, 0), (DType::BF16, 2, 4)] {
        for ranks in [2, 4] {
            let n = ranks as u64;
            for (kind, whole, shared, over) in [
                (ShardingStrategy::Ddp, value + 4 + master + 8, 0, n),
                (ShardingStrategy::Zero1, value + 4, master + 8, n),
                (ShardingStrategy::Zero2, value, 4 + master + 8, n),
                (ShardingStrategy::Fsdp, 0, value + 4 + master + 8, n),
                (ShardingStrategy::Hsdp(2), 0, value + 4 + master + 8, 2),
            ] {
                for (bytes, parameters) in own_parts(kind, ranks, dtype) {
                    let wanted = parameters * whole + parameters * shared / over;
                    assert_eq!(bytes, wanted, "{kind:?} on {ranks} ranks in {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn collectives_are_as_many_as_buckets() {
    let seen = &run(ShardingStrategy::Fsdp, 2, 1)[0];
    // A bucket each: blocks are gathered twice, embedding and head once, and each is reduced once.
    assert_eq!(seen.sent.calls(Op::AllGather), 2 * seen.layers + 2);
    assert_eq!(seen.sent.calls(Op::ReduceScatter), seen.layers + 2);
    // Losses, squares of gradients.
    assert_eq!(seen.sent.calls(Op::AllReduce), 2);
}
