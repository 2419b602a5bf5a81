//! A PiSSA adapter on disk (arXiv 2404.02948). Training starts from the base's principal part, B₀
//! A₀, which is removed from the base. The saved adapter must fit the original base. So the files
//! hold an ordinary LoRA of twice the rank, `B A − B₀ A₀ = [B, −B₀] [A; A₀]`, in the form of PEFT's
//! conversion (`path_initial_model_for_weight_conversion`). A resumed run reads both halves from
//! there.

use crate::adapter::{AdapterConfig, LowRankFactors, SavedAdapter, TensorKind};
use crate::error::{Error, Result};
use crate::weights::StoredElement;

/// A saved adapter whose second half is its initial value.
#[derive(Debug)]
pub(crate) struct PissaStart(pub(crate) SavedAdapter);

impl PissaStart {
    /// Returns the two halves of a matrix: rows of A, columns of B.
    fn halves(&self, module: &str, kind: TensorKind) -> Result<[Vec<f32>; 2]> {
        let info = self.0.info(module, kind).ok_or_else(|| {
            Error::user("cannot resume the PiSSA adapter").because(format!("it has no tensor for `{module}`"))
        })?;
        let width = info.shape.get(1).copied().unwrap_or(1);
        let mut values = vec![0f32; info.elements()];
        self.0.read_into(module, kind, &mut values)?;
        Ok(match kind {
            TensorKind::LoraB => {
                let half = |from: usize, sign: f32| {
                    let rows = values.chunks_exact(width.max(1));
                    rows.flat_map(|row| row[from..from + width / 2].iter().map(move |v| sign * v)).collect()
                };
                [half(0, 1.0), half(width / 2, -1.0)]
            }
            _ => {
                let second = values.split_off(values.len() / 2);
                [values, second]
            }
        })
    }

    /// Returns A₀ and B₀.
    pub(crate) fn initial(&self, module: &str) -> Result<LowRankFactors> {
        let [_, a] = self.halves(module, TensorKind::LoraA)?;
        let [_, b] = self.halves(module, TensorKind::LoraB)?;
        Ok(LowRankFactors { a, b })
    }

    /// Reads a tensor with its value at the time of saving.
    pub(crate) fn read_trained<T: StoredElement>(
        &self,
        module: &str,
        kind: TensorKind,
        out: &mut [T],
    ) -> Result<()> {
        if !matches!(kind, TensorKind::LoraA | TensorKind::LoraB) {
            return self.0.read_into(module, kind, out);
        }
        let [trained, _] = self.halves(module, kind)?;
        T::round(&trained, out);
        Ok(())
    }
}

/// Returns the configuration of the saved form: twice the rank at the same scale.
pub fn saved_config(config: &AdapterConfig) -> AdapterConfig {
    let mut saved = config.clone();
    // The scale is alpha / r, with rsLoRA alpha / √r.
    let factor = if config.spec.use_rslora { std::f64::consts::SQRT_2 } else { 2.0 };
    saved.spec.r *= 2;
    saved.spec.lora_alpha *= factor;
    saved.spec.rank_pattern.iter_mut().for_each(|(_, r)| *r *= 2);
    saved.spec.alpha_pattern.iter_mut().for_each(|(_, alpha)| *alpha *= factor);
    saved
}

/// Returns a matrix of the saved form and its shape: `[A; A₀]` or `[B, −B₀]`.
pub fn saved_matrix(
    kind: TensorKind,
    shape: &[usize],
    values: &[f32],
    initial: &LowRankFactors,
) -> (Vec<usize>, Vec<f32>) {
    match (kind, shape) {
        (TensorKind::LoraA, &[r, width]) => (vec![2 * r, width], [values, &initial.a].concat()),
        (TensorKind::LoraB, &[out, r]) => {
            let rows = values.chunks_exact(r.max(1)).zip(initial.b.chunks_exact(r.max(1)));
            let rows = rows.flat_map(|(b, b0)| b.iter().copied().chain(b0.iter().map(|v| -v)));
            (vec![out, 2 * r], rows.collect())
        }
        _ => (shape.to_vec(), values.to_vec()),
    }
}
