// DoRA's norms: the root of the sum of squares of each row of W + scale B A, with W of [out,
// width], A of [rank, width] and B of [out, rank]. The sum exists in registers alone, so W is read
// once and nothing of its size is written.
//
// In bf16 the tensor cores compute B A. Its roundings count where W and scale B A cancel: a row
// shorter than half of W's is summed again, with every value in f64. So are all rows of f32
// matrices, and of those whose rows or addresses do not allow accesses of 16 bytes.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
// Rows of a block, and columns of a warp at a time.
constexpr int ROWS = 16, COLUMNS = 64;
// Sums of a row: those of four lanes of each warp.
constexpr int PARTS = 4 * WARPS;

// A frozen matrix and the two of its adapter.
template <class W, class F> struct Adapted {
    In<W> w;
    In<F> a, b;
    int width, rank;
    double scale;
};

// Returns the sum of squares of a row of W + scale B A in thread 0, with every value in f64.
// `scratch` holds a value of each thread.
template <class W, class F>
DEVICE inline double exact_square(const Adapted<W, F> &x, int64_t row, Shared<double> scratch) {
    double sum = 0.0;
    for (int c = int(threadIdx.x); c < x.width; c += THREADS) {
        double update = 0.0;
        for (int k = 0; k < x.rank; k++)
            update += double(widen(x.b.load(row * x.rank + k))) * double(widen(x.a.load(int64_t(k) * x.width + c)));
        double value = double(widen(x.w.load(row * x.width + c))) + x.scale * update;
        sum += value * value;
    }
    return block_sum_f64<THREADS>(sum, scratch);
}

// Loads the left operand for k to k + 15: rows of B from `first` on, zeros behind its ends.
DEVICE inline void load_left(uint32_t (&left)[4], const Adapted<bf16, bf16> &x, int64_t first, int64_t out, int k) {
    int lane = int(threadIdx.x) % 32;
    UNROLL for (int i = 0; i < 4; i++) {
        int64_t row = first + lane / 4 + i % 2 * 8;
        int at = k + lane % 4 * 2 + i / 2 * 8;
        left[i] = row < out && at < x.rank ? x.b.load4(row * x.rank + at) : 0u;
    }
}

// Loads the right operands of eight products for k to k + 15: columns of A from `start` on, zeros
// behind its ends. Column n of product t is column 8 n + t, so that a lane loads neighbours, and
// has the products of 16 columns of W.
DEVICE inline void load_right(uint32_t (&right)[8][2], const Adapted<bf16, bf16> &x, int start, int k) {
    int lane = int(threadIdx.x) % 32, c = start + lane / 4 * 8;
    UNROLL for (int half = 0; half < 2; half++) {
        int at = k + lane % 4 * 2 + 8 * half;
        Bytes16 even{}, odd{};
        if (at < x.rank && c < x.width) {
            even = x.a.load16(int64_t(at) * x.width + c);
            odd = x.a.load16(int64_t(at + 1) * x.width + c);
        }
        UNROLL for (int i = 0; i < 4; i++) {
            right[2 * i][half] = (even.word[i] & 0xffffu) | odd.word[i] << 16;
            right[2 * i + 1][half] = even.word[i] >> 16 | (odd.word[i] & 0xffff0000u);
        }
    }
}

