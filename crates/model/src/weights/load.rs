//! Loads one tensor from files into candle: shape checked, converted, moved to its device.
//!
//! On the CPU the read buffer becomes the tensor; other devices get an upload. The pages of the
//! file are released block by block, so loading a model needs little more than the model's memory.

use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};

use super::{ModelFiles, StoredElement};
use crate::error::{Error, ErrorContext, Result};
use crate::runtime::copy::to_device;

/// Number of elements read before their pages are released.
const BLOCK: usize = 1 << 22;

/// The required shape of a tensor, and its source.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// The shape that the tensor must have.
    pub shape: &'a [usize],
    /// The source of the shape, for the error: `hidden_size 64, num_attention_heads 4`.
    pub from: &'a str,
}

/// Reads tensor `name` as `dtype` (F32, BF16 or F16) on `device`.
///
/// # Errors
/// User: the tensor is missing, does not hold floats, or has another shape than `expected`.
/// Internal: `dtype` is none of the three, or the device fails.
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
            .because(format!("the requested dtype is {other:?}; accepted: F32, BF16, F16"))),
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
