//! Rules of thumb for the memory of full training that people quote, each with the dtypes that it assumes: none of them
//! counts activations.

use serde::Serialize;

/// A rule of so many bytes a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Convention {
    /// How it is quoted.
    pub rule: &'static str,
    /// Bytes a parameter.
    pub bytes_per_parameter: u64,
    /// What it assumes.
    pub assumes: &'static str,
    /// Bytes of the model at hand, on each of the ranks that share them out.
    pub bytes: u64,
}

/// Rules, their bytes and what they assume.
const RULES: [(&str, u64, &str); 4] = [
    ("2N + 2N + 8N", 12, "16-bit weights and gradients, two f32 moments, no f32 masters"),
    ("2N + 2N + 12N", 16, "16-bit weights and gradients, f32 masters, two f32 moments (ZeRO's count)"),
    ("2N + 4N + 12N", 18, "16-bit weights, f32 gradients, f32 masters, two f32 moments"),
    ("24 bytes", 24, "f32 weights and gradients, two f32 moments, f32 copies for a reduction"),
];

/// Every rule for a model of `parameters`, shared out over `ranks`.
pub fn conventions(parameters: u64, ranks: u64) -> Vec<Convention> {
    let of_rule = |(rule, bytes_per_parameter, assumes)| Convention {
        rule,
        bytes_per_parameter,
        assumes,
        bytes: parameters * bytes_per_parameter / ranks,
    };
    RULES.into_iter().map(of_rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes that are told of 7B and 13B models, of four devices, and of 70B's states.
    #[test]
    fn quoted_sizes_follow_from_a_rule() {
        let bytes = |parameters: u64, ranks: u64, rule: usize| conventions(parameters, ranks)[rule].bytes;
        assert_eq!(bytes(7_000_000_000, 1, 0), 84_000_000_000);
        assert_eq!(bytes(13_000_000_000, 1, 0), 156_000_000_000);
        assert_eq!(bytes(13_000_000_000, 4, 0), 39_000_000_000);
        assert_eq!(bytes(70_000_000_000, 1, 0), 840_000_000_000);
    }
}
