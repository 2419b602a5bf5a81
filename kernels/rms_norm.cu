// RMSNorm (arXiv 1910.07467): y = x / rms(x) * gain, rms(x) = sqrt(mean(x^2) + eps), with gain =
// weight + offset (offset 1 in the Gemma families). Backward, with h = x / rms and q = dy * gain:
// dx = (q - h * mean(q * h)) / rms, plus the gradient that bypasses the norm.
// crates/ops/src/ops/rms_norm holds the definition. LayerNorm (arXiv 1607.06450) has h = (x - mean)
// / sigma, sigma^2 = mean((x - mean)^2) + eps, y = h * gain + bias and dx = (q - mean(q) - h *
// mean(q * h)) / sigma; crates/ops/src/ops/layer_norm holds its definition. A template's CENTERED
// is true for it.
//
// One block per row: x, dy and y are [rows, width] and contiguous. Rows whose length is a multiple
// of 16 bytes, aligned to 16 bytes, move 16 bytes per thread at a time, others one value.
#include "compat.cuh"

namespace {

// Returns the columns of T that a thread processes at a time: those of 16 bytes if all rows are
// `aligned` to 16 bytes.
template <class T> DEVICE inline int columns_at_once(int width, bool aligned) {
    return aligned && width % PER16<T> == 0 ? PER16<T> : 1;
}

// Calls f(column, count) for this thread's columns of a row, `step` of them at a time.
template <class T, class F> DEVICE inline void columns_of_thread(int width, int step, F f) {
    for (int column = int(threadIdx.x) * step; column < width; column += int(blockDim.x) * step) f(column, step);
}

// The gains of `count` columns from `column` on.
template <class T, class W>
DEVICE inline void load_gains(float (&gain)[PER16<T>], In<W> weight, int column, int count, float offset) {
    if (count == 1)
        gain[0] = widen(weight.load(column));
    else
        load_values<W, PER16<T>>(gain, weight, column);
    UNROLL for (int i = 0; i < PER16<T>; i++) gain[i] += offset;
}

// Returns the mean of a row.
template <class T> DEVICE inline float row_mean(In<T> x, int64_t row, int width, int step) {
    SHARED(float, scratch, 32);
    float sum = 0.0f, v[PER16<T>];
    columns_of_thread<T>(width, step, [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) sum += v[i];
    });
    return block_sum(sum, scratch) / float(width);
}

// Returns 1 / sqrt(mean((x - mean)^2) + eps) of a row.
template <class T>
DEVICE inline float inverse_rms(In<T> x, int64_t row, int width, int step, float mean, float eps, Shared<float> scratch) {
    float sum = 0.0f, v[PER16<T>];
    columns_of_thread<T>(width, step, [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) sum = fmaf(v[i] - mean, v[i] - mean, sum);
    });
    return 1.0f / sqrtf(block_sum(sum, scratch) / float(width) + eps);
}

// Norms `count` values of a row in place, from their gains; a bias that is not null is added.
template <class T, class W>
DEVICE inline void norm_values(float (&v)[PER16<T>], float mean, float inverse, const float (&gain)[PER16<T>], In<W> bias,
                               int column, int count) {
    UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) v[i] = (v[i] - mean) * inverse * gain[i];
    if (bias.is_null()) return;
    float b[PER16<T>] = {};
    load_gains<T>(b, bias, column, count, 0.0f);
    UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) v[i] = v[i] + b[i];
}

template <bool CENTERED, class T, class W>
DEVICE inline void forward(In<T> x, In<W> weight, In<W> bias, Out<T> y, int width, float offset, float eps) {
    SHARED(float, scratch, 32);
    int64_t row = int64_t(blockIdx.x) * width;
    bool aligned = x.is_aligned(16) && weight.is_aligned(16) && y.is_aligned(16);
    int step = columns_at_once<T>(width, aligned && (!CENTERED || bias.is_aligned(16)));
    float mean = 0.0f, v[PER16<T>], gain[PER16<T>] = {};
    if constexpr (CENTERED) mean = row_mean<T>(x, row, width, step);
    float inverse = inverse_rms<T>(x, row, width, step, mean, eps, scratch);
    columns_of_thread<T>(width, step, [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        load_gains<T>(gain, weight, column, count, offset);
        if constexpr (CENTERED)
            norm_values<T>(v, mean, inverse, gain, bias, column, count);
        else
            UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) v[i] = v[i] * inverse * gain[i];
        store_some<T>(y, row + column, v, count);
    });
}

