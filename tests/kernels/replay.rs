//! Passes through the blocks of models as a CUDA graph would repeat them: their recorded launches,
//! run again over other inputs and other adapters in the same memory, give the bits of a pass. So
//! everything that such a pass computes goes through the driver, and no number by value depends on
//! data. That holds for equal spans: other ones are uploaded inside a block.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/address_pool.rs"]
mod address_pool;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/exhaustive.rs"]
mod exhaustive;
mod graphs;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/logits.rs"]
mod logits;
mod panels;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use finetune::data::{Batch, Sample};
use finetune::engine::{Engine, MicroStep, Stage, StageGradients, StageInput, StageOutput};
use finetune::error::Result;
use finetune::loading::{AdapterSetup, BaseModel, EngineOptions, Trains};
use finetune::model::{
    BlockWeights, Carried, CarriedGradients, ChannelMixerWeights, DropoutContext, MergedLinear, ModelConfig,
    TokenMixerWeights, parameters,
};
use finetune::objectives::{CrossEntropy, StepTotals};
use finetune::ops::{BlockGraphs, record, selftest};
use finetune::recipe::enums::{Attention, Recompute};
use finetune::recipe::{AdapterSection, TargetModules};
use finetune::runtime::TensorMut;
use finetune::runtime::copy::copy_into;
use finetune::runtime::rng::RngStream;
use finetune::weights::MODEL_FILE;
use serde_json::{Map, Value, json};

/// Frees nothing once [`KEEPS`] is set, so that recorded addresses stay those of their tensors.
struct KeepingAllocator;

static KEEPS: AtomicBool = AtomicBool::new(false);

// SAFETY: all calls go to an allocator, or leave memory allocated.
unsafe impl GlobalAlloc for KeepingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by this function's contract.
        unsafe { address_pool::alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by this function's contract.
        unsafe { address_pool::alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if !KEEPS.load(Relaxed) {
            // SAFETY: by this function's contract.
            unsafe { address_pool::dealloc(memory, layout) }
        }
    }
}

#[global_allocator]
static ALLOCATOR: KeepingAllocator = KeepingAllocator;

/// Runs one test at a time: planned failures and the allocator are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tokens of the micro-batch, in two sequences: enough for adapters with one input to be a group.
const TOKENS: usize = 80;

