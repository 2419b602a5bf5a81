use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Device;

use super::*;
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::backends::gpu::{Arg, Driver, Gemm, Kernel, LaunchShape, with_host_driver};
use crate::ops::case::CaseRunner;
use crate::ops::matmul_quantized::cases::{FORMATS, KEPT, quantized, whole};
use crate::ops::matmul_quantized::dequantize;
use crate::quant::QuantFormat;
use crate::runtime::device_memory::with_room;
use crate::runtime::optional_memory::OptionalMemory;
use crate::runtime::planned_failure::PlannedFailure;

/// Runs one test at a time: a planned failure is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

fn call(what: &'static str) {
    CALLS.with_borrow_mut(|calls| calls.push(what));
}

/// A driver that notes calls, and with `two` has a second queue whose end `fails` or not.
#[derive(Debug)]
struct Noted {
    two: bool,
    fails: bool,
    /// The failure of work on the second queue.
    fault: Option<DeviceFault>,
}

const TWO: &Noted = &Noted { two: true, fails: false, fault: None };

#[derive(Debug)]
struct Second;

impl Driver for Noted {
    fn launch(&self, _: &Kernel, _: LaunchShape, _: &[Arg]) -> Result<()> {
        call("launch");
        Ok(())
    }

    fn gemm(&self, _: &Gemm) -> Result<()> {
        Ok(())
    }

    fn note_upload(&self, _: usize) {
        call("upload");
    }

    fn beside(&self, work: &mut dyn FnMut(&dyn Driver) -> Result<()>) -> Result<Option<Box<dyn WorkBeside>>> {
        if !self.two {
            return Ok(None);
        }
        call("follow");
        self.fault.map_or(Ok(()), |fault| Err(Error::of_fault(fault, "a planned failure")))?;
        work(&Second)?;
        Ok(Some(Box::new(End { fails: self.fails })))
    }
}

impl Driver for Second {
    fn launch(&self, kernel: &Kernel, _: LaunchShape, args: &[Arg]) -> Result<()> {
        assert!(
            kernel.name.starts_with("dequantize_") && args.iter().filter(|arg| arg.is_written).count() == 1
        );
        call("second");
        Ok(())
    }

    fn gemm(&self, _: &Gemm) -> Result<()> {
        Err(Error::internal("a product"))
    }
}

#[derive(Debug)]
struct End {
    fails: bool,
}

impl WorkBeside for End {
    fn join(&self) -> Result<()> {
        call("join");
        if self.fails { Err(Error::internal("no wait")) } else { Ok(()) }
    }
}

/// Starts a panel of two matrices of `format` on a driver for `work`; returns the calls.
fn calls_of(
    format: QuantFormat,
    driver: &'static Noted,
    work: impl FnOnce(Option<PanelAhead>),
) -> Vec<&'static str> {
    CALLS.take();
    let runner = CaseRunner { device: &Device::Cpu, dtype: DType::BF16, first: 1 };
    let weights = quantized(&runner, format, whole(&format, (96, 72))).expect("a matrix");
    let weights: Vec<_> = weights.iter().collect();
    with_host_driver(driver, || work(PanelAhead::start(&weights, DType::BF16).expect("a start")));
    CALLS.take()
}

