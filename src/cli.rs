//! The command line, as types: what may be typed, and the help. What it means is for `commands`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::error::Result;
use crate::export::gguf::GgufType;
use crate::recipe::{Dtype, Purpose, QuantKind, RecipeLayers, RecipeText};

mod bench;
mod communication;
mod compare;
mod doctor;
mod generate;
mod parse;
mod peer_flags;
mod plan;
mod settings;
mod sweep;
mod train;
mod verify;

pub use bench::{BenchArgs, BenchVerb, OpsArgs, ScalingArgs};
pub use communication::CommunicationArgs;
pub use compare::CompareArgs;
pub use doctor::{DoctorArgs, DoctorVerb};
pub use generate::GenerateArgs;
pub use parse::{ParsedArgs, parse};
pub use plan::PlanArgs;
pub use settings::SettingArgs;
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

`finetune train ...` is the same. `finetune recipes` lists the built-in recipes, `finetune recipes show reference` every key.";

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
    /// Without a verb: train.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Verb, if one was typed.
    #[command(subcommand)]
    pub verb: Option<Verb>,
}

/// Verbs of the command line; without one `finetune` trains.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Train: the same as `finetune` without a verb
    #[command(arg_required_else_help = true, after_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Say what a run would need, here or on other hardware: memory, time, cost
    Plan(Box<PlanArgs>),
    /// Merge an adapter into its model: a Hugging Face folder
    Merge(MergeArgs),
    /// Write a 4-bit or 8-bit checkpoint of a model, as bitsandbytes does
    Quantize(QuantizeArgs),
    /// Write a model as a GGUF file or Hugging Face folder, an adapter as GGUF
    Export(ExportArgs),
    /// Continue a prompt, chat, or answer a file of prompts
    Generate(GenerateArgs),
    /// Measure loss, perplexity and token accuracy on a data set
    Eval(EvalArgs),
    /// Compare runs by their output folders: recipe, losses, time and memory
    Compare(CompareArgs),
    /// Say what a model or adapter is, from its headers alone
    Inspect(InspectArgs),
    /// Show how rows become tokens and masks, and what is wrong with them
    Data(DataArgs),
    /// List, show or write the built-in recipes
    Recipes(RecipesArgs),
    /// Measure speed: of every operation, between ranks, or by number of ranks
    Bench(BenchArgs),
    /// Say what this machine and its network offer; check every operation on it
    Doctor(DoctorArgs),
    /// Prove on a recipe that a run which is killed and resumed leaves the same bytes
    VerifyResume(VerifyResumeArgs),
    /// Print a completion script for a shell, or a manual page
    Completions(CompletionsArgs),
}

/// How much is said, and whether the network may be used.
#[derive(Debug, Clone, Default, Args)]
pub struct CommonArgs {
    /// Use only what is on this machine
    #[arg(long)]
    pub offline: bool,
    /// Say only what went wrong
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more about what happens
    #[arg(short, long)]
    pub verbose: bool,
}

/// What is trained, on what, by which recipe.
#[derive(Debug, Clone, Default, Args)]
pub struct RunArgs {
    /// A folder in Hugging Face layout, or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// A recipe file, or the name of a built-in recipe
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<String>,
    /// A file, a folder or a hub data set to train on; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub dataset: Vec<String>,
}

fn find_recipe(name: Option<&str>, folder: &Path) -> Result<Option<RecipeText>> {
    name.map(|name| RecipeText::find(name, folder)).transpose()
}

/// Arguments of `finetune merge`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Example:
  finetune merge --adapter out --output merged")]
pub struct MergeArgs {
    /// The model the adapter was trained on: a folder or a hub id [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The adapter's folder, or a hub id
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: String,
    /// The folder to write; must be new or empty
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Type of the merged weights; auto: the model's
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = dtype())]
    pub dtype: Dtype,
    /// Merge into these weights [default: those that the adapter was trained on]
    #[arg(long, value_name = "BASE")]
    pub base: Option<BaseChoice>,
    /// Compare base and adapter with the merged model on the first 64 rows of this data set before anything is written
    #[arg(long, value_name = "DATASET")]
    pub verify_on: Option<String>,
    /// The mean KL divergence, in nats a token, above which the merge is refused
    #[arg(long, value_name = "NATS", requires = "verify_on", value_parser = nats)]
    pub max_kl: Option<f64>,
    /// Use the adapter on this model though it was trained on another
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
  finetune quantize --model merged --kind int8 --skip down_proj --output merged-int8")]
