// The blocks of GGUF to bf16 or f32 panels for a product: quant/block_type.rs has the layouts. A
// value is scale * code + added, each operation in f32, rounded once: the bits of the CPU's code
// there.
//
// A thread writes sixteen bytes: V values of a block, 8 (bf16) or 4 (f32), which share scale and
// addend. Many blocks have odd numbers of words, so that parts of them are not aligned.
#include "codes.cuh"

namespace {

constexpr int THREADS = 256;

// Numbers of BlockType.
enum Type {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};

// Scale and addend of the values of a thread. A product plus NOTHING has the bits of the product,
// also those of a zero.
struct Terms {
    float scale, added;
};
constexpr float NOTHING = -0.0f;

// Returns V bytes from `at` on.
template <int V> DEVICE inline Bytes8 bytes_at(In<uint8_t> block, int at) {
    Bytes8 bytes{{0, 0}};
    if (block.offset(at).is_aligned(4)) {
        UNROLL for (int i = 0; i < V; i += 4) bytes.word[i / 4] = block.load4(at + i);
    } else {
        UNROLL for (int i = 0; i < V; i++) bytes.word[i / 4] |= uint32_t(block.load(at + i)) << (8 * (i % 4));
    }
    return bytes;
}

// Returns bits of the i-th byte.
DEVICE inline uint32_t bits_of(const Bytes8 &bytes, int i, int shift, uint32_t mask) {
    return (code_of<8>(bytes, i) >> shift) & mask;
}

// Returns the f16 number at a byte.
DEVICE inline float half_at(In<uint8_t> block, int at) { return f16_value(pair_at(block.offset(at), 0)); }

// Each of these functions writes the values of V codes from element e of a block on to x.

// 32 codes of 4 bits from a byte on: those of the low nibbles, then those of the high ones.
template <int V, class F> DEVICE inline void nibbles(In<uint8_t> block, int first, int e, float (&x)[V], F value) {
    Bytes8 codes = bytes_at<V>(block, first + e % 16);
    UNROLL for (int i = 0; i < V; i++) x[i] = value(i, bits_of(codes, i, e / 16 * 4, 15u));
}

// 32 codes of 5 bits: their fifth bits in 4 bytes from `fifth` on, and nibbles.
template <int V> DEVICE inline void five_bits(In<uint8_t> block, int fifth, int first, int e, float (&x)[V]) {
    uint32_t high = uint32_t(block.load(fifth + e / 8)) >> (e % 8);
    nibbles(block, first, e, x, [&](int i, uint32_t code) { return whole_number(code | (high >> i & 1u) << 4); });
}

template <int V> DEVICE inline Terms q2_k(In<uint8_t> block, int e, float (&x)[V]) {
    Bytes8 codes = bytes_at<V>(block, 16 + e / 128 * 32 + e % 32);
    UNROLL for (int i = 0; i < V; i++) x[i] = whole_number(bits_of(codes, i, e / 32 % 4 * 2, 3u));
    uint32_t both = block.load(e / 16);
    return {half_at(block, 80) * whole_number(both & 15u), -(half_at(block, 82) * whole_number(both >> 4))};
}

template <int V> DEVICE inline Terms q3_k(In<uint8_t> block, int e, float (&x)[V]) {
    // A code whose bit in the mask is 0 is 4 lower.
    Bytes8 mask = bytes_at<V>(block, e % 32), codes = bytes_at<V>(block, 32 + e / 128 * 32 + e % 32);
    UNROLL for (int i = 0; i < V; i++)
        x[i] = whole_number(bits_of(codes, i, e / 32 % 4 * 2, 3u) | bits_of(mask, i, e / 32, 1u) << 2) - 4.0f;
    int s = e / 16;
    uint32_t low = uint32_t(block.load(96 + s % 8)) >> (s / 8 * 4) & 15u;
    uint32_t high = uint32_t(block.load(104 + s % 4)) >> (s / 4 * 2) & 3u;
    return {half_at(block, 108) * (whole_number(low | high << 4) - 32.0f), NOTHING};
}

// The terms of a group of 32 values in Q4_K and Q5_K: scale and minimum, in 6 bits each.
DEVICE inline Terms six_bits(In<uint8_t> block, int g) {
    In<uint8_t> s = block.offset(4);
    uint32_t scale, minimum;
    if (g < 4) {
        scale = s.load(g) & 63u;
        minimum = s.load(g + 4) & 63u;
    } else {
        uint32_t low = s.load(g + 4);
        scale = (low & 15u) | (uint32_t(s.load(g - 4)) >> 2 & 0x30u);
        minimum = low >> 4 | (uint32_t(s.load(g)) >> 2 & 0x30u);
    }
    return {half_at(block, 0) * whole_number(scale), -(half_at(block, 2) * whole_number(minimum))};
}

template <int V> DEVICE inline Terms q4_k(In<uint8_t> block, int e, float (&x)[V]) {
    Bytes8 codes = bytes_at<V>(block, 16 + e / 64 * 32 + e % 32);
    UNROLL for (int i = 0; i < V; i++) x[i] = whole_number(bits_of(codes, i, e / 32 % 2 * 4, 15u));
    return six_bits(block, e / 32);
}

template <int V> DEVICE inline Terms q5_k(In<uint8_t> block, int e, float (&x)[V]) {
    Bytes8 high = bytes_at<V>(block, 16 + e % 32), codes = bytes_at<V>(block, 48 + e / 64 * 32 + e % 32);
    UNROLL for (int i = 0; i < V; i++)
        x[i] = whole_number(bits_of(codes, i, e / 32 % 2 * 4, 15u) | bits_of(high, i, e / 32, 1u) << 4);
    return six_bits(block, e / 32);
}

template <int V> DEVICE inline Terms q6_k(In<uint8_t> block, int e, float (&x)[V]) {
    int quarter = e / 32 % 4;
    Bytes8 low = bytes_at<V>(block, e / 128 * 64 + quarter % 2 * 32 + e % 32);
    Bytes8 high = bytes_at<V>(block, 128 + e / 128 * 32 + e % 32);
    UNROLL for (int i = 0; i < V; i++)
        x[i] = whole_number(bits_of(low, i, quarter / 2 * 4, 15u) | bits_of(high, i, quarter * 2, 3u) << 4) - 32.0f;
    return {half_at(block, 208) * signed_number(block.load(192 + e / 16)), NOTHING};
}

// The values of 4-bit codes are in a table.
template <int V> DEVICE inline void looked_up(In<uint8_t> block, int first, int e, float (&x)[V], Shared<float> table) {
    nibbles(block, first, e, x, [&](int, uint32_t code) { return table.load(int(code)); });
}

template <int V> DEVICE inline Terms iq4_xs(In<uint8_t> block, int e, float (&x)[V], Shared<float> table) {
    int g = e / 32;
    looked_up(block, 8 + 16 * g, e % 32, x, table);
    uint32_t low = uint32_t(block.load(4 + g / 2)) >> (g % 2 * 4) & 15u;
    uint32_t high = pair_at(block, 1) >> (2 * g) & 3u;
    return {half_at(block, 0) * (whole_number(low | high << 4) - 32.0f), NOTHING};
}

template <int V> DEVICE inline Terms mxfp4(In<uint8_t> block, int e, float (&x)[V], Shared<float> table) {
    looked_up(block, 1, e, x, table);
    // Half of the power of two, for the values of the table are doubled.
    uint32_t exponent = block.load(0);
    return {bits_to_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23), NOTHING};
}

