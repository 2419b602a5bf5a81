//! The frozen or trainable matrix of a linear layer, dense or quantized, and the products with it.
//!
//! A quantized matrix is never dequantized whole on the CPU: the product widens panels of it on the
//! way into the GEMM, forward (`x · Wᵀ`) and for the input's gradient (`dy · W`). A quantized
//! weight has no gradient. On a GPU it is dequantized for the duration of one product, by a kernel,
//! or by candle's primitives without one.

pub(super) mod cases;
pub(super) mod cuda;
mod grid;
mod panel_ahead;

pub use panel_ahead::PanelAhead;

use super::matmul::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, matmul, matmul_plus_low_rank};
use crate::backends::gemm::{
    LowRankTerm, MatView, MatViewMut, QuantMat, Threads, matmul as gemm, matmul_plus,
};
use crate::backends::gpu::{self, Route};
use crate::error::{Error, Result};
use crate::quant::{
    NESTED_BLOCK, QuantFormat, QuantTensor, QuantView, RunDtype, RunMeaning, RunsView, dynamic_signed,
};
use crate::runtime::cpu_tensor::{dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

/// Values that a thread dequantizes at once.
const DEQUANTIZED: usize = 1 << 14;

/// A matrix `[out, in]` in a quantized format ([`crate::quant`]).
#[derive(Debug, Clone)]
pub struct Quantized {
    /// The quantization format.
    pub format: QuantFormat,
    /// Shape of the matrix, `[out, in]`.
    pub shape: (usize, usize),
    /// The stored parts, in the order of [`crate::quant::QuantScheme::runs`].
    pub runs: Vec<QuantizedRun>,
    /// The mean of double-quantized scales.
    pub offset: f32,
}

/// One stored part of a quantized matrix.
#[derive(Debug, Clone)]
pub struct QuantizedRun {
    /// The meaning of its elements.
    pub meaning: RunMeaning,
    /// The elements, one-dimensional, u8 or f32.
    pub values: Tensor,
}

/// The weight of a linear layer, for one use.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// The matrix `[out, in]` in its stored dtype.
    Dense(&'a Tensor),
    /// A quantized matrix.
    Quantized(&'a Quantized),
}

impl Quantized {
    fn optional_run(&self, meaning: RunMeaning) -> Option<&Tensor> {
        self.runs.iter().find(|run| run.meaning == meaning).map(|run| &run.values)
    }

    fn run(&self, meaning: RunMeaning) -> Result<&Tensor> {
        self.optional_run(meaning)
            .ok_or_else(|| Error::internal(format!("a quantized weight without {meaning:?}")))
    }

    /// Returns the number of values.
    fn elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    /// Calls `use_view` with the runs as slices. CPU only.
    pub(crate) fn with_view<R>(&self, use_view: impl FnOnce(QuantView<'_>) -> R) -> Result<R> {
        let runs = self.format.scheme().runs(self.elements());
        let of = |dtype| runs.iter().map(|run| run.meaning).filter(move |meaning| meaning.dtype() == dtype);
        let bytes = of(RunDtype::U8).map(|meaning| Ok((meaning, read::<u8>(self.run(meaning)?)?)));
        let bytes = bytes.collect::<Result<Vec<_>>>()?;
        let floats = of(RunDtype::F32).map(|meaning| Ok((meaning, read::<f32>(self.run(meaning)?)?)));
        let floats = floats.collect::<Result<Vec<_>>>()?;
        let bytes = bytes.iter().map(|(meaning, values)| (*meaning, &**values));
        let floats = floats.iter().map(|(meaning, values)| (*meaning, &**values));
        let runs = RunsView::new(bytes, floats, self.offset);
        Ok(use_view(QuantTensor { format: self.format, runs }))
    }

    fn dequantize_without_kernel(&self, dtype: DType) -> Result<Tensor> {
        if !self.run(RunMeaning::Codes)?.device().is_cpu() {
            return Ok(self.dequantize_reference()?.to_dtype(dtype)?);
        }
        let (out, inputs) = self.shape;
        with_elem!(dtype, T => self.with_view(|view| {
            let mut values = unwritten::<T>(self.elements());
            let parts = values.par_chunks_mut(DEQUANTIZED).enumerate();
            parts.for_each(|(i, values)| view.dequantize(i * DEQUANTIZED, values));
            tensor(values, (out, inputs))
        })?)
    }

    /// Returns the whole matrix in f32, by candle's primitives.
    pub(crate) fn dequantize_reference(&self) -> Result<Tensor> {
        let (codes, hint, n) = (self.run(RunMeaning::Codes)?, self.format.scheme().hint(), self.elements());
        let device = codes.device();
        if let QuantFormat::Ggml(format) = self.format {
            // A format of bytes has no other definition than its decoder, which tests compare with
            // gguf-py's.
            let (bytes, mut values) = (read::<u8>(&codes.to_device(&Device::Cpu)?)?.to_vec(), vec![0f32; n]);
            format.kind.dequantize(&bytes, &mut values);
            return Ok(Tensor::from_vec(values, self.shape, device)?);
        }
        let codes = match hint.bits {
            4 => {
                let codes = codes.to_dtype(DType::F32)?;
                let high = (&codes / 16.0)?.floor()?;
                let low = (codes - (&high * 16.0)?)?;
                Tensor::stack(&[high, low], 1)?.flatten_all()?
            }
            _ => codes.clone(),
        };
        let values = look_up(hint.table, &codes.to_dtype(DType::U32)?.narrow(0, 0, n)?, device)?;
        if let QuantFormat::Grid(format) = self.format {
            return grid::scaled(self, &format, &values.reshape(self.shape)?);
        }
        let scales = match self.optional_run(RunMeaning::ScaleCodes) {
            Some(codes) => {
                let values = look_up(dynamic_signed(), &codes.to_dtype(DType::U32)?, device)?;
                let outer = repeat(self.run(RunMeaning::NestedScales)?, NESTED_BLOCK, codes.elem_count())?;
                ((values * outer)? + f64::from(self.offset))?
            }
            None => self.run(RunMeaning::Scales)?.clone(),
        };
        let values = (values * repeat(&scales, hint.block_size, n)?)?;
        let values = hint.divisor.map_or(Ok(values.clone()), |divisor| values / f64::from(divisor))?;
        Ok(values.reshape(self.shape)?)
    }
}

/// Returns stacked whole matrices of one width, `[Σ out, in]` in `dtype`, f32 or bf16, as a product
/// on a GPU reads them.
///
/// # Errors
/// Fails if there are no matrices, a run is missing, or the device has not enough memory.
pub fn dequantize(weights: &[&Quantized], dtype: DType) -> Result<Tensor> {
    let codes = weights.iter().map(|weight| weight.run(RunMeaning::Codes)).collect::<Result<Vec<_>>>()?;
    let ([first, ..], [weight, ..]) = (&codes[..], weights) else {
        return Err(Error::internal("a panel without matrices"));
    };
    let _span = span(|| {
        let rows = weights.iter().map(|weight| weight.shape.0).sum();
        SpanInfo::op("dequantize").dims(&[rows, weight.shape.1]).moves(&codes)
    });
    match Route::of(first, cuda::is_supported(weights, dtype)) {
        Route::Kernel(driver) => cuda::dequantize(driver, weights, dtype),
        Route::Composed | Route::Cpu => {
            let each = weights.iter().map(|weight| weight.dequantize_without_kernel(dtype));
            Ok(Tensor::cat(&each.collect::<Result<Vec<_>>>()?, 0)?)
        }
    }
}

/// Returns `table[code]` of each code.
pub(super) fn look_up(table: &[f32], codes: &Tensor, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(table, table.len(), device)?.index_select(codes, 0)?)
}

/// Repeats each of `values` `times` times in a row, `len` values in all.
fn repeat(values: &Tensor, times: usize, len: usize) -> Result<Tensor> {
    let n = values.elem_count();
    Ok(values.reshape((n, 1))?.broadcast_as((n, times))?.contiguous()?.flatten_all()?.narrow(0, 0, len)?)
}

impl<'a> Weight<'a> {
    /// Returns the quantized weight, if it is one.
    fn quantized(&self) -> Option<&'a Quantized> {
        match self {
            Weight::Dense(_) => None,
            Weight::Quantized(quantized) => Some(quantized),
        }
    }

    /// Returns the device of the matrix.
    pub(super) fn device(&self) -> Result<&'a Device> {
        match self {
            Weight::Dense(weight) => Ok(weight.device()),
            Weight::Quantized(weight) => Ok(weight.run(RunMeaning::Codes)?.device()),
        }
    }

    /// Returns rows and columns of the matrix: `(out, in)`.
    ///
    /// # Errors
    /// Fails if a dense weight is not a matrix.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(weight) => dims2(weight),
            Weight::Quantized(weight) => Ok(weight.shape),
        }
    }
}

