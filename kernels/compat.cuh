// The one header of the kernels: all device features that a kernel may use.
//
// It has two implementations. Under nvcc each name is the CUDA type or instruction itself; with
// KERNEL_EMU defined the same names run on the host (emu/emu.h), where every memory access is
// checked. So kernels never use a raw pointer: they access global memory through In, Out and InOut,
// and shared memory through Shared. The type of a parameter tells the host code how the kernel
// accesses it.
//
//   In<T>      read only                    Out<T>    every element is written once, and not read
//   InOut<T>   read and written in place    Shared<T> memory of the thread block
//
// in_at and in_out_at convert addresses in a table in global memory to the same types.
//
// Sums are computed in f32 and in a fixed order, without atomic operations on floats. Products and
// sums are fused only by an explicit fmaf: nvcc gets -fmad=false, and the host compiler the
// equivalent.
#pragma once
#include <cstdint>

// A bf16 value by its bits: a storage format, widened before any computation.
struct bf16 {
    uint16_t bits;
};

// Sixteen bytes, or eight, that are moved by one instruction.
struct alignas(16) Bytes16 {
    uint32_t word[4];
};
struct alignas(8) Bytes8 {
    uint32_t word[2];
};

#ifdef KERNEL_EMU
#include "emu/emu.h"
#else
#include "device.cuh"
#endif

// ---- shared by both implementations -------------------------------------------------------------

DEVICE inline float widen(float x) { return x; }
DEVICE inline float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

// Returns the value of type T nearest to x; ties go to the even one. In bf16 every NaN becomes the
// canonical one.
template <class T> DEVICE inline T nearest(float x);
template <> DEVICE inline float nearest<float>(float x) { return x; }
template <> DEVICE inline bf16 nearest<bf16>(float x) { return bf16{uint16_t(round_to_bf16(x, 0.0f))}; }

// Two bf16 values in one register, the first in the low half: the operand format of mma.
DEVICE inline uint32_t pack(float low, float high) { return round_to_bf16(low, high); }
DEVICE inline float low_half(uint32_t pair) { return bits_to_float(pair << 16); }
DEVICE inline float high_half(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

// Number of values of T in one 16-byte access.
template <class T> constexpr int PER16 = int(16 / sizeof(T));

// The i-th value of sixteen bytes.
template <class T> DEVICE inline float value_of(const Bytes16 &b, int i);
template <> DEVICE inline float value_of<float>(const Bytes16 &b, int i) { return bits_to_float(b.word[i]); }
template <> DEVICE inline float value_of<bf16>(const Bytes16 &b, int i) {
    uint32_t pair = b.word[i / 2];
    return i % 2 == 0 ? low_half(pair) : high_half(pair);
}

// Returns sixteen bytes of the values of `f(i)`, each rounded once.
template <class T, class F> DEVICE inline Bytes16 bytes_of(F f);
template <class T> struct Packer;
template <> struct Packer<float> {
    template <class F> DEVICE static inline Bytes16 of(F f) {
        Bytes16 b;
        UNROLL for (int i = 0; i < 4; i++) b.word[i] = float_to_bits(f(i));
        return b;
    }
};
template <> struct Packer<bf16> {
    template <class F> DEVICE static inline Bytes16 of(F f) {
        Bytes16 b;
        UNROLL for (int i = 0; i < 4; i++) b.word[i] = pack(f(2 * i), f(2 * i + 1));
        return b;
    }
};
template <class T, class F> DEVICE inline Bytes16 bytes_of(F f) { return Packer<T>::of(f); }

// Loads and widens the `count` values of T from index `at` on into the first of `to`. count is 1 or
// PER16<T>; for PER16<T> `at` is a multiple of 16 bytes.
template <class T, class M> DEVICE inline void load_some(float (&to)[PER16<T>], M from, int64_t at, int count) {
    if (count == 1) {
        to[0] = widen(from.load(at));
        return;
    }
    Bytes16 bytes = from.load16(at);
    UNROLL for (int i = 0; i < PER16<T>; i++) to[i] = value_of<T>(bytes, i);
}
// Rounds and stores values in the layout of load_some.
template <class T, class M> DEVICE inline void store_some(M to, int64_t at, const float (&values)[PER16<T>], int count) {
    if (count == 1)
        to.store(at, nearest<T>(values[0]));
    else
        to.store16(at, bytes_of<T>([&](int i) { return values[i]; }));
}

// Returns the sum over the lanes of a warp, in every lane, by a fixed tree.
DEVICE inline float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
}
DEVICE inline float warp_max(float x) {
    for (int distance = 16; distance > 0; distance /= 2) {
        float other = shuffle_xor(x, distance);
        x = other > x ? other : x;
    }
    return x;
}

