//! Rewrites macros with defaults, and those that read `varargs` or `kwargs`.
//!
//! minijinja evaluates defaults before it binds the arguments, treats an undefined argument as
//! missing, and does not know `varargs` and `kwargs`. So the tag of a macro sets its parameters
//! itself:
//!
//! - A default that reads names is evaluated after the parameters before it. Callers pass arguments
//!   through `given__`, which hides that one is undefined; `taken__` reverses that.
//! - A macro that reads `varargs` or `kwargs` takes a single argument, `packed__`; callers pack
//!   theirs in it.
//!
//! The macro's name identifies callers. A caller by another name passes at most one argument to a
//! macro of the second kind.

use std::ops::Range;

use super::edits::SourceEdits;
use super::macro_traits::{MacroTraits, TemplateMacros};
use super::rewrite_expression::ExpressionReader;
use super::tags::{TemplateTag, TokenKind};

/// A parameter of a macro: its name, and its default in rewritten form.
struct MacroParameter<'a> {
    name: &'a str,
    /// The byte range from the `=` to the end of the default.
    range: Range<usize>,
    default: Option<String>,
    /// True if the default reads names.
    reads: bool,
}

/// Rewrites the tag that begins a macro.
pub(super) fn rewrite(
    source: &str,
    tag: &TemplateTag,
    macros: &TemplateMacros,
    edits: &mut SourceEdits,
) -> Option<()> {
    let name = tag.tokens.get(1)?;
    let open = tag.tokens.get(2).filter(|token| &source[token.range.clone()] == "(")?.range.end;
    let close = tag.tokens.last().filter(|token| &source[token.range.clone()] == ")")?.range.start;
    let parameters = parameters(source, tag, macros)?;
    let name = &source[name.range.clone()];
    let mut lead = String::new();
    let traits = macros.get(name);
    if traits.packs() {
        edits.instead(open..close, "packed__");
        for (index, parameter) in parameters.iter().enumerate() {
            let (name, default) = (parameter.name, parameter.default.as_deref().unwrap_or("undefined__"));
            lead.push_str(&format!(
                "{{% set argument__ = bound__(packed__, {index}, '{name}') %}}{{% if argument__ %}}{{% set {name} = argument__[0] %}}{{% else %}}{{% set {name} = {default} %}}{{% endif %}}"
            ));
        }
        let names: Vec<String> = parameters.iter().map(|parameter| format!("'{}'", parameter.name)).collect();
        let (count, names) = (names.len(), names.join(", "));
        let MacroTraits { varargs, kwargs, .. } = traits;
        lead.push_str(&format!(
            "{{% set varargs = varargs__(packed__, {count}, {varargs}) %}}{{% set kwargs = kwargs__(packed__, [{names}], {kwargs}) %}}"
        ));
    } else if traits.hides() {
        let reads = parameters.iter().any(|parameter| parameter.reads);
        for parameter in &parameters {
            let name = parameter.name;
            if let Some(default) = parameter.default.as_ref().filter(|_| reads) {
                edits.instead(parameter.range.clone(), "");
                lead.push_str(&format!(
                    "{{% if {name} is undefined %}}{{% set {name} = {default} %}}{{% endif %}}"
                ));
            }
            lead.push_str(&format!("{{% set {name} = taken__({name}) %}}"));
        }
    } else {
        return Some(());
    }
    // The whitespace control of the tag's end moves to the end of the added text.
    let end = &source[tag.close.clone()];
    let lead = lead.strip_suffix("%}").unwrap_or(&lead);
    edits.instead(tag.close.clone(), format!(" %}}{lead}{end}"));
    Some(())
}

fn parameters<'a>(
    source: &'a str,
    tag: &TemplateTag,
    macros: &TemplateMacros,
) -> Option<Vec<MacroParameter<'a>>> {
    let mut edits = SourceEdits::default();
    let mut reader = ExpressionReader::new(source, &tag.tokens, macros, &mut edits);
    let mut defaults: Vec<(&str, Option<Range<usize>>, usize)> = Vec::new();
    for _ in 0..2 {
        reader.any_name()?;
    }
    reader.operator("(")?;
    let mut marks = Vec::new();
    while reader.operator(")").is_none() {
        let name = &source[reader.any_name()?];
        let mut default = None;
        let mut start = 0;
        if let Some(equals) = reader.operator("=") {
            start = equals.start;
            marks.push(reader.mark());
            let (from, to) = reader.expression()?;
            default = Some(from..to);
        }
        defaults.push((name, default, start));
        if reader.operator(",").is_none() {
            reader.operator(")")?;
            break;
        }
    }
    reader.at_end()?;
    // Reverse order, because each parameter takes the changes after its mark.
    let mut parameters = Vec::new();
    for (name, default, start) in defaults.into_iter().rev() {
        parameters.push(match default {
            None => MacroParameter { name, range: 0..0, default: None, reads: false },
            Some(range) => {
                let changes = edits.take_from(marks.pop()?);
                let reads = tag.tokens.iter().any(|token| {
                    let text = &source[token.range.clone()];
                    let constant = matches!(text, "none" | "None" | "true" | "True" | "false" | "False");
                    range.contains(&token.range.start) && token.kind == TokenKind::Name && !constant
                });
                let default = changes.apply(source, range.clone());
                MacroParameter { name, range: start..range.end, default: Some(default), reads }
            }
        });
    }
    parameters.reverse();
    Some(parameters)
}
