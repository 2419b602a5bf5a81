//! Work for a device that a thread has recorded but not launched. Everything else that uses the
//! device calls [`issue_deferred`] first, so that the device computes in the order of the host.

use std::cell::Cell;

use crate::error::Result;

/// Launches all work that the thread has deferred.
pub type Issue = fn() -> Result<()>;

thread_local! {
    /// Launches the deferred work of this thread; none if it defers nothing.
    static ISSUE: Cell<Option<Issue>> = const { Cell::new(None) };
}

/// Sets the function that launches the deferred work of this thread. Returns the one before.
pub fn defer_by(issue: Option<Issue>) -> Option<Issue> {
    ISSUE.replace(issue)
}

/// Launches the work that this thread has deferred. Work that the device has not seen must not be
/// overtaken by copies, by operations of candle or by waits.
///
/// # Errors
/// Those of the launches.
pub fn issue_deferred() -> Result<()> {
    ISSUE.get().map_or(Ok(()), |issue| issue())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::runtime::TensorMut;
    use crate::runtime::copy::{columns_of, converted, copy_into, stacked, to_host_vec, zero};
    use crate::runtime::device_queue::{QueueMark, wait_for};

    thread_local! {
        static ISSUED: Cell<usize> = const { Cell::new(0) };
    }

    /// Returns how often `work` issues deferred work.
    fn issues(work: impl FnOnce() -> Result<()>) -> Result<usize> {
        ISSUED.set(0);
        let before = defer_by(Some(|| {
            ISSUED.set(ISSUED.get() + 1);
            Ok(())
        }));
        let done = work();
        defer_by(before);
        done.map(|()| ISSUED.get())
    }

    #[test]
    fn copies_and_waits_come_after_deferred_work() -> Result<()> {
        let cpu = &Device::Cpu;
        let x = TensorMut::zeros((2, 4), DType::F32, cpu)?;
        assert!(issues(|| copy_into(&x, &Tensor::ones((2, 4), DType::F32, cpu)?))? > 0);
        assert!(issues(|| zero(&x))? > 0);
        assert!(issues(|| converted(&x, DType::BF16).map(drop))? > 0);
        assert!(issues(|| stacked(&[&x, &x]).map(drop))? > 0);
        assert!(issues(|| columns_of(&x, std::slice::from_ref(&(1..3))).map(drop))? > 0);
        assert!(issues(|| to_host_vec::<f32>(&x).map(drop))? > 0);
        assert!(issues(|| wait_for(cpu))? > 0);
        assert!(issues(|| QueueMark::new(cpu).map(drop))? > 0);
        // Neither new memory nor a tensor as it is depends on earlier work.
        assert_eq!(issues(|| converted(&x, DType::F32).map(drop))?, 0);
        assert_eq!(issues(|| TensorMut::zeros(4, DType::F32, cpu).map(drop))?, 0);
        Ok(())
    }

    #[test]
    fn a_failed_launch_is_the_error_of_what_follows() {
        let before = defer_by(Some(|| Err(crate::error::Error::internal("no kernel"))));
        let outcome = wait_for(&Device::Cpu);
        defer_by(before);
        assert_eq!(outcome.unwrap_err().what(), "no kernel");
        assert!(issue_deferred().is_ok());
    }
}
