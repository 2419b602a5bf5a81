//! The types of tensors in a GGUF file.
//!
//! A [`GgufType`] is the user's choice, a mixture of [`BlockType`]s. Its rules are those of
//! `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp, for dense models without an
//! importance matrix. A file therefore has the types that `llama-quantize` would choose: more bits
//! for the output, and in the `_k_m` mixtures for values and down projections of some layers. A row
//! that a block does not divide falls back to a type with smaller blocks, or else to f16.

use std::fmt;
use std::str::FromStr;

use crate::model::{GgufSeventyB, ModelConfig};
use crate::quant::BlockType;

/// The type that names the whole file; tensors of one dimension are always f32. The numbers are
/// those of `general.file_type` (`llama_ftype` in llama.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each name is the type's own")]
pub enum GgufType {
    F32 = 0,
    F16 = 1,
    BF16 = 32,
    Q8_0 = 7,
    Q4_0 = 2,
    Q4KM = 15,
    Q5KM = 17,
    Q6K = 18,
}

impl GgufType {
    /// Every type with its name.
    pub const ALL: [(&'static str, GgufType); 8] = [
        ("f32", Self::F32),
        ("f16", Self::F16),
        ("bf16", Self::BF16),
        ("q8_0", Self::Q8_0),
        ("q4_0", Self::Q4_0),
        ("q4_k_m", Self::Q4KM),
        ("q5_k_m", Self::Q5KM),
        ("q6_k", Self::Q6K),
    ];

    /// Returns the type of a matrix without a special rule.
    fn default_type(self) -> BlockType {
        match self {
            Self::F32 => BlockType::F32,
            Self::F16 => BlockType::F16,
            Self::BF16 => BlockType::BF16,
            Self::Q8_0 => BlockType::Q8_0,
            Self::Q4_0 => BlockType::Q4_0,
            Self::Q4KM => BlockType::Q4K,
            Self::Q5KM => BlockType::Q5K,
            Self::Q6K => BlockType::Q6K,
        }
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(_, kind)| kind == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, kind)| *kind)
            .ok_or_else(|| format!("accepted: {}", Self::ALL.map(|(name, _)| name).join(", ")))
    }
}

/// Returns the type, or llama.cpp's replacement for rows of this length.
fn or_smaller_blocks(kind: BlockType, row: usize) -> BlockType {
    let smaller = match kind {
        _ if kind.divides(row) => return kind,
        BlockType::Q4K => BlockType::Q5_0,
        BlockType::Q5K => BlockType::Q5_1,
        BlockType::Q6K => BlockType::Q8_0,
        other => other,
    };
    if smaller.divides(row) { smaller } else { BlockType::F16 }
}

/// The properties of a model that the rules depend on.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    kind: GgufType,
    layers: usize,
    /// The layers with values, in order: of Gated DeltaNet too, but not of short convolutions.
    of_values: Vec<usize>,
    tied: bool,
    seventy_b: bool,
    has_eight_experts: bool,
}

impl Mixture {
    /// Returns the rules for a file with the tensors `names`.
    pub(super) fn new<'a>(
        kind: GgufType,
        config: &ModelConfig,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let grouped = config.heads.num_heads != config.heads.num_kv_heads;
        let seventy_b = config.num_layers() == 80
            && match config.family.gguf.seventy_b {
                GgufSeventyB::Never => false,
                GgufSeventyB::Grouped => grouped,
                GgufSeventyB::Always => true,
            };
        // In llama.cpp Gemma's head is its embedding, which then counts as the output.
        Self {
            kind,
            layers: config.num_layers(),
            of_values: layers_of_values(names),
            tied: config.tie_word_embeddings,
            seventy_b,
            has_eight_experts: config.experts().next().is_some_and(|experts| experts.count == 8),
        }
    }

    /// Returns the type of the tensor `name` (as in the file), and its type if its rows were whole
    /// blocks.
    pub(super) fn choose(&self, name: &str, shape: &[usize]) -> (BlockType, BlockType) {
        let default = self.kind.default_type();
        let &[.., _, row] = shape else { return (BlockType::F32, BlockType::F32) };
        let is_exact =
            name.ends_with(".bias") || name.contains("ssm_conv1d") || name.contains("shortconv.conv");
        if is_exact || name.ends_with("ffn_gate_inp.weight") {
            return (BlockType::F32, BlockType::F32);
        }
        if !default.is_quantized() {
            return (default, default);
        }
        if name == "per_layer_model_proj.weight" {
            return (BlockType::BF16, BlockType::BF16);
        }
        let wanted = self.wanted(default, name, row);
        (or_smaller_blocks(wanted, row), wanted)
    }

    fn wanted(&self, default: BlockType, name: &str, row: usize) -> BlockType {
        let mixed = matches!(self.kind, GgufType::Q4KM | GgufType::Q5KM);
        let (layer, part) = part_of_layer(name).unwrap_or((0, name));
        match part {
            "output.weight" | "token_embd.weight" | "per_layer_token_embd.weight"
                if part == "output.weight" || self.tied =>
            {
                match default {
                    _ if !default.divides(row) => BlockType::Q8_0,
                    BlockType::Q8_0 => BlockType::Q8_0,
                    _ => BlockType::Q6K,
                }
            }
            "attn_k.weight" | "attn_v.weight" if self.has_eight_experts => BlockType::Q8_0,
            "attn_output.weight" if self.has_eight_experts && self.kind == GgufType::Q4KM => BlockType::Q5K,
            "attn_v.weight" | "attn_qkv.weight" => match default {
                _ if mixed && self.values_get_more_bits(layer) => BlockType::Q6K,
                BlockType::Q4K if self.seventy_b => BlockType::Q5K,
                _ => default,
            },
            "ffn_down.weight" | "ffn_down_exps.weight" | "ffn_down_shexp.weight"
                if mixed && gets_more_bits(layer, self.layers) =>
            {
                BlockType::Q6K
            }
            _ => default,
        }
    }

    /// Returns whether the values of `layer` get more bits, by its position among the layers with
    /// values.
    fn values_get_more_bits(&self, layer: usize) -> bool {
        let found = self.of_values.binary_search(&layer);
        found.is_ok_and(|at| gets_more_bits(at, self.of_values.len()))
    }
}

