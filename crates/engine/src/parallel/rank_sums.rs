//! Sums and messages that the ranks of a store exchange besides weights and gradients.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use super::bucket::Bucket;
use super::gather::call;
use super::mesh_shape::MeshAxis;
use super::param_store::ParamStore;
use crate::collective::Call;
use crate::error::Result;
use crate::ops::elementwise::{SquareSums, sums_of_squares};
use crate::runtime::cpu_tensor::memory;

/// Bytes of a text that a rank broadcasts; longer ones are cut.
const FOUND_BYTES: usize = 512;

impl ParamStore {
    /// Returns the Euclidean norm of all gradients, the same on all ranks.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn gradient_norm(&self) -> Result<f64> {
        self.norm_of(self.gradient_squares()?)
    }

    /// Starts summing the squares of this rank's gradients. A GPU continues while the host does
    /// other work.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub(crate) fn gradient_squares(&self) -> Result<SquareSums> {
        let grads: Vec<Option<Tensor>> = self.trainable().map(Bucket::gradient).collect::<Result<_>>()?;
        // On the device for any storage of gradients: partial sums differ between devices.
        sums_of_squares(&grads.iter().flatten().collect::<Vec<_>>(), &self.options.device)
    }

    /// Returns the norm of gradients with these [squares](ParamStore::gradient_squares). Those of a
    /// split bucket are summed over the axis that splits it, in one all-reduce per axis.
    ///
    /// # Errors
    /// An operation of the device failed; a peer failed.
    pub(crate) fn norm_of(&self, squares: SquareSums) -> Result<f64> {
        let (mut whole, mut parts) = (0f64, BTreeMap::<MeshAxis, f64>::new());
        for (bucket, squares) in self.trainable().zip(squares.read()?) {
            match bucket.spec.update.axis() {
                None => whole += squares,
                Some(axis) => *parts.entry(axis).or_default() += squares,
            }
        }
        for (axis, part) in parts {
            whole += if self.mesh().size(axis) > 1 {
                let sum = Tensor::from_vec(vec![part], 1, &Device::Cpu)?;
                self.mesh().group(axis).all_reduce(Call::single("squares of gradients"), &memory(&sum)?)?;
                sum.to_vec1::<f64>()?[0]
            } else {
                part
            };
        }
        Ok(whole.sqrt())
    }

    /// Replaces `values` by their sums over all ranks, and so also synchronizes all ranks.
    ///
    /// # Errors
    /// A peer failed, or a peer sums other values.
    pub fn sum(&self, what: &'static str, values: &mut [f64]) -> Result<()> {
        if self.mesh().world().size() == 1 {
            return Ok(());
        }
        let sum = Tensor::from_slice(values, values.len(), &Device::Cpu)?;
        self.mesh().world().all_reduce(Call::single(what), &memory(&sum)?)?;
        values.copy_from_slice(&sum.to_vec1::<f64>()?);
        Ok(())
    }

    /// Returns the ranks that pass `yes`, ascending. The result is the same on all ranks, which all
    /// call it.
    ///
    /// # Errors
    /// A peer failed.
    pub(crate) fn ranks_that(&self, yes: bool) -> Result<Vec<usize>> {
        let world = self.mesh().world();
        let mut flags = vec![0.0; world.size()];
        flags[world.rank()] = f64::from(u8::from(yes));
        self.sum("what the ranks found", &mut flags)?;
        Ok((0..flags.len()).filter(|rank| flags[*rank] > 0.0).collect())
    }

    /// Returns the lowest rank that passes `yes`, if any. The result is the same on all ranks,
    /// which all call it.
    ///
    /// # Errors
    /// A peer failed.
    pub(crate) fn first_rank(&self, yes: bool) -> Result<Option<usize>> {
        Ok(self.ranks_that(yes)?.first().copied())
    }

    /// Returns the finding of the lowest rank that has one, with that rank or `every rank` appended
    /// if the run has several ranks. The result is the same on all ranks, which all call it.
    ///
    /// # Errors
    /// A peer failed.
    pub(crate) fn first_found(&self, text: Option<String>) -> Result<Option<String>> {
        let world = self.mesh().world();
        let ranks = self.ranks_that(text.is_some())?;
        let Some(rank) = ranks.first().copied() else { return Ok(None) };
        if world.size() == 1 {
            return Ok(text);
        }
        let mut text = text.unwrap_or_default().into_bytes();
        text.resize(FOUND_BYTES, 0);
        let text = Tensor::from_vec(text, FOUND_BYTES, &Device::Cpu)?;
        world.broadcast(Call::single("what a rank found"), rank, &memory(&text)?)?;
        let text = text.to_vec1::<u8>()?;
        let text = String::from_utf8_lossy(text.split(|byte| *byte == 0).next().unwrap_or_default());
        let where_found =
            if ranks.len() == world.size() { "every rank".into() } else { format!("rank {rank}") };
        Ok(Some(format!("{text} on {where_found}")))
    }

    /// Gathers the whole of a tensor of which `own` is this rank's run, such as the bucket's
    /// masters: flat, in the dtype of `own`. All ranks of the axis that splits the bucket's updates
    /// call it.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn collect(&self, bucket: &Bucket, own: &Tensor) -> Result<Tensor> {
        let Some(axis) = bucket.spec.update.axis().filter(|axis| self.mesh().size(*axis) > 1) else {
            return Ok(own.clone());
        };
        let shards = self.mesh().group(axis);
        let all = Tensor::zeros(own.elem_count() * shards.size(), own.dtype(), own.device())?;
        let ticket =
            shards.start_all_gather(call!("whole of", bucket.segment), &memory(own)?, &memory(&all)?)?;
        shards.finish(ticket)?;
        // No rank may free memory that a slower peer still reads.
        shards.barrier(call!("whole of", bucket.segment))?;
        Ok(all)
    }
}
