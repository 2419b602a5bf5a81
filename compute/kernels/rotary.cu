// Rotary positions (arXiv 2104.09864, half-split) on the q and k columns of a projection, after the RMSNorm of each head
// that some families have; and their gradient. y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin for the pairs (i, i + half) of
// the first 2 half values of a head; the others stay. src/ops/rotary holds the definition.
//
// Rows of qkv are `width` values long: H heads of q, K of k, K of v, each `dim` wide, at most 256. One block a token, one
// warp a head in turn. cos and sin are [tokens, half].
#include "compat.cuh"

namespace {

// The heads of a projection, and what is done to them.
template <class T, class W> struct Rotation {
    In<float> cosine, sine;
    // Weights of the norms, [dim]; both null without norms.
    In<W> q_weight, k_weight;
    int num_heads, num_kv_heads, dim, half;
    float offset, eps;

    DEVICE In<W> weight(int head) const { return head < num_heads ? q_weight : k_weight; }
    DEVICE float gain(int head, int column) const { return widen(weight(head).load(column)) + offset; }
};

DEVICE inline int lane() { return int(threadIdx.x) % 32; }

// 1 / rms of the `dim` values from `at` on, in every lane of the warp.
template <class T, class M> DEVICE inline float inverse_rms(M x, int64_t at, int dim, float eps) {
    float sum = 0.0f;
    for (int column = lane(); column < dim; column += 32) {
        float v = widen(x.load(at + column));
        sum = fmaf(v, v, sum);
    }
    return 1.0f / sqrtf(warp_sum(sum) / float(dim) + eps);
}

// Column `column` of a head turned by the angles of `token`, forward (direction 1) or back (-1); `at(column)` gives the
// values before. Rounded once, as it is stored.
template <class T, class W, class F>
DEVICE inline float turned(const Rotation<T, W> &r, int64_t token, int column, float direction, F at) {
    if (column >= 2 * r.half) return at(column);
    int pair = column < r.half ? column : column - r.half;
    float cosine = r.cosine.load(token * r.half + pair), sine = r.sine.load(token * r.half + pair) * direction;
    float x = at(pair), y = at(pair + r.half);
    float value = column < r.half ? x * cosine - y * sine : y * cosine + x * sine;
    return widen(nearest<T>(value));
}

// Both columns of a pair at once; columns that are not turned come one by one. f(first, second) with second < 0 for those.
template <class F> DEVICE inline void for_each_pair(int dim, int half, F f) {
    for (int pair = lane(); pair < half; pair += 32) f(pair, pair + half);
    for (int column = 2 * half + lane(); column < dim; column += 32) f(column, -1);
}

template <class T, class W>
DEVICE inline void forward(In<T> qkv, Out<T> out, const Rotation<T, W> &r, int width) {
    int heads = r.num_heads + r.num_kv_heads;
    int64_t token = blockIdx.x;
    for (int head = int(threadIdx.x) / 32; head < heads; head += int(blockDim.x) / 32) {
        int64_t from = token * width + head * r.dim, to = (token * heads + head) * r.dim;
        bool normed = !r.weight(head).is_null();
        float inverse = normed ? inverse_rms<T>(qkv, from, r.dim, r.eps) : 1.0f;
        auto value = [&](int column) {
            float x = widen(qkv.load(from + column));
            return normed ? widen(nearest<T>(x * inverse * r.gain(head, column))) : x;
        };
        for_each_pair(r.dim, r.half, [&](int first, int second) {
            out.store(to + first, nearest<T>(turned(r, token, first, 1.0f, value)));
            if (second >= 0) out.store(to + second, nearest<T>(turned(r, token, second, 1.0f, value)));
        });
    }
}

// Turns the gradient in the q and k columns of dqkv back and takes it through the norms, in place.
template <class T, class W>
DEVICE inline void backward(In<T> qkv, InOut<T> dqkv, const Rotation<T, W> &r, int width) {
    int64_t token = blockIdx.x;
    for (int head = int(threadIdx.x) / 32; head < r.num_heads + r.num_kv_heads; head += int(blockDim.x) / 32) {
        int64_t at = token * width + head * r.dim;
        bool normed = !r.weight(head).is_null();
        auto gradient = [&](int column) { return widen(dqkv.load(at + column)); };
        float inverse = 1.0f, mean = 0.0f;
        if (normed) {
            inverse = inverse_rms<T>(qkv, at, r.dim, r.eps);
            float sum = 0.0f;
            for (int column = lane(); column < r.dim; column += 32) {
                float q = turned(r, token, column, -1.0f, gradient) * r.gain(head, column);
                sum = fmaf(widen(qkv.load(at + column)), q, sum);
            }
            mean = warp_sum(sum) * inverse / float(r.dim);
        }
        auto through_norm = [&](int column, float dy) {
            if (!normed) return dy;
            return inverse * (dy * r.gain(head, column) - widen(qkv.load(at + column)) * inverse * mean);
        };
        // A pair is read and written by one lane alone, but what the sum above read must be read before.
        sync_warp();
        for_each_pair(r.dim, r.half, [&](int first, int second) {
            float a = through_norm(first, turned(r, token, first, -1.0f, gradient));
            float b = second >= 0 ? through_norm(second, turned(r, token, second, -1.0f, gradient)) : 0.0f;
            dqkv.store(at + first, nearest<T>(a));
            if (second >= 0) dqkv.store(at + second, nearest<T>(b));
        });
    }
}

// Of the heads `first_head` to `first_head + heads`: partial[part][column] = the sum of dy * x / rms over every
// gridDim.x-th quadruple of (token, head), in order, where dy is the gradient turned back; partial: [gridDim.x, dim].
// Blocks of 128 threads. Runs before `backward`, which overwrites the gradient.
template <class T, class W>
DEVICE inline void gain_partial(In<T> qkv, In<T> dqkv, const Rotation<T, W> &r, Out<float> partial, int tokens, int width,
                                int first_head, int heads) {
    SHARED(float, sums, 4 * 256);
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    int warp = int(threadIdx.x) / 32;
    for (int64_t item = int64_t(blockIdx.x) * 4 + warp; item < int64_t(tokens) * heads; item += int64_t(gridDim.x) * 4) {
        int64_t token = item / heads, at = token * width + (first_head + item % heads) * r.dim;
        float inverse = inverse_rms<T>(qkv, at, r.dim, r.eps);
        auto gradient = [&](int column) { return widen(dqkv.load(at + column)); };
        for (int j = 0; j < 8; j++) {
            int column = lane() + 32 * j;
            if (column < r.dim)
                sum[j] += turned(r, token, column, -1.0f, gradient) * widen(qkv.load(at + column)) * inverse;
        }
    }
    for (int j = 0; j < 8; j++) sums.store(warp * 256 + lane() + 32 * j, sum[j]);
    sync_block();
    for (int column = int(threadIdx.x); column < r.dim; column += int(blockDim.x)) {
        float all = 0.0f;
        for (int of = 0; of < 4; of++) all += sums.load(of * 256 + column);
        partial.store(int64_t(blockIdx.x) * r.dim + column, all);
    }
}

#define ROTATION(T, W)                                                                                                 \
    Rotation<T, W> {                                                                                                   \
        cosine, sine, q_weight, k_weight, int(num_heads), int(num_kv_heads), int(dim), int(half), offset, eps          \
    }

#define FORWARD_BF16                                                                                                   \
    In<bf16> qkv, Out<bf16> out, In<float> cosine, In<float> sine, In<bf16> q_weight, In<bf16> k_weight,                \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps
#define FORWARD_BF16_F32                                                                                               \
    In<bf16> qkv, Out<bf16> out, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,              \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps
#define FORWARD_F32                                                                                                    \
    In<float> qkv, Out<float> out, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,            \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps
#define WIDTH int((num_heads + 2 * num_kv_heads) * dim)

} // namespace

