//! The frozen or trainable matrix of a linear layer, dense or quantized, and the products with it.
//!
//! A quantized matrix is never dequantized whole: on the CPU the product widens panels of it on the way into the
//! GEMM, forward (`x · Wᵀ`) and for the input's gradient (`dy · W`). A quantized weight has no gradient of its own.
//! Off the CPU it is dequantized by candle's primitives for the length of one product.

pub(super) mod cases;

use super::gemm::{MatView, MatViewMut, QuantMat, Threads, matmul as gemm};
use super::matmul::{ColumnView, Transpose, matmul};
use crate::error::{Error, Result};
use crate::quant::{Blocks, CodeKind, NESTED_BLOCK, Scales};
use crate::runtime::cpu_tensor::{dims2, read, update, with_elem};
use candle_core::{DType, Device, Tensor};

/// A matrix `[out, in]` as codes in blocks with a scale each (bitsandbytes' layout, see [`crate::quant`]).
#[derive(Debug, Clone)]
pub struct Quantized {
    /// The format of the codes.
    pub kind: CodeKind,
    /// Values that share a scale, counted over the flattened matrix.
    pub block_size: usize,
    /// Shape of the matrix, `[out, in]`.
    pub shape: (usize, usize),
    /// u8: two 4-bit codes or one 8-bit code a byte.
    pub codes: Tensor,
    /// One scale per block.
    pub scales: BlockScales,
}

/// One scale for each block.
#[derive(Debug, Clone)]
pub enum BlockScales {
    /// One f32 per block, `[blocks]`.
    Plain(Tensor),
    /// Quantized themselves (double quantization): u8 codes, f32 scales of [`NESTED_BLOCK`] codes each, their mean.
    Nested {
        /// u8, one per block.
        codes: Tensor,
        /// The scales of the scales: f32, one per [`NESTED_BLOCK`] codes.
        absmax: Tensor,
        /// Added to each.
        offset: f32,
    },
}

/// The weight of a linear layer, for one use.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// `[out, in]` in the dtype it is kept in.
    Dense(&'a Tensor),
    /// Codes in blocks with their scales.
    Quantized(&'a Quantized),
}

impl Quantized {
    /// Lets `use_blocks` see codes and scales as slices. CPU only.
    pub(crate) fn with_blocks<R>(&self, use_blocks: impl FnOnce(Blocks<'_>) -> R) -> Result<R> {
        let codes = read::<u8>(&self.codes)?;
        let (kind, block_size) = (self.kind, self.block_size);
        Ok(match &self.scales {
            BlockScales::Plain(scales) => {
                let scales = read::<f32>(scales)?;
                use_blocks(Blocks { kind, block_size, codes: &codes, scales: Scales::Plain(&scales) })
            }
            BlockScales::Nested { codes: nested, absmax, offset } => {
                let (nested, absmax) = (read::<u8>(nested)?, read::<f32>(absmax)?);
                let scales = Scales::Nested { codes: &nested, absmax: &absmax, offset: *offset };
                use_blocks(Blocks { kind, block_size, codes: &codes, scales })
            }
        })
    }

    /// The whole matrix in f32, by candle's primitives.
    pub(crate) fn dequantize_reference(&self) -> Result<Tensor> {
        let device = self.codes.device();
        let n = self.shape.0 * self.shape.1;
        let codes = self.codes.to_dtype(DType::U32)?;
        let codes = match self.kind.bits() {
            4 => {
                let high = (codes.to_dtype(DType::F32)? / 16.0)?.floor()?;
                let low = (codes.to_dtype(DType::F32)? - (&high * 16.0)?)?;
                Tensor::stack(&[high, low], 1)?.flatten_all()?.to_dtype(DType::U32)?.narrow(0, 0, n)?
            }
            _ => codes.narrow(0, 0, n)?,
        };
        let values = look_up(self.kind.table(), &codes, device)?;
        let scales = match &self.scales {
            BlockScales::Plain(scales) => scales.clone(),
            BlockScales::Nested { codes, absmax, offset } => {
                let values = look_up(crate::quant::dynamic_signed(), &codes.to_dtype(DType::U32)?, device)?;
                let outer = repeat(absmax, NESTED_BLOCK, codes.elem_count())?;
                ((values * outer)? + f64::from(*offset))?
            }
        };
        let values = (values * repeat(&scales, self.block_size, n)?)?;
        // LLM.int8() has whole numbers up to 127 for codes.
        let values = if self.kind == CodeKind::Int8Rows { (values / 127.0)? } else { values };
        Ok(values.reshape(self.shape)?)
    }
}

/// `table[code]` of each code.
fn look_up(table: &[f32], codes: &Tensor, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(table, table.len(), device)?.index_select(codes, 0)?)
}

/// Each of `values` `times` times in a row, `len` values in all.
fn repeat(values: &Tensor, times: usize, len: usize) -> Result<Tensor> {
    let n = values.elem_count();
    Ok(values.reshape((n, 1))?.broadcast_as((n, times))?.contiguous()?.flatten_all()?.narrow(0, 0, len)?)
}

impl Weight<'_> {
    /// Rows and columns of the matrix: `(out, in)`.
    ///
    /// # Errors
    /// When a dense weight is no matrix.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(weight) => dims2(weight),
            Weight::Quantized(weight) => Ok(weight.shape),
        }
    }
}

