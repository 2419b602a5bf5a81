// Quantized matrices to bf16 or f32 panels for a product: NF4 and FP4 (two codes a byte, the first
// in the high nibble), blockwise int8, the rows of LLM.int8(); quant/schemes has the formats. A
// value is the product of its code's value and its block's scale in f32, rounded once, so the bits
// are those of the CPU's code there.
//
// 4-bit codes are looked up in a table spread over the lanes of a warp, one shuffle per value
// (bitsandbytes, pull request 1747). All kernels process values `start..start + count` of the
// flattened matrix, a range of rows, with blocks of 256 threads, one per 8192 values (bf16) or 4096
// (f32). Sixteen bytes are written at once if `start` and `block_size` are multiples of 8 and the
// addresses allow it; otherwise each thread writes single values.
#include "codes.cuh"

namespace {

constexpr int THREADS = 256;

// Number of 16-byte stores of a thread.
constexpr int STORES = 4;

// Scales that share an outer scale (NESTED_BLOCK of crates/runtime/src/quant).
constexpr int NESTED_BLOCK = 256;

enum Codes { FOUR_BITS, EIGHT_BITS, ROWS };
template <Codes C> constexpr int BITS = C == FOUR_BITS ? 4 : 8;

// The scale of each block, or if `nested` is set its code in `map`: map[code] * scales[block / 256]
// + offset.
struct BlockScales {
    In<float> scales;
    In<uint8_t> nested;
    In<float> map;
    float offset;
    DEVICE float of(int64_t block) const {
        if (nested.is_null()) return scales.load(block);
        return map.load(nested.load(block)) * scales.load(block / NESTED_BLOCK) + offset;
    }
};

// Returns the value of one code without its block's scale; for 4-bit codes all lanes of a warp must
// call it together.
template <Codes C> DEVICE inline float look_up(uint32_t code, float lane_value, Shared<float> table) {
    if (C == FOUR_BITS) return shuffle(lane_value, int(code));
    if (C == EIGHT_BITS) return table.load(int(code));
    return float(int8_t(code));
}

template <Codes C> DEVICE inline float scaled(float value, float scale) {
    // Two products in this order, as bitsandbytes' int8_vectorwise_dequant.
    return C == ROWS ? value * scale * (1.0f / 127.0f) : value * scale;
}

// Writes sixteen bytes per store: groups of V values, neighbours in neighbouring lanes.
template <class T, Codes C>
DEVICE inline void whole_groups(In<uint8_t> codes, BlockScales scales, BlockSize size, Out<T> panel, int64_t start,
                                int64_t count, int64_t first, float lane_value, Shared<float> table) {
    constexpr int V = PER16<T>;
    Bytes8 packed[STORES];
    float scale[STORES];
    UNROLL for (int s = 0; s < STORES; s++) {
        int64_t at = first + (s * THREADS + int(threadIdx.x)) * V;
        int there = int(count - at < V ? count - at : V);
        packed[s] = codes_at<BITS<C>, V>(codes, start + at, there);
        scale[s] = there > 0 ? scales.of(size.block_of(start + at)) : 0.0f;
    }
    UNROLL for (int s = 0; s < STORES; s++) {
        int64_t at = first + (s * THREADS + int(threadIdx.x)) * V;
        float value[V];
        UNROLL for (int i = 0; i < V; i++)
            value[i] = scaled<C>(look_up<C>(code_of<BITS<C>>(packed[s], i), lane_value, table), scale[s]);
        if (at + V <= count) {
            panel.store16(at, bytes_of<T>([&](int i) { return value[i]; }));
        } else {
            UNROLL for (int i = 0; i < V; i++)
                if (at + i < count) panel.store(at + i, nearest<T>(value[i]));
        }
    }
}

// Writes single values, for any alignment.
template <class T, Codes C>
DEVICE inline void single_values(In<uint8_t> codes, BlockScales scales, BlockSize size, Out<T> panel, int64_t start,
                                 int64_t count, int64_t first, float lane_value, Shared<float> table) {
    for (int s = 0; s < STORES * PER16<T>; s++) {
        int64_t at = first + s * THREADS + int(threadIdx.x);
        bool there = at < count;
        int64_t place = start + (there ? at : 0);
        float value = look_up<C>(code_at<BITS<C>>(codes, place), lane_value, table);
        if (there) panel.store(at, nearest<T>(scaled<C>(value, scales.of(size.block_of(place)))));
    }
}

template <class T, Codes C>
DEVICE inline void dequantize(In<uint8_t> codes, In<float> values, BlockScales scales, BlockSize size, Out<T> panel,
                              int64_t start, int64_t count) {
    SHARED(float, table, C == EIGHT_BITS ? 256 : 1);
    float lane_value = 0.0f;
    if (C == FOUR_BITS) lane_value = values.load(threadIdx.x % 16);
    if (C == EIGHT_BITS) {
        table.store(int(threadIdx.x), values.load(threadIdx.x));
        sync_block();
    }
    int64_t first = int64_t(blockIdx.x) * (THREADS * STORES * PER16<T>);
    bool whole = start % 8 == 0 && size.size % 8 == 0 && panel.is_aligned(16) && codes.is_aligned(8);
    if (whole)
        whole_groups<T, C>(codes, scales, size, panel, start, count, first, lane_value, table);
    else
        single_values<T, C>(codes, scales, size, panel, start, count, first, lane_value, table);
}

} // namespace

