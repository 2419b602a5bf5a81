//! The parameters of a rank, for every strategy: which buckets there are, and the weights of a segment as views on them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use candle_core::{DType, Device, Tensor};

use super::bucket::{Bucket, Entry, Fill, Making, Slot, view};
use super::gather::{Apart, Full, Gathers, Piece, Whole, call};
use super::offload::{Offload, Place};
use super::packed::Packed;
use super::placement::{Content, Extent, Ranks};
use super::reduce::{Fresh, Reducing};
use super::views::{Adapters, TOKEN_ROWS, Views};
use crate::collective::{Call, Phase};
use crate::error::{Error, Result};
use crate::model::{self, BlockWeights, EmbedWeights, HeadWeights, ModelConfig, Segment};
use crate::ops::access::memory;
use crate::ops::home::Home;
use crate::ops::reduce::{copy_into, sum_of_squares, zero};

/// What a strategy is made of, besides parameters.
#[derive(Debug, Clone)]
pub struct Options {
    /// The dtype that is computed with.
    pub dtype: DType,
    /// Where.
    pub device: Device,
    /// With whom, and who keeps what.
    pub ranks: Ranks,
    /// How gradients are summed.
    pub reducing: Reducing,
    /// What is kept away from the device.
    pub offload: Offload,
    /// Read every parameter, also where the rank keeps only a shard: values of others are derived from it.
    pub fill_all: bool,
}

/// This rank's part of all parameters.
#[derive(Debug)]
pub struct Store {
    ranks: Ranks,
    config: ModelConfig,
    buckets: Vec<Bucket>,
    /// By bucket.
    groups: Vec<Group>,
    packed: Vec<Packed>,
    /// Name → (bucket, entry).
    index: HashMap<String, (usize, usize)>,
    /// Name → (packed bucket, entry).
    packed_index: HashMap<String, (usize, usize)>,
    adapters: Adapters,
    dtype: DType,
    device: Device,
    offload: Offload,
    gathers: Gathers,
    fresh: Fresh,
    blocks: Vec<BlockWeights>,
}

/// Weights of a segment, whole for as long as this lives.
#[derive(Debug)]
pub struct Held<'a, W> {
    weights: W,
    _whole: Whole<'a>,
}

impl<W> Deref for Held<'_, W> {
    type Target = W;
    fn deref(&self) -> &W {
        &self.weights
    }
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

/// The kind of the scales beside a group of codes.
const SCALES: u8 = 16;

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

    fn content(self) -> Content {
        match self {
            Group::Adapter => Content::Adapter,
            Group::Trainable => Content::Trainable,
            Group::Frozen | Group::FrozenAs | Group::Quantized => Content::Frozen,
        }
    }
}

impl Store {
    /// Builds the buckets of `slots` and fills them by `fill`, in order. All ranks call it.
    ///
    /// # Errors
    /// Those of `fill`; a peer failed.
    pub fn new(
        config: &ModelConfig,
        slots: Vec<Slot>,
        adapters: Adapters,
        options: Options,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    ) -> Result<Self> {
        let (buckets, groups, packed) = buckets(slots, &options, fill)?;
        let Options { dtype, device, ranks, reducing, offload, .. } = options;
        let index = buckets
            .iter()
            .enumerate()
            .flat_map(|(b, bucket)| {
                bucket.entries.iter().enumerate().map(move |(e, entry)| (entry.slot.name.clone(), (b, e)))
            })
            .collect();
        let packed_index = packed
            .iter()
            .enumerate()
            .flat_map(|(p, packed)| {
                packed.names().enumerate().map(move |(e, name)| (name.to_owned(), (p, e)))
            })
            .collect();
        let kinds: Vec<_> = groups.iter().map(|group| *group as u8).zip(&buckets).collect();
        let fresh = Fresh::new(&kinds, reducing, &device)?;
        let mut store = Store {
            gathers: Gathers::new(apart(config, &buckets, &groups, &packed)?, &device)?,
            ranks,
            config: config.clone(),
            buckets,
            groups,
            packed,
            index,
            packed_index,
            adapters,
            dtype,
            device,
            offload,
            fresh,
            blocks: Vec::new(),
        };
        store.meet()?;
        store.blocks = (0..config.num_layers())
            .map(|layer| model::assemble::block(config, layer, &store.views(&store.gathers.block(layer)?)))
            .collect::<Result<_>>()?;
        store.place_rows(None)?;
        Ok(store)
    }

