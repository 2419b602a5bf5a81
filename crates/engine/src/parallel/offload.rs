//! Offloading of parameters and optimizer state from the device.
//!
//! `optimizer` offloads moments, and f32 masters of 16-bit parameters. Parameters in f32, or
//! without masters, are updated themselves and stay. `params` also offloads the values and kept
//! gradients of all but adapters, which are small and needed by every layer. A segment's values are
//! loaded to the device for one use ([`super::gather`]); its gradients are added up in the memory
//! that keeps them ([`super::grad_reduce`]). With a folder, a file in it holds the values.
//!
//! On a CPU the device is the host. Offloaded tensors then use the same code, so that every test of
//! it also covers GPUs.

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

/// The tensors to offload, and the storage for them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OffloadTarget {
    /// The choice of the recipe.
    pub what: Offload,
    /// The folder of the file with offloaded parameters; `None` keeps them in host memory.
    pub folder: Option<PathBuf>,
}

impl From<Offload> for OffloadTarget {
    /// Offloads to host memory.
    fn from(what: Offload) -> Self {
        OffloadTarget { what, folder: None }
    }
}

impl OffloadTarget {
    /// Returns whether moments and masters are in host memory.
    pub fn has_state(&self) -> bool {
        self.what != Offload::None
    }

    /// Returns whether the values of parameters with the role `content`, and their gradients, are
    /// offloaded.
    pub fn has_values(&self, content: ParamRole) -> bool {
        self.what == Offload::Params && content != ParamRole::Adapter
    }

    /// Returns the folder of the file with offloaded parameters, or `None` if they are on the
    /// device or in host memory.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref().filter(|_| self.what == Offload::Params)
    }

    /// Refuses a folder without space for `bytes` bytes of parameters, before any are loaded.
    ///
    /// # Errors
    /// The folder is not writable, or its disk is full.
    pub fn check(&self, bytes: u64) -> Result<()> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.folder().map_or(Ok(()), |folder| MappedFile::check(folder, bytes))
    }

    /// Returns the device that keeps the masters.
    pub(super) fn state_on(&self, device: &Device) -> Device {
        if self.has_state() { Device::Cpu } else { device.clone() }
    }

    /// Creates the file for `bytes` bytes of values; `None` without a folder.
    pub(super) fn file(&self, bytes: usize) -> Result<Option<Arc<MappedFile>>> {
        let folder = self.folder().filter(|_| bytes > 0);
        folder.map(|folder| MappedFile::create(folder, bytes)).transpose()
    }
}

/// The storage for the values of a bucket.
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
    /// Returns whether the storage is not on the device.
    pub(super) fn is_away(self) -> bool {
        !matches!(self, StorageTarget::Device(_))
    }

    /// Moves `values`, which are already in this storage or on the host, to this storage.
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

/// A rank's part of a flat buffer during loading, one tensor after another.
pub(super) struct BucketBuilder<T> {
    /// The range of the whole that this rank keeps.
    own_range: Range<usize>,
    to: BuilderTarget<T>,
}

enum BuilderTarget<T> {
    Memory(Vec<T>),
    File(MappedSlice),
}

impl<T: PlainElement> BucketBuilder<T> {
    /// Allocates zeros for `own_range`; for a file target in the file, so that memory never holds
    /// them.
    pub(super) fn new(own_range: Range<usize>, target: StorageTarget<'_>) -> Result<Self> {
        let to = match target {
            StorageTarget::File(file) => BuilderTarget::File(file.run(own_range.len(), T::DTYPE)?),
            _ => BuilderTarget::Memory(T::zeros(own_range.len())),
        };
        Ok(BucketBuilder { own_range, to })
    }

    /// Fills the elements `range` of the whole by `write`, and keeps those in this rank's range.
    pub(super) fn fill(
        &mut self,
        range: Range<usize>,
        write: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<()> {
        let (start, end) = (range.start.max(self.own_range.start), range.end.min(self.own_range.end));
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

    /// Returns mutable slices of the given runs of the whole, in ascending order, or `None` unless
    /// all are kept and in memory.
    pub(super) fn in_place(&mut self, runs: impl Iterator<Item = Range<usize>>) -> Option<Vec<&mut [T]>> {
        let BuilderTarget::Memory(values) = &mut self.to else { return None };
        let (mut rest, mut at) = (&mut values[..], self.own_range.start);
        let mut pieces = Vec::new();
        for run in runs {
            if run.start < at || run.end > self.own_range.end {
                return None;
            }
            let (_, from) = std::mem::take(&mut rest).split_at_mut(run.start - at);
            let (memory, after) = from.split_at_mut(run.len());
            pieces.push(memory);
            (rest, at) = (after, run.end);
        }
        Some(pieces)
    }

    /// Gives `write` the elements `start..end` of the whole, which this rank keeps.
    fn at<R>(&mut self, start: usize, end: usize, write: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let (start, end) = (start - self.own_range.start, end - self.own_range.start);
        match &mut self.to {
            BuilderTarget::Memory(values) => Ok(write(&mut values[start..end])),
            BuilderTarget::File(run) => run.narrow(start, end - start)?.write(write),
        }
    }

    /// Returns the filled values, on the host or in the file.
    pub(super) fn finish(self) -> Result<ParamStorage> {
        let len = self.own_range.len();
        Ok(match self.to {
            BuilderTarget::Memory(values) => Tensor::from_vec(values, len, &Device::Cpu)?.into(),
            BuilderTarget::File(run) => ParamStorage::File(run),
        })
    }
}
