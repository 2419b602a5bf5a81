//! `finetune merge`: base + adapter → a Hugging Face folder, with a certificate on request.

use std::cell::RefCell;
use std::path::Path;

use super::{model_or_base, open_device, terminal, working_folder};
use crate::adapter::{self, MergeOptions, MergeReport};
use crate::cli::MergeArgs;
use crate::data::{Tokenizer, stored_templates};
use crate::error::{Error, Result};
use crate::launcher::interrupt::removing_on_signals;
use crate::loading::{BaseModel, EngineOptions, Resolver};
use crate::recipe::{DataSource, ModelSection, Recipe};
use crate::report::Terminal;
use crate::units;
use crate::verify::{MergeBase, MergeCheck};
use crate::weights::ModelFiles;

/// Merges an adapter into its base.
pub(super) fn run(args: &MergeArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let model = model_or_base(args.model.as_deref(), Some(&args.adapter), &folder, &resolver, &terminal)?;
    let model = ModelSection {
        id: Some(DataSource::from_argument("--model", &model, &folder)?),
        ..ModelSection::default()
    };
    let mut base = BaseModel::open(&model, None, &resolver)?;
    let adapter = resolver.adapter(&DataSource::from_argument("--adapter", &args.adapter, &folder)?)?.folder;
    base.adopt(&adapter)?;
    check_template(&base, args)?;
    let comparison = RefCell::new(Some(base.check_adapter(&adapter, 0, args.force_base, &terminal)?));
    let decided = MergeBase::decide(args.base, &base, &adapter)?;
    terminal.line(format!("merging {}", decided.reason));
    let requantized = args.requantize;
    let named = |data: &String| DataSource::from_argument("--verify-on", data, &folder);
    let dataset = args.verify_on.as_ref().map(named).transpose()?;
    // Quantized weights are measured against those in the files.
    if !requantized {
        (base.format, base.skipped) = (decided.trained_over, decided.skipped.clone());
    }
    if requantized && dataset.is_none() {
        terminal.warn("quantizing the merged weights loses a part of the adapter's effect: `--verify-on DATASET` measures it");
    }
    let recipe = Recipe::default();
    let options = EngineOptions::new(&recipe.model, open_device()?, recipe.train.seed)?;
    let max_kl = args.max_kl.unwrap_or(decided.threshold(requantized));
    let verify = |merged: &Path| {
        comparison.take().map_or(Ok(()), |comparison| comparison.finish(&terminal))?;
        let Some(dataset) = &dataset else { return Ok(None) };
        let (base, adapter, options, resolver) = (&base, adapter.as_path(), &options, &resolver);
        let check = MergeCheck { base, adapter, dataset, max_kl, requantized, options, resolver };
        let certificate = check.certify(merged)?;
        certificate.lines().into_iter().for_each(|line| terminal.line(line));
        certificate.warning().into_iter().for_each(|warning| terminal.warn(warning));
        Ok(Some(certificate.to_json()))
    };
    let files = base.files.as_ref().ok_or_else(|| Error::internal("a model without files"))?;
    let options = MergeOptions {
        dtype: args.dtype,
        base: decided.values,
        skip: &decided.skipped,
        requantize: requantized,
        verify: &verify,
    };
    let report = removing_on_signals(&args.output, &terminal, || {
        adapter::merge(files, &adapter, &args.output, &options)
    })?;
    describe(&report, files, args, &terminal);
    Ok(())
}

/// Refuses an adapter with another chat template than that in the keys of a GGUF base, which stay.
fn check_template(base: &BaseModel, args: &MergeArgs) -> Result<()> {
    let keeps_keys = |files: &&ModelFiles| args.requantize && files.is_gguf();
    let Some(files) = base.files.as_ref().filter(keeps_keys) else { return Ok(()) };
    let default = |tokenizer: &Tokenizer| -> Result<Option<String>> {
        let mut templates = stored_templates(tokenizer)?.into_iter();
        Ok(templates.find(|(name, _)| name == "default").map(|(_, text)| text))
    };
    if default(&base.tokenizer()?)? == default(&Tokenizer::load(files.folder())?)? {
        return Ok(());
    }
    Err(Error::user(format!("cannot merge into the format of {}", files.source().display()))
        .because("the adapter was trained with another chat template, and the keys of a GGUF file stay")
        .hint("merge without `--requantize`, then write a GGUF file with `finetune export`"))
}

/// Prints what a merge changed.
fn describe(report: &MergeReport, files: &ModelFiles, args: &MergeArgs, terminal: &Terminal) {
    let bytes: u64 = report.files.iter().map(|file| file.bytes).sum();
    terminal.line(format!(
        "merged {}, replaced {}, copied {}: {} in {}",
        units::exact(report.merged, "module"),
        report.replaced,
        units::exact(report.copied, "tensor"),
        units::bytes(bytes),
        args.output.display()
    ));
    if args.requantize && files.is_gguf() {
        terminal.line("kept as they are: the keys of the GGUF file, with its tokenizer and chat template");
    }
    if files.retained().count() > 0 {
        terminal.line(format!("kept as they are: {}", files.retained().describe()));
    }
    if report.untied {
        terminal.line("the adapter trained embedding or head separately: config.json no longer ties them");
    }
}
