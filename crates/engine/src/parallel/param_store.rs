//! The parameters of a rank, for every strategy: their buckets, and the weights of a segment as
//! views on them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use candle_core::{DType, Device, Tensor};

use super::bucket::{Bucket, BucketEntry, BucketOptions, FillParam, view};
use super::gather::{BufferId, GatherQueue, Gathered, GatheredMemory, ShardRun, call};
use super::grad_reduce::{GradBuffers, GradReduceOptions, is_finite};
use super::mesh::DeviceMesh;
use super::mesh_shape::MeshAxis;
use super::offload::{OffloadTarget, StorageTarget};
use super::param::{BucketKey, BucketKind, BufferKind, ParamDesc, ParamKind, per_layer_inputs_train};
use super::placement::ParamRole;
use super::quantized_bucket::QuantizedBucket;
use super::shared_frozen::{FrozenBucket, SharedFrozen, is_shareable, trains_rows};
use super::views::{Adapters, SegmentViews, TOKEN_ROWS};
use crate::collective::{Call, Phase};
use crate::error::{Error, Result};
use crate::model::{self, BlockWeights, EmbedGradients, EmbedWeights, HeadWeights, ModelConfig, Segment};
use crate::recipe::enums::MasterWeights;
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;
use crate::runtime::cpu_tensor::memory;
use crate::runtime::machine::host_memory;
use crate::runtime::param_storage::ParamStorage;
use crate::units;
use crate::weights::LM_HEAD;

/// Options of a store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The compute dtype.
    pub dtype: DType,
    /// The compute device.
    pub device: Device,
    /// The ranks and their sharding strategy.
    pub mesh: DeviceMesh,
    /// Options of the summation of gradients.
    pub reducing: GradReduceOptions,
    /// The tensors to offload from the device.
    pub offload: OffloadTarget,
    /// Read every parameter, even if the rank keeps only a shard: other values are derived from it.
    pub fill_all: bool,
    /// Also keep quantized weights of blocks in bf16, for devices with kernels that multiply dense
    /// panels.
    pub bf16_copy: bool,
    /// Multiply by frozen weights of blocks in fp8.
    pub fp8: bool,
    /// Selects f32 masters or the bf16 weights themselves as the values that the optimizer updates.
    pub master: MasterWeights,
    /// The frozen weights that the ranks of this process share.
    pub frozen: SharedFrozen,
}

/// This rank's part of all parameters.
#[derive(Debug)]
pub struct ParamStore {
    pub(super) options: StoreOptions,
    config: ModelConfig,
    buckets: Vec<Bucket>,
    packed: Vec<QuantizedBucket>,
    /// Name → (bucket, entry).
    index: HashMap<String, (usize, usize)>,
    /// Name → (packed bucket, entry).
    packed_index: HashMap<String, (usize, usize)>,
    adapters: Adapters,
    gathers: GatherQueue,
    grad_buffers: GradBuffers,
    blocks: Vec<BlockWeights>,
    per_layer_inputs_train: bool,
}

/// The weights of a segment, whole during the lifetime of this guard.
#[derive(Debug)]
pub struct GatherGuard<'a, W> {
    weights: W,
    _whole: GatheredMemory<'a>,
}

impl<W> Deref for GatherGuard<'_, W> {
    type Target = W;
    fn deref(&self) -> &W {
        &self.weights
    }
}

