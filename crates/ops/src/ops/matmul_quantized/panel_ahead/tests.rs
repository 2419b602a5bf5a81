use std::cell::RefCell;

use candle_core::Device;

use super::*;
use crate::ops::case::CaseRunner;
use crate::ops::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::ops::gpu::{Arg, Driver, Gemm, Kernel, LaunchShape, with_host_driver};
use crate::ops::matmul_quantized::cases::{FORMATS, quantized};
use crate::ops::matmul_quantized::dequantize;

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
}

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

    fn beside(&self, work: &mut dyn FnMut(&dyn Driver) -> Result<()>) -> Result<Option<Box<dyn WorkBeside>>> {
        if !self.two {
            return Ok(None);
        }
        call("follow");
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

/// Runs `work` on a driver; returns the calls.
fn calls(driver: &'static Noted, work: impl FnOnce(Option<PanelAhead>)) -> Vec<&'static str> {
    CALLS.take();
    let runner = CaseRunner { device: &Device::Cpu, dtype: DType::BF16, first: 1 };
    let weights = quantized(&runner, FORMATS[0], (96, 64)).unwrap();
    let weights: Vec<_> = weights.iter().collect();
    with_host_driver(driver, || work(PanelAhead::start(&weights, DType::BF16).unwrap()));
    CALLS.take()
}

#[test]
fn a_panel_is_waited_for_once_before_it_is_read_or_freed() {
    const TWO: &Noted = &Noted { two: true, fails: false };
    let started = ["follow", "second", "second"];
    let waited = [&started[..], &["join"]].concat();
    let used = calls(TWO, |panel| {
        let panel = panel.unwrap().finish().unwrap();
        assert_eq!((panel.dims(), CALLS.with_borrow(Vec::len)), (&[192, 64][..], 4));
    });
    assert_eq!(used, waited);
    let dropped = calls(TWO, |panel| {
        assert_eq!(CALLS.with_borrow(Clone::clone), started);
        drop(panel);
    });
    assert_eq!(dropped, waited);
    // Memory that may still be in use is not freed, and the error is the caller's.
    const BROKEN: &Noted = &Noted { two: true, fails: true };
    let broken = calls(BROKEN, |panel| assert!(panel.unwrap().finish().is_err()));
    assert_eq!(broken, [&waited[..], &["join"]].concat());
    const ONE: &Noted = &Noted { two: false, fails: false };
    assert!(calls(ONE, |panel| assert!(panel.is_none())).is_empty());
}

/// Panels of all formats have the bits of those made at once, however late the second queue is.
#[test]
fn panels_ahead_have_the_same_bits() {
    for (late_copies, dtype) in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
        let schedule = EmulatorSchedule { order: Order::Forward, late_copies, counts: false };
        for format in FORMATS {
            let runner = CaseRunner { device: &Device::Cpu, dtype, first: 3 };
            let weights = quantized(&runner, format, (70, 72)).unwrap();
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
