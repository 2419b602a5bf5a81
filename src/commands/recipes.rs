//! `finetune recipes`: lists, prints or writes the built-in recipes.

use std::borrow::Cow;
use std::path::PathBuf;

use super::print;
use crate::cli::{RecipesAction, RecipesArgs};
use crate::error::{Error, ErrorCategory, Result};
use crate::recipe::{BUILT_IN, BuiltIn, Recipe};
use crate::weights::OutputKind;

/// Name of the reference of all keys.
const REFERENCE: &str = "reference";

/// Lists, prints or writes recipes.
pub(super) fn run(args: RecipesArgs) -> Result<()> {
    match args.action.unwrap_or(RecipesAction::List) {
        RecipesAction::List => print(&list()),
        RecipesAction::Show { name, section: None } => print(&text(&name)?),
        RecipesAction::Show { name, section: Some(section) } => print(&section_text(&name, &section)?),
        RecipesAction::Write { name } => write(&name),
    }
}

fn list() -> String {
    let width = BUILT_IN.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0).max(REFERENCE.len());
    let recipes = BUILT_IN.iter().map(|recipe| (recipe.name, recipe.about()));
    let lines = recipes.chain([(REFERENCE, "Every section and key, with its default.")]);
    lines.map(|(name, about)| format!("{name:width$}  {about}\n")).collect()
}

fn text(name: &str) -> Result<Cow<'static, str>> {
    if name == REFERENCE {
        return Ok(Recipe::reference().into());
    }
    Ok(BuiltIn::find(name)?.text.into())
}

/// Returns one section of the reference. `section` may have brackets.
fn section_text(name: &str, section: &str) -> Result<String> {
    if name != REFERENCE {
        let what = format!("cannot show a part of the recipe `{name}`");
        return Err(Error::new(ErrorCategory::Usage, what)
            .because(format!("`{section}` is given as its section; only `{REFERENCE}` has parts"))
            .hint(format!("write `finetune recipes show {name}`, or `... show {REFERENCE} {section}`")));
    }
    Recipe::reference_of(section.trim_matches(['[', ']']))
}

/// Writes `NAME.toml` to the working folder; refuses to replace a file.
fn write(name: &str) -> Result<()> {
    let text = text(name)?;
    let path = PathBuf::from(format!("{}.toml", name.strip_suffix(".toml").unwrap_or(name)));
    let kind = OutputKind { what: "a recipe", option: "NAME", example: "recipe.toml", replaces: None };
    kind.write(&path, &text).map_err(|error| {
        error.hint(format!("`finetune recipes show {name} > OTHER.toml` writes to another file"))
    })?;
    print(&format!("{}\n", path.display()))
}
