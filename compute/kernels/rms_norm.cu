// RMSNorm (arXiv 1910.07467): y = x / rms(x) * gain, rms(x) = sqrt(mean(x^2) + eps), where the gain is weight + offset
// (offset 1 in the Gemma families). Backward, with h = x / rms and q = dy * gain: dx = (q - h * mean(q * h)) / rms, plus
// the gradient that flows around the norm. src/ops/rms_norm holds the definition.
//
// One block a row: x, dy and y are [rows, width] and contiguous. Rows that are a multiple of 16 bytes long move 16 bytes
// a thread at a time, others one value.
#include "compat.cuh"

namespace {

// Calls f(column, count) for the columns of a row that this thread takes, `count` of them at a time.
template <class T, class F> DEVICE inline void columns_of_thread(int width, F f) {
    constexpr int many = PER16<T>;
    int step = width % many == 0 ? many : 1;
    for (int column = int(threadIdx.x) * step; column < width; column += int(blockDim.x) * step) f(column, step);
}

template <class T> DEVICE inline float inverse_rms(In<T> x, int64_t row, int width, float eps, Shared<float> scratch) {
    float sum = 0.0f, v[PER16<T>];
    columns_of_thread<T>(width, [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) sum = fmaf(v[i], v[i], sum);
    });
    return 1.0f / sqrtf(block_sum(sum, scratch) / float(width) + eps);
}

template <class T, class W>
DEVICE inline void forward(In<T> x, In<W> weight, Out<T> y, int width, float offset, float eps) {
    SHARED(float, scratch, 32);
    int64_t row = int64_t(blockIdx.x) * width;
    float inverse = inverse_rms<T>(x, row, width, eps, scratch), v[PER16<T>];
    columns_of_thread<T>(width, [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) v[i] = v[i] * inverse * (widen(weight.load(column + i)) + offset);
        store_some<T>(y, row + column, v, count);
    });
}

// dx of one row; `inverses` gets 1 / rms of each row for the gradient of the gain, unless it is null.
template <class T, class W>
DEVICE inline void backward(In<T> x, In<W> weight, In<T> dy, In<T> residual, Out<T> dx, Out<float> inverses, int width,
                            float offset, float eps) {
    SHARED(float, scratch, 32);
    SHARED(float, scratch2, 32);
    int64_t row = int64_t(blockIdx.x) * width;
    float inverse = inverse_rms<T>(x, row, width, eps, scratch);
    float sum = 0.0f, v[PER16<T>], d[PER16<T>], r[PER16<T>];
    auto gained = [&](int column, int count) {
        load_some<T>(v, x, row + column, count);
        load_some<T>(d, dy, row + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) d[i] = d[i] * (widen(weight.load(column + i)) + offset);
    };
    columns_of_thread<T>(width, [&](int column, int count) {
        gained(column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) sum = fmaf(v[i], d[i], sum);
    });
    float mean = block_sum(sum, scratch2) * inverse / float(width);
    columns_of_thread<T>(width, [&](int column, int count) {
        gained(column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) d[i] = inverse * (d[i] - v[i] * inverse * mean);
        if (!residual.is_null()) {
            load_some<T>(r, residual, row + column, count);
            UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) d[i] = d[i] + r[i];
        }
        store_some<T>(dx, row + column, d, count);
    });
    if (threadIdx.x == 0 && !inverses.is_null()) inverses.store(blockIdx.x, inverse);
}

// The first stage of the gain's gradient: block (i, j) sums dy * x / rms over rows i, i + gridDim.x, ... for 32 columns a
// warp; partial: [gridDim.x, width]. Rows are taken in order, so the result depends on the grid alone.
template <class T>
DEVICE inline void gain_partial(In<T> x, In<T> dy, In<float> inverses, Out<float> partial, int rows, int width) {
    int column = int(blockIdx.y) * int(blockDim.x) + int(threadIdx.x);
    if (column >= width) return;
    float sum = 0.0f;
    for (int row = int(blockIdx.x); row < rows; row += int(gridDim.x)) {
        int64_t at = int64_t(row) * width + column;
        sum += widen(dy.load(at)) * widen(x.load(at)) * inverses.load(row);
    }
    partial.store(int64_t(blockIdx.x) * width + column, sum);
}

} // namespace

// y = RMSNorm of each row of x; one block a row.
KERNEL rms_norm_bf16(In<bf16> x, In<bf16> weight, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward(x, weight, y, int(width), offset, eps);
}
// As rms_norm_bf16, with an f32 weight.
KERNEL rms_norm_bf16_f32(In<bf16> x, In<float> weight, Out<bf16> y, uint32_t width, float offset, float eps) {
    forward(x, weight, y, int(width), offset, eps);
}
// As rms_norm_bf16, all in f32.
KERNEL rms_norm_f32(In<float> x, In<float> weight, Out<float> y, uint32_t width, float offset, float eps) {
    forward(x, weight, y, int(width), offset, eps);
}

#define BACKWARD_BF16                                                                                                  \
    In<bf16> x, In<bf16> weight, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<float> inverses, uint32_t width,     \
        float offset, float eps
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> x, In<float> weight, In<bf16> dy, In<bf16> residual, Out<bf16> dx, Out<float> inverses, uint32_t width,    \
        float offset, float eps
#define BACKWARD_F32                                                                                                   \
    In<float> x, In<float> weight, In<float> dy, In<float> residual, Out<float> dx, Out<float> inverses,               \
        uint32_t width, float offset, float eps

// dx = the gradient of x plus residual, which may be null; inverses: [rows] gets 1 / rms, unless it is null.
KERNEL rms_norm_backward_bf16(BACKWARD_BF16) {
    backward(x, weight, dy, residual, dx, inverses, int(width), offset, eps);
}
// As rms_norm_backward_bf16, with an f32 weight.
KERNEL rms_norm_backward_bf16_f32(BACKWARD_BF16_F32) {
    backward(x, weight, dy, residual, dx, inverses, int(width), offset, eps);
}
// As rms_norm_backward_bf16, all in f32.
KERNEL rms_norm_backward_f32(BACKWARD_F32) {
    backward(x, weight, dy, residual, dx, inverses, int(width), offset, eps);
}

// Partial sums of the gain's gradient over the rows of each block column of the grid.
KERNEL rms_norm_gain_partial_bf16(In<bf16> x, In<bf16> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial(x, dy, inverses, partial, int(rows), int(width));
}
// As rms_norm_gain_partial_bf16, in f32.
KERNEL rms_norm_gain_partial_f32(In<float> x, In<float> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t width) {
    gain_partial(x, dy, inverses, partial, int(rows), int(width));
}

// dweight[column] += the sum of partial: [parts, width] over its rows, in order.
KERNEL add_partials(In<float> partial, InOut<float> dweight, uint32_t parts, uint32_t width) {
    int column = int(blockIdx.x) * int(blockDim.x) + int(threadIdx.x);
    if (column >= int(width)) return;
    float sum = dweight.load(column);
    for (int part = 0; part < int(parts); part++) sum += partial.load(int64_t(part) * int(width) + column);
    dweight.store(column, sum);
}
