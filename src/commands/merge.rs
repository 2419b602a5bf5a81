//! `finetune merge`: base + adapter → a Hugging Face folder.

use super::{terminal, working_folder};
use crate::adapter;
use crate::cli::MergeArgs;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::plan::{Adaptation, Finder};
use crate::recipe::{Dtype, Source};
use crate::units;
use crate::weights::{ModelFiles, OutputDtype};

/// Merges.
pub(super) fn run(args: &MergeArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let finder = Finder::new(args.common.offline, &terminal)?;
    let base = finder.model(&Source::from_argument("--model", &args.model, &folder)?, "main")?;
    let adapter = finder.adapter(&Source::from_argument("--adapter", &args.adapter, &folder)?)?;
    let path = base.folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
    let config = ModelConfig::from_json(&text, &path.display().to_string())?;
    // An adapter of another model is told apart by names and shapes before anything is written.
    Adaptation::saved_in(&adapter.folder, &config)?;
    let files = ModelFiles::open(&base.folder)?;
    let dtype = match args.dtype {
        Dtype::Auto => OutputDtype::Auto,
        Dtype::F32 => OutputDtype::F32,
        Dtype::Bf16 => OutputDtype::BF16,
        Dtype::F16 => OutputDtype::F16,
    };
    let report = adapter::merge(&files, &adapter.folder, &args.output, dtype)?;
    let bytes: u64 = report.files.iter().map(|file| file.bytes).sum();
    terminal.line(format!(
        "merged {} modules, replaced {}, copied {} tensors: {} in {}",
        report.merged,
        report.replaced,
        report.copied,
        units::bytes(bytes),
        args.output.display()
    ));
    if report.untied {
        terminal.line("the adapter trained embedding or head apart: config.json now says that they are not tied");
    }
    Ok(())
}
