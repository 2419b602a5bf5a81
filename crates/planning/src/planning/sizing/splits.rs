//! The ways to split a training run over ranks along data, shard, tensor, pipeline and context,
//! ranked by modelled time.
//!
//! Axes have the order of [`MeshAxis`](crate::parallel::MeshAxis), the one with the most
//! communication fastest. So tensor and context parallelism stay within a host, and pipeline stages
//! span hosts. The engine runs data and shard; the output marks the others as modelled only. The
//! model follows trainers that have them (Megatron-LM):
//!
//! - With tensor or pipeline parallelism, all copies of a weight share the optimizer's states and
//!   the update.
//! - In a pipeline, a stage gathers its weights once a step, so data and shard are one axis,
//!   written as data.
//! - A ring's latency grows with its ranks (`Hardware::ring_latency`).
//! - Keys and values circulate between the parts of a sequence and overlap only with attention.
//!   Parts of short rows are refused.

use std::collections::BTreeSet;

use serde::Serialize;

use super::hardware::Hardware;
use super::step_time::{ENDS, OVERLAP};
use crate::model::{ModelConfig, TokenMixer};

/// Bytes of an activation or a gradient that is sent.
const BF16: f64 = 2.0;
/// Fewest tokens of a row that are worth splitting: NeMo's and Megatron's recipes split none below
/// 8k.
const LONG_ROW: usize = 8192;

/// The ranks along each axis, and the modelled cost of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ParallelSplit {
    /// Copies of the model, or of its shards.
    pub data: usize,
    /// Ranks that share one copy (FSDP).
    pub shard: usize,
    /// Ranks that share each product.
    pub tensor: usize,
    /// Stages of layers.
    pub pipeline: usize,
    /// Parts of a sequence.
    pub context: usize,
    /// Modelled seconds of a step of the same global batch.
    pub step_secs: f64,
    /// Modelled bytes a rank.
    pub bytes: u64,
    /// True if the bytes fit the device.
    pub fits: bool,
    /// True if the engine supports the split.
    pub runs: bool,
}

/// An impossible number of ranks along an axis, and the reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RefusedSplit {
    /// The split, such as `tensor = 16`.
    pub what: String,
    /// The reason for refusing it.
    pub why: String,
}

/// The work to split: bytes and seconds of one copy of the model on one device.
#[derive(Debug, Clone, Copy)]
pub struct SplitWork<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// Bytes of all weights as products read them.
    pub values: f64,
    /// Bytes of the gradients of trained parameters.
    pub gradients: f64,
    /// Bytes of masters and moments.
    pub states: f64,
    /// Seconds of a token, forward and backward.
    pub token_secs: f64,
    /// Seconds of attention among them.
    pub attention_secs: f64,
    /// Seconds of a micro-batch for dequantizing.
    pub dequantize_secs: f64,
    /// Seconds in which the host launches the kernels of a micro-batch.
    pub launch_secs: f64,
    /// Seconds of the update of all trained parameters.
    pub update_secs: f64,
    /// Tokens of a row.
    pub row: f64,
    /// Tokens of a step over all ranks.
    pub tokens: f64,
    /// Bytes of a token's activations on all layers, as the recipe keeps them.
    pub activation_bytes: f64,
    /// Bytes of a token's state beside the hidden states, and of its gradients.
    pub carried_bytes: f64,
    /// Bytes available to a rank.
    pub budget: u64,
}

/// Returns every split of all devices of `hardware` in the order of `sort`, and the refused
/// numbers.
pub fn splits(work: &SplitWork<'_>, hardware: &Hardware) -> (Vec<ParallelSplit>, Vec<RefusedSplit>) {
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
    let context = allowed("context", &|size| context_refusal(work, size));
    for (&t, &p) in tensor.iter().flat_map(|t| pipeline.iter().map(move |p| (t, p))) {
        for &c in &context {
            if !ranks.is_multiple_of(t * p * c) {
                continue;
            }
            let rest = ranks / (t * p * c);
            let shards = divisors(rest).filter(|shard| p == 1 || *shard == 1);
            all.extend(shards.map(|shard| modelled(work, hardware, [rest / shard, shard, t, p, c])));
        }
    }
    sort(&mut all);
    (all, refused)
}

