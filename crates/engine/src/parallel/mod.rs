//! Where parameters live and how their gradients meet.
//!
//! Parameters lie in flat buckets, one per segment and kind (frozen, quantized, trainable, adapter), and a segment's
//! weights are views on them. The engine asks the [`ParamStore`] for the weights of a segment, uses them once, lets them go,
//! and hands in the gradients. What a rank keeps, what is gathered and what is summed follows from one
//! table ([`ShardingStrategy`], in `placement`), whose rows say how many ranks there are along each axis of the
//! [`DeviceMesh`] and what they share out; one rank is the row of it in which nothing is sent.

mod bucket;
mod buffer_pool;
mod comm_volume;
mod gather;
mod grad_reduce;
mod mesh;
mod mesh_shape;
mod offload;
mod param;
mod param_store;
mod placement;
mod quantized_bucket;
mod rank_sums;
mod trainable_entries;
mod views;

pub use bucket::{Bucket, BucketEntry, LoadTarget};
pub use comm_volume::{SentBytes, TrainedRun};
pub use grad_reduce::GradReduceOptions;
pub use mesh::DeviceMesh;
pub use mesh_shape::{MeshAxis, MeshShape};
pub use offload::OffloadTarget;
pub use param::{LrGroup, ParamDesc, ParamKind, UpdateRule};
pub use param_store::{FiniteCheck, GatherGuard, ParamStore, StoreOptions};
pub use placement::{ParamRole, Placement, ShardingSpec, ShardingStrategy};
pub use trainable_entries::EntryIndex;
pub use views::{Adapters, LoraSpec, TOKEN_ROWS};
