//! The page of `finetune plan --html`: the current plan, and a calculator over model sizes, ranks
//! and settings with the same formulas. It is one file and needs no network.

use std::path::Path;

use super::Sizing;
use super::hardware::devices;
use crate::error::Result;
use crate::report::html::content_policy;
use crate::weights::OutputKind;

/// The page; its data and its policy replace [`DATA`] and [`POLICY`].
const PAGE: &str = include_str!("explorer.html");
/// The text that the data replace.
const DATA: &str = "/*DATA*/null";
/// The text that the policy replaces.
const POLICY: &str = "<!--POLICY-->";
/// The beginning of every such page. A new page may replace a file that begins so.
const BEGINNING: &str = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
                         content=\"width=device-width, initial-scale=1\">\n<title>finetune plan</title>\n";

/// The file of `--html`.
const OUTPUT: OutputKind = OutputKind {
    what: "a page of `finetune plan`",
    option: "--html",
    example: "plan.html",
    replaces: Some(BEGINNING),
};

/// Writes the page of a sizing to `path`.
///
/// # Errors
/// The user's: `path` exists and is no such page. Storage: the file cannot be written.
pub fn write(sizing: &Sizing, path: &Path) -> Result<()> {
    OUTPUT.write(path, &page(sizing)?)
}

/// Returns the page of a sizing. Its one script contains the data as JSON without characters
/// special to HTML.
///
/// # Errors
/// An internal error: the table of devices is malformed.
pub fn page(sizing: &Sizing) -> Result<String> {
    let mut devices = devices()?;
    // A device from a user's file can be selected like those of the table.
    if let Some(own) = sizing.hardware.as_ref().map(|hardware| &hardware.device)
        && !devices.iter().any(|known| known.name == own.name)
    {
        devices.push(own.clone());
    }
    let plan = Sizing { splits: Vec::new(), refused: Vec::new(), ..sizing.clone() };
    let data = serde_json::json!({ "plan": plan, "text": sizing.text(), "devices": devices });
    // The end tag of a script ends it even inside a string.
    let data = data.to_string().replace('<', "\\u003c");
    let page = PAGE.replacen(DATA, &data, 1);
    Ok(page.replacen(POLICY, &content_policy(&page), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_begins_as_is_known_and_has_one_place_of_each() {
        assert!(PAGE.starts_with(&format!("{BEGINNING}{POLICY}\n")));
        for part in [DATA, POLICY, "<script>", "</script>", "<style>", "</style>"] {
            assert_eq!(PAGE.matches(part).count(), 1, "{part}");
        }
        for parser in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "style="] {
            assert!(!PAGE.contains(parser), "{parser}");
        }
    }
}
