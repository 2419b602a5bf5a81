//! `finetune bench`: measures operations, communication between ranks, and training speed by number
//! of ranks. For the last, each number of ranks trains the same recipe for some steps.

use candle_core::DType;

use super::{config_of, print, print_json, terminal};
use crate::bench::communication::CollectiveSpeeds;
use crate::bench::op_speeds::OpSpeeds;
use crate::bench::scaling::{ScalingDevices, ScalingResult, WARM_UP};
use crate::cli::{BenchArgs, BenchVerb, CommunicationArgs, OpsArgs, ScalingArgs};
use crate::clock;
use crate::error::{Error, Result};
use crate::loading::Resolver;
use crate::ops::bench::{BenchShapes, ModelWidths};
use crate::planning::{MemoryBudget, Plan, WorldSize};
use crate::recipe::{ComputeDtype, DataSource, Recipe, Strategy};
use crate::runtime::device::{self, DeviceChoice};
use crate::runtime::thread_pool;

/// Runs the requested measurement.
pub(super) fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        BenchVerb::Ops(args) => ops(args),
        BenchVerb::Collectives(args) => collectives(args),
        BenchVerb::Scaling(args) => scaling(args),
    }
}

fn collectives(args: &CommunicationArgs) -> Result<()> {
    // Only the process of rank 0 prints.
    let Some(speeds) = CollectiveSpeeds::measure(args)? else { return Ok(()) };
    if args.json { print_json(&speeds) } else { print(&speeds.table()) }
}

fn scaling(args: &ScalingArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let recipe = Recipe::load(&args.layers(&super::working_folder()?)?)?;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let most = args.ranks.iter().copied().max().map_or(1, usize::from);
    let devices = ScalingDevices::open(args.gpus.as_ref().map(|gpus| gpus.0.as_slice()), most)?;
    let threads = args.threads.map_or_else(|| (thread_pool::num_threads() / most).max(1), usize::from);
    let mut results: Vec<ScalingResult> = Vec::new();
    for ranks in args.ranks.iter().copied().map(usize::from) {
        let mut recipe = recipe.clone();
        recipe.train.max_steps = Some(WARM_UP + u64::from(args.steps));
        if ranks == 1 {
            (recipe.parallel.strategy, recipe.parallel.shard_size) = (Strategy::Single, None);
        }
        let now = clock::now();
        let world = WorldSize::in_one_process(ranks);
        let plan =
            Plan::resolve(recipe, &resolver, (devices.device(), MemoryBudget::Local), world, None, now)?;
        terminal.line(plan.describe());
        results.push(ScalingResult::measure(&plan, &devices, ranks, threads, results.first())?);
    }
    if args.json { print_json(&results) } else { print(&ScalingResult::table(&results)) }
}

fn ops(args: &OpsArgs) -> Result<()> {
    let shapes = BenchShapes {
        widths: widths(args)?,
        tokens: args.tokens as usize,
        max_seq_len: args.max_seq_len as usize,
        dtype: if args.dtype == ComputeDtype::F32 { DType::F32 } else { DType::BF16 },
        secs: args.secs,
        memory: u64::MAX,
    };
    check_names(&args.only, &shapes.op_names())?;
    let wanted =
        |op: &str, _: &str| args.only.is_empty() || args.only.iter().any(|part| op.contains(part.as_str()));
    let choice = args.gpus.map_or_else(device::preferred, |gpu| Ok(DeviceChoice::Gpu(gpu)))?;
    let algorithms = args.algorithms.map_or(1, usize::from);
    check_algorithms(algorithms, choice)?;
    let device = device::open(choice)?;
    let mut speeds = OpSpeeds::new(choice, &shapes, shapes.device_rates(&device)?)?;
    // Prints each line at once, because the largest shapes take minutes on a CPU.
    let show = |text: String| if args.json { Ok(()) } else { print(&text) };
    show(speeds.head())?;
    for timing in shapes.timings(&device, algorithms, wanted) {
        show(speeds.add(timing?))?;
    }
    if args.json { print_json(&speeds) } else { Ok(()) }
}

/// Refuses a value of `--only` that no operation's name contains.
fn check_names(asked: &[String], ops: &[&str]) -> Result<()> {
    let unknown = asked.iter().find(|part| !ops.iter().any(|op| op.contains(part.as_str())));
    unknown.map_or(Ok(()), |part| {
        Err(Error::user(format!("cannot measure `{part}`"))
            .because("no operation has that in its name")
            .because(format!("accepted: a part of {}", ops.join(", ")))
            .hint("leave out `--only` to measure all"))
    })
}

/// Refuses several algorithms on a device that has one for each product.
fn check_algorithms(asked: usize, choice: DeviceChoice) -> Result<()> {
    if asked == 1 || choice != DeviceChoice::Cpu {
        return Ok(());
    }
    Err(Error::user(format!("cannot measure products by {asked} algorithms"))
        .because("`--algorithms` is for GPUs; a CPU has one algorithm for each product")
        .hint("leave out `--algorithms`, or name a GPU with `--gpus`"))
}

/// Returns the widths of the model of `--model`, else those of Qwen3-8B.
fn widths(args: &OpsArgs) -> Result<ModelWidths> {
    let Some(model) = &args.model else { return Ok(ModelWidths::QWEN3_8B) };
    let terminal = terminal(&args.common);
    let source = DataSource::from_argument("--model", model, &super::working_folder()?)?;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let config = config_of(&resolver.model_headers(&source, "main")?)?;
    Ok(ModelWidths {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        heads: config.heads,
        vocab_size: config.vocab_size,
    })
}
