//! Arguments of `finetune bench`.

use std::path::Path;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};

use super::shared::rank_count;
use super::{CommonArgs, CommunicationArgs, Gpus, RunArgs};
use crate::error::Result;
use crate::recipe::{ComputeDtype, RecipeLayers};

/// Arguments of `finetune bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Measurement to make.
    #[command(subcommand)]
    pub what: BenchVerb,
}

/// Measurements of `finetune bench`.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchVerb {
    /// Time every operation, as a share of the device's copy or matmul speed
    Ops(OpsArgs),
    /// Measure all-reduce, all-gather and reduce-scatter bandwidth by data size
    #[command(after_help = COLLECTIVES_EXAMPLES)]
    Collectives(CommunicationArgs),
    /// Measure tokens/s, bytes sent and time lost to communication, by rank count
    Scaling(ScalingArgs),
}

const COLLECTIVES_EXAMPLES: &str = "\
Examples:
  finetune bench collectives --ranks 4
  finetune bench collectives --gpus 0-7 --sizes 1M,64M,1G
  mpirun -n 8 finetune bench collectives --json";

/// Arguments of `finetune bench ops`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune bench ops
  finetune bench ops --tokens 8192 --max-seq-len 8192 --only attention
  finetune bench ops --model Qwen/Qwen2.5-0.5B --tokens 512 --dtype f32")]
pub struct OpsArgs {
    /// Model that gives the widths; only its config.json is read [default: Qwen3-8B]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Tokens per micro-batch; on a CPU a few hundred are enough
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub tokens: u32,
    /// Largest number of tokens in a row; attention stays within a row
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_seq_len: u32,
    /// Dtype of activations and weights
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = activations_dtype())]
    pub dtype: ComputeDtype,
    /// Measure only operations whose name contains NAME; may be repeated
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Measure each operation this long: 3 runs or more, but 1 if over 2 seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = seconds)]
    pub secs: f64,
    /// On a GPU, also time matmul by each of the N algorithms that cuBLAS ranks best
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=100))]
    pub algorithms: Option<u8>,
    /// GPU to measure [default: the first GPU, else the CPU]
    #[arg(long, value_name = "N", value_parser = one_gpu)]
    pub gpus: Option<usize>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

fn activations_dtype() -> impl TypedValueParser<Value = ComputeDtype> {
    PossibleValuesParser::new(["bf16", "f32"]).try_map(|text| text.parse::<ComputeDtype>())
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|secs: &f64| *secs > 0.0 && *secs <= 60.0);
    number.ok_or_else(|| "accepted: a number above 0, at most 60".into())
}

fn one_gpu(text: &str) -> Result<usize, String> {
    match text.parse::<Gpus>().as_ref().map(|gpus| gpus.0.as_slice()) {
        Ok([gpu]) => Ok(*gpu),
        _ => Err("accepted: the number of one GPU, such as 0".into()),
    }
}

/// Arguments of `finetune bench scaling`.
#[derive(Debug, Clone, Args)]
pub struct ScalingArgs {
    /// Model, training data and recipe of the run.
    #[command(flatten)]
    pub run: RunArgs,
    /// Set a recipe key; overrides flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// GPUs with a rank each; fewer ranks use the first of them [default: the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Numbers of ranks to measure
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 2], value_parser = rank_count())]
    pub ranks: Vec<u16>,
    /// Threads of each rank [default: all threads over the largest number of ranks]
    #[arg(long, value_name = "N", value_parser = rank_count())]
    pub threads: Option<u16>,
    /// Steps to measure, after two warm-up steps
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub steps: u32,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl ScalingArgs {
    /// Returns the layers of the recipe, like [`super::TrainArgs::layers`].
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        self.run.layers(&self.set, folder)
    }
}
