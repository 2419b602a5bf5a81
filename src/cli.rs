//! Types of the command line with their help texts. `commands` carries them out.

#![allow(rustdoc::broken_intra_doc_links, reason = "help texts have values in brackets")]

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::error::Result;
use crate::export::gguf::GgufType;
use crate::recipe::{Dtype, QuantKind};

mod bench;
mod communication;
mod compare;
mod doctor;
mod generate;
mod parse;
mod peer_flags;
mod plan;
mod settings;
mod shared;
mod sweep;
mod train;
mod verify;

pub use bench::{BenchArgs, BenchVerb, OpsArgs, ScalingArgs};
pub use communication::CommunicationArgs;
pub use compare::CompareArgs;
pub use doctor::{DoctorArgs, DoctorVerb};
pub use generate::GenerateArgs;
pub use parse::parse;
pub use plan::PlanArgs;
pub use settings::SettingArgs;
pub use shared::{CommonArgs, DeviceArgs, ModelArgs, RecipeArgs, RowArgs, RunArgs};
pub use sweep::SweepAxis;
pub use train::{ProcessArgs, TrainArgs};
pub use verify::VerifyResumeArgs;

const TRAIN_EXAMPLES: &str = "\
Examples:
  finetune --recipe quickstart
  finetune --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl --output out
  finetune --recipe my.toml --lr 1e-4 --epochs 3
  finetune --recipe my.toml --output out --sweep adapter.r=4,8,16
  finetune --resume --output out

`finetune train ...` is the same. `finetune recipes` lists the built-in recipes, `finetune recipes show reference` every key.
`--resume` without --recipe, --model and --dataset uses the recipe.toml of the run.";

/// Fine-tunes Hugging Face language models: LoRA and full training in one binary.
#[derive(Debug, Parser)]
#[command(
    name = "finetune",
    version,
    after_help = TRAIN_EXAMPLES,
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Arguments of training, used without a verb.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Verb; `None` trains.
    #[command(subcommand)]
    pub verb: Option<Verb>,
}

/// Verbs of the command line; without one `finetune` trains.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Train a model, the same as `finetune` without a verb
    #[command(arg_required_else_help = true, after_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Estimate memory, time and cost of a run, here or on other hardware
    Plan(Box<PlanArgs>),
    /// Merge an adapter into its model and write a Hugging Face folder
    Merge(MergeArgs),
    /// Write a 4-bit or 8-bit checkpoint of a model
    Quantize(QuantizeArgs),
    /// Export a model as a GGUF file or Hugging Face folder, or an adapter as GGUF
    Export(ExportArgs),
    /// Continue a prompt, chat, or answer a file of prompts
    Generate(GenerateArgs),
    /// Measure loss, perplexity and token accuracy on a data set
    Eval(EvalArgs),
    /// Compare runs by their output folders: recipe, losses, time and memory
    Compare(CompareArgs),
    /// Describe a model or adapter from its file headers
    Inspect(InspectArgs),
    /// Show how rows become tokens and loss masks, and report faulty rows
    Data(DataArgs),
    /// List, show or write the built-in recipes
    Recipes(RecipesArgs),
    /// Measure the speed of operations, of communication, and of training by rank count
    Bench(BenchArgs),
    /// Describe this machine and its network, or check every operation on it
    Doctor(DoctorArgs),
    /// Check that a killed and resumed run is bit-identical to an uninterrupted one
    VerifyResume(VerifyResumeArgs),
    /// Print a shell completion script or a manual page
    Completions(CompletionsArgs),
}

/// Arguments of `finetune merge`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune merge --adapter out --output merged
  finetune merge --model model-fp8 --adapter out --requantize --verify-on test.jsonl --output merged")]
pub struct MergeArgs {
    /// Base model: a folder or a hub id [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Adapter: a folder or a hub id
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: String,
    /// Folder to write; must be new or empty
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Dtype of the merged weights; auto: the dtype of the model
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = dtype())]
    pub dtype: Dtype,
    /// Weights to merge into [default: those that the adapter was trained on]
    #[arg(long, value_name = "BASE")]
    pub base: Option<BaseChoice>,
    /// Write the weights in the quantized format of the model instead of plain
    #[arg(long, conflicts_with = "dtype")]
    pub requantize: bool,
    /// Compare with base and adapter on 64 rows of this data set, before writing
    #[arg(long, value_name = "DATASET")]
    pub verify_on: Option<String>,
    /// Mean KL divergence to accept, in nats per token [default: 0.005; other base or
    /// --requantize: 0.1]
    #[arg(long, value_name = "NATS", requires = "verify_on", value_parser = nats)]
    pub max_kl: Option<f64>,
    /// Use the adapter on a model other than the one it was trained on
    #[arg(long)]
    pub force_base: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Arguments of `finetune quantize`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune quantize --model Qwen/Qwen2.5-0.5B --kind nf4 --output qwen-nf4
  finetune quantize --model merged --kind int8 --skip down_proj --output merged-int8
  finetune quantize --model merged --kind mxfp4 --output merged-mxfp4")]
