//! Cases of the embedding.

use candle_core::DType;

use super::{
    columns_of, columns_of_backward, columns_of_backward_reference, columns_of_reference, embed,
    embed_backward, reference, reference_backward, rows_of,
};
use crate::ops::case::{OpCase, OpPair, TensorPair, Tolerance};
use crate::runtime::rng::RngStream;

/// Rows of the tables.
pub(in crate::ops) const VOCAB: usize = 61;

/// Ids below `VOCAB`, with repetitions.
pub(in crate::ops) fn tokens(count: usize) -> Vec<u32> {
    let stream = RngStream::new(0).named("tokens");
    (0..count as u64).map(|i| (stream.bits(i) % VOCAB as u64) as u32).collect()
}

/// The cases of the table and of columns of an adapter.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let case = |(factor, what): (f64, &str)| {
        [
            OpCase::new("embed", what, Tolerance::ROUNDED, move |runner| {
                let table = runner.normal("table", (VOCAB, 24))?;
                let got = embed(&table.here, &tokens(130), factor, runner.dtype)?;
                let want = reference(&table.plain, &tokens(130), factor, DType::F32)?;
                // A table may be kept in fewer bits than activations have.
                let wide = embed(&table.here, &tokens(130), factor, DType::F32)?;
                Ok(vec![TensorPair::new(got, want.clone()), TensorPair::new(wide, want)])
            }),
            OpCase::new("embed_backward", what, Tolerance::BACKWARD, move |runner| {
                let grad = runner.normal_f32("grad", (VOCAB, 24))?;
                let dy = runner.normal("dy", (130, 24))?;
                embed_backward(&grad.here, &tokens(130), &dy.here, factor, Some(3))?;
                reference_backward(&grad.plain, &tokens(130), &dy.plain, factor, Some(3))?;
                Ok(vec![grad.pair()])
            }),
        ]
    };
    let mut cases: Vec<OpCase> =
        [(1.0, "factor 1"), (4.898_979, "factor 4.9")].into_iter().flat_map(case).collect();
    cases.push(OpCase::new("rows_of", "two tables", Tolerance::ROUNDED.only_f32(), |runner| {
        let tables = [runner.normal_f32("first", (VOCAB, 24))?, runner.normal_f32("second", (VOCAB, 24))?];
        let got = rows_of([&tables[0].here, &tables[1].here], &tokens(130))?;
        let want = |table: &OpPair| reference(&table.plain, &tokens(130), 1.0, DType::F32);
        got.into_iter().zip(&tables).map(|(got, table)| Ok(TensorPair::new(got, want(table)?))).collect()
    }));
    cases.push(OpCase::new("columns_of", "A of an adapter", Tolerance::ROUNDED.only_f32(), |runner| {
        let a = runner.normal_f32("a", (4, VOCAB))?;
        let got = columns_of(&a.here, &tokens(130))?;
        Ok(vec![TensorPair::new(got, columns_of_reference(&a.plain, &tokens(130))?)])
    }));
    cases.push(OpCase::new(
        "columns_of_backward",
        "A of an adapter",
        Tolerance::BACKWARD.only_f32(),
        |runner| {
            let (grad, du) = (runner.normal_f32("grad", (4, VOCAB))?, runner.normal_f32("du", (130, 4))?);
            columns_of_backward(&grad.here, &tokens(130), &du.here, Some(3))?;
            columns_of_backward_reference(&grad.plain, &tokens(130), &du.plain, Some(3))?;
            Ok(vec![grad.pair()])
        },
    ));
    cases
}
