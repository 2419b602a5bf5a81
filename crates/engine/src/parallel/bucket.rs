//! A flat buffer of parameters: tensors are aligned views into it, so that a gather, a load or an
//! update handles one contiguous piece of memory.
//!
//! A rank keeps a whole bucket or its shard, one of N equal runs. This holds separately for the
//! compute values, the gradients and the updated values ([`super::placement`]). They may be
//! offloaded from the device ([`super::offload`]).

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::local_range::LocalRange;
use super::mesh::DeviceMesh;
use super::offload::{BucketBuilder, OffloadTarget, StorageTarget};
use super::param::{BucketKey, BucketKind, ParamDesc, ParamKind};
use super::placement::{Placements, ShardingSpec};
use crate::error::Result;
use crate::model::Segment;
use crate::ops::has_kernels;
use crate::quant::QuantViewMut;
use crate::recipe::enums::MasterWeights;
use crate::runtime::TensorMut;
use crate::runtime::copy::{converted, copy_into, to_device, zero};
use crate::runtime::cpu_tensor::PlainElement;
use crate::runtime::mmap::MappedFile;
use crate::runtime::param_storage::{ParamStorage, STAGING_ELEMENTS};

/// Memory that the value of one parameter is loaded to, in row-major order.
#[derive(Debug)]
pub enum LoadTarget<'a> {
    /// The elements in f32.
    F32(&'a mut [f32]),
    /// The elements in bf16.
    Bf16(&'a mut [bf16]),
    /// The runs of a quantized matrix.
    Quantized(QuantViewMut<'a>),
}

/// Writes the part of a parameter that a rank computes with.
pub type FillParam<'a> = dyn FnMut(&ParamDesc, &LocalRange, LoadTarget<'_>) -> Result<()> + 'a;

/// A parameter of a bucket and its position there.
#[derive(Debug, Clone)]
pub struct BucketEntry {
    /// The parameter at this position.
    pub desc: ParamDesc,
    /// The part of the parameter that this rank computes with. The bucket holds no more of it.
    pub local: LocalRange,
    /// Its first element, a multiple of 256 from the start of the bucket.
    pub start: usize,
}

impl BucketEntry {
    /// Returns the elements of the parameter in the bucket, without the padding after it.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.local.elements()
    }
}

/// Alignment of entries and shards in elements: the blocks of 8-bit moments, counted within a
/// tensor, never straddle two ranks.
pub(super) const ALIGN: usize = 256;

/// The dense parameters of one segment and kind, in one flat buffer: what FSDP calls a flat
/// parameter. A copy shares the memory.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// The segment that uses it.
    pub segment: Segment,
    pub(super) kind: BucketKind,
    /// True for the table of per-layer inputs, whose memory is freed after each use.
    pub(super) per_layer: bool,
    /// The parameters, in order of position.
    pub entries: Vec<BucketEntry>,
    /// Number of elements of the whole bucket, padding included.
    pub(super) len: usize,
    pub(super) spec: ShardingSpec,
    /// The compute values: all of them or this rank's shard.
    pub(super) value: ParamStorage,
    /// True if values and gradients are offloaded from the device.
    pub(super) away: bool,
    /// The f32 values of `own` that the optimizer updates, if it does not update `value`.
    master: Option<Tensor>,
    /// Gradients, f32 or bf16, whole or this rank's shard; `None` for frozen buckets.
    pub(super) grad: Option<TensorMut>,
    /// True if gradients are rounded to bf16 before the update.
    rounds_gradients: bool,
    /// True if backward writes them in place in bf16, overwriting those of matrices.
    written_in_place: bool,
    /// The run that this rank updates: the whole bucket or its shard.
    pub(super) own: Range<usize>,
}

