//! Memory of a CPU tensor: read it as a slice, write it in place, wrap a `Vec` as a tensor without
//! a copy.
//!
//! The CPU implementation of every op works on plain slices, and only this module accesses candle's
//! storage. Activations are `f32` or `bf16` ([`FloatElement`]). On the CPU `bf16` is a storage
//! format, except for products on processors with bf16 instructions: other ops widen their inputs,
//! sum in `f32` and round once (candle's own `bf16` ops sum in `bf16`).

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::error::{Error, Result};
use crate::quant::DequantizedElement;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::buffer::{Buffer, ElementType};

/// A type whose values can be read and written in place.
pub trait PlainElement: candle_core::WithDType + Default + Send + Sync {
    /// Allocates zeros without touching them, so that the threads that fill them touch the pages.
    fn zeros(len: usize) -> Vec<Self>;
    /// Elements of a storage of this type; none for another type.
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    /// Same as [`PlainElement::slice`], for writing.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

/// An element type of activations and weights that the CPU ops support.
pub trait FloatElement: PlainElement + DequantizedElement {
    /// The value as f32, which is exact.
    fn widen(self) -> f32;
}

macro_rules! plain {
    ($type:ty, $variant:ident, $zeros:expr) => {
        impl PlainElement for $type {
            fn zeros(len: usize) -> Vec<Self> {
                $zeros(len)
            }
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}
plain!(f32, F32, |len| vec![0.0; len]);
plain!(bf16, BF16, |len| vec![0u16; len].reinterpret_into());
plain!(u8, U8, |len| vec![0; len]);
plain!(u32, U32, |len| vec![0; len]);

impl FloatElement for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl FloatElement for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Runs `$body` with `$elem` bound to the element type of `$dtype`.
#[macro_export]
macro_rules! with_elem {
    ($dtype:expr, $elem:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $elem = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $elem = half::bf16;
                $body
            }
            other => Err($crate::runtime::cpu_tensor::unsupported(other)),
        }
    };
}
pub use with_elem;

/// Error of an op for an unsupported element type.
pub fn unsupported(dtype: DType) -> Error {
    Error::internal(format!("an op received a tensor of dtype {dtype:?}"))
        .because("the CPU ops support f32 and bf16")
}

thread_local! {
    /// Addresses of the storages that this thread reads; only in debug builds.
    static READING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Marks that this thread reads a storage, for the assertion in [`update`].
struct ReadMark(usize);

impl ReadMark {
    fn new(storage: &Storage) -> Self {
        let address = std::ptr::from_ref(storage).addr();
        if cfg!(debug_assertions) {
            READING.with_borrow_mut(|reading| reading.push(address));
        }
        ReadMark(address)
    }

    /// Returns true if this thread reads the storage of `tensor`, in a debug build.
    fn covers(tensor: &Tensor) -> bool {
        let (guard, _) = tensor.storage_and_layout();
        let address = std::ptr::from_ref::<Storage>(&guard).addr();
        READING.with_borrow(|reading| reading.contains(&address))
    }
}

impl Drop for ReadMark {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            READING.with_borrow_mut(|reading| {
                if let Some(at) = reading.iter().rposition(|address| *address == self.0) {
                    reading.swap_remove(at);
                }
            });
        }
    }
}

/// A read guard on the elements of a contiguous CPU tensor.
pub struct Elements<G, T> {
    guard: G,
    _mark: ReadMark,
    start: usize,
    len: usize,
    elem: PhantomData<T>,
}

impl<G: Deref<Target = Storage>, T: PlainElement> Deref for Elements<G, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        let values = match &*self.guard {
            Storage::Cpu(storage) => T::slice(storage),
            _ => None,
        };
        // `read` checked device and dtype; only a swapped storage would give an empty slice.
        values.map_or(&[], |values| &values[self.start..self.start + self.len])
    }
}

/// Elements of `tensor`, which must be contiguous, on the CPU and of type `T`.
///
/// # Errors
/// Internal error if it is not.
pub fn read<T: PlainElement>(tensor: &Tensor) -> Result<Elements<impl Deref<Target = Storage> + '_, T>> {
    let (guard, layout) = tensor.storage_and_layout();
    let (start, end) = contiguous(layout)?;
    match &*guard {
        Storage::Cpu(storage) if T::slice(storage).is_some() => {}
        _ => return Err(mismatch(tensor, T::DTYPE)),
    }
    let mark = ReadMark::new(&guard);
    Ok(Elements { guard, _mark: mark, start, len: end - start, elem: PhantomData })
}

