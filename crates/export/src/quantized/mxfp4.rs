//! MXFP4 in the two layouts of other programs: compressed-tensors' "mxfp4-pack-quantized" for
//! linear layers, and `quant_method` "mxfp4" for the experts of gpt-oss.
//!
//! `quant::to_mxfp4` rounds. In both layouts a byte holds two values of a row, the first in the low
//! half, and the exponents have a bias of 127. The keys of the settings are those of
//! compressed-tensors' scheme `MXFP4A16` (weights alone) and of transformers' `Mxfp4Config`.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{LinearLayers, PIECE, SourceTensor};
use crate::error::{Error, ErrorCategory, Result};
use crate::model::{self, ModelConfig};
use crate::quant::{self, MXFP4_BLOCK};
use crate::weights::{LM_HEAD_MODULE, ModelFiles, PlannedFile, StackParts, StoredDtype, WriteEntry};

/// Returns the layers to quantize: of gpt-oss those of experts alone.
///
/// # Errors
/// User: a name in `skip` matches no linear layer, or the model is gpt-oss.
pub(super) fn layers(config: &ModelConfig, skip: &[String]) -> Result<LinearLayers> {
    if !config.family.stacks_in_mxfp4 {
        return LinearLayers::new(config, skip);
    }
    if let Some(name) = skip.first() {
        let what = format!("cannot use `--skip {name}` with `--kind mxfp4` for this model");
        return Err(Error::new(ErrorCategory::Usage, what)
            .because("transformers and vLLM load gpt-oss only with all experts, and no other layer, in MXFP4")
            .hint("remove `--skip`"));
    }
    let parts = model::stacked_experts(config).into_iter().flat_map(|stack| stack.parts);
    Ok(LinearLayers::those(config, parts.map(|part| part.name.trim_end_matches(".weight").to_owned())))
}

/// The position of a weight among the tensors of its layout.
struct WeightTensors {
    codes: String,
    scales: String,
    /// Number of values before its own: those of other parts of a stack.
    first: usize,
    /// The stack and its number of parts; `None`: the tensors hold this weight alone.
    parts: Option<usize>,
}

/// The tensors of the layers in MXFP4.
pub(super) struct Mxfp4Tensors(HashMap<String, WeightTensors>);

impl Mxfp4Tensors {
    pub(super) fn new(config: &ModelConfig, layers: &LinearLayers) -> Self {
        if config.family.stacks_in_mxfp4 {
            let stacks = model::stacked_experts(config);
            return Mxfp4Tensors(stacks.into_iter().flat_map(tensors_in_stack).collect());
        }
        let names_of = |module: &String| {
            let [codes, scales] = ["packed", "scale"].map(|end| format!("{module}.weight_{end}"));
            (format!("{module}.weight"), WeightTensors { codes, scales, first: 0, parts: None })
        };
        Mxfp4Tensors(layers.quantized.iter().map(names_of).collect())
    }

    fn tensors(&self, name: &str) -> Result<&WeightTensors> {
        self.0.get(name).ok_or_else(|| Error::internal(format!("`{name}` is no layer in MXFP4")))
    }

    /// Returns the tensors of a weight: those of a stack for its first part, none for the others.
    ///
    /// # Errors
    /// User: its rows are no whole blocks.
    pub(super) fn planned(&self, files: &ModelFiles, name: &str) -> Result<Vec<PlannedFile>> {
        let (names, info) = (self.tensors(name)?, files.require(name)?);
        let &[rows, columns] = info.shape.as_slice() else {
            return Err(Error::internal(format!("tensor `{name}` is no matrix")));
        };
        if !columns.is_multiple_of(MXFP4_BLOCK) {
            let module = name.trim_end_matches(".weight");
            return Err(Error::user(format!("cannot quantize tensor `{name}`"))
                .because(format!(
                    "its rows have {columns} values; accepted by MXFP4: multiples of {MXFP4_BLOCK}"
                ))
                .hint(match names.parts {
                    None => format!("leave it as it is with `--skip {module}`, or write another `--kind`"),
                    Some(_) => "write another `--kind`".to_owned(),
                }));
        }
        let groups = columns / MXFP4_BLOCK;
        let [codes, scales] = match names.parts {
            None => [vec![rows, columns / 2], vec![rows, groups]],
            Some(_) if names.first > 0 => return Ok(Vec::new()),
            Some(parts) => [vec![parts, rows, groups, MXFP4_BLOCK / 2], vec![parts, rows, groups]],
        };
        let tensor = |name: &String, shape| {
            PlannedFile::Sized(WriteEntry { name: name.clone(), dtype: StoredDtype::U8, shape, stack: None })
        };
        Ok(vec![tensor(&names.codes, codes), tensor(&names.scales, scales)])
    }

    /// Rounds a weight, piece by piece.
    pub(super) fn write(&self, source: &mut SourceTensor<'_>) -> Result<()> {
        let WeightTensors { codes, scales, first, .. } = self.tensors(source.name)?;
        let (mut packed, mut exponents) = (vec![0u8; PIECE / 2], vec![0u8; PIECE / MXFP4_BLOCK]);
        source.pieces(
            PIECE,
            |value| value,
            "finite numbers",
            |start, values, writer| {
                let (packed, exponents) =
                    (&mut packed[..values.len() / 2], &mut exponents[..values.len() / MXFP4_BLOCK]);
                quant::to_mxfp4(values, packed, exponents);
                let at = first + start;
                writer.write(codes, (at / 2) as u64, packed)?;
                writer.write(scales, (at / MXFP4_BLOCK) as u64, exponents)
            },
        )
    }
}

/// Returns the weights of a stack with its tensors.
fn tensors_in_stack(
    StackParts { stack, parts }: StackParts,
) -> impl Iterator<Item = (String, WeightTensors)> {
    let count = parts.len();
    parts.into_iter().enumerate().map(move |(at, part)| {
        let [codes, scales] = ["blocks", "scales"].map(|end| format!("{}_{end}", stack.name));
        let first = at * part.shape.iter().product::<usize>();
        (part.name, WeightTensors { codes, scales, first, parts: Some(count) })
    })
}

/// Returns the quantization entry of config.json; `ignore` has whole names, that of the head too.
pub(super) fn settings(config: &ModelConfig, ignore: &[String]) -> Value {
    if config.family.stacks_in_mxfp4 {
        return json!({
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", LM_HEAD_MODULE
            ],
            "quant_method": "mxfp4",
        });
    }
    json!({
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": false,
                    "group_size": MXFP4_BLOCK,
                    "num_bits": 4,
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": true,
                    "type": "float",
                    "zp_dtype": "torch.uint8",
                },
            },
        },
        "format": "mxfp4-pack-quantized",
        "ignore": ignore,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    })
}
