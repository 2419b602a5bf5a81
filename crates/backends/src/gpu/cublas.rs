//! Products on NVIDIA GPUs by cublasLtMatmul. The plan of each shape is cached; a shape is computed
//! the same way with and without accumulation. Not yet run on a GPU.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::gemm::{DeviceMatrix, Gemm, GemmElement};
use super::gemm_plans::{GemmLibrary, GemmPlans};
use super::{Arg, GEMM_WORKSPACE};
use crate::error::{Error, Result};
use crate::runtime::device_memory::requested;

/// Maximum number of cached plans, each of less than 2 KB.
const PLANS: usize = 4096;

/// A cuBLASLt handle for one stream.
pub(crate) struct Cublas {
    cublas_lt: CublasLt,
    workspace: CudaSlice<u8>,
    plans: GemmPlans<CublasLt>,
}

// SAFETY: cuBLASLt handles may be used from any thread, one at a time; a mutex guards this one.
unsafe impl Send for Cublas {}

/// A cuBLASLt handle.
struct CublasLt(sys::cublasLtHandle_t);

/// The descriptors of a product.
struct GemmDescriptors {
    operation: sys::cublasLtMatmulDesc_t,
    /// Layouts of A, B, C and D.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
}

impl Drop for GemmDescriptors {
    fn drop(&mut self) {
        // SAFETY: created by `GemmDescriptors::new` and destroyed only here; cuBLAS keeps the data
        // of launched work. A failure leaks a few bytes.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

fn cuda_type(element: GemmElement) -> sys::cudaDataType {
    match element {
        GemmElement::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        GemmElement::F32 => sys::cudaDataType_t::CUDA_R_32F,
        GemmElement::E4m3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
    }
}

impl GemmDescriptors {
    fn new(gemm: &Gemm) -> std::result::Result<Self, CublasError> {
        let layout = |matrix: &DeviceMatrix, element| {
            let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
            result::create_matrix_layout(cuda_type(element), rows, cols, matrix.leading as i64)
        };
        let elements = [gemm.operands, gemm.operands, gemm.result, gemm.result];
        // Sum in full f32 precision: TF32 would round the operands to ten bits.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut descriptors = GemmDescriptors {
            operation: result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?,
            layouts: [std::ptr::null_mut(); 4],
        };
        for (index, (matrix, element)) in [gemm.a, gemm.b, gemm.c, gemm.d].iter().zip(elements).enumerate() {
            descriptors.layouts[index] = layout(matrix, element)?;
        }
        use sys::cublasLtMatmulDescAttributes_t::{CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB};
        for (attribute, transposed) in
            [CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB].into_iter().zip(gemm.transposed)
        {
            // cublasOperation_t: 0 is not transposed, 1 is transposed.
            let operation = i32::from(transposed);
            // SAFETY: the attribute is an i32 and the descriptor was created above.
            unsafe {
                result::set_matmul_desc_attribute(
                    descriptors.operation,
                    attribute,
                    (&raw const operation).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        if let Some(scales) = &gemm.scales {
            descriptors.scale_rows()?;
            descriptors.set_scales(scales)?;
        }
        Ok(descriptors)
    }

    /// Makes the product multiply by a scale for each row and column of the result.
    #[cfg(row_scales)]
    fn scale_rows(&self) -> std::result::Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
        for attribute in
            [Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE]
        {
            // SAFETY: the attribute is an i32 and the descriptor is alive.
            unsafe {
                result::set_matmul_desc_attribute(
                    self.operation,
                    attribute,
                    (&raw const mode).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        Ok(())
    }

    #[cfg(not(row_scales))]
    fn scale_rows(&self) -> std::result::Result<(), CublasError> {
        Err(CublasLt::UNSUPPORTED)
    }

    /// Sets the addresses of the scales of the next product.
    fn set_scales(&self, scales: &[Arg; 2]) -> std::result::Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let attributes = [
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        ];
        for (attribute, scales) in attributes.into_iter().zip(scales) {
            // SAFETY: the attribute is an address and the descriptor is alive.
            unsafe {
                result::set_matmul_desc_attribute(
                    self.operation,
                    attribute,
                    (&raw const scales.value).cast(),
                    size_of::<u64>(),
                )?;
            }
        }
        Ok(())
    }
}

/// Limits of the algorithms that cuBLAS ranks.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `Preference::new` and destroyed only here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Preference {
    fn new([a, b, c, d]: [u32; 4]) -> std::result::Result<Self, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref()?);
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the calls below pass each attribute with a value of its type.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, bytes) }
        };
        let workspace = GEMM_WORKSPACE as u64;
        set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            size_of::<u64>(),
        )?;
        // Split-K sums only in f32 and outside the result: in place they would depend on its old
        // values.
        let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        for (attribute, number) in [
            (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            set(attribute, (&raw const number).cast(), size_of::<u32>())?;
        }
        Ok(preference)
    }
}

