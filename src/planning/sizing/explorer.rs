//! The page of `finetune plan --html`: the plan at hand, and a calculator over model sizes, ranks and settings by the same
//! formulas. One file, without a network.

use std::path::Path;

use super::Sizing;
use super::hardware::devices;
use crate::error::Result;
use crate::report::html::content_policy;
use crate::weights::OutputKind;

/// The page; its data and its policy stand in place of [`DATA`] and [`POLICY`].
const PAGE: &str = include_str!("explorer.html");
/// The text that the data replace.
const DATA: &str = "/*DATA*/null";
/// The text that the policy replaces.
const POLICY: &str = "<!--POLICY-->";
/// The beginning of every such page, which a new one may replace.
const BEGINNING: &str = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
                         content=\"width=device-width, initial-scale=1\">\n<title>finetune plan</title>\n";

/// The file of `--html`.
const OUTPUT: OutputKind = OutputKind {
    what: "a page of `finetune plan`",
    option: "--html",
    example: "plan.html",
    replaces: Some(BEGINNING),
};

/// Writes the page about a sizing.
///
/// # Errors
/// The user's: something other than such a page is at `path`. Storage: the file cannot be written.
pub fn write(sizing: &Sizing, path: &Path) -> Result<()> {
    OUTPUT.write(path, &page(sizing)?)
}

/// The page about a sizing. Its data are in its one script, as JSON without the characters that HTML obeys there.
///
/// # Errors
/// An internal error: the table of devices is malformed.
pub fn page(sizing: &Sizing) -> Result<String> {
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
