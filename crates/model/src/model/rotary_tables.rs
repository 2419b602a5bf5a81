//! The rotary tables of a model's ropes on the device: computed once for each position, and indexed
//! by the tokens of each batch.

use std::sync::Mutex;

use candle_core::{Device, Tensor};

use super::rope::{Rope, RopeKind};
use crate::error::Result;
use crate::locks::locked;
use crate::ops::attention::Span;
use crate::ops::embedding::rows_of;
use crate::ops::rotary::RotaryTable;

/// Minimum number of positions of a first table.
const FIRST_POSITIONS: usize = 256;

/// The positions of a batch's tokens, as one rope gives them to attention.
#[derive(Debug, Clone)]
pub struct PositionTable {
    /// The angles of q and k.
    pub rotary: RotaryTable,
    /// Factors on the queries, `[N, 1]` f32; `None` if all are 1.
    pub query_factors: Option<Tensor>,
}

/// The tables of a model's ropes, up to the longest sequence so far.
#[derive(Debug)]
pub struct RotaryTables {
    device: Device,
    /// By rope, one row per position; `None` before the first batch, and for ropes whose angles
    /// depend on the length of the sequence.
    by_position: Vec<Mutex<Option<RotaryTable>>>,
}

impl RotaryTables {
    /// Creates empty tables for these ropes.
    pub fn new(ropes: &[Rope], device: &Device) -> Self {
        let by_position = ropes.iter().map(|_| Mutex::default()).collect();
        RotaryTables { device: device.clone(), by_position }
    }

    /// Returns the positions of the queries of each span, for each of `ropes`, which must be those
    /// given to `new`. A span's tokens are at positions `k_len − q_len ..`.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn of_spans(&self, ropes: &[Rope], spans: &[Span]) -> Result<Vec<PositionTable>> {
        let positions: Vec<u32> =
            spans.iter().flat_map(|span| (span.k_len - span.q_len) as u32..span.k_len as u32).collect();
        let longest = spans.iter().map(|span| span.k_len).max().unwrap_or(0);
        let of_rope = |(rope, cached_table): (&Rope, &Mutex<Option<RotaryTable>>)| {
            if rope.kind != RopeKind::Fixed {
                return rope.table(spans, &self.device);
            }
            let mut cached = locked(cached_table);
            let table = match &mut *cached {
                Some(table) if table.cos.dim(0)? >= longest => table,
                // Twice as many as needed: generation needs one more position at a time.
                old => old.insert(rope.table(&[whole((2 * longest).max(FIRST_POSITIONS))], &self.device)?),
            };
            let [cos, sin] = rows_of([&table.cos, &table.sin], &positions)?;
            Ok(RotaryTable { cos, sin, interleaved: rope.interleaved })
        };
        let with_factors = |(rope, cached_table): (&Rope, &Mutex<Option<RotaryTable>>)| {
            let query_factors = rope.query_factors(spans, &self.device)?;
            Ok(PositionTable { rotary: of_rope((rope, cached_table))?, query_factors })
        };
        ropes.iter().zip(&self.by_position).map(with_factors).collect()
    }
}

/// Returns a single sequence of `len` tokens.
fn whole(len: usize) -> Span {
    Span::sequence(0, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config_reader::ConfigReader;
    use crate::model::rope::RopeContext;

    /// Returns the bits of cos and sin.
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
            for (rope, table) in ropes.iter().zip(tables.of_spans(&ropes, &spans)?) {
                assert_eq!(bits(&table.rotary), bits(&rope.table(&spans, &Device::Cpu)?));
            }
        }
        Ok(())
    }
}
