//! Work that a step requests from a GPU, counted by a driver that executes nothing: launches,
//! uploads, waits, the minimum time on the fastest cards, and memory beside its plan. Weights are
//! sparse files, so the models are as wide as real ones and have few layers.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stdout, reason = "the figures, for who asks with --nocapture")]

mod published_models;
mod work_table;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use candle_core::Device;
use finetune::collective::SingleRank;
use finetune::data::Step;
use finetune::engine::Trainer;
use finetune::loading::Resolver;
use finetune::model::{AdapterSwitch, ModelConfig, parameters};
use finetune::ops::{GEMM_WORKSPACE, GpuWork, count_process, requested_work};
use finetune::planning::{MemoryBudget, Plan, WorldSize};
use finetune::recipe::{Recipe, RecipeLayers, RecipeText};
use finetune::report::{Terminal, Verbosity};
use finetune::training::trainer;
use serde_json::{Map, Value, json};

/// Adds up allocations: a GPU's memory would hold the same tensors.
struct CountingAllocator;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: by this function's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn count(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The widths of a model.
struct Shape {
    name: &'static str,
    family: &'static str,
    hidden: usize,
    intermediate: usize,
    heads: [usize; 3],
    vocab: usize,
    layers: usize,
}

/// The widths of Qwen3-8B.
const WIDE: Shape = Shape {
    name: "as wide as Qwen3-8B",
    family: "qwen3",
    hidden: 4096,
    intermediate: 12_288,
    heads: [32, 8, 128],
    vocab: 151_936,
    layers: 4,
};

/// A family with a norm of the output of `down_proj`.
const POST_NORM: Shape = Shape {
    name: "a small Gemma 2",
    family: "gemma2",
    hidden: 256,
    intermediate: 512,
    heads: [4, 2, 64],
    vocab: 512,
    layers: 4,
};

/// The rank of adapters.
const RANK: usize = 16;

/// Products of a block's forward under LoRA: one of the weights with each of four inputs, one of
/// all A with each input, and one of each B.
const FORWARD_PRODUCTS: u64 = 4 + 4 + 7;
/// Products of a block's step: backward has one of the weights for each input; for the adapters one
/// for each du and each dB, and for each input one for the dA and one for dx.
const PRODUCTS: u64 = FORWARD_PRODUCTS + 4 + 7 + 7 + 4 + 4;
/// Products that recomputing repeats: those of forward without `down_proj` and its B.
const RECOMPUTED_PRODUCTS: u64 = FORWARD_PRODUCTS - 2;

/// Copies of the A of q, k and v, and of gate and up, each to one matrix.
const COPIES: u64 = 3 + 2;
/// Launches of a block's forward in QLoRA: two norms, a rotation, attention, a gate, the
/// dequantization of seven weights, and the copies.
const FORWARD_LAUNCHES: u64 = 2 + 1 + 1 + 1 + 7 + COPIES;
/// Launches of a block's step. Backward has no launches for the gate and the norms themselves,
/// which the launches of their gradients compute again.
const LAUNCHES: u64 = 34 + 2 * COPIES;
/// Launches that recomputing repeats: backward reads the same dequantized weights.
const RECOMPUTED_LAUNCHES: u64 = FORWARD_LAUNCHES - 7;
/// Launches of a block's forward on the second queue, beside the products: the dequantization of
/// all weights but those of the first product.
const FORWARD_BESIDE: u64 = 4;
/// The same of backward, whose first product is that of `down_proj`. Recomputing keeps the panels
/// of all other products, which are made before the first one.
const BACKWARD_BESIDE: u64 = 6;

/// The layers of Qwen3-8B.
const LAYERS: usize = 36;

/// Shapes whose plans are compared: the loss sets the peak of the first, blocks that of the others.
/// The last has Gated DeltaNet in three of four layers.
const PLANNED: [Shape; 4] = [
    Shape {
        name: "as wide as Qwen3-0.6B",
        family: "qwen3",
        hidden: 1024,
        intermediate: 3072,
        heads: [16, 8, 128],
        vocab: 151_936,
        layers: 3,
    },
    Shape {
        name: "as wide as Qwen3-1.7B, another vocabulary",
        family: "qwen3",
        hidden: 2048,
        intermediate: 6144,
        heads: [16, 8, 128],
        vocab: 32_000,
        layers: 4,
    },
    Shape {
        name: "as wide as Llama-3.2-3B, another vocabulary",
        family: "llama",
        hidden: 3072,
        intermediate: 8192,
        heads: [24, 8, 128],
        vocab: 16_000,
        layers: 3,
    },
    Shape {
        name: "as wide as Qwen3.5-4B, another vocabulary",
        family: "qwen3_5_text",
        hidden: 2560,
        intermediate: 9216,
        heads: [16, 4, 256],
        vocab: 16_000,
        layers: 4,
    },
];