/// Returns the memory for an answer of cuBLAS about an algorithm.
fn unanswered() -> sys::cublasLtMatmulHeuristicResult_t {
    sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

impl GemmLibrary for CublasLt {
    type Description = GemmDescriptors;
    type Algorithm = sys::cublasLtMatmulAlgo_t;
    type Error = CublasError;
    const UNSUPPORTED: CublasError = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);

    fn describe(&self, gemm: &Gemm) -> std::result::Result<GemmDescriptors, CublasError> {
        GemmDescriptors::new(gemm)
    }

    fn ranking(
        &self,
        descriptors: &GemmDescriptors,
        alignments: [u32; 4],
        most: usize,
    ) -> std::result::Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = Preference::new(alignments)?;
        let [a, b, c, d] = descriptors.layouts;
        let (mut algorithms, mut count) = (vec![unanswered(); most], 0);
        // SAFETY: all handles are alive, and cuBLAS writes at most `most` answers and their number.
        let ranked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.0,
                descriptors.operation,
                a,
                b,
                c,
                d,
                preference.0,
                most as i32,
                algorithms.as_mut_ptr(),
                &raw mut count,
            )
        };
        match ranked.result() {
            Ok(()) => algorithms.truncate(count as usize),
            Err(error) if error == Self::UNSUPPORTED => algorithms.clear(),
            Err(error) => return Err(error),
        }
        let usable = algorithms.into_iter().filter(|result| result.state.result().is_ok());
        Ok(usable.map(|result| result.algo).collect())
    }

    fn is_supported(&self, descriptors: &GemmDescriptors, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let ([a, b, c, d], mut reply) = (descriptors.layouts, unanswered());
        // SAFETY: all handles are alive, and cuBLAS writes one answer. It does not check
        // alignments, but the algorithm was chosen for the same ones.
        let checked = unsafe {
            sys::cublasLtMatmulAlgoCheck(self.0, descriptors.operation, a, b, c, d, algorithm, &raw mut reply)
        };
        checked.result().is_ok() && reply.workspaceSize <= GEMM_WORKSPACE
    }
}

/// Returns whether the library multiplies codes of e4m3 by scales of their rows on GPUs of this
/// compute capability: from CUDA 12.9 on, on Hopper alone ("FP8 Data Types Usage" of its manual).
pub(super) fn scales_rows(capability: (i32, i32)) -> bool {
    // SAFETY: the function has no arguments and reads a constant.
    cfg!(row_scales) && capability == (9, 0) && unsafe { sys::cublasLtGetVersion() } >= 120_900
}

impl Cublas {
    /// # Errors
    /// Fails if cuBLAS does not start, or no memory is available for its workspace.
    pub(super) fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let failed = |error: String| Error::of_device("cannot start cuBLAS", &error);
        // SAFETY: algorithms write the workspace before they read it.
        let workspace = requested(GEMM_WORKSPACE, || {
            unsafe { stream.alloc::<u8>(GEMM_WORKSPACE) }.map_err(|error| failed(error.to_string()))
        })?;
        let handle = result::create_handle().map_err(|error| failed(format!("{error:?}")))?;
        Ok(Cublas { cublas_lt: CublasLt(handle), workspace, plans: GemmPlans::new(PLANS) })
    }

    /// Multiplies from now on by the algorithms at `index` of cuBLAS's ranking, from 0.
    pub(crate) fn choose_algorithm(&mut self, index: usize) {
        self.plans.choose_algorithm(index);
    }

    /// Launches the product on `stream`.
    ///
    /// # Errors
    /// Fails if cuBLAS has no algorithm for it, or does not launch it.
    pub(super) fn multiply(&mut self, stream: &Arc<CudaStream>, gemm: &Gemm) -> Result<()> {
        let failed = |error: CublasError| {
            let size = gemm.size();
            Error::of_device(format!("cannot multiply matrices, m, n, k of {size:?}"), &format!("{error:?}"))
        };
        let plan = self.plans.plan(&self.cublas_lt, gemm).map_err(failed)?;
        // Products of a shape differ in their scales.
        gemm.scales.iter().try_for_each(|scales| plan.description.set_scales(scales)).map_err(failed)?;
        let [a, b, c, d] = plan.description.layouts;
        let (workspace, _) = self.workspace.device_ptr(stream);
        // SAFETY: the tensors behind `Gemm` live until the earlier work on this stream is done; the
        // layouts describe them; all work with the workspace is on this stream.
        unsafe {
            result::matmul(
                self.cublas_lt.0,
                plan.description.operation,
                (&raw const gemm.alpha).cast(),
                (&raw const gemm.beta).cast(),
                gemm.a.arg.value as *const c_void,
                a,
                gemm.b.arg.value as *const c_void,
                b,
                gemm.c.arg.value as *const c_void,
                c,
                gemm.d.arg.value as *mut c_void,
                d,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                GEMM_WORKSPACE,
                stream.cu_stream().cast(),
            )
        }
        .map_err(failed)
    }
}
