//! The second table of docs/dev/gpu-work.md: a step of LoRA on two published models, with the sizes
//! of their config.json. One block, or one period of blocks, is counted and multiplied.

use std::fmt::Write;

use serde_json::Value;

use super::work_table::{Figures, is_on_the_page};
use super::{Mode, Run, load_model};

/// A published model, how it is trained, and the blocks that repeat.
struct Model {
    name: &'static str,
    mode: Mode,
    method: &'static str,
    /// Blocks that repeat: one, or Gated DeltaNet in three and attention in the fourth.
    period: usize,
}

const MODELS: [Model; 2] = [
    Model { name: "Qwen/Qwen3-30B-A3B", mode: Mode::Qlora, method: "QLoRA", period: 1 },
    Model { name: "Qwen/Qwen3.5-9B (text)", mode: Mode::Lora, method: "LoRA", period: 4 },
];

/// Tokens of a micro-batch: 2 rows of 2,048.
const TOKENS: f64 = 4096.0;

/// Seconds in which a host launches a kernel: an assumption.
const LAUNCH: f64 = 5e-6;

fn config(name: &str) -> Value {
    let table: Value = serde_json::from_str(include_str!("../golden/published.json")).unwrap();
    let model = table.as_array().unwrap().iter().find(|model| model["name"] == name);
    model.unwrap()["config"].clone()
}

impl Model {
    /// Returns the figures of a step.
    fn figures(&self) -> Figures {
        let whole = config(self.name);
        let layers = usize::try_from(whole["num_hidden_layers"].as_u64().unwrap()).unwrap();
        let run = Run { mode: self.mode, recompute: false, dropout: 0.0, accumulation: 1 };
        let of = |periods: usize| {
            let mut config = whole.clone();
            config["num_hidden_layers"] = (periods * self.period).into();
            load_model(&config, run).second_step().0
        };
        Figures::with_more([of(1), of(2)], (layers / self.period - 1) as f64)
    }
}

/// Compares the page with what is counted now.
pub(super) fn are_those_of_the_page() {
    let mut table =
        "| model | run | calls | GB | ms by the model | ms of launches | tokens a second, at most |\n\
                     |---|---|---|---|---|---|---|\n"
            .to_owned();
    for model in MODELS {
        let Figures { calls, bytes, secs } = model.figures();
        let launches = LAUNCH * calls;
        let (name, method) = (model.name, model.method);
        let rate = TOKENS / secs.max(launches);
        writeln!(
            table,
            "| {name} | {method} | {calls:.0} | {:.1} | {:.1} | {:.1} | {rate:.0} |",
            bytes / 1e9,
            1e3 * secs,
            1e3 * launches
        )
        .unwrap();
    }
    is_on_the_page("published_models.rs", &table);
}
