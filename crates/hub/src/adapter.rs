//! Finds a PEFT adapter: in a folder, in the cache, or on the hub.
//!
//! An adapter is `adapter_config.json` and `adapter_model.safetensors`, with the tokenizer and the
//! chat template of its training if the repository has them. finetune never downloads the pickled
//! `adapter_model.bin` of older versions of PEFT. A download has the same safeguards as that of a
//! model or data set (names, digests, resumption, locks, the token). The configuration names the
//! base model; the caller finds it.

use std::path::{Path, PathBuf};

use super::fetch::Download;
use super::names::{self, Reference};
use super::select::{self, ModelMismatch, has};
use super::{DownloadProgress, HubOptions, Located, RepoRef, RepoSource, list_folder};
use crate::error::{Error, Result};

/// The configuration, required for every adapter.
const CONFIG: &str = "adapter_config.json";
/// File with the adapter's weights.
const WEIGHTS: &str = "adapter_model.safetensors";
/// The weights as older versions of PEFT wrote them.
const PICKLE: &str = "adapter_model.bin";

/// Finds a PEFT adapter; `id_or_path` is a folder, an id such as `owner/name`, or
/// `hf://owner/name`.
///
/// # Errors
/// `User` if the adapter does not exist, holds only a pickle, is a model, or may not be read;
/// `Transient` if the hub or the network fails, `Storage` if the cache cannot be written.
pub fn locate_adapter(
    id_or_path: &str,
    revision: &str,
    options: &HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<Located> {
    let id = match names::parse_reference(id_or_path, options.home.as_deref())? {
        Reference::Local(path) => return local_adapter(id_or_path, path),
        Reference::Hub(id) => id,
    };
    names::check_revision(revision)?;
    let adapter = RepoSource { subject: RepoRef::Adapter, id, revision: revision.to_owned(), options };
    if options.offline { adapter.cached_adapter(progress) } else { adapter.fetched_adapter(progress) }
}

/// Returns a local folder as it is, if its file names show that it holds an adapter.
fn local_adapter(given: &str, folder: PathBuf) -> Result<Located> {
    if !folder.is_dir() {
        return Err(Error::user(format!("adapter `{given}` is a file"))
            .because(format!("an adapter is a folder with {CONFIG} and {WEIGHTS}"))
            .hint(format!("give the folder that holds {CONFIG}")));
    }
    match check(&list_folder(&folder)?) {
        Ok(()) => Ok(Located { id: given.to_owned(), folder, commit: None, note: None, rows: Vec::new() }),
        Err(unfit) => {
            let error = unfit.error(&format!("folder `{}`", folder.display()));
            Err(match unfit {
                AdapterMismatch::Pickle => error.hint(conversion(&folder)),
                AdapterMismatch::Config if names::check_repo_id(given).is_ok() => {
                    error.hint(format!("write `hf://{given}` to take the adapter of this name from the hub"))
                }
                _ => error,
            })
        }
    }
}

impl RepoSource<'_> {
    fn fetched_adapter(&self, progress: &mut DownloadProgress<'_>) -> Result<Located> {
        let client = self.client()?;
        let description = client.describe(progress)?;
        check(&description.files).map_err(|unfit| {
            let error = unfit.error(client.subject());
            match unfit {
                AdapterMismatch::Pickle => error.hint(self.conversion()),
                _ => error,
            }
        })?;
        let wanted = wanted(&description.files);
        names::check_files(wanted.iter().copied())?;
        let store = self.store();
        let commit = description.commit.as_str();
        Download { client: &client, store: &store, commit, gated: description.gated }
            .fetch(&wanted, progress)?;
        store.set_commit(commit)?;
        Ok(self.located(store.snapshot(commit), commit.to_owned(), None))
    }

    fn cached_adapter(&self, progress: &mut DownloadProgress<'_>) -> Result<Located> {
        let (commit, files) = self.cached_files()?.ok_or_else(|| self.not_cached())?;
        let folder = self.store().snapshot(&commit);
        // A missing file may only not be in the cache yet, so no error is raised about the
        // repository.
        match [CONFIG, WEIGHTS].into_iter().find(|name| !has(&files, name)) {
            None => {
                self.verify(&commit, &wanted(&files), progress)?;
                Ok(self.located(folder, commit, None))
            }
            Some(missing) => {
                let error = self.incomplete(&folder, missing);
                Err(match check(&files) {
                    Err(AdapterMismatch::Model) => {
                        error.because("the cached files of it are those of a model")
                    }
                    _ => error,
                })
            }
        }
    }

    /// Returns the hint to download a pickled adapter from the hub and convert it.
    fn conversion(&self) -> String {
        let name = self.id.rsplit('/').next().unwrap_or(&self.id);
        format!(
            "download it with `hf download {} --revision {} --local-dir {name}` and {}",
            self.id,
            self.revision,
            conversion(Path::new(name))
        )
    }
}

