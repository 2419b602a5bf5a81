//! The group of one rank, whose collectives need no communication.

use super::{Call, Collective, Operation, Ticket};
use crate::error::{Error, Result};

/// The only rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

impl Collective for SingleRank {
    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        let message = match operation {
            Operation::Reduce(reduction) | Operation::StartReduction(reduction) => {
                let shards = reduction.replicas().map(|ranks| ranks.all_reduce(call, reduction.sum()));
                return shards.transpose().map(|_| None);
            }
            Operation::StartAllGathers(_) => return Ok(Some(Ticket(0))),
            Operation::Broadcast { .. } | Operation::Barrier => return Ok(None),
            Operation::Send { to, .. } => format!("send {call} to rank {to}"),
            Operation::Recv { from, .. } => format!("receive {call} from rank {from}"),
        };
        Err(Error::internal(format!("cannot {message}")).because("the group has only one rank"))
    }
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
