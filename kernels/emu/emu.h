// The body of compat.cuh for the host: the same names, each access to memory checked.
//
// A CUDA thread is a fiber of one host thread (emu.cpp): it runs until it waits for others. emu.cpp
// lists the checks beside their code. The state is per host thread, so tests can run concurrently.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define DEVICE
#define KERNEL extern "C" void
#define BOUNDS(threads, blocks)
#define UNROLL
#define KEEP_LOOP

namespace emu {

struct Index {
    uint32_t x, y, z;
};

// The memory that a launch allows a pointer to access: `rows` runs of `row_bytes` bytes, `pitch`
// bytes apart.
struct Window {
    unsigned char *base;
    uint64_t rows, row_bytes, pitch;
    // For each byte 1 + the number of the thread (over the whole grid) that wrote it; null for
    // read-only memory.
    uint32_t *writer;
    bool may_write, may_read, once;
    // Index of the argument in the launch, or -1 for memory with its address in a table.
    int argument;
};

// Indices of the fiber that runs now, and of its block.
struct Running {
    Index thread, block, block_dim, grid_dim;
};
extern thread_local Running running;

// The window of memory with its address in a table: of the table's length, the same for all
// threads.
const Window *window_at(uint64_t address, size_t bytes, bool write);
void on_load(const Window *window, const void *at, size_t bytes);
void on_store(const Window *window, const void *at, size_t bytes);
void on_shared_load(const void *at, size_t bytes);
void on_shared_store(const void *at, size_t bytes);
// The memory of the declaration number `site`: the same for all threads of a block.
void *shared_memory(int site, size_t bytes);
void *dynamic_shared_memory();
uint32_t shared_offset(const void *at);

void sync_block();
void sync_warp();
uint32_t shuffle(uint32_t bits, int lane);
void mma(float *d, const uint32_t *a, const uint32_t *b);
void load_matrices(uint32_t *registers, const void *row, bool transposed);
void copy_async(void *to, const Window *window, const void *from, size_t bytes, bool there);
void copy_async_commit();
void copy_async_wait(int groups);

// Several declarations of one kernel get different numbers; those of different kernels may share
// them.
template <class T> T *shared_array(int site, size_t count) { return static_cast<T *>(shared_memory(site, count * sizeof(T))); }

} // namespace emu

#define threadIdx (emu::running.thread)
#define blockIdx (emu::running.block)
#define blockDim (emu::running.block_dim)
#define gridDim (emu::running.grid_dim)

inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline uint32_t round_to_bf16(float low, float high) {
    auto round = [](float x) -> uint32_t {
        uint32_t bits = float_to_bits(x);
        return x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    };
    return round(low) | round(high) << 16;
}
// The value that instructions with .ftz use for a subnormal number: zero of the same sign.
inline float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline float fast_exp2(float x) { return flush(exp2f(flush(x))); }
inline float fast_reciprocal(float x) { return flush(1.0f / flush(x)); }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }

template <class T> struct In {
    const T *at;
    const emu::Window *window;
    T load(int64_t i) const {
        emu::on_load(window, at + i, sizeof(T));
        return at[i];
    }
    Bytes16 load16(int64_t i) const {
        Bytes16 v;
        emu::on_load(window, at + i, 16);
        memcpy(&v, at + i, 16);
        return v;
    }
    Bytes8 load8(int64_t i) const {
        Bytes8 v;
        emu::on_load(window, at + i, 8);
        memcpy(&v, at + i, 8);
        return v;
    }
    uint32_t load4(int64_t i) const {
        uint32_t v;
        emu::on_load(window, at + i, 4);
        memcpy(&v, at + i, 4);
        return v;
    }
    In offset(int64_t i) const { return In{at + i, window}; }
    bool is_aligned(int bytes) const { return reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes) == 0; }
    bool is_null() const { return at == nullptr; }
};

template <class T> struct Out {
    T *at;
    const emu::Window *window;
    void store(int64_t i, T v) const {
        emu::on_store(window, at + i, sizeof(T));
        at[i] = v;
    }
    void store16(int64_t i, Bytes16 v) const {
        emu::on_store(window, at + i, 16);
        memcpy(static_cast<void *>(at + i), &v, 16);
    }
    void store8(int64_t i, Bytes8 v) const {
        emu::on_store(window, at + i, 8);
        memcpy(static_cast<void *>(at + i), &v, 8);
    }
    void store4(int64_t i, uint32_t v) const {
        emu::on_store(window, at + i, 4);
        memcpy(static_cast<void *>(at + i), &v, 4);
    }
    Out offset(int64_t i) const { return Out{at + i, window}; }
    bool is_aligned(int bytes) const { return reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes) == 0; }
    bool is_null() const { return at == nullptr; }
};

