//! The parameters of a rank, for every strategy: which buckets there are, and the weights of a segment as views on them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use candle_core::{DType, Device, Tensor};

use super::bucket::{Bucket, BucketEntry, BucketOptions, LoadTarget, view};
use super::gather::{BufferId, GatherQueue, Gathered, GatheredMemory, ShardRun, call};
use super::grad_reduce::{GradBuffers, GradReduceOptions, is_finite};
use super::mesh::DeviceMesh;
use super::mesh_shape::MeshAxis;
use super::offload::{OffloadTarget, StorageTarget};
use super::param::{BucketKind, BufferKind, ParamDesc, ParamKind};
use super::placement::Placement;
use super::quantized_bucket::QuantizedBucket;
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

/// How a store keeps its parameters.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The dtype that is computed with.
    pub dtype: DType,
    /// The device that is computed on.
    pub device: Device,
    /// The ranks, and who of them keeps what.
    pub mesh: DeviceMesh,
    /// How gradients are summed.
    pub reducing: GradReduceOptions,
    /// What is kept away from the device.
    pub offload: OffloadTarget,
    /// Read every parameter, also where the rank keeps only a shard: values of others are derived from it.
    pub fill_all: bool,
    /// Keep quantized weights of blocks in bf16 too, for devices whose kernels multiply dense panels.
    pub bf16_copy: bool,
    /// What is updated of weights that train in bf16.
    pub master: MasterWeights,
}

/// This rank's part of all parameters.
#[derive(Debug)]
pub struct ParamStore {
    mesh: DeviceMesh,
    config: ModelConfig,
    buckets: Vec<Bucket>,
    packed: Vec<QuantizedBucket>,
    /// Name → (bucket, entry).
    index: HashMap<String, (usize, usize)>,
    /// Name → (packed bucket, entry).
    packed_index: HashMap<String, (usize, usize)>,
    adapters: Adapters,
    dtype: DType,
    pub(super) device: Device,
    offload: OffloadTarget,
    gathers: GatherQueue,
    grad_buffers: GradBuffers,
    blocks: Vec<BlockWeights>,
}

