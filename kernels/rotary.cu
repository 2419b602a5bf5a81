// Rotary positions (arXiv 2104.09864) on the q and k columns of a projection, after the per-head
// RMSNorm of some families; and their gradient. y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin for the
// pairs (i, i + half), or (2 i, 2 i + 1) if interleaved, of the first 2 half values of a head; the
// others stay. crates/ops/src/ops/rotary holds the definition.
//
// Rows of qkv are `width` values long: H heads of q, K of k, K of v, each `dim` wide, an even
// number of at most 256. cos and sin are [tokens, half]. One block of 128 threads per token. As
// many lanes as a head has pairs of 16 bytes share it, so that a warp processes several heads at a
// time. Heads not divisible into 16 bytes, and memory not aligned to them, are processed value by
// value.
#include "compat.cuh"

namespace {

constexpr int THREADS = 128;

// The heads of a projection, and the operation on them.
template <class T, class W> struct Rotation {
    In<float> cosine, sine;
    // Weights of the norms, [dim]; both null without norms.
    In<W> q_weight, k_weight;
    int num_heads, num_kv_heads, dim, half;
    bool interleaved;
    float offset, eps;

    DEVICE bool normed() const { return !q_weight.is_null(); }
    DEVICE In<W> weight(int head) const { return head < num_heads ? q_weight : k_weight; }
    // Returns true if 16 bytes divide both halves of the rotated part and the rest, and all of this
    // is aligned to 16 bytes.
    DEVICE bool is_whole() const {
        constexpr int V = PER16<T>;
        return dim % (2 * V) == 0 && half % V == 0 && cosine.is_aligned(16) && sine.is_aligned(16) &&
               q_weight.is_aligned(16) && k_weight.is_aligned(16);
    }
};

// Loads V neighbouring values; sixteen bytes or one value of T.
template <class T, int V, class M> DEVICE inline void load_run(float (&x)[V], M from, int64_t at) {
    if constexpr (V == 1)
        x[0] = widen(from.load(at));
    else
        load_values<T, V>(x, from, at);
}
template <class T, int V, class M> DEVICE inline void store_run(M to, int64_t at, const float (&x)[V]) {
    if constexpr (V == 1)
        to.store(at, nearest<T>(x[0]));
    else
        store_values<T, V>(to, at, x);
}

// Rotates a pair; each value is rounded once.
template <class T> DEVICE inline void rotate(float &x, float &y, float cosine, float sine) {
    float a = x, b = y;
    x = widen(nearest<T>(a * cosine - b * sine));
    y = widen(nearest<T>(b * cosine + a * sine));
}

// The assignment of a head to lanes: a unit is two runs of V values, which rotate together or stay,
// and `count` lanes, a power of two, have UNITS units each. Units past the end hold zeros.
template <int V> struct Lanes {
    static constexpr int UNITS = V == 1 ? 4 : 1;
    int dim, half, count;
    bool interleaved;
    DEVICE Lanes(int dim, int half, bool interleaved) : dim(dim), half(half), count(32), interleaved(interleaved) {
        while (count > 1 && count * V >= dim) count /= 2;
    }
    // Returns the number of heads that a block processes at a time.
    DEVICE int heads() const { return THREADS / count; }
    DEVICE int head() const { return int(threadIdx.x) / count; }
    // Calls f(unit, pair, first, second) for the lane's units: their runs begin at columns `first`
    // and `second`; for rotated units `pair` is the number of their first pair, below half.
    template <class F> DEVICE void for_units(F f) const {
        UNROLL for (int n = 0; n < UNITS; n++) {
            int pair = (int(threadIdx.x) % count + n * count) * V;
            bool apart = pair < half && !interleaved;
            if (2 * pair < dim) f(n, pair, apart ? pair : 2 * pair, apart ? pair + half : 2 * pair + V);
        }
    }
    // Calls f(unit, run, i) for all values of a lane.
    template <class F> DEVICE void for_values(F f) const {
        UNROLL for (int n = 0; n < UNITS; n++)
            UNROLL for (int k = 0; k < 2; k++)
                UNROLL for (int i = 0; i < V; i++) f(n, k, i);
    }
    // Returns the sum over the lanes of a head, in each of them, by a fixed tree.
    DEVICE float sum(float x) const {
        for (int distance = count / 2; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
        return x;
    }
    template <class T, class M> DEVICE void load(float (&x)[UNITS][2][V], M from, int64_t at) const {
        for_units([&](int n, int, int first, int second) {
            load_run<T, V>(x[n][0], from, at + first);
            load_run<T, V>(x[n][1], from, at + second);
        });
    }
    template <class T, class M> DEVICE void store(M to, int64_t at, const float (&x)[UNITS][2][V]) const {
        for_units([&](int n, int, int first, int second) {
            store_run<T, V>(to, at + first, x[n][0]);
            store_run<T, V>(to, at + second, x[n][1]);
        });
    }
    DEVICE float inverse_rms(const float (&x)[UNITS][2][V], float eps) const {
        float squares = 0.0f;
        for_values([&](int n, int k, int i) { squares = fmaf(x[n][k][i], x[n][k][i], squares); });
        return 1.0f / sqrtf(sum(squares) / float(dim) + eps);
    }
    // Rotates by the angles of `token`, forward (direction 1) or back (-1); each value is rounded
    // once.
    template <class T, class W>
    DEVICE void turn(float (&x)[UNITS][2][V], const Rotation<T, W> &r, int64_t token, float direction) const {
        for_units([&](int n, int pair, int, int) {
            if (pair >= half) return;
            float cosine[V], sine[V];
            load_run<float, V>(cosine, r.cosine, token * half + pair);
            load_run<float, V>(sine, r.sine, token * half + pair);
            UNROLL for (int i = 0; i < V; i++) {
                // Two runs of V values are V pairs: of equal places, or of neighbours.
                if (interleaved)
                    rotate<T>(x[n][2 * i / V][2 * i % V], x[n][(2 * i + 1) / V][(2 * i + 1) % V], cosine[i],
                              sine[i] * direction);
                else
                    rotate<T>(x[n][0][i], x[n][1][i], cosine[i], sine[i] * direction);
            }
        });
    }
    // Calls f(unit, run, i, gain) for the lane's values, with the gains of the norm of `head`.
    template <class T, class W, class F> DEVICE void for_gains(const Rotation<T, W> &r, int head, F f) const {
        for_units([&](int n, int, int first, int second) {
            UNROLL for (int k = 0; k < 2; k++) {
                float gain[V];
                load_run<W, V>(gain, r.weight(head), k == 0 ? first : second);
                UNROLL for (int i = 0; i < V; i++) f(n, k, i, gain[i] + r.offset);
            }
        });
    }
};

template <int V, class T, class W>
DEVICE inline void forward(In<T> qkv, Out<T> out, const Rotation<T, W> &r, int width) {
    Lanes<V> lanes(r.dim, r.half, r.interleaved);
    int heads = r.num_heads + r.num_kv_heads;
    int64_t token = blockIdx.x;
    // Lanes without a head still take part in the sums.
    for (int from = 0; from < heads; from += lanes.heads()) {
        int head = from + lanes.head();
        bool there = head < heads;
        float x[Lanes<V>::UNITS][2][V] = {};
        if (there) lanes.template load<T>(x, qkv, token * width + head * r.dim);
        float inverse = r.normed() ? lanes.inverse_rms(x, r.eps) : 1.0f;
        if (!there) continue;
        if (r.normed())
            lanes.for_gains(r, head, [&](int n, int k, int i, float gain) {
                x[n][k][i] = widen(nearest<T>(x[n][k][i] * inverse * gain));
            });
        lanes.turn(x, r, token, 1.0f);
        lanes.template store<T>(out, (token * heads + head) * r.dim, x);
    }
}

// Rotates the gradient in the q and k columns of dqkv back and takes it through the norms, in
// place.
template <int V, class T, class W>
DEVICE inline void backward(In<T> qkv, InOut<T> dqkv, const Rotation<T, W> &r, int width) {
    Lanes<V> lanes(r.dim, r.half, r.interleaved);
    int heads = r.num_heads + r.num_kv_heads;
    int64_t token = blockIdx.x;
    for (int from = 0; from < heads; from += lanes.heads()) {
        int head = from + lanes.head();
        int64_t at = token * width + head * r.dim;
        bool there = head < heads;
        float x[Lanes<V>::UNITS][2][V] = {}, d[Lanes<V>::UNITS][2][V] = {};
        if (there) lanes.template load<T>(d, dqkv, at);
        if (there && r.normed()) lanes.template load<T>(x, qkv, at);
        if (there) lanes.turn(d, r, token, -1.0f);
        if (r.normed()) {
            float inverse = lanes.inverse_rms(x, r.eps), sum = 0.0f;
            if (there)
                lanes.for_gains(r, head, [&](int n, int k, int i, float gain) {
                    d[n][k][i] *= gain;
                    sum = fmaf(x[n][k][i], d[n][k][i], sum);
                });
            float mean = lanes.sum(sum) * inverse / float(r.dim);
            lanes.for_values([&](int n, int k, int i) {
                d[n][k][i] = inverse * (d[n][k][i] - x[n][k][i] * inverse * mean);
            });
        }
        if (there) lanes.template store<T>(dqkv, at, d);
    }
}

// For the heads `first_head` to `first_head + heads`: partial[part][column] = the sum of dy * x /
// rms, with dy the gradient rotated back; partial: [gridDim.x, dim]. (token, head) are numbered
// token by token. A group of lanes that share a head sums numbers at a fixed stride in order, and
// the groups of a block are added in order, so the result depends only on the grid. `sums` holds
// 256 V values, at least 1024. Runs before `backward`, which overwrites the gradient.
template <int V, class T>
DEVICE inline void gain_partial(In<T> qkv, In<T> dqkv, const Rotation<T, T> &r, Out<float> partial, Shared<float> sums,
                                int tokens, int width, int first_head, int heads) {
    constexpr int UNITS = Lanes<V>::UNITS;
    Lanes<V> lanes(r.dim, r.half, r.interleaved);
    float sum[UNITS][2][V] = {};
    int step = int(gridDim.x) * lanes.heads(), number = int(blockIdx.x) * lanes.heads() + lanes.head();
    int token = number / heads, head = number % heads, tokens_on = step / heads, heads_on = step % heads;
    // All lanes of a warp loop equally often, because they sum squares together.
    for (int64_t first = int64_t(blockIdx.x) * lanes.heads(); first < int64_t(tokens) * heads; first += step) {
        bool there = token < tokens;
        int64_t at = int64_t(token) * width + (first_head + head) * r.dim;
        float x[UNITS][2][V] = {}, d[UNITS][2][V] = {};
        if (there) {
            lanes.template load<T>(x, qkv, at);
            lanes.template load<T>(d, dqkv, at);
            lanes.turn(d, r, token, -1.0f);
        }
        float inverse = lanes.inverse_rms(x, r.eps);
        if (there) lanes.for_values([&](int n, int k, int i) { sum[n][k][i] += d[n][k][i] * x[n][k][i] * inverse; });
        token += tokens_on, head += heads_on;
        if (head >= heads) token++, head -= heads;
    }
    lanes.for_units([&](int n, int, int first, int second) {
        UNROLL for (int i = 0; i < V; i++) {
            sums.store(lanes.head() * r.dim + first + i, sum[n][0][i]);
            sums.store(lanes.head() * r.dim + second + i, sum[n][1][i]);
        }
    });
    sync_block();
    for (int column = int(threadIdx.x); column < r.dim; column += THREADS) {
        float all = 0.0f;
        for (int group = 0; group < lanes.heads(); group++) all += sums.load(group * r.dim + column);
        partial.store(int64_t(blockIdx.x) * r.dim + column, all);
    }
}

#define ROTATION(T, W)                                                                                                 \
    Rotation<T, W> {                                                                                                   \
        cosine, sine, q_weight, k_weight, int(num_heads), int(num_kv_heads), int(dim), int(half),                      \
            interleaved != 0, offset, eps                                                                              \
    }

#define FORWARD_BF16                                                                                                   \
    In<bf16> qkv, Out<bf16> out, In<float> cosine, In<float> sine, In<bf16> q_weight, In<bf16> k_weight,                \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps
#define FORWARD_BF16_F32                                                                                               \
    In<bf16> qkv, Out<bf16> out, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,              \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps
#define FORWARD_F32                                                                                                    \
    In<float> qkv, Out<float> out, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,            \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps
#define WIDTH int((num_heads + 2 * num_kv_heads) * dim)
#define FORWARD(T, W)                                                                                                  \
    auto rotation = ROTATION(T, W);                                                                                    \
    if (rotation.is_whole() && qkv.is_aligned(16) && out.is_aligned(16))                                               \
        forward<PER16<T>>(qkv, out, rotation, WIDTH);                                                                  \
    else                                                                                                               \
        forward<1>(qkv, out, rotation, WIDTH)
#define BACKWARD(T, W)                                                                                                 \
    auto rotation = ROTATION(T, W);                                                                                    \
    if (rotation.is_whole() && qkv.is_aligned(16) && dqkv.is_aligned(16))                                              \
        backward<PER16<T>>(qkv, dqkv, rotation, WIDTH);                                                                \
    else                                                                                                               \
        backward<1>(qkv, dqkv, rotation, WIDTH)

} // namespace

// out: [tokens, (H + K) dim] = the q and k of qkv: [tokens, (H + 2 K) dim], normed unless the
// weights are null, then rotated.
KERNEL BOUNDS(128, 8) rotary_bf16(FORWARD_BF16) { FORWARD(bf16, bf16); }
// Like rotary_bf16, with f32 weights of the norms.
KERNEL BOUNDS(128, 8) rotary_bf16_f32(FORWARD_BF16_F32) { FORWARD(bf16, float); }
// Like rotary_bf16, all in f32.
KERNEL BOUNDS(128, 8) rotary_f32(FORWARD_F32) { FORWARD(float, float); }

#define BACKWARD_BF16                                                                                                  \
    In<bf16> qkv, InOut<bf16> dqkv, In<float> cosine, In<float> sine, In<bf16> q_weight, In<bf16> k_weight,             \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> qkv, InOut<bf16> dqkv, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,           \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps
#define BACKWARD_F32                                                                                                   \
    In<float> qkv, InOut<float> dqkv, In<float> cosine, In<float> sine, In<float> q_weight, In<float> k_weight,         \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float offset, float eps

// The gradient of qkv's q and k columns from the gradient of rotary_bf16's result, in place; v's
// columns stay.
KERNEL BOUNDS(128, 5) rotary_backward_bf16(BACKWARD_BF16) { BACKWARD(bf16, bf16); }
// Like rotary_backward_bf16, with f32 weights of the norms.
KERNEL BOUNDS(128, 5) rotary_backward_bf16_f32(BACKWARD_BF16_F32) { BACKWARD(bf16, float); }
// Like rotary_backward_bf16, all in f32.
KERNEL BOUNDS(128, 5) rotary_backward_f32(BACKWARD_F32) { BACKWARD(float, float); }

#define GAIN_BF16                                                                                                      \
    In<bf16> qkv, In<bf16> dqkv, Out<float> partial, In<float> cosine, In<float> sine, uint32_t tokens,                 \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float eps, uint32_t of_k
#define GAIN_F32                                                                                                       \
    In<float> qkv, In<float> dqkv, Out<float> partial, In<float> cosine, In<float> sine, uint32_t tokens,               \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t dim, uint32_t half, uint32_t interleaved,                  \
        float eps, uint32_t of_k
#define GAIN(T)                                                                                                        \
    SHARED(float, sums, 256 * PER16<T>);                                                                               \
    Rotation<T, T> r{cosine,            sine,     In<T>{},   In<T>{},          int(num_heads),                         \
                     int(num_kv_heads), int(dim), int(half), interleaved != 0, 0.0f, eps};                             \
    int first_head = of_k ? int(num_heads) : 0, heads = of_k ? int(num_kv_heads) : int(num_heads);                     \
    if (r.is_whole() && qkv.is_aligned(16) && dqkv.is_aligned(16))                                                     \
        gain_partial<PER16<T>>(qkv, dqkv, r, partial, sums, int(tokens), WIDTH, first_head, heads);                    \
    else                                                                                                               \
        gain_partial<1>(qkv, dqkv, r, partial, sums, int(tokens), WIDTH, first_head, heads)

// Partial sums of the gradient of q's norm, or of k's; before rotary_backward.
KERNEL BOUNDS(128, 4) rotary_gain_partial_bf16(GAIN_BF16) { GAIN(bf16); }
// Like rotary_gain_partial_bf16, in f32.
KERNEL BOUNDS(128, 4) rotary_gain_partial_f32(GAIN_F32) { GAIN(float); }