pub struct QuantizeArgs {
    /// Model: a folder or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: String,
    /// Format of the linear layers; all other weights stay as they are stored
    #[arg(long, value_name = "KIND", value_parser = checkpoint_kind())]
    pub kind: CheckpointKind,
    /// Folder to write; must be new or empty
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Weights per scale, a power of two from 32 to 4096; with nf4, fp4 [default: 64]
    #[arg(long, value_name = "N", value_parser = block_size)]
    pub block_size: Option<usize>,
    /// Keep the scales in f32; with nf4, fp4
    #[arg(long)]
    pub no_double_quant: bool,
    /// Layers to leave unquantized, such as down_proj or layers.0; may be repeated
    #[arg(long, value_name = "NAME")]
    pub skip: Vec<String>,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Name of MXFP4 as a kind.
const MXFP4: &str = "mxfp4";

/// Formats of `finetune quantize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointKind {
    /// A format of bitsandbytes, which a recipe may name too.
    Blocks(QuantKind),
    /// MXFP4, of compressed-tensors or gpt-oss.
    Mxfp4,
}

impl std::fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CheckpointKind::Blocks(kind) => kind.fmt(f),
            CheckpointKind::Mxfp4 => f.write_str(MXFP4),
        }
    }
}

/// Arguments of `finetune export`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune export --model out --format gguf --type q4_k_m --output model.gguf
  finetune export --adapter out --format gguf --output adapter.gguf
  finetune export --adapter out --merge --format gguf --output merged.gguf
  finetune export --model out --format hf --type f16 --output half")]
pub struct ExportArgs {
    /// Model and adapter.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Export the whole model with the adapter merged, instead of a LoRA GGUF
    #[arg(long, requires = "adapter", conflicts_with = "revision")]
    pub merge: bool,
    /// File (gguf) or folder (hf) to write; must not exist
    #[arg(long, value_name = "PATH")]
    pub output: PathBuf,
    /// Format: hf, a folder for transformers, or gguf, a file for llama.cpp
    #[arg(long, value_name = "FORMAT", value_parser = export_format())]
    pub format: ExportFormat,
    /// Type of the weights; hf: f32, f16, bf16; adapter: f32, f16 [default: as stored;
    /// adapter: f32]
    #[arg(long, value_name = "TYPE", value_parser = gguf_type())]
    pub r#type: Option<GgufType>,
    /// Branch, tag or commit of the model on the hub
    #[arg(long, value_name = "REVISION", default_value = "main")]
    pub revision: String,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Output formats of `finetune export`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportFormat {
    /// A folder that transformers opens.
    Hf,
    /// A file that llama.cpp runs.
    Gguf,
}

/// Arguments of `finetune eval`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Example:
  finetune eval --adapter out --dataset test.jsonl --json")]
pub struct EvalArgs {
    /// Model and adapter.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Data set: a file, a folder or a hub data set; may be repeated
    #[arg(long, value_name = "DATASET", required = true)]
    pub dataset: Vec<String>,
    /// Options for reading rows.
    #[command(flatten)]
    pub rows: RowArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Arguments of `finetune inspect`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune inspect out
  finetune inspect meta-llama/Llama-2-7b-hf")]
pub struct InspectArgs {
    /// Model or adapter: a folder, a safetensors file or a hub id
    #[arg(value_name = "PATH_OR_ID")]
    pub source: String,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Arguments of `finetune data`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl
  finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --rows 20 --set data.train_on=all
  finetune data --model Qwen/Qwen2.5-0.5B --dataset pairs.jsonl --set objective.kind=dpo")]
pub struct DataArgs {
    /// Model that gives tokenizer and chat template: a folder or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: String,
    /// Data set: a file, a folder or a hub data set; may be repeated
    #[arg(long, value_name = "DATASET", required = true)]
    pub dataset: Vec<String>,
    /// Number of rows to show; all rows are checked
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rows: usize,
    /// Show a line per token: position, id, whether it is trained, text
    #[arg(long, conflicts_with = "json")]
    pub tokens: bool,
    /// Print rows and statistics as JSON; untrained tokens have the label -100
    #[arg(long)]
    pub json: bool,
    /// Also write the rows as an HTML page to this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Options for reading rows.
    #[command(flatten)]
    pub reading: RowArgs,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Arguments of `finetune recipes`.
#[derive(Debug, Clone, Args)]
#[command(
    disable_help_subcommand = true,
    after_help = "\
Examples:
  finetune recipes show lora
  finetune recipes write lora        writes lora.toml here, to be changed
  finetune recipes show reference    every key, with its default
  finetune recipes show reference data"
)]
pub struct RecipesArgs {
    /// Action; `None` lists the recipes.
    #[command(subcommand)]
    pub action: Option<RecipesAction>,
}

/// Actions on the built-in recipes.
#[derive(Debug, Clone, Subcommand)]
pub enum RecipesAction {
    /// List the built-in recipes with their purpose
    List,
    /// Print a recipe, or the reference of all keys
    Show {
        /// Name of a recipe, or `reference` for every key
        name: String,
        /// Section of the reference to print, such as data [default: all sections]
        section: Option<String>,
    },
    /// Write a recipe to NAME.toml in the working folder; never replaces a file
    Write {
        /// Name of a recipe, or `reference` for every key
        name: String,
    },
}

/// Weights that an adapter is merged into (`finetune merge --base`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BaseChoice {
    /// The unquantized weights in the model's files
    Original,
    /// The same weights, quantized and dequantized
    Quantized,
}

/// Arguments of `finetune completions`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune completions bash > ~/.local/share/bash-completion/completions/finetune
  finetune completions man > ~/.local/share/man/man1/finetune.1
  finetune completions man plan > ~/.local/share/man/man1/finetune-plan.1")]
pub struct CompletionsArgs {
    /// Shell, or `man` for a manual page
    #[arg(value_name = "KIND")]
    pub kind: CompletionKind,
    /// Verb to print the manual page of [default: finetune as a whole]
    #[arg(value_name = "VERB")]
    pub verb: Option<String>,
}

/// A file for a shell or for `man`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionKind {
    /// The script of a shell.
    Shell(Shell),
    /// A manual page, in roff.
    Man,
}

