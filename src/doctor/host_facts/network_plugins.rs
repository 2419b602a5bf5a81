//! Plugins by which NCCL uses networks without built-in support, such as Amazon's EFA.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::sysfs;

/// Source of the plugin for EFA.
const EFA_PLUGIN: &str = "https://github.com/aws/aws-ofi-nccl";

/// Folders in which Amazon's installers put the plugin. The loader does not search them.
const OUTSIDE: [&str; 4] = [
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/amazon/ofi-nccl/lib64",
    "opt/aws-ofi-nccl/lib",
];

/// Folders that the loader searches by default.
const DEFAULT_FOLDERS: [&str; 7] = [
    "lib",
    "lib64",
    "usr/lib",
    "usr/lib64",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
];

/// NCCL's network plugins (`libnccl-net*.so`) on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct NetworkPlugins {
    /// Files that the loader finds.
    #[serde(rename = "found")]
    paths: Vec<PathBuf>,
    /// Files in folders that the loader does not search.
    outside: Vec<PathBuf>,
    /// Value of `NCCL_NET_PLUGIN`.
    asked: Option<String>,
}

impl NetworkPlugins {
    /// Searches below `root`, in the folders of `library_path` (the variable `LD_LIBRARY_PATH`)
    /// first. `asked` is the value of the variable `NCCL_NET_PLUGIN`.
    pub(crate) fn read(root: &Path, library_path: &str, asked: Option<String>) -> Self {
        let folders = loader_folders(root, library_path);
        let outside =
            OUTSIDE.iter().map(|folder| root.join(folder)).filter(|folder| !folders.contains(folder));
        let outside = outside.flat_map(|folder| plugins_in(&folder)).collect();
        let mut plugins: Vec<PathBuf> = folders.iter().flat_map(|folder| plugins_in(folder)).collect();
        plugins.dedup();
        NetworkPlugins { paths: plugins, outside, asked }
    }

    /// Describes the plugins. `has_efa`: this machine has EFA devices.
    pub(crate) fn text(&self, has_efa: bool) -> String {
        let list = |files: &[PathBuf]| {
            files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
        };
        let asked =
            self.asked.iter().map(|name| format!(" (NCCL_NET_PLUGIN is `{name}`)")).collect::<String>();
        if !self.paths.is_empty() {
            return list(&self.paths) + &asked;
        }
        if let Some(folder) = self.outside.first().and_then(|file| file.parent()) {
            let (files, folder) = (list(&self.outside), folder.display());
            return format!(
                "{files}, where the loader does not look: `export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH`"
            );
        }
        if has_efa {
            return format!(
                "none, and NCCL does not use EFA without one: install aws-ofi-nccl, {EFA_PLUGIN}{asked}"
            );
        }
        format!("none, and none is needed without EFA{asked}")
    }
}

/// Returns the folders that the loader searches: those of the variable, of `ld.so.conf`, and its
/// own.
fn loader_folders(root: &Path, library_path: &str) -> Vec<PathBuf> {
    let conf = root.join("etc/ld.so.conf.d");
    let files = std::iter::once(root.join("etc/ld.so.conf"));
    let files = files.chain(sysfs::names(&conf).into_iter().map(|name| conf.join(name)));
    let texts: Vec<String> = files.filter_map(|file| sysfs::text(&file)).collect();
    let configured = texts.iter().flat_map(|text| text.lines()).map(str::trim);
    let named = library_path.split(':').chain(configured.filter(|line| line.starts_with('/')));
    let named = named.filter(|folder| !folder.is_empty());
    let mut folders: Vec<PathBuf> =
        named.chain(DEFAULT_FOLDERS).map(|folder| root.join(folder.trim_start_matches('/'))).collect();
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|folder| seen.insert(std::fs::canonicalize(folder).unwrap_or_else(|_| folder.clone())));
    folders
}

/// Returns the plugins in a folder.
fn plugins_in(folder: &Path) -> Vec<PathBuf> {
    let is_plugin = |name: &String| name.starts_with("libnccl-net") && name.ends_with(".so");
    sysfs::names(folder).into_iter().filter(is_plugin).map(|name| folder.join(name)).collect()
}