// Computes dx of one row. `normed` gets the norm of the row, and `means` and `inverses` its mean
// and 1 / rms for the gradient of the gain; each may be null.
template <bool CENTERED, class T, class W>
DEVICE inline void backward(In<T> x, In<W> weight, In<W> bias, In<T> dy, In<T> residual, Out<T> dx, Out<T> normed,
                            Out<float> means, Out<float> inverses, int width, float offset, float eps) {
    SHARED(float, scratch, 32);
    SHARED(float, scratch2, 32);
    int64_t row = int64_t(blockIdx.x) * width;
    bool aligned = x.is_aligned(16) && weight.is_aligned(16) && dy.is_aligned(16) && residual.is_aligned(16);
    if constexpr (CENTERED) aligned = aligned && bias.is_aligned(16);
    int step = columns_at_once<T>(width, aligned && dx.is_aligned(16) && normed.is_aligned(16));
    float mean = 0.0f, mean_q = 0.0f;
    if constexpr (CENTERED) mean = row_mean<T>(x, row, width, step);
    float inverse = inverse_rms<T>(x, row, width, step, mean, eps, scratch);
    float sum = 0.0f, sum_q = 0.0f, v[PER16<T>], d[PER16<T>], r[PER16<T>], gain[PER16<T>] = {};
    auto gained = [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        load_some<T>(d, dy, row + column, count);
        load_gains<T>(gain, weight, column, count, offset);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) d[i] = d[i] * gain[i];
    };
    columns_of_thread<T>(width, step, [&](int column, int count) {
        gained(column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) {
            sum = fmaf(v[i] - mean, d[i], sum);
            if constexpr (CENTERED) sum_q += d[i];
        }
    });
    float slope = block_sum(sum, scratch2) * inverse / float(width);
    if constexpr (CENTERED) {
        SHARED(float, scratch3, 32);
        mean_q = block_sum(sum_q, scratch3) / float(width);
    }
    columns_of_thread<T>(width, step, [&](int column, int count) {
        gained(column, count);
        if (!normed.is_null()) {
            if constexpr (CENTERED) {
                UNROLL for (int i = 0; i < PER16<T>; i++) r[i] = v[i];
                norm_values<T>(r, mean, inverse, gain, bias, column, count);
            } else {
                UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) r[i] = v[i] * inverse * gain[i];
            }
            store_some<T>(normed, row + column, r, count);
        }
        UNROLL for (int i = 0; i < PER16<T>; i++)
            if (i < count) d[i] = inverse * (d[i] - mean_q - (v[i] - mean) * inverse * slope);
        if (!residual.is_null()) {
            load_some<T>(r, residual, row + column, count);
            UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) d[i] = d[i] + r[i];
        }
        store_some<T>(dx, row + column, d, count);
    });
    if (threadIdx.x == 0 && !inverses.is_null()) {
        inverses.store(blockIdx.x, inverse);
        if constexpr (CENTERED) means.store(blockIdx.x, mean);
    }
}