// The parameters of all kernels of this file. `values` is the table of the 16 or 256 values of the
// codes; it is not read for rows, whose codes are integers. `scales` has one scale per block, or if
// `nested` is set one per 256 blocks; then `nested` has the codes of the scales, `map` their 256
// values and `offset` their mean. `block_shift` is the logarithm of `block_size`, or -1 if that is
// not a power of two.
#define PANEL_BF16 \
    In<uint8_t> codes, In<float> values, In<float> scales, In<uint8_t> nested, In<float> map, float offset, \
    uint32_t block_size, int32_t block_shift, Out<bf16> panel, int64_t start, int64_t count

#define PANEL_F32 \
    In<uint8_t> codes, In<float> values, In<float> scales, In<uint8_t> nested, In<float> map, float offset, \
    uint32_t block_size, int32_t block_shift, Out<float> panel, int64_t start, int64_t count

// Dequantizes NF4 or FP4, by `values`, to bf16.
KERNEL BOUNDS(256, 4) dequantize_4bit_bf16(PANEL_BF16) {
    dequantize<bf16, FOUR_BITS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                                count);
}

// Dequantizes NF4 or FP4, by `values`, to f32.
KERNEL BOUNDS(256, 4) dequantize_4bit_f32(PANEL_F32) {
    dequantize<float, FOUR_BITS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                                 count);
}

// Dequantizes blockwise int8 to bf16.
KERNEL BOUNDS(256, 4) dequantize_int8_bf16(PANEL_BF16) {
    dequantize<bf16, EIGHT_BITS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                                 count);
}

// Dequantizes blockwise int8 to f32.
KERNEL BOUNDS(256, 4) dequantize_int8_f32(PANEL_F32) {
    dequantize<float, EIGHT_BITS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                                  count);
}

// Dequantizes LLM.int8() to bf16: `block_size` is the length of a row, whose scale corresponds to
// code 127.
KERNEL BOUNDS(256, 4) dequantize_int8_rows_bf16(PANEL_BF16) {
    dequantize<bf16, ROWS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                           count);
}

// Dequantizes LLM.int8() to f32: `block_size` is the length of a row, whose scale corresponds to
// code 127.
KERNEL BOUNDS(256, 4) dequantize_int8_rows_f32(PANEL_F32) {
    dequantize<float, ROWS>(codes, values, {scales, nested, map, offset}, {block_size, block_shift}, panel, start,
                            count);
}
