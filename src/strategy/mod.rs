//! Where parameters live and how their gradients meet.
//!
//! Parameters lie in flat buckets, one per segment and kind (frozen, quantized, trainable, adapter), and a segment's
//! weights are views on them. The engine asks the [`Store`] for the weights of a segment, uses them once, lets them go,
//! and hands in the gradients. What a rank keeps, what is gathered and what is summed follows from one
//! table ([`Kind`], in `placement`); one rank is the row of it in which nothing is sent.

mod bucket;
mod gather;
mod offload;
mod packed;
mod placement;
mod reduce;
mod sent;
mod spare;
mod store;
mod views;

pub use bucket::{Bucket, Entry, Fill, Slot};
pub use offload::Offload;
pub use placement::{Content, Extent, Keep, Kind, Ranks};
pub use reduce::Reducing;
pub use store::{Held, Options, Store};
pub use views::{Adapters, LoraSpec, TOKEN_ROWS};