/// Options for the construction of buckets.
#[derive(Debug, Clone, Copy)]
pub(super) struct BucketOptions<'a> {
    pub(super) spec: ShardingSpec,
    pub(super) mesh: &'a DeviceMesh,
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    /// The memory that keeps the values.
    pub(super) values: StorageTarget<'a>,
    pub(super) offload: &'a OffloadTarget,
    /// True if every entry is filled, although the rank keeps only a part.
    pub(super) fill_all: bool,
    /// Selects f32 masters or the bf16 weights themselves as the values that the optimizer updates.
    pub(super) master: MasterWeights,
    /// The dtype in which gradients of blocks without masters are kept.
    pub(super) kept_gradients: DType,
}

impl BucketOptions<'_> {
    /// Returns whether the optimizer updates values of this kind themselves and not an f32 copy.
    fn is_updated_itself(&self, kind: ParamKind) -> bool {
        let weight = matches!(kind, ParamKind::Trainable(_));
        self.dtype == DType::F32 || (weight && self.master == MasterWeights::None)
    }

    /// Returns the run of a flat buffer of `len` elements that this rank keeps.
    pub(super) fn part(&self, placements: Placements, len: usize) -> Range<usize> {
        placements.range(0, len, self.mesh.shape(), self.mesh.world().rank())
    }

    /// Returns the factor of the length of a bucket with entries aligned to `align` elements: it
    /// makes shards, and the runs of each rank of a sum, equal.
    pub(super) fn unit(&self, align: usize) -> usize {
        align * self.mesh.size(self.mesh.strategy().sum_axis())
    }

    /// Returns whether this rank, which keeps `part`, has to fill an entry.
    pub(super) fn wants(&self, entry: &Range<usize>, part: &Range<usize>) -> bool {
        self.fill_all || (entry.start < part.end && part.start < entry.end)
    }
}

impl Bucket {
    /// Lays out `descs` and fills, one at a time, those of which this rank keeps a part.
    pub(super) fn new(
        descs: Vec<ParamDesc>,
        bucket_options: BucketOptions<'_>,
        fill: &mut FillParam<'_>,
    ) -> Result<Self> {
        let BucketOptions { spec, device, dtype, values, .. } = bucket_options;
        let BucketKey { segment, kind, per_layer } = BucketKey::of(&descs[0]);
        let (descs_kind, trainable) = (descs[0].kind, descs[0].kind.trains());
        let (entries, len) = layout(descs, &bucket_options)?;
        let (stored, own) = (bucket_options.part(spec.values, len), bucket_options.part(spec.update, len));
        let itself = bucket_options.is_updated_itself(descs_kind);
        // Trainable values are read in f32 for any compute dtype: they are the master.
        let loaded = if trainable && !itself { DType::F32 } else { dtype };
        // With a master, the final storage may differ from the memory that is filled.
        let target = if loaded == dtype { values } else { StorageTarget::Host };
        let to = BucketOptions { values: target, ..bucket_options };
        let filled = match loaded {
            DType::BF16 => {
                filled(&entries, &stored, &to, fill, |values: &mut [bf16]| LoadTarget::Bf16(values))?
            }
            _ => filled(&entries, &stored, &to, fill, |values: &mut [f32]| LoadTarget::F32(values))?,
        };
        let (value, master) = if loaded == dtype {
            (values.settle(filled)?, None)
        } else {
            let filled = filled.tensor()?;
            let master = filled.narrow(0, own.start - stored.start, own.len())?.force_contiguous()?;
            let master = to_device(&master, &bucket_options.offload.state_on(device))?;
            (values.settle(converted(filled, dtype)?.into())?, Some(master))
        };
        let part = bucket_options.part(spec.gradients, len).len();
        let away = values.is_away();
        let grads_on = if away { &Device::Cpu } else { device };
        let rounds_gradients =
            itself && trainable && dtype != DType::F32 && matches!(segment, Segment::Block(_));
        let grad_dtype = if rounds_gradients { bucket_options.kept_gradients } else { DType::F32 };
        let grad = trainable.then(|| TensorMut::zeros(part, grad_dtype, grads_on)).transpose()?;
        // GPU kernels accumulate in f32.
        let written_in_place =
            bucket_options.mesh.data_size() == 1 && device.is_cpu() && !has_kernels(device) && !away;
        Ok(Bucket {
            segment,
            kind,
            per_layer,
            entries,
            len,
            spec,
            value,
            away,
            master,
            grad,
            rounds_gradients,
            written_in_place,
            own,
        })
    }

