// Elementwise operations: sums of two tensors, products with a number, biases, DoRA's factors of
// columns, gathered rows. f32 inside, each result rounded once, so the results are bit-identical to
// crates/ops/src/ops/elementwise.rs, matmul.rs and dora.rs.
//
// Blocks have 256 threads. Accesses are 16 bytes (8 for bf16 beside f32) if addresses and pitches
// allow them.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// Groups of values that a thread takes in one launch over a whole tensor.
constexpr int GROUPS = 4;

// Values per access: 16 bytes of the wider type, or of bf16 if both are bf16.
template <class A, class B> constexpr int TOGETHER = sizeof(A) == 2 && sizeof(B) == 2 ? 8 : 4;

// For groups of V elements of this block's share of `count`, calls `compute(x, at)` and then stores
// x to `y`, with all loads before the first store. Calls `single(at)` for elements outside a whole
// group, or for all if addresses are not aligned.
template <class T, int V, class M, class C, class S>
DEVICE inline void over_tensor(M y, int64_t count, bool aligned, C compute, S single) {
    int64_t share = int64_t(blockIdx.x) * (THREADS * GROUPS * V);
    int64_t first = share + int(threadIdx.x) * V;
    if (aligned && share + THREADS * GROUPS * V <= count) {
        float x[GROUPS][V];
        UNROLL for (int g = 0; g < GROUPS; g++) compute(x[g], first + g * THREADS * V);
        UNROLL for (int g = 0; g < GROUPS; g++) store_values<T, V>(y, first + g * THREADS * V, x[g]);
        return;
    }
    int64_t end = share + THREADS * GROUPS * V < count ? share + THREADS * GROUPS * V : count;
    for (int64_t at = share + int(threadIdx.x); at < end; at += THREADS) single(at);
}

template <class D, class X> DEVICE inline void add_into(InOut<D> dst, In<X> x, int64_t count) {
    constexpr int V = TOGETHER<X, D>;
    over_tensor<D, V>(
        dst, count, dst.is_aligned(16) && x.is_aligned(16),
        [&](float(&sum)[V], int64_t at) {
            float values[V];
            load_values<D, V>(sum, dst, at);
            load_values<X, V>(values, x, at);
            UNROLL for (int i = 0; i < V; i++) sum[i] += values[i];
        },
        [&](int64_t at) { dst.store(at, nearest<D>(widen(dst.load(at)) + widen(x.load(at)))); });
}

template <class T> DEVICE inline void add(In<T> a, In<T> b, Out<T> y, int64_t count) {
    constexpr int V = PER16<T>;
    over_tensor<T, V>(
        y, count, a.is_aligned(16) && b.is_aligned(16) && y.is_aligned(16),
        [&](float(&sum)[V], int64_t at) {
            float values[V];
            load_values<T, V>(sum, a, at);
            load_values<T, V>(values, b, at);
            UNROLL for (int i = 0; i < V; i++) sum[i] += values[i];
        },
        [&](int64_t at) { y.store(at, nearest<T>(widen(a.load(at)) + widen(b.load(at)))); });
}

template <class T> DEVICE inline void scaled(In<T> x, Out<T> y, float factor, int64_t count) {
    constexpr int V = PER16<T>;
    over_tensor<T, V>(
        y, count, x.is_aligned(16) && y.is_aligned(16),
        [&](float(&values)[V], int64_t at) {
            load_values<T, V>(values, x, at);
            UNROLL for (int i = 0; i < V; i++) values[i] *= factor;
        },
        [&](int64_t at) { y.store(at, nearest<T>(widen(x.load(at)) * factor)); });
}

// Processes the columns of one row, a block's work: `whole(c)` for V of them from c on, `single(c)`
// for one.
template <int V, class W, class S> DEVICE inline void over_row(int width, bool aligned, W whole, S single) {
    for (int c = int(threadIdx.x) * V; c < width; c += THREADS * V) {
        if (aligned && c + V <= width) {
            whole(c);
        } else {
            for (int i = 0; i < V; i++)
                if (c + i < width) single(c + i);
        }
    }
}

