//! Limit of the launches that a GPU has not finished. A launch beyond the size of the driver's
//! queue, about a thousand, blocks inside the driver, where it may hold a lock that another rank
//! needs to join a collective in the queue.

use std::collections::VecDeque;

/// Launches from one mark to the next.
const LAUNCHES: usize = 64;

/// Marks that a GPU need not have reached yet.
const MARKS: usize = 3;

/// Latest marks in a queue of launches. A mark is a point that a GPU reaches after all launches
/// before it.
#[derive(Debug)]
pub(crate) struct QueueLimit<M> {
    /// Launches behind the last mark.
    launches: usize,
    marks: VecDeque<M>,
}

impl<M> Default for QueueLimit<M> {
    fn default() -> Self {
        QueueLimit { launches: 0, marks: VecDeque::with_capacity(MARKS + 1) }
    }
}

impl<M> QueueLimit<M> {
    /// Counts a launch. Puts a mark behind every 64th by `mark`, and waits by `wait` until the GPU
    /// has reached the third mark before it.
    ///
    /// # Errors
    /// Those of `mark` and `wait`.
    pub(super) fn launched<E>(
        &mut self,
        mark: impl FnOnce() -> Result<M, E>,
        wait: impl FnOnce(M) -> Result<(), E>,
    ) -> Result<(), E> {
        self.launches += 1;
        if self.launches < LAUNCHES {
            return Ok(());
        }
        self.launches = 0;
        self.marks.push_back(mark()?);
        if self.marks.len() <= MARKS {
            return Ok(());
        }
        self.marks.pop_front().map_or(Ok(()), wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The marks that a host waits for during this many launches, each mark being the number of
    /// launches before it.
    fn waits(launches: usize) -> Vec<usize> {
        let (mut limit, mut waits) = (QueueLimit::default(), Vec::new());
        for launch in 1..=launches {
            let wait = |mark| {
                waits.push(mark);
                Ok::<(), ()>(())
            };
            limit.launched(|| Ok(launch), wait).expect("nothing fails");
        }
        waits
    }

    #[test]
    fn the_host_is_at_most_four_marks_ahead() {
        assert_eq!(waits(4 * LAUNCHES - 1), [0; 0]);
        assert_eq!(waits(4 * LAUNCHES), [LAUNCHES]);
        assert_eq!(waits(6 * LAUNCHES + 1), [LAUNCHES, 2 * LAUNCHES, 3 * LAUNCHES]);
    }

    #[test]
    fn a_failed_mark_or_wait_is_an_error() {
        let mut limit = QueueLimit::<()>::default();
        let failed = (0..LAUNCHES).map(|_| limit.launched(|| Err("mark"), |()| Err("wait")));
        assert_eq!(failed.filter_map(Result::err).collect::<Vec<_>>(), ["mark"]);
        let failed = (0..4 * LAUNCHES).map(|_| limit.launched(|| Ok(()), |()| Err("wait")));
        assert_eq!(failed.filter_map(Result::err).collect::<Vec<_>>(), ["wait"]);
    }
}
