// RMSNorm of each head times the SiLU of a gate, and its gradients: y = x / rms(x) * weight *
// silu(z). crates/ops/src/ops/gated_norm holds the definition.
//
// A warp processes a unit: one head of one row, `width` values. x and dy are contiguous; z and dz
// have their own number of values a row.
#include "compat.cuh"

namespace {

constexpr int WARPS = 8;

// The place of this warp's unit.
struct Unit {
    int64_t number, row;
    int head;
    bool there;
    DEVICE int64_t at(uint32_t stride, int width) const { return row * stride + int64_t(head) * width; }
};

DEVICE inline Unit unit_of(uint32_t rows, uint32_t heads) {
    int64_t number = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    return Unit{number, number / heads, int(number % heads), number < int64_t(rows) * heads};
}

// Calls f(column) for this lane's columns.
template <class F> DEVICE inline void columns_of_lane(int width, F f) {
    for (int column = int(threadIdx.x) % 32; column < width; column += 32) f(column);
}

template <class T> DEVICE inline float inverse_rms(In<T> x, int64_t at, int width, float eps) {
    float sum = 0.0f;
    columns_of_lane(width, [&](int c) {
        float v = widen(x.load(at + c));
        sum = fmaf(v, v, sum);
    });
    return 1.0f / sqrtf(warp_sum(sum) / float(width) + eps);
}

DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class T, class W>
DEVICE inline void forward(In<T> x, In<T> z, In<W> weight, Out<T> y, uint32_t rows, uint32_t heads, int width,
                           uint32_t z_stride, float eps) {
    Unit unit = unit_of(rows, heads);
    if (!unit.there) return;
    int64_t at = unit.number * width, z_at = unit.at(z_stride, width);
    float inverse = inverse_rms(x, at, width, eps);
    columns_of_lane(width, [&](int c) {
        float gate = widen(z.load(z_at + c));
        y.store(at + c, nearest<T>(widen(x.load(at + c)) * inverse * widen(weight.load(c)) * (gate * sigmoid(gate))));
    });
}

// inverses: `[rows, heads]` gets 1 / rms for the gradient of the weight; it may be null.
template <class T, class W>
DEVICE inline void backward(In<T> x, In<T> z, In<W> weight, In<T> dy, Out<T> dx, Out<T> dz, Out<float> inverses,
                            uint32_t rows, uint32_t heads, int width, uint32_t z_stride, uint32_t dz_stride,
                            float eps) {
    Unit unit = unit_of(rows, heads);
    if (!unit.there) return;
    int64_t at = unit.number * width, z_at = unit.at(z_stride, width), dz_at = unit.at(dz_stride, width);
    float inverse = inverse_rms(x, at, width, eps), sum = 0.0f;
    columns_of_lane(width, [&](int c) {
        float gate = widen(z.load(z_at + c)), s = sigmoid(gate);
        float v = widen(x.load(at + c)), d = widen(dy.load(at + c)) * widen(weight.load(c));
        dz.store(dz_at + c, nearest<T>(d * (v * inverse) * (s * (1.0f + gate * (1.0f - s)))));
        sum = fmaf(v, d * (gate * s), sum);
    });
    float slope = warp_sum(sum) * inverse / float(width);
    columns_of_lane(width, [&](int c) {
        float gate = widen(z.load(z_at + c)), v = widen(x.load(at + c));
        float q = widen(dy.load(at + c)) * widen(weight.load(c)) * (gate * sigmoid(gate));
        dx.store(at + c, nearest<T>(inverse * (q - v * inverse * slope)));
    });
    if (threadIdx.x % 32 == 0 && !inverses.is_null()) inverses.store(unit.number, inverse);
}

// partial[i][column], [gridDim.x, width], = the sum of dy * silu(z) * x / rms over the units i, i +
// gridDim.x, ... in order.
template <class T>
DEVICE inline void gain_partial(In<T> x, In<T> z, In<T> dy, In<float> inverses, Out<float> partial, uint32_t rows,
                                uint32_t heads, int width, uint32_t z_stride) {
    for (int column = int(threadIdx.x); column < width; column += int(blockDim.x)) {
        float sum = 0.0f;
        for (int64_t number = blockIdx.x; number < int64_t(rows) * heads; number += gridDim.x) {
            Unit unit{number, number / heads, int(number % heads), true};
            float gate = widen(z.load(unit.at(z_stride, width) + column));
            float normed = widen(x.load(number * width + column)) * inverses.load(number);
            sum += widen(dy.load(number * width + column)) * (gate * sigmoid(gate)) * normed;
        }
        partial.store(int64_t(blockIdx.x) * width + column, sum);
    }
}

} // namespace

