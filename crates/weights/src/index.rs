//! model.safetensors.index.json: the shard of each tensor.
//!
//! Shards must be in the index's own folder under plain names, by the rules of every system
//! (`../x`, `/x`, `C:\x` and NUL are refused on Linux too), so that no index can make this program
//! open other files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::header::clip;
use crate::error::input_file;
use crate::error::{Error, Result};

/// The largest accepted index: larger than that of a model with a million tensors.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Reads the index at `path`: tensor names to the file names of their shards. `total_size` is
/// ignored: old savers wrote it wrong, and the shards' headers have it.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, String>> {
    let failed = |cause: String| {
        Error::user(format!("cannot read index {}", path.display()))
            .because(cause)
            .hint("download or save the model again")
    };
    let text = input_file::read_up_to("read", path, MAX_INDEX_BYTES)?;
    let index: IndexFile =
        serde_json::from_slice(&text).map_err(|error| failed(format!("it is not valid: {error}")))?;
    let WeightMap(weight_map) = index.weight_map;
    if weight_map.is_empty() {
        return Err(failed("its weight_map names no tensor".into()));
    }
    for (tensor, shard) in &weight_map {
        if !is_plain_name(shard) {
            return Err(failed(format!(
                "tensor `{}` is in `{}`; accepted: a file name ending in .safetensors, in the same folder",
                clip(tensor),
                clip(shard)
            )));
        }
    }
    Ok(weight_map)
}

/// Returns whether `name` is a safetensors file name and nothing else on every system.
fn is_plain_name(name: &str) -> bool {
    name.len() > ".safetensors".len()
        && name.len() <= 255
        && name.ends_with(".safetensors")
        && !name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control())
}

#[derive(serde::Deserialize)]
struct IndexFile {
    weight_map: WeightMap,
}

struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut shards = BTreeMap::new();
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    let shown = clip(&tensor);
                    if shards.insert(tensor, shard).is_some() {
                        return Err(A::Error::custom(format!("tensor `{shown}` is in its weight_map twice")));
                    }
                }
                Ok(WeightMap(shards))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_pass() {
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for bad in [
            "../model.safetensors",
            "/etc/model.safetensors",
            "a/model.safetensors",
            r"C:\model.safetensors",
            r"..\model.safetensors",
            r"\\host\model.safetensors",
            "C:model.safetensors",
            "model\0.safetensors",
            ".safetensors",
            "pytorch_model.bin",
            "..",
            "",
        ] {
            assert!(!is_plain_name(bad), "{bad:?}");
        }
    }
}
