//! The graphs of a model's blocks: a pass over a block is one call of the driver, if it launches
//! what the graph of that pass launches. **Not yet run on a GPU.**
//!
//! A graph is never trusted: its recorded requests are compared with those of the present pass, bit
//! by bit. Requests of the same functions with other arguments are changed in the graph. If that
//! takes as many calls as launches one by one, these are made. A graph is made when two passes in
//! a row differ so little. If the GPU has no memory for one, the run goes on without further
//! graphs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::Driver;
use super::request::{DeviceGraph, Request};
use crate::error::Result;
use crate::locks::locked;
use crate::runtime::device_memory::allocated_if_free;
use crate::runtime::trace::{SpanInfo, span};

/// Parts of a pass that have a graph: a pass over a large block is launched in parts, whose few
/// launches take longer on the GPU than on the host.
const PARTS: u32 = 8;

/// A pass over a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockPass {
    /// The forward of the block.
    Forward,
    /// The forward again, for backward.
    Recompute,
    /// The backward of the block.
    Backward,
}

/// Names a part of a pass over a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    pub(super) layer: usize,
    pub(super) pass: BlockPass,
    /// Its number in the pass.
    pub(super) part: u32,
}

/// Calls for passes over blocks since the graphs were created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GraphCounts {
    /// Graphs that were made.
    pub made: u64,
    /// Graphs that were launched.
    pub launched: u64,
    /// Launches and products in them.
    pub requests: u64,
    /// Those whose arguments were changed before.
    pub changed: u64,
    /// Launches and products that were requested one by one.
    pub one_by_one: u64,
    /// Graphs that the GPU had no memory for; after the first, no other is made.
    pub refused: u64,
}

/// The graphs of a model on one device, at most one for each part of a pass over a block. Clones
/// share them.
#[derive(Debug, Clone, Default)]
pub struct BlockGraphs(Arc<Mutex<Graphs>>);

#[derive(Debug, Default)]
struct Graphs {
    parts: HashMap<PartKey, Part>,
    counts: GraphCounts,
    /// True after [`BlockGraphs::warning`] told of the missing memory.
    has_warned: bool,
}

/// A graph, and the requests that it holds.
#[derive(Debug)]
struct Known {
    graph: Box<dyn DeviceGraph>,
    requests: Vec<Request>,
}

/// The graph of a part, and its last requests one by one.
#[derive(Debug, Default)]
struct Part {
    known: Option<Known>,
    last: Vec<Request>,
}

/// Returns the places of `wanted` that differ from `known`, if changing them in a graph of `known`
/// takes fewer calls than `wanted` one by one.
fn changes(known: &[Request], wanted: &[Request]) -> Option<Vec<usize>> {
    let pairs = || known.iter().zip(wanted).enumerate();
    if known.len() != wanted.len() || !pairs().all(|(_, (known, wanted))| known.is_alike(wanted)) {
        return None;
    }
    let changed = pairs().filter(|(_, (known, wanted))| !known.is_same(wanted)).map(|(at, _)| at);
    let changed: Vec<usize> = changed.collect();
    let calls = 1 + changed.iter().map(|at| wanted[*at].calls_of_change()).sum::<u64>();
    (calls < wanted.len() as u64).then_some(changed)
}

impl Known {
    /// Changes the graph in these places to `wanted`. Returns false if the driver refuses a change;
    /// the graph is then useless.
    fn change(&mut self, places: &[usize], wanted: &[Request]) -> Result<bool> {
        for &at in places {
            if !self.graph.change(at, &wanted[at])? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Part {
    /// Requests `wanted` of the driver: by its graph, or one by one.
    fn issue(
        &mut self,
        driver: &'static dyn Driver,
        wanted: Vec<Request>,
        counts: &mut GraphCounts,
    ) -> Result<()> {
        let len = wanted.len() as u64;
        // After an error the graph may differ from its requests, so it is dropped.
        if let Some(mut known) = self.known.take() {
            match changes(&known.requests, &wanted) {
                Some(places) => {
                    let name = if places.is_empty() { "replayed" } else { "changed" };
                    let _span = span(|| SpanInfo::op("launch graph").detail(name).dims(&[wanted.len()]));
                    if known.change(&places, &wanted)? {
                        known.graph.launch()?;
                        counts.launched += 1;
                        counts.requests += len;
                        counts.changed += places.len() as u64;
                        self.known = Some(Known { requests: wanted, ..known });
                        return Ok(());
                    }
                }
                None => self.known = Some(known),
            }
        }
        let _span = span(|| SpanInfo::op("launch graph").detail("one by one").dims(&[wanted.len()]));
        wanted.iter().try_for_each(|request| request.issue(driver))?;
        counts.one_by_one += len;
        if counts.refused == 0 && changes(&self.last, &wanted).is_some() {
            let allocated = allocated_if_free(|| driver.graph(&wanted))?;
            counts.refused += u64::from(allocated.is_none());
            let graph = allocated.flatten();
            counts.made += u64::from(graph.is_some());
            self.known = graph.map(|graph| Known { graph, requests: wanted.clone() });
        }
        self.last = wanted;
        Ok(())
    }
}

impl BlockGraphs {
    /// Returns the calls since the graphs were created.
    pub fn counts(&self) -> GraphCounts {
        locked(&self.0).counts
    }

    /// Returns a warning once after the GPU had no memory for a graph.
    pub fn warning(&self) -> Option<&'static str> {
        let mut graphs = locked(&self.0);
        let has_refused = graphs.counts.refused > 0;
        let has_warned = std::mem::replace(&mut graphs.has_warned, has_refused);
        (has_refused && !has_warned).then_some(
            "the GPU has too little memory for more CUDA graphs: blocks without one launch their kernels one by one \
             from now on; the results are the same",
        )
    }

    /// Requests recorded work of the driver.
    pub(super) fn issue(
        &self,
        driver: &'static dyn Driver,
        part: PartKey,
        requests: Vec<Request>,
    ) -> Result<()> {
        let mut graphs = locked(&self.0);
        let Graphs { parts, counts, .. } = &mut *graphs;
        if part.part >= PARTS {
            counts.one_by_one += requests.len() as u64;
            return requests.iter().try_for_each(|request| request.issue(driver));
        }
        parts.entry(part).or_default().issue(driver, requests, counts)
    }
}
