//! Cases of the matrix products and of the biases of a linear layer.

use candle_core::{DType, Tensor};

use super::{
    Addend, ColumnView, ColumnViewMut, Transpose, add_bias, add_bias_reference, matmul, reference, sum_rows,
    sum_rows_reference,
};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};

/// Returns the cases of the products, then those of biases.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = products();
    cases.extend(biases());
    cases
}

/// The dtype of an operand: that of the activations, or a fixed one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::ops) enum OperandDtype {
    Run,
    F32,
    Bf16,
}

impl OperandDtype {
    fn dtype(self, run: DType) -> DType {
        match self {
            OperandDtype::Run => run,
            OperandDtype::F32 => DType::F32,
            OperandDtype::Bf16 => DType::BF16,
        }
    }
}

/// The addend of the product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::ops) enum Added {
    Nothing,
    Destination,
    Matrix,
}

/// One product, with `margin` extra columns on both sides of every range.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct MatmulCase {
    pub(in crate::ops) form: Transpose,
    pub(in crate::ops) m: usize,
    pub(in crate::ops) n: usize,
    pub(in crate::ops) k: usize,
    pub(in crate::ops) margin: usize,
    pub(in crate::ops) alpha: f64,
    pub(in crate::ops) added: Added,
    /// The dtypes of dst, a and b.
    pub(in crate::ops) operands: [OperandDtype; 3],
}

pub(in crate::ops) const FORMS: [Transpose; 3] = [Transpose::Nt, Transpose::Nn, Transpose::Tn];

/// The dtype mixtures of a LoRA branch and of weight gradients under bf16 activations: dst, a and
/// b.
pub(in crate::ops) const MIXTURES: [[OperandDtype; 3]; 5] = [
    [OperandDtype::F32, OperandDtype::Run, OperandDtype::F32],
    [OperandDtype::F32, OperandDtype::F32, OperandDtype::Run],
    [OperandDtype::Run, OperandDtype::F32, OperandDtype::F32],
    [OperandDtype::F32, OperandDtype::Run, OperandDtype::Run],
    [OperandDtype::F32, OperandDtype::F32, OperandDtype::F32],
];

/// A product of whole matrices of the run's dtype.
const PLAIN: MatmulCase = MatmulCase {
    form: Transpose::Nt,
    m: 37,
    n: 53,
    k: 29,
    margin: 0,
    alpha: 1.0,
    added: Added::Nothing,
    operands: [OperandDtype::Run; 3],
};

fn products() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for form in FORMS {
        let plain = MatmulCase { form, ..PLAIN };
        cases.push(plain.case(Tolerance::FORWARD));
        cases.push(MatmulCase { m: 1, n: 1, k: 1, ..plain }.case(Tolerance::FORWARD));
        cases.push(MatmulCase { margin: 5, ..plain }.case(Tolerance::FORWARD));
        let added = MatmulCase { margin: 5, alpha: -0.5, added: Added::Destination, ..plain };
        cases.push(added.case(Tolerance::BACKWARD));
        let onto_matrix = MatmulCase { added: Added::Matrix, ..added };
        cases.push(onto_matrix.case(Tolerance::BACKWARD));
        cases.push(MatmulCase { margin: 0, ..onto_matrix }.case(Tolerance::BACKWARD));
        for operands in MIXTURES {
            cases.push(MatmulCase { operands, ..added }.case(Tolerance::BACKWARD.only_bf16()));
        }
    }
    // A weight that is widened in two panels.
    let wide = MatmulCase { m: 3, n: 600, k: 2100, ..PLAIN };
    cases.push(wide.case(Tolerance::FORWARD));
    // A frozen weight stored in bf16: a run in f32 computes in f32 with it, even if the processor
    // multiplies bf16.
    for form in [Transpose::Nt, Transpose::Nn] {
        let operands = [OperandDtype::Run, OperandDtype::Run, OperandDtype::Bf16];
        let stored = MatmulCase { form, m: 96, n: 160, k: 416, operands, ..wide };
        cases.push(stored.case(Tolerance::FORWARD.only_f32()));
    }
    cases
}

