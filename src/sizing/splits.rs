//! The ways to split a training over ranks: along data, shard, tensor, pipeline and context, ranked by modelled time.
//!
//! Axes have the order of [`MeshAxis`]: what communicates most is fastest, so that tensor and context parallelism stay inside of a host
//! and pipeline stages lie across hosts. The engine runs data and shard; the others are modelled, and say so.

use serde::Serialize;

use super::flops::linear_weights;
use super::hardware::Hardware;
use super::rates::ComputeRates;
use super::step_time::{ENDS, OVERLAP, UPDATED};
use crate::model::ModelConfig;

/// Bytes of an activation or a gradient that is sent.
const BF16: f64 = 2.0;
/// Bytes of states that each trained parameter needs: bf16 weights, f32 gradients, masters and moments.
const KEPT: f64 = 18.0;

/// Ranks along each axis, and what the step is modelled to take.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ParallelSplit {
    /// Copies of the model, or of its shards.
    pub data: usize,
    /// Ranks that share out one copy (FSDP).
    pub shard: usize,
    /// Ranks that share out each product.
    pub tensor: usize,
    /// Stages of layers.
    pub pipeline: usize,
    /// Parts of a sequence.
    pub context: usize,
    /// Modelled seconds of a step of the same global batch.
    pub step_secs: f64,
    /// Modelled bytes a rank.
    pub bytes: u64,
    /// Whether those fit the device.
    pub fits: bool,
    /// Whether the engine can run it.
    pub runs: bool,
}

/// A number of ranks along an axis that cannot be, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RefusedSplit {
    /// What cannot be, such as `tensor = 16`.
    pub what: String,
    /// Why it cannot be.
    pub why: String,
}

/// What is split.
#[derive(Debug, Clone, Copy)]
pub struct SplitWork<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// How many parameters it has.
    pub parameters: u64,
    /// Operations of a token.
    pub flops: f64,
    /// Tokens of a row.
    pub row: f64,
    /// Tokens of the step of all ranks.
    pub tokens: f64,
    /// Bytes of a token's activations on all layers, as the recipe keeps them.
    pub activation_bytes: f64,
    /// Bytes that fit.
    pub budget: u64,
}

/// Every split of all devices of `hardware`, the fastest that fit first, and the refused numbers.
pub fn splits(
    work: &SplitWork<'_>,
    hardware: &Hardware,
    rates: &ComputeRates,
) -> (Vec<ParallelSplit>, Vec<RefusedSplit>) {
    let ranks = hardware.devices();
    let (mut all, mut refused) = (Vec::new(), Vec::new());
    let mut allowed = |name: &'static str, check: &dyn Fn(usize) -> Option<String>| -> Vec<usize> {
        let mut fine = Vec::new();
        for size in divisors(ranks) {
            match check(size) {
                None => fine.push(size),
                Some(why) => refused.push(RefusedSplit { what: format!("{name} = {size}"), why }),
            }
        }
        fine
    };
    let tensor = allowed("tensor", &|size| tensor_refusal(work.config, hardware, size));
    let pipeline = allowed("pipeline", &|size| pipeline_refusal(work.config, size));
    let context = allowed("context", &|size| context_refusal(work.row, size));
    for (&t, &p) in tensor.iter().flat_map(|t| pipeline.iter().map(move |p| (t, p))) {
        for &c in &context {
            if !ranks.is_multiple_of(t * p * c) {
                continue;
            }
            let rest = ranks / (t * p * c);
            all.extend(
                divisors(rest).map(|shard| modelled(work, hardware, rates, [rest / shard, shard, t, p, c])),
            );
        }
    }
    sort(&mut all);
    (all, refused)
}

/// Those that fit first, the fastest first.
pub(super) fn sort(all: &mut [ParallelSplit]) {
    all.sort_by(|a, b| (!a.fits).cmp(&!b.fits).then(a.step_secs.total_cmp(&b.step_secs)));
}

fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |size| n.is_multiple_of(*size))
}

fn tensor_refusal(config: &ModelConfig, hardware: &Hardware, size: usize) -> Option<String> {
    let heads = config.heads;
    if size > hardware.per_host {
        return Some(format!(
            "it would cross hosts of {} devices: every layer waits for four sums",
            hardware.per_host
        ));
    }
    let width = config.intermediate_size;
    match () {
        () if !heads.num_heads.is_multiple_of(size) => {
            Some(format!("it does not divide {} heads", heads.num_heads))
        }
        () if !heads.num_kv_heads.is_multiple_of(size) => {
            Some(format!("it does not divide {} key-value heads", heads.num_kv_heads))
        }
        () if !width.is_multiple_of(size) => Some(format!("it does not divide the MLP's {width} columns")),
        () => None,
    }
}

