//! Checkpoints of NVIDIA's ModelOpt (`quant_method` "modelopt"): e4m3 with one scale for a matrix
//! or a row, and NVFP4.
//!
//! In NVFP4 `X.weight` has bytes with two values in e2m1, the first in the low half. A value is
//! multiplied by a scale in e4m3 for each 16 inputs (`X.weight_scale`) and by `X.weight_scale_2`.
//! `X.input_scale` is for activations and is not used.

use super::fp8;
use super::reader::{CheckpointFormat, ReadWeight, Settings, StoredWeight, expect, name_in, weight_before};
use crate::error::Result;
use crate::quant::{CodeLayout, PackedFormat, ScaleDtype};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

/// The accepted values of `quant_algo`. Algorithms that also rotate or scale inputs have other
/// names.
pub(crate) const ALGORITHMS: [&str; 4] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"];
/// Its name in config.json.
pub(crate) const METHOD: &str = "modelopt";
const SCALES: &str = ".weight_scale";
const FACTOR: &str = ".weight_scale_2";
const OWNED: [&str; 3] = [FACTOR, SCALES, ".input_scale"];
/// Values with a common scale.
const GROUP: usize = 16;

/// The format "modelopt".
pub(super) struct ModelOpt;

impl CheckpointFormat for ModelOpt {
    fn method(&self) -> &'static str {
        METHOD
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&OWNED, name)
    }

    fn is_codes(&self, dtype: StoredDtype) -> bool {
        matches!(dtype, StoredDtype::F8E4M3 | StoredDtype::U8)
    }

    fn reader(&self, settings: &Settings) -> Result<ReadWeight> {
        name_in(settings, &["quant_algo"], &ALGORITHMS)?;
        Ok(Box::new(read))
    }
}

fn read(weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, StoredParts), String> {
    let codes = weight.codes()?;
    if codes.dtype == StoredDtype::F8E4M3 {
        if weight.of_module(FACTOR).is_some() {
            return Err("it is stored in F8_E4M3 with a weight_scale_2; accepted: in U8".to_owned());
        }
        return fp8::read(weight, None);
    }
    expect("weight", codes, StoredDtype::U8, None)?;
    let [rows, columns] = [codes.shape[0], codes.shape[1].saturating_mul(2)];
    let (scales, groups) = (weight.required(SCALES)?, columns.div_ceil(GROUP));
    expect("weight_scale", scales, StoredDtype::F8E4M3, Some(&[rows, groups]))?;
    let format = PackedFormat {
        codes: CodeLayout::E2m1,
        bits: 4,
        rows,
        columns,
        row_block: 1,
        column_block: GROUP,
        groups,
        scales: ScaleDtype::E4m3Times,
        zero_offset: 0,
    };
    let packed = weight.packed("modelopt nvfp4", format, codes, [Some(scales), None, None])?;
    weight.with_factor(packed, FACTOR)
}
