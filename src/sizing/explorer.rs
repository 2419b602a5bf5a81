//! The page of `finetune plan --html`: the plan at hand, and a calculator over model sizes, ranks and settings by the same
//! formulas. One file, without a network.

use std::path::Path;

use super::Sizing;
use super::hardware::devices;
use crate::error::{Error, Result};

/// The page; its data stand in place of [`DATA`].
const PAGE: &str = include_str!("explorer.html");
/// What the data replace.
const DATA: &str = "/*DATA*/null";

/// Writes the page about a sizing.
///
/// # Errors
/// The file cannot be written.
pub fn write(sizing: &Sizing, path: &Path) -> Result<()> {
    std::fs::write(path, page(sizing)?).map_err(|e| Error::io("write", path, &e))
}

fn page(sizing: &Sizing) -> Result<String> {
    let mut devices = devices()?;
    // One from a file of the user's is chosen like those of the table.
    if let Some(own) = sizing.hardware.as_ref().map(|hardware| &hardware.device)
        && !devices.iter().any(|known| known.name == own.name)
    {
        devices.push(own.clone());
    }
    let plan = Sizing { splits: Vec::new(), refused: Vec::new(), ..sizing.clone() };
    let data = serde_json::json!({ "plan": plan, "text": sizing.text(), "devices": devices });
    // What ends a script ends it within a text, too.
    let data = data.to_string().replace('<', "\\u003c");
    Ok(PAGE.replace(DATA, &data))
}
