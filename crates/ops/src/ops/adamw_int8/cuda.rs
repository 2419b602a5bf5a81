//! AdamW with moments in 8 bits by the kernel of `kernels/adamw.cu`: all pieces in one launch, one
//! warp per block of state.

use std::sync::LazyLock;

use super::{AdamWPiece, Int8State, STATE_BLOCK};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, constant, kernels};
use crate::error::Result;
use crate::ops::adamw::cuda::{MomentAddresses, PieceTable};
use crate::quant::DynamicMap;

/// Values per block of threads: 64 blocks of state.
const CHUNK: usize = 64 * STATE_BLOCK;

/// A dynamic map in the layout of the kernel.
struct MapTable {
    /// Values, then limits.
    numbers: Vec<f32>,
    /// The bytes of the map's index, padded to whole words.
    starts: Vec<u8>,
}

impl From<&DynamicMap> for MapTable {
    fn from(map: &DynamicMap) -> Self {
        let mut starts = map.starts().to_vec();
        starts.resize(starts.len().next_multiple_of(4), 0);
        MapTable { numbers: [map.values().as_slice(), map.limits()].concat(), starts }
    }
}

/// The maps of the first and second moment.
static MAPS: LazyLock<[MapTable; 2]> =
    LazyLock::new(|| [DynamicMap::signed().into(), DynamicMap::unsigned().into()]);

pub(super) fn adamw_int8(driver: &dyn Driver, pieces: &[AdamWPiece<'_, Int8State>]) -> Result<()> {
    let codes = |state: &Int8State| -> Result<u64> { Ok(InOut::<u8>::all(&state.codes)?.arg().value) };
    let scales = |state: &Int8State| -> Result<u64> { Ok(InOut::<f32>::all(&state.absmax)?.arg().value) };
    let table = PieceTable::upload(pieces, CHUNK, |[mean, square]| {
        Ok(MomentAddresses {
            values: [codes(mean)?, codes(square)?],
            scales: [scales(mean)?, scales(square)?],
        })
    })?;
    let device = table.rows.device();
    let [signed, unsigned] = &*MAPS;
    kernels::adamw_int8(
        driver,
        LaunchShape::line(table.blocks, 256),
        In::all(&table.rows)?,
        In::all(&table.first_block)?,
        table.count,
        In::all(&table.rates)?,
        In::all(&table.grad_scale)?,
        In::all(&constant(&signed.numbers, device)?)?,
        In::all(&constant(&signed.starts, device)?)?,
        In::all(&constant(&unsigned.numbers, device)?)?,
        In::all(&constant(&unsigned.starts, device)?)?,
    )
}
