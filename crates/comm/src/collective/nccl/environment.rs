//! Environment variables that NCCL reads, for several ranks on one GPU in tests:
//! `tests/parallel/nccl.rs` alone, `benchmarks/two_ranks.py` with whole runs (a
//! step of `benchmarks/gpu.sh`). Not yet run on a GPU.
//!
//! Ranks on one GPU by hand, once for each rank R of two, under the variables of
//! [`one_gpu_environment`]:
//!
//! ```text
//! finetune … --gpus 0 --world-size 2 --rank R --master-addr 127.0.0.1
//! ```

/// Environment variables for ranks in separate *processes* that share one GPU, over the loopback
/// interface. The launcher sets them on each rank's process before it loads NCCL. One process
/// cannot hold such ranks, because NCCL reads `NCCL_HOSTID` once.
///
/// NCCL refuses two ranks with the same host and GPU: each pretends to be a separate host
/// (`NCCL_HOSTID`), so that they use sockets. NVIDIA does not support this, and it is slow; kernels
/// take turns on the GPU, so every call needs a deadline. NCCL 2.30 and newer have
/// `NCCL_MULTI_RANK_GPU_ENABLE`, for at most two ranks.
pub fn one_gpu_environment(rank: usize) -> Vec<(&'static str, String)> {
    let fixed = [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_NET", "Socket"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_PROTO", "Simple"),
        // Kernels of all ranks must fit on the GPU at once.
        ("NCCL_MAX_NCHANNELS", "2"),
    ];
    let own = ("NCCL_HOSTID", format!("finetune-rank-{rank}"));
    fixed.map(|(name, value)| (name, value.to_owned())).into_iter().chain([own]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_differs_between_ranks() {
        let [one, two] = [0, 1].map(one_gpu_environment);
        let differing: Vec<_> = one.iter().zip(&two).filter(|(a, b)| a != b).map(|(a, _)| a.0).collect();
        assert_eq!(differing, ["NCCL_HOSTID"]);
        assert!(one.contains(&("NCCL_SOCKET_IFNAME", "lo".to_owned())));
    }
}