impl Added {
    fn addend(self, matrix: &Tensor) -> Addend<'_> {
        match self {
            Added::Nothing => Addend::Nothing,
            Added::Destination => Addend::Destination,
            Added::Matrix => Addend::Matrix(matrix),
        }
    }
}

impl MatmulCase {
    pub(in crate::ops) fn case(self, tolerance: Tolerance) -> OpCase {
        OpCase::new("matmul", self.describe(), tolerance, move |runner| self.compare(runner))
    }

    fn describe(self) -> String {
        let mut text = format!("{:?} {}x{}x{}", self.form, self.m, self.n, self.k);
        if self.margin > 0 {
            text += ", column ranges";
        }
        if self.alpha != 1.0 {
            text += &format!(", alpha {}", self.alpha);
        }
        text += match self.added {
            Added::Nothing => "",
            Added::Destination => ", accumulated",
            Added::Matrix => ", onto a matrix",
        };
        for (dtype, what) in [(OperandDtype::F32, "f32"), (OperandDtype::Bf16, "bf16")] {
            let names = ["dst", "a", "b"].into_iter().zip(self.operands);
            let names_of_dtype: Vec<&str> =
                names.filter(|(_, operand)| *operand == dtype).map(|(name, _)| name).collect();
            if !names_of_dtype.is_empty() {
                text += &format!(", {what} {}", names_of_dtype.join(" "));
            }
        }
        text
    }

    fn compare(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let MatmulCase { form, m, n, k, margin, alpha, added, operands } = self;
        let (a_dims, b_dims) = match form {
            Transpose::Nt => ((m, k), (n, k)),
            Transpose::Nn => ((m, k), (k, n)),
            Transpose::Tn => ((k, m), (k, n)),
        };
        let make = |name: &str, (rows, cols): (usize, usize), operand: OperandDtype| {
            runner.normal_as(operand.dtype(runner.dtype), name, (rows, cols + 2 * margin))
        };
        let dst = make("dst", (m, n), operands[0])?;
        let (a, b) = (make("a", a_dims, operands[1])?, make("b", b_dims, operands[2])?);
        let onto = runner.normal_as(dst.here.dtype(), "onto", (m, n))?;
        let range = |tensor, len| ColumnView { tensor, start: margin, len };
        let dst_of = |tensor| ColumnViewMut { tensor, start: margin, len: n };
        let here = [range(&a.here, a_dims.1), range(&b.here, b_dims.1)];
        matmul(dst_of(&dst.here), here[0], here[1], form, alpha, added.addend(&onto.here))?;
        let plain = [range(&a.plain, a_dims.1), range(&b.plain, b_dims.1)];
        reference(dst_of(&dst.plain), plain[0], plain[1], form, alpha, added.addend(&onto.plain))?;
        Ok(vec![dst.pair()])
    }
}

fn biases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (start, what) in [(0, "all columns"), (7, "column range")] {
        cases.extend(bias_cases(what, 23, start, 31 - 2 * start));
    }
    cases
}

/// Returns the cases of a bias and its gradient on `len` columns of `rows` rows, with `margin`
/// columns on both sides.
pub(in crate::ops) fn bias_cases(what: &str, rows: usize, margin: usize, len: usize) -> [OpCase; 2] {
    let (start, shape) = (margin, (rows, len + 2 * margin));
    [
        OpCase::new("add_bias", what, Tolerance::ROUNDED, move |runner| {
            let (dst, bias) = (runner.normal("dst", shape)?, runner.normal("bias", len)?);
            let range = |tensor| ColumnViewMut { tensor, start, len };
            add_bias(range(&dst.here), &bias.here)?;
            add_bias_reference(range(&dst.plain), &bias.plain)?;
            Ok(vec![dst.pair()])
        }),
        OpCase::new("sum_rows", what, Tolerance::BACKWARD, move |runner| {
            let (grad, dy) = (runner.normal_f32("grad", len)?, runner.normal("dy", shape)?);
            let range = |tensor| ColumnView { tensor, start, len };
            sum_rows(&grad.here, range(&dy.here))?;
            sum_rows_reference(&grad.plain, range(&dy.plain))?;
            Ok(vec![grad.pair()])
        }),
    ]
}