// out: [tokens, (H + K) dim] = the q and k of qkv: [tokens, (H + 2 K) dim], normed unless the weights are null, turned.
KERNEL rotary_bf16(FORWARD_BF16) { forward(qkv, out, ROTATION(bf16, bf16), WIDTH); }
// As rotary_bf16, with f32 weights of the norms.
KERNEL rotary_bf16_f32(FORWARD_BF16_F32) { forward(qkv, out, ROTATION(bf16, float), WIDTH); }
// As rotary_bf16, all in f32.
KERNEL rotary_f32(FORWARD_F32) { forward(qkv, out, ROTATION(float, float), WIDTH); }

#define BACKWARD_BF16                                                                                                  \
    In<bf16> qkv, InOut<bf16> dqkv, In<float> cosine, In<float> sine, In<bf16> q_weight, In<bf16> k_weight,             \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> qkv, InOut<bf16> dqkv, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,           \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps
#define BACKWARD_F32                                                                                                   \
    In<float> qkv, InOut<float> dqkv, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,         \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float offset, float eps

// The gradient of qkv's q and k columns from that of what rotary_bf16 gave, in place; v's columns stay.
KERNEL rotary_backward_bf16(BACKWARD_BF16) { backward(qkv, dqkv, ROTATION(bf16, bf16), WIDTH); }
// As rotary_backward_bf16, with f32 weights of the norms.
KERNEL rotary_backward_bf16_f32(BACKWARD_BF16_F32) { backward(qkv, dqkv, ROTATION(bf16, float), WIDTH); }
// As rotary_backward_bf16, all in f32.
KERNEL rotary_backward_f32(BACKWARD_F32) { backward(qkv, dqkv, ROTATION(float, float), WIDTH); }

#define GAIN_BF16                                                                                                      \
    In<bf16> qkv, In<bf16> dqkv, Out<float> partial, In<float> cosine, In<float> sine, uint32_t tokens,                 \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float eps, uint32_t of_k
#define GAIN_F32                                                                                                       \
    In<float> qkv, In<float> dqkv, Out<float> partial, In<float> cosine, In<float> sine, uint32_t tokens,               \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, float eps, uint32_t of_k
#define GAIN(T)                                                                                                        \
    Rotation<T, T> r{cosine, sine, In<T>{}, In<T>{}, int(num_heads), int(num_kv_heads), int(dim), int(half), 0.0f, eps}; \
    gain_partial(qkv, dqkv, r, partial, int(tokens), WIDTH, of_k ? int(num_heads) : 0,                                 \
                 int(of_k ? num_kv_heads : num_heads))

// Partial sums of the gradient of q's norm, or of k's; before rotary_backward.
KERNEL rotary_gain_partial_bf16(GAIN_BF16) { GAIN(bf16); }
// As rotary_gain_partial_bf16, in f32.
KERNEL rotary_gain_partial_f32(GAIN_F32) { GAIN(float); }
