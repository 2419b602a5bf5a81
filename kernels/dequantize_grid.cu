// Matrices with a grid of scales to bf16 or f32 panels for a product: FP8, GPTQ, AWQ, HQQ, MXFP4,
// NVFP4 and the integers of compressed-tensors and GGUF, as quant/schemes/grid.rs keeps them. A
// value is scale * (code - zero), each operation in f32, rounded once: the bits of the CPU's code
// there.
//
// Blocks of 256 threads write 8192 values (bf16) or 4096 (f32) of the flattened matrix, sixteen
// bytes at once if rows and cells are multiples of 8 values and the addresses allow it; otherwise
// each thread writes single values.
#include "codes.cuh"

namespace {

constexpr int THREADS = 256;

// Number of 16-byte stores of a thread.
constexpr int STORES = 4;

// Numbers of ScaleDtype and of GridZeros.
enum ScaleType { SCALE_F32, SCALE_F16, SCALE_BF16, SCALE_E8M0, SCALE_E4M3_TIMES, SCALE_E4M3_OVER };
enum ZeroType { ZERO_IMPLIED, ZERO_BYTES, ZERO_AS_SCALES };

// The codes: their bits, and their values without scale and zero.
struct Whole4 {
    static constexpr int BITS = 4;
    DEVICE static float value(uint32_t code) { return whole_number(code); }
};
struct Whole8 {
    static constexpr int BITS = 8;
    DEVICE static float value(uint32_t code) { return whole_number(code); }
};
struct E4m3 {
    static constexpr int BITS = 8;
    DEVICE static float value(uint32_t code) { return e4m3_value(code); }
};
struct E2m1 {
    static constexpr int BITS = 4;
    DEVICE static float value(uint32_t code) { return e2m1_value(code); }
};

// Returns a number of 16 or 8 bits.
DEVICE inline float number_at(In<uint8_t> bytes, uint32_t type, int64_t i) {
    switch (type) {
    case SCALE_F16: return f16_value(pair_at(bytes, i));
    case SCALE_BF16: return bf16_value(pair_at(bytes, i));
    case SCALE_E8M0: return e8m0_value(bytes.load(i));
    default: return e4m3_value(bytes.load(i));
    }
}

// Scale and zero of a cell.
struct Cell {
    float scale, zero;
};

struct Grid {
    In<float> scales;
    In<uint8_t> scale_bytes, zeros, column_groups;
    float factor, implied_zero;
    uint32_t scale_type, zero_type, groups;
    BlockSize columns, row_block, column_block;

    DEVICE float scale(int64_t cell) const {
        switch (scale_type) {
        case SCALE_F32: return scales.load(cell);
        case SCALE_E4M3_TIMES: return number_at(scale_bytes, scale_type, cell) * factor;
        case SCALE_E4M3_OVER: return number_at(scale_bytes, scale_type, cell) / factor;
        default: return number_at(scale_bytes, scale_type, cell);
        }
    }
    DEVICE float zero(int64_t cell) const {
        switch (zero_type) {
        case ZERO_IMPLIED: return implied_zero;
        case ZERO_BYTES: return whole_number(zeros.load(cell));
        default: return number_at(zeros, scale_type, cell);
        }
    }
    DEVICE Cell cell(int64_t at) const { return Cell{scale(at), zero(at)}; }
    // The first cell of a row.
    DEVICE int64_t first_cell(int64_t row) const { return row_block.block_of(row) * groups; }
};

template <class C> DEVICE inline float value_of_code(uint32_t code, Cell cell) {
    return cell.scale * (C::value(code) - cell.zero);
}

// Writes groups of V values, neighbours in neighbouring lanes; each group has one cell.
template <class C, class T> DEVICE inline void whole_groups(In<uint8_t> codes, const Grid &grid, Out<T> panel, int64_t count, int64_t first) {
    constexpr int V = PER16<T>;
    Bytes8 packed[STORES] = {};
    Cell cell[STORES] = {};
    UNROLL for (int s = 0; s < STORES; s++) {
        int64_t at = first + (s * THREADS + int(threadIdx.x)) * V;
        if (at >= count) break;
        int64_t row = grid.columns.block_of(at), column = at - row * grid.columns.size;
        packed[s] = codes_at<C::BITS, V>(codes, at, V);
        cell[s] = grid.cell(grid.first_cell(row) + grid.column_block.block_of(column));
    }
    UNROLL for (int s = 0; s < STORES; s++) {
        int64_t at = first + (s * THREADS + int(threadIdx.x)) * V;
        if (at >= count) break;
        panel.store16(at, bytes_of<T>([&](int i) { return value_of_code<C>(code_of<C::BITS>(packed[s], i), cell[s]); }));
    }
}

// Like whole_groups, for columns that name their groups.
template <class C, class T> DEVICE inline void named_groups(In<uint8_t> codes, const Grid &grid, Out<T> panel, int64_t count, int64_t first) {
    constexpr int V = PER16<T>;
    KEEP_LOOP for (int s = 0; s < STORES; s++) {
        int64_t at = first + (s * THREADS + int(threadIdx.x)) * V;
        if (at >= count) break;
        int64_t row = grid.columns.block_of(at), column = at - row * grid.columns.size;
        int64_t first_cell = grid.first_cell(row);
        Bytes8 packed = codes_at<C::BITS, V>(codes, at, V), groups[V / 4];
        UNROLL for (int k = 0; k < V / 4; k++) groups[k] = grid.column_groups.load8(2 * (column + 4 * k));
        panel.store16(at, bytes_of<T>([&](int i) {
            uint32_t group = (groups[i / 4].word[i % 4 / 2] >> (16 * (i % 2))) & 0xffffu;
            return value_of_code<C>(code_of<C::BITS>(packed, i), grid.cell(first_cell + group));
        }));
    }
}

// Writes single values, for any alignment.
template <class C, class T> DEVICE inline void single_values(In<uint8_t> codes, const Grid &grid, Out<T> panel, int64_t count, int64_t first) {
    KEEP_LOOP for (int s = 0; s < STORES * PER16<T>; s++) {
        int64_t at = first + s * THREADS + int(threadIdx.x);
        if (at >= count) break;
        int64_t row = grid.columns.block_of(at), column = at - row * grid.columns.size;
        int64_t group = grid.column_groups.is_null() ? grid.column_block.block_of(column) : pair_at(grid.column_groups, column);
        Cell cell = grid.cell(grid.first_cell(row) + group);
        panel.store(at, nearest<T>(value_of_code<C>(code_at<C::BITS>(codes, at), cell)));
    }
}

template <class C, class T> DEVICE inline void dequantize(In<uint8_t> codes, const Grid &grid, Out<T> panel, int64_t count) {
    int64_t first = int64_t(blockIdx.x) * (THREADS * STORES * PER16<T>);
    bool whole = grid.columns.size % 8 == 0 && panel.is_aligned(16) && codes.is_aligned(8);
    if (whole && !grid.column_groups.is_null() && grid.column_groups.is_aligned(8))
        named_groups<C>(codes, grid, panel, count, first);
    else if (whole && grid.column_groups.is_null() && grid.column_block.size % 8 == 0)
        whole_groups<C>(codes, grid, panel, count, first);
    else
        single_values<C>(codes, grid, panel, count, first);
}

} // namespace