fn pipeline_refusal(config: &ModelConfig, size: usize) -> Option<String> {
    let layers = config.num_layers();
    (!layers.is_multiple_of(size)).then(|| format!("it does not divide {layers} layers"))
}

fn context_refusal(row: f64, size: usize) -> Option<String> {
    // Each rank takes a piece from the front and one from the back, so that all see as many keys.
    let pieces = 2 * size;
    let row = row as usize;
    (size > 1 && (!row.is_multiple_of(pieces) || row / pieces < 128))
        .then(|| format!("rows of {row} tokens have no {pieces} equal pieces of 128 tokens or more"))
}

/// What a split is modelled to take.
fn modelled(
    work: &SplitWork<'_>,
    hardware: &Hardware,
    rates: &ComputeRates,
    [data, shard, tensor, pipeline, context]: [usize; 5],
) -> ParallelSplit {
    let ranks = hardware.devices() as f64;
    let [d, s, t, p, c] = [data, shard, tensor, pipeline, context].map(|n| n as f64);
    let layers = work.config.num_layers() as f64;
    // Rows of a replica, one a micro-batch.
    let micro_batches = (work.tokens / work.row / (d * s)).max(1.0);
    let micro_tokens = work.row / c;
    let compute = work.tokens.max(work.row * d * s) * work.flops / ranks / rates.linear;
    let bubble = (p - 1.0) / (micro_batches + p - 1.0);
    let ring = |n: f64| if n > 1.0 { (n - 1.0) / n } else { 0.0 };
    let hidden = micro_tokens * work.config.hidden_size as f64 * BF16;
    // Four sums of hidden states a layer and micro-batch, which nothing hides.
    let of_layers = micro_batches * layers / p;
    let tensor_secs = hardware.ring_secs(4.0 * 2.0 * ring(t) * hidden * of_layers, 1, tensor);
    // Keys and values go round in forward and, with their gradients, in backward.
    let kv = 2.0 * micro_tokens * work.config.heads.kv_width() as f64 * BF16 / t;
    let context_secs = hardware.ring_secs(3.0 * (c - 1.0) * kv * of_layers, tensor, context);
    let parameters = work.parameters as f64 / (t * p);
    let gathers = micro_batches * ring(s) * parameters * (2.0 * BF16 + 4.0);
    // Gradients are summed over copies of the weights: those of data, and of the parts of a sequence.
    let sums = |n: f64| 2.0 * ring(n) * parameters / s * 4.0 * if s > 1.0 { micro_batches } else { 1.0 };
    let of_copy = tensor * context * shard;
    let data_secs = hardware.ring_secs(gathers, tensor * context, shard)
        + hardware.ring_secs(sums(d), of_copy, data)
        + hardware.ring_secs(sums(c), tensor, context);
    // Hidden states to the next stage and their gradients back, of each micro-batch.
    let borders = if pipeline > 1 { 2.0 * hidden * micro_batches } else { 0.0 };
    let pipeline_secs = hardware.ring_secs(borders, of_copy * data, pipeline);
    let sent = context_secs + data_secs + pipeline_secs;
    let exposed = (sent - OVERLAP * compute).max(sent.min(ENDS * compute)) + tensor_secs;
    let update = parameters / s * UPDATED / rates.update;
    let step_secs = compute / (1.0 - bubble) + exposed + update;
    // A stage keeps as many micro-batches as there are stages.
    let in_flight = p.min(micro_batches);
    let activations = work.activation_bytes * micro_tokens / (t * p) * in_flight;
    let block = 2.0 * linear_weights(work.config) as f64 / layers / t * BF16;
    let bytes = (parameters / s * KEPT + activations + if s > 1.0 { block } else { 0.0 }) as u64;
    ParallelSplit {
        data,
        shard,
        tensor,
        pipeline,
        context,
        step_secs,
        bytes,
        fits: bytes <= work.budget,
        runs: tensor * pipeline * context == 1,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::error::Result;
    use crate::sizing::hardware::DeviceSheet;

    fn found(hidden: usize, layers: usize, heads: usize, on: &str, wanted: [usize; 5]) -> Result<bool> {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 51200, "hidden_size": {hidden}, "intermediate_size": {},
            "num_hidden_layers": {layers}, "num_attention_heads": {heads}, "num_key_value_heads": {heads}}}"#,
            4 * hidden
        );
        let config = ModelConfig::from_json(&text, "config.json")?;
        let hardware = Hardware::parse(on, Path::new("."))?;
        let rates = ComputeRates::of_sheet(&hardware.device, true);
        let work = SplitWork {
            config: &config,
            parameters: linear_weights(&config) as u64,
            flops: 6.0 * linear_weights(&config) as f64,
            row: 2048.0,
            tokens: 1536.0 * 2048.0,
            activation_bytes: 1e6,
            budget: 72_000_000_000,
        };
        let (all, refused) = splits(&work, &hardware, &rates);
        assert!(all.iter().all(|split| {
            let ParallelSplit { data, shard, tensor, pipeline, context, .. } = *split;
            data * shard * tensor * pipeline * context == hardware.devices()
        }));
        assert!(refused.iter().any(|refused| refused.what == "tensor = 16"
            || refused.what == "tensor = 20"
            || refused.what == "tensor = 32"));
        let [t, p, d] = [wanted[0], wanted[1], wanted[2]];
        Ok(all.iter().any(|s| s.tensor == t && s.pipeline == p && s.data * s.shard == d && s.context == 1))
    }

    /// Four hosts of eight cards, 15 GB/s among them, 1.25 GB/s between hosts: what leaves a host at once shares its network.
    #[test]
    fn a_split_takes_what_its_rings_take() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let hardware = Hardware::parse("8x4090*4", Path::new("."))?;
        assert_eq!([hardware.device.link_gbps, hardware.device.network_gbps], [15.0, 1.25]);
        // Rates without bounds leave communication alone.
        let sheet = DeviceSheet { bf16_tflops: 1e12, memory_gbps: 1e12, ..hardware.device.clone() };
        let rates = ComputeRates::of_sheet(&sheet, true);
        let (parameters, row, rows) = (6_738_415_616, 2048.0, 64.0);
        let work = SplitWork {
            config: &config,
            parameters,
            flops: 6.0 * parameters as f64,
            row,
            tokens: rows * row,
            activation_bytes: 1e6,
            budget: u64::MAX,
        };
        let near = |wanted, by_hand: f64| {
            let secs = modelled(&work, &hardware, &rates, wanted).step_secs;
            assert!((secs / by_hand - 1.0).abs() < 1e-3, "{wanted:?}: {secs}, not {by_hand}");
        };
        let p = parameters as f64;
        let hidden = row * 4096.0 * 2.0;
        // Sums of 3/4 of an eighth of f32 gradients, twice, by eight cards of a host at once; each of 16 micro-batches sums
        // hidden states four times in each of 32 layers, twice 7/8 of them.
        let sums = 2.0 * 0.75 * p / 8.0 * 4.0 * 8.0 / 1.25e9;
        let tensor = 4.0 * 2.0 * 7.0 / 8.0 * hidden * 16.0 * 32.0 / 15e9;
        near([4, 1, 8, 1, 1], sums + tensor);
        // Four stages of 8 ranks each: 64 / 8 micro-batches go over a border and back, from eight cards of a host at once; a
        // quarter of the gradients is summed inside of a host.
        let borders = 2.0 * hidden * 8.0 * 8.0 / 1.25e9;
        near([8, 1, 1, 4, 1], borders + 2.0 * 7.0 / 8.0 * p / 4.0 * 4.0 / 15e9);
        // Two parts of each sequence by four of each product in a host: as many sums of half the hidden states, keys and values of a
        // quarter of the heads once round three times, and a quarter of the gradients summed over both parts.
        let half = hidden / 2.0;
        let tensor = 4.0 * 2.0 * 3.0 / 4.0 * half * 16.0 * 32.0 / 15e9;
        let keys = 3.0 * 2.0 * half / 4.0 * 16.0 * 32.0 / 15e9;
        let parts = 2.0 * 0.5 * p / 4.0 * 4.0 / 15e9;
        near([4, 1, 4, 1, 2], 2.0 * 0.75 * p / 4.0 * 4.0 * 8.0 / 1.25e9 + tensor + keys + parts);
        // Two groups of 16, which gather over two hosts in one ring: weights twice and gradients once, twice (64 / 32
        // micro-batches); a sixteenth of the gradients is summed with the other group, by eight cards of a host at once.
        let gathers = 2.0 * 15.0 / 16.0 * p * 8.0 / 1.25e9;
        near([2, 16, 1, 1, 1], gathers + 2.0 * 2.0 * 0.5 * p / 16.0 * 4.0 * 8.0 / 1.25e9);
        Ok(())
    }

    /// Splits that are published: tensor × pipeline × data.
    #[test]
    fn published_splits_are_in_the_lists() -> Result<()> {
        assert!(found(12288, 96, 96, "8xA100-80GB*100", [8, 4, 25, 0, 0])?);
        assert!(found(12288, 96, 96, "8xA100-80GB*384", [8, 12, 32, 0, 0])?);
        assert!(found(8192, 80, 64, "8xA100-80GB*8", [8, 2, 4, 0, 0])?);
        Ok(())
    }
}