/// Weights of a segment, whole for as long as this lives.
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
    /// Builds the buckets of `descs` and fills them by `fill`, in order. All ranks call it.
    ///
    /// # Errors
    /// Those of `fill`; a peer failed.
    pub fn new(
        config: &ModelConfig,
        descs: Vec<ParamDesc>,
        adapters: Adapters,
        options: StoreOptions,
        fill: &mut dyn FnMut(&ParamDesc, LoadTarget<'_>) -> Result<()>,
    ) -> Result<Self> {
        let (buckets, packed) = buckets(descs, &options, fill)?;
        let StoreOptions { dtype, device, mesh, reducing, offload, bf16_copy, .. } = options;
        let index = buckets
            .iter()
            .enumerate()
            .flat_map(|(b, bucket)| {
                bucket.entries.iter().enumerate().map(move |(e, entry)| (entry.desc.name.clone(), (b, e)))
            })
            .collect();
        let packed_index = packed
            .iter()
            .enumerate()
            .flat_map(|(p, packed)| {
                packed.names().enumerate().map(move |(e, name)| (name.to_owned(), (p, e)))
            })
            .collect();
        let grad_buffers = GradBuffers::new(&buckets, reducing, &device, &mesh)?;
        let mut store = ParamStore {
            gathers: GatherQueue::new(shard_runs(config, &buckets, &packed)?, &device)?,
            mesh,
            config: config.clone(),
            buckets,
            packed,
            index,
            packed_index,
            adapters,
            dtype,
            device,
            offload,
            grad_buffers,
            blocks: Vec::new(),
        };
        store.sync_initial_state()?;
        store.blocks = (0..config.num_layers())
            .map(|layer| model::assemble::block(config, layer, &store.views(&store.gathers.block(layer)?)))
            .collect::<Result<_>>()?;
        if bf16_copy {
            store.blocks.iter_mut().try_for_each(BlockWeights::keep_in_bf16)?;
        }
        store.scatter_trained_rows(None)?;
        Ok(store)
    }

    /// After loading: what only one rank knows, and what must be the same on all.
    fn sync_initial_state(&mut self) -> Result<()> {
        if self.mesh.world().size() == 1 {
            return Ok(());
        }
        if self.packed.iter().any(QuantizedBucket::sharded) {
            let mut offsets: Vec<&mut f32> =
                self.packed.iter_mut().flat_map(QuantizedBucket::offsets).collect();
            let values: Vec<f64> = offsets.iter().map(|offset| f64::from(**offset)).collect();
            let sum = Tensor::from_vec(values, offsets.len(), &Device::Cpu)?;
            let shards = self.mesh.group(MeshAxis::Shard);
            shards.all_reduce(Call::single("means of scales"), &memory(&sum)?)?;
            for (offset, sum) in offsets.iter_mut().zip(sum.to_vec1::<f64>()?) {
                **offset = sum as f32;
            }
        }
        for bucket in self.trainable().filter(|bucket| bucket.spec.values == Placement::Replicated) {
            let first = call!("first values of", bucket.segment);
            self.with_device_buffer(&bucket.value, |values| {
                self.mesh.world().broadcast(first, 0, &values.memory()?)
            })?;
        }
        Ok(())
    }

    /// Lets a collective work on values: where they are on the host, else on the device.
    fn with_device_buffer(
        &self,
        values: &ParamStorage,
        work: impl FnOnce(&ParamStorage) -> Result<()>,
    ) -> Result<()> {
        if self.device.is_cpu() || values.tensor().is_ok_and(|tensor| !tensor.device().is_cpu()) {
            return work(values);
        }
        let here = TensorMut::zeros(values.elements(), values.dtype(), &self.device)?;
        values.load_to(&here)?;
        work(&here.clone().into())?;
        values.store_from(&here)
    }

    /// Views with gradients, for a backward.
    fn views<'a>(&'a self, gathered: &'a Gathered) -> SegmentViews<'a> {
        let grads = |index: usize| self.grad_buffers.target(index, &self.buckets[index]);
        SegmentViews { grads: Some(Box::new(grads)), ..self.values(gathered) }
    }

    /// Views of values alone.
    fn values<'a>(&'a self, gathered: &'a Gathered) -> SegmentViews<'a> {
        SegmentViews {
            buckets: &self.buckets,
            packed: &self.packed,
            index: &self.index,
            packed_index: &self.packed_index,
            adapters: &self.adapters,
            dtype: self.dtype,
            gathered,
            grads: None,
        }
    }

    /// The embedding's weights, for a forward: gathered and brought to the device where they are not there whole.
    ///
    /// # Errors
    /// A parameter is missing, a fault of ours; a peer failed.
    pub fn embed(&self) -> Result<GatherGuard<'_, EmbedWeights>> {
        let (gathered, whole) = self.gathers.hold(&self.mesh, Segment::Embed, None)?;
        self.scatter_trained_rows(Some(&gathered))?;
        Ok(GatherGuard { weights: model::assemble::embed(&self.values(&gathered))?, _whole: whole })
    }

    /// What the embedding's backward needs: gradients and adapters, without the table.
    ///
    /// # Errors
    /// A parameter is missing, a fault of ours; a peer failed.
    pub fn embed_gradients(&self) -> Result<EmbedGradients> {
        self.prepare_backward(Segment::Embed)?;
        model::assemble::embed_gradients(&self.views(&Gathered::new()))
    }

    /// The weights and gradients of block `layer`; the weights of block `next` are gathered meanwhile.
    ///
    /// # Errors
    /// More than two segments are held at a time, a fault of ours; a peer failed.
    pub fn block(&self, layer: usize, next: Option<usize>) -> Result<GatherGuard<'_, &BlockWeights>> {
        self.mesh.world().heartbeat();
        let next = next.map(Segment::Block);
        let (_, whole) = self.gathers.hold(&self.mesh, Segment::Block(layer), next)?;
        Ok(GatherGuard { weights: &self.blocks[layer], _whole: whole })
    }

    /// The head's weights, without gradients.
    ///
    /// # Errors
    /// As [`ParamStore::block`].
    pub fn head(&self) -> Result<GatherGuard<'_, HeadWeights>> {
        self.hold_head(None, false)
    }

    /// The head's weights and gradients; the weights of block `next` are gathered meanwhile.
    ///
    /// # Errors
    /// As [`ParamStore::block`].
    pub fn head_and_gradients(&self, next: Option<usize>) -> Result<GatherGuard<'_, HeadWeights>> {
        self.prepare_backward(Segment::Head)?;
        self.hold_head(next, true)
    }

    fn hold_head(&self, next: Option<usize>, gradients: bool) -> Result<GatherGuard<'_, HeadWeights>> {
        let (gathered, whole) = self.gathers.hold(&self.mesh, Segment::Head, next.map(Segment::Block))?;
        self.scatter_trained_rows(Some(&gathered))?;
        let views = if gradients { self.views(&gathered) } else { self.values(&gathered) };
        Ok(GatherGuard { weights: model::assemble::head(&self.config, &views)?, _whole: whole })
    }

    /// Why what is computed without the adapter would not be the base model; none: it would be.
    pub fn base_change(&self) -> Option<String> {
        let own = |bucket: &&Bucket| bucket.entries.iter().any(|entry| !entry.desc.kind.is_adapter());
        let trained = self.trainable().find(own).and_then(|bucket| bucket.entries.first());
        if let Some(entry) = trained {
            return Some(format!("`{}` trains in its place in the model", entry.desc.name));
        }
        if let Some(table) = self.adapters.rows.keys().next() {
            return Some(format!("rows of `{table}` train in their place in the table"));
        }
        self.adapters.base_change.map(str::to_owned)
    }

    /// Takes in the gradients that the backward of a micro-batch left for a segment: adds them to what the rank keeps, and
    /// sums over the ranks where the strategy has it. `last`: no micro-batch of the step comes after. All ranks call it.
    /// GPUs sum while the next segment's backward runs, until [`ParamStore::finish_reductions`].
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn reduce(&self, segment: Segment, last: bool) -> Result<()> {
        // Buckets are in the order of segments.
        let first = self.buckets.partition_point(|bucket| bucket.segment < segment);
        let of_segment = self.buckets.iter().enumerate().skip(first);
        for (i, _) in of_segment.take_while(|(_, bucket)| bucket.segment == segment) {
            self.grad_buffers.reduce(&self.mesh, &self.buckets, i, last)?;
        }
        Ok(())
    }

    /// Makes room for the gradients of `segment`, before its backward: takes in the reductions that still go on with the
    /// memory that they will lie in.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn prepare_backward(&self, segment: Segment) -> Result<()> {
        self.grad_buffers.wait_for_reductions(&self.mesh, &self.buckets, Some(segment))
    }

    /// From now on looks, before gradients are summed over ranks, whether this rank's are finite; or ends that. Whether some
    /// were not since it began to look.
    pub fn watch_own_gradients(&self, looks: bool) -> bool {
        self.grad_buffers.watch(looks)
    }

    /// Takes in all reductions that go on: gradients are there after it.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn finish_reductions(&self) -> Result<()> {
        self.grad_buffers.wait_for_reductions(&self.mesh, &self.buckets, None)
    }

    /// Brings what is computed with in line with what the optimizer updated. All ranks call it.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn all_gather_params(&self) -> Result<()> {
        self.mesh.world().enter(Phase::AllGatherParams)?;
        for bucket in self.trainable() {
            bucket.refresh(&self.offload)?;
            if let Some(axis) = bucket.spec.param_gather_axis() {
                let (updated, shards) = (call!("updated values of", bucket.segment), self.mesh.group(axis));
                self.with_device_buffer(&bucket.value, |whole| {
                    let own = whole.narrow(bucket.own.start, bucket.own.len())?;
                    shards.finish(shards.start_all_gather(updated, &own.memory()?, &whole.memory()?)?)
                })?;
            }
            bucket.value.evict();
        }
        self.scatter_trained_rows(None)
    }

    /// Puts the trainable rows of a frozen table to their places in it: in the tables that are kept whole, or in
    /// those among the runs just gathered.
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

    /// The mesh of the ranks that share the parameters.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    pub(super) fn reducing(&self) -> GradReduceOptions {
        self.grad_buffers.reducing()
    }

    pub(super) fn gathered_bytes(&self) -> impl Iterator<Item = (Segment, usize)> {
        self.gathers.bytes()
    }

    /// What is kept away from the device.
    pub fn offload(&self) -> &OffloadTarget {
        &self.offload
    }

    /// The buckets that train, in order of segments.
    pub fn trainable(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|bucket| bucket.grad.is_some())
    }

    /// True when the embedding has a gradient to compute.
    pub fn embedding_trains(&self) -> bool {
        self.trainable().any(|bucket| bucket.segment == Segment::Embed)
    }

    /// Most segments that were gathered at a time.
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

    /// The first of what `check` names that holds a NaN or an infinity in this rank's part, in words such as `the weight
    /// lm_head.weight`.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn first_non_finite(&self, check: FiniteCheck) -> Result<Option<String>> {
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
            self.mesh.world().heartbeat();
            for entry in &bucket.entries {
                let (start, end) = (entry.start.max(from), entry.range().end.min(from + flat.elements()));
                if start < end && !is_finite(&flat.narrow(start - from, end - start)?.to_read()?)? {
                    return Ok(Some(format!("{what} {}", entry.desc.name)));
                }
            }
        }
        Ok(None)
    }

    /// The bucket that holds the dense parameter called `name`, and its entry there.
    pub fn find(&self, name: &str) -> Option<(&Bucket, &BucketEntry)> {
        self.index.get(name).map(|&(b, e)| (&self.buckets[b], &self.buckets[b].entries[e]))
    }
}

