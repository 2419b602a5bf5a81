//! The wall clock, which may be far off: reading it never panics and never ends a run.
//!
//! `chrono::Local::now` panics before 1970 and after the year 262,143. A clock with an empty
//! battery or a broken file system can show such times.

use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, FixedOffset, Local, SecondsFormat, TimeZone as _, Utc};

/// First second that RFC 3339 can write in every time zone: 0001-01-02.
const FIRST: i64 = -62_135_510_400;
/// Last second that RFC 3339 can write in every time zone: 9999-12-30.
const LAST: i64 = 253_402_128_000;

/// Current time in the local time zone, clamped to the years 1 to 9999.
pub fn now() -> DateTime<FixedOffset> {
    moment(SystemTime::now())
}

/// Current time as RFC 3339 text, to the second.
pub fn now_as_text() -> String {
    now().to_rfc3339_opts(SecondsFormat::Secs, false)
}

fn moment(time: SystemTime) -> DateTime<FixedOffset> {
    let secs = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_secs()).unwrap_or(LAST),
        Err(before) => i64::try_from(before.duration().as_secs()).map_or(FIRST, |secs| -secs),
    };
    let nanos = time.duration_since(UNIX_EPOCH).map_or(0, |after| after.subsec_nanos());
    let utc = DateTime::from_timestamp(secs.clamp(FIRST, LAST), nanos).unwrap_or(DateTime::<Utc>::UNIX_EPOCH);
    Local.from_utc_datetime(&utc.naive_utc()).fixed_offset()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chrono::Datelike as _;

    use super::*;

    #[test]
    fn a_clock_that_stands_anywhere_is_read() {
        let year = |secs: i64| {
            let distance = Duration::from_secs(secs.unsigned_abs());
            let time =
                if secs < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) };
            let moment = moment(time.unwrap());
            assert!(moment.to_rfc3339_opts(SecondsFormat::Secs, false).len() >= 20);
            moment.year()
        };
        let of_a_year = 31_556_952;
        assert_eq!(year(of_a_year * 40 + 200 * 86_400), 2010);
        assert_eq!(year(-of_a_year + 100 * 86_400), 1969);
        assert_eq!(year(of_a_year * 300_000), 9999);
        assert_eq!(year(-of_a_year * 300_000), 1);
        assert_eq!(year(i64::MAX / 2), 9999);
        assert_eq!(year(i64::MIN / 2), 1);
        let own = moment(UNIX_EPOCH + Duration::from_millis(1_700_000_000_250));
        assert_eq!((own.timestamp(), own.timestamp_subsec_millis()), (1_700_000_000, 250));
    }
}
