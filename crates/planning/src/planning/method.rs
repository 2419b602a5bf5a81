//! The training method in words, for the plan, the model card and the report.

use std::fmt;

use crate::loading::adapter_setup::AdapterSetup;
use crate::quant::QuantFormat;
use crate::units;

/// The method of a run in words: `LoRA, r 16, on 21 modules`, `all weights (full fine-tuning)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Method {
    tag: &'static str,
    text: String,
}

impl Method {
    /// Describes a run that trains `adapter_setup` over a base quantized to `format`; without an
    /// adapter, all weights.
    pub fn new(adapter_setup: Option<&AdapterSetup>, format: Option<QuantFormat>) -> Self {
        let Some(adapter_setup) = adapter_setup else {
            return Method { tag: "full", text: "all weights (full fine-tuning)".into() };
        };
        let in_4_bits = format.is_some_and(|format| format.scheme().hint().bits < 8);
        let (tag, name) = match (adapter_setup.config.spec.use_dora, in_4_bits) {
            (false, false) => ("lora", "LoRA"),
            (false, true) => ("qlora", "QLoRA"),
            (true, false) => ("dora", "DoRA"),
            (true, true) => ("qdora", "QDoRA"),
        };
        let ranks = adapter_setup.targets.iter().map(|target| target.r);
        let rank = match (ranks.clone().min(), ranks.max()) {
            (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
            (_, most) => most.unwrap_or(adapter_setup.config.spec.r).to_string(),
        };
        let base = format.map_or_else(String::new, |format| format!(" over {}", format.scheme().describe()));
        let modules = units::exact(adapter_setup.targets.len(), "module");
        let text = format!("{name}, r {rank}, on {modules}{base}");
        Method { tag, text }
    }

    /// Returns the tag of model cards on the hub: `lora`, `qlora`, `dora`, `qdora` or `full`.
    pub fn tag(&self) -> &'static str {
        self.tag
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
