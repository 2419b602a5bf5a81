//! One device holds everything: a gather is a borrow, gradients add up where they are.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};

use super::bucket::{Bucket, Entry, Fill, Slot, view};
use super::packed::Packed;
use crate::error::{Error, Result};
use crate::model::{
    self, BlockWeights, EmbedWeights, HeadWeights, Lookup, Lora, Matrix, ModelConfig, Param, Segment,
    TokenRows,
};
use crate::ops::reduce::{copy_into, sum_of_squares, zero};

/// The adapter on one module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraSpec {
    /// Factor on B·A.
    pub scale: f64,
    /// Probability that an input value is dropped.
    pub dropout: f32,
}

/// What is adapted, by module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adapters {
    /// Constants of the modules with LoRA or DoRA.
    pub loras: BTreeMap<String, LoraSpec>,
    /// Tokens whose rows of a table train.
    pub rows: BTreeMap<String, Vec<u32>>,
}

/// The end of the name of the slot that holds a table's trainable rows (PEFT's).
pub const TOKEN_ROWS: &str = ".token_adapter.trainable_tokens_delta";

/// All parameters on one device.
#[derive(Debug)]
pub struct Single {
    buckets: Vec<Bucket>,
    /// Kept: the weights are views on them.
    _packed: Vec<Packed>,
    /// Name → (bucket, entry).
    index: HashMap<String, (usize, usize)>,
    rows: BTreeMap<String, Vec<u32>>,
    embed: EmbedWeights,
    blocks: Vec<BlockWeights>,
    head: HeadWeights,
}

impl Single {
    /// Builds the buckets of `slots` and fills each slot by `fill`, in order.
    pub fn new(
        config: &ModelConfig,
        slots: Vec<Slot>,
        adapters: Adapters,
        dtype: DType,
        device: &Device,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    ) -> Result<Self> {
        let mut groups: BTreeMap<(Segment, Group), Vec<Slot>> = BTreeMap::new();
        for slot in slots {
            groups.entry((slot.segment, Group::of(&slot))).or_default().push(slot);
        }
        let (mut buckets, mut packed) = (Vec::new(), Vec::new());
        for ((_, group), slots) in groups {
            let dtype = match group {
                Group::Quantized => {
                    packed.push(Packed::new(slots, device, &mut |slot, blocks| {
                        fill(slot, Fill::Blocks(blocks))
                    })?);
                    continue;
                }
                Group::Adapter => DType::F32,
                Group::Frozen | Group::Trainable => dtype,
                Group::FrozenAs => slots[0].kept_as.unwrap_or(dtype),
            };
            buckets.push(Bucket::new(slots, dtype, device, fill)?);
        }
        let index = buckets
            .iter()
            .enumerate()
            .flat_map(|(b, bucket)| {
                bucket.entries.iter().enumerate().map(move |(e, entry)| (entry.slot.name.clone(), (b, e)))
            })
            .collect();
        let parts = Parts { buckets: &buckets, packed: &packed, index: &index, adapters: &adapters, dtype };
        let embed = model::assemble::embed(&parts)?;
        let blocks = (0..config.num_layers())
            .map(|layer| model::assemble::block(config, layer, &parts))
            .collect::<Result<Vec<_>>>()?;
        let head = model::assemble::head(config, &parts)?;
        let single = Single { buckets, _packed: packed, index, rows: adapters.rows, embed, blocks, head };
        single.place_rows()?;
        Ok(single)
    }

    /// Brings what is computed with in line with what the optimizer updated.
    pub fn after_update(&self) -> Result<()> {
        self.trainable().try_for_each(Bucket::refresh)?;
        self.place_rows()
    }

    /// Puts the trainable rows of a frozen table to their places in it.
    fn place_rows(&self) -> Result<()> {
        for (module, ids) in &self.rows {
            let (Some(table), Some(rows)) =
                (self.find(&format!("{module}.weight")), self.find(&format!("{module}{TOKEN_ROWS}")))
            else {
                return Err(Error::internal(format!("no rows for {module}")));
            };
            let (table, rows) = (view(&table.0.value, table.1)?, rows.0.updated_entry(rows.1)?);
            for (i, &id) in ids.iter().enumerate() {
                copy_into(&table.narrow(0, id as usize, 1)?, &rows.narrow(0, i, 1)?)?;
            }
        }
        Ok(())
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
        self.embed.trains()
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

/// What a bucket of a segment holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Frozen,
    FrozenAs,
    Quantized,
    Trainable,
    Adapter,
}

impl Group {
    fn of(slot: &Slot) -> Self {
        match slot {
            Slot { adapter: true, .. } => Group::Adapter,
            Slot { format: Some(_), .. } => Group::Quantized,
            Slot { trainable: true, .. } => Group::Trainable,
            Slot { kept_as: Some(_), .. } => Group::FrozenAs,
            _ => Group::Frozen,
        }
    }
}

/// The buckets while the weights are put together.
struct Parts<'a> {
    buckets: &'a [Bucket],
    packed: &'a [Packed],
    index: &'a HashMap<String, (usize, usize)>,
    adapters: &'a Adapters,
    dtype: DType,
}

impl Parts<'_> {
    fn optional(&self, name: &str) -> Result<Option<Param>> {
        self.index.contains_key(name).then(|| self.param(name)).transpose()
    }
}

impl Lookup for Parts<'_> {
    fn param(&self, name: &str) -> Result<Param> {
        let &(b, e) =
            self.index.get(name).ok_or_else(|| Error::internal(format!("no parameter is called {name}")))?;
        self.buckets[b].param(&self.buckets[b].entries[e])
    }

    fn matrix(&self, name: &str) -> Result<Matrix> {
        for packed in self.packed {
            if let Some(entry) = packed.names().position(|found| found == name) {
                return Ok(Matrix::Quantized(packed.quantized(entry)?));
            }
        }
        Ok(Matrix::Dense(self.param(name)?))
    }

    fn lora(&self, module: &str, site: u64) -> Result<Option<Lora>> {
        let Some(spec) = self.adapters.loras.get(module) else { return Ok(None) };
        // PEFT names the pair of an embedding otherwise.
        let [a, b] = match self.optional(&format!("{module}.lora_embedding_A"))? {
            Some(a) => [a, self.param(&format!("{module}.lora_embedding_B"))?],
            None => [
                self.param(&format!("{module}.lora_A.weight"))?,
                self.param(&format!("{module}.lora_B.weight"))?,
            ],
        };
        let magnitude = self.optional(&format!("{module}.lora_magnitude_vector"))?;
        Ok(Some(Lora { a, b, magnitude, scale: spec.scale, dropout: spec.dropout, site }))
    }

    fn rows(&self, module: &str) -> Result<Option<TokenRows>> {
        let Some(ids) = self.adapters.rows.get(module) else { return Ok(None) };
        let rows = self.param(&format!("{module}{TOKEN_ROWS}"))?;
        Ok(rows.grad.map(|grad| TokenRows { ids: ids.clone(), grad }))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn has_own_head(&self) -> bool {
        self.index.contains_key("lm_head.weight")
    }
}