impl Shape {
    /// Returns its config.json.
    fn config(&self) -> Value {
        let [heads, kv_heads, head_dim] = self.heads;
        json!({
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": false,
        })
    }
}

/// Writes a model with zero weights: headers and sparse data. If `packed`, its linear layers are in
/// FP8, with a scale for each block of 128 x 128.
fn write_model(folder: &Path, config: &Value, packed: bool) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden.join(file), folder.join(file)).unwrap();
    }
    let mut config = config.clone();
    let specs = parameters(&ModelConfig::from_json(&config.to_string(), "config.json").unwrap());
    if packed {
        config["quantization_config"] = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut at) = (Map::new(), 0);
    let mut add = |name: String, dtype: &str, shape: &[usize], size: usize| {
        let end = at + size * shape.iter().product::<usize>();
        header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        at = end;
    };
    for spec in specs {
        if packed && spec.name.ends_with("proj.weight") {
            let blocks: Vec<usize> = spec.shape.iter().map(|length| length.div_ceil(128)).collect();
            add(format!("{}_scale_inv", spec.name), "F32", &blocks, 4);
            add(spec.name, "F8_E4M3", &spec.shape, 1);
        } else {
            add(spec.name, "BF16", &spec.shape, 2);
        }
    }
    let header = Value::Object(header).to_string();
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend(header.as_bytes());
    let path = folder.join("model.safetensors");
    std::fs::write(&path, &start).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().set_len((start.len() + at) as u64).unwrap();
}

/// The method of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Qlora,
    /// Keeps the weights in bf16 beside their codes.
    QloraCopy,
    /// Multiplies by the weights in fp8: quantized in blocks, or bf16.
    QloraFp8,
    LoraFp8,
    DoraFp8,
    Lora,
    /// Over a base in FP8 that stays packed in memory.
    LoraPacked,
    Dora,
    Full,
}

/// The settings of a run.
#[derive(Debug, Clone, Copy)]
struct Run {
    mode: Mode,
    recompute: bool,
    /// The dropout probability of an adapter's input.
    dropout: f64,
    accumulation: usize,
}

/// A planned and loaded run.
struct Loaded {
    plan: Plan,
    trainer: Trainer,
    steps: Vec<Step>,
    /// Bytes allocated before loading.
    before: usize,
    _folder: tempfile::TempDir,
}

fn load(shape: &Shape, run: Run) -> Loaded {
    load_model(&shape.config(), run)
}

