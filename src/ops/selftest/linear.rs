//! Cases of the matrix products and what stands around them in a linear layer.

use candle_core::DType;

use super::{CaseRunner, SelftestCase, TensorPair, Tolerance};
use crate::error::Result;
use crate::ops::matmul;
use crate::ops::matmul::{ColumnView, ColumnViewMut, Transpose};

pub(super) fn cases() -> Vec<SelftestCase> {
    let mut cases = products();
    cases.extend(biases());
    cases
}

/// Whether an operand follows the dtype of the activations or is f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LinearOperand {
    Run,
    F32,
}

/// One product; `margin` columns stand left and right of every range.
#[derive(Debug, Clone, Copy)]
struct LinearCase {
    form: Transpose,
    m: usize,
    n: usize,
    k: usize,
    margin: usize,
    alpha: f64,
    accumulate: bool,
    /// dst, a and b.
    operands: [LinearOperand; 3],
}

const FORMS: [Transpose; 3] = [Transpose::Nt, Transpose::Nn, Transpose::Tn];

/// The mixtures of a LoRA branch and of weight gradients under bf16 activations: dst, a and b.
const MIXTURES: [[LinearOperand; 3]; 5] = [
    [LinearOperand::F32, LinearOperand::Run, LinearOperand::F32],
    [LinearOperand::F32, LinearOperand::F32, LinearOperand::Run],
    [LinearOperand::Run, LinearOperand::F32, LinearOperand::F32],
    [LinearOperand::F32, LinearOperand::Run, LinearOperand::Run],
    [LinearOperand::F32, LinearOperand::F32, LinearOperand::F32],
];

fn products() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for form in FORMS {
        let plain = LinearCase {
            form,
            m: 37,
            n: 53,
            k: 29,
            margin: 0,
            alpha: 1.0,
            accumulate: false,
            operands: [LinearOperand::Run; 3],
        };
        cases.push(plain.case(Tolerance::FORWARD));
        cases.push(LinearCase { m: 1, n: 1, k: 1, ..plain }.case(Tolerance::FORWARD));
        cases.push(LinearCase { margin: 5, ..plain }.case(Tolerance::FORWARD));
        let added = LinearCase { margin: 5, alpha: -0.5, accumulate: true, ..plain };
        cases.push(added.case(Tolerance::BACKWARD));
        for operands in MIXTURES {
            cases.push(LinearCase { operands, ..added }.case(Tolerance::BACKWARD.only_bf16()));
        }
    }
    // A weight that is widened in two panels.
    let wide = LinearCase {
        form: Transpose::Nt,
        m: 3,
        n: 600,
        k: 2100,
        margin: 0,
        alpha: 1.0,
        accumulate: false,
        operands: [LinearOperand::Run; 3],
    };
    cases.push(wide.case(Tolerance::FORWARD));
    cases
}

impl LinearCase {
    fn case(self, tolerance: Tolerance) -> SelftestCase {
        SelftestCase::new("matmul", self.describe(), tolerance, move |bench| self.compare(bench))
    }

    fn describe(self) -> String {
        let mut text = format!("{:?} {}x{}x{}", self.form, self.m, self.n, self.k);
        if self.margin > 0 {
            text += ", column ranges";
        }
        if self.alpha != 1.0 {
            text += &format!(", alpha {}", self.alpha);
        }
        if self.accumulate {
            text += ", accumulated";
        }
        if self.operands.contains(&LinearOperand::F32) {
            let names = ["dst", "a", "b"].into_iter().zip(self.operands);
            let kept: Vec<&str> =
                names.filter(|(_, operand)| *operand == LinearOperand::F32).map(|(name, _)| name).collect();
            text += &format!(", f32 {}", kept.join(" "));
        }
        text
    }

    fn compare(self, bench: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let LinearCase { form, m, n, k, margin, alpha, accumulate, operands } = self;
        let (a_dims, b_dims) = match form {
            Transpose::Nt => ((m, k), (n, k)),
            Transpose::Nn => ((m, k), (k, n)),
            Transpose::Tn => ((k, m), (k, n)),
        };
        let make = |name: &str, (rows, cols): (usize, usize), operand: LinearOperand| {
            let dtype = if operand == LinearOperand::Run { bench.dtype } else { DType::F32 };
            bench.normal_as(dtype, name, (rows, cols + 2 * margin))
        };
        let dst = make("dst", (m, n), operands[0])?;
        let (a, b) = (make("a", a_dims, operands[1])?, make("b", b_dims, operands[2])?);
        let range = |tensor, len| ColumnView { tensor, start: margin, len };
        let dst_of = |tensor| ColumnViewMut { tensor, start: margin, len: n };
        let here = [range(&a.here, a_dims.1), range(&b.here, b_dims.1)];
        matmul::matmul(dst_of(&dst.here), here[0], here[1], form, alpha, accumulate)?;
        let plain = [range(&a.plain, a_dims.1), range(&b.plain, b_dims.1)];
        matmul::reference(dst_of(&dst.plain), plain[0], plain[1], form, alpha, accumulate)?;
        Ok(vec![dst.pair()])
    }
}

fn biases() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for (start, what) in [(0, "all columns"), (7, "column range")] {
        cases.push(SelftestCase::new("add_bias", what, Tolerance::ROUNDED, move |bench| {
            let (dst, bias) = (bench.normal("dst", (23, 31))?, bench.normal("bias", 31 - 2 * start)?);
            let range = |tensor| ColumnViewMut { tensor, start, len: 31 - 2 * start };
            matmul::add_bias(range(&dst.here), &bias.here)?;
            matmul::add_bias_reference(range(&dst.plain), &bias.plain)?;
            Ok(vec![dst.pair()])
        }));
        cases.push(SelftestCase::new("sum_rows", what, Tolerance::BACKWARD, move |bench| {
            let (grad, dy) = (bench.normal_f32("grad", 31 - 2 * start)?, bench.normal("dy", (23, 31))?);
            let range = |tensor| ColumnView { tensor, start, len: 31 - 2 * start };
            matmul::sum_rows(&grad.here, range(&dy.here))?;
            matmul::sum_rows_reference(&grad.plain, range(&dy.plain))?;
            Ok(vec![grad.pair()])
        }));
    }
    cases
}
