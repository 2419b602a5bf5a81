//! Facts as `finetune doctor` shows them: a name and what is known of it, a line each.

/// A name and what is known of it.
pub(crate) type FactLine = (String, String);

/// One fact, as a line.
pub(crate) fn line(name: impl Into<String>, value: impl Into<String>) -> FactLine {
    (name.into(), value.into())
}

/// The lines under each other, values in one column.
pub(crate) fn table(lines: &[FactLine]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}