impl ParamStore {
    /// Builds the buckets of `descs` and fills them with `fill`, in order. All ranks call it.
    ///
    /// # Errors
    /// Those of `fill`; a peer failed.
    pub fn new(
        config: &ModelConfig,
        descs: Vec<ParamDesc>,
        adapters: Adapters,
        options: StoreOptions,
        fill: &mut FillParam<'_>,
    ) -> Result<Self> {
        let per_layer_inputs_train = per_layer_inputs_train(config, &descs);
        let (buckets, packed) = buckets(descs, &options, fill)?;
        let names = |bucket: &Bucket| bucket.entries.iter().map(|entry| entry.desc.name.clone()).collect();
        let grad_buffers = GradBuffers::new(&buckets, options.reducing, &options.device, &options.mesh)?;
        let mut store = ParamStore {
            gathers: GatherQueue::new(shard_runs(config, &buckets, &packed)?, &options.device)?,
            options,
            config: config.clone(),
            index: places(buckets.iter().map(names)),
            packed_index: places(packed.iter().map(QuantizedBucket::names)),
            buckets,
            packed,
            adapters,
            grad_buffers,
            blocks: Vec::new(),
            per_layer_inputs_train,
        };
        store.sync_initial_state()?;
        store.blocks = (0..config.num_layers())
            .map(|layer| model::assemble::block(config, layer, &store.views(&store.gathers.block(layer)?)))
            .collect::<Result<_>>()?;
        if store.options.bf16_copy {
            store.blocks.iter_mut().try_for_each(BlockWeights::keep_in_bf16)?;
        }
        if store.options.fp8 {
            let frozen = ParamRole::Frozen;
            let is_split = store.options.mesh.strategy().sharding_spec(frozen).values.is_sharded();
            let keeps = !is_split && !store.options.offload.has_values(frozen);
            store.blocks.iter_mut().try_for_each(|block| block.multiply_in_fp8(keeps))?;
        }
        store.scatter_trained_rows(None)?;
        Ok(store)
    }

    /// Shares initial values after loading: those that only one rank has, and those that must be
    /// equal on all ranks.
    fn sync_initial_state(&mut self) -> Result<()> {
        if self.mesh().world().size() == 1 {
            return Ok(());
        }
        if self.packed.iter().any(QuantizedBucket::sharded) {
            let mut offsets: Vec<&mut f32> =
                self.packed.iter_mut().flat_map(QuantizedBucket::offsets).collect();
            let values: Vec<f64> = offsets.iter().map(|offset| f64::from(**offset)).collect();
            let sum = Tensor::from_vec(values, offsets.len(), &Device::Cpu)?;
            let shards = self.options.mesh.group(MeshAxis::Shard);
            shards.all_reduce(Call::single("means of scales"), &memory(&sum)?)?;
            for (offset, sum) in offsets.iter_mut().zip(sum.to_vec1::<f64>()?) {
                **offset = sum as f32;
            }
        }
        for bucket in self.trainable().filter(|bucket| !bucket.spec.values.is_sharded()) {
            let first = call!("first values of", bucket.segment);
            self.with_device_buffer(&bucket.value, |values| {
                self.mesh().world().broadcast(first, 0, &values.memory()?)
            })?;
        }
        Ok(())
    }

    /// Runs a collective on values: on the host if it is the device, otherwise on the GPU.
    fn with_device_buffer(
        &self,
        values: &ParamStorage,
        work: impl FnOnce(&ParamStorage) -> Result<()>,
    ) -> Result<()> {
        if self.options.device.is_cpu() || values.tensor().is_ok_and(|tensor| !tensor.device().is_cpu()) {
            return work(values);
        }
        let here = TensorMut::zeros(values.elements(), values.dtype(), &self.options.device)?;
        values.load_to(&here)?;
        work(&here.clone().into())?;
        values.store_from(&here)
    }

    /// Returns views with gradients, for a backward.
    fn views<'a>(&'a self, gathered: &'a Gathered) -> SegmentViews<'a> {
        let grads = |index: usize| self.grad_buffers.target(index, &self.buckets[index]);
        SegmentViews { grads: Some(Box::new(grads)), ..self.values(gathered) }
    }

    /// Returns views of values without gradients.
    fn values<'a>(&'a self, gathered: &'a Gathered) -> SegmentViews<'a> {
        SegmentViews {
            buckets: &self.buckets,
            packed: &self.packed,
            index: &self.index,
            packed_index: &self.packed_index,
            adapters: &self.adapters,
            dtype: self.options.dtype,
            gathered,
            grads: None,
        }
    }