template <class D, class X>
DEVICE inline void scale_columns(InOut<D> dst, In<X> x, In<float> factors, int width, int64_t pitch, int64_t x_pitch,
                                 bool accumulate) {
    constexpr int V = 4;
    InOut<D> to = dst.offset(blockIdx.x * pitch);
    In<X> from = x.offset(blockIdx.x * x_pitch);
    over_row<V>(
        width, to.is_aligned(sizeof(D) * V) && from.is_aligned(sizeof(X) * V) && factors.is_aligned(16),
        [&](int c) {
            float values[V], scale[V], before[V] = {};
            load_values<X, V>(values, from, c);
            load_values<float, V>(scale, factors, c);
            if (accumulate) load_values<D, V>(before, to, c);
            UNROLL for (int i = 0; i < V; i++) {
                float scaled = values[i] * scale[i];
                values[i] = accumulate ? before[i] + scaled : scaled;
            }
            store_values<D, V>(to, c, values);
        },
        [&](int c) {
            float scaled = widen(from.load(c)) * factors.load(c);
            to.store(c, nearest<D>(accumulate ? widen(to.load(c)) + scaled : scaled));
        });
}

template <class D, class B> DEVICE inline void add_bias(InOut<D> dst, In<B> bias, int width, int64_t pitch) {
    constexpr int V = 4;
    InOut<D> to = dst.offset(blockIdx.x * pitch);
    over_row<V>(
        width, to.is_aligned(sizeof(D) * V) && bias.is_aligned(sizeof(B) * V),
        [&](int c) {
            float sum[V], values[V];
            load_values<D, V>(sum, to, c);
            load_values<B, V>(values, bias, c);
            UNROLL for (int i = 0; i < V; i++) sum[i] += values[i];
            store_values<D, V>(to, c, sum);
        },
        [&](int c) { to.store(c, nearest<D>(widen(to.load(c)) + widen(bias.load(c)))); });
}

template <class T>
DEVICE inline void gather(In<T> x, In<uint32_t> rows, Out<T> y, int width, int64_t x_pitch, int64_t pitch) {
    constexpr int V = PER16<T>;
    uint32_t row = rows.is_null() ? blockIdx.x : rows.load(blockIdx.x);
    bool zero = row == 0xffffffffu;
    In<T> from = x.offset(zero ? 0 : row * x_pitch);
    Out<T> to = y.offset(blockIdx.x * pitch);
    over_row<V>(
        width, from.is_aligned(16) && to.is_aligned(16),
        [&](int c) { to.store16(c, zero ? Bytes16{} : from.load16(c)); },
        [&](int c) { to.store(c, zero ? T{} : from.load(c)); });
}

} // namespace

// dst += x. One block per 8192 values if both are bf16, else per 4096.
KERNEL BOUNDS(256, 4) add_into_bf16_bf16(InOut<bf16> dst, In<bf16> x, int64_t count) { add_into(dst, x, count); }
// Like add_into_bf16_bf16.
KERNEL BOUNDS(256, 4) add_into_bf16_f32(InOut<bf16> dst, In<float> x, int64_t count) { add_into(dst, x, count); }
// Like add_into_bf16_bf16.
KERNEL BOUNDS(256, 4) add_into_f32_bf16(InOut<float> dst, In<bf16> x, int64_t count) { add_into(dst, x, count); }
// Like add_into_bf16_bf16.
KERNEL BOUNDS(256, 4) add_into_f32_f32(InOut<float> dst, In<float> x, int64_t count) { add_into(dst, x, count); }

// y = a + b. One block for each 8192 values.
KERNEL BOUNDS(256, 4) add_bf16(In<bf16> a, In<bf16> b, Out<bf16> y, int64_t count) { add(a, b, y, count); }

// y = a + b. One block for each 4096 values.
KERNEL BOUNDS(256, 4) add_f32(In<float> a, In<float> b, Out<float> y, int64_t count) { add(a, b, y, count); }

