//! The group of one rank, whose collectives need no communication.

use super::{Call, Collective, Phase, Ticket, Traffic};
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// The only rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

/// Error of a message to or from another rank.
fn nobody(what: String) -> Result<()> {
    Err(Error::internal(format!("cannot {what}")).because("the group has only one rank"))
}

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce(&self, _: Call, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&self, _: Call, _: &Buffer, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn start_all_gather(&self, _: Call, _: &Buffer, _: &Buffer) -> Result<Ticket> {
        Ok(Ticket(0))
    }

    fn finish(&self, _: Ticket) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, _: Call, _: usize, _: &Buffer) -> Result<()> {
        Ok(())
    }

    fn send(&self, call: Call, to: usize, _: &Buffer) -> Result<()> {
        nobody(format!("send {call} to rank {to}"))
    }

    fn recv(&self, call: Call, from: usize, _: &Buffer) -> Result<()> {
        nobody(format!("receive {call} from rank {from}"))
    }

    fn barrier(&self, _: Call) -> Result<()> {
        Ok(())
    }

    fn split(&self, _: usize) -> Result<Box<dyn Collective>> {
        Ok(Box::new(SingleRank))
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn enter(&self, _: Phase) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cpu_tensor::memory;
    use candle_core::{Device, Tensor};

    #[test]
    fn nobody_takes_or_sends_a_message() {
        let buffer = memory(&Tensor::new(&[1f32], &Device::Cpu).unwrap()).unwrap();
        let call = Call { what: "activations of block", index: 3 };
        let error = SingleRank.send(call, 1, &buffer).unwrap_err();
        assert_eq!(error.what(), "cannot send activations of block 3 to rank 1");
        let error = SingleRank.recv(call, 0, &buffer).unwrap_err();
        assert_eq!(error.what(), "cannot receive activations of block 3 from rank 0");
    }
}