    /// After loading: what only one rank knows, and what must be the same on all.
    fn meet(&mut self) -> Result<()> {
        if self.ranks.world().size() == 1 {
            return Ok(());
        }
        if self.packed.iter().any(Packed::sharded) {
            let mut offsets: Vec<&mut f32> = self.packed.iter_mut().flat_map(Packed::offsets).collect();
            let values: Vec<f64> = offsets.iter().map(|offset| f64::from(**offset)).collect();
            let sum = Tensor::from_vec(values, offsets.len(), &Device::Cpu)?;
            self.ranks.shards().all_reduce(Call::single("means of scales"), &memory(&sum)?)?;
            for (offset, sum) in offsets.iter_mut().zip(sum.to_vec1::<f64>()?) {
                **offset = sum as f32;
            }
        }
        for bucket in self.trainable().filter(|bucket| bucket.keep.values == Extent::Whole) {
            let first = call!("first values of", bucket.segment);
            self.within_reach(&bucket.value, |values| {
                self.ranks.world().broadcast(first, 0, &values.memory()?)
            })?;
        }
        Ok(())
    }

    /// Lets a collective work on values: where they are on the host, else on the device.
    fn within_reach(&self, values: &Home, work: impl FnOnce(&Home) -> Result<()>) -> Result<()> {
        if self.device.is_cpu() || values.tensor().is_ok_and(|tensor| !tensor.device().is_cpu()) {
            return work(values);
        }
        let here = Tensor::zeros(values.elements(), values.dtype(), &self.device)?;
        values.bring(&here)?;
        work(&here.clone().into())?;
        values.keep(&here)
    }

    /// Views with gradients, for a backward.
    fn views<'a>(&'a self, full: &'a Full) -> Views<'a> {
        let grad = |index: usize| self.fresh.target(index, self.groups[index] as u8, &self.buckets[index]);
        Views { grad: Some(Box::new(grad)), ..self.values(full) }
    }

    /// Views of values alone.
    fn values<'a>(&'a self, full: &'a Full) -> Views<'a> {
        Views {
            buckets: &self.buckets,
            packed: &self.packed,
            index: &self.index,
            packed_index: &self.packed_index,
            adapters: &self.adapters,
            dtype: self.dtype,
            device: &self.device,
            full,
            grad: None,
        }
    }

