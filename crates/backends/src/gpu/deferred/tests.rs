//! Recorded launches of a driver that writes down what it is asked to do.

use std::cell::RefCell;

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
use crate::error::DeviceFault;
use crate::gpu::{DeviceGraph, GraphCounts, Implementation, In, Out, driver_on, upload, with_host_driver};
use crate::runtime::TensorMut;
use crate::runtime::copy::{copy_into, to_host_vec};

thread_local! {
    /// The requests of this thread: names with their last argument, and calls of graphs.
    static LOG: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// The launch that fails, by its name; "graph": the next graph has no memory.
    static FAILS: RefCell<&'static str> = const { RefCell::new("") };
    /// True if graphs refuse changes.
    static REFUSES: RefCell<bool> = const { RefCell::new(false) };
}

fn log(what: String) {
    LOG.with_borrow_mut(|log| log.push(what));
}

fn logged() -> Vec<String> {
    LOG.take()
}

#[derive(Debug)]
struct Logger;

impl Driver for Logger {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if FAILS.with_borrow(|fails| *fails == kernel.name) {
            return Err(Error::internal(format!("{} failed", kernel.name)));
        }
        log(format!("{} {} {}", kernel.name, shape.grid[0], args.last().map_or(0, |arg| arg.value)));
        Ok(())
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        log(format!("product {:?} {}", gemm.size(), gemm.alpha));
        Ok(())
    }

    fn graph(&'static self, requests: &[Request]) -> Result<Option<Box<dyn DeviceGraph>>> {
        log("make".to_owned());
        if FAILS.with_borrow(|fails| *fails == "graph") {
            return Err(Error::of_fault(DeviceFault::OutOfMemory, "no memory for a graph"));
        }
        Ok(Some(Box::new(LoggedGraph(requests.to_vec()))))
    }
}

#[derive(Debug)]
struct LoggedGraph(Vec<Request>);

impl DeviceGraph for LoggedGraph {
    fn change(&mut self, at: usize, request: &Request) -> Result<bool> {
        log(format!("change {at}"));
        self.0[at] = request.clone();
        Ok(!REFUSES.with_borrow(|refuses| *refuses))
    }

    fn launch(&self) -> Result<()> {
        log("graph".to_owned());
        self.0.iter().try_for_each(|request| request.issue(&Logger))
    }
}

/// Launches a kernel over 32 threads, with a number.
fn launch(name: &'static str, x: &Tensor, number: u64) -> Result<()> {
    let driver = driver_on(&Device::Cpu).expect("a driver");
    let value = Arg { value: number, rows: 0, row_bytes: 0, pitch: 0, size: 8, moved: 0, is_written: false };
    let kernel = Kernel { name, module: "tests" };
    driver.launch(&kernel, LaunchShape::line(1, 32), &[Out::<f32>::all(x)?.arg(), value])
}

fn tensor() -> Tensor {
    Tensor::zeros((4, 8), DType::F32, &Device::Cpu).expect("memory")
}

/// Chooses the form of an op that no kernel supports.
fn by_candle(x: &Tensor) -> Result<()> {
    assert!(matches!(Implementation::of(x, false), Implementation::Cpu));
    Ok(())
}

/// Runs `work` as the forward of block 0.
fn forward<R>(graphs: &BlockGraphs, work: impl FnOnce() -> Result<R>) -> Result<R> {
    with_host_driver(&Logger, || graphs.run(&Device::Cpu, 0, BlockPass::Forward, work))
}

/// Launches eight kernels with these numbers.
fn eight(graphs: &BlockGraphs, x: &Tensor, numbers: [u64; 8]) -> Result<Vec<String>> {
    forward(graphs, || numbers.into_iter().try_for_each(|number| launch("a", x, number)))?;
    Ok(logged())
}

fn lines(name: &str, numbers: [u64; 8]) -> Vec<String> {
    numbers.iter().map(|number| format!("{name} 1 {number}")).collect()
}

