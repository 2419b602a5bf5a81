//! The range of a figure that a user writes: what lies within makes finite times and costs.

/// The numbers that a figure may be, both ends among them.
#[derive(Debug, Clone, Copy)]
pub(super) struct FigureRange {
    least: f64,
    most: f64,
    /// 0 is accepted, too, and stands for something that does not exist.
    or_none: bool,
}

impl FigureRange {
    pub(super) const fn new(least: f64, most: f64) -> Self {
        FigureRange { least, most, or_none: false }
    }

    /// The same, or 0 for what is not there.
    pub(super) const fn or_none(self) -> Self {
        FigureRange { or_none: true, ..self }
    }

    /// The reason for which `value` is refused as the figure `name`; none where it is within the range.
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
