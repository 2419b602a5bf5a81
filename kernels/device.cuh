// The implementation of compat.cuh for nvcc: the device's own types and instructions, from compute
// capability 8.0 on.
#pragma once

// Functions are declared `DEVICE inline`.
#define DEVICE __device__ __attribute__((always_inline))
#define KERNEL extern "C" __global__ void
// At most this many threads a block, and at least this many blocks on a multiprocessor at a time.
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
// Before a loop to unroll completely.
#define UNROLL _Pragma("unroll")
// Before a loop that must not be unrolled, because that would take too many registers.
#define KEEP_LOOP _Pragma("unroll 1")

DEVICE inline float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE inline uint32_t float_to_bits(float x) { return __float_as_uint(x); }

// Rounds two values to the nearest bf16, ties to even, the first in the low half; a NaN becomes
// 0x7fff.
DEVICE inline uint32_t round_to_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x, log2(x), 1/sqrt(x), 1/x by the special function unit: within 2 units in the last place.
DEVICE inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- global memory ------------------------------------------------------------------------------
// Indices count elements of T; an access of 16, 8 or 4 bytes starts at a multiple of as many bytes.

// Inline instructions, which the compiler does not split into smaller stores.
DEVICE inline void store_global8(void *at, const Bytes8 &v) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(at)), "r"(v.word[0]), "r"(v.word[1])
                 : "memory");
}
DEVICE inline void store_global16(void *at, const Bytes16 &v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(at)), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

template <class T> struct In {
    const T *at;
    DEVICE T load(int64_t i) const { return at[i]; }
    DEVICE Bytes16 load16(int64_t i) const {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(at + i));
        return Bytes16{{v.x, v.y, v.z, v.w}};
    }
    DEVICE Bytes8 load8(int64_t i) const {
        const uint2 v = __ldg(reinterpret_cast<const uint2 *>(at + i));
        return Bytes8{{v.x, v.y}};
    }
    DEVICE uint32_t load4(int64_t i) const { return __ldg(reinterpret_cast<const uint32_t *>(at + i)); }
    DEVICE In offset(int64_t i) const { return In{at + i}; }
    DEVICE bool is_aligned(int bytes) const { return reinterpret_cast<uint64_t>(at) % uint64_t(bytes) == 0; }
    DEVICE bool is_null() const { return at == nullptr; }
};

template <class T> struct Out {
    T *at;
    DEVICE void store(int64_t i, T v) const { at[i] = v; }
    DEVICE void store16(int64_t i, Bytes16 v) const {
        store_global16(at + i, v);
    }
    DEVICE void store8(int64_t i, Bytes8 v) const { store_global8(at + i, v); }
    DEVICE void store4(int64_t i, uint32_t v) const { *reinterpret_cast<uint32_t *>(at + i) = v; }
    DEVICE Out offset(int64_t i) const { return Out{at + i}; }
    DEVICE bool is_aligned(int bytes) const { return reinterpret_cast<uint64_t>(at) % uint64_t(bytes) == 0; }
    DEVICE bool is_null() const { return at == nullptr; }
};

template <class T> struct InOut {
    T *at;
    DEVICE T load(int64_t i) const { return at[i]; }
    DEVICE Bytes16 load16(int64_t i) const {
        const uint4 v = *reinterpret_cast<const uint4 *>(at + i);
        return Bytes16{{v.x, v.y, v.z, v.w}};
    }
    DEVICE Bytes8 load8(int64_t i) const {
        const uint2 v = *reinterpret_cast<const uint2 *>(at + i);
        return Bytes8{{v.x, v.y}};
    }
    DEVICE uint32_t load4(int64_t i) const { return *reinterpret_cast<const uint32_t *>(at + i); }
    DEVICE void store(int64_t i, T v) const { at[i] = v; }
    DEVICE void store16(int64_t i, Bytes16 v) const {
        store_global16(at + i, v);
    }
    DEVICE void store8(int64_t i, Bytes8 v) const { store_global8(at + i, v); }
    DEVICE void store4(int64_t i, uint32_t v) const { *reinterpret_cast<uint32_t *>(at + i) = v; }
    DEVICE InOut offset(int64_t i) const { return InOut{at + i}; }
    DEVICE bool is_aligned(int bytes) const { return reinterpret_cast<uint64_t>(at) % uint64_t(bytes) == 0; }
    // Returns the same memory as values of another type.
    template <class U> DEVICE InOut<U> as() const { return InOut<U>{reinterpret_cast<U *>(at)}; }
    DEVICE bool is_null() const { return at == nullptr; }
};