impl ValueEnum for CompletionKind {
    fn value_variants<'a>() -> &'a [Self] {
        use CompletionKind::{Man, Shell as Of};
        use Shell::{Bash, Elvish, Fish, PowerShell, Zsh};
        &[Of(Bash), Of(Elvish), Of(Fish), Of(PowerShell), Of(Zsh), Man]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            CompletionKind::Shell(shell) => shell.to_possible_value(),
            CompletionKind::Man => Some(PossibleValue::new("man")),
        }
    }
}

/// Devices by number, in the order given, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpus(pub Vec<usize>);

impl FromStr for Gpus {
    type Err = String;

    /// Reads `0`, `0,2` or `0-3`.
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || "accepted: numbers and ranges such as 0 or 0,2 or 0-3".to_owned();
        let mut gpus: Vec<usize> = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: usize = first.trim().parse().map_err(|_| refuse())?;
            let last: usize = last.trim().parse().map_err(|_| refuse())?;
            if first > last || last >= MOST_GPUS {
                return Err(refuse());
            }
            for gpu in first..=last {
                if gpus.contains(&gpu) {
                    return Err(format!("GPU {gpu} is listed twice; accepted: each GPU once"));
                }
                gpus.push(gpu);
            }
        }
        Ok(Gpus(gpus))
    }
}

/// More devices than any host has. The limit keeps a typo such as `0-30000000000` from filling the
/// memory.
const MOST_GPUS: usize = 1024;

fn dtype() -> impl TypedValueParser<Value = Dtype> {
    PossibleValuesParser::new(Dtype::NAMES).try_map(|text| text.parse::<Dtype>())
}

fn checkpoint_kind() -> impl TypedValueParser<Value = CheckpointKind> {
    let names = QuantKind::NAMES.iter().copied().chain([MXFP4]);
    PossibleValuesParser::new(names).try_map(|text| match text.as_str() {
        MXFP4 => Ok(CheckpointKind::Mxfp4),
        _ => text.parse().map(CheckpointKind::Blocks),
    })
}

fn block_size(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|n: &usize| n.is_power_of_two() && (32..=4096).contains(n));
    size.ok_or_else(|| "accepted: 32, 64, 128, 256, 512, 1024, 2048, 4096".into())
}

fn export_format() -> impl TypedValueParser<Value = ExportFormat> {
    PossibleValuesParser::new(["hf", "gguf"])
        .map(|text| if text == "hf" { ExportFormat::Hf } else { ExportFormat::Gguf })
}

fn gguf_type() -> impl TypedValueParser<Value = GgufType> {
    PossibleValuesParser::new(GgufType::ALL.map(|(name, _)| name)).try_map(|text| text.parse::<GgufType>())
}

fn nats(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|kl: &f64| kl.is_finite() && *kl > 0.0);
    number.ok_or_else(|| "accepted: a number above 0".into())
}

#[cfg(test)]
mod tests;
