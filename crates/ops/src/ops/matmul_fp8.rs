//! Products with a frozen matrix in fp8: both operands are codes of e4m3 with a scale for each row,
//! sums are f32 (torchao's rowwise float8).
//!
//! ```text
//! row → codes    scale = max |row| / 448,  code = nearest e4m3 of value · (448 / max |row|)
//! y  = x Wᵀ      Q(x) Q(W)ᵀ, times the scales of the tokens and of the outputs
//! dx = dy W      Q(dy ⊙ scales of the outputs) Q(W), times the scales of the tokens
//! ```
//!
//! The sums of dx are over the outputs, so the scales of the outputs are factors of dy before it is
//! quantized. Forward and backward then multiply by the same rounded matrix, of which one copy of a
//! byte a value is kept. Hopper and Ada multiply only rows by rows, so a GPU transposes the codes
//! for dx.
//!
//! A CPU has no such products. It multiplies the codes in bf16, where they and their products are
//! exact: it proves the numbers of a GPU and gains no speed.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::matmul::{Addend, ColumnView, ColumnViewMut, Transpose, empty, matmul};
use super::matmul_quantized::{Weight, dequantize, look_up};
use crate::backends::gpu::{Route, driver_on};
use crate::error::{Error, Result};
use crate::quant::{E4M3, MOST_E4M3, to_e4m3};
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
#[cfg(feature = "cuda")]
use crate::runtime::device::unwritten_on_gpu;
use crate::runtime::device_memory::allocated;
use crate::runtime::trace::{SpanInfo, span};

/// Both sizes of a matrix are multiples of this number on a GPU, which reads 16 bytes of a row at
/// once.
pub const FP8_MULTIPLE: usize = 16;

/// Rows of smaller values get the scale of this one, 2^-100: their codes are 0.
const LEAST: f32 = 7.888_609e-31;

/// A matrix in e4m3 with a scale for each row.
#[derive(Debug, Clone)]
pub struct Fp8Rows {
    /// The codes: `[rows, width]` u8.
    codes: TensorMut,
    /// The scale of each row: `[rows]` f32.
    scales: TensorMut,
}

impl Fp8Rows {
    /// Allocates a matrix that the caller writes.
    fn unwritten(rows: usize, width: usize, device: &Device) -> Result<Self> {
        let made = || match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) if rows * width > 0 => {
                Ok(TensorMut::new(unwritten_on_gpu::<u8>(device, (rows, width))?))
            }
            _ => TensorMut::zeros((rows, width), DType::U8, device),
        };
        let codes = allocated(device, rows * width, made)?;
        Ok(Fp8Rows { codes, scales: TensorMut::new(empty(1, rows, DType::F32, device)?.flatten_all()?) })
    }

    /// Quantizes stacked matrices of one width, `[Σ out, in]`. Quantized ones are dequantized to
    /// bf16, one at a time.
    ///
    /// # Errors
    /// Fails if there are no matrices, one is not of floating-point values, or the device has not
    /// enough memory.
    pub fn of(weights: &[Weight<'_>]) -> Result<Self> {
        let dims = weights.iter().map(Weight::dims).collect::<Result<Vec<_>>>()?;
        let ([first, ..], [(_, width), ..]) = (weights, &dims[..]) else {
            return Err(Error::internal("a matrix in fp8 without parts"));
        };
        let all = Self::unwritten(dims.iter().map(|(rows, _)| rows).sum(), *width, first.device()?)?;
        let mut start = 0;
        for (weight, (rows, _)) in weights.iter().zip(dims) {
            let panel;
            let values = match weight {
                Weight::Dense(values) => *values,
                Weight::Quantized(weight) => {
                    panel = dequantize(&[weight], DType::BF16)?;
                    &panel
                }
            };
            quantize_into(ColumnView::all(values), None, &all.rows(start, rows)?)?;
            start += rows;
        }
        Ok(all)
    }

    /// Returns `len` rows from `start` on, of the same memory.
    ///
    /// # Errors
    /// Fails if the matrix has fewer rows.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        Ok(Fp8Rows { codes: self.codes.narrow(0, start, len)?, scales: self.scales.narrow(0, start, len)? })
    }

    /// Returns whether products of `device` multiply by the scales of rows, so that no sums are
    /// stored in f32.
    pub fn scaled_in_product(device: &Device) -> bool {
        driver_on(device).is_some_and(|driver| driver.scales_rows())
    }

    /// Returns the bytes of a matrix of this shape.
    pub fn bytes(rows: usize, width: usize) -> usize {
        rows * (width + DType::F32.size_in_bytes())
    }

    fn dims(&self) -> Result<(usize, usize)> {
        dims2(&self.codes)
    }

    /// Returns the values of the codes in bf16, which has all of them.
    fn widened(&self) -> Result<Tensor> {
        let shape = self.dims()?;
        let codes = read::<u8>(&self.codes)?;
        let mut values: Vec<bf16> = unwritten(codes.len());
        let parts = values.par_chunks_mut(1 << 14).zip(codes.par_chunks(1 << 14));
        parts.for_each(|(values, codes)| {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = bf16::from_bits((E4M3[usize::from(*code)].to_bits() >> 16) as u16);
            }
        });
        tensor(values, shape)
    }
}