/// Returns the hint to convert the pickle in a folder to safetensors. `weights_only` keeps torch
/// from running code in it; clones are needed, since safetensors refuses tensors that share memory.
fn conversion(folder: &Path) -> String {
    let folder = folder.display().to_string().replace('\'', r"'\''");
    format!(
        "convert it once with Python: `python -c \"import sys, torch; from safetensors.torch import save_file; \
         w = torch.load(sys.argv[1], map_location='cpu', weights_only=True); \
         save_file({{k: v.clone().contiguous() for k, v in w.items()}}, sys.argv[2], {{'format': 'pt'}})\" \
         '{folder}/{PICKLE}' '{folder}/{WEIGHTS}'`, and give that folder"
    )
}

/// The reason for which a repository or folder cannot be used as an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AdapterMismatch {
    /// A model, for which adapters are trained.
    Model,
    /// An adapter with pickled weights.
    Pickle,
    /// A configuration without weights, but perhaps with this weights file of another program.
    Weights(Option<String>),
    /// A folder without adapter_config.json.
    Config,
}

/// Checks that the names make up an adapter.
fn check(names: &[String]) -> Result<(), AdapterMismatch> {
    let foreign = |name: &&String| {
        [".safetensors", ".bin", ".pt", ".pth", ".gguf"].iter().any(|end| name.ends_with(end))
    };
    match (has(names, CONFIG), has(names, WEIGHTS)) {
        (true, true) => Ok(()),
        (true, false) if has(names, PICKLE) => Err(AdapterMismatch::Pickle),
        (true, false) => Err(AdapterMismatch::Weights(names.iter().find(foreign).cloned())),
        (false, false) if !has(names, PICKLE) && is_model(names) => Err(AdapterMismatch::Model),
        (false, _) => Err(AdapterMismatch::Config),
    }
}

fn is_model(names: &[String]) -> bool {
    has(names, select::CONFIG)
        || matches!(
            select::weights(names),
            Ok(_) | Err(ModelMismatch::Consolidated(_) | ModelMismatch::Gguf(_))
        )
}

/// Returns the files of an adapter, given the names of all files.
fn wanted(names: &[String]) -> Vec<&str> {
    let wanted = |name: &str| name == CONFIG || name == WEIGHTS || select::is_tokenizer(name, names);
    names.iter().map(String::as_str).filter(|name| wanted(name)).collect()
}

impl AdapterMismatch {
    /// Returns the error for `subject`, such as "adapter `a/b`".
    fn error(&self, subject: &str) -> Error {
        let accepted = format!("a PEFT adapter is {CONFIG} and {WEIGHTS}");
        match self {
            AdapterMismatch::Model => Error::user(format!("{subject} is a model and not a PEFT adapter"))
                .because(format!("it has no {CONFIG}"))
                .hint("give it with `--model` or `model.id`, and leave the adapter out or give another"),
            AdapterMismatch::Pickle => {
                Error::user(format!("{subject} holds only pickled weights ({PICKLE})"))
                    .because("a pickle can run code when it is opened, so it is neither downloaded nor read")
                    .because(accepted)
            }
            AdapterMismatch::Weights(foreign) => {
                let error = Error::user(format!("{subject} has no {WEIGHTS}"));
                match foreign {
                    Some(file) => error.because(format!("it holds {file}")).because(accepted),
                    None => error.because(accepted),
                }
            }
            AdapterMismatch::Config => Error::user(format!("{subject} has no {CONFIG}"))
                .because(accepted)
                .hint(format!("give a folder that holds {CONFIG}, or a hub id such as `owner/name`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_adapter_is_its_two_files_and_the_tokenizer() {
        let all = names(&[
            "README.md",
            "adapter_config.json",
            "adapter_model.bin",
            "adapter_model.safetensors",
            "additional_chat_templates/tool.jinja",
            "chat_template.jinja",
            "checkpoint-5/adapter_model.safetensors",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "optimizer.pt",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "training_args.bin",
        ]);
        assert_eq!(check(&all), Ok(()));
        let expected = [
            "adapter_config.json",
            "adapter_model.safetensors",
            "additional_chat_templates/tool.jinja",
            "chat_template.jinja",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ];
        assert_eq!(wanted(&all), expected);
    }

    #[test]
    fn what_is_no_adapter() {
        let unfit = |list: &[&str]| check(&names(list)).unwrap_err();
        assert_eq!(unfit(&["adapter_config.json", "adapter_model.bin"]), AdapterMismatch::Pickle);
        assert_eq!(unfit(&["adapter_config.json"]), AdapterMismatch::Weights(None));
        let foreign = AdapterMismatch::Weights(Some("pytorch_adapter.bin".to_owned()));
        assert_eq!(unfit(&["adapter_config.json", "pytorch_adapter.bin"]), foreign);
        assert_eq!(unfit(&["config.json", "pytorch_model.bin"]), AdapterMismatch::Model);
        assert_eq!(unfit(&["model.safetensors"]), AdapterMismatch::Model);
        assert_eq!(unfit(&["m.Q4_K.gguf"]), AdapterMismatch::Model);
        assert_eq!(unfit(&["consolidated.00.pth"]), AdapterMismatch::Model);
        assert_eq!(unfit(&["README.md"]), AdapterMismatch::Config);
        assert_eq!(unfit(&["adapter_model.safetensors"]), AdapterMismatch::Config);
        assert_eq!(unfit(&["adapter_model.bin", "config.json"]), AdapterMismatch::Config);
        assert_eq!(unfit(&["checkpoint-5/adapter_config.json"]), AdapterMismatch::Config);
    }
}
