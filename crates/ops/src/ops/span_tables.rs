//! Tables of packed sequences on the device, for kernels of ops whose rows depend on earlier rows.
//! They are built once for the spans of a micro-batch and shared by all layers.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{Device, Tensor};

use super::attention::Span;
use super::gated_delta::CHUNK;
use crate::backends::gpu::upload;
use crate::error::Result;

/// The number of rows before a row outside all spans, and of the state before such rows.
const OUTSIDE: u32 = u32::MAX;

/// The tables of one micro-batch, u32 on the device.
#[derive(Debug)]
pub(super) struct SpanTables {
    /// The rows of the same span before and after each row: `[N, 2]`.
    pub(super) places: Tensor,
    /// Whole spans and the gaps between them: `[.., 4]`, as `kernels/gated_delta.cu` says.
    pub(super) spans: Tensor,
    /// Chunks of spans and gaps: `[.., 4]`.
    pub(super) chunks: Tensor,
}

/// Cache key of tables, besides their device.
#[derive(Debug, Clone, PartialEq)]
struct TablesKey {
    spans: Vec<Span>,
    rows: usize,
}

thread_local! {
    /// The latest tables.
    static TABLES: RefCell<Option<(TablesKey, Rc<SpanTables>)>> = const { RefCell::new(None) };
}

impl SpanTables {
    /// Returns the tables of `spans`, in the order of their rows, of `rows` rows.
    ///
    /// # Errors
    /// Fails if the device has not enough memory.
    pub(super) fn of(spans: &[Span], rows: usize, device: &Device) -> Result<Rc<Self>> {
        let key = TablesKey { spans: spans.to_vec(), rows };
        let is_same =
            |(of, tables): &&(TablesKey, Rc<Self>)| *of == key && tables.places.device().same_device(device);
        let cached =
            TABLES.with_borrow(|cached| cached.as_ref().filter(is_same).map(|(_, cached)| Rc::clone(cached)));
        if let Some(tables) = cached {
            return Ok(tables);
        }
        let (spans, chunks) = pieces(spans, rows);
        let upload = |list: Vec<[u32; 4]>| upload(list.as_flattened(), (list.len(), 4), device);
        let places = places(&spans, rows);
        let places = crate::backends::gpu::upload(places.as_flattened(), (rows, 2), device)?;
        let tables = Rc::new(SpanTables { places, spans: upload(spans)?, chunks: upload(chunks)? });
        TABLES.set(Some((key, Rc::clone(&tables))));
        Ok(tables)
    }
}

/// Returns the places of all rows.
fn places(pieces: &[[u32; 4]], rows: usize) -> Vec<[u32; 2]> {
    let mut places = vec![[OUTSIDE, 0]; rows];
    for [first, len, before, _] in pieces {
        if *before != OUTSIDE {
            let here = places[*first as usize..][..*len as usize].iter_mut();
            here.enumerate().for_each(|(i, distances)| *distances = [i as u32, len - 1 - i as u32]);
        }
    }
    places
}

/// Returns whole spans and their chunks: the first row, the number of rows, the number of the state
/// before and that after (of whole spans: of the first saved state).
fn pieces(spans: &[Span], rows: usize) -> (Vec<[u32; 4]>, Vec<[u32; 4]>) {
    let (mut whole, mut chunks, mut end, mut states) = (Vec::new(), Vec::new(), 0, 0u32);
    for span in spans.iter().copied().chain([Span::sequence(rows, 0)]) {
        let gap = span.q_start - end;
        if gap > 0 {
            whole.push([end as u32, gap as u32, OUTSIDE, 0]);
        }
        for first in (0..gap).step_by(CHUNK) {
            chunks.push([(end + first) as u32, CHUNK.min(gap - first) as u32, OUTSIDE, 0]);
        }
        end = span.q_start + span.q_len;
        if span.q_len == 0 {
            continue;
        }
        whole.push([span.q_start as u32, span.q_len as u32, 0, states]);
        for first in (0..span.q_len).step_by(CHUNK) {
            let len = CHUNK.min(span.q_len - first);
            let before = if first > 0 { states } else { 0 };
            let after = if first + len < span.q_len { states + 1 } else { 0 };
            chunks.push([(span.q_start + first) as u32, len as u32, before, after]);
            states += u32::from(after > 0);
        }
    }
    (whole, chunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_rows_and_number_the_states() {
        let spans = [Span::sequence(0, 3), Span::sequence(5, 130), Span::sequence(135, 65)];
        let (whole, chunks) = pieces(&spans, 210);
        let gap = OUTSIDE;
        assert_eq!(whole, [[0, 3, 0, 0], [3, 2, gap, 0], [5, 130, 0, 0], [135, 65, 0, 2], [200, 10, gap, 0]]);
        assert_eq!(
            chunks,
            [
                [0, 3, 0, 0],
                [3, 2, gap, 0],
                [5, 64, 0, 1],
                [69, 64, 1, 2],
                [133, 2, 2, 0],
                [135, 64, 0, 3],
                [199, 1, 3, 0],
                [200, 10, gap, 0],
            ]
        );
        let places = places(&whole, 210);
        assert_eq!(places[2..6], [[2, 0], [OUTSIDE, 0], [OUTSIDE, 0], [0, 129]]);
    }
}