/// Sorts splits: fitting ones first, each group by time. Of splits that differ only in data and
/// shard, the fastest comes first; the rest follow at the end of the group.
pub(super) fn sort(all: &mut Vec<ParallelSplit>) {
    let by_time = |a: &ParallelSplit, b: &ParallelSplit| {
        (!a.fits).cmp(&!b.fits).then(a.step_secs.total_cmp(&b.step_secs))
    };
    all.sort_by(by_time);
    let mut seen = BTreeSet::new();
    let ranked =
        all.drain(..).map(|split| (!seen.insert((split.tensor, split.pipeline, split.context)), split));
    let mut ranked: Vec<(bool, ParallelSplit)> = ranked.collect();
    ranked.sort_by_key(|(is_rest, split)| (!split.fits, *is_rest));
    all.extend(ranked.into_iter().map(|(_, split)| split));
}

fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |size| n.is_multiple_of(*size))
}

fn tensor_refusal(config: &ModelConfig, hardware: &Hardware, size: usize) -> Option<String> {
    let mut key_heads = config.attentions().map(|attention| attention.heads.num_kv_heads);
    let uneven = key_heads.find(|count| !count.is_multiple_of(size));
    if size > hardware.per_host {
        return Some(format!(
            "it would cross hosts of {} devices: every layer waits for four sums",
            hardware.per_host
        ));
    }
    let width = config.experts().map(|experts| experts.width).min().unwrap_or(config.intermediate_size);
    match () {
        () if !config.heads.num_heads.is_multiple_of(size) => {
            Some(format!("it does not divide {} heads", config.heads.num_heads))
        }
        () if uneven.is_some() => uneven.map(|count| format!("it does not divide {count} key-value heads")),
        () if config.gated_deltas().any(|delta| !delta.heads.num_key_heads.is_multiple_of(size)) => {
            Some("it does not divide the key heads of Gated DeltaNet".to_owned())
        }
        () if !width.is_multiple_of(size) => Some(format!("it does not divide the MLP's {width} columns")),
        () => None,
    }
}

fn pipeline_refusal(config: &ModelConfig, size: usize) -> Option<String> {
    let layers = config.num_layers();
    (!layers.is_multiple_of(size)).then(|| format!("it does not divide {layers} layers"))
}

fn context_refusal(work: &SplitWork<'_>, size: usize) -> Option<String> {
    // Each rank takes a piece from the front and one from the back, so that all see equally many
    // keys.
    let pieces = 2 * size;
    let row = work.row as usize;
    match () {
        () if size == 1 => None,
        () if work.config.gated_deltas().next().is_some() => {
            Some("a recurrence passes its state from part to part of a row".to_owned())
        }
        () if work
            .config
            .blocks
            .iter()
            .any(|block| matches!(block.token_mixer, TokenMixer::ShortConv(_))) =>
        {
            Some("a convolution reads the last tokens of the part before".to_owned())
        }
        () if row < LONG_ROW => {
            Some(format!("context parallelism pays from rows of {LONG_ROW} tokens, and these have {row}"))
        }
        () if !row.is_multiple_of(pieces) || row / pieces < 128 => Some(format!(
            "rows of {row} tokens do not split into {pieces} equal pieces of 128 tokens or more"
        )),
        () => None,
    }
}

/// Models the time and memory of a split.
fn modelled(
    work: &SplitWork<'_>,
    hardware: &Hardware,
    [data, shard, tensor, pipeline, context]: [usize; 5],
) -> ParallelSplit {
    let runs = tensor * pipeline * context == 1;
    let mut split = ParallelSplit { data, shard, tensor, pipeline, context, runs, ..Default::default() };
    let stage = SplitShare::new(work, hardware, split);
    let [d, s, t, p] = [data, shard, tensor, pipeline].map(|n| n as f64);
    let of_stage = 1.0 / (t * p);
    let turns = stage.micro_batches;
    let compute = (stage.own_tokens * work.token_secs + turns * work.dequantize_secs * of_stage)
        .max(turns * work.launch_secs / p);
    let bubble = (p - 1.0) / (turns + p - 1.0);
    let sent = stage.data_secs() + stage.pipeline_secs();
    let hidden = (sent - OVERLAP * compute).max(sent.min(ENDS * compute));
    let exposed = hidden + stage.tensor_secs() + stage.context_secs();
    // Copies that share the states and the update.
    let sharers = if runs { s } else { d * s };
    split.step_secs = compute / (1.0 - bubble) + exposed + work.update_secs * of_stage / sharers;
    // A stage keeps up to as many micro-batches as the pipeline has stages.
    let activations = work.activation_bytes * stage.micro_tokens * of_stage * p.min(turns);
    // A sharded model holds one whole block while it gathers the next.
    let blocks = if shard > 1 { 2.0 * stage.values } else { 0.0 };
    let persistent = (stage.values + stage.gradients) * stage.layers / s + work.states * of_stage / sharers;
    split.bytes = (persistent + activations + blocks) as u64;
    split.fits = split.bytes <= work.budget;
    split
}

