//! The model card: `README.md` of an adapter or a model, as the Hugging Face hub reads it.
//!
//! YAML front matter for the hub, then text for people: base model, data and settings, measured
//! quality, usage. Everything comes from a plain [`Card`], and the card claims nothing that was not
//! measured.

use std::fs;
use std::path::Path;

use super::markdown;
use super::metrics::EvalReport;
use super::printable::printable;
use crate::error::{Error, Result};
use crate::units;

/// The source of the base model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CardBase {
    /// A model of the hub; `commit` is the one that its files were taken from.
    Hub {
        /// Id on the hub, `org/name`.
        id: String,
        /// The commit's hash.
        commit: Option<String>,
    },
    /// A folder of this machine: title and front matter name it, commands need its path.
    Folder {
        /// The folder's last name.
        name: String,
        /// The absolute path of the folder.
        path: String,
        /// The path as a word of a shell.
        word: String,
    },
    /// A model inside the binary, which no other program has.
    Builtin {
        /// Its id in this program, `builtin:NAME`.
        id: String,
    },
    /// Random weights: trained from nothing but a configuration.
    Scratch,
}

/// The result beside the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artifact {
    /// A PEFT adapter to put on the base.
    Adapter,
    /// A whole model.
    Model,
}

/// One data set of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardData {
    /// A file's name, or `org/name` of a data set of the hub.
    pub name: String,
    /// True if it is a data set of the hub.
    pub on_hub: bool,
    /// Rows that were used.
    pub rows: u64,
}

/// The contents of a card.
#[derive(Debug, Clone)]
pub struct Card {
    /// The title: the name of the output folder.
    pub title: String,
    /// The result beside the card.
    pub artifact: Artifact,
    /// The base model.
    pub base: CardBase,
    /// The method as a tag of the hub: `lora`, `qlora`, `full`.
    pub tag: String,
    /// The method in words.
    pub method: String,
    /// The data sets trained on.
    pub train_data: Vec<CardData>,
    /// The held-out data sets.
    pub eval_data: Vec<CardData>,
    /// The resolved recipe, as TOML.
    pub recipe: String,
    /// Optimizer steps done.
    pub steps: u64,
    /// Tokens trained on, padding not counted.
    pub tokens: u64,
    /// Parameters that were trained.
    pub trainable_params: u64,
    /// Mean training loss of the last step.
    pub final_train_loss: Option<f64>,
    /// The held-out figures before training.
    pub before: Option<EvalReport>,
    /// The held-out figures after training.
    pub after: Option<EvalReport>,
    /// The held-out figures of the last step, if the card describes the best weights of the run.
    pub last: Option<EvalReport>,
    /// True if the rows were chats, which decides the examples.
    pub chat: bool,
}

