//! The memory that collectives read and write.

use std::any::Any;
use std::sync::Arc;

/// What the memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Bytes: codes of quantized weights.
    U8,
    /// Parameters and gradients in bf16.
    Bf16,
    /// Parameters and gradients in f32.
    F32,
    /// Sums of losses and squares.
    F64,
}

impl ElementType {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::F32 => 4,
            ElementType::F64 => 8,
        }
    }
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// The processor's: what every backend takes.
    Host,
    /// A GPU's, read and written on its streams: NCCL's alone.
    Gpu,
}

/// A run of elements in host or device memory that stays where it is for as long as this value lives.
#[derive(Clone)]
pub struct Buffer {
    address: usize,
    elements: usize,
    element: ElementType,
    place: MemoryKind,
    /// Keeps the allocation (a tensor's storage).
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Wraps `elements` elements at `address` in memory of the host.
    ///
    /// # Safety
    /// `owner` keeps the memory valid and in place, aligned for `element`; nothing else reads or writes it while a
    /// collective that was given it runs.
    pub unsafe fn new(
        address: usize,
        elements: usize,
        element: ElementType,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Buffer { address, elements, element, place: MemoryKind::Host, _owner: owner }
    }

    /// Wraps `elements` elements at `address` in memory of a GPU.
    ///
    /// # Safety
    /// As [`Buffer::new`], in the order of the GPU's compute stream: what is put there before a collective is done
    /// before it, and the memory is freed there.
    pub unsafe fn on_gpu(
        address: usize,
        elements: usize,
        element: ElementType,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Buffer { address, elements, element, place: MemoryKind::Gpu, _owner: owner }
    }

    /// Whose memory it is.
    pub fn place(&self) -> MemoryKind {
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
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.bytes()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.place == MemoryKind::Gpu { " on a GPU" } else { "" };
        write!(f, "{} {:?} at {:#x}{place}", self.elements, self.element, self.address)
    }
}
