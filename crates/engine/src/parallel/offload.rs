//! What lives away from the device, and where.
//!
//! `optimizer`: moments, and the f32 masters of what is computed with in fewer bits. Values that are computed with in f32,
//! or without masters, are updated themselves and stay. `params`: also the values and kept gradients of all but adapters, which are small and
//! needed by every layer; a segment's values are brought to the device for one use ([`super::gather`]), its gradients
//! are added up where they are kept ([`super::grad_reduce`]). With a folder the values are in a file there.
//!
//! On a CPU the device is the host; what is away then takes the same way, so that every test of it counts for a GPU too.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::placement::ParamRole;
use crate::error::Result;
use crate::recipe::enums::Offload;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::PlainElement;
use crate::runtime::mmap::{MappedFile, MappedSlice};
use crate::runtime::param_storage::ParamStorage;

/// What is kept away from the device, and where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OffloadTarget {
    /// The recipe's choice.
    pub what: Offload,
    /// The folder of the file that parameters are kept in, where they are away; none: in host memory.
    pub folder: Option<PathBuf>,
}

impl From<Offload> for OffloadTarget {
    /// In host memory.
    fn from(what: Offload) -> Self {
        OffloadTarget { what, folder: None }
    }
}

impl OffloadTarget {
    /// Moments and masters are in host memory.
    pub fn has_state(&self) -> bool {
        self.what != Offload::None
    }

    /// The values of what holds `content`, and their gradients, are away.
    pub fn has_values(&self, content: ParamRole) -> bool {
        self.what == Offload::Params && content != ParamRole::Adapter
    }

    /// The folder of the file that parameters are kept in; none where they are on the device or in host memory.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref().filter(|_| self.what == Offload::Params)
    }

    /// Refuses a folder that cannot take `bytes` of parameters, before anything is loaded.
    ///
    /// # Errors
    /// It cannot be written to, or its disk is full.
    pub fn check(&self, bytes: u64) -> Result<()> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.folder().map_or(Ok(()), |folder| MappedFile::check(folder, bytes))
    }

    /// Where masters are kept.
    pub(super) fn state_on(&self, device: &Device) -> Device {
        if self.has_state() { Device::Cpu } else { device.clone() }
    }

    /// The file for `bytes` bytes of values; none where no folder is named.
    pub(super) fn file(&self, bytes: usize) -> Result<Option<Arc<MappedFile>>> {
        let folder = self.folder().filter(|_| bytes > 0);
        folder.map(|folder| MappedFile::create(folder, bytes)).transpose()
    }
}

/// Where the values of a bucket will be.
#[derive(Debug, Clone, Copy)]
pub(super) enum StorageTarget<'a> {
    /// On the device.
    Device(&'a Device),
    /// In host memory.
    Host,
    /// In the file.
    File(&'a Arc<MappedFile>),
}

impl StorageTarget<'_> {
    /// Not on the device.
    pub(super) fn is_away(self) -> bool {
        !matches!(self, StorageTarget::Device(_))
    }

    /// Brings `values`, which were filled for this place or are on the host, there.
    pub(super) fn settle(self, values: ParamStorage) -> Result<ParamStorage> {
        Ok(match (self, &values) {
            (StorageTarget::Device(device), ParamStorage::Memory(tensor)) => {
                to_device(tensor, device)?.into()
            }
            (StorageTarget::File(file), ParamStorage::Memory(tensor)) => {
                let home = ParamStorage::File(file.run(tensor.elem_count(), tensor.dtype())?);
                home.store_from(tensor)?;
                home
            }
            _ => values,
        })
    }
}

/// A rank's part of a flat buffer while it is filled, one tensor after another.
pub(super) struct BucketBuilder<T> {
    /// What is kept of the whole.
    kept: Range<usize>,
    to: BuilderTarget<T>,
}

enum BuilderTarget<T> {
    Memory(Vec<T>),
    File(MappedSlice),
}

impl<T: PlainElement> BucketBuilder<T> {
    /// Zeros for `kept`: in the file, if that is the place, so that memory never holds them.
    pub(super) fn new(kept: Range<usize>, place: StorageTarget<'_>) -> Result<Self> {
        let to = match place {
            StorageTarget::File(file) => BuilderTarget::File(file.run(kept.len(), T::DTYPE)?),
            _ => BuilderTarget::Memory(T::zeros(kept.len())),
        };
        Ok(BucketBuilder { kept, to })
    }

    /// Lets `write` fill the elements `range` of the whole, of which what is kept is taken.
    pub(super) fn fill(
        &mut self,
        range: Range<usize>,
        write: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<()> {
        let (start, end) = (range.start.max(self.kept.start), range.end.min(self.kept.end));
        if (start..end) == range {
            return self.at(start, end, write)?;
        }
        let mut values = T::zeros(range.len());
        write(&mut values)?;
        if start >= end {
            return Ok(());
        }
        self.at(start, end, |to| to.copy_from_slice(&values[start - range.start..end - range.start]))
    }

    /// Runs of the whole, ascending, where they lie, to be written in place; none unless all are kept and in memory.
    pub(super) fn in_place(&mut self, runs: impl Iterator<Item = Range<usize>>) -> Option<Vec<&mut [T]>> {
        let BuilderTarget::Memory(values) = &mut self.to else { return None };
        let (mut rest, mut at) = (&mut values[..], self.kept.start);
        let mut found = Vec::new();
        for run in runs {
            if run.start < at || run.end > self.kept.end {
                return None;
            }
            let (_, from) = std::mem::take(&mut rest).split_at_mut(run.start - at);
            let (memory, after) = from.split_at_mut(run.len());
            found.push(memory);
            (rest, at) = (after, run.end);
        }
        Some(found)
    }

    /// Elements `start..end` of the whole, which are kept.
    fn at<R>(&mut self, start: usize, end: usize, write: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let (start, end) = (start - self.kept.start, end - self.kept.start);
        match &mut self.to {
            BuilderTarget::Memory(values) => Ok(write(&mut values[start..end])),
            BuilderTarget::File(run) => run.narrow(start, end - start)?.write(write),
        }
    }

    /// What was filled: on the host, or in the file.
    pub(super) fn finish(self) -> Result<ParamStorage> {
        let len = self.kept.len();
        Ok(match self.to {
            BuilderTarget::Memory(values) => Tensor::from_vec(values, len, &Device::Cpu)?.into(),
            BuilderTarget::File(run) => ParamStorage::File(run),
        })
    }
}