impl Card {
    /// Writes the card to `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.render()).map_err(|e| Error::io("write", path, &e))
    }

    /// Returns the whole text of the card.
    pub fn render(&self) -> String {
        let sections =
            [self.front_matter(), self.opening(), self.results(), self.data(), self.usage(), self.how()];
        sections.join("\n")
    }

    fn front_matter(&self) -> String {
        let library = match self.artifact {
            Artifact::Adapter => "peft",
            Artifact::Model => "transformers",
        };
        let mut yaml = String::from("---\n");
        if let CardBase::Hub { id, .. } = &self.base {
            yaml += &format!("base_model: {}\n", quoted(id));
            if self.artifact == Artifact::Adapter {
                yaml += "base_model_relation: adapter\n";
            }
        }
        yaml += &format!("library_name: {library}\npipeline_tag: text-generation\ntags:\n- finetune\n");
        yaml += &format!("- {}\n", quoted(&self.tag));
        let hub_data: Vec<&CardData> = self.train_data.iter().filter(|data| data.on_hub).collect();
        if !hub_data.is_empty() {
            yaml += "datasets:\n";
            hub_data.iter().for_each(|data| yaml += &format!("- {}\n", quoted(&data.name)));
        }
        yaml + "---\n"
    }

    fn opening(&self) -> String {
        let what = match self.artifact {
            Artifact::Adapter => "An adapter in PEFT's layout",
            Artifact::Model => "A language model in Hugging Face's layout",
        };
        let base = match &self.base {
            CardBase::Hub { id, commit: Some(commit) } => {
                format!("for [{id}](https://huggingface.co/{id}) at commit {}", markdown::code(commit))
            }
            CardBase::Hub { id, commit: None } => format!("for [{id}](https://huggingface.co/{id})"),
            CardBase::Folder { name, .. } => format!("for the local model {}", markdown::code(name)),
            CardBase::Builtin { id } => {
                format!("for {}, a model inside the `finetune` binary", markdown::code(id))
            }
            CardBase::Scratch => "from random weights".to_owned(),
        };
        let base = match self.artifact {
            Artifact::Adapter => base,
            Artifact::Model => {
                base.replacen("for ", "made from ", 1).replacen("from random", "trained from random", 1)
            }
        };
        format!(
            "# {}\n\n{what} {base}, trained by `finetune` ({}): {} parameters, {} steps, {} tokens.\n",
            markdown::name(&self.title),
            self.method,
            units::count(self.trainable_params),
            self.steps,
            units::count(self.tokens),
        )
    }

    fn results(&self) -> String {
        let mut text = String::from("## Measured\n\n");
        if let Some(loss) = self.final_train_loss {
            text += &format!("Training loss of the last step: {loss:.4}.\n");
        }
        if self.before.is_none() && self.after.is_none() {
            return text + "No held-out rows were given, so nothing is known about unseen text.\n";
        }
        if let (Some(saved), Some(last)) = (&self.after, &self.last)
            && saved.step != last.step
        {
            text += &format!(
                "\nThe weights are those of step {}, which did best on held-out rows; the loss there after the last step was \
                 {:.4}.\n",
                saved.step, last.eval_loss
            );
        }
        text += "\nOn held-out rows:\n\n| | before | after |\n|---|---|---|\n";
        let row = |name: &str, show: &dyn Fn(&EvalReport) -> Option<String>| {
            let cell = |report: &Option<EvalReport>| report.as_ref().and_then(show);
            match (cell(&self.before), cell(&self.after)) {
                (None, None) => String::new(),
                (before, after) => {
                    let dash = || "–".to_owned();
                    format!("| {name} | {} | {} |\n", before.unwrap_or_else(dash), after.unwrap_or_else(dash))
                }
            }
        };
        let is_preference = self.after.as_ref().is_some_and(|after| !after.eval_objective.is_empty());
        let name = if is_preference { "loss" } else { "loss (nats per token)" };
        text += &row(name, &|r| Some(format!("{:.4}", r.eval_loss)));
        for metric in ["rewards/accuracies", "rewards/margins"] {
            text += &row(metric, &|r| r.eval_objective.get(metric).map(|mean| format!("{mean:.4}")));
        }
        text += &row("perplexity", &|r| Some(format!("{:.4}", r.eval_perplexity)).filter(|t| t.len() < 16));
        text += &row("token accuracy", &|r| r.eval_token_accuracy.map(|v| format!("{:.1} %", 100.0 * v)));
        text += &row("exact match", &|r| r.eval_exact_match.map(|v| format!("{:.1} %", 100.0 * v)));
        text
    }

    fn data(&self) -> String {
        let mut text = String::from("## Data\n\n| data set | rows | used for |\n|---|---|---|\n");
        for (data, used) in [(&self.train_data, "training"), (&self.eval_data, "evaluation")] {
            data.iter()
                .for_each(|d| text += &format!("| {} | {} | {used} |\n", markdown::cell(&d.name), d.rows));
        }
        text
    }

    fn usage(&self) -> String {
        let (base, word, commit) = match &self.base {
            CardBase::Hub { id, commit } => (id.as_str(), id.as_str(), commit.as_deref()),
            CardBase::Builtin { id } => (id.as_str(), id.as_str(), None),
            CardBase::Folder { path, word, .. } if is_printed_as_it_is(path) => {
                (path.as_str(), word.as_str(), None)
            }
            CardBase::Folder { .. } | CardBase::Scratch => ("BASE", "BASE", None),
        };
        let revision = commit.map(|c| format!(", revision={}", quoted(c))).unwrap_or_default();
        let (command, python, load) = match (self.artifact, &self.base) {
            // No other program can load this base: it must become a folder first.
            (Artifact::Adapter, CardBase::Builtin { .. }) => (
                self.generate_with(base),
                format!(
                    "Other programs have no `{base}` to put the adapter on. Made into a whole model,\n\n\
                     ```sh\nfinetune merge --model {base} --adapter . --output merged\n```\n\nit loads in Python:"
                ),
                load_model("merged"),
            ),
            (Artifact::Adapter, _) => (
                self.generate_with(word),
                "or in Python:".to_owned(),
                format!(
                    "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
                     tokenizer = AutoTokenizer.from_pretrained({0}{revision})\n\
                     model = AutoModelForCausalLM.from_pretrained({0}{revision})\n\
                     model = PeftModel.from_pretrained(model, \".\")\n",
                    quoted(base)
                ),
            ),
            (Artifact::Model, _) => (
                format!("finetune generate --model . {}", self.input()),
                "or in Python:".to_owned(),
                load_model("."),
            ),
        };
        let inputs = if self.chat {
            "chat = [{\"role\": \"user\", \"content\": \"...\"}]\n\
             inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors=\"pt\", return_dict=True)\n"
        } else {
            "inputs = tokenizer(\"...\", return_tensors=\"pt\")\n"
        };
        format!(
            "## Use\n\nIn this folder:\n\n```sh\n{command}\n```\n\n{python}\n\n```python\n{load}{inputs}\
             print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))\n```\n"
        )
    }

    /// Returns the command that answers with the adapter of this folder on the base that `word`
    /// names in a shell.
    fn generate_with(&self, word: &str) -> String {
        format!("finetune generate --model {word} --adapter . {}", self.input())
    }

    /// Returns the input of `finetune generate` in the form of the rows: a chat, or a text to
    /// continue.
    fn input(&self) -> &'static str {
        if self.chat { "--chat" } else { "--prompt \"...\"" }
    }

    fn how(&self) -> String {
        format!("## Recipe\n\n{}", markdown::block("toml", &self.recipe))
    }
}

/// Returns the lines of Python that load the whole model in `folder`.
fn load_model(folder: &str) -> String {
    let folder = quoted(folder);
    format!(
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
         tokenizer = AutoTokenizer.from_pretrained({folder})\n\
         model = AutoModelForCausalLM.from_pretrained({folder})\n"
    )
}

/// Returns whether `path` fits on one line of a card without an escape.
fn is_printed_as_it_is(path: &str) -> bool {
    printable(path) == path && !path.contains(['\n', '\t'])
}

/// Returns a YAML and Python string: JSON's quoting is valid in both.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