    /// Returns the embedding's weights for a forward, gathered and loaded to the device if needed.
    ///
    /// # Errors
    /// A parameter is missing, an internal error; a peer failed.
    pub fn embed(&self) -> Result<GatherGuard<'_, EmbedWeights>> {
        let (gathered, whole) = self.gathers.hold(self.mesh(), Segment::Embed, None)?;
        self.scatter_trained_rows(Some(&gathered))?;
        Ok(GatherGuard {
            weights: model::assemble::embed(&self.config, &self.values(&gathered))?,
            _whole: whole,
        })
    }

    /// Returns the gradients and adapters for the embedding's backward, without the table.
    ///
    /// # Errors
    /// A parameter is missing, an internal error; a peer failed.
    pub(crate) fn embed_gradients(&self) -> Result<EmbedGradients> {
        self.prepare_backward(Segment::Embed)?;
        model::assemble::embed_gradients(&self.config, &self.views(&Gathered::new()))
    }

    /// Returns the weights and gradients of block `layer`, and starts to gather those of block
    /// `next`.
    ///
    /// # Errors
    /// More than two segments are held at a time, an internal error; a peer failed.
    pub fn block(&self, layer: usize, next: Option<usize>) -> Result<GatherGuard<'_, &BlockWeights>> {
        self.mesh().world().heartbeat();
        let next = next.map(Segment::Block);
        let (_, whole) = self.gathers.hold(self.mesh(), Segment::Block(layer), next)?;
        Ok(GatherGuard { weights: &self.blocks[layer], _whole: whole })
    }

    /// Returns the head's weights without gradients.
    ///
    /// # Errors
    /// The same as for [`ParamStore::block`].
    pub fn head(&self) -> Result<GatherGuard<'_, HeadWeights>> {
        self.hold_head(None, false)
    }

    /// Returns the head's weights and gradients, and starts to gather the weights of block `next`.
    ///
    /// # Errors
    /// The same as for [`ParamStore::block`].
    pub(crate) fn head_and_gradients(&self, next: Option<usize>) -> Result<GatherGuard<'_, HeadWeights>> {
        self.prepare_backward(Segment::Head)?;
        self.hold_head(next, true)
    }

    fn hold_head(&self, next: Option<usize>, gradients: bool) -> Result<GatherGuard<'_, HeadWeights>> {
        let (gathered, whole) = self.gathers.hold(self.mesh(), Segment::Head, next.map(Segment::Block))?;
        self.scatter_trained_rows(Some(&gathered))?;
        let views = if gradients { self.views(&gathered) } else { self.values(&gathered) };
        Ok(GatherGuard { weights: model::assemble::head(&self.config, &views)?, _whole: whole })
    }

    /// Returns the reason why computing without the adapter would differ from the base model, or
    /// `None`.
    pub fn base_change(&self) -> Option<String> {
        let own = |bucket: &&Bucket| bucket.entries.iter().any(|entry| !entry.desc.kind.is_adapter());
        let trained = self.trainable().find(own).and_then(|bucket| bucket.entries.first());
        if let Some(entry) = trained {
            return Some(format!("`{}` is trained in place in the model", entry.desc.name));
        }
        if let Some(table) = self.adapters.rows.keys().next() {
            return Some(format!("rows of `{table}` are trained in place in the table"));
        }
        self.adapters.base_change.map(str::to_owned)
    }

    /// Reduces the gradients of a micro-batch's backward for a segment: adds them to those that the
    /// rank keeps, and sums them over ranks as the strategy requires. `last` marks the last
    /// micro-batch of the step. All ranks call it. GPUs sum during the next segment's backward,
    /// until [`ParamStore::finish_reductions`].
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn reduce(&self, segment: Segment, last: bool) -> Result<()> {
        // Buckets are in the order of segments.
        let first = self.buckets.partition_point(|bucket| bucket.segment < segment);
        let of_segment = self.buckets.iter().enumerate().skip(first);
        for (i, _) in of_segment.take_while(|(_, bucket)| bucket.segment == segment) {
            self.grad_buffers.reduce(self.mesh(), &self.buckets, i, last)?;
        }
        Ok(())
    }

    /// Prepares the backward of `segment`: waits for pending reductions that use the memory of its
    /// gradients.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub(crate) fn prepare_backward(&self, segment: Segment) -> Result<()> {
        self.grad_buffers.wait_for_reductions(self.mesh(), &self.buckets, Some(segment))
    }

    /// Starts the check for non-finite local gradients before they are summed over ranks.
    pub(crate) fn start_nonfinite_check(&self) {
        self.grad_buffers.start_nonfinite_check();
    }

    /// Stops the check. Returns whether it saw any.
    pub(crate) fn stop_nonfinite_check(&self) -> bool {
        self.grad_buffers.stop_nonfinite_check()
    }

    /// Waits for all pending reductions. Afterwards the gradients are complete.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn finish_reductions(&self) -> Result<()> {
        self.grad_buffers.wait_for_reductions(self.mesh(), &self.buckets, None)
    }

    /// All-gathers the updated parameters, after copying masters to them. All ranks call it.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub(crate) fn all_gather_params(&self) -> Result<()> {
        self.mesh().world().enter(Phase::AllGatherParams)?;
        for bucket in self.trainable() {
            bucket.refresh(self.offload())?;
            if let Some(axis) = bucket.spec.param_gather_axis() {
                let (updated, shards) = (call!("updated values of", bucket.segment), self.mesh().group(axis));
                self.with_device_buffer(&bucket.value, |whole| {
                    let own = whole.narrow(bucket.own.start, bucket.own.len())?;
                    shards.finish(shards.start_all_gather(updated, &own.memory()?, &whole.memory()?)?)
                })?;
            }
            bucket.value.evict();
        }
        self.scatter_trained_rows(None)
    }

    /// Copies the trainable rows of a frozen table into the table: into tables that are kept whole,
    /// or into those among the gathered runs.
    fn scatter_trained_rows(&self, gathered: Option<&Gathered>) -> Result<()> {
        for (module, ids) in &self.adapters.rows {
            let find = |name: &str| self.index.get(name).map(|&(b, e)| (b, &self.buckets[b].entries[e]));
            let (Some((table, at)), Some((rows, rows_at))) =
                (find(&format!("{module}.weight")), find(&format!("{module}{TOKEN_ROWS}")))
            else {
                return Err(Error::internal(format!("no rows for {module}")));
            };
            let table = match (gathered, self.buckets[table].resident()) {
                (None, Some(values)) => Some(values),
                (Some(gathered), None) => gathered.get(&BufferId::Values(table)),
                _ => None,
            };
            let Some(table) = table else { continue };
            let (table, rows) =
                (TensorMut::new(view(table, at)?), view(self.buckets[rows].value.tensor()?, rows_at)?);
            for (i, &id) in ids.iter().enumerate() {
                copy_into(&table.narrow(0, id as usize, 1)?, &rows.narrow(0, i, 1)?)?;
            }
        }
        Ok(())
    }

    /// Returns the mesh of the ranks that share the parameters.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.options.mesh
    }

    pub(super) fn reducing(&self) -> GradReduceOptions {
        self.grad_buffers.reducing()
    }

    pub(super) fn gathered_bytes(&self) -> impl Iterator<Item = (Segment, usize)> {
        self.gathers.bytes()
    }

    /// Returns the tensors that are offloaded from the device.
    pub fn offload(&self) -> &OffloadTarget {
        &self.options.offload
    }

    /// Returns the trainable buckets, in order of segments.
    pub fn trainable(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|bucket| bucket.grad.is_some())
    }

    /// Returns the buckets that outputs and checkpoints have: the trainable ones, in their order,
    /// then those of values that no optimizer updates.
    pub(crate) fn saved(&self) -> impl Iterator<Item = &Bucket> {
        let is_saved = |kind: ParamKind| matches!(kind, ParamKind::Buffer { saved: true });
        let buffers =
            move |bucket: &&Bucket| bucket.entries.first().is_some_and(|entry| is_saved(entry.desc.kind));
        self.trainable().chain(self.buckets.iter().filter(buffers))
    }

    /// Returns whether the embedding has a gradient to compute.
    pub(crate) fn embedding_trains(&self) -> bool {
        self.trainable().any(|bucket| bucket.segment == Segment::Embed)
    }

    /// Returns whether something trains behind the per-layer inputs: the embedding, the table, or
    /// their projection and its norm.
    pub(crate) fn per_layer_inputs_train(&self) -> bool {
        self.per_layer_inputs_train
    }

    /// Returns the largest number of segments that were gathered at a time.
    pub fn most_gathered(&self) -> usize {
        self.gathers.most()
    }

    /// Sets the kept gradients of all buckets to zero.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn zero_gradients(&self) -> Result<()> {
        self.trainable().try_for_each(Bucket::zero_gradients)
    }

    /// Returns the first tensor of those that `check` selects with a NaN or an infinity in this
    /// rank's part, as text such as `the weight lm_head.weight`.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub(crate) fn first_non_finite(&self, check: FiniteCheck) -> Result<Option<String>> {
        let held = |b: &Bucket| match check {
            FiniteCheck::FrozenWeights if b.grad.is_some() => None,
            FiniteCheck::TrainedWeights if b.grad.is_none() => None,
            FiniteCheck::FrozenWeights | FiniteCheck::TrainedWeights => {
                Some(("the weight", b.value.clone(), b.spec.values))
            }
            FiniteCheck::Gradients => {
                Some(("the gradient of", ParamStorage::from(b.grad.clone()?), b.spec.gradients))
            }
        };
        let held = self.buckets.iter().filter_map(|b| Some((b, held(b)?)));
        for (bucket, (what, flat, placement)) in held {
            let from = if placement.is_sharded() { bucket.own.start } else { 0 };
            self.mesh().world().heartbeat();
            for entry in &bucket.entries {
                let (start, end) = (entry.start.max(from), entry.range().end.min(from + flat.elements()));
                if start < end && !is_finite(&flat.narrow(start - from, end - start)?.to_read()?)? {
                    return Ok(Some(format!("{what} {}", entry.desc.name)));
                }
            }
        }
        Ok(None)
    }

    /// Returns the bucket that holds the dense parameter called `name`, and its entry there.
    pub fn find(&self, name: &str) -> Option<(&Bucket, &BucketEntry)> {
        self.index.get(name).map(|&(b, e)| (&self.buckets[b], &self.buckets[b].entries[e]))
    }
}