fn normal(name: &str, shape: &[usize], dtype: DType) -> Tensor {
    let stream = RngStream::new(0).named(name);
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>() as u64).map(|i| 0.1 * stream.normal(i)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Overwrites a tensor in its memory.
fn refill(tensor: &Tensor, name: &str) {
    let values = normal(name, tensor.dims(), tensor.dtype());
    copy_into(&TensorMut::new(tensor.clone()), &values).unwrap();
}

/// Returns A and B of the adapters in attention and in an MLP.
fn adapters(block: &BlockWeights) -> Vec<Tensor> {
    let TokenMixerWeights::Attention(attention) = &block.token_mixer else { return Vec::new() };
    let mlp: &[&MergedLinear] = match &block.channel_mixer {
        ChannelMixerWeights::GatedMlp(mlp) => &[&mlp.gate_up, &mlp.down],
        ChannelMixerWeights::PlainMlp(mlp) => &[&mlp.up, &mlp.down],
        _ => &[],
    };
    let linears = [&attention.qkv, &attention.o].into_iter().chain(mlp.iter().copied());
    let loras = linears.flat_map(|linear| &linear.layers).filter_map(|layer| layer.lora.as_ref());
    loras.flat_map(|lora| [lora.a.value.clone(), lora.b.value.clone()]).collect()
}

/// The blocks of a model after its first one, and their inputs.
struct Blocks {
    engine: Engine,
    batch: Batch,
    x: Tensor,
    dy: Tensor,
    recompute: Recompute,
    /// True if the adapters have dropout.
    drops: bool,
    /// The number of the step.
    step: Cell<u64>,
    /// The graphs of the blocks, if they have them.
    graphs: Option<BlockGraphs>,
}

impl Blocks {
    fn new(base: BaseModel, dropout: f64, recompute: Recompute) -> Self {
        let section = AdapterSection {
            target_modules: TargetModules::AllLinear,
            r: 8,
            lora_dropout: dropout,
            ..AdapterSection::default()
        };
        let adapter = AdapterSetup::from_recipe(&section, ("base", &base.config), &[]).unwrap();
        // Attention has kernels in bf16 alone.
        let dtype = DType::BF16;
        let options = EngineOptions::alone(Device::Cpu, dtype, Attention::Flash, 0);
        let engine = base.engine(Trains::Adapter(&adapter), &options).unwrap();
        let batch = batch(50);
        let shape = [TOKENS, engine.config.hidden_size];
        let (x, dy) = (normal("x", &shape, dtype), normal("dy", &shape, dtype));
        let (drops, step) = (dropout > 0.0, Cell::new(0));
        let blocks = Blocks { engine, batch, x, dy, recompute, drops, step, graphs: None };
        blocks.refill("first");
        blocks
    }

    /// Begins another step: overwrites the inputs and the adapters, and clears the gradients.
    fn refill(&self, name: &str) {
        self.step.set(self.step.get() + 1);
        refill(&self.x, &format!("x {name}"));
        refill(&self.dy, &format!("dy {name}"));
        for layer in 1..self.engine.config.num_layers() {
            let block = self.engine.store.block(layer, None).unwrap();
            for (i, values) in adapters(&block).iter().enumerate() {
                refill(values, &format!("adapter {layer} {i} {name}"));
            }
        }
        self.engine.store.zero_gradients().unwrap();
    }

    /// Runs forward and backward. Returns the output and the gradient of the input.
    fn pass(&self) -> Result<[Tensor; 2]> {
        self.run_pass(&self.batch)
    }

    fn run_pass(&self, batch: &Batch) -> Result<[Tensor; 2]> {
        let layers = 1..self.engine.config.num_layers();
        let stage = Stage { blocks: layers, has_embedding: false, has_head: false };
        let dropout = || DropoutContext { stream: RngStream::new(self.step.get()), first_token: 0 };
        let step = MicroStep {
            objective: &CrossEntropy,
            scale: 1.0,
            totals: StepTotals::default(),
            reference: None,
            recompute: self.recompute,
            dropout: self.drops.then(dropout),
            noise: None,
            balance: None,
            last: true,
            graphs: self.graphs.as_ref(),
        };
        let input = StageInput { hidden: self.x.clone(), carried: Carried::new(None) };
        let (output, state) = self.engine.forward(&stage, batch, Some(input), step)?;
        let StageOutput::Hidden(StageInput { hidden: y, .. }) = output else { panic!("a stage with a head") };
        let behind = StageGradients { hidden: self.dy.clone(), carried: CarriedGradients::new(false) };
        let gradients = self.engine.backward(&stage, batch, state, Some(behind), step)?;
        Ok([y, gradients.unwrap().hidden])
    }

    /// Returns the bits of the results of a pass and of all gradients.
    fn bits(&self, results: &[Tensor; 2]) -> Vec<u32> {
        let gradients = self.engine.store.trainable().map(|bucket| bucket.gradient().unwrap().unwrap());
        let all = results.iter().cloned().chain(gradients);
        let bits = |tensor: Tensor| -> Vec<u32> {
            let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
        };
        all.flat_map(bits).collect()
    }

    /// Returns whether the recorded launches of a pass give the bits of another pass, and whether
    /// both passes launch the same functions with the same threads, sizes and numbers.
    fn replays(&self) -> [bool; 2] {
        // Tables that the first pass uploads.
        self.pass().unwrap();
        let (first, recorded) = record(|| self.pass().unwrap());
        self.refill("second");
        let (second, again) = record(|| self.pass().unwrap());
        let (before, wanted) = (self.bits(&first), self.bits(&second));
        assert_ne!(before, wanted, "other inputs give other results");
        self.engine.store.zero_gradients().unwrap();
        // SAFETY: nothing is freed.
        unsafe { recorded.replay().unwrap() };
        [self.bits(&first) == wanted, recorded.lines() == again.lines()]
    }
}

/// Returns a batch of two sequences, of which the first has `len` tokens.
fn batch(len: usize) -> Batch {
    let segments = vec![
        Sample { start: 0, len, ..Sample::default() },
        Sample { start: len, len: TOKENS - len, ..Sample::default() },
    ];
    Batch {
        ids: vec![5; TOKENS],
        targets: vec![5; TOKENS],
        samples: segments,
        num_samples: 1,
        ..Batch::default()
    }
}

/// Writes a model with random weights. Its heads are as wide as those of attention's kernels.
fn write_model(folder: &Path, family: &str) {
    let config = format!(
        r#"{{{family}, "vocab_size": 8, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128}}"#
    );
    let (mut header, mut data) = (Map::new(), Vec::new());
    for spec in parameters(&ModelConfig::from_json(&config, "config.json").unwrap()) {
        let values = normal(&spec.name, &spec.shape, DType::F32).flatten_all().unwrap();
        let start = data.len();
        data.extend(values.to_vec1::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes));
        let offsets = [start, data.len()];
        header.insert(spec.name, json!({ "dtype": "F32", "shape": spec.shape, "data_offsets": offsets }));
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join(MODEL_FILE), [&length[..], header.as_bytes(), &data].concat()).unwrap();
}