/// The part of a step that one rank of a split computes.
struct SplitShare<'a> {
    work: &'a SplitWork<'a>,
    hardware: &'a Hardware,
    /// The ranks along each axis; its cost is not known yet.
    split: ParallelSplit,
    /// Micro-batches of a replica, of a row each.
    micro_batches: f64,
    /// Tokens of a row on this rank.
    micro_tokens: f64,
    /// Tokens of the step, scaled by the part of the model on this rank.
    own_tokens: f64,
    /// Layers of the rank.
    layers: f64,
    /// Bytes of a layer's weights, and of its gradients, without sharding.
    values: f64,
    gradients: f64,
}

impl<'a> SplitShare<'a> {
    fn new(work: &'a SplitWork<'a>, hardware: &'a Hardware, split: ParallelSplit) -> Self {
        let ParallelSplit { data, shard, tensor, pipeline, context, .. } = split;
        let of_model = 1.0 / (tensor * pipeline) as f64;
        let micro_batches = (work.tokens / work.row / (data * shard) as f64).max(1.0);
        let micro_tokens = work.row / context as f64;
        let layers = work.config.num_layers() as f64 / pipeline as f64;
        let own_tokens = micro_batches * micro_tokens * of_model;
        let [values, gradients] = [work.values, work.gradients].map(|bytes| bytes * of_model / layers);
        SplitShare {
            work,
            hardware,
            split,
            micro_batches,
            micro_tokens,
            own_tokens,
            layers,
            values,
            gradients,
        }
    }

    /// Returns the bytes of a micro-batch's hidden states.
    fn hidden(&self) -> f64 {
        self.micro_tokens * self.work.config.hidden_size as f64 * BF16
    }

    /// Returns the seconds of four sums of hidden states per layer and micro-batch, which nothing
    /// overlaps.
    fn tensor_secs(&self) -> f64 {
        let sums = 4.0 * self.micro_batches * self.layers;
        sums * sum_secs(self.hardware, self.hidden(), [1, self.split.tensor])
    }

    /// Returns the seconds by which the circulation of keys and values exceeds attention. Backward
    /// circulates their gradients too.
    fn context_secs(&self) -> f64 {
        let ParallelSplit { tensor, context, .. } = self.split;
        let width = self.work.config.heads.kv_width() as f64 / tensor as f64;
        let of_row = 2.0 * self.work.row * width * BF16;
        let rounds = 3.0 * self.micro_batches * self.layers;
        let around = rounds * gather_secs(self.hardware, of_row, [tensor, context]);
        (around - self.own_tokens * self.work.attention_secs).max(0.0)
    }

    /// Returns the seconds to send the hidden states of each micro-batch, and the state beside
    /// them, to the next stage, and their gradients back.
    fn pipeline_secs(&self) -> f64 {
        let ParallelSplit { data, shard, tensor, pipeline, context, .. } = self.split;
        let both = 2.0 * self.hidden() + self.micro_tokens * self.work.carried_bytes;
        let sent = if pipeline > 1 { both * self.micro_batches } else { 0.0 };
        self.hardware.ring_secs(sent, tensor * context * shard * data, pipeline)
    }

    /// Returns the seconds to gather weights and to sum gradients over all copies of the weights:
    /// those of data, and of the parts of a sequence.
    fn data_secs(&self) -> f64 {
        let ParallelSplit { data, shard, tensor, context, runs, .. } = self.split;
        let (hardware, s) = (self.hardware, shard as f64);
        let of_shards = [tensor * context, shard];
        let of_copies = [tensor * context * shard, data];
        // Weights twice and gradients once, for each micro-batch.
        let sharded = 2.0 * gather_secs(hardware, self.values, of_shards)
            + gather_secs(hardware, self.gradients, of_shards);
        let mut summed = sum_secs(hardware, self.gradients / s, [tensor, context]);
        let mut updated = 0.0;
        // The engine sums over data; copies that share the update reduce gradients and gather
        // weights.
        if runs {
            summed += sum_secs(hardware, self.gradients / s, of_copies);
        } else {
            summed += gather_secs(hardware, self.gradients / s, of_copies);
            updated += gather_secs(hardware, self.values / s, of_copies);
        }
        let sums = if shard > 1 { self.micro_batches } else { 1.0 };
        self.layers * (self.micro_batches * sharded + sums * summed + updated)
    }
}