/// The values to check for NaN and infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FiniteCheck {
    /// Parameters that do not train.
    FrozenWeights,
    /// Parameters that train.
    TrainedWeights,
    /// The gradients as summed so far.
    Gradients,
}

/// Returns the places of all names: the bucket and the entry within it.
fn places(names: impl Iterator<Item = Vec<String>>) -> HashMap<String, (usize, usize)> {
    let of_bucket =
        |(b, names): (usize, Vec<String>)| names.into_iter().enumerate().map(move |(e, name)| (name, (b, e)));
    names.enumerate().flat_map(of_bucket).collect()
}

type Buckets = (Vec<Bucket>, Vec<QuantizedBucket>);

fn buckets(descs: Vec<ParamDesc>, options: &StoreOptions, fill: &mut FillParam<'_>) -> Result<Buckets> {
    let shares = options.frozen.ranks() > 1 && options.device.is_cpu() && !options.fill_all;
    let trains_rows = trains_rows(&descs);
    let mut by_group: BTreeMap<BucketKey, Vec<ParamDesc>> = BTreeMap::new();
    for desc in descs {
        by_group.entry(BucketKey::of(&desc)).or_default().push(desc);
    }
    let spec = |group: BucketKind| options.mesh.strategy().sharding_spec(group.role());
    by_group.keys().try_for_each(|key| spec(key.kind).check_flat())?;
    let bucket_options = |group: BucketKind, descs: &[ParamDesc]| BucketOptions {
        spec: spec(group),
        mesh: &options.mesh,
        dtype: match descs[0].kind {
            ParamKind::Adapter(_) | ParamKind::Buffer { .. } => DType::F32,
            ParamKind::AdapterInBf16(_) => DType::BF16,
            ParamKind::Frozen { dtype } => dtype.unwrap_or(options.dtype),
            ParamKind::Quantized(_) | ParamKind::Trainable(_) => options.dtype,
        },
        device: &options.device,
        values: StorageTarget::Device(&options.device),
        offload: &options.offload,
        fill_all: options.fill_all,
        master: options.master,
        kept_gradients: options.reducing.block_dtype,
    };
    let (mut file_bytes, mut on_device) = (0, 0);
    for (BucketKey { kind: group, .. }, descs) in &by_group {
        let bytes = match group {
            BucketKind::Quantized => QuantizedBucket::file_bytes(descs, &bucket_options(*group, descs))?,
            _ => Bucket::file_bytes(descs, &bucket_options(*group, descs))?,
        };
        let away = options.offload.has_values(group.role());
        *(if away { &mut file_bytes } else { &mut on_device }) += bytes;
    }
    let host = [(options.device.is_cpu(), on_device), (options.offload.folder().is_none(), file_bytes)];
    check_host_memory(host.into_iter().filter(|(counts, _)| *counts).map(|(_, bytes)| bytes as u64).sum())?;
    let file = options.offload.file(file_bytes)?;
    let (mut buckets, mut packed) = (Vec::new(), Vec::new());
    for (key, descs) in by_group {
        let BucketKey { segment, kind: group, .. } = key;
        let mut bucket_options = bucket_options(group, &descs);
        if options.offload.has_values(group.role()) {
            bucket_options.values = file.as_ref().map_or(StorageTarget::Host, StorageTarget::File);
        }
        let shares = shares && !bucket_options.values.is_away();
        let load = || {
            Ok(match group {
                BucketKind::Quantized => {
                    FrozenBucket::Quantized(QuantizedBucket::new(descs, bucket_options, fill)?)
                }
                _ => FrozenBucket::Dense(Bucket::new(descs, bucket_options, fill)?.into()),
            })
        };
        let is_shared = shares && is_shareable(options.mesh.strategy(), group.role(), segment, trains_rows);
        match if is_shared { options.frozen.take(key, load)? } else { load()? } {
            FrozenBucket::Dense(bucket) => buckets.push(bucket.owned_by(&bucket_options)),
            FrozenBucket::Quantized(bucket) => packed.push(bucket),
        }
    }
    Ok((buckets, packed))
}