/// Returns the blocks of a family.
fn blocks(family: &str, dropout: f64, recompute: Recompute) -> Blocks {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), family);
    Blocks::new(logits::base(folder.path()), dropout, recompute)
}

/// Returns whether the blocks of a family replay, and whether their launches are equal.
fn replays(family: &str, dropout: f64, recompute: Recompute) -> [bool; 2] {
    blocks(family, dropout, recompute).replays()
}

/// Families whose blocks go through the driver as a whole.
const WHOLE: [&str; 9] = [
    r#""model_type": "llama", "attention_bias": true, "mlp_bias": true"#,
    r#""model_type": "mistral""#,
    r#""model_type": "qwen2""#,
    r#""model_type": "qwen3""#,
    r#""model_type": "phi3""#,
    r#""model_type": "gemma2""#,
    r#""model_type": "gemma3_text""#,
    r#""model_type": "starcoder2""#,
    r#""model_type": "granite", "residual_multiplier": 0.5"#,
];
/// Families with work by candle in their blocks.
const OTHERS: [&str; 3] = [
    r#""model_type": "olmo2""#,
    r#""model_type": "gpt_neox", "rotary_pct": 0.5"#,
    r#""model_type": "qwen3_5_text", "full_attention_interval": 1, "partial_rotary_factor": 0.5"#,
];

#[test]
fn recorded_passes_replay() {
    let _alone = alone();
    selftest::emulate().unwrap();
    KEEPS.store(true, Relaxed);
    let mut bad = Vec::new();
    for (families, whole) in [(&WHOLE[..], true), (&OTHERS, false)] {
        for family in families {
            for recompute in [Recompute::None, Recompute::Block] {
                let actual = replays(family, 0.0, recompute);
                if actual != [whole, true] {
                    bad.push((family, recompute, actual));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
    // The streams of dropout are numbers that change with each step.
    assert_eq!(replays(WHOLE[0], 0.1, Recompute::None), [false, false]);
    replays_read_the_lists_of_their_spans();
    KEEPS.store(false, Relaxed);
}

/// A pass over other spans uploads their lists inside its first block, so a replay reads the old
/// ones.
fn replays_read_the_lists_of_their_spans() {
    let blocks = blocks(WHOLE[0], 0.0, Recompute::None);
    blocks.pass().unwrap();
    let (first, recorded) = record(|| blocks.pass().unwrap());
    blocks.engine.store.zero_gradients().unwrap();
    let (second, again) = record(|| blocks.run_pass(&batch(20)).unwrap());
    let wanted = blocks.bits(&second);
    blocks.engine.store.zero_gradients().unwrap();
    // SAFETY: nothing is freed.
    unsafe { recorded.replay().unwrap() };
    assert_ne!(blocks.bits(&first), wanted);
    assert!(again.uploads() > recorded.uploads(), "the lists of tiles are uploaded again");
}