#[test]
fn equal_launches_are_one_call_and_changed_ones_are_changed() -> Result<()> {
    let (graphs, x) = (BlockGraphs::default(), tensor());
    let first = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(eight(&graphs, &x, first)?, lines("a", first));
    // The second pass is alike: a graph is made behind it, and launches nothing.
    let mut wanted = lines("a", first);
    wanted.push("make".to_owned());
    assert_eq!(eight(&graphs, &x, first)?, wanted);
    let graph = |changes: &[usize], numbers| {
        let changes = changes.iter().map(|at| format!("change {at}"));
        changes.chain(["graph".to_owned()]).chain(lines("a", numbers)).collect::<Vec<_>>()
    };
    assert_eq!(eight(&graphs, &x, first)?, graph(&[], first));
    let second = [1, 2, 30, 4, 5, 6, 70, 8];
    assert_eq!(eight(&graphs, &x, second)?, graph(&[2, 6], second));
    // The graph holds the changed numbers now.
    assert_eq!(eight(&graphs, &x, first)?, graph(&[2, 6], first));
    // Seven changes and a launch are as many calls as eight launches.
    let other = [1, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(eight(&graphs, &x, other)?, lines("a", other));
    assert_eq!(eight(&graphs, &x, first)?, graph(&[], first));
    let counts = GraphCounts { made: 1, launched: 4, requests: 32, changed: 4, one_by_one: 24, refused: 0 };
    assert_eq!(graphs.counts(), counts);
    Ok(())
}

#[test]
fn other_functions_threads_memory_and_numbers_are_no_replay() -> Result<()> {
    let (graphs, [x, y]) = (BlockGraphs::default(), [tensor(), tensor()]);
    let pass = |last: &dyn Fn() -> Result<()>| -> Result<Vec<String>> {
        forward(&graphs, || {
            (0..7).try_for_each(|number| launch("a", &x, number))?;
            last()
        })?;
        Ok(logged())
    };
    let same = || launch("a", &x, 7);
    pass(&same)?;
    pass(&same)?;
    assert_eq!(pass(&same)?[0], "graph");
    // Other memory, and a number whose bits differ but not its value.
    assert_eq!(pass(&|| launch("a", &y, 7))?[..2], ["change 7", "graph"]);
    assert_eq!(pass(&same)?[0], "change 7");
    let zero = |zero: f64| launch("a", &x, zero.to_bits());
    pass(&|| zero(0.0))?;
    assert_eq!(pass(&|| zero(-0.0))?[0], "change 7");
    // More threads.
    let wide = || {
        let kernel = Kernel { name: "a", module: "tests" };
        let driver = driver_on(&Device::Cpu).expect("a driver");
        let value = Arg { value: 7, rows: 0, row_bytes: 0, pitch: 0, size: 8, moved: 0, is_written: false };
        driver.launch(&kernel, LaunchShape::line(2, 32), &[Out::<f32>::all(&x)?.arg(), value])
    };
    let actual = pass(&wide)?;
    assert_eq!((actual[0].as_str(), actual.last().map(String::as_str)), ("change 7", Some("a 2 7")));
    // Another function, and one launch more or less.
    assert_eq!(pass(&|| launch("b", &x, 7))?[0], "a 1 0");
    assert_eq!(pass(&|| Ok(()))?[0], "a 1 0");
    assert_eq!(pass(&|| same().and_then(|()| same()))?[0], "a 1 0");
    Ok(())
}

#[test]
fn a_refused_change_launches_one_by_one() -> Result<()> {
    let (graphs, x) = (BlockGraphs::default(), tensor());
    let first = [1, 2, 3, 4, 5, 6, 7, 8];
    eight(&graphs, &x, first)?;
    eight(&graphs, &x, first)?;
    REFUSES.set(true);
    let second = [1, 2, 30, 4, 5, 6, 7, 8];
    let actual = eight(&graphs, &x, second)?;
    REFUSES.set(false);
    let wanted = ["change 2".to_owned()].into_iter().chain(lines("a", second)).chain(["make".to_owned()]);
    assert_eq!(actual, wanted.collect::<Vec<_>>());
    assert_eq!(eight(&graphs, &x, second)?[0], "graph");
    Ok(())
}

#[test]
fn without_memory_for_a_graph_the_pass_goes_on_without_one() -> Result<()> {
    let (graphs, x) = (BlockGraphs::default(), tensor());
    let numbers = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(graphs.warning(), None);
    FAILS.set("graph");
    eight(&graphs, &x, numbers)?;
    let asked = lines("a", numbers).into_iter().chain(["make".to_owned()]);
    assert_eq!(eight(&graphs, &x, numbers)?, asked.collect::<Vec<_>>());
    FAILS.set("");
    // The driver is not asked again.
    assert_eq!(eight(&graphs, &x, numbers)?, lines("a", numbers));
    assert_eq!((graphs.counts().made, graphs.counts().refused), (0, 1));
    assert!(graphs.warning().is_some_and(|text| text.contains("too little memory")));
    assert_eq!(graphs.warning(), None);
    Ok(())
}

#[test]
fn other_work_comes_behind_recorded_launches() -> Result<()> {
    let (x, y) = (TensorMut::new(tensor()), tensor());
    let before = |what: &str, work: &dyn Fn() -> Result<()>, is_first: bool| -> Result<()> {
        forward(&BlockGraphs::default(), || {
            launch("a", &x, 1)?;
            work()?;
            let launched = LOG.with_borrow(|log| log.contains(&"a 1 1".to_owned()));
            assert_eq!(launched, is_first, "{what}");
            launch("b", &x, 2)
        })?;
        assert_eq!(logged(), ["a 1 1", "b 1 2"], "{what}");
        Ok(())
    };
    before("a copy", &|| copy_into(&x, &y), true)?;
    before("a read", &|| to_host_vec::<f32>(&x).map(drop), true)?;
    before("an operation of candle", &|| by_candle(&y), true)?;
    before("an upload", &|| upload(&[1f32], 1, &Device::Cpu).map(drop), false)?;
    before("new memory", &|| TensorMut::zeros(4, DType::F32, &Device::Cpu).map(drop), false)?;
    Ok(())
}

#[test]
fn memory_of_recorded_launches_is_held_until_they_are_launched() -> Result<()> {
    let (graphs, x) = (BlockGraphs::default(), tensor());
    let address = |tensor: &Tensor| -> Result<u64> { Ok(In::<f32>::all(tensor)?.arg().value) };
    forward(&graphs, || {
        let first = address(&x)?;
        let dropped: Vec<u64> = (0..8)
            .map(|number| {
                let temporary = tensor();
                launch("a", &temporary, number)?;
                address(&temporary)
            })
            .collect::<Result<_>>()?;
        let mut all = dropped.clone();
        all.push(first);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 9, "no memory is used twice: {dropped:?}");
        Ok(())
    })?;
    assert_eq!(logged().len(), 8);
    Ok(())
}

