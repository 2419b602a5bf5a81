//! Cases of the embedding.

use candle_core::DType;

use super::{
    columns_of, columns_of_backward, columns_of_backward_reference, columns_of_reference, embed,
    embed_backward, reference, reference_backward, rows_of,
};
use crate::ops::case::{OpCase, OpPair, TensorPair, Tolerance};
use crate::runtime::rng::RngStream;

/// Number of rows of the tables.
pub(in crate::ops) const VOCAB: usize = 61;

/// Returns ids below `VOCAB`, with repetitions.
pub(in crate::ops) fn tokens(count: usize) -> Vec<u32> {
    let stream = RngStream::new(0).named("tokens");
    (0..count as u64).map(|i| (stream.bits(i) % VOCAB as u64) as u32).collect()
}

/// Returns the cases of the table and of columns of an adapter.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let factors = [(1.0, "factor 1"), (4.898_979, "factor 4.9")];
    let mut cases: Vec<OpCase> =
        factors.into_iter().flat_map(|(factor, what)| table_cases(what, factor, 130, 24)).collect();
    cases.push(OpCase::new("rows_of", "two tables", Tolerance::ROUNDED.only_f32(), |runner| {
        let tables = [runner.normal_f32("first", (VOCAB, 24))?, runner.normal_f32("second", (VOCAB, 24))?];
        let got = rows_of([&tables[0].here, &tables[1].here], &tokens(130))?;
        let want = |table: &OpPair| reference(&table.plain, &tokens(130), 1.0, DType::F32);
        got.into_iter().zip(&tables).map(|(got, table)| Ok(TensorPair::new(got, want(table)?))).collect()
    }));
    cases.extend(adapter_cases("A of an adapter", 130, 4));
    cases
}

/// Returns the cases of a lookup of `count` tokens in a table of this width, and of the table's
/// gradient.
pub(in crate::ops) fn table_cases(what: &str, factor: f64, count: usize, width: usize) -> [OpCase; 2] {
    [
        OpCase::new("embed", what, Tolerance::ROUNDED, move |runner| {
            let table = runner.normal("table", (VOCAB, width))?;
            let got = embed(&table.here, &tokens(count), factor, runner.dtype)?;
            let want = reference(&table.plain, &tokens(count), factor, DType::F32)?;
            // A table may have a smaller dtype than the activations.
            let wide = embed(&table.here, &tokens(count), factor, DType::F32)?;
            Ok(vec![TensorPair::new(got, want.clone()), TensorPair::new(wide, want)])
        }),
        OpCase::new("embed_backward", what, Tolerance::BACKWARD, move |runner| {
            let grad = runner.normal_f32("grad", (VOCAB, width))?;
            let dy = runner.normal("dy", (count, width))?;
            embed_backward(&grad.here, &tokens(count), &dy.here, factor, Some(3))?;
            reference_backward(&grad.plain, &tokens(count), &dy.plain, factor, Some(3))?;
            Ok(vec![grad.pair()])
        }),
    ]
}

/// Returns the cases of the columns of an adapter's A with `rank` rows for `count` tokens, and of
/// A's gradient.
pub(in crate::ops) fn adapter_cases(what: &str, count: usize, rank: usize) -> [OpCase; 2] {
    [
        OpCase::new("columns_of", what, Tolerance::ROUNDED.only_f32(), move |runner| {
            let a = runner.normal_f32("a", (rank, VOCAB))?;
            let got = columns_of(&a.here, &tokens(count))?;
            Ok(vec![TensorPair::new(got, columns_of_reference(&a.plain, &tokens(count))?)])
        }),
        OpCase::new("columns_of_backward", what, Tolerance::BACKWARD.only_f32(), move |runner| {
            let (grad, du) =
                (runner.normal_f32("grad", (rank, VOCAB))?, runner.normal_f32("du", (count, rank))?);
            columns_of_backward(&grad.here, &tokens(count), &du.here, Some(3))?;
            columns_of_backward_reference(&grad.plain, &tokens(count), &du.plain, Some(3))?;
            Ok(vec![grad.pair()])
        }),
    ]
}
