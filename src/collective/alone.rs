//! The group of one rank: what is asked for is there already.

use super::{Call, Collective, Memory, Phase, Ticket, Traffic};
use crate::error::Result;

/// The only rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce(&self, _: Call, _: &Memory) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&self, _: Call, _: &Memory, _: &Memory) -> Result<()> {
        Ok(())
    }

    fn start_all_gather(&self, _: Call, _: &Memory, _: &Memory) -> Result<Ticket> {
        Ok(Ticket(0))
    }

    fn finish(&self, _: Ticket) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, _: Call, _: usize, _: &Memory) -> Result<()> {
        Ok(())
    }

    fn barrier(&self, _: Call) -> Result<()> {
        Ok(())
    }

    fn split(&self, _: usize) -> Result<Box<dyn Collective>> {
        Ok(Box::new(Alone))
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn enter(&self, _: Phase) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}
}
