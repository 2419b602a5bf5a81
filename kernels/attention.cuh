// Shared parts of the attention kernels: tiles of rows in shared memory, their products on the
// tensor cores, and the mask. FlashAttention-2 (arXiv 2307.08691) names the parts: S = Q K^T, P =
// softmax(S), O = P V.
//
// A warp owns 16 MT rows of a score tile and all its columns, so sums over a row stay within four
// lanes. A score tile is an array [MT][N][4] of mma's accumulators: element (m, n, v) of a lane is
// at row 16 m + lane / 4 + 8 (v / 2) and at column 8 n + 2 (lane % 4) + v % 2. Rounded to bf16 it
// already has the layout of a left operand of the next product (arXiv 2307.08691, 3.3), so neither
// P nor its gradient passes through shared memory.
#pragma once
#include "compat.cuh"

namespace attention {

constexpr float LOG2_E = 1.4426950408889634f;
// The value of masked scores.
DEVICE inline float nothing() { return bits_to_float(0xff800000u); }

DEVICE inline int lane_id() { return int(threadIdx.x % 32u); }
DEVICE inline int warp_id() { return int(threadIdx.x / 32u); }
DEVICE inline int smaller(int a, int b) { return a < b ? a : b; }
DEVICE inline int larger(int a, int b) { return a > b ? a : b; }

// ---- spans --------------------------------------------------------------------------------------

// An entry of a tile list: a span and the tile's first row in it (of queries or of keys).
struct Tile {
    int q_start, q_len, k_start, k_len, first;
};
DEVICE inline Tile tile_of(In<uint32_t> tiles, uint32_t number) {
    In<uint32_t> t = tiles.offset(int64_t(number) * 5);
    return Tile{int(t.load(0)), int(t.load(1)), int(t.load(2)), int(t.load(3)), int(t.load(4))};
}

// ---- rows in shared memory ----------------------------------------------------------------------

// Contiguous rows of D bf16 values, as 16-byte chunks; eight adjacent chunks fill the banks. Chunks
// are swizzled by row in groups of GROUP, the largest number that divides a row evenly, so that two
// kinds of access have no bank conflicts. The first is eight rows' chunks of one number (ldmatrix;
// without swizzling each 8 / GROUP rows would begin in one bank). The second is eight chunks in a
// line, also across rows (copies, and results on their way out): these are whole groups.
template <int D> struct Rows {
    static constexpr int CHUNKS = D / 8;
    static constexpr int GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    // Returns the index of a chunk's first value.
    DEVICE static int at(int row, int chunk) {
        return (row * CHUNKS + (chunk ^ int(uint32_t(row) / (8 / GROUP) % GROUP))) * 8;
    }
    // Returns the first value of the chunk that follows chunk 0 or 1, whose first value is `from`,
    // by an even number `chunks`.
    DEVICE static int behind(int from, int chunks) { return (from ^ (chunks % GROUP * 8)) + chunks / GROUP * GROUP * 8; }
};

// Assigns copies of rows of D values to THREADS threads: a thread keeps its chunk number, in each
// STEP-th row.
template <int D, int THREADS> struct CopyRows {
    static constexpr int CHUNKS = Rows<D>::CHUNKS, STEP = THREADS / CHUNKS;
    // Returns the offset from the tile's first value to the thread's.
    DEVICE static int64_t start(uint32_t stride) {
        return int64_t(threadIdx.x / CHUNKS) * stride + threadIdx.x % CHUNKS * 8;
    }
    // Starts to copy ROWS rows, `stride` values apart, to shared memory; rows from `there` on
    // become zeros. `from` is the thread's start.
    template <int ROWS> DEVICE static void copy(Shared<bf16> to, In<bf16> from, uint32_t stride, int there) {
        constexpr bool EVEN = THREADS % CHUNKS == 0 && ROWS % STEP == 0;
        int row = int(threadIdx.x) / CHUNKS, chunk = int(threadIdx.x) % CHUNKS;
        KEEP_LOOP for (int i = 0; i < ROWS; i += STEP, from = from.offset(int64_t(STEP) * stride))
            if (EVEN || (row < STEP && row + i < ROWS))
                copy_async16(to.offset(Rows<D>::at(row + i, chunk)), from, 0, row + i < there);
    }
};

// ---- products -----------------------------------------------------------------------------------

// Left operands of scores: 16 MT rows of `rows` from row `first` on, in D / 16 steps along a row.
// The operands of the first HELD steps stay in registers: that saves a load for each tile of
// scores.
template <int D, int MT, int HELD> struct LeftRows {
    Shared<bf16> rows;
    int from;
    uint32_t held[HELD > 0 ? HELD : 1][MT][4];
    // The rows must have arrived, if any stay in registers.
    DEVICE LeftRows(Shared<bf16> all, int first)
        : rows(all), from(Rows<D>::at(first + lane_id() % 16, lane_id() / 16)) {
        UNROLL for (int k = 0; k < HELD; k++) load(held[k], k);
    }
    DEVICE void load(uint32_t (&left)[MT][4], int k) const {
        UNROLL for (int m = 0; m < MT; m++)
            ldmatrix_x4(left[m], rows.offset(Rows<D>::behind(from, 2 * k)).offset(16 * m * D));
    }
    DEVICE void operand(uint32_t (&left)[MT][4], int k) const {
        if (k >= HELD) {
            load(left, k);
            return;
        }
        UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int i = 0; i < 4; i++) left[m][i] = held[k < HELD ? k : 0][m][i];
    }
};

