//! Kernel arguments: addresses of tensors with their access mode, and numbers.
//!
//! The types mirror the kernels' own parameters (`kernels/compat.cuh`): the functions that
//! `build.rs` generates from the signatures take them, so that an argument of another type does not
//! compile.

use std::marker::PhantomData;

use candle_core::{CpuStorage, Storage, Tensor};
use half::bf16;

use super::held::hold;
use crate::column_view::ColumnView;
use crate::error::{Error, Result};

/// An argument of a launch, common to all drivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arg {
    /// The address, or the bits of a number.
    pub value: u64,
    /// Number of byte ranges that the kernel may access from the address on; 0 for a number.
    pub rows: u64,
    /// Bytes of a range.
    pub row_bytes: u64,
    /// Bytes from the start of one range to that of the next.
    pub pitch: u64,
    /// Bytes of the number, or of an address.
    pub size: usize,
    /// Bytes that the launch reads and writes at the address.
    pub moved: u64,
    /// True if the launch writes there.
    pub is_written: bool,
}

impl Arg {
    /// A null pointer.
    const NONE: Arg = Arg { value: 0, rows: 0, row_bytes: 0, pitch: 0, size: 8, moved: 0, is_written: false };
}

/// An element type that kernels support.
pub trait KernelElement: candle_core::WithDType {
    /// Returns the elements of a CPU tensor of this type.
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    /// Returns the GPU address of the elements of a tensor of this type.
    #[cfg(feature = "cuda")]
    fn gpu_address(storage: &candle_core::CudaStorage) -> Option<u64>;
}

/// A number passed to a kernel by value.
pub(crate) trait KernelValue {
    /// Returns the number's bits as an argument.
    fn arg(self) -> Arg;
}

macro_rules! elements {
    ($($type:ty: $variant:ident),*) => {$(
        impl KernelElement for $type {
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }

            #[cfg(feature = "cuda")]
            fn gpu_address(storage: &candle_core::CudaStorage) -> Option<u64> {
                use candle_core::backend::BackendStorage;
                use candle_core::cuda_backend::{CudaStorageSlice, cudarc::driver::DevicePtr};
                match &storage.slice {
                    CudaStorageSlice::$variant(values) => {
                        Some(values.device_ptr(&storage.device().cuda_stream()).0)
                    }
                    _ => None,
                }
            }
        }
    )*};
}
elements!(f32: F32, bf16: BF16, f64: F64, u8: U8, u32: U32, i64: I64);

macro_rules! values {
    ($($type:ty: $bits:expr),*) => {$(
        impl KernelValue for $type {
            fn arg(self) -> Arg {
                let bits: fn($type) -> u64 = $bits;
                Arg { value: bits(self), size: size_of::<$type>(), ..Arg::NONE }
            }
        }
    )*};
}
values!(
    f32: |x| u64::from(x.to_bits()),
    f64: |x| x.to_bits(),
    u32: |x| u64::from(x),
    i32: |x| u64::from(x.cast_unsigned()),
    u64: |x| x,
    i64: |x| x.cast_unsigned()
);

/// The address of a tensor's elements, valid as long as the tensor lives.
#[derive(Debug, Clone, Copy)]
struct ElementAddress<'a, T> {
    arg: Arg,
    of: PhantomData<(&'a Tensor, T)>,
}

impl<T: KernelElement> ElementAddress<'_, T> {
    const NONE: Self = ElementAddress { arg: Arg::NONE, of: PhantomData };

    /// Returns `rows` rows of `row_bytes` bytes, `pitch` bytes apart.
    fn new(value: u64, rows: u64, row_bytes: u64, pitch: u64) -> Self {
        let arg = Arg { value, rows, row_bytes, pitch, moved: rows * row_bytes, ..Arg::NONE };
        ElementAddress { arg, of: PhantomData }
    }

    /// Returns all elements of a contiguous tensor.
    fn all(tensor: &Tensor) -> Result<Self> {
        let len = tensor.elem_count() as u64 * size_of::<T>() as u64;
        let value = address::<T>(tensor)?;
        hold(value, tensor);
        Ok(Self::new(value, 1, len, len))
    }

    /// Returns columns of a contiguous matrix.
    fn columns(view: &ColumnView<'_>) -> Result<Self> {
        let (rows, width) = view.tensor.dims2()?;
        let bytes = |elements: usize| elements as u64 * size_of::<T>() as u64;
        let value = address::<T>(view.tensor)? + bytes(view.start);
        hold(value, view.tensor);
        Ok(Self::new(value, rows as u64, bytes(view.len), bytes(width)))
    }
}

/// Returns the address of a contiguous tensor of `T`, on any device.
fn address<T: KernelElement>(tensor: &Tensor) -> Result<u64> {
    let refuse = |why: &str| {
        let description =
            format!("found {:?} of shape {:?}, wanted {:?}", tensor.dtype(), tensor.dims(), T::DTYPE);
        Error::internal(format!("an argument of a kernel is {why}")).because(description)
    };
    let (storage, layout) = tensor.storage_and_layout();
    let (start, _) = layout.contiguous_offsets().ok_or_else(|| refuse("not contiguous"))?;
    let base = match &*storage {
        Storage::Cpu(storage) => {
            T::slice(storage).ok_or_else(|| refuse("of another type"))?.as_ptr().expose_provenance() as u64
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => T::gpu_address(storage).ok_or_else(|| refuse("of another type"))?,
        _ => return Err(refuse("on another device")),
    };
    Ok(base + (start * size_of::<T>()) as u64)
}

macro_rules! pointers {
    ($($(#[$doc:meta])* $name:ident: $times:literal, $is_written:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name<'a, T>(ElementAddress<'a, T>);

        #[allow(dead_code, reason = "every kind of pointer is made in the same ways")]
        impl<'a, T: KernelElement> $name<'a, T> {
            /// Returns all elements of a contiguous tensor of any shape.
            ///
            /// # Errors
            /// Fails if the tensor is not contiguous or of another dtype.
            pub fn all(tensor: &'a Tensor) -> Result<Self> {
                Ok($name(ElementAddress::all(tensor)?))
            }

            /// Returns columns of a contiguous matrix `[rows, width]`.
            ///
            /// # Errors
            /// Fails if the tensor is not a contiguous matrix or of another dtype.
            pub fn columns(view: &ColumnView<'a>) -> Result<Self> {
                Ok($name(ElementAddress::columns(view)?))
            }

            /// Returns all elements like [`Self::all`], or a null pointer without a tensor.
            ///
            /// # Errors
            /// Fails if the tensor is not contiguous or of another dtype.
            pub fn optional(tensor: Option<&'a Tensor>) -> Result<Self> {
                tensor.map_or(Ok($name(ElementAddress::NONE)), Self::all)
            }

            /// Returns the same argument for a launch that accesses only `elements` elements.
            pub fn touching(self, elements: usize) -> Self {
                let arg = Arg { moved: (elements * size_of::<T>()) as u64, ..self.0.arg };
                $name(ElementAddress { arg, ..self.0 })
            }

            /// Returns the argument of a launch.
            pub fn arg(self) -> Arg {
                Arg { moved: $times * self.0.arg.moved, is_written: $is_written, ..self.0.arg }
            }
        }
    )*};
}
pointers!(
    /// A tensor that a kernel reads.
    In: 1, false;
    /// A tensor that a kernel writes, every element once, without reading it.
    Out: 1, true;
    /// A tensor that a kernel reads and writes in place.
    InOut: 2, true;
);
