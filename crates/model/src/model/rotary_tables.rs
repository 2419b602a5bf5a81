//! The angles of a model's ropes on the device: made once for each position, picked by the tokens of each batch.

use std::sync::{Mutex, PoisonError};

use candle_core::Device;

use super::rope::{Rope, RopeKind};
use crate::error::Result;
use crate::ops::attention::Span;
use crate::ops::embedding::rows_of;
use crate::ops::rotary::RotaryTable;

/// Positions that a first table has at least.
const FIRST_POSITIONS: usize = 256;

/// The tables of a model's ropes, as far as sequences have come.
#[derive(Debug)]
pub struct RotaryTables {
    device: Device,
    /// By rope, a row a position; none before the first batch, and for ropes whose angles depend on the length of the
    /// sequence.
    by_position: Vec<Mutex<Option<RotaryTable>>>,
}

impl RotaryTables {
    /// No tables yet, for these ropes.
    pub fn new(ropes: &[Rope], device: &Device) -> Self {
        let by_position = ropes.iter().map(|_| Mutex::default()).collect();
        RotaryTables { device: device.clone(), by_position }
    }

    /// For each of `ropes`, which are those that this was made for, cos and sin for the queries of each span; a span's
    /// tokens stand at positions `k_len − q_len ..`.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn of_spans(&self, ropes: &[Rope], spans: &[Span]) -> Result<Vec<RotaryTable>> {
        let positions: Vec<u32> =
            spans.iter().flat_map(|span| (span.k_len - span.q_len) as u32..span.k_len as u32).collect();
        let longest = spans.iter().map(|span| span.k_len).max().unwrap_or(0);
        let of_rope = |(rope, kept): (&Rope, &Mutex<Option<RotaryTable>>)| {
            if rope.kind != RopeKind::Fixed {
                return rope.table(spans, &self.device);
            }
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let table = match &mut *kept {
                Some(table) if table.cos.dim(0)? >= longest => table,
                // Twice as many as needed: generation asks for one more position at a time.
                old => old.insert(rope.table(&[whole((2 * longest).max(FIRST_POSITIONS))], &self.device)?),
            };
            let [cos, sin] = rows_of([&table.cos, &table.sin], &positions)?;
            Ok(RotaryTable { cos, sin })
        };
        ropes.iter().zip(&self.by_position).map(of_rope).collect()
    }
}

/// A sequence of `len` tokens by itself.
fn whole(len: usize) -> Span {
    Span::sequence(0, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_reader::ConfigReader;
    use crate::model::rope::RopeContext;

    /// Bits of cos and sin.
    fn bits(table: &RotaryTable) -> Vec<u32> {
        let values = [&table.cos, &table.sin].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        values.concat().into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn tables_are_those_of_the_spans_however_they_grew() -> Result<()> {
        let context = RopeContext {
            head_dim: 16,
            theta: 1e4,
            partial: 1.0,
            max_positions: 64,
            original_max_positions: None,
        };
        let dynamic = serde_json::json!({"rope_type": "dynamic", "factor": 2.0});
        let dynamic = ConfigReader::new(&dynamic)?;
        let ropes = [Rope::read(None, &context)?, Rope::read(Some(&dynamic), &context)?];
        let tables = RotaryTables::new(&ropes, &Device::Cpu);
        let part = Span { q_start: 9, q_len: 3, k_start: 0, k_len: 700 };
        for spans in [vec![whole(9)], vec![whole(9), part], vec![whole(5)]] {
            for (rope, found) in ropes.iter().zip(tables.of_spans(&ropes, &spans)?) {
                assert_eq!(bits(&found), bits(&rope.table(&spans, &Device::Cpu)?));
            }
        }
        Ok(())
    }
}
