//! Work on a second queue of a device, beside the work of its first: the host's actions in their
//! order. **Not yet run on a GPU.**
//!
//! All memory is allocated and freed in the order of the first queue. So the second queue begins
//! after the work that the first has so far, which may still use the memory of freed tensors. And
//! the first queue waits for the second before it reads a result or frees memory that the second
//! uses ([`WorkBeside`]).

use std::fmt::Debug;

use crate::error::Result;

/// The end of work on a second queue.
pub trait WorkBeside: Debug {
    /// Makes later work of the first queue wait for this work.
    ///
    /// # Errors
    /// Fails if the driver refuses it.
    fn join(&self) -> Result<()>;
}

/// Two queues of a device.
#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code, reason = "only GPUs have two queues"))]
pub(crate) trait TwoQueues {
    /// A point in the second queue.
    type Mark;

    /// Makes later work of the second queue wait for all work that the first has so far.
    fn follow(&self) -> Result<()>;

    /// Marks the end of the work of the second queue.
    fn mark(&self) -> Result<Self::Mark>;

    /// Makes the host wait for the second queue.
    fn finish(&self);
}

/// Launches `work` on the second queue. After a failure the host waits for what was launched, so
/// that the caller may free its memory. If that fails too, the context of the device is lost.
///
/// # Errors
/// The errors of the queues and of `work`.
#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code, reason = "only GPUs have two queues"))]
pub(crate) fn launch_beside<Q: TwoQueues>(queues: &Q, work: impl FnOnce() -> Result<()>) -> Result<Q::Mark> {
    queues.follow()?;
    let mark = work().and_then(|()| queues.mark());
    if mark.is_err() {
        queues.finish();
    }
    mark
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::error::Error;

    /// Times of two queues, and the actions of the host.
    #[derive(Default)]
    struct Timeline {
        first: Cell<usize>,
        second: Cell<usize>,
        actions: RefCell<Vec<&'static str>>,
        no_mark: bool,
    }

    impl Timeline {
        fn act(&self, action: &'static str) {
            self.actions.borrow_mut().push(action);
        }

        /// Runs work of this length on a queue; returns its begin and end.
        fn run(queue: &Cell<usize>, length: usize) -> (usize, usize) {
            let begin = queue.get();
            queue.set(begin + length);
            (begin, begin + length)
        }
    }

    impl TwoQueues for Timeline {
        type Mark = usize;

        fn follow(&self) -> Result<()> {
            self.act("follow");
            self.second.set(self.second.get().max(self.first.get()));
            Ok(())
        }

        fn mark(&self) -> Result<usize> {
            self.act("mark");
            if self.no_mark { Err(Error::internal("no mark")) } else { Ok(self.second.get()) }
        }

        fn finish(&self) {
            self.act("finish");
        }
    }

    const PRODUCT: usize = 10;
    const PANEL: usize = 4;

    /// Products, each with a panel that is made during the product before. Only two panels are
    /// allocated: a new one has the memory of the one before the last, which was freed.
    #[test]
    fn panels_are_made_beside_products_and_use_memory_in_turn() -> Result<()> {
        let (queues, products) = (Timeline::default(), 9);
        let mut last_read = [0; 2];
        let mut ready = Timeline::run(&queues.first, PANEL).1;
        for number in 0..products {
            queues.first.set(queues.first.get().max(ready));
            let mut write = (0, 0);
            ready = launch_beside(&queues, || {
                write = Timeline::run(&queues.second, PANEL);
                Ok(())
            })?;
            assert!(write.0 >= last_read[(number + 1) % 2], "its memory is still read");
            let (begin, end) = Timeline::run(&queues.first, PRODUCT);
            assert!(write.0 == begin && ready < end, "it is made beside the product");
            last_read[number % 2] = end;
        }
        assert_eq!(queues.first.get(), PANEL + products * PRODUCT, "one panel is not hidden");
        Ok(())
    }

    #[test]
    fn after_a_failure_nothing_runs_any_more() {
        let actions = |queues: Timeline, work: Result<()>| {
            let failed = launch_beside(&queues, || work).is_err();
            (failed, queues.actions.into_inner())
        };
        assert_eq!(actions(Timeline::default(), Ok(())), (false, vec!["follow", "mark"]));
        let broken = Err(Error::internal("no kernel"));
        assert_eq!(actions(Timeline::default(), broken), (true, vec!["follow", "finish"]));
        let queues = Timeline { no_mark: true, ..Timeline::default() };
        assert_eq!(actions(queues, Ok(())), (true, vec!["follow", "mark", "finish"]));
    }
}