/// An argument from before the block is of a tensor that may be dropped.
#[test]
fn a_launch_with_memory_that_is_not_held_is_not_deferred() -> Result<()> {
    let (graphs, x, y) = (BlockGraphs::default(), tensor(), tensor());
    let early = Out::<f32>::all(&y)?.arg();
    forward(&graphs, || {
        launch("a", &x, 1)?;
        let driver = driver_on(&Device::Cpu).expect("a driver");
        driver.launch(&Kernel { name: "b", module: "tests" }, LaunchShape::line(1, 32), &[early])?;
        assert_eq!(LOG.with_borrow(Vec::len), 2, "it is launched behind the recorded one");
        launch("c", &x, 3)
    })?;
    assert_eq!(logged().len(), 3);
    Ok(())
}

#[test]
fn large_results_are_launched_in_parts() -> Result<()> {
    let graphs = BlockGraphs::default();
    let large = Tensor::zeros((HELD_BYTES / 8, 1), DType::F32, &Device::Cpu)?;
    let other = Tensor::zeros((HELD_BYTES / 8, 1), DType::F32, &Device::Cpu)?;
    forward(&graphs, || {
        launch("a", &large, 1)?;
        launch("a", &large, 2)?;
        launch("a", &other, 3)?;
        assert!(logged().is_empty(), "each address counts once");
        launch("a", &tensor(), 4)?;
        assert_eq!(logged(), ["a 1 1", "a 1 2", "a 1 3", "a 1 4"]);
        launch("a", &large, 5)
    })?;
    assert_eq!(logged(), ["a 1 5"]);
    Ok(())
}

