//! Applies an adapter to the rows of a weight: LoRA, DoRA, trained rows.
//!
//! Sums are in f32 in PEFT's order: B A, times scale, plus W; then DoRA's factors. LoRA of an
//! embedding is that of its transpose, (B A)ᵀ = Aᵀ Bᵀ, so both kinds are a matrix [rows, r] times
//! one [r, columns] here. DoRA's norms are along the input: the row of a linear layer, the column
//! of an embedding, which therefore has to be read twice.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::adapter::{SavedAdapter, Target, TensorKind};
use crate::error::{Error, Result};
use crate::model::ModuleKind;

/// A change of a weight [rows, columns].
pub(super) struct WeightDelta {
    columns: usize,
    /// Whole rows that replace the base's.
    replaced: BTreeMap<usize, Vec<f32>>,
    lora: Option<LoraDelta>,
}

impl WeightDelta {
    /// Reads the adapter's changes to a weight of `shape`: trained rows of the module `rows`, LoRA
    /// of `target`.
    ///
    /// # Errors
    /// The same as for [`SavedAdapter::read_into`].
    pub(super) fn read(
        adapter: &SavedAdapter,
        rows: Option<&str>,
        target: Option<&Target>,
        shape: &[usize],
    ) -> Result<Self> {
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let mut replaced = BTreeMap::new();
        if let Some((module, ids)) = rows.and_then(|module| adapter.rows().get_key_value(module)) {
            let mut values = vec![0f32; ids.len() * columns];
            adapter.read_into(module, TensorKind::TokensDelta, &mut values)?;
            let rows = values.chunks_exact(columns).map(<[f32]>::to_vec);
            replaced.extend(ids.iter().map(|id| *id as usize).zip(rows));
        }
        let lora = target.map(|target| LoraDelta::read(adapter, target, shape)).transpose()?;
        Ok(Self { columns, replaced, lora })
    }

    /// Returns whether [`WeightDelta::measure`] needs every block before the first is changed.
    pub(super) fn needs_measuring(&self) -> bool {
        self.lora.as_ref().is_some_and(|lora| matches!(lora.magnitude, Magnitude::Columns { .. }))
    }

    /// Adds a block of whole rows to the norms. The block has arbitrary contents afterwards.
    pub(super) fn measure(&mut self, block: &mut [f32], first_row: usize) {
        let Some(lora) = &mut self.lora else { return };
        lora.add_to(block, first_row);
        if let Magnitude::Columns { squares, .. } = &mut lora.magnitude {
            for row in block.chunks_exact(self.columns) {
                squares.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w) * f64::from(w));
            }
        }
    }

    /// Changes a block of whole rows, the first of which is row `first_row` of the weight.
    ///
    /// # Errors
    /// User: DoRA has to scale a row (of an embedding: a column) that is zero.
    pub(super) fn apply(&self, block: &mut [f32], first_row: usize) -> Result<()> {
        let end = first_row + block.len() / self.columns;
        for (id, values) in self.replaced.range(first_row..end) {
            let start = (id - first_row) * self.columns;
            block[start..start + self.columns].copy_from_slice(values);
        }
        let Some(lora) = &self.lora else { return Ok(()) };
        lora.add_to(block, first_row);
        lora.scale_to_magnitudes(block, first_row)
    }
}

/// scale · B A, and DoRA's magnitudes.
#[derive(PartialEq)]
pub(super) struct LoraDelta {
    /// LoRA's first matrix, `[r, columns]`.
    a: Vec<f32>,
    /// LoRA's second matrix, `[rows, r]`.
    b: Vec<f32>,
    r: usize,
    columns: usize,
    scale: f32,
    magnitude: Magnitude,
}

#[derive(PartialEq)]
enum Magnitude {
    /// The module does not use DoRA.
    None,
    /// The learned norm of each row.
    Rows(Vec<f32>),
    /// The learned norm of each column, and the sums of squares of the columns so far.
    Columns { learned: Vec<f32>, squares: Vec<f64> },
}

impl LoraDelta {
    /// Reads the LoRA of `target`, whose weight has `shape`.
    pub(super) fn read(adapter: &SavedAdapter, target: &Target, shape: &[usize]) -> Result<Self> {
        let &[rows, columns] = shape else {
            return Err(Error::internal(format!("cannot merge `{}`", target.name))
                .because(format!("its weight has shape {shape:?}; accepted: [out, in]")));
        };
        let r = target.r;
        let read = |kind, elements: usize| -> Result<Vec<f32>> {
            let mut values = vec![0f32; elements];
            adapter.read_into(&target.name, kind, &mut values)?;
            Ok(values)
        };
        let embedding = target.kind == ModuleKind::Embedding;
        let (a, b) = if embedding {
            let (a, b) =
                (read(TensorKind::LoraEmbeddingA, r * rows)?, read(TensorKind::LoraEmbeddingB, columns * r)?);
            (transposed(&b, r), transposed(&a, rows))
        } else {
            (read(TensorKind::LoraA, r * columns)?, read(TensorKind::LoraB, rows * r)?)
        };
        let magnitude = match (adapter.config().spec.use_dora, embedding) {
            (false, _) => Magnitude::None,
            (true, false) => Magnitude::Rows(read(TensorKind::LoraMagnitude, rows)?),
            (true, true) => Magnitude::Columns {
                learned: read(TensorKind::LoraMagnitude, columns)?,
                squares: vec![0.0; columns],
            },
        };
        Ok(Self { a, b, r, columns, scale: target.scale as f32, magnitude })
    }

