//! What lives away from the device, and where.
//!
//! `optimizer`: moments, and the f32 masters of what is computed with in fewer bits. Values that are computed with in f32
//! are their own masters and stay. `params`: also the values and kept gradients of all but adapters, which are small and
//! needed by every layer; a segment's values are brought to the device for one use ([`super::gather`]), its gradients
//! are added up where they are kept ([`super::grad_reduce`]). With a folder the values are in a file there.
//!
//! On a CPU the device is the host; what is away then takes the same way, so that every test of it counts for a GPU too.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::placement::ParamRole;
use crate::error::Result;
use crate::runtime::cpu_tensor::PlainElement;
use crate::runtime::mmap::{MappedFile, MappedSlice};
use crate::runtime::param_storage::ParamStorage;

/// What is kept away from the device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Offload {
    /// Nothing is: all is on the device.
    #[default]
    None,
    /// The optimizer's state, in host memory.
    Optimizer,
    /// That, gradients and parameters: in host memory, parameters in a file of this folder if one is named.
    Params(Option<PathBuf>),
}

impl Offload {
    /// Moments and masters are in host memory.
    pub fn has_state(&self) -> bool {
        *self != Offload::None
    }

    /// The values of what holds `content`, and their gradients, are away.
    pub fn has_values(&self, content: ParamRole) -> bool {
        matches!(self, Offload::Params(_)) && content != ParamRole::Adapter
    }

    /// Refuses a folder that cannot take `bytes` of parameters, before anything is loaded.
    ///
    /// # Errors
    /// It cannot be written to, or its disk is full.
    pub fn check(&self, bytes: u64) -> Result<()> {
        match self {
            Offload::Params(Some(folder)) => {
                MappedFile::check(folder, usize::try_from(bytes).unwrap_or(usize::MAX))
            }
            _ => Ok(()),
        }
    }

    /// Where masters are kept.
    pub(super) fn state_on(&self, device: &Device) -> Device {
        if self.has_state() { Device::Cpu } else { device.clone() }
    }

    /// The file for `bytes` bytes of values; none where no folder is named.
    pub(super) fn file(&self, bytes: usize) -> Result<Option<Arc<MappedFile>>> {
        match self {
            Offload::Params(Some(folder)) if bytes > 0 => MappedFile::create(folder, bytes).map(Some),
            _ => Ok(None),
        }
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
            (StorageTarget::Device(device), ParamStorage::Memory(tensor)) => tensor.to_device(device)?.into(),
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

    /// Runs of the whole where they lie, to be written in place; none unless all are kept and in memory.
    pub(super) fn in_place<const N: usize>(&mut self, runs: [&Range<usize>; N]) -> Option<[&mut [T]; N]> {
        let BuilderTarget::Memory(values) = &mut self.to else { return None };
        let kept = &self.kept;
        if runs.iter().any(|run| run.start < kept.start || run.end > kept.end) {
            return None;
        }
        values.get_disjoint_mut(runs.map(|run| run.start - kept.start..run.end - kept.start)).ok()
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