/// Lets `write` change the elements of the contiguous CPU tensor `tensor` in place. Other tensors
/// that `write` reads must not share its storage: that would deadlock, which debug builds assert.
///
/// # Errors
/// The tensor is not contiguous, on another device or of another type.
pub fn update<T: PlainElement, R>(tensor: &TensorMut, write: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    /// The closure before the call, and its result afterwards.
    struct Write<T, F, R>(Mutex<(Option<F>, Option<R>)>, PhantomData<fn(T)>);
    impl<T: PlainElement, R, F: FnOnce(&mut [T]) -> R> InplaceOp1 for Write<T, F, R> {
        fn name(&self) -> &'static str {
            "write"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
            let refuse = |why: &str| candle_core::Error::Msg(why.into());
            let (start, end) = layout.contiguous_offsets().ok_or_else(|| refuse("not contiguous"))?;
            let values = T::slice_mut(storage).ok_or_else(|| refuse("another dtype"))?;
            let mut cell = self.0.lock().map_err(|_| refuse("a panic while writing"))?;
            let write = cell.0.take().ok_or_else(|| refuse("called twice"))?;
            cell.1 = Some(write(&mut values[start..end]));
            Ok(())
        }
    }
    debug_assert!(!ReadMark::covers(tensor), "a tensor is written while its storage is read: {tensor:?}");
    let op = Write(Mutex::new((Some(write), None)), PhantomData);
    tensor.inplace_op1(&op).map_err(|error| mismatch(tensor, T::DTYPE).because(error.to_string()))?;
    let result = op.0.into_inner().map_err(|_| Error::internal("a panic while writing a tensor"))?.1;
    result.ok_or_else(|| Error::internal("a tensor was not written"))
}

/// Same as [`update`], in f32 for any dtype of `tensor`: a bf16 tensor is copied and rounded once.
/// For few elements.
///
/// # Errors
/// Same as [`update`].
pub fn update_in_f32<R>(tensor: &TensorMut, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    if tensor.dtype() != DType::BF16 {
        return update(tensor, write);
    }
    update(tensor, |values: &mut [bf16]| {
        let mut wide: Vec<f32> = values.iter().map(|value| value.widen()).collect();
        let result = write(&mut wide);
        values.iter_mut().zip(wide).for_each(|(to, value)| *to = bf16::nearest(value));
        result
    })
}

/// Wraps `values` as a CPU tensor, without a copy.
///
/// # Errors
/// The shape has another number of elements.
pub fn tensor<T: PlainElement, S: Into<Shape>>(values: Vec<T>, shape: S) -> Result<Tensor> {
    let shape = shape.into();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Allocates a `Vec` of `len` elements that the caller writes in full before reading.
pub fn unwritten<T: FloatElement>(len: usize) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: `f32` and `bf16` have no invalid bit patterns and no destructor, and every op that
    // calls this writes each element (a product with `accumulate = false`, a row loop over the
    // whole output) before reading it.
    #[allow(clippy::uninit_vec)]
    unsafe {
        values.set_len(len);
    }
    values
}

/// Memory of a contiguous tensor, for collectives. It stays valid while the result lives; writes to
/// it change the tensor.
///
/// # Errors
/// The tensor is not contiguous, or its dtype cannot be sent.
pub fn memory(tensor: &Tensor) -> Result<Buffer> {
    let (guard, layout) = tensor.storage_and_layout();
    let (start, end) = contiguous(layout)?;
    let (element, base) = match &*guard {
        Storage::Cpu(CpuStorage::U8(values)) => (ElementType::U8, values.as_ptr() as usize),
        Storage::Cpu(CpuStorage::BF16(values)) => (ElementType::Bf16, values.as_ptr() as usize),
        Storage::Cpu(CpuStorage::F32(values)) => (ElementType::F32, values.as_ptr() as usize),
        Storage::Cpu(CpuStorage::F64(values)) => (ElementType::F64, values.as_ptr() as usize),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => return gpu_memory(tensor, storage, start..end),
        _ => return Err(mismatch(tensor, DType::F32)),
    };
    let address = base + start * element.bytes();
    // SAFETY: the clone keeps the storage alive, whose memory does not move; `start..end` is inside
    // it. The strategies' schedule keeps others off it during a collective.
    Ok(unsafe { Buffer::new(address, end - start, element, Arc::new(tensor.clone())) })
}