    /// Returns the run that the rank of `bucket_options` updates, for a bucket that it shares.
    pub(super) fn owned_by(self, bucket_options: &BucketOptions<'_>) -> Self {
        let own = bucket_options.part(bucket_options.spec.update, self.len);
        Bucket { own, ..self }
    }

    /// Returns the bytes that the values of a bucket of `descs` occupy in a file.
    pub(super) fn file_bytes(descs: &[ParamDesc], bucket_options: &BucketOptions<'_>) -> Result<usize> {
        let (_, len) = layout(descs.to_vec(), bucket_options)?;
        let elements = bucket_options.part(bucket_options.spec.values, len).len();
        Ok(MappedFile::file_bytes(elements, bucket_options.dtype))
    }

    /// Returns all values if they are ready for compute, or `None` if they are sharded or
    /// offloaded.
    pub(super) fn resident(&self) -> Option<&TensorMut> {
        match &self.value {
            ParamStorage::Memory(value) if !self.away && !self.spec.values.is_sharded() => Some(value),
            _ => None,
        }
    }

    /// Returns the values that the optimizer updates, flat: [`Bucket::own`]'s part of the f32
    /// master, or of the value if it has no master.
    ///
    /// # Errors
    /// The part is not within the kept values, an internal error.
    pub fn updated(&self) -> Result<ParamStorage> {
        match &self.master {
            Some(master) => Ok(master.clone().into()),
            None => self.own_value(),
        }
    }

    /// Returns whether an optimizer updates its values.
    pub(crate) fn trains(&self) -> bool {
        self.grad.is_some()
    }