/// Returns columns of f32 or bf16 values, `[N, len]`, as e4m3 with a scale for each row. Values are
/// first multiplied by `factors`, `[len]` f32, if given.
///
/// # Errors
/// Fails if a tensor is not contiguous or of another dtype, or the device has not enough memory.
pub fn quantize_fp8(x: ColumnView<'_>, factors: Option<&Tensor>) -> Result<Fp8Rows> {
    let rows = Fp8Rows::unwritten(x.tensor.dim(0)?, x.len, x.tensor.device())?;
    quantize_into(x, factors, &rows)?;
    Ok(rows)
}

fn quantize_into(x: ColumnView<'_>, factors: Option<&Tensor>, to: &Fp8Rows) -> Result<()> {
    let _span = span(|| {
        let dims = [x.tensor.dims().first().copied().unwrap_or_default(), x.len];
        SpanInfo::op("quantize_fp8").dims(&dims).moves(&[&to.codes])
    });
    match Route::of(x.tensor, cuda::is_float(x.tensor)) {
        Route::Kernel(driver) => return cuda::quantize(driver, x, factors, to),
        Route::Composed => {
            let (codes, scales) = quantize_reference(x, factors)?;
            let scales = scales.flatten_all()?;
            to.scales.slice_set(&scales, 0, 0)?;
            return Ok(to.codes.slice_set(&code_bytes(&codes)?, 0, 0)?);
        }
        Route::Cpu => {}
    }
    let (_, pitch) = dims2(x.tensor)?;
    let factors = factors.map(read::<f32>).transpose()?;
    let factors = factors.as_deref();
    with_elem!(x.tensor.dtype(), T => {
        let data = read::<T>(x.tensor)?;
        let data: &[T] = &data;
        update(&to.codes, |codes: &mut [u8]| update(&to.scales, |scales: &mut [f32]| {
            let rows = codes.par_chunks_mut(x.len.max(1)).zip(scales).zip(data.par_chunks(pitch.max(1)));
            rows.for_each(|((codes, scale), row)| {
                *scale = quantize_row(&row[x.start..x.start + x.len], factors, codes);
            });
        }))?
    })
}

/// Writes the codes of a row, and returns its scale.
fn quantize_row<T: FloatElement>(row: &[T], factors: Option<&[f32]>, codes: &mut [u8]) -> f32 {
    let value = |at: usize| row[at].widen() * factors.map_or(1.0, |factors| factors[at]);
    // A NaN has no part in the maximum; its code is NaN.
    let largest = (0..row.len()).fold(LEAST, |largest, at| largest.max(value(at).abs()));
    let inverse = MOST_E4M3 / largest;
    codes.iter_mut().enumerate().for_each(|(at, code)| *code = to_e4m3(value(at) * inverse));
    largest / MOST_E4M3
}

/// Computes `dst = [addend +] form(a, weight)` in e4m3; `form` is [`Transpose::Nt`] (forward) or
/// [`Transpose::Nn`] (the input's gradient). `a` and `dst` are f32 or bf16. A GPU multiplies so if
/// both sizes of the matrix are multiples of [`FP8_MULTIPLE`].
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, if `form` is
/// [`Transpose::Tn`], or if an operation of the device fails.
pub fn matmul_fp8(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weight: &Fp8Rows,
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    if form == Transpose::Tn {
        return Err(Error::internal("a frozen weight as the right side of a gradient"));
    }
    let (out, inputs) = weight.dims()?;
    let _span = span(|| {
        let rows = dst.tensor.dims().first().copied().unwrap_or_default();
        let info = SpanInfo::op("matmul_fp8").detail(form.name()).dims(&[rows, out, inputs]);
        info.moves(&[a.tensor, &weight.codes, dst.tensor]).flops(2 * rows * out * inputs)
    });
    let route = Route::of(dst.tensor, cuda::is_supported(dst.tensor, a.tensor, (out, inputs)));
    if matches!(route, Route::Composed) {
        return reference(dst, a, weight, form, addend);
    }
    let factors = (form == Transpose::Nn).then_some(&*weight.scales);
    let a = quantize_fp8(a, factors)?;
    match route {
        Route::Kernel(driver) => cuda::matmul(driver, dst, &a, weight, form, addend, driver.scales_rows()),
        _ => on_cpu(dst, &a, weight, form, addend),
    }
}