// Returns the sum over a block of at most 32 warps, in every thread, by a fixed tree. `scratch`
// holds 32 values; the block may reuse it after the next barrier.
DEVICE inline float block_sum(float x, Shared<float> scratch) {
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    x = warp_sum(x);
    if (lane == 0) scratch.store(warp, x);
    sync_block();
    x = lane < warps ? scratch.load(lane) : 0.0f;
    return warp_sum(x);
}

// Returns the largest of x over the block, in every thread; a NaN is smaller than any number.
// `scratch` as in block_sum.
DEVICE inline float block_max(float x, Shared<float> scratch) {
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    x = warp_max(x);
    if (lane == 0) scratch.store(warp, x);
    sync_block();
    return warp_max(lane < warps ? scratch.load(lane) : x);
}

// Returns the sum over a block of THREADS threads, a power of two, in thread 0, by a fixed tree.
// `scratch` holds a value of each thread; the block may reuse it after the next barrier.
template <int THREADS> DEVICE inline double block_sum_f64(double x, Shared<double> scratch) {
    int thread = int(threadIdx.x);
    scratch.store(thread, x);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) scratch.store(thread, scratch.load(thread) + scratch.load(thread + half));
    }
    return thread == 0 ? scratch.load(0) : 0.0;
}

// Loads V neighbouring values from element i on, in accesses of 16 bytes (8 for four of bf16).
template <class T, int V, class M> DEVICE inline void load_values(float (&x)[V], M from, int64_t i) {
    if constexpr (sizeof(T) * V == 8) {
        Bytes8 b = from.load8(i);
        UNROLL for (int k = 0; k < V; k++) x[k] = k % 2 == 0 ? low_half(b.word[k / 2]) : high_half(b.word[k / 2]);
    } else {
        UNROLL for (int first = 0; first < V; first += PER16<T>) {
            Bytes16 b = from.load16(i + first);
            UNROLL for (int k = 0; k < PER16<T>; k++) x[first + k] = value_of<T>(b, k);
        }
    }
}
// Stores V neighbouring values, each rounded once.
template <class T, int V, class M> DEVICE inline void store_values(M to, int64_t i, const float (&x)[V]) {
    if constexpr (sizeof(T) * V == 8) {
        to.store8(i, Bytes8{{pack(x[0], x[1]), pack(x[2], x[3])}});
    } else {
        UNROLL for (int first = 0; first < V; first += PER16<T>)
            to.store16(i + first, bytes_of<T>([&](int k) { return x[first + k]; }));
    }
}

// Calls whole(column) for PER16<T> of `width` columns at a time, if rows are `aligned` to 16 bytes,
// else single(column): once for each column, in a block of THREADS threads.
template <int THREADS, class T, class W, class S>
DEVICE inline void over_columns(int width, bool aligned, W whole, S single) {
    constexpr int V = PER16<T>;
    for (int c = int(threadIdx.x) * V; c < width; c += THREADS * V) {
        if (aligned && c + V <= width) {
            whole(c);
        } else {
            for (int i = c; i < c + V && i < width; i++) single(i);
        }
    }
}

// ---- random numbers -----------------------------------------------------------------------------

// The hash of crates/runtime/src/runtime/rng.rs, bit-identical.
constexpr uint64_t GOLDEN_GAMMA = 0x9e3779b97f4a7c15ull;

// SplitMix64's finalizer (doi:10.1145/2660193.2660195) with a third round.
DEVICE inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z = (z ^ (z >> 31)) * 0xd6e8feb86659fd93ull;
    return z ^ (z >> 32);
}

// Returns the state of a part of a stream, such as that of a token.
DEVICE inline uint64_t part_of(uint64_t stream, uint64_t part) { return mix(stream + mix(part + GOLDEN_GAMMA)); }

// Returns the 64 bits at `index` of the stream with this state.
DEVICE inline uint64_t random_bits(uint64_t stream, uint64_t index) { return mix(stream ^ (index * GOLDEN_GAMMA)); }
