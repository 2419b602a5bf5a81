// Products in fp8 (e4m3): rows to codes with a scale each, codes transposed, and the scales of the
// rows of both operands, for GPUs whose products take none. crates/ops/src/ops/matmul_fp8 holds the
// definition. All bits are those of the CPU's code there.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// The largest value of e4m3.
constexpr float MOST = 448.0f;
// Smaller rows get the scale of this value: 2^-100.
constexpr float LEAST = 7.8886090522101181e-31f;

// Values of a thread at once: their codes are 16 bytes.
constexpr int V = 16;

DEVICE inline float magnitude(float x) { return bits_to_float(float_to_bits(x) & 0x7fffffffu); }

// Returns the code of the value of e4m3 nearest to x, ties to even, as to_e4m3 of
// crates/runtime/src/quant: finite values saturate, a NaN stays one.
DEVICE inline uint32_t to_e4m3(float x) {
    // The last place of 2^14 is 2^-9, the distance of the values below 2^-6.
    constexpr float COARSE = 16384.0f, LEAST_NORMAL = 0.015625f;
    uint32_t bits = float_to_bits(x) & 0x7fffffffu, sign = (float_to_bits(x) >> 24) & 0x80u;
    uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t small = float_to_bits(magnitude(x) + COARSE) - float_to_bits(COARSE);
    uint32_t code = magnitude(x) < LEAST_NORMAL ? small : normal;
    code = code < 0x7eu ? code : 0x7eu;
    return sign | (x != x ? 0x7fu : code);
}

// Loads V values from column c on, or the `count` that are there, each times its factor if
// `factors` is set.
template <class T>
DEVICE inline void load_row(float (&x)[V], In<T> row, In<float> factors, int c, int count, bool whole) {
    if (whole)
        load_values<T, V>(x, row, c);
    else
        UNROLL for (int i = 0; i < V; i++) x[i] = i < count ? widen(row.load(c + i)) : 0.0f;
    if (factors.is_null()) return;
    UNROLL for (int i = 0; i < V; i++) if (i < count) x[i] *= factors.load(c + i);
}

// One block for each row.
template <class T>
DEVICE inline void quantize(In<T> x, In<float> factors, Out<uint8_t> codes, Out<float> scales, int width, int64_t pitch) {
    SHARED(float, scratch, 32);
    In<T> row = x.offset(blockIdx.x * pitch);
    Out<uint8_t> to = codes.offset(int64_t(blockIdx.x) * width);
    bool aligned = row.is_aligned(16) && to.is_aligned(16);
    float largest = LEAST;
    for (int c = int(threadIdx.x) * V; c < width; c += THREADS * V) {
        float values[V];
        load_row<T>(values, row, factors, c, width - c, aligned && c + V <= width);
        UNROLL for (int i = 0; i < V; i++) largest = magnitude(values[i]) > largest ? magnitude(values[i]) : largest;
    }
    largest = block_max(largest, scratch);
    if (threadIdx.x == 0) scales.store(blockIdx.x, largest / MOST);
    float inverse = MOST / largest;
    for (int c = int(threadIdx.x) * V; c < width; c += THREADS * V) {
        float values[V];
        bool whole = aligned && c + V <= width;
        load_row<T>(values, row, factors, c, width - c, whole);
        if (whole) {
            Bytes16 packed{{0, 0, 0, 0}};
            UNROLL for (int i = 0; i < V; i++) packed.word[i / 4] |= to_e4m3(values[i] * inverse) << (8 * (i % 4));
            to.store16(c, packed);
        } else {
            UNROLL for (int i = 0; i < V; i++) if (c + i < width) to.store(c + i, uint8_t(to_e4m3(values[i] * inverse)));
        }
    }
}