// The parameters of all kernels of this file. `scales` has the scales of the cells if they are f32;
// otherwise `scale_bytes` has them in `scale_type`, and those in e4m3 are times or over `factor`.
// `zeros` has bytes or numbers in `scale_type`, by `zero_type`; without them every zero is
// `implied_zero`. A cell has `row_block` rows and `column_block` columns, unless `column_groups`
// has the group of each column in 16 bits; a row of cells has `groups`. A shift is the logarithm of
// the number before it, or -1 if that is not a power of two. `count` values are written.
#define PANEL_BF16 \
    In<uint8_t> codes, In<float> scales, In<uint8_t> scale_bytes, In<uint8_t> zeros, In<uint8_t> column_groups, \
    float factor, float implied_zero, uint32_t scale_type, uint32_t zero_type, uint32_t groups, uint32_t columns, \
    int32_t columns_shift, uint32_t row_block, int32_t row_shift, uint32_t column_block, int32_t column_shift, \
    Out<bf16> panel, int64_t count

#define PANEL_F32 \
    In<uint8_t> codes, In<float> scales, In<uint8_t> scale_bytes, In<uint8_t> zeros, In<uint8_t> column_groups, \
    float factor, float implied_zero, uint32_t scale_type, uint32_t zero_type, uint32_t groups, uint32_t columns, \
    int32_t columns_shift, uint32_t row_block, int32_t row_shift, uint32_t column_block, int32_t column_shift, \
    Out<float> panel, int64_t count

#define GRID \
    Grid { \
        scales, scale_bytes, zeros, column_groups, factor, implied_zero, scale_type, zero_type, groups, \
            {columns, columns_shift}, {row_block, row_shift}, {column_block, column_shift} \
    }

// Dequantizes whole numbers of 4 bits to bf16.
KERNEL BOUNDS(256, 4) dequantize_grid_int4_bf16(PANEL_BF16) {
    dequantize<Whole4>(codes, GRID, panel, count);
}
// Dequantizes whole numbers of 4 bits to f32.
KERNEL BOUNDS(256, 4) dequantize_grid_int4_f32(PANEL_F32) {
    dequantize<Whole4>(codes, GRID, panel, count);
}
// Dequantizes whole numbers of 8 bits to bf16.
KERNEL BOUNDS(256, 4) dequantize_grid_int8_bf16(PANEL_BF16) {
    dequantize<Whole8>(codes, GRID, panel, count);
}
// Dequantizes whole numbers of 8 bits to f32.
KERNEL BOUNDS(256, 4) dequantize_grid_int8_f32(PANEL_F32) {
    dequantize<Whole8>(codes, GRID, panel, count);
}
// Dequantizes e4m3 to bf16.
KERNEL BOUNDS(256, 4) dequantize_grid_e4m3_bf16(PANEL_BF16) {
    dequantize<E4m3>(codes, GRID, panel, count);
}
// Dequantizes e4m3 to f32.
KERNEL BOUNDS(256, 4) dequantize_grid_e4m3_f32(PANEL_F32) {
    dequantize<E4m3>(codes, GRID, panel, count);
}
// Dequantizes e2m1 to bf16.
KERNEL BOUNDS(256, 4) dequantize_grid_e2m1_bf16(PANEL_BF16) {
    dequantize<E2m1>(codes, GRID, panel, count);
}
// Dequantizes e2m1 to f32.
KERNEL BOUNDS(256, 4) dequantize_grid_e2m1_f32(PANEL_F32) {
    dequantize<E2m1>(codes, GRID, panel, count);
}
