//! `finetune inspect`: describes a model or adapter from its file headers.

use std::fmt::Write;
use std::path::Path;

use super::{terminal, working_folder};
use crate::adapter::{self, SavedAdapter};
use crate::cli::InspectArgs;
use crate::error::Result;
use crate::loading::{Resolver, gguf_base};
use crate::model::{self, ModelConfig};
use crate::recipe::DataSource;
use crate::units;
use crate::weights::sidecar_files::CONFIG_FILE;
use crate::weights::{self, ModelFiles, Tally};

/// Prints the description of a model, an adapter or a file.
pub(super) fn run(args: &InspectArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let source = DataSource::from_argument("", &args.source, &working_folder()?)?;
    if let DataSource::Path(path) = &source {
        if let Some(folder) = gguf_base::described(path)? {
            return terminal.data(of_model(&ModelFiles::open(&folder)?)?);
        }
        if path.is_file() {
            return terminal.data(of_file(path)?);
        }
        let is_model = path.join(CONFIG_FILE).exists();
        let below = if is_model { path.clone() } else { adapter::one_below(path)? };
        if below.join(adapter::CONFIG_FILE).exists() {
            return terminal.data(of_adapter(&below)?);
        }
        return terminal.data(of_model(&ModelFiles::open(path)?)?);
    }
    let resolver = Resolver::new(args.common.offline, &terminal)?.leaving_weights();
    let (resolved, weights) = resolver.model_and_weights(&source, "main")?;
    terminal.data(of_model(&weights.open(&resolved.folder)?)?)
}

fn of_model(files: &ModelFiles) -> Result<String> {
    let summary = weights::summary_of(files)?;
    let mut text = String::new();
    let unknown = || "unknown".to_owned();
    let _ = writeln!(text, "architecture  {}", summary.architecture.clone().unwrap_or_else(unknown));
    let _ = writeln!(text, "model_type    {}", summary.model_type.clone().unwrap_or_else(unknown));
    let _ = writeln!(text, "parameters    {}", tally(&summary.total));
    if let Some(active) = active_weights(files.folder()) {
        let _ = writeln!(
            text,
            "  active      {} for a token, which does not use all experts",
            units::count(active)
        );
    }
    for (dtype, part) in &summary.dtypes {
        let _ = writeln!(text, "  {:<11} {}", dtype.to_string(), tally(part));
    }
    for (kind, part) in &summary.quantized {
        let _ = writeln!(text, "  {kind:<11} {}", tally(part));
    }
    let _ = writeln!(text, "tensors by group");
    for (group, part) in &summary.groups {
        let _ = writeln!(text, "  {:<11} {}", format!("{group:?}").to_lowercase(), tally(part));
    }
    let _ = writeln!(text, "files");
    for (name, bytes) in &summary.files {
        let _ = writeln!(text, "  {name}  {}", units::bytes(*bytes));
    }
    Ok(text)
}

/// Returns the number of weights that a token uses; `None` for a model without experts, or one that
/// finetune does not compute.
fn active_weights(folder: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(folder.join(CONFIG_FILE)).ok()?;
    let config = ModelConfig::from_json(&text, CONFIG_FILE).ok()?;
    let all: u64 = model::parameters(&config).iter().map(|spec| spec.len() as u64).sum();
    let unused = model::unused_weights(&config);
    (unused > 0).then(|| all - unused)
}

fn tally(tally: &Tally) -> String {
    let tensors = units::exact(tally.tensors, "tensor");
    format!("{} in {tensors}, {}", units::count(tally.elements), units::bytes(tally.bytes))
}

fn of_adapter(folder: &Path) -> Result<String> {
    let adapter = SavedAdapter::read(folder)?;
    let config = adapter.config();
    let mut text = String::from("PEFT adapter   LoRA\n");
    let base = config.base_model_name_or_path.as_deref().unwrap_or("not named");
    let _ = writeln!(text, "base           {base}");
    let _ = writeln!(text, "r              {}", config.spec.r);
    let _ = writeln!(text, "lora_alpha     {}", config.spec.lora_alpha);
    let _ = writeln!(text, "lora_dropout   {}", config.lora_dropout);
    let _ = writeln!(text, "use_rslora     {}", config.spec.use_rslora);
    let _ = writeln!(text, "modules        {}", adapter.targets().len());
    for target in adapter.targets() {
        let _ = writeln!(text, "  {}  r {}  scale {}", target.name, target.r, target.scale);
    }
    for lora in adapter.parameters() {
        let _ = writeln!(text, "  {}  r {}  scale {}, of each expert", lora.name, lora.r, lora.scale);
    }
    for saved in adapter.saved() {
        let _ = writeln!(text, "  {saved}  saved whole");
    }
    Ok(text)
}

fn of_file(path: &Path) -> Result<String> {
    let files = ModelFiles::open_file(path)?;
    let mut text = String::new();
    for (name, info) in files.tensors() {
        let _ = writeln!(text, "{name}  {:?}  {}", info.shape, info.dtype);
    }
    Ok(text)
}
