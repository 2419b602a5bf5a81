//! An entry of the list of a model's parameters in GGUF files.

use serde::{Deserialize, Serialize};

use super::rows::RowRun;

/// A parameter of the model in GGUF files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GgufParameter {
    /// The tensors that hold its rows, in equal shares.
    pub tensors: Vec<String>,
    /// The expert, if a tensor holds those of all experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert: Option<usize>,
    /// The position of its number, if it is one of a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<usize>,
    /// The half of the tensor's rows, 0 or 1, if it holds two parameters one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half: Option<usize>,
    /// Its shape in the model.
    pub shape: Vec<usize>,
    /// The number of heads whose halves are interleaved in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interleaved_heads: Option<usize>,
    /// The number that the file has added to each value.
    #[serde(default)]
    pub added: f32,
    /// The rows of the parameter that each tensor has, in its order; empty: equal shares in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Vec<RowRun>>,
    /// The columns of the parameter in the order of the file; empty: as in the parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<RowRun>,
    /// For each tensor, the number of heads whose matrices it holds transposed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transposed_heads: Vec<Option<usize>>,
    /// True if `rows` counts single values.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_element: bool,
    /// True if the file has −exp(v) for each value v.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_log_rate: bool,
}