/// Same as [`memory`], for a tensor on a GPU.
#[cfg(feature = "cuda")]
fn gpu_memory(
    tensor: &Tensor,
    storage: &candle_core::CudaStorage,
    range: std::ops::Range<usize>,
) -> Result<Buffer> {
    use candle_core::backend::BackendStorage;
    use candle_core::cuda_backend::CudaStorageSlice as Slice;
    use candle_core::cuda_backend::cudarc::driver::DevicePtr;
    let stream = storage.device().cuda_stream();
    let (element, base) = match &storage.slice {
        Slice::U8(values) => (ElementType::U8, values.device_ptr(&stream).0),
        Slice::BF16(values) => (ElementType::Bf16, values.device_ptr(&stream).0),
        Slice::F32(values) => (ElementType::F32, values.device_ptr(&stream).0),
        Slice::F64(values) => (ElementType::F64, values.device_ptr(&stream).0),
        _ => return Err(mismatch(tensor, DType::F32)),
    };
    let address = base as usize + range.start * element.bytes();
    // SAFETY: the clone keeps the storage alive, which candle uses and frees on its one stream of
    // the device; the range is inside it.
    Ok(unsafe { Buffer::on_gpu(address, range.len(), element, Arc::new(tensor.clone())) })
}

/// First `len` values of `held`, which grows if needed; the caller must write them before reading.
pub fn first<T: FloatElement>(held: &mut Vec<T>, len: usize) -> &mut [T] {
    if held.len() < len {
        *held = unwritten(len);
    }
    &mut held[..len]
}

fn contiguous(layout: &Layout) -> Result<(usize, usize)> {
    layout.contiguous_offsets().ok_or_else(|| {
        Error::internal("an op received a tensor that is not contiguous")
            .because(format!("layout {layout:?}"))
    })
}

fn mismatch(tensor: &Tensor, wanted: DType) -> Error {
    Error::internal(format!("an op requires a {wanted:?} tensor on the CPU")).because(format!(
        "found {:?} of shape {:?} on {:?}",
        tensor.dtype(),
        tensor.dims(),
        tensor.device().location()
    ))
}

/// The `(rows, columns)` of a two-dimensional tensor.
///
/// # Errors
/// The tensor has another number of dimensions.
pub fn dims2(tensor: &Tensor) -> Result<(usize, usize)> {
    Ok(tensor.dims2()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            assert!(value.widen() == value.to_f32() || value.is_nan() && value.widen().is_nan());
        }
    }

    #[test]
    fn update_writes_through_a_view() -> Result<()> {
        let flat = TensorMut::new(tensor(vec![0f32; 6], 6)?);
        let view = flat.narrow(0, 2, 3)?;
        update(&view, |values: &mut [f32]| values.fill(7.0))?;
        assert_eq!(&*read::<f32>(&flat)?, &[0., 0., 7., 7., 7., 0.]);
        assert!(read::<bf16>(&flat).is_err());
        Ok(())
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a tensor is written while its storage is read")]
    fn update_refuses_a_storage_that_is_read() {
        let flat = TensorMut::new(tensor(vec![0f32; 6], 6).unwrap());
        let (first, last) = (flat.narrow(0, 0, 3).unwrap(), flat.narrow(0, 3, 3).unwrap());
        let first = read::<f32>(&first).unwrap();
        update(&last, |last: &mut [f32]| last.copy_from_slice(&first)).unwrap();
    }

    #[test]
    fn update_follows_a_read_that_ended() -> Result<()> {
        let flat = TensorMut::new(tensor(vec![1f32; 6], 6)?);
        let sum: f32 = read::<f32>(&flat)?.iter().sum();
        update(&flat, |values: &mut [f32]| values.fill(sum))?;
        assert_eq!(&*read::<f32>(&flat)?, &[6.0; 6]);
        Ok(())
    }
}