pub struct QuantizeArgs {
    /// The model: a folder or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: String,
    /// The codes of the linear layers; all else stays as it is stored
    #[arg(long, value_name = "KIND", value_parser = quant_kind())]
    pub kind: QuantKind,
    /// The folder to write; must be new or empty
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Weights that share one scale: a power of two from 32 to 4096 [default: 64; not with int8]
    #[arg(long, value_name = "N", value_parser = block_size)]
    pub block_size: Option<usize>,
    /// Keep the scales in f32 (not with int8, which always does)
    #[arg(long)]
    pub no_double_quant: bool,
    /// Layers to leave as they are, such as down_proj or layers.0; may be repeated
    #[arg(long, value_name = "NAME")]
    pub skip: Vec<String>,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
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
    /// A folder in Hugging Face layout, or a hub id [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL", required_unless_present = "adapter")]
    pub model: Option<String>,
    /// An adapter's folder, or a hub id: write it alone, as a LoRA GGUF for this model
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Option<String>,
    /// Merge the adapter into its model first, and write the whole model
    #[arg(long, requires = "adapter", conflicts_with = "revision")]
    pub merge: bool,
    /// The file (gguf) or folder (hf) to write; must not exist
    #[arg(long, value_name = "PATH")]
    pub output: PathBuf,
    /// hf: a folder that transformers opens; gguf: a file that llama.cpp runs
    #[arg(long, value_name = "FORMAT", value_parser = export_format())]
    pub format: ExportFormat,
    /// How weights are stored: hf takes f32, f16, bf16, an adapter f32, f16 [default: as they are]
    #[arg(long, value_name = "TYPE", value_parser = gguf_type())]
    pub r#type: Option<GgufType>,
    /// The model's branch, tag or commit on the hub
    #[arg(long, value_name = "REVISION", default_value = "main")]
    pub revision: String,
    /// Use the adapter on this model though it was trained on another
    #[arg(long, requires = "adapter")]
    pub force_base: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// The layouts of `finetune export`.
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
    /// A folder in Hugging Face layout, or a hub id [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL", required_unless_present = "adapter")]
    pub model: Option<String>,
    /// An adapter's folder, or a hub id
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Option<String>,
    /// A file, a folder or a hub data set; may be repeated
    #[arg(long, value_name = "DATASET", required = true)]
    pub dataset: Vec<String>,
    /// How rows are read.
    #[command(flatten)]
    pub rows: RowArgs,
    /// Use the adapter on this model though it was trained on another
    #[arg(long, requires = "adapter")]
    pub force_base: bool,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What decides how rows are read, apart from the model.
#[derive(Debug, Clone, Default, Args)]
pub struct RowArgs {
    /// A recipe whose [data] and [model] tables count
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<String>,
    /// Set one key of the recipe, such as data.max_seq_len=512; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

impl RowArgs {
    /// The layers of a recipe for `model` and `dataset`, both as given to their flags.
    ///
    /// # Errors
    /// When the recipe cannot be found or read.
    pub fn layers(&self, model: &str, dataset: &[String], folder: &Path) -> Result<RecipeLayers> {
        Ok(RecipeLayers {
            recipe: find_recipe(self.recipe.as_deref(), folder)?,
            model: Some(model.to_owned()),
            train: dataset.to_vec(),
            set: self.set.clone(),
            folder: folder.to_owned(),
            purpose: Purpose::Other,
            ..RecipeLayers::default()
        })
    }
}

/// Arguments of `finetune inspect`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune inspect out
  finetune inspect meta-llama/Llama-2-7b-hf")]
pub struct InspectArgs {
    /// A model or adapter: a folder, a safetensors file or a hub id
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
  finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --rows 20 --set data.train_on=all")]
pub struct DataArgs {
    /// The model whose tokenizer and chat template count: a folder or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: String,
    /// A file, a folder or a hub data set; may be repeated
    #[arg(long, value_name = "DATASET", required = true)]
    pub dataset: Vec<String>,
    /// Rows to show; all are checked
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rows: usize,
    /// Show each token on a line: its place, id, whether it is trained, its text
    #[arg(long, conflicts_with = "json")]
    pub tokens: bool,
    /// Print rows and figures as JSON, with `labels` of -100 where nothing is trained
    #[arg(long)]
    pub json: bool,
    /// Also write the rows as a page to this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// How rows are read.
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
    /// Without a word: list.
    #[command(subcommand)]
    pub action: Option<RecipesAction>,
}

/// What to do with the built-in recipes.
#[derive(Debug, Clone, Subcommand)]
pub enum RecipesAction {
    /// Say what each is for
    List,
    /// Print one recipe, or the reference of all keys
    Show {
        /// Its name, or `reference` for every key
        name: String,
        /// With `reference`: the section to print, such as data [default: all sections]
        section: Option<String>,
    },
    /// Write one to NAME.toml in the working folder; an existing file is not replaced
    Write {
        /// Its name, or `reference` for every key
        name: String,
    },
}

/// The weights that an adapter is merged onto (`finetune merge --base`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BaseChoice {
    /// The unquantized weights in the model's files
    Original,
    /// The weights that quantizing left of them
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
    /// A shell, or `man` for a manual page
    #[arg(value_name = "KIND")]
    pub kind: CompletionKind,
    /// The verb that the manual page is about [default: finetune as a whole]
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
                    return Err(format!("{gpu} stands there twice"));
                }
                gpus.push(gpu);
            }
        }
        Ok(Gpus(gpus))
    }
}

/// No host has more devices; keeps a slip such as `0-30000000000` from filling the memory.
const MOST_GPUS: usize = 1024;

fn dtype() -> impl TypedValueParser<Value = Dtype> {
    PossibleValuesParser::new(Dtype::NAMES).try_map(|text| text.parse::<Dtype>())
}

fn quant_kind() -> impl TypedValueParser<Value = QuantKind> {
    PossibleValuesParser::new(QuantKind::NAMES).try_map(|text| text.parse::<QuantKind>())
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

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 1).ok_or_else(|| "accepted: a whole number, at least 1".into())
}

fn nats(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|kl: &f64| kl.is_finite() && *kl > 0.0);
    number.ok_or_else(|| "accepted: a number above 0".into())
}

#[cfg(test)]
mod tests;
