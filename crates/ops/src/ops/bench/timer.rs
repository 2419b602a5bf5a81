//! Timing of a call: the median over batches of calls, after warm-up calls.

use std::time::Instant;

use candle_core::Device;

use crate::error::Result;
use crate::median::median;
use crate::runtime::device::wait_for;

/// Minimum number of batches.
const BATCHES: usize = 3;

/// Target number of batches within the requested time: the wait for the device after a batch must
/// be small compared with a batch of short calls.
const BATCHES_ASKED: f64 = 30.0;

/// Maximum number of calls in a batch: all are queued on a GPU, whose queue is finite.
const MOST_CALLS: usize = 500;

/// The duration of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuringTime {
    /// Minimum seconds of all batches together.
    secs: f64,
    /// If the first call takes longer, its time is the result: loading code and touching memory is
    /// negligible then, and a product of minutes should not run four times.
    long_secs: f64,
}

impl MeasuringTime {
    pub(super) fn of_secs(secs: f64) -> Self {
        MeasuringTime { secs, long_secs: 2.0 }
    }

    /// Measures the seconds of one call of `repeat`, including the work that it queues on `device`.
    ///
    /// # Errors
    /// Returns the errors of `repeat`, and fails if the device fails.
    pub(super) fn secs_of_a_call(self, device: &Device, repeat: impl Fn() -> Result<()>) -> Result<f64> {
        let batch = |calls: usize| -> Result<f64> {
            wait_for(device)?;
            let start = Instant::now();
            for _ in 0..calls {
                repeat()?;
            }
            wait_for(device)?;
            Ok(start.elapsed().as_secs_f64() / calls as f64)
        };
        // The first call loads code, fills pools and touches memory; the second gives the time of
        // one call.
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

    /// Returns the number of calls of a sleep.
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
        // Two warm-up calls, then three batches of one.
        assert_eq!(calls_of(MeasuringTime { secs: 0.001, long_secs: 1e3 }, sleep), 5);
        assert!(calls_of(MeasuringTime { secs: 2.0, long_secs: 1e3 }, Duration::from_micros(1)) > 5);
    }

    #[test]
    fn a_call_that_fails_ends_it() {
        let fails = || Err(Error::internal("cannot run"));
        assert!(MeasuringTime::of_secs(0.001).secs_of_a_call(&Device::Cpu, fails).is_err());
    }
}