    /// Returns the gradient of the updated values, flat and as long as [`Bucket::own`], or `None`
    /// for a frozen bucket.
    ///
    /// # Errors
    /// The part is not within the kept gradients, an internal error.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        let own = |grad: &TensorMut| {
            if self.spec.gradients.is_sharded() {
                return Ok(grad.clone());
            }
            grad.narrow(0, self.own.start, self.own.len())
        };
        Ok(self.grad.as_ref().map(own).transpose()?.map(TensorMut::into_tensor))
    }

    /// Sets the kept gradients to zero, except for those that one product of backward overwrites:
    /// the weights of linear layers and the token tables. Others get sums.
    pub(super) fn zero_gradients(&self) -> Result<()> {
        let Some(grad) = &self.grad else { return Ok(()) };
        if !self.keeps_bf16_gradients() || self.rounds_from_f32() {
            return zero(grad);
        }
        let is_product = |desc: &ParamDesc| desc.global_shape().len() == 2 && desc.name.ends_with(".weight");
        let sums = self.entries.iter().filter(|entry| !is_product(&entry.desc));
        let mut runs = sums.map(|entry| grad.narrow(0, entry.start, entry.range().len()));
        runs.try_for_each(|run| zero(&run?))
    }

    /// Returns whether gradients are kept in bf16 while backward accumulates in separate f32
    /// memory.
    pub(super) fn rounds_from_f32(&self) -> bool {
        self.keeps_bf16_gradients() && !self.written_in_place
    }

    /// Returns whether gradients are kept in bf16.
    pub(super) fn keeps_bf16_gradients(&self) -> bool {
        self.grad.as_ref().is_some_and(|grad| grad.dtype() == DType::BF16)
    }

    /// Rounds the gradients of [`Bucket::own`] to bf16 if the update uses bf16 gradients. The
    /// update then sees the same numbers for any number of micro-batches that this rank added up in
    /// f32.
    pub(super) fn round_gradients(&self) -> Result<()> {
        if !self.rounds_gradients || self.keeps_bf16_gradients() {
            return Ok(());
        }
        let Some(grad) = self.gradient()?.map(TensorMut::new) else { return Ok(()) };
        for start in (0..grad.elem_count()).step_by(STAGING_ELEMENTS) {
            let run = grad.narrow(0, start, STAGING_ELEMENTS.min(grad.elem_count() - start))?;
            copy_into(&run, &converted(&run, DType::BF16)?)?;
        }
        Ok(())
    }

    /// Returns this rank's part of the compute values.
    ///
    /// # Errors
    /// The part is not within the kept values, an internal error.
    pub fn own_value(&self) -> Result<ParamStorage> {
        if self.spec.values.is_sharded() {
            return Ok(self.value.clone());
        }
        self.value.narrow(self.own.start, self.own.len())
    }

    /// Returns the number of elements of the whole bucket, padding included.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// Returns the bytes that this rank keeps of values, of f32 masters and of gradients.
    pub fn kept_bytes(&self) -> [usize; 3] {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let values = self.value.elements() * self.value.dtype().size_in_bytes();
        [values, self.master.as_ref().map_or(0, bytes), self.grad.as_deref().map_or(0, bytes)]
    }

    /// Returns the run of the bucket that this rank updates.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Returns this rank's part of the values if the update of the f32 master also writes them.
    /// Both are then in the memory of one device, where the optimizer updates them in place.
    ///
    /// # Errors
    /// The part is not within the kept values, an internal error.
    pub(crate) fn value_beside_master(&self, offload: &OffloadTarget) -> Result<Option<TensorMut>> {
        let Some(master) = self.master.as_ref().filter(|_| !offload.has_state()) else { return Ok(None) };
        Ok(match self.own_value()? {
            ParamStorage::Memory(value) if value.device().same_device(master.device()) => Some(value),
            _ => None,
        })
    }

    /// Copies the master, if any, to this rank's part of `value`.
    pub(super) fn copy_master(&self) -> Result<()> {
        self.master.as_ref().map_or(Ok(()), |master| self.own_value()?.store_cast(master))
    }

    /// Copies the master to this rank's part of `value` after an update, unless the update has done
    /// so.
    pub(super) fn refresh(&self, offload: &OffloadTarget) -> Result<()> {
        match self.value_beside_master(offload)? {
            Some(_) => Ok(()),
            None => self.copy_master(),
        }
    }
}

/// Returns an entry's view of a flat tensor of the whole bucket.
pub(super) fn view(flat: &Tensor, entry: &BucketEntry) -> Result<Tensor> {
    let part = flat.narrow(0, entry.start, entry.range().len())?;
    Ok(part.reshape(entry.local.shape())?)
}

/// Returns the positions of `descs`, and the length of the whole, of which ranks keep equal runs.
fn layout(descs: Vec<ParamDesc>, bucket_options: &BucketOptions<'_>) -> Result<(Vec<BucketEntry>, usize)> {
    let mut start = 0;
    let mut entries = Vec::with_capacity(descs.len());
    for desc in descs {
        let local = bucket_options.mesh.local_range(&desc)?;
        let after = start + local.elements().next_multiple_of(ALIGN);
        entries.push(BucketEntry { desc, local, start });
        start = after;
    }
    Ok((entries, start.next_multiple_of(bucket_options.unit(ALIGN))))
}

/// Fills the run `own_range`, which this rank keeps, with the values of `entries`.
fn filled<T: PlainElement>(
    entries: &[BucketEntry],
    own_range: &Range<usize>,
    bucket_options: &BucketOptions<'_>,
    fill: &mut FillParam<'_>,
    wrap: fn(&mut [T]) -> LoadTarget<'_>,
) -> Result<ParamStorage> {
    let mut filling = BucketBuilder::new(own_range.clone(), bucket_options.values)?;
    for entry in entries.iter().filter(|entry| bucket_options.wants(&entry.range(), own_range)) {
        filling.fill(entry.range(), |values| fill(&entry.desc, &entry.local, wrap(values)))?;
    }
    filling.finish()
}
