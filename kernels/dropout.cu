// Dropout with a mask computed from (stream, token, column): y = x * keep / (1 - p). The mask
// equals that of crates/ops/src/ops/dropout.rs bit for bit; the backward is the same kernel on the
// gradient.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// The factors on the values of one token.
struct Mask {
    uint64_t token;
    // The uniform number is k / 2^24 for the hash's leading 24 bits k: it is below p if k is below
    // p * 2^24.
    uint32_t limit;
    float scale;
    DEVICE float keep(uint64_t column) const {
        return uint32_t(random_bits(token, column) >> 40) < limit ? 0.0f : scale;
    }
};

DEVICE inline Mask mask_of(uint64_t stream, uint64_t token, float p) {
    return Mask{part_of(stream, token), uint32_t(ceilf(p * 16777216.0f)), 1.0f / (1.0f - p)};
}

template <class T>
DEVICE inline void dropout(In<T> x, Out<T> y, int width, uint64_t stream, uint64_t first_token, float p) {
    constexpr int V = PER16<T>;
    Mask mask = mask_of(stream, first_token + blockIdx.x, p);
    In<T> from = x.offset(int64_t(blockIdx.x) * width);
    Out<T> to = y.offset(int64_t(blockIdx.x) * width);
    over_columns<THREADS, T>(
        width, from.is_aligned(16) && to.is_aligned(16),
        [&](int c) {
            float values[V];
            load_values<T, V>(values, from, c);
            UNROLL for (int i = 0; i < V; i++) values[i] *= mask.keep(uint64_t(c + i));
            store_values<T, V>(to, c, values);
        },
        [&](int c) { to.store(c, nearest<T>(widen(from.load(c)) * mask.keep(uint64_t(c)))); });
}

} // namespace

// x, y: `[N, width]`. `stream` is the state of the site's stream, `first_token` the index of the
// first row's token in the step's global batch, p the probability of a zero. One block a row.
KERNEL BOUNDS(256, 5) dropout_bf16(In<bf16> x, Out<bf16> y, uint32_t width, uint64_t stream, uint64_t first_token,
    float p) {
    dropout(x, y, int(width), stream, first_token, p);
}
// Like dropout_bf16.
KERNEL BOUNDS(256, 6) dropout_f32(In<float> x, Out<float> y, uint32_t width, uint64_t stream, uint64_t first_token,
    float p) {
    dropout(x, y, int(width), stream, first_token, p);
}
