//! Arguments of `finetune generate`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::shared::positive;
use super::{CommonArgs, ModelArgs};

/// Arguments of `finetune generate`.
#[derive(Debug, Clone, Args)]
#[command(
    group = ArgGroup::new("prompts").required(true).args(["prompt", "chat", "input"]),
    group = ArgGroup::new("answers").multiple(true).args(["output", "json"]),
    after_help = "\
Examples:
  finetune generate --model out --prompt \"Once upon a time\"
  finetune generate --adapter out --chat --temperature 0.7
  finetune generate --adapter out --chat \"What is the capital of Ruritania?\"
  finetune generate --adapter out --input prompts.jsonl --output answers.jsonl"
)]
pub struct GenerateArgs {
    /// Model and adapter.
    #[command(flatten)]
    pub source: ModelArgs,
    /// Recipe with chat template and model settings, such as out/recipe.toml
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<String>,
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Answer this turn of a chat; without TEXT, each line of standard input is a turn
    #[arg(long, value_name = "TEXT")]
    pub chat: Option<Option<String>>,
    /// Answer each row of this .jsonl file: {"prompt": "..."} or {"messages": [...]}
    #[arg(long, value_name = "FILE", requires = "answers")]
    pub input: Option<PathBuf>,
    /// File to write the rows of --input to, with their answers; must not exist
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with_all = ["prompt", "chat"])]
    pub output: Option<PathBuf>,
    /// System message of the chat
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompt", "input"])]
    pub system: Option<String>,
    /// Largest number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub max_new_tokens: usize,
    /// End an answer before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop)]
    pub stop: Vec<String>,
    /// Number of answers to each prompt
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = positive)]
    pub samples: usize,
    /// Sampling temperature; 0 always chooses the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f64,
    /// Sample among the N likeliest tokens
    #[arg(long, value_name = "N", value_parser = positive)]
    pub top_k: Option<usize>,
    /// Sample among the likeliest tokens that together have the probability P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = probability)]
    pub top_p: f64,
    /// Sample among tokens with at least P times the highest probability
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = share)]
    pub min_p: f64,
    /// Make tokens of prompt and answer less likely (above 1) or more likely (below 1)
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = penalty)]
    pub repetition_penalty: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Print a JSON object per prompt: answer, number of tokens, finish reason
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

fn temperature(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|t: &f64| t.is_finite() && *t >= 0.0);
    number.ok_or_else(|| "accepted: a number, at least 0".into())
}

fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|p: &f64| *p > 0.0 && *p <= 1.0);
    number.ok_or_else(|| "accepted: a number above 0, at most 1".into())
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|p: &f64| (0.0..=1.0).contains(p));
    number.ok_or_else(|| "accepted: a number from 0 to 1".into())
}

/// Reads a factor of logits, which are f32.
fn penalty(text: &str) -> Result<f64, String> {
    let in_f32 = |x: &f64| (*x as f32).is_finite() && *x as f32 > 0.0;
    text.parse().ok().filter(in_f32).ok_or_else(|| "accepted: a number above 0, such as 1.1".into())
}

fn stop(text: &str) -> Result<String, String> {
    Some(text)
        .filter(|text| !text.is_empty())
        .map(str::to_owned)
        .ok_or_else(|| "accepted: a text, not empty".into())
}
