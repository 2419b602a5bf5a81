//! Common rules of thumb for the memory of full training, each with the dtypes that it assumes.
//! None of them counts activations.

use serde::Serialize;

use crate::parallel::ShardingStrategy;

/// A rule of thumb with its bytes per parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RuleOfThumb {
    /// The formula as people quote it.
    pub rule: &'static str,
    /// Bytes a parameter.
    pub bytes_per_parameter: u64,
    /// The dtypes that it assumes.
    pub assumes: &'static str,
    /// Bytes of this model on each rank, with the current strategy.
    pub bytes: u64,
    /// Bytes of this model on each rank, for each strategy over all ranks.
    pub by_strategy: StrategyBytes,
}

/// Bytes on each rank, by the tensors that the strategy shards.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StrategyBytes {
    /// Every rank holds everything.
    pub ddp: u64,
    /// States are sharded.
    pub zero1: u64,
    /// States and gradients are sharded.
    pub zero2: u64,
    /// Everything is sharded.
    pub fsdp: u64,
}

/// The rules: bytes of weights, gradients and states (moments, masters), and their assumptions.
const RULES: [(&str, [u64; 3], &str); 4] = [
    ("2N + 2N + 8N", [2, 2, 8], "16-bit weights and gradients, two f32 moments, no f32 masters"),
    (
        "2N + 2N + 12N",
        [2, 2, 12],
        "16-bit weights and gradients, f32 masters, two f32 moments (ZeRO's count)",
    ),
    ("2N + 4N + 12N", [2, 4, 12], "16-bit weights, f32 gradients, f32 masters, two f32 moments"),
    ("24 bytes", [4, 12, 8], "f32 weights and gradients, two f32 moments, f32 copies for a reduction"),
];

/// Applies every rule to a model of `parameters` on `ranks` ranks of a strategy.
pub fn conventions(parameters: u64, kind: ShardingStrategy, ranks: u64) -> Vec<RuleOfThumb> {
    let of_rule = |(rule, [weights, gradients, states], assumes): (_, [u64; 3], _)| {
        let whole = weights + gradients + states;
        let on_rank = |copied: u64| copied * parameters + (whole - copied) * parameters / ranks;
        let by_strategy = StrategyBytes {
            ddp: on_rank(whole),
            zero1: on_rank(weights + gradients),
            zero2: on_rank(weights),
            fsdp: on_rank(0),
        };
        let bytes = match kind {
            ShardingStrategy::Single | ShardingStrategy::Ddp => by_strategy.ddp,
            ShardingStrategy::Zero1 => by_strategy.zero1,
            ShardingStrategy::Zero2 => by_strategy.zero2,
            ShardingStrategy::Fsdp => by_strategy.fsdp,
            ShardingStrategy::Hsdp(group) => whole * parameters / group as u64,
        };
        RuleOfThumb { rule, bytes_per_parameter: whole, assumes, bytes, by_strategy }
    };
    RULES.into_iter().map(of_rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published sizes of 7B and 13B models, of four devices, and of the states of 70B.
    #[test]
    fn quoted_sizes_follow_from_a_rule() {
        let bytes = |parameters: u64, ranks: u64, rule: usize| {
            conventions(parameters, ShardingStrategy::Fsdp, ranks)[rule].bytes
        };
        assert_eq!(bytes(7_000_000_000, 1, 0), 84_000_000_000);
        assert_eq!(bytes(13_000_000_000, 1, 0), 156_000_000_000);
        assert_eq!(bytes(13_000_000_000, 4, 0), 39_000_000_000);
        assert_eq!(bytes(70_000_000_000, 1, 0), 840_000_000_000);
    }

    /// Figure 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054): 7.5 billion parameters on 64
    /// devices, 16 bytes each.
    #[test]
    fn strategies_are_those_of_zero() {
        let rule = conventions(7_500_000_000, ShardingStrategy::Zero1, 64)[1];
        let StrategyBytes { ddp, zero1, zero2, fsdp } = rule.by_strategy;
        let gigabytes = [ddp, zero1, zero2, fsdp].map(|bytes| (bytes as f64 / 1e8).round() / 10.0);
        assert_eq!(gigabytes, [120.0, 31.4, 16.6, 1.9]);
        assert_eq!(rule.bytes, zero1);
    }
}