// Computes a score tile: s = A B^T of 8 N rows of `b`.
template <int D, int MT, int N, int HELD>
DEVICE inline void scores(float (&s)[MT][N][4], const LeftRows<D, MT, HELD> &a, Shared<bf16> b) {
    int lane = lane_id();
    int b_from = Rows<D>::at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    UNROLL for (int k = 0; k < D / 16; k++) {
        uint32_t left[MT][4];
        a.operand(left, k);
        UNROLL for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            ldmatrix_x4(right, b.offset(Rows<D>::behind(b_from, 2 * k)).offset(8 * n * D));
            UNROLL for (int m = 0; m < MT; m++) {
                auto mma = k == 0 ? mma_16816_first : mma_16816;
                mma(s[m][n], left[m], {right[0], right[1]});
                mma(s[m][n + 1], left[m], {right[2], right[3]});
            }
        }
    }
}

// Rounds a score tile to a left operand: `left[m][k]` holds its columns 16 k to 16 k + 15.
template <int MT, int N> DEVICE inline void round_tile(uint32_t (&left)[MT][N / 2][4], const float (&s)[MT][N][4]) {
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int k = 0; k < N / 2; k++)
            UNROLL for (int i = 0; i < 4; i++) {
                const float (&part)[4] = s[m][2 * k + i / 2];
                left[m][k][i] = pack(part[i % 2 * 2], part[i % 2 * 2 + 1]);
            }
}

// Computes sums += left B, for 16 K rows of `b` and 8 W of its columns from `chunk`, a multiple of
// 8, on.
template <int D, int MT, int K, int W>
DEVICE inline void add_product(float (&sums)[MT][W][4], const uint32_t (&left)[MT][K][4], Shared<bf16> b, int chunk) {
    int from = Rows<D>::at(lane_id() % 16, lane_id() / 16);
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int n = 0; n < W; n += 2) {
            uint32_t right[4];
            ldmatrix_x4_transposed(right, b.offset(Rows<D>::behind(from, n)).offset(chunk * 8 + 16 * k * D));
            UNROLL for (int m = 0; m < MT; m++) {
                mma_16816(sums[m][n], left[m][k], {right[0], right[1]});
                mma_16816(sums[m][n + 1], left[m][k], {right[2], right[3]});
            }
        }
}

