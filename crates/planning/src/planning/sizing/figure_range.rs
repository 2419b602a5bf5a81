//! The range of a number that a user enters. Values within it make finite times and costs.

/// The accepted numbers, both ends included.
#[derive(Debug, Clone, Copy)]
pub(super) struct FigureRange {
    least: f64,
    most: f64,
    /// True if 0 is also accepted, for something that does not exist.
    or_none: bool,
}

impl FigureRange {
    pub(super) const fn new(least: f64, most: f64) -> Self {
        FigureRange { least, most, or_none: false }
    }

    /// Returns the same range, with 0 also accepted for something that does not exist.
    pub(super) const fn or_none(self) -> Self {
        FigureRange { or_none: true, ..self }
    }

    /// Returns the reason to refuse `value` as the number `name`; none if it is within the range.
    pub(super) fn refusal(self, name: &str, value: f64) -> Option<String> {
        let FigureRange { least, most, or_none } = self;
        let none = if or_none { "0 for none, or " } else { "" };
        let accepted = (least..=most).contains(&value) || (or_none && value == 0.0);
        (!accepted).then(|| format!("`{name}` is {value:?}; accepted: {none}{least:?} to {most:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_both_ends() {
        let range = FigureRange::new(0.001, 1e6);
        for value in [0.001, 1.0, 1e6] {
            assert_eq!(range.refusal("x", value), None);
        }
        assert_eq!(range.or_none().refusal("x", 0.0), None);
        for (value, shown) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e-308, "1e-308"),
            (-1.0, "-1.0"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
        ] {
            let wanted = format!("`x` is {shown}; accepted: 0.001 to 1000000.0");
            assert_eq!(range.refusal("x", value), Some(wanted));
        }
        let none = range.or_none().refusal("x", f64::NAN);
        assert_eq!(none.as_deref(), Some("`x` is NaN; accepted: 0 for none, or 0.001 to 1000000.0"));
    }
}