/// The projections of values, alone or with others.
const VALUES: [&str; 2] = ["attn_v.weight", "attn_qkv.weight"];

/// Returns the layers with values among the tensors `names`, in order.
fn layers_of_values<'a>(names: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let values = names.filter_map(part_of_layer).filter(|(_, part)| VALUES.contains(part));
    let mut layers: Vec<usize> = values.map(|(layer, _)| layer).collect();
    layers.sort_unstable();
    layers
}

/// Returns the layer of a tensor and its name there; `None`: it is not part of a layer.
fn part_of_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// Returns true for the first and last eighth of `count` tensors, and for every third between them.
fn gets_more_bits(at: usize, count: usize) -> bool {
    let eighth = count / 8;
    at < eighth || at >= 7 * count / 8 || (at - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixture(kind: GgufType, layers: usize, tied: bool) -> Mixture {
        let of_values = (0..layers).collect();
        Mixture { kind, layers, of_values, tied, seventy_b: false, has_eight_experts: false }
    }

    /// Of llama-quant.cpp, for eight experts; the down projections of experts are like others.
    #[test]
    fn models_with_eight_experts_get_more_bits_in_attention() {
        let chosen = |name: &str, experts| {
            let mixture = Mixture { has_eight_experts: experts == 8, ..mixture(GgufType::Q4KM, 32, false) };
            mixture.choose(name, &[256, 256]).0
        };
        for (name, eight, more) in [
            ("blk.10.attn_k.weight", BlockType::Q8_0, BlockType::Q4K),
            ("blk.10.attn_v.weight", BlockType::Q8_0, BlockType::Q4K),
            ("blk.10.attn_output.weight", BlockType::Q5K, BlockType::Q4K),
            ("blk.0.ffn_down_exps.weight", BlockType::Q6K, BlockType::Q6K),
            ("blk.9.ffn_gate_inp.weight", BlockType::F32, BlockType::F32),
        ] {
            assert_eq!((chosen(name, 8), chosen(name, 64)), (eight, more), "{name}");
        }
    }

    #[test]
    fn names_round_trip() {
        for (name, kind) in GgufType::ALL {
            assert_eq!(name.parse::<GgufType>(), Ok(kind));
            assert_eq!(kind.to_string(), name);
        }
        assert!("q4_k_s".parse::<GgufType>().is_err());
    }

    /// llama.cpp's rule by hand. 12 layers: 12/8 = 1, 7·12/8 = 10: layer 0; 10, 11; and between
    /// them i - 1 = 2, 5, 8. 32 layers: 4 and 28: 0–3; 28–31; i - 4 = 2, 5, …, 23. 2 layers: 0 and
    /// 1 (7·2/8 = 1): layer 1 alone.
    #[test]
    fn more_bits_by_hand() {
        let more =
            |layers: usize| (0..layers).filter(|layer| gets_more_bits(*layer, layers)).collect::<Vec<_>>();
        assert_eq!(more(2), [1]);
        assert_eq!(more(12), [0, 3, 6, 9, 10, 11]);
        assert_eq!(more(32), [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }

    /// `use_more_bits(qs.i_attention_wv, qs.n_attention_wv)` of llama-quant.cpp for LFM2-1.2B:
    /// values number 2 and 5 of 6 get more bits, and by layers 0, 1, 4, 7, 10, 13, 14, 15 of 16.
    #[test]
    fn values_count_alone_and_down_projections_by_layer() {
        let mut names: Vec<String> = [2, 5, 8, 10, 12, 14].map(|at| format!("blk.{at}.attn_v.weight")).into();
        names.extend((0..16).map(|at| format!("blk.{at}.ffn_down.weight")));
        names.push("blk.3.attn_v.bias".to_owned());
        let of_values = layers_of_values(names.iter().map(String::as_str));
        let mixture = Mixture { of_values, ..mixture(GgufType::Q4KM, 16, true) };
        let more = |part: &str| {
            let of = names.iter().filter(|name| name.ends_with(part));
            let more = of.filter(|name| mixture.choose(name, &[8, 256]).0 == BlockType::Q6K);
            more.filter_map(|name| part_of_layer(name)).map(|(layer, _)| layer).collect::<Vec<_>>()
        };
        assert_eq!(more("attn_v.weight"), [8, 14]);
        assert_eq!(more("ffn_down.weight"), [0, 1, 4, 7, 10, 13, 14, 15]);
    }

    /// Each line derived from llama_tensor_get_type_impl and tensor_type_fallback.
    #[test]
    fn types_by_hand() {
        use BlockType::{BF16, F16, F32, Q4_0, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        use GgufType as G;
        let table: [(GgufType, bool, &str, usize, BlockType); 36] = [
            // Layers 0, 3, 6, 9, 10, 11 of 12 have more bits.
            (G::Q4KM, false, "blk.0.attn_v.weight", 256, Q6K),
            (G::Q4KM, false, "blk.1.attn_v.weight", 256, Q4K),
            (G::Q4KM, false, "blk.3.ffn_down.weight", 512, Q6K),
            (G::Q4KM, false, "blk.4.ffn_down.weight", 512, Q4K),
            (G::Q4KM, false, "blk.0.attn_q.weight", 256, Q4K),
            (G::Q4KM, false, "blk.0.attn_output.weight", 256, Q4K),
            (G::Q4KM, false, "blk.11.ffn_gate.weight", 256, Q4K),
            (G::Q4KM, false, "blk.0.attn_qkv.weight", 256, Q6K),
            (G::Q4KM, false, "blk.1.attn_qkv.weight", 256, Q4K),
            (G::Q4KM, false, "output.weight", 256, Q6K),
            (G::Q4KM, false, "token_embd.weight", 256, Q4K),
            (G::Q4KM, true, "token_embd.weight", 256, Q6K),
            (G::Q4KM, false, "blk.0.attn_norm.weight", 0, F32),
            (G::Q4KM, true, "per_layer_token_embd.weight", 256, Q6K),
            (G::Q4KM, true, "per_layer_model_proj.weight", 256, BF16),
            (G::Q8_0, false, "blk.0.shortconv.conv.weight", 32, F32),
            (G::Q8_0, false, "blk.0.shortconv.in_proj.weight", 64, Q8_0),
            (G::Q5KM, false, "blk.10.attn_v.weight", 256, Q6K),
            (G::Q5KM, false, "blk.8.attn_v.weight", 256, Q5K),
            (G::Q5KM, false, "blk.10.ffn_down.weight", 256, Q6K),
            (G::Q5KM, false, "token_embd.weight", 256, Q5K),
            (G::Q6K, false, "blk.0.attn_v.weight", 256, Q6K),
            (G::Q6K, true, "token_embd.weight", 256, Q6K),
            (G::Q8_0, false, "output.weight", 64, Q8_0),
            (G::Q4_0, false, "output.weight", 256, Q6K),
            (G::Q4_0, false, "blk.0.ffn_down.weight", 256, Q4_0),
            // Rows that are no multiple of 256, then of 32.
            (G::Q4KM, false, "blk.1.attn_q.weight", 64, Q5_0),
            (G::Q5KM, false, "blk.1.attn_q.weight", 64, Q5_1),
            (G::Q4KM, false, "blk.0.attn_v.weight", 64, Q8_0),
            (G::Q6K, false, "blk.0.attn_q.weight", 96, Q8_0),
            (G::Q4KM, true, "token_embd.weight", 64, Q8_0),
            (G::Q4_0, false, "output.weight", 64, Q8_0),
            (G::Q4KM, false, "blk.1.ffn_down.weight", 172, F16),
            (G::Q8_0, false, "blk.1.ffn_down.weight", 172, F16),
            (G::BF16, false, "output.weight", 172, BF16),
            (G::F32, false, "blk.1.attn_q.weight", 64, F32),
        ];
        for (kind, tied, name, row, wanted) in table {
            let shape = if row == 0 { vec![256] } else { vec![8, row] };
            let (chosen, _) = mixture(kind, 12, tied).choose(name, &shape);
            assert_eq!(chosen, wanted, "{kind} {name} rows of {row}, tied {tied}");
        }
        let seventy_b = Mixture { seventy_b: true, ..mixture(G::Q4KM, 80, false) };
        assert_eq!(seventy_b.choose("blk.11.attn_v.weight", &[8, 256]).0, Q5K);
        assert_eq!(seventy_b.choose("blk.0.attn_v.weight", &[8, 256]).0, Q6K);
    }
}
