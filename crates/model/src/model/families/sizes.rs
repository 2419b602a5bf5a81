//! The sizes of a model and their limits.

use crate::error::{Error, Result};
use crate::model::config_reader::{ConfigReader, refused};
use crate::ops::attention::Heads;

/// Maximum width of activations.
pub(super) const MOST_WIDE: usize = 1 << 22;
/// Maximum number of tokens of a vocabulary.
pub(super) const MOST_TOKENS: usize = 1 << 27;
/// Maximum number of blocks.
const MOST_LAYERS: usize = 1 << 16;
/// Maximum number of attention heads, and maximum width of one.
pub(super) const MOST_HEADS: usize = 1 << 14;
/// Maximum number of positions of a sequence.
const MOST_POSITIONS: usize = 1 << 32;

/// Reads a number of heads from config.json, given that of query heads.
pub(super) type ReadHeads = fn(&ConfigReader<'_>, usize) -> Result<usize>;

/// The sizes from which a family composes its parts.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct ModelSizes {
    pub(super) hidden_size: usize,
    pub(super) heads: Heads,
    pub(super) num_layers: usize,
    pub(super) max_position_embeddings: usize,
}

impl ModelSizes {
    /// Reads the sizes; `head_dim` and `num_kv_heads` are the family's. Latent attention has other
    /// keys.
    pub(super) fn read(
        keys: &ConfigReader<'_>,
        head_dim: Option<usize>,
        num_kv_heads: Option<ReadHeads>,
        has_latents: bool,
    ) -> Result<Self> {
        let hidden_size = keys.size("hidden_size", MOST_WIDE)?;
        let derived = |num_heads: usize| head_dim.unwrap_or(hidden_size / num_heads.max(1));
        Ok(ModelSizes {
            hidden_size,
            heads: if has_latents { latent_heads(keys)? } else { heads(keys, derived, num_kv_heads)? },
            num_layers: keys.size("num_hidden_layers", MOST_LAYERS)?,
            max_position_embeddings: keys
                .opt_size("max_position_embeddings", MOST_POSITIONS)?
                .unwrap_or(2048),
        })
    }
}

/// Reads the number of key-value heads: in a file without the key `COUNT`, the default of
/// transformers 5.24; that of query heads where it is null, as in older transformers.
///
/// # Errors
/// User: the key is mistyped or too large.
pub(super) fn key_heads_or<const COUNT: usize>(keys: &ConfigReader<'_>, num_heads: usize) -> Result<usize> {
    let key = "num_key_value_heads";
    let default = if keys.mentions(key) { num_heads } else { COUNT };
    Ok(keys.opt_size(key, MOST_HEADS)?.unwrap_or(default))
}

/// Returns heads as wide as the wider of keys and values.
fn latent_heads(keys: &ConfigReader<'_>) -> Result<Heads> {
    let num_heads = keys.size("num_attention_heads", MOST_HEADS)?;
    let given = keys.opt_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(num_heads);
    if given != num_heads {
        return Err(refused("num_key_value_heads", given, &format!("{num_heads}, num_attention_heads")));
    }
    let size = |key| keys.size(key, MOST_HEADS);
    let key = size("qk_nope_head_dim")? + size("qk_rope_head_dim")?;
    let head_dim = key.max(size("v_head_dim")?).next_multiple_of(2);
    Ok(Heads { num_heads, num_kv_heads: num_heads, head_dim })
}

fn heads(
    keys: &ConfigReader<'_>,
    derived: impl Fn(usize) -> usize,
    num_kv_heads: Option<ReadHeads>,
) -> Result<Heads> {
    let num_heads = keys.size("num_attention_heads", MOST_HEADS)?;
    let num_kv_heads = match num_kv_heads {
        Some(read) => read(keys, num_heads)?,
        None => keys.opt_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(num_heads),
    };
    let heads = Heads {
        num_heads,
        num_kv_heads,
        head_dim: keys.opt_size("head_dim", MOST_HEADS)?.unwrap_or(derived(num_heads)),
    };
    checked(heads)
}

/// Returns `heads` if their counts fit each other and their width is even.
pub(super) fn checked(heads: Heads) -> Result<Heads> {
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(Error::user("the head counts do not fit each other").because(format!(
            "num_attention_heads is {num_heads}, num_key_value_heads {num_kv_heads}; the first must be a multiple of the second"
        )));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(Error::user(format!("the width of an attention head is {head_dim}")).because(
            "accepted: an even number above 0 (`head_dim`, else hidden_size / num_attention_heads)",
        ));
    }
    Ok(heads)
}