#define FORWARD_BF16                                                                                                   \
    In<bf16> x, In<bf16> z, In<bf16> weight, Out<bf16> y, uint32_t rows, uint32_t heads, uint32_t width,               \
        uint32_t z_stride, float eps
#define FORWARD_BF16_F32                                                                                               \
    In<bf16> x, In<bf16> z, In<float> weight, Out<bf16> y, uint32_t rows, uint32_t heads, uint32_t width,              \
        uint32_t z_stride, float eps
#define FORWARD_F32                                                                                                    \
    In<float> x, In<float> z, In<float> weight, Out<float> y, uint32_t rows, uint32_t heads, uint32_t width,           \
        uint32_t z_stride, float eps
#define BACKWARD_BF16                                                                                                  \
    In<bf16> x, In<bf16> z, In<bf16> weight, In<bf16> dy, Out<bf16> dx, Out<bf16> dz, Out<float> inverses,             \
        uint32_t rows, uint32_t heads, uint32_t width, uint32_t z_stride, uint32_t dz_stride, float eps
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> x, In<bf16> z, In<float> weight, In<bf16> dy, Out<bf16> dx, Out<bf16> dz, Out<float> inverses,            \
        uint32_t rows, uint32_t heads, uint32_t width, uint32_t z_stride, uint32_t dz_stride, float eps
#define BACKWARD_F32                                                                                                   \
    In<float> x, In<float> z, In<float> weight, In<float> dy, Out<float> dx, Out<float> dz, Out<float> inverses,       \
        uint32_t rows, uint32_t heads, uint32_t width, uint32_t z_stride, uint32_t dz_stride, float eps

// y: `[rows, heads * width]`; weight: `[width]`. A warp a head, 8 a block.
KERNEL BOUNDS(256, 6) gated_norm_bf16(FORWARD_BF16) {
    forward(x, z, weight, y, rows, heads, int(width), z_stride, eps);
}
// Like gated_norm_bf16, with an f32 weight.
KERNEL BOUNDS(256, 6) gated_norm_bf16_f32(FORWARD_BF16_F32) {
    forward(x, z, weight, y, rows, heads, int(width), z_stride, eps);
}
// Like gated_norm_bf16, all in f32.
KERNEL BOUNDS(256, 6) gated_norm_f32(FORWARD_F32) {
    forward(x, z, weight, y, rows, heads, int(width), z_stride, eps);
}
// dx and dz from dy, all `[rows, heads * width]`; inverses: `[rows, heads]` gets 1 / rms or is
// null.
KERNEL BOUNDS(256, 3) gated_norm_backward_bf16(BACKWARD_BF16) {
    backward(x, z, weight, dy, dx, dz, inverses, rows, heads, int(width), z_stride, dz_stride, eps);
}
// Like gated_norm_backward_bf16, with an f32 weight.
KERNEL BOUNDS(256, 3) gated_norm_backward_bf16_f32(BACKWARD_BF16_F32) {
    backward(x, z, weight, dy, dx, dz, inverses, rows, heads, int(width), z_stride, dz_stride, eps);
}
// Like gated_norm_backward_bf16, all in f32.
KERNEL BOUNDS(256, 3) gated_norm_backward_f32(BACKWARD_F32) {
    backward(x, z, weight, dy, dx, dz, inverses, rows, heads, int(width), z_stride, dz_stride, eps);
}

// Partial sums of the weight's gradient, one for each block.
KERNEL BOUNDS(128, 8) gated_norm_gain_partial_bf16(In<bf16> x, In<bf16> z, In<bf16> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t heads, uint32_t width, uint32_t z_stride) {
    gain_partial(x, z, dy, inverses, partial, rows, heads, int(width), z_stride);
}
// Like gated_norm_gain_partial_bf16, in f32.
KERNEL BOUNDS(128, 8) gated_norm_gain_partial_f32(In<float> x, In<float> z, In<float> dy, In<float> inverses, Out<float> partial, uint32_t rows, uint32_t heads, uint32_t width, uint32_t z_stride) {
    gain_partial(x, z, dy, inverses, partial, rows, heads, int(width), z_stride);
}