/// Computes `dst = [addend +] form(a, weight)`; `form` is [`Transpose::Nt`] (forward) or
/// [`Transpose::Nn`] (the input's gradient).
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, if `form` is
/// [`Transpose::Tn`] and the weight quantized, or if an operation of the device fails.
pub fn matmul_weight(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weight: Weight<'_>,
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    let quantized = match weight {
        Weight::Dense(weight) => return matmul(dst, a, ColumnView::all(weight), form, 1.0, addend),
        Weight::Quantized(quantized) => quantized,
    };
    match Route::of(dst.tensor, cuda::is_supported(&[quantized], a.tensor.dtype())) {
        Route::Kernel(driver) => {
            // In the activations' dtype, since bitsandbytes dequantizes to its compute dtype.
            let panel = cuda::dequantize(driver, &[quantized], a.tensor.dtype())?;
            matmul(dst, a, ColumnView::all(&panel), form, 1.0, addend)
        }
        Route::Composed => quantized_reference(dst, a, quantized, form, addend),
        Route::Cpu => quantized_on_cpu(dst, a, quantized, form, addend.place_in(dst)?, None),
    }
}

/// Computes the product of [`matmul_weight`] plus `low_rank`: on the CPU in one pass over `dst` if
/// that is faster.
///
/// # Errors
/// Fails like [`matmul_weight`].
pub fn matmul_weight_plus_low_rank(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weight: Weight<'_>,
    form: Transpose,
    addend: Addend<'_>,
    low_rank: LowRank<'_>,
) -> Result<()> {
    let on_cpu = dst.tensor.device().is_cpu() && gpu::driver_of(dst.tensor).is_none();
    if !on_cpu || form == Transpose::Tn || low_rank.factor.dtype() != DType::F32 {
        matmul_weight(dst, a, weight, form, addend)?;
        return low_rank.add_to(dst, form);
    }
    let accumulate = addend.place_in(dst)?;
    match weight {
        Weight::Dense(weight) => matmul_plus_low_rank(dst, a, weight, form, accumulate, low_rank),
        Weight::Quantized(weight) => quantized_on_cpu(dst, a, weight, form, accumulate, Some(low_rank)),
    }
}