// y = factor * x. One block for each 8192 values.
KERNEL BOUNDS(256, 4) scaled_bf16(In<bf16> x, Out<bf16> y, float factor, int64_t count) { scaled(x, y, factor, count); }

// y = factor * x. One block for each 4096 values.
KERNEL BOUNDS(256, 4) scaled_f32(In<float> x, Out<float> y, float factor, int64_t count) { scaled(x, y, factor, count); }

// `dst[n, j] = factors[j] * x[n, j]`, or if `accumulate` is not 0 `dst[n, j] +=` that. One block
// per row.
KERNEL BOUNDS(256, 6) scale_columns_bf16_bf16(InOut<bf16> dst, In<bf16> x, In<float> factors, uint32_t width,
    int64_t pitch, int64_t x_pitch, uint32_t accumulate) {
    scale_columns(dst, x, factors, int(width), pitch, x_pitch, accumulate != 0);
}
// Like scale_columns_bf16_bf16.
KERNEL BOUNDS(256, 6) scale_columns_bf16_f32(InOut<bf16> dst, In<float> x, In<float> factors, uint32_t width,
    int64_t pitch, int64_t x_pitch, uint32_t accumulate) {
    scale_columns(dst, x, factors, int(width), pitch, x_pitch, accumulate != 0);
}
// Like scale_columns_bf16_bf16.
KERNEL BOUNDS(256, 6) scale_columns_f32_bf16(InOut<float> dst, In<bf16> x, In<float> factors, uint32_t width,
    int64_t pitch, int64_t x_pitch, uint32_t accumulate) {
    scale_columns(dst, x, factors, int(width), pitch, x_pitch, accumulate != 0);
}
// Like scale_columns_bf16_bf16.
KERNEL BOUNDS(256, 6) scale_columns_f32_f32(InOut<float> dst, In<float> x, In<float> factors, uint32_t width,
    int64_t pitch, int64_t x_pitch, uint32_t accumulate) {
    scale_columns(dst, x, factors, int(width), pitch, x_pitch, accumulate != 0);
}

// `dst[n, j] += bias[j]`. One block a row.
KERNEL BOUNDS(256, 6) add_bias_bf16_bf16(InOut<bf16> dst, In<bf16> bias, uint32_t width, int64_t pitch) {
    add_bias(dst, bias, int(width), pitch);
}
// Like add_bias_bf16_bf16.
KERNEL BOUNDS(256, 6) add_bias_bf16_f32(InOut<bf16> dst, In<float> bias, uint32_t width, int64_t pitch) {
    add_bias(dst, bias, int(width), pitch);
}
// Like add_bias_bf16_bf16.
KERNEL BOUNDS(256, 6) add_bias_f32_bf16(InOut<float> dst, In<bf16> bias, uint32_t width, int64_t pitch) {
    add_bias(dst, bias, int(width), pitch);
}
// Like add_bias_bf16_bf16.
KERNEL BOUNDS(256, 6) add_bias_f32_f32(InOut<float> dst, In<float> bias, uint32_t width, int64_t pitch) {
    add_bias(dst, bias, int(width), pitch);
}

// `y[i] = x[rows[i]]`, or zeros if `rows[i]` is the largest u32: gathers rows, or scatters them if
// `rows` lists the source of each row of y; with null, copies them. One block per row of y.
KERNEL BOUNDS(256, 6) gather_rows_bf16(In<bf16> x, In<uint32_t> rows, Out<bf16> y, uint32_t width, int64_t x_pitch,
    int64_t pitch) {
    gather(x, rows, y, int(width), x_pitch, pitch);
}
// Like gather_rows_bf16.
KERNEL BOUNDS(256, 6) gather_rows_f32(In<float> x, In<uint32_t> rows, Out<float> y, uint32_t width, int64_t x_pitch,
    int64_t pitch) {
    gather(x, rows, y, int(width), x_pitch, pitch);
}
