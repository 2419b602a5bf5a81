//! Base model of an adapter, for verbs without `--model`.

use std::path::Path;

use crate::adapter::{self, AdapterConfig};
use crate::error::{Error, Result};
use crate::loading::Resolver;
use crate::recipe::DataSource;
use crate::report::Terminal;

/// Returns the model of a verb in the form of its flag: that of `--model`, else the base that the
/// adapter's adapter_config.json names, which is printed. Relative paths start at `folder`.
///
/// # Errors
/// The user's: neither is given; the adapter names no base, or one that cannot be found.
pub(super) fn model_or_base(
    model: Option<&str>,
    adapter: Option<&str>,
    folder: &Path,
    resolver: &Resolver<'_>,
    terminal: &Terminal,
) -> Result<String> {
    if let Some(model) = model {
        return Ok(model.to_owned());
    }
    let Some(adapter) = adapter else {
        return Err(Error::user("no model is named").hint("add `--model MODEL`"));
    };
    let saved = resolver.adapter(&DataSource::from_argument("--adapter", adapter, folder)?)?.folder;
    let base = named_in(&saved).map_err(|error| {
        error
            .during(format!("cannot find the model of adapter {adapter}"))
            .hint("add `--model MODEL`, the model that the adapter was trained on")
    })?;
    terminal.line(format!("model {base}, which the adapter names"));
    Ok(base)
}

/// Returns the base that adapter_config.json in `adapter` names: a folder on this machine or a hub
/// id.
fn named_in(adapter: &Path) -> Result<String> {
    let config = AdapterConfig::read(adapter)?;
    let name = adapter::CONFIG_FILE;
    let base = config.base_model_name_or_path.filter(|base| !base.is_empty());
    let Some(base) = base else {
        return Err(Error::user(format!("{name} has no `base_model_name_or_path`")));
    };
    // Other programs write paths relative to the adapter: tried if the working folder has no such
    // path.
    let beside = adapter.join(&base);
    let here =
        if !Path::new(&base).exists() && beside.is_dir() { beside.display().to_string() } else { base };
    DataSource::from_argument("", &here, Path::new(""))
        .map(|source| source.to_string())
        .map_err(|_| Error::user(format!("{name} names {here} as its base, and there is no such folder")))
}