/// Loads a run on rows of 2,048 tokens, two to a micro-batch.
fn load_model(config: &Value, run: Run) -> Loaded {
    let Run { mode, recompute, dropout, accumulation } = run;
    let folder = tempfile::tempdir().unwrap();
    let packed = mode == Mode::LoraPacked;
    write_model(folder.path(), config, packed);
    let row =
        json!({ "text": "the quick brown fox jumps over the lazy dog ".repeat(300) }).to_string() + "\n";
    std::fs::write(folder.path().join("rows.jsonl"), row.repeat(2 * 4 * accumulation)).unwrap();
    let kind = if matches!(mode, Mode::Dora | Mode::DoraFp8) { "dora" } else { "lora" };
    let adapter = format!(
        "[adapter]\nkind = \"{kind}\"\nr = {RANK}\nlora_alpha = 32\nlora_dropout = {dropout:?}\n\
         target_modules = \"all-linear\"\n"
    );
    let copy = mode == Mode::QloraCopy;
    let quantization = format!("[quantization]\nkind = \"nf4\"\ndouble_quant = true\nbf16_copy = {copy}\n");
    let text = format!(
        "{}{}[data]\nformat = \"text\"\npacking = false\nmax_seq_len = 2048\n[train]\nmax_steps = 3\n\
         micro_batch_size = 2\ngradient_accumulation_steps = {accumulation}\nrecompute = \"{}\"\n\
         base_products = \"{}\"\n\
         [optimizer]\nlearning_rate = 1e-4\n[model]\ndtype = \"bf16\"\ndequantize = {}\n\
         [checkpoint]\nsave_steps = \"never\"\n",
        if matches!(mode, Mode::Qlora | Mode::QloraFp8) || copy { &quantization } else { "" },
        if mode == Mode::Full { "" } else { &adapter },
        if recompute { "block" } else { "none" },
        if matches!(mode, Mode::QloraFp8 | Mode::LoraFp8 | Mode::DoraFp8) { "fp8" } else { "dtype" },
        !packed,
    );
    let layers = RecipeLayers {
        recipe: Some(RecipeText { name: "counted".into(), text, folder: folder.path().into() }),
        model: Some(folder.path().display().to_string()),
        train: vec![folder.path().join("rows.jsonl").display().to_string()],
        folder: folder.path().into(),
        ..RecipeLayers::default()
    };
    let recipe = Recipe::load(&layers).unwrap();
    let terminal = Terminal::stderr(Verbosity::Quiet);
    let finder = Resolver::new(true, &terminal).unwrap();
    let now = chrono::Local::now().fixed_offset();
    let (on, world) = ((Device::Cpu, MemoryBudget::Local), WorldSize::in_one_process(1));
    let plan = Plan::resolve(recipe, &finder, on, world, None, now).unwrap();
    let mut sampler = plan.sampler().unwrap();
    let steps = (0..3).map(|_| sampler.next_step().unwrap()).collect();
    drop(sampler);
    let before = LIVE.load(Relaxed);
    let trainer = trainer(&plan, None, Arc::new(SingleRank), &Device::Cpu).unwrap();
    Loaded { plan, trainer, steps, before, _folder: folder }
}

impl Loaded {
    /// Returns the work that the second step requests, and its peak bytes.
    fn second_step(&mut self) -> (GpuWork, usize) {
        self.trainer.step(&self.steps[0]).unwrap();
        PEAK.store(LIVE.load(Relaxed), Relaxed);
        let before = requested_work();
        self.trainer.step(&self.steps[1]).unwrap();
        (requested_work() - before, PEAK.load(Relaxed) - self.before)
    }

    /// Returns the work that the blocks' forward of a micro-batch requests.
    fn forward(&self) -> GpuWork {
        let before = requested_work();
        self.trainer.engine.hidden(&self.steps[0].micro_batches[0], AdapterSwitch::On).unwrap();
        requested_work() - before
    }
}

/// The work of steps and of forwards, and the peak bytes of steps, with 2 and with 4 layers.
#[derive(Clone, Copy)]
struct Counted {
    step: [GpuWork; 2],
    forward: [GpuWork; 2],
    peak: [usize; 2],
}

/// Counts a model as wide as Qwen3-8B, once for all checks.
fn counted(mode: Mode, recompute: bool) -> Counted {
    static KNOWN: Mutex<Vec<((Mode, bool), Counted)>> = Mutex::new(Vec::new());
    let known = |known: &[((Mode, bool), Counted)]| {
        known.iter().find(|(of, _)| *of == (mode, recompute)).map(|(_, counted)| *counted)
    };
    if let Some(counted) = known(&KNOWN.lock().unwrap()) {
        return counted;
    }
    let all = [2, 4].map(|layers| {
        let run = Run { mode, recompute, dropout: 0.0, accumulation: 1 };
        let mut loaded = load(&Shape { layers, ..WIDE }, run);
        let (step, peak) = loaded.second_step();
        (step, loaded.forward(), peak)
    });
    let counted = Counted { step: all.map(|of| of.0), forward: all.map(|of| of.1), peak: all.map(|of| of.2) };
    KNOWN.lock().unwrap().push(((mode, recompute), counted));
    counted
}

/// Extrapolates from `few` for 2 layers and `more` for 4 to [`LAYERS`].
fn extended(few: f64, more: f64) -> f64 {
    few + (more - few) / 2.0 * (LAYERS - 2) as f64
}

