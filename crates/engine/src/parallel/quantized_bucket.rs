//! Flat buffers of quantized matrices, one for each element type. A matrix consists of the runs of
//! memory that its format lists ([`crate::quant::QuantScheme::runs`]). Quantized weights are
//! loaded, moved and sharded as raw memory, never cast.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::DType;

use super::bucket::{BucketOptions, FillParam, LoadTarget};
use super::local_range::LocalRange;
use super::offload::BucketBuilder;
use super::param::{ParamDesc, ParamKind};
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::matmul_quantized::{Quantized, QuantizedRun};
use crate::quant::{QuantBuffer, QuantFormat, QuantRun, QuantTensor, RunDtype, RunsViewMut};
use crate::runtime::TensorMut;
use crate::runtime::mmap::MappedFile;
use crate::runtime::param_storage::ParamStorage;

/// The positions of the runs of a matrix.
#[derive(Debug, Clone)]
struct QuantizedEntry {
    desc: ParamDesc,
    /// The part of the matrix that this rank computes with.
    local: LocalRange,
    format: QuantFormat,
    runs: Vec<RunSlot>,
    /// The mean of the scales. Only the rank that filled the entry has it until
    /// [`QuantizedBucket::offsets`] are shared.
    offset: f32,
}

/// The position of a run in the buffer of its type.
#[derive(Debug, Clone)]
struct RunSlot {
    run: QuantRun,
    range: Range<usize>,
}

impl RunSlot {
    fn dtype(&self) -> RunDtype {
        self.run.meaning.dtype()
    }
}

/// The quantized matrices of one segment. A copy shares the memory.
#[derive(Debug, Clone)]
pub(super) struct QuantizedBucket {
    /// The segment that uses it.
    pub(super) segment: Segment,
    /// The runs of all matrices, by type.
    pub(super) buffers: BTreeMap<RunDtype, QuantizedBuffer>,
    /// True if they are offloaded from the device.
    pub(super) away: bool,
    entries: Vec<QuantizedEntry>,
}

/// The runs of one type.
#[derive(Debug, Clone)]
pub(super) struct QuantizedBuffer {
    /// All elements, or this rank's shard of them.
    pub(super) values: ParamStorage,
    /// Number of elements of the whole, padding included.
    pub(super) len: usize,
}

/// Alignment of the starts of runs, in elements.
const ALIGN: usize = 64;

impl QuantizedBucket {
    /// Lays out `descs`, which all have a format, and fills, one at a time, those of which this
    /// rank keeps a part.
    pub(super) fn new(
        descs: Vec<ParamDesc>,
        bucket_options: BucketOptions<'_>,
        fill: &mut FillParam<'_>,
    ) -> Result<Self> {
        let segment = descs[0].segment;
        let BucketLayout { mut entries, lens } = layout(descs, &bucket_options)?;
        let stored_part = |dtype: RunDtype| bucket_options.part(bucket_options.spec.values, lens[&dtype]);
        let mut builders = RunBuilders {
            bytes: BucketBuilder::new(stored_part(RunDtype::U8), bucket_options.values)?,
            floats: BucketBuilder::new(stored_part(RunDtype::F32), bucket_options.values)?,
        };
        for QuantizedEntry { desc, local, format, runs, offset } in &mut entries {
            if !runs.iter().any(|slot| bucket_options.wants(&slot.range, &stored_part(slot.dtype()))) {
                continue;
            }
            if let Some(runs) = builders.in_place(runs, offset) {
                fill(desc, local, LoadTarget::Quantized(QuantTensor { format: *format, runs }))?;
                continue;
            }
            let mut filled = QuantBuffer::zeros(*format, local.elements());
            fill(desc, local, LoadTarget::Quantized(filled.view_mut()))?;
            for slot in runs.iter() {
                builders.fill(slot, &filled)?;
            }
            *offset = filled.runs.offset;
            if runs.first().is_none_or(|slot| !stored_part(slot.dtype()).contains(&slot.range.start)) {
                // Another rank contributes it.
                *offset = 0.0;
            }
        }
        let RunBuilders { bytes, floats } = builders;
        let buffer = |dtype: RunDtype, filled: ParamStorage| -> Result<(RunDtype, QuantizedBuffer)> {
            let values = bucket_options.values.settle(filled)?;
            Ok((dtype, QuantizedBuffer { values, len: lens[&dtype] }))
        };
        let buffers =
            [buffer(RunDtype::U8, bytes.finish()?)?, buffer(RunDtype::F32, floats.finish()?)?].into();
        Ok(QuantizedBucket { segment, buffers, away: bucket_options.values.is_away(), entries })
    }

    /// Returns the bytes that all runs of `descs` occupy in a file.
    pub(super) fn file_bytes(descs: &[ParamDesc], bucket_options: &BucketOptions<'_>) -> Result<usize> {
        let BucketLayout { lens, .. } = layout(descs.to_vec(), bucket_options)?;
        let bytes_of_run = |(dtype, len): (RunDtype, usize)| {
            let dtype = match dtype {
                RunDtype::U8 => DType::U8,
                RunDtype::F32 => DType::F32,
            };
            MappedFile::file_bytes(bucket_options.part(bucket_options.spec.values, len).len(), dtype)
        };
        Ok(lens.into_iter().map(bytes_of_run).sum())
    }