fn on_cpu(
    dst: ColumnViewMut<'_>,
    a: &Fp8Rows,
    weight: &Fp8Rows,
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    let accumulate = addend.place_in(dst)?;
    let ((rows, _), (_, pitch)) = (a.dims()?, dims2(dst.tensor)?);
    let sums = empty(rows, dst.len, DType::F32, &Device::Cpu)?;
    let [codes, by] = [a.widened()?, weight.widened()?];
    let (codes, by) = (ColumnView::all(&codes), ColumnView::all(&by));
    matmul(ColumnViewMut::all(&sums), codes, by, form, 1.0, Addend::Nothing)?;
    let (sums, tokens, outputs) =
        (read::<f32>(&sums)?, read::<f32>(&a.scales)?, read::<f32>(&weight.scales)?);
    let (sums, tokens): (&[f32], &[f32]) = (&sums, &tokens);
    let outputs = (form == Transpose::Nt).then_some(&*outputs);
    with_elem!(dst.tensor.dtype(), D => update(dst.tensor, |data: &mut [D]| {
        let rows = data.par_chunks_mut(pitch.max(1)).zip(sums.par_chunks(dst.len.max(1))).zip(tokens);
        rows.for_each(|((row, sums), token)| {
            for (at, (y, sum)) in row[dst.start..dst.start + dst.len].iter_mut().zip(sums).enumerate() {
                let before = if accumulate { y.widen() } else { 0.0 };
                *y = D::nearest(before + sum * token * outputs.map_or(1.0, |outputs| outputs[at]));
            }
        });
    }))
}

/// The definition of [`quantize_fp8`] in candle's primitives: the values of the codes, `[N, len]`,
/// and the scales, `[N, 1]`, in f32.
fn quantize_reference(x: ColumnView<'_>, factors: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    let mut x = x.narrow()?.to_dtype(DType::F32)?;
    if let Some(factors) = factors {
        x = x.broadcast_mul(factors)?;
    }
    let largest = x.abs()?.max_keepdim(1)?.maximum(f64::from(LEAST))?;
    let most = (largest.ones_like()? * f64::from(MOST_E4M3))?;
    let codes = x.broadcast_mul(&(&most / &largest)?)?.to_dtype(DType::F8E4M3)?.to_dtype(DType::F32)?;
    Ok((codes, (largest / most)?))
}

/// Returns the bytes of values of e4m3, as tensor of u8.
fn code_bytes(values: &Tensor) -> Result<Tensor> {
    let host: Vec<f32> = values.flatten_all()?.to_vec1()?;
    let codes: Vec<u8> = host.into_iter().map(to_e4m3).collect();
    Ok(Tensor::from_vec(codes, values.dims(), values.device())?)
}

/// The definition of [`matmul_fp8`] in candle's primitives: the product of the dequantized
/// matrices.
pub(crate) fn reference(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    weight: &Fp8Rows,
    form: Transpose,
    addend: Addend<'_>,
) -> Result<()> {
    let (device, (out, inputs)) = (weight.codes.device(), weight.dims()?);
    let codes = weight.codes.flatten_all()?.to_dtype(DType::U32)?;
    let mut values = look_up(&E4M3, &codes, device)?.reshape((out, inputs))?;
    let factors = (form == Transpose::Nn).then_some(&*weight.scales);
    if form == Transpose::Nt {
        values = values.broadcast_mul(&weight.scales.reshape((out, 1))?)?;
    }
    let (codes, scales) = quantize_reference(a, factors)?;
    let a = codes.broadcast_mul(&scales)?;
    super::matmul::reference(dst, ColumnView::all(&a), ColumnView::all(&values), form, 1.0, addend)
}