/// Works like [`calls_of`] for one format, without uploads, which the first use of a thread has.
fn calls(driver: &'static Noted, work: impl FnOnce(Option<PanelAhead>)) -> Vec<&'static str> {
    let mut calls = calls_of(FORMATS[0], driver, work);
    calls.retain(|call| *call != "upload");
    calls
}

/// The second queue does not wait for later work of the first, so the tables of a thread's first
/// panel are uploaded before.
#[test]
fn tables_are_uploaded_before_the_second_queue_follows() {
    let _alone = alone();
    for format in FORMATS.into_iter().chain(KEPT) {
        // A thread without tables; some formats of other tools need none.
        let of_first_use = move || calls_of(format, TWO, |panel| drop(panel.unwrap().finish().unwrap()));
        let first = finetune_core::threads::start("first use", of_first_use).unwrap().join().unwrap();
        let follow = first.iter().position(|call| *call == "follow").unwrap();
        let (before, after) = first.split_at(follow);
        let has_tables = !before.is_empty() || format.is_kept();
        assert!(has_tables && before.iter().all(|call| *call == "upload"), "{format:?}: {first:?}");
        assert_eq!(after, ["follow", "second", "second", "join"], "{format:?}");
    }
}

#[test]
fn a_panel_is_waited_for_once_before_it_is_read_or_freed() {
    let _alone = alone();
    let started = ["follow", "second", "second"];
    let waited = [&started[..], &["join"]].concat();
    let used = calls(TWO, |panel| {
        let panel = panel.unwrap().finish().unwrap();
        assert_eq!(panel.dims(), [192, 72]);
        assert_eq!(CALLS.with_borrow(|calls| calls.last().copied()), Some("join"));
    });
    assert_eq!(used, waited);
    let dropped = calls(TWO, |panel| {
        assert_eq!(CALLS.with_borrow(|calls| calls.last().copied()), Some("second"));
        drop(panel);
    });
    assert_eq!(dropped, waited);
    // Memory that may still be in use is not freed, and the error is the caller's.
    const BROKEN: &Noted = &Noted { two: true, fails: true, ..*TWO };
    let broken = calls(BROKEN, |panel| assert!(panel.unwrap().finish().is_err()));
    assert_eq!(broken, [&waited[..], &["join"]].concat());
    const ONE: &Noted = &Noted { two: false, ..*TWO };
    assert!(calls(ONE, |panel| assert!(panel.is_none())).is_empty());
}

/// A request that finds too little memory drops a panel in the making before it is repeated, and is
/// the last that finds one.
#[test]
fn a_request_drops_the_panel_in_the_making() {
    let _alone = alone();
    let slot = OptionalMemory::new(PanelAhead::give_back);
    let mut requests = 0;
    let found = calls(TWO, |panel| {
        slot.set(panel);
        let made = with_room(
            PlannedFailure::Module,
            || {
                call("room");
                Ok(())
            },
            || {
                call("request");
                requests += 1;
                if requests > 1 {
                    Ok(())
                } else {
                    Err(Error::of_fault(DeviceFault::OutOfMemory, "too little"))
                }
            },
        );
        assert!(made.is_ok() && slot.take().is_none());
    });
    assert_eq!(found, ["follow", "second", "second", "request", "join", "room", "request"]);
    assert!(calls(TWO, |panel| assert!(panel.is_none())).is_empty());
}

/// A panel that does not fit is refused at once: no other memory is given back for it, and it is
/// not requested again.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
fn a_panel_that_does_not_fit_is_requested_once() {
    let _alone = alone();
    let slot = OptionalMemory::new(PanelAhead::give_back);
    calls(TWO, |panel| slot.set(panel));
    PlannedFailure::OptionalRequest.plan();
    assert!(calls(TWO, |panel| assert!(panel.is_none())).is_empty());
    assert!(!PlannedFailure::OptionalRequest.cancel());
    assert!(calls(TWO, |panel| assert!(panel.is_none())).is_empty());
    assert!(slot.take().is_some());
    assert!(PanelAhead::warning().is_some_and(|text| text.contains("too little memory")));
    assert!(PanelAhead::warning().is_none());
}

/// Nor does work without memory fail; other failures are the caller's.
#[test]
fn without_memory_a_product_makes_its_own_panel() {
    let _alone = alone();
    const BROKEN: &Noted = &Noted { fault: Some(DeviceFault::Kernel), ..*TWO };
    let runner = CaseRunner { device: &Device::Cpu, dtype: DType::BF16, first: 1 };
    let weights = quantized(&runner, FORMATS[0], (96, 72)).unwrap();
    let started = with_host_driver(BROKEN, || PanelAhead::start(&[&weights[0]], DType::BF16));
    assert_eq!(started.unwrap_err().device_fault(), Some(DeviceFault::Kernel));
    const FULL: &Noted = &Noted { fault: Some(DeviceFault::OutOfMemory), ..*TWO };
    assert_eq!(calls(FULL, |panel| assert!(panel.is_none())), ["follow"]);
    // Only one request is refused.
    assert!(calls(TWO, |panel| assert!(panel.is_none())).is_empty());
}

/// Panels of all formats have the bits of those made at once, however late the second queue is.
#[test]
fn panels_ahead_have_the_same_bits() {
    let _alone = alone();
    for (late_copies, dtype) in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
        let schedule = EmulatorSchedule { order: Order::Forward, late_copies, counts: false };
        for format in FORMATS.into_iter().chain(KEPT) {
            let runner = CaseRunner { device: &Device::Cpu, dtype, first: 3 };
            let weights = quantized(&runner, format, whole(&format, (70, 72))).unwrap();
            let weights: Vec<_> = weights.iter().collect();
            let (panels, _) = Emulator::run(schedule, || {
                let now = dequantize(&weights, dtype).unwrap();
                let ahead = PanelAhead::start(&weights, dtype).unwrap().unwrap();
                [now, ahead.finish().unwrap()]
            });
            let bits = |panel: &Tensor| panel.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            let [now, ahead] = panels.each_ref().map(|panel| bits(panel).to_vec1::<f32>().unwrap());
            assert!(now.iter().map(|x| x.to_bits()).eq(ahead.iter().map(|x| x.to_bits())), "{format:?}");
        }
    }
}