// The first stage of the gain's gradient: partial[i][column], [gridDim.x, width], = the sum of dy *
// (x - mean) / rms over rows i, i + gridDim.x, ... in order, so the result depends only on the
// grid. A thread processes the columns of V values and AT_ONCE rows at a time, whose loads overlap;
// blocks along y share the columns.
template <bool CENTERED, int V, class T>
DEVICE inline void gain_partial_of(In<T> x, In<T> dy, In<float> means, In<float> inverses, Out<float> partial, int rows,
                                   int width) {
    constexpr int AT_ONCE = 4;
    int blocks = int(gridDim.x), threads = int(blockDim.x);
    for (int column = (int(blockIdx.y) * threads + int(threadIdx.x)) * V; column < width;
         column += int(gridDim.y) * threads * V) {
        float sum[V] = {};
        for (int first = int(blockIdx.x); first < rows; first += AT_ONCE * blocks) {
            float a[AT_ONCE][V], b[AT_ONCE][V], inverse[AT_ONCE], mean[AT_ONCE] = {};
            UNROLL for (int k = 0; k < AT_ONCE; k++) {
                int row = first + k * blocks;
                if (row >= rows) continue;
                int64_t at = int64_t(row) * width + column;
                inverse[k] = inverses.load(row);
                if constexpr (CENTERED) mean[k] = means.load(row);
                if constexpr (V == 1) {
                    a[k][0] = widen(dy.load(at));
                    b[k][0] = widen(x.load(at));
                } else {
                    load_values<T, V>(a[k], dy, at);
                    load_values<T, V>(b[k], x, at);
                }
            }
            UNROLL for (int k = 0; k < AT_ONCE; k++)
                UNROLL for (int i = 0; i < V; i++)
                    if (first + k * blocks < rows) sum[i] += a[k][i] * (b[k][i] - mean[k]) * inverse[k];
        }
        int64_t at = int64_t(blockIdx.x) * width + column;
        if constexpr (V == 1)
            partial.store(at, sum[0]);
        else
            store_values<float, V>(partial, at, sum);
    }
}

template <bool CENTERED, class T>
DEVICE inline void gain_partial(In<T> x, In<T> dy, In<float> means, In<float> inverses, Out<float> partial, int rows,
                                int width) {
    if (columns_at_once<T>(width, x.is_aligned(16) && dy.is_aligned(16) && partial.is_aligned(16)) > 1)
        gain_partial_of<CENTERED, PER16<T>>(x, dy, means, inverses, partial, rows, width);
    else
        gain_partial_of<CENTERED, 1>(x, dy, means, inverses, partial, rows, width);
}

} // namespace

// y = RMSNorm of each row of x; one block a row.
KERNEL rms_norm_bf16(In<bf16> x, In<bf16> weight, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward<false>(x, weight, weight, y, int(width), offset, eps);
}
// Like rms_norm_bf16, with an f32 weight.
KERNEL rms_norm_bf16_f32(In<bf16> x, In<float> weight, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward<false>(x, weight, weight, y, int(width), offset, eps);
}
// Like rms_norm_bf16, all in f32.
KERNEL rms_norm_f32(In<float> x, In<float> weight, Out<float> y, uint32_t width, float offset, float eps) {
    forward<false>(x, weight, weight, y, int(width), offset, eps);
}

#define BACKWARD_BF16                                                                                                  \
    In<bf16> x, In<bf16> weight, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<bf16> normed, Out<float> inverses,  \
        uint32_t width, float offset, float eps
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> x, In<float> weight, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<bf16> normed, Out<float> inverses, \
        uint32_t width, float offset, float eps
#define BACKWARD_F32                                                                                                   \
    In<float> x, In<float> weight, In<float> dy, In<float> residual, Out<float> dx, Out<float> normed,                 \
        Out<float> inverses, uint32_t width, float offset, float eps

// dx = the gradient of x plus residual. normed gets y of rms_norm_bf16, and inverses: [rows] gets
// 1 / rms. residual, normed and inverses may be null.
KERNEL rms_norm_backward_bf16(BACKWARD_BF16) {
    backward<false>(x, weight, weight, dy, residual, dx, normed, inverses, inverses, int(width), offset, eps);
}
// Like rms_norm_backward_bf16, with an f32 weight.
KERNEL rms_norm_backward_bf16_f32(BACKWARD_BF16_F32) {
    backward<false>(x, weight, weight, dy, residual, dx, normed, inverses, inverses, int(width), offset, eps);
}
// Like rms_norm_backward_bf16, all in f32.
KERNEL rms_norm_backward_f32(BACKWARD_F32) {
    backward<false>(x, weight, weight, dy, residual, dx, normed, inverses, inverses, int(width), offset, eps);
}