fn quantized_on_cpu(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    quantized: &Quantized,
    form: Transpose,
    accumulate: bool,
    low_rank: Option<LowRank<'_>>,
) -> Result<()> {
    let _span = span(|| {
        let (rows, (out, inputs)) = (dst.tensor.dims().first().copied().unwrap_or_default(), quantized.shape);
        let info = SpanInfo::op("matmul_quantized").detail(form.name()).dims(&[rows, out, inputs]);
        let runs: Vec<&Tensor> = quantized.runs.iter().map(|run| &run.values).collect();
        info.moves(&runs).moves(&[a.tensor, dst.tensor]).flops(2 * rows * out * inputs)
    });
    let ((rows, a_width), (_, width)) = (dims2(a.tensor)?, dims2(dst.tensor)?);
    let (out, inputs) = quantized.shape;
    with_elem!(a.tensor.dtype(), A => with_elem!(dst.tensor.dtype(), D => {
        let data = read::<A>(a.tensor)?;
        let a = MatView::new(data.get(a.start..).unwrap_or(&[]), rows, a.len, a_width);
        quantized.with_view(|view| {
            let matrix = QuantMat::new(view, out, inputs);
            let matrix = match form {
                Transpose::Nt => matrix.t(),
                Transpose::Nn => matrix,
                Transpose::Tn => return Err(Error::internal("a quantized weight as the right side of a gradient")),
            };
            let product = |term: Option<LowRankTerm<'_>>| {
                update(dst.tensor, |data: &mut [D]| {
                    let data = data.get_mut(dst.start..).unwrap_or(&mut []);
                    let dst = MatViewMut { data, stride: width, accumulate };
                    match term {
                        None => gemm(dst, a, matrix, 1.0, Threads::All),
                        Some(term) => matmul_plus(dst, a, matrix, term, Threads::All),
                    }
                })
            };
            match low_rank {
                None => product(None),
                Some(low_rank) => low_rank.with_term(form, |term| product(Some(term)))?,
            }
        })?
    }))
}

