//! The cost of a run: `--price 32.77/h*8`, `--price 0.14/GB-month*1200`.

use super::figure_range::FigureRange;
use crate::error::{Error, Result};

/// The range of the cost of one machine or of 10^9 bytes.
const AMOUNT: FigureRange = FigureRange::new(1e-9, 1e9).or_none();
/// The range of the number of machines or of 10^9 bytes.
const TIMES: FigureRange = FigureRange::new(1e-6, 1e9);
/// Hours of a month, as clouds bill storage: 365 days over twelve.
const MONTH_HOURS: f64 = 730.0;

/// Money per time, or for storage over a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Price {
    /// The hourly price of machines.
    Hour {
        /// The price of one machine.
        amount: f64,
        /// Number of machines.
        count: f64,
    },
    /// The monthly price of storage, per 10^9 bytes.
    Storage {
        /// The price of 10^9 bytes in a month.
        amount: f64,
        /// The number of 10^9 bytes; none: the files that the run leaves.
        gigabytes: Option<f64>,
    },
}

impl Price {
    /// Parses `AMOUNT/h[*COUNT]` or `AMOUNT/GB-month[*GB]`.
    ///
    /// # Errors
    /// The user's: the text is neither, or an amount is negative or not a number.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = |why: String| {
            Error::user(format!("cannot use the price {text:?} (`--price`)"))
                .because(why)
                .hint("write AMOUNT/h[*COUNT], such as 32.77/h*8, or AMOUNT/GB-month[*GB], such as 0.14/GB-month*1200")
        };
        let number = |what: &str, text: &str, range: FigureRange| {
            let number = text
                .parse::<f64>()
                .map_err(|_| refused(format!("{what} is {text:?}, which is no number")))?;
            range.refusal(what, number).map_or(Ok(number), |why| Err(refused(why)))
        };
        let Some((amount, unit)) = text.split_once('/') else {
            return Err(refused("it has no `/h` and no `/GB-month`".into()));
        };
        let amount = number("AMOUNT", amount.trim_start_matches('$'), AMOUNT)?;
        let (unit, times) = match unit.split_once('*') {
            Some((unit, times)) if unit == "h" => (unit, Some(number("COUNT", times, TIMES)?)),
            Some((unit, times)) => (unit, Some(number("GB", times, TIMES)?)),
            None => (unit, None),
        };
        match unit {
            "h" => Ok(Price::Hour { amount, count: times.unwrap_or(1.0) }),
            "GB-month" => Ok(Price::Storage { amount, gigabytes: times }),
            _ => Err(refused(format!("the unit is {unit:?}; accepted: h, GB-month"))),
        }
    }

    /// Returns the cost of `hours`. Storage without a size in the price counts `left` bytes.
    pub fn of(self, hours: f64, left: u64) -> f64 {
        match self {
            Price::Hour { amount, count } => amount * count * hours,
            Price::Storage { amount, gigabytes } => {
                amount * gigabytes.unwrap_or(left as f64 / 1e9) * hours / MONTH_HOURS
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published cases, whose quoted sums differ a little.
    #[test]
    fn published_costs_are_computed_again() -> Result<()> {
        let week = 7.0 * 24.0;
        // Eight hosts for a week: often quoted as 44,054.
        assert_eq!(Price::parse("32.77/h*8")?.of(week, 0).round(), 44_043.0);
        // 10 TB of a parallel file system for the same week: often quoted as 98.
        assert_eq!(Price::parse("0.14/GB-month*10240")?.of(week, 0).round(), 330.0);
        assert_eq!(Price::parse("$2/GB-month")?.of(MONTH_HOURS, 3_000_000_000), 6.0);
        Ok(())
    }

    #[test]
    fn what_is_no_price_is_refused() {
        for (text, why) in [
            ("32.77", "no `/h`"),
            ("-1/h", "`AMOUNT` is -1.0; accepted: 0 for none, or 1e-9 to 1000000000.0"),
            ("x/h", "AMOUNT is \"x\", which is no number"),
            ("1/h*-2", "`COUNT` is -2.0; accepted: 1e-6 to 1000000000.0"),
            ("3/h*0", "`COUNT` is 0.0"),
            ("3/GB-month*1e300", "`GB` is 1e300"),
            ("1/day", "the unit is \"day\""),
            ("NaN/h", "`AMOUNT` is NaN"),
            ("1e308/h*1000000", "`AMOUNT` is 1e308"),
        ] {
            let error = Price::parse(text).expect_err(text).to_string();
            assert!(error.contains(why) && error.contains("hint:"), "{text}: {error}");
        }
    }
}
