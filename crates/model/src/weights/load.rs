//! One tensor from files into candle: shape checked, converted, placed on its device.
//!
//! On the CPU the buffer that is read into becomes the tensor; other devices get it uploaded. Either way the pages
//! of the file are given back block by block, so loading a model takes the model's memory and little more.

use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};

use super::{ModelFiles, StoredElement};
use crate::error::{Error, ErrorContext, Result};
use crate::runtime::copy::to_device;

/// Elements read before their pages are given back.
const BLOCK: usize = 1 << 22;

/// The shape a tensor must have and which facts say so.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// The shape that the tensor must have.
    pub shape: &'a [usize],
    /// Where the shape comes from, for the error: `hidden_size 64, num_attention_heads 4`.
    pub from: &'a str,
}

/// Reads tensor `name` as `dtype` (F32, BF16 or F16) on `device`.
///
/// # Errors
/// The user's: the tensor is missing, is not of floats, or has another shape than `expected`. A fault of ours:
/// `dtype` is none of the three, or the device refuses.
pub fn load_tensor(
    files: &ModelFiles,
    name: &str,
    expected: Expected<'_>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let info = files.require(name)?;
    if info.shape != expected.shape {
        return Err(Error::user(format!("cannot load {}", info.file.display()))
            .because(format!(
                "{name}: found {:?}, expected {:?} (from config.json: {})",
                info.shape, expected.shape, expected.from
            ))
            .hint("give config.json and weights of one and the same model"));
    }
    match dtype {
        DType::F32 => load_as::<f32>(files, name, expected.shape, device),
        DType::BF16 => load_as::<bf16>(files, name, expected.shape, device),
        DType::F16 => load_as::<f16>(files, name, expected.shape, device),
        other => Err(Error::internal(format!("cannot load tensor `{name}`"))
            .because(format!("dtype {other:?} is wanted; accepted: F32, BF16, F16"))),
    }
}

fn load_as<T: StoredElement + WithDType>(
    files: &ModelFiles,
    name: &str,
    shape: &[usize],
    device: &Device,
) -> Result<Tensor> {
    let mut values = vec![T::default(); shape.iter().product()];
    for (i, block) in values.chunks_mut(BLOCK).enumerate() {
        files.read_part(name, i * BLOCK, block)?;
        files.discard(name);
    }
    let read = Tensor::from_vec(values, shape, &Device::Cpu)?;
    to_device(&read, device).during(|| format!("cannot load tensor `{name}`"))
}
