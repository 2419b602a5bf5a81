// Uniform noise on the rows of a matrix, computed from (stream, token, column):
// y = x + bound (2u - 1). The noise equals that of crates/ops/src/ops/noise.rs bit for bit.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// The noise of one token.
struct Noise {
    uint64_t token;
    float bound;
    DEVICE float added(float x, uint64_t column) const {
        // The uniform number is k / 2^24 for the hash's leading 24 bits k.
        float sign = float(int(random_bits(token, column) >> 40) - 8388608) * (1.0f / 8388608.0f);
        return fmaf(bound, sign, x);
    }
};

template <class T>
DEVICE inline void add_noise(In<T> x, In<float> bounds, Out<T> y, int width, uint64_t stream, uint64_t first_token) {
    constexpr int V = PER16<T>;
    Noise noise{part_of(stream, first_token + blockIdx.x), bounds.load(blockIdx.x)};
    In<T> from = x.offset(int64_t(blockIdx.x) * width);
    Out<T> to = y.offset(int64_t(blockIdx.x) * width);
    over_columns<THREADS, T>(
        width, from.is_aligned(16) && to.is_aligned(16),
        [&](int c) {
            float values[V];
            load_values<T, V>(values, from, c);
            UNROLL for (int i = 0; i < V; i++) values[i] = noise.added(values[i], uint64_t(c + i));
            store_values<T, V>(to, c, values);
        },
        [&](int c) { to.store(c, nearest<T>(noise.added(widen(from.load(c)), uint64_t(c)))); });
}

} // namespace

// x, y: `[N, width]`; bounds: `[N]`, the largest noise of each row. `stream` is the state of the
// step's stream, `first_token` the index of the first row's token in the step's global batch. One
// block a row.
KERNEL BOUNDS(256, 5) add_noise_bf16(In<bf16> x, In<float> bounds, Out<bf16> y, uint32_t width, uint64_t stream,
    uint64_t first_token) {
    add_noise(x, bounds, y, int(width), stream, first_token);
}
// Like add_noise_bf16.
KERNEL BOUNDS(256, 6) add_noise_f32(In<float> x, In<float> bounds, Out<float> y, uint32_t width, uint64_t stream,
    uint64_t first_token) {
    add_noise(x, bounds, y, int(width), stream, first_token);
}