    fn add_to(&self, block: &mut [f32], first_row: usize) {
        let b = &self.b[first_row * self.r..];
        let rows = block.par_chunks_mut(self.columns).zip(b.par_chunks(self.r));
        rows.for_each_init(
            || vec![0f32; self.columns],
            |product, (row, b)| {
                product.fill(0.0);
                for (&b, a) in b.iter().zip(self.a.chunks_exact(self.columns)) {
                    product.iter_mut().zip(a).for_each(|(product, &a)| *product += b * a);
                }
                row.iter_mut().zip(product).for_each(|(weight, product)| *weight += *product * self.scale);
            },
        );
    }

    fn scale_to_magnitudes(&self, block: &mut [f32], first_row: usize) -> Result<()> {
        let factor = |learned: f32, square: f64| -> Result<f32> {
            if square > 0.0 {
                return Ok((f64::from(learned) / square.sqrt()) as f32);
            }
            Err(Error::user("cannot merge DoRA")
                .because("a row of W + B A is zero, so no factor can scale it to its magnitude")
                .hint("give the model that the adapter was trained on"))
        };
        match &self.magnitude {
            Magnitude::None => Ok(()),
            Magnitude::Rows(learned) => {
                let rows = block.par_chunks_mut(self.columns).zip(&learned[first_row..]);
                rows.try_for_each(|(row, &learned)| {
                    let square = row.iter().map(|&w| f64::from(w) * f64::from(w)).sum();
                    let factor = factor(learned, square)?;
                    row.iter_mut().for_each(|w| *w *= factor);
                    Ok(())
                })
            }
            Magnitude::Columns { learned, squares } => {
                let factors = learned.iter().zip(squares).map(|(&m, &square)| factor(m, square));
                let factors = factors.collect::<Result<Vec<f32>>>()?;
                for row in block.chunks_exact_mut(self.columns) {
                    row.iter_mut().zip(&factors).for_each(|(w, factor)| *w *= factor);
                }
                Ok(())
            }
        }
    }
}

/// Returns the transpose of a matrix with rows of `columns` values.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns.max(1);
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B = [[1, 2], [3, 4], [5, 6]], A = [[1, 0], [0, 10]], scale 0.5: ΔW = [[.5, 10], [1.5, 20],
    /// [2.5, 30]].
    fn lora(magnitude: Magnitude) -> WeightDelta {
        let lora = LoraDelta {
            a: vec![1.0, 0.0, 0.0, 10.0],
            b: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            r: 2,
            columns: 2,
            scale: 0.5,
            magnitude,
        };
        WeightDelta { columns: 2, replaced: BTreeMap::new(), lora: Some(lora) }
    }

    #[test]
    fn adds_scaled_products_row_by_row() {
        let mut all = [100.0; 6];
        lora(Magnitude::None).apply(&mut all, 0).expect("finite");
        assert_eq!(all, [100.5, 110.0, 101.5, 120.0, 102.5, 130.0]);
        let mut last = [100.0; 2];
        lora(Magnitude::None).apply(&mut last, 2).expect("finite");
        assert_eq!(last, [102.5, 130.0]);
    }

    #[test]
    fn rows_get_their_magnitude() {
        let change = lora(Magnitude::Rows(vec![1.0, 10.0, 26.0]));
        assert!(!change.needs_measuring());
        // With ΔW: [3, 4] of norm 5, and [10, 24] of norm 26, where the second block begins.
        let mut block = [1.5, -16.0, 7.5, -6.0];
        change.apply(&mut block, 1).expect("not zero");
        assert_eq!(block, [6.0, 8.0, 10.0, 24.0]);
        assert!(change.apply(&mut [-1.5, -20.0], 1).is_err());
    }

    #[test]
    fn columns_get_theirs_over_all_blocks() {
        let mut change = lora(Magnitude::Columns { learned: vec![10.0, 2.0], squares: vec![0.0; 2] });
        assert!(change.needs_measuring());
        // With ΔW: columns [0, 3, 4] and [1, 0, 0].
        let blocks = [vec![-0.5, -9.0, 1.5, -20.0], vec![1.5, -30.0]];
        for (block, first_row) in blocks.iter().zip([0, 2]) {
            change.measure(&mut block.clone(), first_row);
        }
        let mut merged = blocks.clone();
        for (block, first_row) in merged.iter_mut().zip([0, 2]) {
            change.apply(block, first_row).expect("not zero");
        }
        assert_eq!(merged.concat(), [0.0, 2.0, 6.0, 0.0, 8.0, 0.0]);
    }

    #[test]
    fn rows_are_replaced_before_lora_is_added() {
        let mut change = lora(Magnitude::None);
        change.replaced = BTreeMap::from([(0, vec![7.0, 7.0]), (2, vec![0.0, 1.0])]);
        let mut block = [100.0; 4];
        change.apply(&mut block, 1).expect("finite");
        assert_eq!(block, [101.5, 120.0, 2.5, 31.0]);
    }

    #[test]
    fn transposes() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