/// Returns the seconds of a gather or reduction of `bytes`, one trip around a ring of `size` ranks
/// that are `stride` apart.
fn gather_secs(hardware: &Hardware, bytes: f64, [stride, size]: [usize; 2]) -> f64 {
    let passed = bytes * (size as f64 - 1.0) / size as f64;
    hardware.ring_secs(passed, stride, size) + hardware.ring_latency(stride, size)
}

/// Returns the seconds of a sum of `bytes`: two trips around the ring.
fn sum_secs(hardware: &Hardware, bytes: f64, ring: [usize; 2]) -> f64 {
    2.0 * gather_secs(hardware, bytes, ring)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::error::Result;
    use crate::planning::sizing::flops::linear_weights;

    /// Work of bf16 weights with f32 gradients, masters and moments; a token takes `token_secs` of
    /// compute.
    fn work(config: &ModelConfig, parameters: f64, rows: f64, token_secs: f64) -> SplitWork<'_> {
        SplitWork {
            config,
            values: 2.0 * parameters,
            gradients: 4.0 * parameters,
            states: 12.0 * parameters,
            token_secs,
            attention_secs: 0.0,
            dequantize_secs: 0.0,
            launch_secs: 0.0,
            update_secs: 0.0,
            row: 2048.0,
            tokens: rows * 2048.0,
            activation_bytes: 1e6,
            carried_bytes: 0.0,
            budget: 72_000_000_000,
        }
    }

    /// Asserts that the list of a model has a split of tensor × pipeline × data; returns its
    /// position.
    fn rank_of_split(shape: [usize; 3], on: &str, wanted: [usize; 3]) -> Result<usize> {
        let [hidden, layers, heads] = shape;
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 51200, "hidden_size": {hidden}, "intermediate_size": {},
            "num_hidden_layers": {layers}, "num_attention_heads": {heads}, "num_key_value_heads": {heads}}}"#,
            4 * hidden
        );
        let config = ModelConfig::from_json(&text, "config.json")?;
        let hardware = Hardware::parse(on, Path::new("."))?;
        let parameters = linear_weights(&config) as f64;
        let token_secs = 8.0 * parameters / (312e12 * 0.45);
        let (all, refused) = splits(&work(&config, parameters, 1536.0, token_secs), &hardware);
        assert!(all.iter().all(|split| {
            let ParallelSplit { data, shard, tensor, pipeline, context, .. } = *split;
            data * shard * tensor * pipeline * context == hardware.devices()
        }));
        assert!(refused.iter().any(|refused| refused.what == "tensor = 16"
            || refused.what == "tensor = 20"
            || refused.what == "tensor = 32"));
        assert!(
            refused.iter().any(|refused| refused.what.starts_with("context") && refused.why.contains("8192"))
        );
        let of = |split: &ParallelSplit| [split.tensor, split.pipeline, split.data];
        Ok(all.iter().position(|split| split.shard == 1 && of(split) == wanted).unwrap() + 1)
    }

    #[test]
    fn parts_of_rows_are_refused_by_what_mixes_tokens() -> Result<()> {
        for (family, mixer, wanted) in [
            ("lfm2", "conv", "a convolution reads the last tokens"),
            ("qwen3_5_text", "linear_attention", "a recurrence passes its state"),
        ] {
            let text = format!(
                r#"{{"model_type": "{family}", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "layer_types": ["{mixer}", "full_attention"]}}"#
            );
            let config = ModelConfig::from_json(&text, "config.json")?;
            let why = context_refusal(&work(&config, 1e6, 1.0, 1.0), 2).unwrap();
            assert!(why.starts_with(wanted), "{family}: {why}");
        }
        Ok(())
    }

    /// Four hosts of eight cards, 15 GB/s among them, 1.25 GB/s between hosts. All data that leaves
    /// a host shares its network.
    #[test]
    fn a_split_takes_what_its_rings_take() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let hardware = Hardware::parse("8x4090*4", Path::new("."))?;
        assert_eq!([hardware.device.link_gbps, hardware.device.network_gbps], [15.0, 1.25]);
        let p = 6_738_415_616.0;
        // Compute time of 0 leaves only communication.
        let work = work(&config, p, 64.0, 0.0);
        let near = |wanted, by_hand: f64| {
            let secs = modelled(&work, &hardware, wanted).step_secs;
            assert!((secs / by_hand - 1.0).abs() < 1e-6, "{wanted:?}: {secs}, not {by_hand}");
        };
        let hidden = 2048.0 * 4096.0 * 2.0;
        // A call takes 8.4 µs, a hop in a host 5.7 µs and one between hosts 14 µs.
        let in_host = |n: f64| 8.4e-6 + (n - 1.0) * 5.7e-6;
        let between = |n: f64| 8.4e-6 + (n - 1.0) * 14e-6;
        let (link, network) = (15e9, 1.25e9);
        // Gradients of an eighth go to four owners and their weights come back, from eight cards of
        // a host at once. Each of 16 micro-batches sums hidden states four times in each of 32
        // layers, twice 7/8 of them.
        let tensor = 16.0 * 32.0 * 4.0 * 2.0 * (7.0 / 8.0 * hidden / link + in_host(8.0));
        let shared = |n: f64, part: f64| (n - 1.0) / n * 6.0 * p * part;
        let update = shared(4.0, 1.0 / 8.0) * 8.0 / network + 2.0 * 32.0 * between(4.0);
        near([4, 1, 8, 1, 1], update + tensor);
        // Four stages of eight layers on eight ranks each: 64 / 8 micro-batches cross a border and
        // back, from eight cards of a host at once. Gradients and weights of a quarter circulate
        // within a host.
        let borders = 2.0 * hidden * 8.0 * 8.0 / network;
        near([8, 1, 1, 4, 1], borders + shared(8.0, 0.25) / link + 2.0 * 8.0 * in_host(8.0));
        // A state beside the hidden states that, with its gradients, is as large as both.
        let carries = SplitWork { carried_bytes: 2.0 * hidden / work.row, ..work };
        let longer = modelled(&carries, &hardware, [8, 1, 1, 4, 1]).step_secs
            - modelled(&work, &hardware, [8, 1, 1, 4, 1]).step_secs;
        assert!((longer / borders - 1.0).abs() < 1e-6, "{longer} {borders}");
        // Two parts of each sequence by four of each product in a host: as many sums of half the
        // hidden states, keys and values of a quarter of the heads around the ring three times, and
        // a quarter of the gradients summed over both parts.
        let half = hidden / 2.0;
        let tensor = 16.0 * 32.0 * 4.0 * 2.0 * (3.0 / 4.0 * half / link + in_host(4.0));
        let keys = 16.0 * 32.0 * 3.0 * (2.0 * half / 4.0 / link + in_host(2.0));
        let parts = 2.0 * 0.5 * p / 4.0 * 4.0 / link + 2.0 * 32.0 * in_host(2.0);
        let update = shared(4.0, 0.25) * 8.0 / network + 2.0 * 32.0 * between(4.0);
        near([4, 1, 4, 1, 2], update + tensor + keys + parts);
        // Longer attention hides them.
        let hides = SplitWork { attention_secs: 1.0, ..work };
        let secs = modelled(&hides, &hardware, [4, 1, 4, 1, 2]).step_secs;
        assert!((secs / (update + tensor + parts) - 1.0).abs() < 1e-6, "{secs}");
        // Two groups of 16, which gather over two hosts in one ring, 14 hops in a host and one
        // between: weights twice and gradients once, twice (64 / 32 micro-batches). A sixteenth of
        // the gradients is summed with the other group, from eight cards of a host at once.
        let gathers =
            2.0 * 15.0 / 16.0 * p * 8.0 / network + 2.0 * 3.0 * 32.0 * (8.4e-6 + 14.0 * 5.7e-6 + 14e-6);
        let sums = 2.0 * 2.0 * (0.5 * p / 16.0 * 4.0 * 8.0 / network + 32.0 * between(2.0));
        near([2, 16, 1, 1, 1], gathers + sums);
        Ok(())
    }

    /// Published splits: tensor × pipeline × data.
    #[test]
    fn published_splits_are_in_the_lists() -> Result<()> {
        let gpt3 = [12288, 96, 96];
        assert!(rank_of_split(gpt3, "8xA100-80GB*100", [8, 4, 25])? <= 10);
        assert!(rank_of_split(gpt3, "8xA100-80GB*384", [8, 12, 32])? <= 10);
        rank_of_split([8192, 80, 64], "8xA100-80GB*8", [8, 2, 4])?;
        Ok(())
    }
}
