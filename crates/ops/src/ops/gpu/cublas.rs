//! Products on NVIDIA GPUs by cublasLtMatmul. The plan of each shape is cached, so that cuBLAS
//! selects an algorithm once, and a shape is computed the same way with and without accumulation.
//! Not yet run on a GPU.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::GEMM_WORKSPACE;
use super::gemm::{DeviceMatrix, Gemm, GemmElement};
use crate::error::{Error, Result};
use crate::runtime::device_memory::requested;

/// Maximum number of cached plans; a run with more row counts clears the cache.
const PLANS: usize = 4096;

/// A cuBLASLt handle for one stream.
pub(super) struct Cublas {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    plans: HashMap<GemmPlanKey, GemmPlan>,
}

// SAFETY: cuBLASLt handles may be used from any thread, one at a time; a mutex guards this one.
unsafe impl Send for Cublas {}

/// The inputs of cuBLAS's choice of an algorithm.
#[derive(PartialEq, Eq, Hash)]
struct GemmPlanKey {
    size: (usize, usize, usize),
    leading: [usize; 4],
    transposed: [bool; 2],
    elements: [GemmElement; 2],
    alignments: [u32; 4],
}

struct GemmPlan {
    operation: sys::cublasLtMatmulDesc_t,
    /// Layouts of A, B, C and D.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for GemmPlan {
    fn drop(&mut self) {
        // SAFETY: created by `GemmPlan::new` and destroyed only here; cuBLAS keeps the data of
        // launched work. A failure leaks a few bytes.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

/// Returns the largest power of two up to 256 that divides the matrix's address.
fn alignment(matrix: &DeviceMatrix) -> u32 {
    1 << matrix.arg.value.trailing_zeros().min(8)
}

fn cuda_type(element: GemmElement) -> sys::cudaDataType {
    match element {
        GemmElement::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        GemmElement::F32 => sys::cudaDataType_t::CUDA_R_32F,
    }
}

impl GemmPlanKey {
    fn of(gemm: &Gemm) -> Self {
        let matrices = [gemm.a, gemm.b, gemm.c, gemm.d];
        GemmPlanKey {
            size: gemm.size(),
            leading: matrices.map(|matrix| matrix.leading),
            transposed: gemm.transposed,
            elements: [gemm.operands, gemm.result],
            alignments: matrices.map(|matrix| alignment(&matrix)),
        }
    }
}

impl GemmPlan {
    fn new(
        handle: sys::cublasLtHandle_t,
        gemm: &Gemm,
        key: &GemmPlanKey,
    ) -> std::result::Result<Self, CublasError> {
        let layout = |matrix: &DeviceMatrix, element| {
            let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
            result::create_matrix_layout(cuda_type(element), rows, cols, matrix.leading as i64)
        };
        let elements = [gemm.operands, gemm.operands, gemm.result, gemm.result];
        // Sum in full f32 precision: TF32 would round the operands to ten bits.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = GemmPlan {
            operation: result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?,
            layouts: [std::ptr::null_mut(); 4],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        for (place, (matrix, element)) in [gemm.a, gemm.b, gemm.c, gemm.d].iter().zip(elements).enumerate() {
            plan.layouts[place] = layout(matrix, element)?;
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
                    plan.operation,
                    attribute,
                    (&raw const operation).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        plan.algorithm = choose(handle, &plan, key)?;
        Ok(plan)
    }
}

/// Returns the fastest algorithm by cuBLAS's heuristic.
fn choose(
    handle: sys::cublasLtHandle_t,
    plan: &GemmPlan,
    key: &GemmPlanKey,
) -> std::result::Result<sys::cublasLtMatmulAlgo_t, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let preference = result::create_matmul_pref()?;
    let set = |attribute, value: *const c_void, bytes| {
        // SAFETY: the calls below pass each attribute with a value of its type.
        unsafe { result::set_matmul_pref_attribute(preference, attribute, value, bytes) }
    };
    let workspace = GEMM_WORKSPACE as u64;
    // Split-K sums only in f32 and outside the result: in place they would depend on its old
    // values.
    let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let number = |value: &u32| (&raw const *value).cast::<c_void>();
    let [a, b, c, d] = key.alignments;
    let chosen = set(
        Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        (&raw const workspace).cast(),
        size_of::<u64>(),
    )
    .and_then(|()| set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, number(&reductions), 4))
    .and_then(|()| set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, number(&a), 4))
    .and_then(|()| set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, number(&b), 4))
    .and_then(|()| set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, number(&c), 4))
    .and_then(|()| set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, number(&d), 4))
    .and_then(|()| {
        let [a, b, c, d] = plan.layouts;
        // SAFETY: `GemmPlan::new` created all of them, and they are alive.
        unsafe { result::get_matmul_algo_heuristic(handle, plan.operation, a, b, c, d, preference) }
    });
    // SAFETY: created above and not used afterwards.
    let _ = unsafe { result::destroy_matmul_pref(preference) };
    Ok(chosen?.algo)
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
        Ok(Cublas { handle, workspace, plans: HashMap::new() })
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
        if self.plans.len() == PLANS {
            self.plans.clear();
        }
        let key = GemmPlanKey::of(gemm);
        if !self.plans.contains_key(&key) {
            let plan = GemmPlan::new(self.handle, gemm, &key).map_err(failed)?;
            self.plans.insert(GemmPlanKey::of(gemm), plan);
        }
        let plan = &self.plans[&key];
        let [a, b, c, d] = plan.layouts;
        let (workspace, _) = self.workspace.device_ptr(stream);
        // SAFETY: the tensors behind `Gemm` live until the earlier work on this stream is done; the
        // layouts describe them; all work with the workspace is on this stream.
        unsafe {
            result::matmul(
                self.handle,
                plan.operation,
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
