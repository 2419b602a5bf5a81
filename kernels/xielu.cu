// xIELU, an activation with two learned curvatures, and its gradients. crates/ops/src/ops/xielu
// holds the definition. A block processes one row.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// The numbers of a curve: [4].
struct Curve {
    float positive, negative, beta, eps;
};
DEVICE inline Curve load_curve(In<float> curve) {
    return Curve{curve.load(0), curve.load(1), curve.load(2), curve.load(3)};
}

// Value and slope at x, and the factors of the two curvatures.
struct Xielu {
    float value, slope, positive, negative;
    DEVICE static inline Xielu at(float x, Curve c) {
        bool is_positive = x > 0.0f, is_below = x < c.eps;
        float grown = expm1f(is_below ? x : c.eps);
        float positive = is_positive ? x * x : 0.0f, negative = is_positive ? 0.0f : grown - x;
        float slope = is_positive ? 2.0f * c.positive * x : c.negative * (is_below ? grown : -1.0f);
        return Xielu{c.positive * positive + c.negative * negative + c.beta * x, slope + c.beta, positive, negative};
    }
};

template <class T> DEVICE inline void forward(In<T> x, In<float> curve, Out<T> h, int width) {
    Curve c = load_curve(curve);
    In<T> from = x.offset(int64_t(blockIdx.x) * width);
    Out<T> to = h.offset(int64_t(blockIdx.x) * width);
    over_columns<THREADS, T>(
        width, from.is_aligned(16) && to.is_aligned(16),
        [&](int column) {
            float values[PER16<T>];
            load_values<T, PER16<T>>(values, from, column);
            UNROLL for (int i = 0; i < PER16<T>; i++) values[i] = Xielu::at(values[i], c).value;
            store_values<T, PER16<T>>(to, column, values);
        },
        [&](int column) { to.store(column, nearest<T>(Xielu::at(widen(from.load(column)), c).value)); });
}

// Writes dx, h in place of dh, and unless partial is null the row's part of the gradients of the
// curvatures.
template <class T>
DEVICE inline void backward(In<T> x, In<float> curve, InOut<T> dh, Out<T> dx, Out<float> partial, int width) {
    SHARED(float, scratch, 32);
    SHARED(float, more_scratch, 32);
    Curve c = load_curve(curve);
    In<T> from = x.offset(int64_t(blockIdx.x) * width);
    InOut<T> d = dh.offset(int64_t(blockIdx.x) * width);
    Out<T> to = dx.offset(int64_t(blockIdx.x) * width);
    float positive = 0.0f, negative = 0.0f;
    over_columns<THREADS, T>(
        width, from.is_aligned(16) && d.is_aligned(16) && to.is_aligned(16),
        [&](int column) {
            float values[PER16<T>], g[PER16<T>];
            load_values<T, PER16<T>>(values, from, column);
            load_values<T, PER16<T>>(g, d, column);
            UNROLL for (int i = 0; i < PER16<T>; i++) {
                Xielu at = Xielu::at(values[i], c);
                positive = fmaf(g[i], at.positive, positive);
                negative = fmaf(g[i], at.negative, negative);
                values[i] = g[i] * at.slope;
                g[i] = at.value;
            }
            store_values<T, PER16<T>>(to, column, values);
            store_values<T, PER16<T>>(d, column, g);
        },
        [&](int column) {
            Xielu at = Xielu::at(widen(from.load(column)), c);
            float g = widen(d.load(column));
            positive = fmaf(g, at.positive, positive);
            negative = fmaf(g, at.negative, negative);
            to.store(column, nearest<T>(g * at.slope));
            d.store(column, nearest<T>(at.value));
        });
    if (partial.is_null()) return;
    positive = block_sum(positive, scratch);
    negative = block_sum(negative, more_scratch);
    if (threadIdx.x != 0) return;
    partial.store(int64_t(blockIdx.x) * 2, positive);
    partial.store(int64_t(blockIdx.x) * 2 + 1, negative);
}

} // namespace

// h: [rows, width] from x by curve: [4].
KERNEL BOUNDS(256, 4) xielu_bf16(In<bf16> x, In<float> curve, Out<bf16> h, uint32_t width) {
    forward(x, curve, h, int(width));
}
// Like xielu_bf16, in f32.
KERNEL BOUNDS(256, 4) xielu_f32(In<float> x, In<float> curve, Out<float> h, uint32_t width) {
    forward(x, curve, h, int(width));
}
// dx: [rows, width], the gradient of x from dh, which becomes h; partial: [rows, 2] or null.
KERNEL BOUNDS(256, 4)
xielu_backward_bf16(In<bf16> x, In<float> curve, InOut<bf16> dh, Out<bf16> dx, Out<float> partial, uint32_t width) {
    backward(x, curve, dh, dx, partial, int(width));
}
// Like xielu_backward_bf16, in f32.
KERNEL BOUNDS(256, 4)
xielu_backward_f32(In<float> x, In<float> curve, InOut<float> dh, Out<float> dx, Out<float> partial, uint32_t width) {
    backward(x, curve, dh, dx, partial, int(width));
}
