//! Panels of quantized weights that are made ahead, in passes of the engine on the emulator: each
//! is made beside the product before its own, and no run fails because of its memory.

use finetune::ops::{PanelProduct, RecordedWork, record};
use finetune::quant::QuantFormat;
use finetune::recipe::enums::{QuantKind, Recompute};
use finetune::runtime::planned_failure::PlannedFailure;
use finetune::threads::start;

use super::{Blocks, alone, logits, selftest, write_model};

/// Products with quantized weights in the forward and in the backward of a block.
const PASSES: [usize; 2] = [4, 4];

/// Returns a block with weights in NF4 and adapters.
fn blocks(dropout: f64) -> Blocks {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), r#""model_type": "qwen3""#);
    let mut base = logits::base(folder.path());
    base.format = Some(QuantFormat::of_kind(QuantKind::Nf4, 64, true));
    Blocks::new(base, dropout, Recompute::None)
}

/// Checks that the begin of the next panel comes before a product, and its end behind: then the
/// second queue runs beside the product. The first product of a pass makes its own panel.
fn check_order(work: &RecordedWork) {
    let actual = work.panel_products();
    assert_eq!(actual.len(), PASSES.iter().sum::<usize>(), "{actual:?}");
    let (forward, backward) = actual.split_at(PASSES[0]);
    for pass in [forward, backward] {
        assert_eq!((pass[0].begin, pass[0].end), (None, None), "{pass:?}");
        for pair in pass.windows(2) {
            let &[PanelProduct { product, .. }, next] = pair else { panic!("{pair:?}") };
            let in_order = |[a, b]: [Option<usize>; 2]| a.zip(b).is_some_and(|(a, b)| a < b);
            let order = [next.begin, Some(product), next.end, Some(next.product)];
            assert!(order.windows(2).all(|pair| in_order([pair[0], pair[1]])), "{order:?}");
        }
    }
}

#[test]
fn panels_are_made_beside_the_product_before_theirs() {
    let _alone = alone();
    selftest::emulate().unwrap();
    for dropout in [0.0, 0.1] {
        let blocks = blocks(dropout);
        blocks.pass().unwrap();
        let (_, work) = record(|| blocks.pass().unwrap());
        check_order(&work);
    }
}

/// The outcome of a pass in which the request of this number fails, as often as it is repeated
/// unless a panel was dropped.
struct Outcome {
    /// The bits of a pass that succeeded.
    bits: Option<Vec<u32>>,
    /// True if a panel was in the making when the pass failed.
    had_panel: bool,
    /// Products with a panel that was made ahead.
    ahead: usize,
    /// False if the pass has fewer requests.
    is_over: bool,
}

/// Runs a pass on a thread of its own, because a thread that once had too little memory makes no
/// panels.
fn with_failure(dropout: f64, kind: PlannedFailure, number: usize) -> Outcome {
    let run = move || {
        let blocks = blocks(dropout);
        blocks.pass().unwrap();
        blocks.engine.store.zero_gradients().unwrap();
        kind.plan_after(number);
        let (result, work) = record(|| blocks.pass());
        let is_over = kind.cancel();
        let ahead = work.panel_products().iter().filter(|product| product.begin.is_some()).count();
        let bits = result.ok().map(|result| blocks.bits(&result));
        Outcome { bits, had_panel: work.ends_with_wait(), ahead, is_over }
    };
    start("pass", run).unwrap().join().unwrap()
}

/// Each request of a pass fails once in turn. While a panel is in the making, it is dropped, and
/// the pass gives the same bits. At other times a run without panels would fail too.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
fn a_request_that_fails_drops_the_panel_in_the_making() {
    let _alone = alone();
    selftest::emulate().unwrap();
    for dropout in [0.0, 0.1] {
        let whole = with_failure(dropout, PlannedFailure::Request, usize::MAX - 1);
        let all = PASSES.iter().map(|products| products - 1).sum();
        assert_eq!(whole.ahead, all);
        let (mut saved, mut failed) = (0, 0);
        for number in 0.. {
            let outcome = with_failure(dropout, PlannedFailure::Request, number);
            if outcome.is_over {
                break;
            }
            match outcome.bits {
                None => {
                    assert!(!outcome.had_panel, "request {number} failed beside a panel");
                    failed += 1;
                }
                Some(bits) => {
                    assert!(bits == *whole.bits.as_ref().unwrap() && outcome.ahead < all, "request {number}");
                    saved += 1;
                }
            }
        }
        assert!(saved > 20 && failed > 2, "{saved} requests beside panels, {failed} others");
    }
}

/// A panel that does not fit is not tried again, and takes nothing away.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
fn a_panel_that_does_not_fit_is_not_made() {
    let _alone = alone();
    selftest::emulate().unwrap();
    let whole = with_failure(0.0, PlannedFailure::OptionalRequest, usize::MAX - 1);
    for number in 0..whole.ahead {
        let outcome = with_failure(0.0, PlannedFailure::OptionalRequest, number);
        assert!(!outcome.is_over && outcome.bits == whole.bits, "panel {number}");
        assert_eq!(outcome.ahead, number, "after the first refusal no panel is made");
    }
}