/// Which values are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FiniteCheck {
    /// Parameters that do not train.
    FrozenWeights,
    /// Parameters that train.
    TrainedWeights,
    /// The gradients as they are summed so far.
    Gradients,
}

type Buckets = (Vec<Bucket>, Vec<QuantizedBucket>);

fn buckets(
    descs: Vec<ParamDesc>,
    options: &StoreOptions,
    fill: &mut dyn FnMut(&ParamDesc, LoadTarget<'_>) -> Result<()>,
) -> Result<Buckets> {
    let mut by_group: BTreeMap<(Segment, BucketKind), Vec<ParamDesc>> = BTreeMap::new();
    for desc in descs {
        by_group.entry((desc.segment, BucketKind::of(desc.kind))).or_default().push(desc);
    }
    let spec = |group: BucketKind| options.mesh.strategy().sharding_spec(group.role());
    by_group.keys().try_for_each(|(_, group)| spec(*group).check_flat())?;
    let bucket_options = |group: BucketKind, descs: &[ParamDesc]| BucketOptions {
        spec: spec(group),
        mesh: &options.mesh,
        dtype: match descs[0].kind {
            ParamKind::Adapter(_) => DType::F32,
            ParamKind::AdapterInBf16(_) => DType::BF16,
            ParamKind::Frozen { dtype } => dtype.unwrap_or(options.dtype),
            ParamKind::Quantized(_) | ParamKind::Trainable(_) => options.dtype,
        },
        device: &options.device,
        values: StorageTarget::Device(&options.device),
        offload: &options.offload,
        fill_all: options.fill_all,
        master: options.master,
        kept_gradients: options.reducing.kept,
    };
    let (mut room, mut on_device) = (0, 0);
    for ((_, group), descs) in &by_group {
        let bytes = match group {
            BucketKind::Quantized => QuantizedBucket::room(descs, &bucket_options(*group, descs))?,
            _ => Bucket::room(descs, &bucket_options(*group, descs)),
        };
        let away = options.offload.has_values(group.role());
        *(if away { &mut room } else { &mut on_device }) += bytes;
    }
    let host = [(options.device.is_cpu(), on_device), (options.offload.folder().is_none(), room)];
    check_host_memory(host.into_iter().filter(|(counts, _)| *counts).map(|(_, bytes)| bytes as u64).sum())?;
    let file = options.offload.file(room)?;
    let (mut buckets, mut packed) = (Vec::new(), Vec::new());
    for ((_, group), descs) in by_group {
        let mut bucket_options = bucket_options(group, &descs);
        if options.offload.has_values(group.role()) {
            bucket_options.values = file.as_ref().map_or(StorageTarget::Host, StorageTarget::File);
        }
        if group == BucketKind::Quantized {
            packed.push(QuantizedBucket::new(descs, bucket_options, &mut |desc, blocks| {
                fill(desc, LoadTarget::Blocks(blocks))
            })?);
        } else {
            buckets.push(Bucket::new(descs, bucket_options, fill)?);
        }
    }
    Ok((buckets, packed))
}

/// Whether the host can hold `bytes` bytes of weights at all. A failed allocation would end the process without a word, and
/// the system any process that fills its memory.
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

/// What has to be gathered or brought for each segment: its own runs, for the head of a tied model also the table's.
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
        };
        runs.entry(bucket.segment).or_default().push(run());
        if tied && bucket.segment == Segment::Embed {
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
        });
        runs.entry(packed.segment).or_default().extend(of_bucket);
    }
    Ok(runs)
}