    /// The embedding's weights, for a forward.
    pub fn embed(&self) -> Result<Held<'_, EmbedWeights>> {
        let (full, whole) = self.gathers.hold(&self.ranks, Segment::Embed, None)?;
        self.place_rows(Some(&full))?;
        Ok(Held { weights: model::assemble::embed(&self.values(&full))?, _whole: whole })
    }

    /// What the embedding's backward needs: gradients and adapters. A sharded table itself is not there.
    pub fn embed_gradients(&self) -> Result<EmbedWeights> {
        model::assemble::embed(&self.views(&Full::new()))
    }

    /// The weights of block `layer`; those of block `next` are gathered meanwhile.
    pub fn block(&self, layer: usize, next: Option<usize>) -> Result<Held<'_, &BlockWeights>> {
        let next = next.map(Segment::Block);
        let (_, whole) = self.gathers.hold(&self.ranks, Segment::Block(layer), next)?;
        Ok(Held { weights: &self.blocks[layer], _whole: whole })
    }

    /// The head's weights, to read.
    pub fn head(&self) -> Result<Held<'_, HeadWeights>> {
        self.hold_head(None, false)
    }

    /// The head's weights and gradients; those of block `next` are gathered meanwhile.
    pub fn head_and_gradients(&self, next: Option<usize>) -> Result<Held<'_, HeadWeights>> {
        self.hold_head(next, true)
    }

    fn hold_head(&self, next: Option<usize>, gradients: bool) -> Result<Held<'_, HeadWeights>> {
        let (full, whole) = self.gathers.hold(&self.ranks, Segment::Head, next.map(Segment::Block))?;
        self.place_rows(Some(&full))?;
        let views = if gradients { self.views(&full) } else { self.values(&full) };
        Ok(Held { weights: model::assemble::head(&self.config, &views)?, _whole: whole })
    }

    /// Takes in the gradients that the backward of a micro-batch left for a segment; `last` in the step.
    pub fn reduce(&self, segment: Segment, last: bool) -> Result<()> {
        // Buckets are in the order of segments.
        let first = self.buckets.partition_point(|bucket| bucket.segment < segment);
        let of_segment = self.buckets.iter().enumerate().skip(first);
        for (i, bucket) in of_segment.take_while(|(_, bucket)| bucket.segment == segment) {
            self.fresh.reduce(&self.ranks, (i, self.groups[i] as u8, bucket), last)?;
        }
        Ok(())
    }

    /// Brings what is computed with in line with what the optimizer updated, on all ranks.
    pub fn after_update(&self) -> Result<()> {
        self.ranks.world().enter(Phase::Spread)?;
        for bucket in self.trainable() {
            bucket.refresh()?;
            if (bucket.keep.values, bucket.keep.update) == (Extent::Whole, Extent::Shard) {
                let (updated, shards) = (call!("updated values of", bucket.segment), self.ranks.shards());
                self.within_reach(&bucket.value, |whole| {
                    let own = whole.narrow(bucket.own.start, bucket.own.len())?;
                    shards.finish(shards.start_all_gather(updated, &own.memory()?, &whole.memory()?)?)
                })?;
            }
            bucket.value.let_go();
        }
        self.place_rows(None)
    }

    /// Puts the trainable rows of a frozen table to their places in it: in the tables that are kept whole, or in
    /// those among the runs just gathered.
    fn place_rows(&self, gathered: Option<&Full>) -> Result<()> {
        for (module, ids) in &self.adapters.rows {
            let find = |name: &str| self.index.get(name).map(|&(b, e)| (b, &self.buckets[b].entries[e]));
            let (Some((table, at)), Some((rows, rows_at))) =
                (find(&format!("{module}.weight")), find(&format!("{module}{TOKEN_ROWS}")))
            else {
                return Err(Error::internal(format!("no rows for {module}")));
            };
            let table = match (gathered, self.buckets[table].resident()) {
                (None, Some(values)) => Some(values),
                (Some(full), None) => full.get(&Piece::Values(table)),
                _ => None,
            };
            let Some(table) = table else { continue };
            let (table, rows) = (view(table, at)?, view(self.buckets[rows].value.tensor()?, rows_at)?);
            for (i, &id) in ids.iter().enumerate() {
                copy_into(&table.narrow(0, id as usize, 1)?, &rows.narrow(0, i, 1)?)?;
            }
        }
        Ok(())
    }

    /// The ranks.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    pub(super) fn reducing(&self) -> Reducing {
        self.fresh.reducing()
    }

    pub(super) fn gathered_bytes(&self) -> impl Iterator<Item = (Segment, usize)> {
        self.gathers.bytes()
    }

    /// What is kept away from the device.
    pub fn offload(&self) -> &Offload {
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

    /// Sets all gradients to zero.
    pub fn zero_gradients(&self) -> Result<()> {
        self.trainable().filter_map(|bucket| bucket.grad.as_ref()).try_for_each(zero)
    }

    /// The Euclidean norm of all gradients, over all ranks: one all-reduce where something is sharded.
    pub fn gradient_norm(&self) -> Result<f64> {
        let (mut whole, mut shards, mut sharded) = (0f64, 0f64, false);
        for bucket in self.trainable() {
            // On the device, wherever gradients are kept: sums of parts differ between devices.
            let squares = match bucket.gradient()? {
                Some(grad) => sum_of_squares(&grad.to_device(&self.device)?)?,
                None => 0.0,
            };
            match bucket.keep.update {
                Extent::Whole => whole += squares,
                Extent::Shard => (shards, sharded) = (shards + squares, true),
            }
        }
        if sharded && self.ranks.shards().size() > 1 {
            let sum = Tensor::from_vec(vec![shards], 1, &Device::Cpu)?;
            self.ranks.shards().all_reduce(Call::single("squares of gradients"), &memory(&sum)?)?;
            shards = sum.to_vec1::<f64>()?[0];
        }
        Ok((whole + shards).sqrt())
    }

    /// Sums of `values` over all ranks; later collectives may rely on all ranks having come here.
    pub fn sum(&self, what: &'static str, values: &mut [f64]) -> Result<()> {
        if self.ranks.world().size() == 1 {
            return Ok(());
        }
        let sum = Tensor::from_slice(values, values.len(), &Device::Cpu)?;
        self.ranks.world().all_reduce(Call::single(what), &memory(&sum)?)?;
        values.copy_from_slice(&sum.to_vec1::<f64>()?);
        Ok(())
    }

    /// All of what `own` is this rank's run of. All ranks of the shard's group call it.
    pub fn collect(&self, bucket: &Bucket, own: &Tensor) -> Result<Tensor> {
        if bucket.keep.update == Extent::Whole || self.ranks.shards().size() == 1 {
            return Ok(own.clone());
        }
        let shards = self.ranks.shards();
        let all = Tensor::zeros(own.elem_count() * shards.size(), own.dtype(), own.device())?;
        let ticket =
            shards.start_all_gather(call!("whole of", bucket.segment), &memory(own)?, &memory(&all)?)?;
        shards.finish(ticket)?;
        // Nobody frees what a slower peer still reads.
        shards.barrier(call!("whole of", bucket.segment))?;
        Ok(all)
    }

    /// The first parameter, and then the first gradient, that holds a NaN or an infinity in this rank's part.
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        let values = self.buckets.iter().map(|b| (b, "the weight", b.value.clone(), b.keep.values));
        let grads = self.trainable().filter_map(|b| {
            let grad = b.grad.clone()?;
            Some((b, "the gradient of", Home::from(grad), b.keep.gradients))
        });
        for (bucket, what, flat, extent) in values.chain(grads) {
            let from = if extent == Extent::Whole { 0 } else { bucket.own.start };
            for entry in &bucket.entries {
                let (start, end) = (entry.start.max(from), entry.range().end.min(from + flat.elements()));
                if start < end && !finite(&flat.narrow(start - from, end - start)?.to_read()?)? {
                    return Ok(Some(format!("{what} {}", entry.slot.name)));
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

type Buckets = (Vec<Bucket>, Vec<Group>, Vec<Packed>);

fn buckets(
    slots: Vec<Slot>,
    options: &Options,
    fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
) -> Result<Buckets> {
    let mut by_group: BTreeMap<(Segment, Group), Vec<Slot>> = BTreeMap::new();
    for slot in slots {
        by_group.entry((slot.segment, Group::of(&slot))).or_default().push(slot);
    }
    let shards = options.ranks.shards();
    let place = (shards.rank(), shards.size());
    let making = |group: Group, slots: &[Slot]| Making {
        keep: options.ranks.kind.keep(group.content()),
        place,
        dtype: match group {
            Group::Adapter => DType::F32,
            Group::FrozenAs => slots[0].kept_as.unwrap_or(options.dtype),
            _ => options.dtype,
        },
        device: &options.device,
        values: Place::Device(&options.device),
        offload: &options.offload,
        fill_all: options.fill_all,
    };
    let mut room = 0;
    for ((_, group), slots) in &by_group {
        if options.offload.has_values(group.content()) {
            room += match group {
                Group::Quantized => Packed::room(slots, &making(*group, slots))?,
                _ => Bucket::room(slots, &making(*group, slots)),
            };
        }
    }
    let file = options.offload.file(room)?;
    let (mut buckets, mut groups, mut packed) = (Vec::new(), Vec::new(), Vec::new());
    for ((_, group), slots) in by_group {
        let mut making = making(group, &slots);
        if options.offload.has_values(group.content()) {
            making.values = file.as_ref().map_or(Place::Host, Place::File);
        }
        if group == Group::Quantized {
            packed.push(Packed::new(slots, making, &mut |slot, blocks| fill(slot, Fill::Blocks(blocks)))?);
        } else {
            buckets.push(Bucket::new(slots, making, fill)?);
            groups.push(group);
        }
    }
    Ok((buckets, groups, packed))
}

/// What has to be gathered or brought for each segment: its own runs, for the head of a tied model also the table's.
fn apart(
    config: &ModelConfig,
    buckets: &[Bucket],
    groups: &[Group],
    packed: &[Packed],
) -> Result<BTreeMap<Segment, Vec<Apart>>> {
    let mut runs: BTreeMap<Segment, Vec<Apart>> = BTreeMap::new();
    let has_head = buckets.iter().flat_map(|b| &b.entries).any(|entry| entry.slot.name == "lm_head.weight");
    let tied = config.tie_word_embeddings && !has_head;
    for (i, (bucket, group)) in buckets.iter().zip(groups).enumerate() {
        if bucket.resident().is_some() {
            continue;
        }
        let run = || Apart {
            piece: Piece::Values(i),
            kind: *group as u8,
            part: bucket.value.clone(),
            sharded: bucket.keep.values == Extent::Shard,
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
        let kind = Group::Quantized as u8;
        let (bytes, floats) = (packed.bytes.clone(), packed.floats.clone());
        let [n_bytes, n_floats] = packed.len;
        let runs = runs.entry(packed.segment).or_default();
        runs.push(Apart { piece: Piece::Bytes(i), kind, part: bytes, sharded, len: n_bytes });
        runs.push(Apart {
            piece: Piece::Floats(i),
            kind: kind + SCALES,
            part: floats,
            sharded,
            len: n_floats,
        });
    }
    Ok(runs)
}