// Stores this lane's share of the sums of squares of 16 rows from `first` on: of W + scale B A,
// then of W. Each has PARTS shares of ROWS values.
DEVICE inline void store_squares(const Adapted<bf16, bf16> &x, int64_t first, int64_t out, Shared<double> shares) {
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    float scale = float(x.scale);
    double adapted[2] = {}, frozen[2] = {};
    for (int start = warp * COLUMNS; start < x.width; start += WARPS * COLUMNS) {
        Bytes16 w[2][2] = {};
        UNROLL for (int half = 0; half < 2; half++)
            UNROLL for (int part = 0; part < 2; part++) {
                int64_t row = first + lane / 4 + 8 * half;
                int c = start + lane % 4 * 16 + 8 * part;
                if (row < out && c < x.width) w[half][part] = x.w.load16(row * x.width + c);
            }
        float update[8][4] = {};
        KEEP_LOOP for (int k = 0; k < x.rank; k += 16) {
            uint32_t left[4], right[8][2];
            load_left(left, x, first, out, k);
            load_right(right, x, start, k);
            UNROLL for (int t = 0; t < 8; t++) mma_16816(update[t], left, right[t]);
        }
        UNROLL for (int half = 0; half < 2; half++) {
            float of_sum = 0.0f, of_w = 0.0f;
            UNROLL for (int part = 0; part < 2; part++)
                UNROLL for (int t = 0; t < 8; t++) {
                    float value = value_of<bf16>(w[half][part], t);
                    float sum = fmaf(scale, update[t][2 * half + part], value);
                    of_sum = fmaf(sum, sum, of_sum);
                    of_w = fmaf(value, value, of_w);
                }
            adapted[half] += double(of_sum);
            frozen[half] += double(of_w);
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        int at = (warp * 4 + lane % 4) * ROWS + lane / 4 + 8 * half;
        shares.store(at, adapted[half]);
        shares.store(PARTS * ROWS + at, frozen[half]);
    }
}

// The norm of one row, with every value in f64.
template <class W> DEVICE inline void exact_norm(const Adapted<W, float> &x, Out<float> norms) {
    SHARED(double, scratch, THREADS);
    double square = exact_square(x, blockIdx.x, scratch);
    if (threadIdx.x == 0) norms.store(blockIdx.x, sqrtf(float(square)));
}

} // namespace

// `norms[n]` = the norm of row n of `w + scale * b * a`; w has `out` rows of `width` values, b rows
// of `rank`. One block of 256 for each 16 rows.
KERNEL BOUNDS(256, 2) dora_norms_bf16_bf16(In<bf16> w, In<bf16> a, In<bf16> b, Out<float> norms, uint32_t out,
    uint32_t width, uint32_t rank, double scale) {
    SHARED(double, shares, 2 * PARTS * ROWS);
    SHARED(double, totals, 2 * ROWS);
    Adapted<bf16, bf16> x{w, a, b, int(width), int(rank), scale};
    int64_t first = int64_t(blockIdx.x) * ROWS;
    int thread = int(threadIdx.x), rows = out - first < ROWS ? int(out - first) : ROWS;
    bool whole = width % 8 == 0 && rank % 2 == 0 && w.is_aligned(16) && a.is_aligned(16) && b.is_aligned(4);
    if (whole) {
        store_squares(x, first, out, shares);
        sync_block();
        if (thread < 2 * ROWS) {
            double sum = 0.0;
            for (int part = 0; part < PARTS; part++)
                sum += shares.load((thread / ROWS * PARTS + part) * ROWS + thread % ROWS);
            totals.store(thread, sum);
        }
    }
    sync_block();
    for (int row = 0; row < rows; row++) {
        double square = 0.0;
        if (whole) square = totals.load(row);
        if (!whole || square < 0.25 * totals.load(ROWS + row)) {
            square = exact_square(x, first + row, shares);
            sync_block();
        }
        if (thread == 0) norms.store(first + row, sqrtf(float(square)));
    }
}

// Like dora_norms_bf16_bf16, one block for each row.
KERNEL BOUNDS(256, 4) dora_norms_bf16_f32(In<bf16> w, In<float> a, In<float> b, Out<float> norms, uint32_t width,
    uint32_t rank, double scale) {
    exact_norm<bf16>({w, a, b, int(width), int(rank), scale}, norms);
}
// Like dora_norms_bf16_f32.
KERNEL BOUNDS(256, 4) dora_norms_f32_f32(In<float> w, In<float> a, In<float> b, Out<float> norms, uint32_t width,
    uint32_t rank, double scale) {
    exact_norm<float>({w, a, b, int(width), int(rank), scale}, norms);
}