/// Computes the product of [`matmul_weight`] with `weights` stacked, `[Σ out, in]`: their outputs
/// are adjacent columns. On a GPU this is one product if all are quantized, else one each.
///
/// # Errors
/// Fails like [`matmul_weight`].
pub fn matmul_weights(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weights: &[Weight<'_>],
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    if let [weight] = weights {
        return matmul_weight(dst, a, *weight, form, addend);
    }
    if let Some(driver) = gpu::driver_of(dst.tensor)
        && let Some(quantized) = weights.iter().map(Weight::quantized).collect::<Option<Vec<_>>>()
        && cuda::is_supported(&quantized, a.tensor.dtype())
    {
        let panel = cuda::dequantize(driver, &quantized, a.tensor.dtype())?;
        return matmul(dst, a, ColumnView::all(&panel), form, 1.0, addend);
    }
    let mut added = Addend::destination_if(addend.place_in(dst)?);
    let mut start = 0;
    for &weight in weights {
        let (len, _) = weight.dims()?;
        if form == Transpose::Nt {
            let outputs = ColumnViewMut { start: dst.start + start, len, ..dst };
            matmul_weight(outputs, a, weight, form, added)?;
        } else {
            matmul_weight(dst, ColumnView { start: a.start + start, len, ..a }, weight, form, added)?;
            added = Addend::Destination;
        }
        start += len;
    }
    Ok(())
}

/// The definition of [`matmul_weight`] for a quantized weight: dequantize, then multiply.
pub(crate) fn quantized_reference(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weight: &Quantized,
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    // In the activations' dtype, since bitsandbytes dequantizes to its compute dtype.
    let dense = weight.dequantize_reference()?.to_dtype(a.tensor.dtype())?;
    super::matmul::reference(dst, a, ColumnView::all(&dense), form, 1.0, addend)
}

#[cfg(test)]
mod tests {
    use super::cases::{FORMATS, KEPT, quantized, whole};
    use super::*;
    use crate::ops::case::{CaseRunner, TensorPair};

    /// More values than a thread takes at once, and rows that are not a multiple of a block.
    #[test]
    fn all_of_a_matrix_is_dequantized() -> Result<()> {
        for (format, dtype) in
            FORMATS.into_iter().chain(KEPT).flat_map(|format| [(format, DType::F32), (format, DType::BF16)])
        {
            let shape = whole(&format, (331, 72));
            let [weight, _] =
                quantized(&CaseRunner { device: &Device::Cpu, dtype, first: 0 }, format, shape)?;
            let got = dequantize(&[&weight], dtype)?;
            assert_eq!((got.dims2()?, got.dtype()), (shape, dtype));
            let want = weight.dequantize_reference()?;
            let error = TensorPair::new(got, want).error()?;
            let tolerance = if dtype == DType::F32 { 1e-6 } else { 1.0 / 256.0 };
            assert!(error < tolerance, "{format:?} {dtype:?}: {error:e}");
        }
        Ok(())
    }
}