/// Checks the bars of QLoRA on 8 billion parameters with a micro-batch of 4,096 tokens. Returns the
/// operations of the products of a block.
fn eight_billion(recompute: bool, most_seconds: f64, most_bytes: f64) -> f64 {
    let Counted { step: [two, four], forward, peak } = counted(Mode::Qlora, recompute);
    let [forward_of_two, forward_of_four] = forward;
    let [small, large] = peak.map(|peak| peak + GEMM_WORKSPACE);
    let calls = |work: GpuWork| work.launches + work.gemms;
    let in_pass = |count: fn(&GpuWork) -> u64| {
        [count(&forward_of_four) - count(&forward_of_two), count(&four) - count(&two)].map(|both| both / 2)
    };
    let (launches, gemms) = (in_pass(|work| work.launches), in_pass(|work| work.gemms));
    // Bf16 products of the fastest card, and 85 % of its copy bandwidth.
    let seconds = |work: GpuWork| work.seconds(680e12, 0.85 * 4.3e12);
    let (seconds, bytes) = (extended(seconds(two), seconds(four)), extended(small as f64, large as f64));
    let ids = 2 * 4 * 4096;
    println!(
        "recompute {recompute}: a block's forward and step {launches:?} launches, {gemms:?} products; \
         {} bytes uploaded; {} waits; {seconds:.3} s; {bytes:.2e} bytes",
        four.uploaded_bytes, four.waits
    );
    assert!(four.uploaded_bytes - ids <= 64 << 10, "{}", four.uploaded_bytes);
    assert_eq!(four.waits, 1);
    // The driver's queue holds about 1,000 launches, with those of candle's own operations.
    assert!(calls(four) > four.most_ahead && four.most_ahead <= 256, "{four:?}");
    let recomputed = |count: u64| if recompute { count } else { 0 };
    assert_eq!(gemms, [FORWARD_PRODUCTS, PRODUCTS + recomputed(RECOMPUTED_PRODUCTS)]);
    assert_eq!(launches, [FORWARD_LAUNCHES, LAUNCHES + recomputed(RECOMPUTED_LAUNCHES)]);
    let beside = in_pass(|work| work.launches_beside);
    let of_backward = if recompute { 0 } else { BACKWARD_BESIDE };
    assert_eq!(beside, [FORWARD_BESIDE, FORWARD_BESIDE + of_backward]);
    assert!(seconds <= most_seconds && bytes <= most_bytes, "{seconds} s, {bytes} bytes");
    (four.gemm_flops - two.gemm_flops) / 2.0
}

/// Recomputing a block repeats the products of its forward, except that of `down_proj` and the
/// up-product of its adapter.
fn recomputed_flops() -> f64 {
    let [two, four] = counted(Mode::Qlora, true).forward;
    let of_block = (four.gemm_flops - two.gemm_flops) / 2.0;
    of_block - 2.0 * 4096.0 * WIDE.hidden as f64 * (WIDE.intermediate + RANK) as f64
}

/// Recomputing a block whose `down_proj` has a norm of its output dequantizes nothing, because its
/// backward uses the same panels: it repeats the forward of dense weights.
fn recomputing_shares_panels() {
    let of_block = |calls: &dyn Fn(usize) -> u64| (calls(4) - calls(2)) / 2;
    let calls = |work: GpuWork| work.launches + work.gemms;
    let run = |mode, recompute| Run { mode, recompute, dropout: 0.0, accumulation: 1 };
    let shape = |layers| Shape { layers, ..POST_NORM };
    let step = |recompute| {
        of_block(&|layers| calls(load(&shape(layers), run(Mode::Qlora, recompute)).second_step().0))
    };
    let forward = |mode| of_block(&|layers| calls(load(&shape(layers), run(mode, false)).forward()));
    assert!(forward(Mode::Qlora) > forward(Mode::Lora), "a forward dequantizes");
    assert_eq!(step(true) - step(false), forward(Mode::Lora));
}

