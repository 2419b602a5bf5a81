// Sums in a fixed order, each in two stages: sums of squares of gradients in f64, sums of columns
// (gradients of biases and of DoRA's magnitudes).
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// Columns of a block, and the rows that it sums: 8 warps, warp w takes rows w, w + 8, ... of the
// block's.
constexpr int COLUMNS = 128;
constexpr int ROWS = 64;
constexpr int WARPS = THREADS / 32;

// Loads four values of a row from column c on, as products a * b or as a alone; zeros past the
// row's end.
template <class T, class X, bool PRODUCT>
DEVICE inline void four_products(float (&x)[4], In<T> a, In<X> b, int c, int width, bool whole) {
    float y[4];
    if (whole && c + 4 <= width) {
        load_values<T, 4>(x, a, c);
        if (PRODUCT) load_values<X, 4>(y, b, c);
    } else {
        UNROLL for (int i = 0; i < 4; i++) {
            x[i] = c + i < width ? widen(a.load(c + i)) : 0.0f;
            if (PRODUCT) y[i] = c + i < width ? widen(b.load(c + i)) : 0.0f;
        }
    }
    if (PRODUCT) UNROLL for (int i = 0; i < 4; i++) x[i] *= y[i];
}

template <class T, class X, bool PRODUCT>
DEVICE inline void column_sums(In<T> a, In<X> b, Out<float> partials, int rows, int width, int64_t pitch,
                               int64_t b_pitch) {
    SHARED(float, sums, WARPS * COLUMNS);
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int c = int(blockIdx.x) * COLUMNS + 4 * lane, first = int(blockIdx.y) * ROWS;
    int end = first + ROWS < rows ? first + ROWS : rows;
    bool whole = a.is_aligned(4 * sizeof(T)) && pitch % 4 == 0 &&
                 (!PRODUCT || (b.is_aligned(4 * sizeof(X)) && b_pitch % 4 == 0));
    float sum[4] = {};
    UNROLL for (int k = 0; k < ROWS / WARPS; k++) {
        int64_t n = first + warp + WARPS * k;
        if (n >= end) continue;
        float x[4];
        four_products<T, X, PRODUCT>(x, a.offset(n * pitch), PRODUCT ? b.offset(n * b_pitch) : b, c, width, whole);
        UNROLL for (int i = 0; i < 4; i++) sum[i] += x[i];
    }
    sums.store16(warp * COLUMNS + 4 * lane, bytes_of<float>([&](int i) { return sum[i]; }));
    sync_block();
    int column = int(blockIdx.x) * COLUMNS + int(threadIdx.x);
    if (int(threadIdx.x) >= COLUMNS || column >= width) return;
    float all = 0.0f;
    for (int w = 0; w < WARPS; w++) all += sums.load(w * COLUMNS + int(threadIdx.x));
    partials.store(int64_t(blockIdx.y) * width + column, all);
}

template <class T>
DEVICE inline void sum_of_squares(In<T> x, int64_t count, Out<double> partials, Shared<double> scratch) {
    constexpr int SHARE = 16384, AT_ONCE = 4;
    int64_t start = int64_t(blockIdx.x) * SHARE, end = start + SHARE < count ? start + SHARE : count;
    double sum = 0.0;
    bool whole = x.is_aligned(4 * sizeof(T));
    for (int64_t first = start + 4 * int(threadIdx.x); first < end; first += 4 * THREADS * AT_ONCE) {
        float values[AT_ONCE][4];
        UNROLL for (int k = 0; k < AT_ONCE; k++) {
            int64_t at = first + 4 * THREADS * k;
            if (whole && at + 4 <= end)
                load_values<T, 4>(values[k], x, at);
            else
                UNROLL for (int i = 0; i < 4; i++) values[k][i] = at + i < end ? widen(x.load(at + i)) : 0.0f;
        }
        UNROLL for (int k = 0; k < AT_ONCE; k++)
            UNROLL for (int i = 0; i < 4; i++) sum += double(values[k][i]) * double(values[k][i]);
    }
    sum = block_sum_f64<THREADS>(sum, scratch);
    if (threadIdx.x == 0) partials.store(blockIdx.x, sum);
}

} // namespace

