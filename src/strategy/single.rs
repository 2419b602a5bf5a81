//! One device holds everything: a gather is a borrow, gradients add up where they are.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};

use super::bucket::{Bucket, Entry, Fill, Slot, view};
use crate::error::{Error, Result};
use crate::model::{
    self, BlockWeights, EmbedWeights, HeadWeights, Lookup, Lora, ModelConfig, Param, Segment,
};
use crate::ops::reduce::{sum_of_squares, zero};

/// The adapter on one module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraSpec {
    /// Factor on B·A.
    pub scale: f64,
    /// Probability that an input value is dropped.
    pub dropout: f32,
}

/// All parameters on one device.
#[derive(Debug)]
pub struct Single {
    buckets: Vec<Bucket>,
    /// Name → (bucket, entry).
    index: HashMap<String, (usize, usize)>,
    embed: EmbedWeights,
    blocks: Vec<BlockWeights>,
    head: HeadWeights,
}

impl Single {
    /// Builds the buckets of `slots` and fills each slot by `fill`, in order.
    pub fn new(
        config: &ModelConfig,
        slots: Vec<Slot>,
        loras: BTreeMap<String, LoraSpec>,
        dtype: DType,
        device: &Device,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    ) -> Result<Self> {
        let mut groups: BTreeMap<(Segment, bool, bool), Vec<Slot>> = BTreeMap::new();
        for slot in slots {
            groups.entry((slot.segment, slot.trainable, slot.adapter)).or_default().push(slot);
        }
        let mut buckets = Vec::with_capacity(groups.len());
        for ((_, _, adapter), slots) in groups {
            let dtype = if adapter { DType::F32 } else { dtype };
            buckets.push(Bucket::new(slots, dtype, device, fill)?);
        }
        let index = buckets
            .iter()
            .enumerate()
            .flat_map(|(b, bucket)| {
                bucket.entries.iter().enumerate().map(move |(e, entry)| (entry.slot.name.clone(), (b, e)))
            })
            .collect();
        let parts = Parts { buckets: &buckets, index: &index, loras: &loras };
        let embed = model::assemble::embed(&parts)?;
        let blocks = (0..config.num_layers())
            .map(|layer| model::assemble::block(config, layer, &parts))
            .collect::<Result<Vec<_>>>()?;
        let head = model::assemble::head(config, &parts)?;
        Ok(Single { buckets, index, embed, blocks, head })
    }

    /// The embedding's weights.
    pub fn embed(&self) -> &EmbedWeights {
        &self.embed
    }

    /// The weights of block `layer`.
    pub fn block(&self, layer: usize) -> &BlockWeights {
        &self.blocks[layer]
    }

    /// The head's weights.
    pub fn head(&self) -> &HeadWeights {
        &self.head
    }

    /// The buckets that train, in order of segments.
    pub fn trainable(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|bucket| bucket.grad.is_some())
    }

    /// Every trainable slot with its f32 value, in order of segments.
    pub fn trainable_values(&self) -> Result<Vec<(Slot, Tensor)>> {
        self.trainable()
            .flat_map(|bucket| bucket.entries.iter().map(move |entry| (bucket, entry)))
            .map(|(bucket, entry)| Ok((entry.slot.clone(), bucket.updated_entry(entry)?)))
            .collect()
    }

    /// True when anything in the embedding trains, so that gradients must flow down to it.
    pub fn embedding_trains(&self) -> bool {
        self.embed.table.grad.is_some()
    }

    /// Sets all gradients to zero.
    pub fn zero_gradients(&self) -> Result<()> {
        self.trainable().filter_map(|bucket| bucket.grad.as_ref()).try_for_each(zero)
    }

    /// The Euclidean norm of all gradients.
    pub fn gradient_norm(&self) -> Result<f64> {
        let mut sum = 0f64;
        for grad in self.trainable().filter_map(|bucket| bucket.grad.as_ref()) {
            sum += sum_of_squares(grad)?;
        }
        Ok(sum.sqrt())
    }

    /// The first parameter, and then the first gradient, that holds a NaN or an infinity.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        for bucket in &self.buckets {
            for entry in &bucket.entries {
                if !finite(&view(&bucket.value, entry)?)? {
                    return Ok(Some(format!("the weight {}", entry.slot.name)));
                }
            }
        }
        for bucket in self.trainable() {
            for entry in &bucket.entries {
                let grad = bucket.grad.as_ref().map(|grad| view(grad, entry)).transpose()?;
                if let Some(grad) = grad
                    && !finite(&grad)?
                {
                    return Ok(Some(format!("the gradient of {}", entry.slot.name)));
                }
            }
        }
        Ok(None)
    }

    /// The entry of a name, with its bucket.
    pub fn find(&self, name: &str) -> Option<(&Bucket, &Entry)> {
        self.index.get(name).map(|&(b, e)| (&self.buckets[b], &self.buckets[b].entries[e]))
    }
}

fn finite(x: &Tensor) -> Result<bool> {
    let x = x.to_dtype(DType::F32)?.flatten_all()?;
    Ok(sum_of_squares(&x)?.is_finite() || x.to_vec1::<f32>()?.iter().all(|v| v.is_finite()))
}

/// The buckets while the weights are put together.
struct Parts<'a> {
    buckets: &'a [Bucket],
    index: &'a HashMap<String, (usize, usize)>,
    loras: &'a BTreeMap<String, LoraSpec>,
}

impl Lookup for Parts<'_> {
    fn param(&self, name: &str) -> Result<Param> {
        let &(b, e) =
            self.index.get(name).ok_or_else(|| Error::internal(format!("no parameter is called {name}")))?;
        self.buckets[b].param(&self.buckets[b].entries[e])
    }

    fn lora(&self, module: &str, site: u64) -> Result<Option<Lora>> {
        let Some(spec) = self.loras.get(module) else { return Ok(None) };
        Ok(Some(Lora {
            a: self.param(&format!("{module}.lora_A.weight"))?,
            b: self.param(&format!("{module}.lora_B.weight"))?,
            scale: spec.scale,
            dropout: spec.dropout,
            site,
        }))
    }

    fn has_own_head(&self) -> bool {
        self.index.contains_key("lm_head.weight")
    }
}
