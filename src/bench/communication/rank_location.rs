//! Location of each rank, and the expected rates of its links by what its host reports.

use serde::{Deserialize, Serialize};

use super::rank_buffer::RankBuffer;
use crate::collective::{Call, Collective};
use crate::doctor::host_facts::{HostFacts, LinkClass};
use crate::error::{Error, Result};
use crate::rendezvous;

/// Bytes of a rank's location as JSON, padded with blanks.
const LOCATION_BYTES: usize = 1024;

/// Kind of links between hosts.
pub(crate) const NETWORK: &str = "network";

/// Location of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankLocation {
    pub(crate) host: String,
    /// Fastest network of the host among those that report a speed.
    network: Option<LinkClass>,
    /// Link between the GPUs of the host, if the ranks are on GPUs.
    between_gpus: Option<LinkClass>,
    on_gpu: bool,
}

impl RankLocation {
    /// Returns the location of a rank of this process.
    pub(crate) fn here(facts: &HostFacts, on_gpu: bool) -> Self {
        RankLocation {
            host: rendezvous::host_name(),
            network: facts.network(),
            between_gpus: facts.between_gpus().filter(|_| on_gpu),
            on_gpu,
        }
    }

    /// Returns the location of a rank on a CPU.
    #[cfg(test)]
    pub(crate) fn of_host(host: &str, network: Option<LinkClass>) -> Self {
        RankLocation { host: host.to_owned(), network, between_gpus: None, on_gpu: false }
    }

    /// Shares this location with all ranks; returns the locations of all, by rank.
    pub(crate) fn share(&self, world: &dyn Collective) -> Result<Vec<RankLocation>> {
        let fault = |error: serde_json::Error| {
            Error::internal(format!("cannot share the locations of ranks: {error}"))
        };
        let mut json = serde_json::to_vec(self).map_err(fault)?;
        if json.len() > LOCATION_BYTES {
            let cause = format!("it takes {} bytes, {LOCATION_BYTES} at most", json.len());
            return Err(Error::internal("cannot share the location of a rank").because(cause));
        }
        json.resize(LOCATION_BYTES, b' ');
        let all = RankBuffer::numbers(vec![0_u8; LOCATION_BYTES * world.size()])?;
        let own = RankBuffer::numbers(json)?;
        let ticket = world.start_all_gather(Call::single("places of ranks"), own.memory(), all.memory())?;
        world.finish(ticket)?;
        let all = all.values::<u8>()?;
        world.barrier(Call::single("places of ranks"))?;
        all.chunks(LOCATION_BYTES).map(|json| serde_json::from_slice(json).map_err(fault)).collect()
    }

    /// Returns the kind of link to `other` and its expected rate, if known. `copy` is the rate of a
    /// copy in memory, in 10^9 bytes per second.
    pub(crate) fn way_to(&self, other: &RankLocation, copy: f64) -> PairWay {
        let slower = |mine: &Option<LinkClass>, theirs: &Option<LinkClass>| {
            let (mine, theirs) = (mine.as_ref()?, theirs.as_ref()?);
            Some(if mine.gbytes_per_sec <= theirs.gbytes_per_sec { mine } else { theirs }.clone())
        };
        let (kind, link) = if self.host != other.host {
            (NETWORK, slower(&self.network, &other.network))
        } else if self.on_gpu && other.on_gpu {
            ("GPUs of one host", slower(&self.between_gpus, &other.between_gpus))
        } else {
            let name = "memory of one host, as a copy there".to_owned();
            ("memory", Some(LinkClass { name, gbytes_per_sec: copy }))
        };
        PairWay { kind, link }
    }
}

/// Link between two ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PairWay {
    /// Kind of link; pairs of one kind are compared with each other.
    pub(crate) kind: &'static str,
    pub(crate) link: Option<LinkClass>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::ranks::run_on_cpu;

    fn link(name: &str, gbytes_per_sec: f64) -> Option<LinkClass> {
        Some(LinkClass { name: name.to_owned(), gbytes_per_sec })
    }

    #[test]
    fn ways_between_ranks() {
        let rank = |host: &str, network, on_gpu| RankLocation {
            host: host.to_owned(),
            network,
            between_gpus: link("NVLink", 450.0).filter(|_| on_gpu),
            on_gpu,
        };
        let (fast, slow) = (link("100 Gb/s EFA", 12.5), link("10 Gb/s ethernet", 1.25));
        let (one, two) = (rank("a", fast.clone(), true), rank("b", slow.clone(), true));
        assert_eq!(one.way_to(&two, 9.0), PairWay { kind: NETWORK, link: slow });
        assert_eq!(one.way_to(&rank("c", None, true), 9.0), PairWay { kind: NETWORK, link: None });
        assert_eq!(one.way_to(&one, 9.0).link, link("NVLink", 450.0));
        let cpu = rank("a", fast, false);
        assert_eq!(
            cpu.way_to(&cpu, 9.0),
            PairWay { kind: "memory", link: link("memory of one host, as a copy there", 9.0) }
        );
    }

    #[test]
    fn every_rank_hears_of_all() {
        let all = run_on_cpu(3, 1, |world| {
            RankLocation::of_host(&format!("host-{}", world.rank()), None).share(&*world)
        });
        let hosts: Vec<String> = all.unwrap()[1].iter().map(|location| location.host.clone()).collect();
        assert_eq!(hosts, ["host-0", "host-1", "host-2"]);
    }
}