template <class T> struct InOut {
    T *at;
    const emu::Window *window;
    T load(int64_t i) const {
        emu::on_load(window, at + i, sizeof(T));
        return at[i];
    }
    Bytes16 load16(int64_t i) const {
        Bytes16 v;
        emu::on_load(window, at + i, 16);
        memcpy(&v, at + i, 16);
        return v;
    }
    void store(int64_t i, T v) const {
        emu::on_store(window, at + i, sizeof(T));
        at[i] = v;
    }
    void store16(int64_t i, Bytes16 v) const {
        emu::on_store(window, at + i, 16);
        memcpy(static_cast<void *>(at + i), &v, 16);
    }
    Bytes8 load8(int64_t i) const {
        Bytes8 v;
        emu::on_load(window, at + i, 8);
        memcpy(&v, at + i, 8);
        return v;
    }
    uint32_t load4(int64_t i) const {
        uint32_t v;
        emu::on_load(window, at + i, 4);
        memcpy(&v, at + i, 4);
        return v;
    }
    void store8(int64_t i, Bytes8 v) const {
        emu::on_store(window, at + i, 8);
        memcpy(static_cast<void *>(at + i), &v, 8);
    }
    void store4(int64_t i, uint32_t v) const {
        emu::on_store(window, at + i, 4);
        memcpy(static_cast<void *>(at + i), &v, 4);
    }
    InOut offset(int64_t i) const { return InOut{at + i, window}; }
    bool is_aligned(int bytes) const { return reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes) == 0; }
    template <class U> InOut<U> as() const { return InOut<U>{reinterpret_cast<U *>(at), window}; }
    bool is_null() const { return at == nullptr; }
};

template <class T> In<T> in_at(uint64_t address, int64_t count) {
    return In<T>{reinterpret_cast<const T *>(address), emu::window_at(address, size_t(count) * sizeof(T), false)};
}
template <class T> InOut<T> in_out_at(uint64_t address, int64_t count) {
    return InOut<T>{reinterpret_cast<T *>(address), emu::window_at(address, size_t(count) * sizeof(T), true)};
}

template <class T> struct Shared {
    T *at;
    T load(int i) const {
        emu::on_shared_load(at + i, sizeof(T));
        return at[i];
    }
    void store(int i, T v) const {
        emu::on_shared_store(at + i, sizeof(T));
        at[i] = v;
    }
    Bytes16 load16(int i) const {
        Bytes16 v;
        emu::on_shared_load(at + i, 16);
        memcpy(&v, at + i, 16);
        return v;
    }
    void store16(int i, Bytes16 v) const {
        emu::on_shared_store(at + i, 16);
        memcpy(static_cast<void *>(at + i), &v, 16);
    }
    Shared offset(int i) const { return Shared{at + i}; }
    template <class U> Shared<U> as() const { return Shared<U>{reinterpret_cast<U *>(at)}; }
    uint32_t address() const { return emu::shared_offset(at); }
};

#define SHARED(T, name, count) Shared<T> name{emu::shared_array<T>(__COUNTER__, count)}
#define DYNAMIC_SHARED(T, name) Shared<T> name{static_cast<T *>(emu::dynamic_shared_memory())}

inline void sync_block() { emu::sync_block(); }
inline void sync_warp() { emu::sync_warp(); }
inline uint32_t lane_of_thread() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}
inline uint32_t shuffle(uint32_t x, int lane) { return emu::shuffle(x, lane % 32); }
inline uint32_t shuffle_xor(uint32_t x, int mask) { return emu::shuffle(x, int(lane_of_thread()) ^ mask); }
inline float shuffle(float x, int lane) { return bits_to_float(shuffle(float_to_bits(x), lane)); }
inline float shuffle_xor(float x, int mask) { return bits_to_float(shuffle_xor(float_to_bits(x), mask)); }

inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emu::mma(d, a, b); }
inline void mma_16816_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    emu::mma(d, a, b);
}
inline void ldmatrix_x4(uint32_t (&r)[4], Shared<bf16> row) { emu::load_matrices(r, row.at, false); }
inline void ldmatrix_x4_transposed(uint32_t (&r)[4], Shared<bf16> row) { emu::load_matrices(r, row.at, true); }

template <class T> void copy_async16(Shared<T> to, In<T> from, int64_t i, bool there) {
    emu::copy_async(to.at, from.window, from.at + i, 16, there);
}
template <class T> void copy_async4(Shared<T> to, In<T> from, int64_t i, bool there) {
    emu::copy_async(to.at, from.window, from.at + i, 4, there);
}
inline void copy_async_commit() { emu::copy_async_commit(); }
template <int groups> void copy_async_wait() { emu::copy_async_wait(groups); }