// Partial sums of the gain's gradient, one for each block along x.
KERNEL BOUNDS(128, 4) rms_norm_gain_partial_bf16(In<bf16> x, In<bf16> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial<false>(x, dy, inverses, inverses, partial, int(rows), int(width));
}
// Like rms_norm_gain_partial_bf16, in f32.
KERNEL BOUNDS(128, 4) rms_norm_gain_partial_f32(In<float> x, In<float> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial<false>(x, dy, inverses, inverses, partial, int(rows), int(width));
}

// y = LayerNorm of each row of x; one block a row. bias may be null.
KERNEL layer_norm_bf16(In<bf16> x, In<bf16> weight, In<bf16> bias, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward<true>(x, weight, bias, y, int(width), offset, eps);
}
// Like layer_norm_bf16, with parameters in f32.
KERNEL layer_norm_bf16_f32(In<bf16> x, In<float> weight, In<float> bias, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward<true>(x, weight, bias, y, int(width), offset, eps);
}
// Like layer_norm_bf16, all in f32.
KERNEL layer_norm_f32(In<float> x, In<float> weight, In<float> bias, Out<float> y, uint32_t width, float offset, float eps) {
    forward<true>(x, weight, bias, y, int(width), offset, eps);
}

#define CENTERED_BACKWARD_BF16                                                                                         \
    In<bf16> x, In<bf16> weight, In<bf16> bias, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<bf16> normed,        \
        Out<float> means, Out<float> inverses, uint32_t width, float offset, float eps
#define CENTERED_BACKWARD_BF16_F32                                                                                     \
    In<bf16> x, In<float> weight, In<float> bias, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<bf16> normed,      \
        Out<float> means, Out<float> inverses, uint32_t width, float offset, float eps
#define CENTERED_BACKWARD_F32                                                                                          \
    In<float> x, In<float> weight, In<float> bias, In<float> dy, In<float> residual, Out<float> dx, Out<float> normed, \
        Out<float> means, Out<float> inverses, uint32_t width, float offset, float eps

// dx = the gradient of x plus residual. normed gets y of layer_norm_bf16; means and inverses:
// [rows] get the mean and 1 / sigma of each row. bias, residual, normed and both of these may be
// null.
KERNEL layer_norm_backward_bf16(CENTERED_BACKWARD_BF16) {
    backward<true>(x, weight, bias, dy, residual, dx, normed, means, inverses, int(width), offset, eps);
}
// Like layer_norm_backward_bf16, with parameters in f32.
KERNEL layer_norm_backward_bf16_f32(CENTERED_BACKWARD_BF16_F32) {
    backward<true>(x, weight, bias, dy, residual, dx, normed, means, inverses, int(width), offset, eps);
}
// Like layer_norm_backward_bf16, all in f32.
KERNEL layer_norm_backward_f32(CENTERED_BACKWARD_F32) {
    backward<true>(x, weight, bias, dy, residual, dx, normed, means, inverses, int(width), offset, eps);
}

// Partial sums of the gain's gradient, one for each block along x.
KERNEL BOUNDS(128, 4) layer_norm_gain_partial_bf16(In<bf16> x, In<bf16> dy, In<float> means, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial<true>(x, dy, means, inverses, partial, int(rows), int(width));
}
// Like layer_norm_gain_partial_bf16, in f32.
KERNEL BOUNDS(128, 4) layer_norm_gain_partial_f32(In<float> x, In<float> dy, In<float> means, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial<true>(x, dy, means, inverses, partial, int(rows), int(width));
}

// dweight[column] += the sum of partial: [parts, width] over its rows, in order; one thread per
// column. Several rows are read before the first is added, to overlap memory latency.
KERNEL add_partials(In<float> partial, InOut<float> dweight, uint32_t parts, uint32_t width) {
    constexpr int AT_ONCE = 8;
    int column = int(blockIdx.x) * int(blockDim.x) + int(threadIdx.x);
    if (column >= int(width)) return;
    float sum = dweight.load(column);
    for (int first = 0; first < int(parts); first += AT_ONCE) {
        float rows[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            if (first + i < int(parts)) rows[i] = partial.load(int64_t(first + i) * int(width) + column);
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            if (first + i < int(parts)) sum += rows[i];
    }
    dweight.store(column, sum);
}
