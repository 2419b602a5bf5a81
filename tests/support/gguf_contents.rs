//! The keys and tensors of a GGUF file, to write it with changes.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};

/// The contents of a file.
pub(crate) struct Contents {
    pub(crate) keys: BTreeMap<String, Value>,
    pub(crate) tensors: BTreeMap<String, QTensor>,
}

impl Contents {
    pub(crate) fn of(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        let content = Content::read(&mut file).unwrap();
        let names: Vec<String> = content.tensor_infos.keys().cloned().collect();
        let read = |name: String| {
            let tensor = content.tensor(&mut file, &name, &Device::Cpu).unwrap();
            (name, tensor)
        };
        let tensors = names.into_iter().map(read).collect();
        Contents { keys: content.metadata.into_iter().collect(), tensors }
    }

    pub(crate) fn write(&self, path: &Path) {
        let keys: Vec<(&str, &Value)> = self.keys.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<(&str, &QTensor)> =
            self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write(&mut File::create(path).unwrap(), &keys, &tensors).unwrap();
    }

    pub(crate) fn add(&mut self, name: &str, values: &Tensor, kind: GgmlDType) {
        self.tensors.insert(name.to_owned(), QTensor::quantize(values, kind).unwrap());
    }

    /// Puts gates and ups of all experts of each of these layers into one tensor of type `kind`.
    pub(crate) fn join_experts(&mut self, layers: Range<usize>, kind: GgmlDType) {
        for layer in layers {
            let part = |name: &str| format!("blk.{layer}.ffn_{name}_exps.weight");
            let [gate, up] = ["gate", "up"].map(|name| self.tensors.remove(&part(name)).unwrap());
            let [gate, up] = [gate, up].map(|tensor| tensor.dequantize(&Device::Cpu).unwrap());
            self.add(&part("gate_up"), &Tensor::cat(&[gate, up], 1).unwrap(), kind);
        }
    }

    /// Adds `further` blocks after the `layers` of the model, which predict further tokens.
    pub(crate) fn predict_further(&mut self, arch: &str, layers: u32, further: u32) {
        for (key, value) in [("block_count", layers + further), ("nextn_predict_layers", further)] {
            self.keys.insert(format!("{arch}.{key}"), Value::U32(value));
        }
        for list in ["attention.head_count_kv", "attention.sliding_window_pattern"] {
            if let Some(Value::Array(values)) = self.keys.get_mut(&format!("{arch}.{list}")) {
                let last = values.last().cloned().unwrap();
                values.resize((layers + further) as usize, last);
            }
        }
        let matrix = Tensor::ones((4, 32), DType::F32, &Device::Cpu).unwrap();
        for layer in layers..layers + further {
            for part in ["attn_q", "nextn.eh_proj"] {
                self.add(&format!("blk.{layer}.{part}.weight"), &matrix, GgmlDType::F32);
            }
        }
    }
}
