//! The group of one rank: what is asked for is there already.

use super::{Call, Collective, Phase, Ticket, Traffic};
use crate::error::Result;
use crate::runtime::buffer::Buffer;

/// The only rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

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
