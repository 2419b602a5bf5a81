//! The memory that collectives read and write.

use std::any::Any;
use std::sync::Arc;

use super::Call;
use crate::error::{Error, Result};

/// What the memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// Bytes: codes of quantized weights.
    U8,
    /// Parameters and gradients in bf16.
    Bf16,
    /// Parameters and gradients in f32.
    F32,
    /// Sums of losses and squares.
    F64,
}

impl Element {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::Bf16 => 2,
            Element::F32 => 4,
            Element::F64 => 8,
        }
    }
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The processor's: what every backend takes.
    Host,
    /// A GPU's, read and written on its streams: NCCL's alone.
    Gpu,
}

/// A run of elements in host or device memory that stays where it is for as long as this value lives.
#[derive(Clone)]
pub struct Memory {
    address: usize,
    elements: usize,
    element: Element,
    place: Place,
    /// Keeps the allocation (a tensor's storage).
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// Wraps `elements` elements at `address` in memory of the host.
    ///
    /// # Safety
    /// `owner` keeps the memory valid and in place, aligned for `element`; nothing else reads or writes it while a
    /// collective that was given it runs.
    pub unsafe fn new(
        address: usize,
        elements: usize,
        element: Element,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Memory { address, elements, element, place: Place::Host, _owner: owner }
    }

    /// Wraps `elements` elements at `address` in memory of a GPU.
    ///
    /// # Safety
    /// As [`Memory::new`], in the order of the GPU's compute stream: what is put there before a collective is done
    /// before it, and the memory is freed there.
    #[cfg(any(feature = "cuda", test))]
    pub unsafe fn on_gpu(
        address: usize,
        elements: usize,
        element: Element,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Memory { address, elements, element, place: Place::Gpu, _owner: owner }
    }

    /// Whose memory it is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Where it begins.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// What it holds.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.bytes()
    }
}

/// Refuses a shard that is not one of `ranks` equal parts of `full`.
pub(super) fn check_shard(call: Call, shard: &Memory, full: &Memory, ranks: usize) -> Result<()> {
    let fits = full.element == shard.element && shard.elements.checked_mul(ranks) == Some(full.elements);
    if fits {
        return Ok(());
    }
    let what = format!("the shard of {call} does not fit its data");
    Err(Error::internal(what).because(format!("{shard:?}, {full:?}, {ranks} ranks")))
}

/// Refuses memory of a GPU, for backends that read and write it with the processor.
pub(super) fn check_host(call: Call, memory: &Memory) -> Result<()> {
    match memory.place {
        Place::Host => Ok(()),
        Place::Gpu => Err(Error::internal(format!("cannot move {call}"))
            .because(format!("it is {memory:?}, and these ranks meet in the host's memory"))),
    }
}

/// Refuses to add up bytes.
pub(super) fn check_sum(call: Call, memory: &Memory) -> Result<()> {
    match memory.element {
        Element::U8 => {
            Err(Error::internal(format!("cannot sum {call}"))
                .because("it is bytes, expected bf16, f32 or f64"))
        }
        Element::Bf16 | Element::F32 | Element::F64 => Ok(()),
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.place == Place::Gpu { " on a GPU" } else { "" };
        write!(f, "{} {:?} at {:#x}{place}", self.elements, self.element, self.address)
    }
}
