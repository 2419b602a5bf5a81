//! What a run costs: `--price 32.77/h*8`, `--price 0.14/GB-month*1200`.

use serde::Serialize;

use crate::error::{Error, Result};

/// Hours of a month, as clouds bill storage: 365 days over twelve.
const MONTH_HOURS: f64 = 730.0;

/// Money for a time, or for storage over a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Price {
    /// An hour of so many machines, each at this price.
    Hour {
        /// The price of one.
        amount: f64,
        /// How many there are.
        count: f64,
    },
    /// So many 10^9 bytes kept for a month, each at this price; none: what the run leaves.
    Storage {
        /// Of 10^9 bytes in a month.
        amount: f64,
        /// How many there are.
        gigabytes: Option<f64>,
    },
}

impl Price {
    /// What is typed: `AMOUNT/h[*COUNT]` or `AMOUNT/GB-month[*GB]`.
    ///
    /// # Errors
    /// The user's: it is neither, or an amount is negative or no number.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = |why: &str| {
            Error::user(format!("cannot use the price {text:?} (`--price`)"))
                .because(why)
                .hint("write AMOUNT/h[*COUNT], such as 32.77/h*8, or AMOUNT/GB-month[*GB], such as 0.14/GB-month*1200")
        };
        let number = |text: &str| text.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
        let Some((amount, unit)) = text.split_once('/') else {
            return Err(refused("it has no `/h` and no `/GB-month`"));
        };
        let amount = number(amount.trim_start_matches('$'));
        let amount = amount.ok_or_else(|| refused("the amount is no number of 0 or more"))?;
        let (unit, times) = match unit.split_once('*') {
            Some((unit, times)) => {
                let times = number(times).filter(|times| *times > 0.0);
                let times = times.ok_or_else(|| refused("what stands after `*` is no number above 0"))?;
                (unit, Some(times))
            }
            None => (unit, None),
        };
        match unit {
            "h" => Ok(Price::Hour { amount, count: times.unwrap_or(1.0) }),
            "GB-month" => Ok(Price::Storage { amount, gigabytes: times }),
            _ => Err(refused(&format!("the unit is {unit:?}; accepted: h, GB-month"))),
        }
    }

    /// The cost of `hours` in which storage is kept, or `left` bytes where the price does not say how much.
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

    /// Cases that are told with other sums.
    #[test]
    fn published_costs_are_computed_again() -> Result<()> {
        let week = 7.0 * 24.0;
        // Eight hosts for a week: often told as 44,054.
        assert_eq!(Price::parse("32.77/h*8")?.of(week, 0).round(), 44_043.0);
        // 10 TB of a parallel file system for the same week: often told as 98.
        assert_eq!(Price::parse("0.14/GB-month*10240")?.of(week, 0).round(), 330.0);
        assert_eq!(Price::parse("$2/GB-month")?.of(MONTH_HOURS, 3_000_000_000), 6.0);
        Ok(())
    }

    #[test]
    fn what_is_no_price_is_refused() {
        for (text, why) in [
            ("32.77", "no `/h`"),
            ("-1/h", "no number of 0 or more"),
            ("x/h", "no number of 0 or more"),
            ("1/h*-2", "after `*`"),
            ("3/h*0", "after `*` is no number above 0"),
            ("1/day", "the unit is \"day\""),
            ("NaN/h", "no number"),
        ] {
            let error = Price::parse(text).expect_err(text).to_string();
            assert!(error.contains(why) && error.contains("hint:"), "{text}: {error}");
        }
    }
}