/// Products with the frozen weights are as many and as large in fp8, and most of all operations. A
/// roofline of the fastest card has the time of both.
fn products_in_fp8() {
    let of_block = |mode| {
        let [two, four] = counted(mode, false).step;
        four - two
    };
    let [bf16, fp8] = [Mode::Lora, Mode::LoraFp8].map(of_block);
    assert_eq!((fp8.gemms, fp8.gemm_flops), (bf16.gemms, bf16.gemm_flops));
    assert!(bf16.fp8_flops == 0.0 && fp8.fp8_flops > 0.97 * fp8.gemm_flops, "{fp8:?}");
    let seconds = |work: GpuWork| work.seconds(680e12, 0.85 * 4.3e12) / 2.0 * LAYERS as f64;
    println!("blocks in bf16 {:.4} s, in fp8 {:.4} s: {fp8:?}", seconds(bf16), seconds(fp8));
    assert!(seconds(fp8) < 0.8 * seconds(bf16), "{} {}", seconds(fp8), seconds(bf16));
}

/// A base in FP8 that stays packed is dequantized in each pass, by as many launches as one in NF4,
/// and as many of them beside products.
fn packed_weights_are_dequantized_twice() {
    let of_block = |mode| {
        let [two, four] = counted(mode, false).step;
        four - two
    };
    let [dense, packed, nf4] = [Mode::Lora, Mode::LoraPacked, Mode::Qlora].map(of_block);
    assert_eq!((packed.launches, packed.launches_beside), (nf4.launches, nf4.launches_beside));
    assert_eq!(packed.gemm_flops, dense.gemm_flops);
    let [heads, kv_heads, head_dim] = WIDE.heads;
    let matrices = WIDE.hidden * (2 * heads + 2 * kv_heads) * head_dim + 3 * WIDE.hidden * WIDE.intermediate;
    // Codes, scales and panels of two blocks, forward and backward.
    let bytes = 2 * 2 * (matrices + 4 * matrices / (128 * 128) + 2 * matrices);
    assert_eq!(packed.kernel_bytes - dense.kernel_bytes, bytes as u64);
}

/// A single test, since the counters are global to the process.
#[test]
fn steps_ask_for_what_was_planned() {
    count_process().unwrap();
    let cached = eight_billion(false, 0.26, 23e9);
    let recomputed = eight_billion(true, 0.36, 10.5e9) - cached;
    assert_eq!(recomputed, recomputed_flops());
    recomputing_shares_panels();
    products_in_fp8();
    packed_weights_are_dequantized_twice();
    work_table::is_that_of_the_page();
    published_models::are_those_of_the_page();
    let far: Vec<_> =
        planned_runs().into_iter().filter_map(|(shape, run)| far_from_plan(shape, run)).collect();
    assert!(far.is_empty(), "{far:#?}");
}

/// Each shape in each mode; DoRA and dropout on the shape whose peak their temporaries set.
fn planned_runs() -> Vec<(&'static Shape, Run)> {
    let modes = [Mode::Qlora, Mode::Lora, Mode::Full];
    let run =
        |i: usize, mode| Run { mode, recompute: i.is_multiple_of(2), dropout: 0.0, accumulation: 1 + i % 2 };
    let plain = PLANNED.iter().flat_map(|shape| modes.map(|mode| (shape, mode))).enumerate();
    let plain = plain.map(|(i, (shape, mode))| (shape, run(i, mode)));
    let special = [
        (0.0, Mode::Dora, 0),
        (0.1, Mode::Dora, 1),
        (0.1, Mode::Qlora, 2),
        (0.1, Mode::Qlora, 3),
        (0.1, Mode::Lora, 3),
        (0.0, Mode::QloraCopy, 4),
        (0.0, Mode::QloraFp8, 2),
        (0.0, Mode::LoraFp8, 3),
        (0.0, Mode::DoraFp8, 2),
        (0.0, Mode::LoraPacked, 2),
        (0.0, Mode::LoraPacked, 3),
    ];
    let special = special.map(|(dropout, mode, i)| (&PLANNED[2], Run { dropout, ..run(i, mode) }));
    plain.chain(special).collect()
}

/// Runs two steps; describes the run if its plan is more than 5 % off the peak.
fn far_from_plan(shape: &Shape, run: Run) -> Option<String> {
    let mut loaded = load(shape, run);
    let (work, peak) = loaded.second_step();
    assert_eq!(work.waits, 1, "{} {run:?}", shape.name);
    let (peak, planned) = ((peak + GEMM_WORKSPACE) as f64, loaded.plan.memory.total() as f64);
    let share = planned / peak;
    let what = format!("{} {run:?}: {peak:.3e} bytes, planned {share:.3}", shape.name);
    println!("{what}");
    (!(0.95..1.05).contains(&share)).then_some(what)
}
