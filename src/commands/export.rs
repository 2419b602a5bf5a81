//! `finetune export`: a model as a GGUF file or a Hugging Face folder, an adapter as a GGUF file.
//!
//! With `--merge`, `finetune merge` first merges the adapter into a temporary folder beside the
//! output.

use std::path::{Path, PathBuf};

use super::{config_of, merge, model_or_base, terminal, working_folder};
use crate::cli::{CommonArgs, ExportArgs, ExportFormat, MergeArgs, ModelArgs};
use crate::error::{Error, Result};
use crate::export::gguf::{self, Exported, GgufType};
use crate::export::hf;
use crate::launcher::interrupt::removing_on_signals;
use crate::loading::BaseCheck;
use crate::loading::{ResolvedSource, Resolver};
use crate::model;
use crate::recipe::{DataSource, Dtype};
use crate::report::Terminal;
use crate::units;
use crate::weights::{AtomicDir, ModelFiles};

/// Exports a model, or an adapter.
pub(super) fn run(args: &ExportArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let dtype = check(args)?;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let ModelArgs { model, adapter, force_base } = &args.source;
    let adapter = adapter.as_deref();
    if let Some(adapter) = adapter.filter(|_| args.merge) {
        let source = DataSource::from_argument("--adapter", adapter, &folder)?;
        return export_merged(args, adapter, &name_of(&resolver.adapter(&source)?), &folder, &terminal);
    }
    let model = model_or_base(model.as_deref(), adapter, &folder, &resolver, &terminal)?;
    let source = DataSource::from_argument("--model", &model, &folder)?;
    if let Some(adapter) = adapter {
        // Only config.json of the base is required. A sample of its weights is compared if they are
        // present.
        let headers = resolver.model_headers(&source, &args.revision)?;
        let config = config_of(&headers)?;
        let adapter = resolver.adapter(&DataSource::from_argument("--adapter", adapter, &folder)?)?;
        BaseCheck::of_headers(&adapter.folder, &headers, &config, *force_base)?.print(&terminal);
        let kind = args.r#type.unwrap_or(GgufType::F32);
        let exported = removing_on_signals(&args.output, &terminal, || {
            gguf::write_adapter(&config, &adapter.folder, &name_of(&adapter), kind, &args.output)
        })?;
        print_summary(&terminal, &exported, &args.output);
        return Ok(());
    }
    let resolved = resolver.model(&source, &args.revision)?;
    let mut config = config_of(&resolved)?;
    let mut files = ModelFiles::open(&resolved.folder)?;
    model::settle(&mut config, &mut files)?;
    files.warnings().for_each(|note| terminal.warn(note));
    match args.format {
        ExportFormat::Hf => {
            let bytes = removing_on_signals(&args.output, &terminal, || {
                hf::export(&files, &args.output, dtype, hf::SHARD_BYTES)
            })?;
            let shown = args.output.display();
            terminal.line(format!("exported {} of weights to {shown}", units::bytes(bytes)));
        }
        ExportFormat::Gguf => {
            let kind = args.r#type.unwrap_or_else(|| gguf::stored_type(&files));
            let exported = removing_on_signals(&args.output, &terminal, || {
                gguf::write_model(&config, &files, &name_of(&resolved), kind, &args.output)
            })?;
            print_summary(&terminal, &exported, &args.output);
        }
    }
    Ok(())
}

/// Merges the adapter into a temporary folder called `name` beside the output, and exports that
/// model. Relative paths start at `folder`.
fn export_merged(
    args: &ExportArgs,
    adapter: &str,
    name: &str,
    folder: &Path,
    terminal: &Terminal,
) -> Result<()> {
    if args.format == ExportFormat::Hf {
        // Refuses an existing output before the work, not after it.
        drop(AtomicDir::create(&args.output)?);
    }
    let mut merged_folder = folder.join(&args.output).components().collect::<PathBuf>().into_os_string();
    merged_folder.push(".merged");
    removing_on_signals(&args.output, terminal, || {
        let temporary = AtomicDir::create(Path::new(&merged_folder))?;
        let merged = temporary.path().join(name);
        terminal.line(format!("merging adapter {adapter} in {}", temporary.path().display()));
        merge::run(&MergeArgs {
            model: args.source.model.clone(),
            adapter: adapter.to_owned(),
            output: merged.clone(),
            dtype: Dtype::Auto,
            base: None,
            requantize: false,
            verify_on: None,
            max_kl: None,
            force_base: args.source.force_base,
            common: CommonArgs { quiet: true, verbose: false, ..args.common.clone() },
        })?;
        let source = ModelArgs { model: Some(merged.display().to_string()), ..ModelArgs::default() };
        run(&ExportArgs { source, merge: false, ..args.clone() })
    })
}

/// Refuses arguments that do not match before any file is opened. Returns the dtype of a Hugging
/// Face folder.
fn check(args: &ExportArgs) -> Result<Dtype> {
    if args.format == ExportFormat::Gguf {
        gguf::OUTPUT.refuse_taken(&args.output)?;
        return Ok(Dtype::Auto);
    }
    if args.source.adapter.is_some() && !args.merge {
        return Err(Error::user("cannot export an adapter as a Hugging Face model")
            .because("accepted with `--adapter` alone: `--format gguf`")
            .hint("add `--merge`, which merges the adapter into its model first"));
    }
    match args.r#type {
        None => Ok(Dtype::Auto),
        Some(GgufType::F32) => Ok(Dtype::F32),
        Some(GgufType::F16) => Ok(Dtype::F16),
        Some(GgufType::BF16) => Ok(Dtype::Bf16),
        Some(other) => Err(Error::user(format!("cannot store a Hugging Face model as {other}"))
            .because("accepted with `--format hf`: f32, f16, bf16")
            .hint("write `--format gguf`")),
    }
}

/// Returns the name of a hub repository without its owner, or of a folder.
fn name_of(source: &ResolvedSource) -> String {
    let name = source.name();
    name.rsplit('/').next().unwrap_or(&name).to_owned()
}

fn print_summary(terminal: &Terminal, exported: &Exported, output: &Path) {
    let of_type = |(kind, count): (&String, &usize)| format!("{} {kind}", units::exact(*count, "tensor"));
    let types: Vec<String> = exported.types.iter().map(of_type).collect();
    let size = units::bytes(exported.bytes);
    terminal.line(format!("exported {}: {size} in {}", types.join(", "), output.display()));
    exported.fallback_note().iter().for_each(|note| terminal.line(note));
    for note in &exported.notes {
        terminal.warn(note);
    }
}
