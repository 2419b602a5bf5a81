//! Checks if a run can also keep its quantized weights in bf16 (`quantization.bf16_copy`).

use candle_core::DType;

use crate::error::{Error, Result};
use crate::loading::EngineOptions;
use crate::parallel::{ParamRole, ShardingStrategy};
use crate::recipe::Recipe;
use crate::recipe::enums::{AdapterKind, Offload};

/// True if the recipe sets `quantization.bf16_copy`.
pub(super) fn is_wanted(recipe: &Recipe) -> bool {
    recipe.quantization.as_ref().is_some_and(|quantization| quantization.bf16_copy)
}

/// Refuses the copy if no operation would read it.
///
/// # Errors
/// The recipe sets the key, but the run computes on the CPU, in f32 or with DoRA, or does not keep
/// all codes on the GPU.
pub(super) fn check(recipe: &Recipe, engine: &EngineOptions, kind: ShardingStrategy) -> Result<()> {
    if !is_wanted(recipe) {
        return Ok(());
    }
    let Some(why) = why_not(recipe, engine.dtype, kind, engine.traits.has_kernels) else { return Ok(()) };
    Err(Error::user("cannot keep a bf16 copy of the quantized weights (`quantization.bf16_copy`)")
        .because(why)
        .hint("leave the key out: the same numbers are computed without the copy"))
}

/// Returns the reason for which no operation would read the copy; none if one does.
fn why_not(recipe: &Recipe, dtype: DType, kind: ShardingStrategy, has_kernels: bool) -> Option<String> {
    let is_dora = recipe.adapter.as_ref().is_some_and(|adapter| adapter.kind == AdapterKind::Dora);
    let is_split = kind.sharding_spec(ParamRole::Frozen).values.is_sharded();
    Some(if !has_kernels {
        "the CPU multiplies with the codes as they are".into()
    } else if dtype != DType::BF16 {
        format!("the run computes in {}", dtype.as_str())
    } else if is_dora {
        "DoRA (`adapter.kind`) computes with one matrix at a time".into()
    } else if is_split {
        "the ranks split the frozen weights among them (`parallel.strategy`)".into()
    } else if recipe.parallel.offload == Offload::Params {
        "`parallel.offload` keeps the frozen weights in host memory".into()
    } else {
        return None;
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::AdapterSection;

    #[test]
    fn a_copy_that_nothing_reads_is_refused() {
        let plain = Recipe::default();
        let single = ShardingStrategy::Single;
        assert_eq!(why_not(&plain, DType::BF16, single, true), None);
        let dora = AdapterSection { kind: AdapterKind::Dora, ..AdapterSection::default() };
        let dora = Recipe { adapter: Some(dora), ..Recipe::default() };
        let mut away = Recipe::default();
        away.parallel.offload = Offload::Params;
        let cases = [
            (why_not(&plain, DType::BF16, single, false), "the CPU"),
            (why_not(&plain, DType::F32, single, true), "in f32"),
            (why_not(&dora, DType::BF16, single, true), "DoRA"),
            (why_not(&plain, DType::BF16, ShardingStrategy::Fsdp, true), "`parallel.strategy`"),
            (why_not(&away, DType::BF16, single, true), "`parallel.offload`"),
        ];
        for (why, wanted) in cases {
            assert!(why.as_ref().is_some_and(|why| why.contains(wanted)), "{why:?}: {wanted}");
        }
    }
}