// `partials[b]` = the sum of squares of values 16384 b to 16384 (b + 1) of x, in f64; one block
// each. Several tensors, one launch each, write to parts of one list. The partition does not depend
// on the GPU, so neither do the bits.
KERNEL BOUNDS(256, 4) sum_of_squares_f32(In<float> x, int64_t count, Out<double> partials) {
    SHARED(double, scratch, THREADS);
    sum_of_squares(x, count, partials, scratch);
}
// Like sum_of_squares_f32.
KERNEL BOUNDS(256, 4) sum_of_squares_bf16(In<bf16> x, int64_t count, Out<double> partials) {
    SHARED(double, scratch, THREADS);
    sum_of_squares(x, count, partials, scratch);
}

// The second stage: `sum[0]` = the sum of `count` partial sums. One block. Squares of f32 numbers
// cannot overflow f64, so the sum is finite if and only if all values are.
KERNEL BOUNDS(256, 1) sum_partials(In<double> partials, uint32_t count, Out<double> sum) {
    SHARED(double, scratch, THREADS);
    double mine = 0.0;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) mine += partials.load(i);
    mine = block_sum_f64<THREADS>(mine, scratch);
    if (threadIdx.x == 0) sum.store(0, mine);
}

// `partials[p, j]` = the sum of `dy[n, j]` over rows 64 p to 64 (p + 1), the first stage of a
// bias's gradient. Rows of dy are `pitch` apart. Blocks: one for each 128 columns along x, for each
// 64 rows along y.
KERNEL BOUNDS(256, 4) column_sums_bf16(In<bf16> dy, Out<float> partials, uint32_t rows, uint32_t width, int64_t pitch) {
    column_sums<bf16, bf16, false>(dy, dy, partials, int(rows), int(width), pitch, 0);
}
// Like column_sums_bf16.
KERNEL BOUNDS(256, 4) column_sums_f32(In<float> dy, Out<float> partials, uint32_t rows, uint32_t width, int64_t pitch) {
    column_sums<float, float, false>(dy, dy, partials, int(rows), int(width), pitch, 0);
}
// Like column_sums_bf16, of the products `dy[n, j] * x[n, j]`: the gradient of DoRA's magnitudes.
KERNEL BOUNDS(256, 4) column_products_bf16_bf16(In<bf16> dy, In<bf16> x, Out<float> partials, uint32_t rows,
    uint32_t width, int64_t pitch, int64_t x_pitch) {
    column_sums<bf16, bf16, true>(dy, x, partials, int(rows), int(width), pitch, x_pitch);
}
// Like column_products_bf16_bf16.
KERNEL BOUNDS(256, 4) column_products_bf16_f32(In<bf16> dy, In<float> x, Out<float> partials, uint32_t rows,
    uint32_t width, int64_t pitch, int64_t x_pitch) {
    column_sums<bf16, float, true>(dy, x, partials, int(rows), int(width), pitch, x_pitch);
}
// Like column_products_bf16_bf16.
KERNEL BOUNDS(256, 4) column_products_f32_bf16(In<float> dy, In<bf16> x, Out<float> partials, uint32_t rows,
    uint32_t width, int64_t pitch, int64_t x_pitch) {
    column_sums<float, bf16, true>(dy, x, partials, int(rows), int(width), pitch, x_pitch);
}
// Like column_products_bf16_bf16.
KERNEL BOUNDS(256, 4) column_products_f32_f32(In<float> dy, In<float> x, Out<float> partials, uint32_t rows,
    uint32_t width, int64_t pitch, int64_t x_pitch) {
    column_sums<float, float, true>(dy, x, partials, int(rows), int(width), pitch, x_pitch);
}

// The second stage: `grad[j]` += the sum over p of `partials[p, j]`, divided by `norm[j]` unless
// `norm` is null. One thread per column, 256 per block.
KERNEL BOUNDS(256, 4) add_column_sums(In<float> partials, In<float> norm, InOut<float> grad, uint32_t parts,
    uint32_t width) {
    int64_t column = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
    for (int64_t p = 0; p < parts; p++) sum += partials.load(p * width + column);
    if (!norm.is_null()) sum /= norm.load(column);
    grad.store(column, grad.load(column) + sum);
}
