//! `finetune recipes`: what is built in, to read or to start one's own from.

use std::borrow::Cow;
use std::path::PathBuf;

use super::print;
use crate::cli::{RecipesAction, RecipesArgs};
use crate::error::Result;
use crate::recipe::{BUILT_IN, BuiltIn, Recipe};
use crate::weights::OutputKind;

/// The name under which every key is shown.
const REFERENCE: &str = "reference";

/// Lists, shows or writes.
pub(super) fn run(args: RecipesArgs) -> Result<()> {
    match args.action.unwrap_or(RecipesAction::List) {
        RecipesAction::List => print(&list()),
        RecipesAction::Show { name } => print(&text(&name)?),
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

/// Writes `NAME.toml` here, never over a file.
fn write(name: &str) -> Result<()> {
    let text = text(name)?;
    let path = PathBuf::from(format!("{}.toml", name.strip_suffix(".toml").unwrap_or(name)));
    let kind = OutputKind { what: "a recipe", option: "NAME", example: "recipe.toml", replaces: None };
    kind.write(&path, &text).map_err(|error| {
        error.hint(format!("`finetune recipes show {name} > OTHER.toml` writes to another file"))
    })?;
    print(&format!("{}\n", path.display()))
}