// Returns memory by its address in a table; it has `count` elements of T.
template <class T> DEVICE inline In<T> in_at(uint64_t address, int64_t count) {
    return In<T>{static_cast<const T *>(__cvta_global_to_generic(address))};
}
template <class T> DEVICE inline InOut<T> in_out_at(uint64_t address, int64_t count) {
    return InOut<T>{static_cast<T *>(__cvta_global_to_generic(address))};
}

// ---- shared memory ------------------------------------------------------------------------------

template <class T> struct Shared {
    T *at;
    DEVICE T load(int i) const { return at[i]; }
    DEVICE void store(int i, T v) const { at[i] = v; }
    DEVICE Bytes16 load16(int i) const {
        const uint4 v = *reinterpret_cast<const uint4 *>(at + i);
        return Bytes16{{v.x, v.y, v.z, v.w}};
    }
    DEVICE void store16(int i, Bytes16 v) const {
        *reinterpret_cast<uint4 *>(at + i) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    }
    DEVICE Shared offset(int i) const { return Shared{at + i}; }
    template <class U> DEVICE Shared<U> as() const { return Shared<U>{reinterpret_cast<U *>(at)}; }
    DEVICE uint32_t address() const { return uint32_t(__cvta_generic_to_shared(at)); }
};

// Declares `name`: `count` values of T in shared memory, a compile-time constant.
#define SHARED(T, name, count)                                                                                         \
    __shared__ alignas(16) T name##_memory[count];                                                                     \
    Shared<T> name{name##_memory}

// Declares `name`: the shared memory whose size the launch sets.
#define DYNAMIC_SHARED(T, name)                                                                                        \
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];                                            \
    Shared<T> name{reinterpret_cast<T *>(dynamic_shared_memory)}

// ---- thread synchronization ---------------------------------------------------------------------

DEVICE inline void sync_block() { __syncthreads(); }
DEVICE inline void sync_warp() { __syncwarp(); }
DEVICE inline float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE inline float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE inline uint32_t shuffle(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE inline uint32_t shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// ---- tensor cores and asynchronous copies -------------------------------------------------------

// d += a · b for a of 16x16 and b of 16x8 bf16 values and d of 16x8 f32 sums, spread over the warp:
// PTX mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32.
DEVICE inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Like mma_16816, d = a · b.
DEVICE inline void mma_16816_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%10,%10,%10,%10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// Four 8x8 matrices of bf16; lane 8 m + i gives the address of row i of matrix m.
DEVICE inline void ldmatrix_x4(uint32_t (&r)[4], Shared<bf16> row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address())
                 : "memory");
}
// Like ldmatrix_x4, each matrix transposed.
DEVICE inline void ldmatrix_x4_transposed(uint32_t (&r)[4], Shared<bf16> row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address())
                 : "memory");
}

// Starts to copy 16 bytes from element i of global memory; if `there` is false zeros are written
// and nothing is read.
template <class T> DEVICE inline void copy_async16(Shared<T> to, In<T> from, int64_t i, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address()), "l"(from.at + i), "r"(bytes)
                 : "memory");
}
// Like copy_async16, 4 bytes.
template <class T> DEVICE inline void copy_async4(Shared<T> to, In<T> from, int64_t i, bool there) {
    int bytes = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to.address()), "l"(from.at + i), "r"(bytes) : "memory");
}
// Ends a group of copies.
DEVICE inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `groups` of this thread's groups are pending.
template <int groups> DEVICE inline void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }
