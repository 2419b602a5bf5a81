//! How long a call takes: the median over batches of calls, after calls that do not count.

use std::time::Instant;

use candle_core::Device;

use crate::error::Result;
use crate::median::median;

/// Batches at least.
const BATCHES: usize = 3;

/// Batches within the time that is asked for, about: where a call is short, the wait for the device behind a batch must be
/// a small part of it.
const BATCHES_ASKED: f64 = 30.0;

/// The most calls in a batch: all are queued on a GPU, whose queue is not endless.
const MOST_CALLS: usize = 500;

/// For how long a call is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuringTime {
    /// Seconds of all batches together at least.
    secs: f64,
    /// A first call that takes longer is the result: to load code and touch memory takes no time beside it, and a product
    /// of minutes is not to be done four times.
    long_secs: f64,
}

impl MeasuringTime {
    pub(super) fn of_secs(secs: f64) -> Self {
        MeasuringTime { secs, long_secs: 2.0 }
    }

    /// Seconds of one call of `repeat`, with the work that it leaves on `device`.
    ///
    /// # Errors
    /// Those of `repeat`; the device fails.
    pub(super) fn secs_of_a_call(self, device: &Device, repeat: impl Fn() -> Result<()>) -> Result<f64> {
        let batch = |calls: usize| -> Result<f64> {
            device.synchronize()?;
            let start = Instant::now();
            for _ in 0..calls {
                repeat()?;
            }
            device.synchronize()?;
            Ok(start.elapsed().as_secs_f64() / calls as f64)
        };
        // The first call loads code, fills pools and touches memory; the second says how long one takes.
        let first = batch(1)?;
        if first > self.long_secs {
            return Ok(first);
        }
        let calls = ((self.secs / BATCHES_ASKED / batch(1)?) as usize).clamp(1, MOST_CALLS);
        let (mut batches, start) = (Vec::new(), Instant::now());
        while batches.len() < BATCHES || start.elapsed().as_secs_f64() < self.secs {
            batches.push(batch(calls)?);
        }
        Ok(median(batches).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;
    use crate::error::Error;

    /// How often a sleep is called.
    fn calls_of(time: MeasuringTime, sleep: Duration) -> usize {
        let calls = Cell::new(0);
        let run = || {
            calls.set(calls.get() + 1);
            std::thread::sleep(sleep);
            Ok(())
        };
        let measured = time.secs_of_a_call(&Device::Cpu, run).expect("a sleep does not fail");
        assert!(measured >= sleep.as_secs_f64(), "{measured}");
        calls.get()
    }

    #[test]
    fn a_long_call_is_made_once_and_a_short_one_often() {
        let sleep = Duration::from_millis(5);
        assert_eq!(calls_of(MeasuringTime { secs: 1.0, long_secs: 0.004 }, sleep), 1);
        // Two before, then three batches of one.
        assert_eq!(calls_of(MeasuringTime { secs: 0.001, long_secs: 1e3 }, sleep), 5);
        assert!(calls_of(MeasuringTime { secs: 2.0, long_secs: 1e3 }, Duration::from_micros(1)) > 5);
    }

    #[test]
    fn a_call_that_fails_ends_it() {
        let fails = || Err(Error::internal("cannot run"));
        assert!(MeasuringTime::of_secs(0.001).secs_of_a_call(&Device::Cpu, fails).is_err());
    }
}
