//! Lines of `finetune doctor`, each with a name and a value.

/// Name and value of a fact.
pub(crate) type FactLine = (String, String);

/// Creates the line of a fact.
pub(crate) fn line(name: impl Into<String>, value: impl Into<String>) -> FactLine {
    (name.into(), value.into())
}

/// Formats the lines with all values in one column.
pub(crate) fn table(lines: &[FactLine]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}