    /// Returns whether this rank keeps less than all.
    pub(super) fn sharded(&self) -> bool {
        self.buffers.values().any(|buffer| buffer.values.elements() < buffer.len)
    }

    /// Returns the mean of each entry's scales, 0 if another rank of the shard group has it.
    pub(super) fn offsets(&mut self) -> impl Iterator<Item = &mut f32> {
        self.entries.iter_mut().map(|entry| &mut entry.offset)
    }

    /// Returns the names of the matrices, in order.
    pub(super) fn names(&self) -> Vec<String> {
        self.entries.iter().map(|entry| entry.desc.name.clone()).collect()
    }

    /// Returns the view of an entry for use in a segment; `whole` gives the whole buffer of a type.
    pub(super) fn quantized(
        &self,
        entry: usize,
        whole: impl Fn(RunDtype) -> Result<TensorMut>,
    ) -> Result<Quantized> {
        let QuantizedEntry { desc, local, format, runs, offset } = &self.entries[entry];
        let shape = match local.shape()[..] {
            [out, inputs] => (out, inputs),
            _ => return Err(Error::internal(format!("{} is not a matrix", desc.name))),
        };
        let run = |slot: &RunSlot| {
            let values = whole(slot.dtype())?.narrow(0, slot.range.start, slot.range.len())?;
            Ok(QuantizedRun { meaning: slot.run.meaning, values: values.into_tensor() })
        };
        let runs = runs.iter().map(run).collect::<Result<_>>()?;
        Ok(Quantized { format: *format, shape, runs, offset: *offset })
    }
}

/// A rank's part of the buffers during loading.
struct RunBuilders {
    bytes: BucketBuilder<u8>,
    floats: BucketBuilder<f32>,
}

impl RunBuilders {
    /// Returns the memory of the runs to write in place, or `None` unless all of it is kept and in
    /// memory.
    fn in_place<'a>(&'a mut self, runs: &[RunSlot], offset: &'a mut f32) -> Option<RunsViewMut<'a>> {
        let of = |dtype| runs.iter().filter(move |slot| slot.dtype() == dtype);
        let meanings = |dtype| of(dtype).map(|slot| slot.run.meaning);
        let ranges = |dtype| of(dtype).map(|slot| slot.range.clone());
        let bytes = meanings(RunDtype::U8).zip(self.bytes.in_place(ranges(RunDtype::U8))?);
        let floats = meanings(RunDtype::F32).zip(self.floats.in_place(ranges(RunDtype::F32))?);
        Some(RunsViewMut::new(bytes, floats, offset))
    }

    /// Stores this rank's part of a run of `tensor`.
    fn fill(&mut self, slot: &RunSlot, tensor: &QuantBuffer) -> Result<()> {
        let (range, meaning) = (slot.range.clone(), slot.run.meaning);
        match slot.dtype() {
            RunDtype::U8 => self.bytes.fill(range, |to| copy(to, tensor.runs.bytes(meaning))),
            RunDtype::F32 => self.floats.fill(range, |to| copy(to, tensor.runs.floats(meaning))),
        }
    }
}

fn copy<T: Copy>(to: &mut [T], values: &[T]) -> Result<()> {
    to.copy_from_slice(values);
    Ok(())
}

/// The positions of matrices, and the lengths of the buffers.
struct BucketLayout {
    entries: Vec<QuantizedEntry>,
    lens: BTreeMap<RunDtype, usize>,
}

/// Computes the positions of the runs of `descs`, and the lengths of the buffers, of which ranks
/// keep equal runs.
fn layout(descs: Vec<ParamDesc>, bucket_options: &BucketOptions<'_>) -> Result<BucketLayout> {
    let mut lens = BTreeMap::from([(RunDtype::U8, 0), (RunDtype::F32, 0)]);
    let mut entries = Vec::with_capacity(descs.len());
    for desc in descs {
        let ParamKind::Quantized(format) = desc.kind else {
            return Err(Error::internal(format!("{} is not quantized", desc.name)));
        };
        let aligned = |run: QuantRun| {
            let len = lens.entry(run.meaning.dtype()).or_default();
            let start = *len;
            *len += run.elements.next_multiple_of(ALIGN);
            RunSlot { run, range: start..start + run.elements }
        };
        let local = bucket_options.mesh.local_range(&desc)?;
        let runs = format.scheme().runs(local.elements()).into_iter().map(aligned).collect();
        entries.push(QuantizedEntry { runs, offset: 0.0, format, desc, local });
    }
    let unit = bucket_options.unit(ALIGN);
    lens.values_mut().for_each(|len| *len = len.next_multiple_of(unit));
    Ok(BucketLayout { entries, lens })
}
