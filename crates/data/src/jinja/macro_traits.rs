//! Traits of a template's macros, which decide how callers pass arguments.

use std::collections::BTreeMap;

use super::tags::{TagKind, TemplateTag, TokenKind};

/// Traits of a macro that decide how callers pass arguments.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct MacroTraits {
    /// True if the macro has defaults.
    defaults: bool,
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
}

impl MacroTraits {
    /// Returns whether callers pack their arguments.
    pub(super) fn packs(self) -> bool {
        self.varargs || self.kwargs
    }

    /// Returns whether callers hide that an argument is undefined.
    pub(super) fn hides(self) -> bool {
        self.defaults && !self.packs()
    }
}

/// Macros of a template by name.
#[derive(Debug, Default)]
pub(super) struct TemplateMacros(BTreeMap<String, MacroTraits>);

impl TemplateMacros {
    pub(super) fn find(source: &str, tags: &[TemplateTag]) -> Self {
        let mut macros: BTreeMap<String, MacroTraits> = BTreeMap::new();
        // The macros that are open, the innermost last.
        let mut open: Vec<&str> = Vec::new();
        for tag in tags {
            let has = |text: &str| tag.tokens.iter().any(|token| &source[token.range.clone()] == text);
            let mut names =
                tag.tokens.iter().filter(|t| t.kind == TokenKind::Name).map(|t| &source[t.range.clone()]);
            match (tag.kind, names.next()) {
                (TagKind::Block, Some("macro")) => {
                    open.extend(names.next());
                    if let Some(name) = open.last() {
                        macros.entry((*name).to_owned()).or_default().defaults |= has("=");
                    }
                }
                (TagKind::Block, Some("endmacro")) => {
                    open.pop();
                }
                _ => {
                    if let Some(traits) = open.last().and_then(|name| macros.get_mut(*name)) {
                        traits.varargs |= has("varargs");
                        traits.kwargs |= has("kwargs");
                    }
                }
            }
        }
        TemplateMacros(macros)
    }

    pub(super) fn get(&self, name: &str) -> MacroTraits {
        self.0.get(name).copied().unwrap_or_default()
    }
}
