//! Recipes inside the binary, and the search that `--recipe` makes.

use std::path::{Path, PathBuf};

use super::suggest::nearest;
use crate::error::input_file;
use crate::error::{Error, Result};

/// A recipe that ships with the binary.
#[derive(Debug)]
pub struct BuiltIn {
    /// Name for `--recipe`.
    pub name: &'static str,
    /// Text of the file of that name in `recipes/`.
    pub text: &'static str,
}

impl BuiltIn {
    /// Returns the built-in recipe `name`, with or without `.toml`.
    ///
    /// # Errors
    /// Unknown name; the error names the nearest one.
    pub fn find(name: &str) -> Result<&'static BuiltIn> {
        let stem = name.strip_suffix(".toml").unwrap_or(name);
        BUILT_IN.iter().find(|recipe| recipe.name == stem).ok_or_else(|| {
            let names: Vec<&str> = BUILT_IN.iter().map(|recipe| recipe.name).collect();
            let error = Error::user(format!("unknown built-in recipe `{stem}`"))
                .because(format!("built in: {}", names.join(", ")));
            match nearest(stem, names) {
                Some(near) => error.hint(format!("write `{near}`")),
                None => error.hint("`finetune recipes` lists the built-in recipes and their purposes"),
            }
        })
    }

    /// Purpose of the recipe: the first line of its opening comment.
    pub fn about(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches(['#', ' '])
    }
}

macro_rules! built_in {
    ($($name:literal),+ $(,)?) => {
        &[$( BuiltIn { name: $name, text: include_str!(concat!("../../../recipes/", $name, ".toml")) }, )+]
    };
}

/// Every recipe in `recipes/`.
pub const BUILT_IN: &[BuiltIn] = built_in![
    "quickstart",
    "pretrain-tiny",
    "lora",
    "qlora",
    "qlora-8bit-optimizer",
    "dora",
    "full",
    "dpo",
    "kto",
    "orpo",
    "cpo",
    "simpo",
    "ddp-lora",
    "fsdp-full",
    "fsdp-qlora",
    "hsdp-full",
];

/// Text of a recipe and its origin.
#[derive(Debug, Clone)]
pub struct RecipeText {
    /// Name in messages: the path as given, or `NAME (built in)`.
    pub name: String,
    /// Text of the recipe, in TOML.
    pub text: String,
    /// Folder of its relative paths.
    pub folder: PathBuf,
}

impl RecipeText {
    /// True if this is the built-in recipe `name` and not a file.
    pub fn is_built_in(&self, name: &str) -> bool {
        self.name == built_in_name(name)
    }

    /// Finds the recipe for `--recipe name`: the file `name` or `name.toml` in `folder`, else a
    /// built-in one.
    ///
    /// # Errors
    /// Neither exists, or the file cannot be read.
    pub fn find(name: &str, folder: &Path) -> Result<RecipeText> {
        for file in [name.to_owned(), format!("{name}.toml")] {
            let path = folder.join(&file);
            // A FIFO or a device counts too; the error of reading names its kind.
            if path.exists() && !path.is_dir() {
                let text = input_file::read_text("read recipe", &path)?;
                let folder = path.parent().unwrap_or(folder).to_owned();
                return Ok(RecipeText { name: file, text, folder });
            }
        }
        let recipe = BuiltIn::find(name).map_err(|error| {
            let file = if folder.join(name).is_dir() { "it is a folder" } else { "no such file" };
            error.during(file).during(format!("cannot find recipe `{name}`"))
        })?;
        Ok(RecipeText {
            name: built_in_name(recipe.name),
            text: recipe.text.to_owned(),
            folder: folder.to_owned(),
        })
    }
}

fn built_in_name(name: &str) -> String {
    format!("{name} (built in)")
}