#[test]
fn a_failure_loses_no_launch_and_repeats_none() -> Result<()> {
    let (graphs, x) = (BlockGraphs::default(), tensor());
    // A failure of the block itself: what it launched before is launched.
    let failed = forward(&graphs, || {
        launch("a", &x, 1)?;
        Err::<(), _>(Error::internal("the block failed"))
    });
    assert_eq!((failed.unwrap_err().what(), logged()), ("the block failed", vec!["a 1 1".to_owned()]));
    // A failed launch at the end, and one before an operation of candle, whose error the next
    // launch or the end returns.
    FAILS.set("b");
    let three = || {
        launch("a", &x, 1)?;
        launch("b", &x, 2)?;
        launch("c", &x, 3)
    };
    let at_end = forward(&graphs, three);
    assert_eq!((at_end.unwrap_err().what(), logged()), ("b failed", vec!["a 1 1".to_owned()]));
    let at_last = forward(&graphs, || three().and_then(|()| by_candle(&x)));
    assert_eq!((at_last.unwrap_err().what(), logged()), ("b failed", vec!["a 1 1".to_owned()]));
    let at_next = forward(&graphs, || three().and_then(|()| by_candle(&x)).and_then(|()| three()));
    assert_eq!((at_next.unwrap_err().what(), logged()), ("b failed", vec!["a 1 1".to_owned()]));
    FAILS.set("");
    // A panic drops the recording, and the thread launches at once again.
    let run = std::panic::AssertUnwindSafe(|| {
        forward(&graphs, || -> Result<()> {
            launch("a", &x, 1)?;
            panic!("a bug")
        })
    });
    assert!(std::panic::catch_unwind(run).is_err() && logged().is_empty());
    with_host_driver(&Logger, || launch("a", &x, 9))?;
    assert_eq!(logged(), ["a 1 9"]);
    Ok(())
}

#[test]
fn products_are_compared_by_all_their_numbers() -> Result<()> {
    let (graphs, x, w) = (BlockGraphs::default(), tensor(), tensor());
    let y = TensorMut::zeros((4, 4), DType::F32, &Device::Cpu)?;
    let product = |alpha: f32, addend: Addend<'_>| {
        let (x, w) = (ColumnView::all(&x), ColumnView::all(&w));
        let gemm = Gemm::new(&ColumnViewMut::all(&y), &x, &w, Transpose::Nt, alpha, addend)?;
        gemm.map_or(Ok(()), |gemm| driver_on(&Device::Cpu).expect("a driver").gemm(&gemm))
    };
    let pass = |alpha: f32, adds: bool| -> Result<Vec<String>> {
        forward(&graphs, || {
            (0..8).try_for_each(|number| launch("a", &x, number))?;
            product(alpha, Addend::destination_if(adds))
        })?;
        Ok(logged())
    };
    pass(0.0, false)?;
    pass(0.0, false)?;
    assert_eq!(pass(0.0, false)?[0], "graph");
    assert_eq!(pass(-0.0, false)?[..2], ["change 8", "graph"]);
    assert_eq!(pass(-0.0, true)?[..2], ["change 8", "graph"]);
    assert_eq!(pass(-0.0, true)?[0], "graph");
    Ok(())
}