// dst: [rows, width] = [dst +] sums * scale of the row * scale of the column. One block for each
// row.
template <class D>
DEVICE inline void scale(InOut<D> dst, In<float> sums, In<float> rows, In<float> columns, int width, int64_t pitch,
                         bool accumulate) {
    InOut<D> to = dst.offset(blockIdx.x * pitch);
    In<float> from = sums.offset(int64_t(blockIdx.x) * width);
    float of_row = rows.load(blockIdx.x);
    bool aligned = to.is_aligned(4 * sizeof(D)) && from.is_aligned(16) && (columns.is_null() || columns.is_aligned(16));
    for (int c = 4 * int(threadIdx.x); c < width; c += 4 * THREADS) {
        bool whole = aligned && c + 4 <= width;
        float x[4] = {}, of_column[4] = {1.0f, 1.0f, 1.0f, 1.0f}, before[4] = {};
        if (whole) {
            load_values<float, 4>(x, from, c);
            if (!columns.is_null()) load_values<float, 4>(of_column, columns, c);
            if (accumulate) load_values<D, 4>(before, to, c);
        } else {
            UNROLL for (int i = 0; i < 4; i++) if (c + i < width) {
                x[i] = from.load(c + i);
                if (!columns.is_null()) of_column[i] = columns.load(c + i);
                if (accumulate) before[i] = widen(to.load(c + i));
            }
        }
        UNROLL for (int i = 0; i < 4; i++) x[i] = before[i] + x[i] * of_row * of_column[i];
        if (whole) {
            store_values<D, 4>(to, c, x);
        } else {
            UNROLL for (int i = 0; i < 4; i++) if (c + i < width) to.store(c + i, nearest<D>(x[i]));
        }
    }
}

} // namespace

// codes: [rows, width] e4m3 and scales: [rows] of `width` columns of x: [rows, pitch], times
// `factors`: [width] if set. One block of 256 threads for each row.
KERNEL BOUNDS(256, 4) quantize_fp8_bf16(In<bf16> x, In<float> factors, Out<uint8_t> codes, Out<float> scales, uint32_t width, int64_t pitch) {
    quantize(x, factors, codes, scales, int(width), pitch);
}
// Like quantize_fp8_bf16, of f32.
KERNEL BOUNDS(256, 4) quantize_fp8_f32(In<float> x, In<float> factors, Out<uint8_t> codes, Out<float> scales, uint32_t width, int64_t pitch) {
    quantize(x, factors, codes, scales, int(width), pitch);
}

// y: [columns, rows] = x: [rows, columns] transposed, whose sizes are multiples of 4. One block of
// 256 threads for each tile of 64 x 64 codes; tiles of a row along x.
KERNEL BOUNDS(256, 4) transpose_fp8(In<uint8_t> x, Out<uint8_t> y, uint32_t rows, uint32_t columns) {
    constexpr int TILE = 64, WORDS = TILE / 4, PITCH = WORDS + 1, STEP = THREADS / WORDS;
    SHARED(uint32_t, tile, TILE * PITCH);
    int word = int(threadIdx.x) % WORDS, line = int(threadIdx.x) / WORDS;
    int first_row = int(blockIdx.y) * TILE, first_column = int(blockIdx.x) * TILE;
    int column = first_column + 4 * word, row = first_row + 4 * word;
    UNROLL for (int i = line; i < TILE; i += STEP)
        if (first_row + i < int(rows) && column < int(columns))
            tile.store(i * PITCH + word, x.load4(int64_t(first_row + i) * columns + column));
    sync_block();
    UNROLL for (int i = line; i < TILE; i += STEP) {
        if (first_column + i >= int(columns) || row >= int(rows)) continue;
        uint32_t packed = 0;
        UNROLL for (int k = 0; k < 4; k++)
            packed |= ((tile.load((4 * word + k) * PITCH + i / 4) >> (8 * (i % 4))) & 255u) << (8 * k);
        y.store4(int64_t(first_column + i) * rows + row, packed);
    }
}

// dst: [rows, pitch] gets `width` columns of sums times the scales of their row and, if `columns`
// is set, their column; they are added if `accumulate`. One block of 256 threads for each row.
KERNEL BOUNDS(256, 6) scale_fp8_bf16(InOut<bf16> dst, In<float> sums, In<float> rows, In<float> columns, uint32_t width, int64_t pitch, uint32_t accumulate) {
    scale(dst, sums, rows, columns, int(width), pitch, accumulate != 0);
}
// Like scale_fp8_bf16, to f32.
KERNEL BOUNDS(256, 6) scale_fp8_f32(InOut<float> dst, In<float> sums, In<float> rows, In<float> columns, uint32_t width, int64_t pitch, uint32_t accumulate) {
    scale(dst, sums, rows, columns, int(width), pitch, accumulate != 0);
}