/// `dst = [dst +] form(a, weight)`; `form` is [`Transpose::Nt`] (forward) or [`Transpose::Nn`] (the input's gradient).
///
/// # Errors
/// When a tensor is no contiguous matrix of floating-point values, `form` is [`Transpose::Tn`] and the weight
/// quantized, or an operation of the device fails.
pub fn matmul_weight(
    dst: ColumnView<'_>,
    a: ColumnView<'_>,
    weight: Weight<'_>,
    form: Transpose,
    accumulate: bool,
) -> Result<()> {
    let quantized = match weight {
        Weight::Dense(weight) => return matmul(dst, a, ColumnView::all(weight), form, 1.0, accumulate),
        Weight::Quantized(quantized) => quantized,
    };
    if !dst.tensor.device().is_cpu() {
        return quantized_reference(dst, a, quantized, form, accumulate);
    }
    let ((rows, a_width), (_, width)) = (dims2(a.tensor)?, dims2(dst.tensor)?);
    let (out, inputs) = quantized.shape;
    with_elem!(a.tensor.dtype(), A => with_elem!(dst.tensor.dtype(), D => {
        let data = read::<A>(a.tensor)?;
        let a = MatView::new(data.get(a.start..).unwrap_or(&[]), rows, a.len, a_width);
        quantized.with_blocks(|blocks| {
            let matrix = QuantMat::new(blocks, out, inputs);
            let matrix = match form {
                Transpose::Nt => matrix.t(),
                Transpose::Nn => matrix,
                Transpose::Tn => return Err(Error::internal("a quantized weight as the right side of a gradient")),
            };
            update(dst.tensor, |data: &mut [D]| {
                let data = data.get_mut(dst.start..).unwrap_or(&mut []);
                gemm(MatViewMut { data, stride: width, accumulate }, a, matrix, 1.0, Threads::All);
            })
        })?
    }))
}

/// The definition of [`matmul_weight`] for a quantized weight: dequantize, then multiply.
pub(crate) fn quantized_reference(
    dst: ColumnView<'_>,
    a: ColumnView<'_>,
    weight: &Quantized,
    form: Transpose,
    accumulate: bool,
) -> Result<()> {
    // In the activations' dtype, as bitsandbytes dequantizes for its compute dtype.
    let dense = weight.dequantize_reference()?.to_dtype(a.tensor.dtype())?;
    super::matmul::reference(dst, a, ColumnView::all(&dense), form, 1.0, accumulate)
}