/// Refuses a model whose `bytes` of weights exceed the memory of the host. A failed allocation
/// would end the process without a message, and the system kills processes that fill its memory.
fn check_host_memory(bytes: u64) -> Result<()> {
    match host_memory().filter(|memory| bytes > memory.limit) {
        None => Ok(()),
        Some(memory) => Err(Error::user(
            "cannot load the model: its weights do not fit the memory of this host",
        )
        .because(format!(
            "a rank keeps {} of weights; {}",
            units::bytes(bytes),
            memory.bound.in_words(memory.limit)
        ))
        .hint(
            "take a smaller model, or train with `quantization.kind = \"nf4\"` or `parallel.offload_folder`",
        )),
    }
}

/// Returns the runs to gather or load for each segment: its own, and for the head of a tied model
/// also those of the embedding, but not the table of per-layer inputs.
fn shard_runs(
    config: &ModelConfig,
    buckets: &[Bucket],
    packed: &[QuantizedBucket],
) -> Result<BTreeMap<Segment, Vec<ShardRun>>> {
    let mut runs: BTreeMap<Segment, Vec<ShardRun>> = BTreeMap::new();
    let has_head = buckets.iter().flat_map(|b| &b.entries).any(|entry| entry.desc.name == LM_HEAD);
    let tied = config.tie_word_embeddings && !has_head;
    for (i, bucket) in buckets.iter().enumerate() {
        if bucket.resident().is_some() {
            continue;
        }
        let run = || ShardRun {
            buffer_id: BufferId::Values(i),
            kind: BufferKind::Values(bucket.kind),
            part: bucket.value.clone(),
            sharded: bucket.spec.values.is_sharded(),
            len: bucket.len,
            freed: bucket.per_layer,
        };
        runs.entry(bucket.segment).or_default().push(run());
        if tied && bucket.segment == Segment::Embed && !bucket.per_layer {
            runs.entry(Segment::Head).or_default().push(run());
        }
    }
    for (i, packed) in packed.iter().enumerate() {
        let sharded = packed.sharded();
        if !sharded && !packed.away {
            continue;
        }
        let of_bucket = packed.buffers.iter().map(|(&dtype, buffer)| ShardRun {
            buffer_id: BufferId::Quantized(i, dtype),
            kind: BufferKind::Quantized(dtype),
            part: buffer.values.clone(),
            sharded,
            len: buffer.len,
            freed: false,
        });
        runs.entry(packed.segment).or_default().extend(of_bucket);
    }
    Ok(runs)
}
