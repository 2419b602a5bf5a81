// Gated activations: h = act(gate) * up for rows of gate_up that hold F gates, then F ups; and
// their gradient: dup = dh * act(gate), dgate = dh * up * act'(gate), with h in place of dh.
// crates/ops/src/ops/glu holds the definition, also that of the clamped product of alternating
// columns. One thread processes 16 bytes of h if F is a multiple of the values in 16 bytes, else
// one value. The activations without a gate, h = act(x) and dx = dh * act'(x) with h in place of
// dh, are defined in crates/ops/src/ops/activation.
#include "compat.cuh"

namespace {

// Value and slope of an activation.
struct Activated {
    float value, slope;
};

struct Silu {
    DEVICE static inline Activated at(float x) {
        float s = 1.0f / (1.0f + expf(-x));
        return Activated{x * s, s * (1.0f + x * (1.0f - s))};
    }
};

// GELU by tanh, gelu_pytorch_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
struct GeluTanh {
    DEVICE static inline Activated at(float x) {
        const float root = 0.7978846f, cubic = 0.044715f;
        float t = tanhf(root * (x + cubic * x * x * x));
        float inner = root * (1.0f + 3.0f * cubic * x * x);
        return Activated{0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
    }
};

// The sigmoid alone.
struct Sigmoid {
    DEVICE static inline Activated at(float x) {
        float s = 1.0f / (1.0f + expf(-x));
        return Activated{s, s * (1.0f - s)};
    }
};

// The square of ReLU; NaN stays NaN.
struct Relu2 {
    DEVICE static inline Activated at(float x) {
        float positive = x < 0.0f ? 0.0f : x;
        return Activated{positive * positive, 2.0f * positive};
    }
};

// GELU by the error function: x erfc(-x / sqrt(2)) / 2.
struct Gelu {
    DEVICE static inline Activated at(float x) {
        float below = 0.5f * erfcf(-x * 0.70710678f);
        return Activated{x * below, below + x * 0.3989423f * expf(-0.5f * x * x)};
    }
};

// Calls f(row, column, count) for this thread's values of rows of `half`: 16 bytes at once if all
// memory is `aligned` to 16 bytes, else one by one.
template <class T, class F> DEVICE inline void for_each_run(uint32_t half, int64_t values, bool aligned, F f) {
    int step = half % PER16<T> == 0 ? PER16<T> : 1;
    int64_t at = (int64_t(blockIdx.x) * int(blockDim.x) + int(threadIdx.x)) * step;
    if (at >= values) return;
    // A 32-bit division is several times as fast.
    int64_t row = at >> 32 == 0 ? int64_t(uint32_t(at) / half) : at / half;
    if (aligned) {
        f(row, at - row * half, step);
        return;
    }
    for (int i = 0; i < step; i++) f(row, at - row * half + i, 1);
}

template <class A, class T> DEVICE inline void forward(In<T> gate_up, Out<T> h, uint32_t rows, uint32_t half) {
    bool aligned = gate_up.is_aligned(16) && h.is_aligned(16);
    for_each_run<T>(half, int64_t(rows) * half, aligned, [&](int64_t row, int64_t column, int count) {
        float gate[PER16<T>], up[PER16<T>];
        load_some<T>(gate, gate_up, row * 2 * half + column, count);
        load_some<T>(up, gate_up, (row * 2 + 1) * half + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) gate[i] = A::at(gate[i]).value * up[i];
        store_some<T>(h, row * half + column, gate, count);
    });
}

template <class A, class T>
DEVICE inline void backward(In<T> gate_up, InOut<T> dh, Out<T> d, uint32_t rows, uint32_t half) {
    bool aligned = gate_up.is_aligned(16) && dh.is_aligned(16) && d.is_aligned(16);
    for_each_run<T>(half, int64_t(rows) * half, aligned, [&](int64_t row, int64_t column, int count) {
        float gate[PER16<T>], up[PER16<T>], g[PER16<T>];
        load_some<T>(gate, gate_up, row * 2 * half + column, count);
        load_some<T>(up, gate_up, (row * 2 + 1) * half + column, count);
        load_some<T>(g, dh, row * half + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) {
            Activated act = A::at(gate[i]);
            float product = act.value * up[i];
            gate[i] = g[i] * up[i] * act.slope;
            up[i] = g[i] * act.value;
            g[i] = product;
        }
        store_some<T>(d, row * 2 * half + column, gate, count);
        store_some<T>(d, (row * 2 + 1) * half + column, up, count);
        store_some<T>(dh, row * half + column, g, count);
    });
}

// The product of gpt-oss: gates in the even columns, at most CLAMP, ups in the odd ones, within
// CLAMP.
struct Clamped {
    static constexpr float CLAMP = 7.0f, FACTOR = 1.702f;
    float value, slope, up, up_slope;
    DEVICE static inline Clamped at(float gate, float up) {
        // Comparisons keep a NaN.
        float g = gate > CLAMP ? CLAMP : gate, u = up > CLAMP ? CLAMP : up;
        u = u < -CLAMP ? -CLAMP : u;
        float s = 1.0f / (1.0f + expf(-FACTOR * g));
        float slope = s * (1.0f + FACTOR * g * (1.0f - s));
        return Clamped{g * s, gate > CLAMP ? 0.0f : slope, u + 1.0f, up > CLAMP || up < -CLAMP ? 0.0f : 1.0f};
    }
};

// Loads the gates and ups of `count` values of h, 1 or PER16<T>, as they alternate in memory.
template <class T> DEVICE inline void load_pairs(float (&pairs)[2 * PER16<T>], In<T> gate_up, int64_t at, int count) {
    if (count == 1) {
        pairs[0] = widen(gate_up.load(at));
        pairs[1] = widen(gate_up.load(at + 1));
        return;
    }
    load_values<T, 2 * PER16<T>>(pairs, gate_up, at);
}
// Rounds and stores values in the layout of load_pairs.
template <class T> DEVICE inline void store_pairs(Out<T> d, int64_t at, const float (&pairs)[2 * PER16<T>], int count) {
    if (count == 1) {
        d.store(at, nearest<T>(pairs[0]));
        d.store(at + 1, nearest<T>(pairs[1]));
        return;
    }
    store_values<T, 2 * PER16<T>>(d, at, pairs);
}

template <class T> DEVICE inline void clamped_forward(In<T> gate_up, Out<T> h, uint32_t rows, uint32_t half) {
    bool aligned = gate_up.is_aligned(16) && h.is_aligned(16);
    for_each_run<T>(half, int64_t(rows) * half, aligned, [&](int64_t row, int64_t column, int count) {
        float pairs[2 * PER16<T>], out[PER16<T>];
        load_pairs<T>(pairs, gate_up, 2 * (row * half + column), count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) {
            Clamped c = Clamped::at(pairs[2 * i], pairs[2 * i + 1]);
            out[i] = c.value * c.up;
        }
        store_some<T>(h, row * half + column, out, count);
    });
}

template <class T>
DEVICE inline void clamped_backward(In<T> gate_up, InOut<T> dh, Out<T> d, uint32_t rows, uint32_t half) {
    bool aligned = gate_up.is_aligned(16) && dh.is_aligned(16) && d.is_aligned(16);
    for_each_run<T>(half, int64_t(rows) * half, aligned, [&](int64_t row, int64_t column, int count) {
        float pairs[2 * PER16<T>], g[PER16<T>];
        load_pairs<T>(pairs, gate_up, 2 * (row * half + column), count);
        load_some<T>(g, dh, row * half + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) {
            Clamped c = Clamped::at(pairs[2 * i], pairs[2 * i + 1]);
            pairs[2 * i] = g[i] * c.up * c.slope;
            pairs[2 * i + 1] = g[i] * c.value * c.up_slope;
            g[i] = c.value * c.up;
        }
        store_pairs<T>(d, 2 * (row * half + column), pairs, count);
        store_some<T>(dh, row * half + column, g, count);
    });
}

template <class A, class T> DEVICE inline void activate(In<T> x, Out<T> h, uint32_t rows, uint32_t width) {
    bool aligned = x.is_aligned(16) && h.is_aligned(16);
    for_each_run<T>(width, int64_t(rows) * width, aligned, [&](int64_t row, int64_t column, int count) {
        float v[PER16<T>];
        load_some<T>(v, x, row * width + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) v[i] = A::at(v[i]).value;
        store_some<T>(h, row * width + column, v, count);
    });
}

template <class A, class T>
DEVICE inline void activate_backward(In<T> x, InOut<T> dh, Out<T> dx, uint32_t rows, uint32_t width) {
    bool aligned = x.is_aligned(16) && dh.is_aligned(16) && dx.is_aligned(16);
    for_each_run<T>(width, int64_t(rows) * width, aligned, [&](int64_t row, int64_t column, int count) {
        float v[PER16<T>], g[PER16<T>];
        load_some<T>(v, x, row * width + column, count);
        load_some<T>(g, dh, row * width + column, count);
        UNROLL for (int i = 0; i < PER16<T>; i++) if (i < count) {
            Activated act = A::at(v[i]);
            v[i] = g[i] * act.slope;
            g[i] = act.value;
        }
        store_some<T>(dx, row * width + column, v, count);
        store_some<T>(dh, row * width + column, g, count);
    });
}

// Calls `f` with the activation of this number: 0 relu^2, 1 gelu, 2 gelu by tanh.
template <class F> DEVICE inline void of_activation(uint32_t activation, F f) {
    if (activation == 0)
        f(Relu2{});
    else if (activation == 1)
        f(Gelu{});
    else
        f(GeluTanh{});
}

} // namespace

// h: [rows, half] = silu(gate) * up of gate_up: [rows, 2 half].
KERNEL glu_silu_bf16(In<bf16> gate_up, Out<bf16> h, uint32_t rows, uint32_t half) { forward<Silu>(gate_up, h, rows, half); }
// Like glu_silu_bf16, in f32.
KERNEL glu_silu_f32(In<float> gate_up, Out<float> h, uint32_t rows, uint32_t half) { forward<Silu>(gate_up, h, rows, half); }
// h: [rows, half] = gelu_tanh(gate) * up of gate_up: [rows, 2 half].
KERNEL glu_gelu_bf16(In<bf16> gate_up, Out<bf16> h, uint32_t rows, uint32_t half) { forward<GeluTanh>(gate_up, h, rows, half); }
// Like glu_gelu_bf16, in f32.
KERNEL glu_gelu_f32(In<float> gate_up, Out<float> h, uint32_t rows, uint32_t half) { forward<GeluTanh>(gate_up, h, rows, half); }
// h: [rows, half] = sigmoid(gate) * up of gate_up: [rows, 2 half].
KERNEL glu_sigmoid_bf16(In<bf16> gate_up, Out<bf16> h, uint32_t rows, uint32_t half) { forward<Sigmoid>(gate_up, h, rows, half); }
// Like glu_sigmoid_bf16, in f32.
KERNEL glu_sigmoid_f32(In<float> gate_up, Out<float> h, uint32_t rows, uint32_t half) { forward<Sigmoid>(gate_up, h, rows, half); }

// h: [rows, half], the clamped product of the pairs of gate_up: [rows, half, 2].
KERNEL glu_clamped_bf16(In<bf16> gate_up, Out<bf16> h, uint32_t rows, uint32_t half) { clamped_forward(gate_up, h, rows, half); }
// Like glu_clamped_bf16, in f32.
KERNEL glu_clamped_f32(In<float> gate_up, Out<float> h, uint32_t rows, uint32_t half) { clamped_forward(gate_up, h, rows, half); }

#define BACKWARD_BF16 In<bf16> gate_up, InOut<bf16> dh, Out<bf16> d, uint32_t rows, uint32_t half
#define BACKWARD_F32 In<float> gate_up, InOut<float> dh, Out<float> d, uint32_t rows, uint32_t half

// d: [rows, 2 half], the gradient of gate_up from dh: [rows, half], which becomes h.
KERNEL glu_silu_backward_bf16(BACKWARD_BF16) { backward<Silu>(gate_up, dh, d, rows, half); }
// Like glu_silu_backward_bf16, in f32.
KERNEL glu_silu_backward_f32(BACKWARD_F32) { backward<Silu>(gate_up, dh, d, rows, half); }
// Like glu_silu_backward_bf16, with gelu_tanh.
KERNEL glu_gelu_backward_bf16(BACKWARD_BF16) { backward<GeluTanh>(gate_up, dh, d, rows, half); }
// Like glu_gelu_backward_bf16, in f32.
KERNEL glu_gelu_backward_f32(BACKWARD_F32) { backward<GeluTanh>(gate_up, dh, d, rows, half); }
// Like glu_silu_backward_bf16, with the sigmoid alone.
KERNEL glu_sigmoid_backward_bf16(BACKWARD_BF16) { backward<Sigmoid>(gate_up, dh, d, rows, half); }
// Like glu_sigmoid_backward_bf16, in f32.
KERNEL glu_sigmoid_backward_f32(BACKWARD_F32) { backward<Sigmoid>(gate_up, dh, d, rows, half); }

// Like glu_silu_backward_bf16, of the clamped product of pairs.
KERNEL glu_clamped_backward_bf16(BACKWARD_BF16) { clamped_backward(gate_up, dh, d, rows, half); }
// Like glu_clamped_backward_bf16, in f32.
KERNEL glu_clamped_backward_f32(BACKWARD_F32) { clamped_backward(gate_up, dh, d, rows, half); }

// h: [rows, width] = the activation of this number of x.
KERNEL activate_bf16(In<bf16> x, Out<bf16> h, uint32_t rows, uint32_t width, uint32_t activation) {
    of_activation(activation, [&](auto a) { activate<decltype(a)>(x, h, rows, width); });
}
// Like activate_bf16, in f32.
KERNEL activate_f32(In<float> x, Out<float> h, uint32_t rows, uint32_t width, uint32_t activation) {
    of_activation(activation, [&](auto a) { activate<decltype(a)>(x, h, rows, width); });
}
// dx: [rows, width], the gradient of x from dh, which becomes h.
KERNEL activate_backward_bf16(In<bf16> x, InOut<bf16> dh, Out<bf16> dx, uint32_t rows, uint32_t width, uint32_t activation) {
    of_activation(activation, [&](auto a) { activate_backward<decltype(a)>(x, dh, dx, rows, width); });
}
// Like activate_backward_bf16, in f32.
KERNEL activate_backward_f32(In<float> x, InOut<float> dh, Out<float> dx, uint32_t rows, uint32_t width, uint32_t activation) {
    of_activation(activation, [&](auto a) { activate_backward<decltype(a)>(x, dh, dx, rows, width); });
}
