//! Maps names to weights: a segment's parameters as views on buckets, kept whole or gathered
//! temporarily.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Tensor};

use super::bucket::{Bucket, BucketEntry, view};
use super::gather::{BufferId, Gathered};
use super::quantized_bucket::QuantizedBucket;
use crate::error::{Error, Result};
use crate::model::{Lora, Param, ParamLookup, TokenRows, WeightMatrix};
use crate::runtime::TensorMut;
use crate::weights::LM_HEAD;

/// The adapter on one module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraSpec {
    /// Factor of B·A.
    pub scale: f64,
    /// Dropout probability of input values.
    pub dropout: f32,
}

/// The adapters of a model, by module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adapters {
    /// Constants of modules with LoRA or DoRA.
    pub loras: BTreeMap<String, LoraSpec>,
    /// Tokens whose rows of a table train.
    pub rows: BTreeMap<String, Vec<u32>>,
    /// The reason why the frozen weights differ from the base model's, or `None` if they do not.
    pub base_change: Option<&'static str>,
}

/// The suffix of the name of a table's trainable rows (PEFT's).
pub const TOKEN_ROWS: &str = ".token_adapter.trainable_tokens_delta";

/// The buckets from which the weights of a segment are assembled.
pub(super) struct SegmentViews<'a> {
    pub(super) buckets: &'a [Bucket],
    pub(super) packed: &'a [QuantizedBucket],
    pub(super) index: &'a HashMap<String, (usize, usize)>,
    /// Name → (packed bucket, entry).
    pub(super) packed_index: &'a HashMap<String, (usize, usize)>,
    pub(super) adapters: &'a Adapters,
    pub(super) dtype: DType,
    /// The gathered values.
    pub(super) gathered: &'a Gathered,
    /// Returns the memory of a bucket's gradients; `None` without a backward.
    pub(super) grads: Option<GradLookup<'a>>,
}

/// Maps a bucket's index to the memory of its gradients.
type GradLookup<'a> = Box<dyn Fn(usize) -> Result<Option<TensorMut>> + 'a>;

impl SegmentViews<'_> {
    fn optional(&self, name: &str) -> Result<Option<Param>> {
        self.index.contains_key(name).then(|| self.param(name)).transpose()
    }

    /// Returns the bucket of a parameter and its entry there.
    fn entry(&self, name: &str) -> Result<(usize, &BucketEntry)> {
        let &(b, e) =
            self.index.get(name).ok_or_else(|| Error::internal(format!("no parameter is called {name}")))?;
        Ok((b, &self.buckets[b].entries[e]))
    }

    /// Returns all values of a bucket, or `None` if it is sharded or offloaded, and not gathered.
    fn values(&self, index: usize) -> Option<&TensorMut> {
        self.buckets[index].resident().or_else(|| self.gathered.get(&BufferId::Values(index)))
    }
}

impl ParamLookup for SegmentViews<'_> {
    fn param(&self, name: &str) -> Result<Param> {
        let (b, entry) = self.entry(name)?;
        let values = self.values(b).ok_or_else(|| {
            Error::internal(format!("cannot use {name}")).because("its values are not gathered")
        })?;
        Ok(Param { value: view(values, entry)?, grad: self.grad(name)? })
    }

    fn grad(&self, name: &str) -> Result<Option<TensorMut>> {
        let (b, entry) = self.entry(name)?;
        let grads = self.grads.as_ref().map_or(Ok(None), |grads| grads(b))?;
        grads.map(|grads| view(&grads, entry).map(TensorMut::new)).transpose()
    }

    fn matrix(&self, name: &str) -> Result<WeightMatrix> {
        let Some(&(i, entry)) = self.packed_index.get(name) else {
            return Ok(WeightMatrix::Dense(self.param(name)?));
        };
        let packed = &self.packed[i];
        let whole = |dtype| match self.gathered.get(&BufferId::Quantized(i, dtype)) {
            Some(whole) => Ok(whole.clone()),
            None => packed.buffers[&dtype].values.tensor().cloned(),
        };
        Ok(WeightMatrix::Quantized(packed.quantized(entry, whole)?))
    }

    fn merged(&self, names: &[String]) -> Result<Option<Param>> {
        if names.iter().any(|name| self.packed_index.contains_key(name)) {
            return Ok(None);
        }
        let entries = names.iter().map(|name| self.entry(name)).collect::<Result<Vec<_>>>()?;
        let Some(&(bucket, first)) = entries.first() else { return Ok(None) };
        let adjoin = |pair: &[(usize, &BucketEntry)]| {
            pair[0].0 == pair[1].0 && pair[0].1.range().end == pair[1].1.start
        };
        if !entries.windows(2).all(adjoin) {
            return Ok(None);
        }
        let [_, width] = first.local.shape()[..] else { return Ok(None) };
        let elements = entries.iter().map(|(_, entry)| entry.range().len()).sum::<usize>();
        let whole = |flat: &Tensor| -> Result<Tensor> {
            Ok(flat.narrow(0, first.start, elements)?.reshape((elements / width, width))?)
        };
        let Some(values) = self.values(bucket) else { return Ok(None) };
        let grads = self.grads.as_ref().map_or(Ok(None), |grads| grads(bucket))?;
        let grad = grads.map(|grads| whole(&grads).map(TensorMut::new)).transpose()?;
        Ok(Some(Param { value: whole(values)?, grad }))
    }

    fn lora(&self, module: &str, module_index: u64) -> Result<Option<Lora>> {
        let Some(spec) = self.adapters.loras.get(module) else { return Ok(None) };
        // PEFT uses other names for the pair of an embedding.
        let [a, b] = match self.optional(&format!("{module}.lora_embedding_A"))? {
            Some(a) => [a, self.param(&format!("{module}.lora_embedding_B"))?],
            None => [
                self.param(&format!("{module}.lora_A.weight"))?,
                self.param(&format!("{module}.lora_B.weight"))?,
            ],
        };
        let magnitude = self.optional(&format!("{module}.lora_magnitude_vector"))?;
        Ok(Some(Lora { a, b, magnitude, scale: spec.scale, dropout: spec.dropout, module_index }))
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
        self.index.contains_key(LM_HEAD)
    }
}
