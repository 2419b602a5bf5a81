//! Memory that collectives read and write.

use std::any::Any;
use std::sync::Arc;

/// Element type of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Bytes: codes of quantized weights.
    U8,
    /// Parameters and gradients in bf16.
    Bf16,
    /// Parameters and gradients in f32.
    F32,
    /// Sums of losses and of squares.
    F64,
}

impl ElementType {
    /// Size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::F32 => 4,
            ElementType::F64 => 8,
        }
    }
}

/// Owner of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Host memory, which every backend accepts.
    Host,
    /// GPU memory, used on the GPU's streams; only NCCL accepts it.
    Gpu,
}

/// A run of elements in host or device memory that stays valid and in place while this value lives.
#[derive(Clone)]
pub struct Buffer {
    address: usize,
    elements: usize,
    element: ElementType,
    memory_kind: MemoryKind,
    /// Keeps the allocation, such as a tensor's storage, alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Wraps `elements` elements at `address` in host memory.
    ///
    /// # Safety
    /// `owner` keeps the memory valid, in place and aligned for `element`; nothing else reads or
    /// writes it during a collective on it.
    pub unsafe fn new(
        address: usize,
        elements: usize,
        element: ElementType,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Buffer { address, elements, element, memory_kind: MemoryKind::Host, _owner: owner }
    }

    /// Wraps `elements` elements at `address` in GPU memory.
    ///
    /// # Safety
    /// Same as [`Buffer::new`], ordered by the GPU's compute stream: work queued there before a
    /// collective finishes before it, and the memory is freed there.
    pub unsafe fn on_gpu(
        address: usize,
        elements: usize,
        element: ElementType,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Buffer { address, elements, element, memory_kind: MemoryKind::Gpu, _owner: owner }
    }

    /// Owner of the memory.
    pub fn memory_kind(&self) -> MemoryKind {
        self.memory_kind
    }

    /// Address of the first element.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.element.bytes()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = if self.memory_kind == MemoryKind::Gpu { " on a GPU" } else { "" };
        write!(f, "{} {:?} at {:#x}{device}", self.elements, self.element, self.address)
    }
}
