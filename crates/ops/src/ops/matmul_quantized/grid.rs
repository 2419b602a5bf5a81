//! The definition of formats with a grid of scales, by candle's primitives.

use candle_core::{DType, Device, Tensor};

use super::{Quantized, look_up};
use crate::error::{Error, Result};
use crate::quant::{GridFormat, GridZeros, RunMeaning, ScaleDtype};

/// Returns `scale * (code - zero)` of each of `codes`, a matrix in f32.
pub(super) fn scaled(weight: &Quantized, format: &GridFormat, codes: &Tensor) -> Result<Tensor> {
    let (rows, columns) = weight.shape;
    let device = codes.device();
    let cells = (rows.div_ceil(format.row_block), format.groups());
    let of_row: Vec<u32> = (0..rows).map(|row| (row / format.row_block) as u32).collect();
    let of_row = Tensor::from_vec(of_row, rows, device)?;
    let of_column = if format.by_column {
        pairs(weight.run(RunMeaning::ColumnGroups)?)?
    } else {
        let groups: Vec<u32> = (0..columns).map(|column| (column / format.column_block) as u32).collect();
        Tensor::from_vec(groups, columns, device)?
    };
    // Each value gets the number of its cell.
    let spread = |cell: &Tensor| {
        Ok::<_, Error>(cell.reshape(cells)?.index_select(&of_row, 0)?.index_select(&of_column, 1)?)
    };
    let codes = match format.zeros {
        GridZeros::Implied => (codes - f64::from(format.codes.implied_zero()))?,
        GridZeros::Bytes => (codes - spread(&weight.run(RunMeaning::Zeros)?.to_dtype(DType::F32)?)?)?,
        GridZeros::AsScales => {
            (codes - spread(&numbers(weight.run(RunMeaning::Zeros)?, format.scales, device)?)?)?
        }
    };
    Ok((codes * spread(&scales(weight, format, device)?)?)?)
}

/// Returns the scales in f32.
fn scales(weight: &Quantized, format: &GridFormat, device: &Device) -> Result<Tensor> {
    let scales = numbers(weight.run(format.scales_run())?, format.scales, device)?;
    Ok(match format.scales {
        ScaleDtype::E4m3Times => (scales * f64::from(weight.offset))?,
        ScaleDtype::E4m3Over => (scales / f64::from(weight.offset))?,
        _ => scales,
    })
}

/// Returns a run of numbers of this type in f32.
fn numbers(stored: &Tensor, dtype: ScaleDtype, device: &Device) -> Result<Tensor> {
    if dtype == ScaleDtype::F32 {
        return Ok(stored.clone());
    }
    let table: Vec<f32> = (0..1 << (8 * dtype.bytes())).map(|bits| dtype.value(bits)).collect();
    let bits = if dtype.bytes() == 1 { stored.to_dtype(DType::U32)? } else { pairs(stored)? };
    look_up(&table, &bits, device)
}

/// Returns the 16-bit numbers of pairs of bytes, the lower byte first.
fn pairs(bytes: &Tensor) -> Result<Tensor> {
    let bytes = bytes.to_dtype(DType::F32)?.reshape(((), 2))?;
    let [low, high] = [0, 1].map(|at| bytes.narrow(1, at, 1));
    Ok((low? + (high? * 256.0)?)?.flatten_all()?.to_dtype(DType::U32)?)
}
