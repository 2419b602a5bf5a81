//! A flat buffer of quantized matrices: one run of bytes (codes, and the codes of double-quantized scales) and one of
//! f32 scales, so that a quantized block is loaded, moved and sharded as the two pieces of memory it is, never cast.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::bucket::BucketOptions;
use super::offload::BucketBuilder;
use super::param::{ParamDesc, ParamKind};
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::matmul_quantized::{BlockScales, Quantized};
use crate::quant::{BlocksMut, QuantFormat};
use crate::runtime::mmap::MappedFile;
use crate::runtime::param_storage::ParamStorage;

/// Where the parts of a slot lie.
#[derive(Debug, Clone)]
struct QuantizedEntry {
    desc: ParamDesc,
    format: QuantFormat,
    codes: Range<usize>,
    /// Codes of the scales; empty without double quantization.
    nested: Range<usize>,
    scales: Range<usize>,
    /// The mean of the scales; known to the rank that filled the entry until [`QuantizedBucket::offsets`] are shared.
    offset: f32,
}

/// Quantized slots of one segment.
#[derive(Debug)]
pub(super) struct QuantizedBucket {
    /// The segment that uses it.
    pub(super) segment: Segment,
    /// All bytes, or this rank's shard of them.
    pub(super) bytes: ParamStorage,
    /// All scales, or this rank's shard of them.
    pub(super) floats: ParamStorage,
    /// Bytes and scales of the whole, padding included.
    pub(super) len: [usize; 2],
    /// Both are not on the device.
    pub(super) away: bool,
    entries: Vec<QuantizedEntry>,
}

/// Starts of parts are multiples of this many elements.
const ALIGN: usize = 64;

impl QuantizedBucket {
    /// Lays out `descs`, which all have a format, and fills, one at a time, those of which this rank keeps something.
    pub(super) fn new(
        descs: Vec<ParamDesc>,
        bucket_options: BucketOptions<'_>,
        fill: &mut dyn FnMut(&ParamDesc, BlocksMut<'_>) -> Result<()>,
    ) -> Result<Self> {
        let segment = descs[0].segment;
        let (mut entries, len) = layout(descs, bucket_options.unit(ALIGN))?;
        let [kept, floats_kept] = len.map(|len| bucket_options.part(bucket_options.spec.values, len));
        let mut bytes = BucketBuilder::<u8>::new(kept.clone(), bucket_options.values)?;
        let mut floats = BucketBuilder::<f32>::new(floats_kept.clone(), bucket_options.values)?;
        for entry in &mut entries {
            let parts = [(&entry.codes, &kept), (&entry.nested, &kept), (&entry.scales, &floats_kept)];
            if !parts.iter().any(|(range, kept)| bucket_options.wants(range, kept)) {
                continue;
            }
            let (format, offset) = (entry.format, &mut entry.offset);
            if let (Some([codes, nested]), Some([scales])) =
                (bytes.in_place([&entry.codes, &entry.nested]), floats.in_place([&entry.scales]))
            {
                fill(&entry.desc, BlocksMut { format, codes, nested, scales, offset })?;
                continue;
            }
            let (mut codes, mut nested) = (vec![0; entry.codes.len()], vec![0; entry.nested.len()]);
            let mut scales = vec![0.0; entry.scales.len()];
            let parts =
                BlocksMut { format, codes: &mut codes, nested: &mut nested, scales: &mut scales, offset };
            fill(&entry.desc, parts)?;
            for (range, values) in [(&entry.codes, &codes), (&entry.nested, &nested)] {
                bytes.fill(range.clone(), |to| copy(to, values))?;
            }
            floats.fill(entry.scales.clone(), |to| copy(to, &scales))?;
            if !kept.contains(&entry.codes.start) {
                // Another rank answers for it.
                entry.offset = 0.0;
            }
        }
        let [bytes, floats] =
            [bucket_options.values.settle(bytes.finish()?)?, bucket_options.values.settle(floats.finish()?)?];
        Ok(QuantizedBucket { segment, bytes, floats, len, away: bucket_options.values.is_away(), entries })
    }

    /// Bytes that both runs of `descs` take up in a file.
    pub(super) fn room(descs: &[ParamDesc], bucket_options: &BucketOptions<'_>) -> Result<usize> {
        let (_, len) = layout(descs.to_vec(), bucket_options.unit(ALIGN))?;
        let [bytes, floats] = len.map(|len| bucket_options.part(bucket_options.spec.values, len).len());
        Ok(MappedFile::room(bytes, DType::U8) + MappedFile::room(floats, DType::F32))
    }

    /// This rank keeps less than all.
    pub(super) fn sharded(&self) -> bool {
        self.bytes.elements() < self.len[0]
    }

    /// The mean of each entry's scales, 0 where another rank of the shard's group knows it.
    pub(super) fn offsets(&mut self) -> impl Iterator<Item = &mut f32> {
        self.entries.iter_mut().map(|entry| &mut entry.offset)
    }

    /// Names, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.desc.name.as_str())
    }

    /// The view of an entry for use in a segment; `bytes` and `floats` are the whole.
    pub(super) fn quantized(&self, entry: usize, bytes: &Tensor, floats: &Tensor) -> Result<Quantized> {
        let entry = &self.entries[entry];
        let bytes = |range: &Range<usize>| bytes.narrow(0, range.start, range.len());
        let scales = floats.narrow(0, entry.scales.start, entry.scales.len())?;
        let shape = match entry.desc.shape[..] {
            [out, inputs] => (out, inputs),
            _ => return Err(Error::internal(format!("{} is not a matrix", entry.desc.name))),
        };
        Ok(Quantized {
            kind: entry.format.kind,
            block_size: entry.format.block_size,
            shape,
            codes: bytes(&entry.codes)?,
            scales: if entry.format.double_quant {
                BlockScales::Nested { codes: bytes(&entry.nested)?, absmax: scales, offset: entry.offset }
            } else {
                BlockScales::Plain(scales)
            },
        })
    }
}

fn copy<T: Copy>(to: &mut [T], values: &[T]) -> Result<()> {
    to.copy_from_slice(values);
    Ok(())
}

/// Places for `descs`, and the lengths of both runs, multiples of `unit`.
fn layout(descs: Vec<ParamDesc>, unit: usize) -> Result<(Vec<QuantizedEntry>, [usize; 2])> {
    let (mut n_bytes, mut n_floats) = (0, 0);
    let take = |at: &mut usize, len: usize| {
        let start = *at;
        *at += len.next_multiple_of(ALIGN);
        start..start + len
    };
    let mut entries = Vec::with_capacity(descs.len());
    for desc in descs {
        let ParamKind::Quantized(format) = desc.kind else {
            return Err(Error::internal(format!("{} is not quantized", desc.name)));
        };
        let n = desc.elements();
        let nested = if format.double_quant { format.blocks(n) } else { 0 };
        entries.push(QuantizedEntry {
            codes: take(&mut n_bytes, format.code_bytes(n)),
            nested: take(&mut n_bytes, nested),
            scales: take(&mut n_floats, format.scales(n)),
            offset: 0.0,
            format,
            desc,
        });
    }
    Ok((entries, [n_bytes.next_multiple_of(unit), n_floats.next_multiple_of(unit)]))
}