template <int V> DEVICE inline Terms decode(uint32_t type, In<uint8_t> block, int e, float (&x)[V], Shared<float> table) {
    switch (type) {
    case Q4_0:
        nibbles(block, 2, e, x, [](int, uint32_t code) { return whole_number(code) - 8.0f; });
        return {half_at(block, 0), NOTHING};
    case Q4_1:
        nibbles(block, 4, e, x, [](int, uint32_t code) { return whole_number(code); });
        return {half_at(block, 0), half_at(block, 2)};
    case Q5_0:
        five_bits(block, 2, 6, e, x);
        UNROLL for (int i = 0; i < V; i++) x[i] -= 16.0f;
        return {half_at(block, 0), NOTHING};
    case Q5_1: five_bits(block, 4, 8, e, x); return {half_at(block, 0), half_at(block, 2)};
    case Q8_0: {
        Bytes8 codes = bytes_at<V>(block, 2 + e);
        UNROLL for (int i = 0; i < V; i++) x[i] = signed_number(code_of<8>(codes, i));
        return {half_at(block, 0), NOTHING};
    }
    case Q2_K: return q2_k(block, e, x);
    case Q3_K: return q3_k(block, e, x);
    case Q4_K: return q4_k(block, e, x);
    case Q5_K: return q5_k(block, e, x);
    case Q6_K: return q6_k(block, e, x);
    case IQ4_NL: looked_up(block, 2, e, x, table); return {half_at(block, 0), NOTHING};
    case IQ4_XS: return iq4_xs(block, e, x, table);
    default: return mxfp4(block, e, x, table);
    }
}

template <class T>
DEVICE inline void dequantize(In<uint8_t> blocks, In<float> values, uint32_t type, int shift, int bytes, Out<T> panel, int64_t count) {
    constexpr int V = PER16<T>;
    SHARED(float, table, 16);
    if (!values.is_null() && threadIdx.x < 16) table.store(int(threadIdx.x), values.load(threadIdx.x));
    sync_block();
    int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * V;
    if (at >= count) return;
    int64_t block = at >> shift;
    float x[V];
    Terms terms = decode(type, blocks.offset(block * bytes), int(at - (block << shift)), x, table);
    UNROLL for (int i = 0; i < V; i++) x[i] = terms.scale * x[i] + terms.added;
    if (panel.is_aligned(16)) {
        store_values<T>(panel, at, x);
    } else {
        UNROLL for (int i = 0; i < V; i++) panel.store(at + i, nearest<T>(x[i]));
    }
}

} // namespace

// panel: `count` values of blocks of this type, each of 2^shift values in `bytes` bytes. `values`
// has the values of 16 codes for the types with a table. One block of 256 threads for each 2048
// values.
KERNEL BOUNDS(256, 4)
dequantize_blocks_bf16(In<uint8_t> blocks, In<float> values, uint32_t kind, uint32_t shift, uint32_t bytes, Out<bf16> panel, int64_t count) {
    dequantize(blocks, values, kind, int(shift), int(bytes), panel, count);
}
// Like dequantize_blocks_bf16, to f32, for each 1024 values.
KERNEL BOUNDS(256, 4)
dequantize_blocks_f32(In<uint8_t> blocks, In<float> values, uint32_t kind, uint32_t shift, uint32_t bytes, Out<float> panel, int64_t count) {
    dequantize(blocks, values, kind, int(shift), int(bytes), panel, count);
}
