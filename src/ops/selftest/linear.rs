//! Cases of the matrix products and what stands around them in a linear layer.

use candle_core::DType;

use super::{Bench, Case, Pair, Tolerance};
use crate::error::Result;
use crate::ops::product::{self, Columns, Form};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = products();
    cases.extend(biases());
    cases
}

/// Whether an operand follows the dtype of the activations or is f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Operand {
    Run,
    F32,
}

/// One product; `margin` columns stand left and right of every range.
#[derive(Debug, Clone, Copy)]
struct Product {
    form: Form,
    m: usize,
    n: usize,
    k: usize,
    margin: usize,
    alpha: f64,
    accumulate: bool,
    /// dst, a and b.
    operands: [Operand; 3],
}

const FORMS: [Form; 3] = [Form::Nt, Form::Nn, Form::Tn];

/// The mixtures of a LoRA branch and of weight gradients under bf16 activations: dst, a and b.
const MIXTURES: [[Operand; 3]; 5] = [
    [Operand::F32, Operand::Run, Operand::F32],
    [Operand::F32, Operand::F32, Operand::Run],
    [Operand::Run, Operand::F32, Operand::F32],
    [Operand::F32, Operand::Run, Operand::Run],
    [Operand::F32, Operand::F32, Operand::F32],
];

fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    for form in FORMS {
        let plain = Product {
            form,
            m: 37,
            n: 53,
            k: 29,
            margin: 0,
            alpha: 1.0,
            accumulate: false,
            operands: [Operand::Run; 3],
        };
        cases.push(plain.case(Tolerance::FORWARD));
        cases.push(Product { m: 1, n: 1, k: 1, ..plain }.case(Tolerance::FORWARD));
        cases.push(Product { margin: 5, ..plain }.case(Tolerance::FORWARD));
        let added = Product { margin: 5, alpha: -0.5, accumulate: true, ..plain };
        cases.push(added.case(Tolerance::BACKWARD));
        for operands in MIXTURES {
            cases.push(Product { operands, ..added }.case(Tolerance::BACKWARD.only_bf16()));
        }
    }
    // A weight that is widened in two panels.
    let wide = Product {
        form: Form::Nt,
        m: 3,
        n: 600,
        k: 2100,
        margin: 0,
        alpha: 1.0,
        accumulate: false,
        operands: [Operand::Run; 3],
    };
    cases.push(wide.case(Tolerance::FORWARD));
    cases
}

impl Product {
    fn case(self, tolerance: Tolerance) -> Case {
        Case::new("product", self.describe(), tolerance, move |bench| self.compare(bench))
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
        if self.operands.contains(&Operand::F32) {
            let names = ["dst", "a", "b"].into_iter().zip(self.operands);
            let kept: Vec<&str> =
                names.filter(|(_, operand)| *operand == Operand::F32).map(|(name, _)| name).collect();
            text += &format!(", f32 {}", kept.join(" "));
        }
        text
    }

    fn compare(self, bench: &Bench<'_>) -> Result<Vec<Pair>> {
        let Product { form, m, n, k, margin, alpha, accumulate, operands } = self;
        let (a_dims, b_dims) = match form {
            Form::Nt => ((m, k), (n, k)),
            Form::Nn => ((m, k), (k, n)),
            Form::Tn => ((k, m), (k, n)),
        };
        let make = |name: &str, (rows, cols): (usize, usize), operand: Operand| {
            let dtype = if operand == Operand::Run { bench.dtype } else { DType::F32 };
            bench.normal_as(dtype, name, (rows, cols + 2 * margin))
        };
        let dst = make("dst", (m, n), operands[0])?;
        let (a, b) = (make("a", a_dims, operands[1])?, make("b", b_dims, operands[2])?);
        let range = |tensor, len| Columns { tensor, start: margin, len };
        let here = [range(&dst.here, n), range(&a.here, a_dims.1), range(&b.here, b_dims.1)];
        product::product(here[0], here[1], here[2], form, alpha, accumulate)?;
        let plain = [range(&dst.plain, n), range(&a.plain, a_dims.1), range(&b.plain, b_dims.1)];
        product::reference(plain[0], plain[1], plain[2], form, alpha, accumulate)?;
        Ok(vec![dst.pair()])
    }
}

fn biases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (start, what) in [(0, "all columns"), (7, "column range")] {
        cases.push(Case::new("add_bias", what, Tolerance::ROUNDED, move |bench| {
            let (dst, bias) = (bench.normal("dst", (23, 31))?, bench.normal("bias", 31 - 2 * start)?);
            let range = |tensor| Columns { tensor, start, len: 31 - 2 * start };
            product::add_bias(range(&dst.here), &bias.here)?;
            product::add_bias_reference(range(&dst.plain), &bias.plain)?;
            Ok(vec![dst.pair()])
        }));
        cases.push(Case::new("sum_rows", what, Tolerance::BACKWARD, move |bench| {
            let (grad, dy) = (bench.normal_f32("grad", 31 - 2 * start)?, bench.normal("dy", (23, 31))?);
            let range = |tensor| Columns { tensor, start, len: 31 - 2 * start };
            product::sum_rows(&grad.here, range(&dy.here))?;
            product::sum_rows_reference(&grad.plain, range(&dy.plain))?;
            Ok(vec![grad.pair()])
        }));
    }
    cases
}
