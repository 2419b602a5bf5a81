//! Chat templates inside the binary, by their common names.
//!
//! Each renders the text turns of the models of that name. All except "qwen" omit tool calls; a
//! warning counts the rows that have some.

/// Names and texts: the files in `chat_templates/`.
const NAMED: [(&str, &str); 9] = [
    ("chatml", include_str!("../../../chat_templates/chatml.jinja")),
    ("llama3", include_str!("../../../chat_templates/llama3.jinja")),
    ("gemma", include_str!("../../../chat_templates/gemma.jinja")),
    ("mistral", include_str!("../../../chat_templates/mistral.jinja")),
    ("phi", include_str!("../../../chat_templates/phi.jinja")),
    ("qwen", include_str!("../../../chat_templates/qwen.jinja")),
    ("alpaca", include_str!("../../../chat_templates/alpaca.jinja")),
    ("vicuna", include_str!("../../../chat_templates/vicuna.jinja")),
    ("zephyr", include_str!("../../../chat_templates/zephyr.jinja")),
];

/// Names in listing order.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    NAMED.iter().map(|(name, _)| *name)
}

/// Jinja text of the template `name`; none if unknown.
pub(super) fn named(name: &str) -> Option<&'static str> {
    NAMED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