// ---- scores -------------------------------------------------------------------------------------

// Calls f(element, m, n, v) for the elements of a score tile.
template <int MT, int N, class F> DEVICE inline void for_scores(float (&s)[MT][N][4], F f) {
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int v = 0; v < 4; v++) f(s[m][n][v], m, n, v);
}

// Sets masked scores to minus infinity: a query sees itself and the window - 1 keys before it. Rows
// are queries and columns keys, or the other way round. `ahead` is the distance from the tile's
// first key to its first query.
template <bool ROWS_ARE_QUERIES, int MT, int N>
DEVICE inline void hide_unseen(float (&s)[MT][N][4], int ahead, int window) {
    constexpr int QUERIES = ROWS_ARE_QUERIES ? 16 * MT : 8 * N, KEYS = ROWS_ARE_QUERIES ? 8 * N : 16 * MT;
    if (ahead >= KEYS - 1 && ahead + QUERIES - 1 < window) return;
    int sign = ROWS_ARE_QUERIES ? 1 : -1, of_lane = ahead + sign * (lane_id() / 4 - lane_id() % 4 * 2);
    for_scores(s, [&](float &e, int m, int n, int v) {
        int apart = of_lane + sign * (16 * m + v / 2 * 8 - 8 * n - v % 2);
        e = uint32_t(apart) < uint32_t(window) ? e : nothing();
    });
}

// Calls f(m, half, row) for the rows of a score tile of which a lane holds elements.
template <int MT, class F> DEVICE inline void for_row_halves(F f) {
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int half = 0; half < 2; half++) f(m, half, 16 * m + lane_id() / 4 + 8 * half);
}

// Applies the soft-cap. The exponent of 2 of a product x of q and k is factor x, with factor =
// scale log2(e); under a soft-cap it is factor tanh(scale x / cap), with factor = cap log2(e), and
// tanh(y) = 1 - 2 / (1 + e^2y) with e^2y = 2^(bend x), bend = 2 scale log2(e) / cap. bend is 0
// without a cap.
DEVICE inline float bent(float x, float bend) { return fmaf(-2.0f, fast_reciprocal(1.0f + fast_exp2(x * bend)), 1.0f); }

// ---- results ------------------------------------------------------------------------------------

// Writes 16 MT rows of W chunks, sums[m] times factor(m, half of the 16 rows), rounded; rows from
// `there` on are not written. The warp's own `staging` rows combine four bytes per lane into
// sixteen; its lanes must have finished reading them.
template <int D, int MT, int W, class F>
DEVICE inline void store_rows(const float (&sums)[MT][W][4], F factor, Shared<bf16> staging, int first_row, Out<bf16> out,
                              int64_t first, int64_t stride, int there) {
    constexpr int CHUNKS = W;
    int lane = lane_id();
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int n = 0; n < W; n++)
            UNROLL for (int half = 0; half < 2; half++) {
                float f = factor(m, half);
                uint32_t pair = pack(sums[m][n][2 * half] * f, sums[m][n][2 * half + 1] * f);
                int at = Rows<D>::at(first_row + 16 * m + lane / 4 + 8 * half, n) + lane % 4 * 2;
                staging.offset(at).template as<uint32_t>().store(0, pair);
            }
    sync_warp();
    UNROLL for (int i = lane; i < 16 * MT * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        Bytes16 bytes = staging.load16(Rows<D>::at(first_row + row, chunk));
        if (row < there) out.store16(first + row * stride + chunk * 8, bytes);
    }
}

// Writes zeros to rows outside every span; there are at most ROWS of them.
template <int W, int ROWS, int THREADS>
DEVICE inline void store_zeros(Out<bf16> out, int64_t first, int64_t stride, int there) {
    for (int i = int(threadIdx.x); i < smaller(ROWS, there) * W; i += THREADS)
        out.store16(first + i / W * stride + i % W * 8, Bytes16{{0, 0, 0, 0}});
}

} // namespace attention
