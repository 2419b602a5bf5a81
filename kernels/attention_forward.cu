// Attention, forward: O = softmax(S) V and each row's log-sum-exp, S = scale Q K^T (capped if a
// soft-cap is set), over packed sequences. FlashAttention-2, arXiv 2307.08691, algorithm 1: it
// loops over tiles of keys and values, updates the maximum and the sum of each row, and stores
// nothing of size S x S. crates/ops/src/ops/attention has the definition.
//
// A block computes one tile of queries of one head. The next tile of K loads during the products
// with V, and the next V during those with K. Rows are 16-byte aligned: starts and strides of q, k
// and v are multiples of 8 values.
#include "attention.cuh"

namespace attention {

struct Forward {
    In<bf16> q, k, v;
    Out<bf16> out;
    Out<float> lse;
    In<uint32_t> tiles;
    uint32_t heads, group, rows, q_stride, k_stride, v_stride;
    float factor, bend;
    uint32_t window;
};

// WARPS warps of 16 MT queries each against KEYS keys at a time, heads of D values.
template <int D_, int MT_, int WARPS, int KEYS_> struct ForwardShape {
    static constexpr int D = D_, MT = MT_, KEYS = KEYS_, QUERIES = 16 * MT * WARPS, THREADS = 32 * WARPS;
};

// The running maximum and sum of each row of a warp: a lane holds two rows of each 16.
template <int MT> struct RowSums {
    float max[MT][2], sum[MT][2];
};

// Turns scores into 2^(factor s - the row's new maximum), and rescales earlier sums to it.
template <int MT, int N, int W>
DEVICE inline void online_softmax(float (&s)[MT][N][4], RowSums<MT> &rows, float (&o)[MT][W][4], float factor) {
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            float before = rows.max[m][half], max = before;
            UNROLL for (int n = 0; n < N; n++) max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            max = fmaxf(max, shuffle_xor(max, 1));
            max = fmaxf(max, shuffle_xor(max, 2));
            rows.max[m][half] = max;
            // A row without visible keys so far: every power is 0.
            float shift = max == nothing() ? 0.0f : max * factor;
            float shrink = fast_exp2(fmaf(before, factor, -shift)), sum = 0.0f;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = fast_exp2(fmaf(s[m][n][i], factor, -shift));
                    sum += s[m][n][i];
                }
            rows.sum[m][half] = fmaf(rows.sum[m][half], shrink, sum);
            UNROLL for (int n = 0; n < W; n++)
                UNROLL for (int i = 2 * half; i < 2 * half + 2; i++) o[m][n][i] *= shrink;
        }
}

// Completes the sums of the warp's rows, and writes them and their log-sum-exp.
template <class S>
DEVICE inline void finish(const Forward &x, RowSums<S::MT> &rows, float (&o)[S::MT][S::D / 8][4], Shared<bf16> staging) {
    constexpr int D = S::D, MT = S::MT;
    // Reading it again is cheaper than keeping it in registers.
    Tile t = tile_of(x.tiles, blockIdx.x / x.heads);
    int head = int(blockIdx.x % x.heads), first = warp_id() * 16 * MT;
    int row = t.q_start + t.first + first, there = t.q_len - t.first - first;
    for_row_halves<MT>([&](int m, int half, int i) {
        float sum = rows.sum[m][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        rows.sum[m][half] = fast_reciprocal(sum);
        if (lane_id() % 4 == 0 && i < there)
            x.lse.store(int64_t(head) * x.rows + row + i, fmaf(rows.max[m][half], x.factor / LOG2_E, logf(sum)));
    });
    store_rows<D>(o, [&](int m, int half) { return rows.sum[m][half]; }, staging, first, x.out,
                  (int64_t(row) * x.heads + head) * D, x.heads * D, there);
}

template <class S> DEVICE inline void forward(const Forward &x) {
    constexpr int D = S::D, MT = S::MT, KEYS = S::KEYS;
    using Copy = CopyRows<D, S::THREADS>;
    DYNAMIC_SHARED(bf16, q_rows);
    Shared<bf16> k_rows = q_rows.offset(S::QUERIES * D), v_rows = k_rows.offset(KEYS * D);
    int head = int(blockIdx.x % x.heads), window = int(x.window);
    Tile t = tile_of(x.tiles, blockIdx.x / x.heads);
    int there = smaller(t.q_len - t.first, S::QUERIES), past = t.k_len - t.q_len + t.first, row = t.q_start + t.first;
    if (past + there <= 0) {
        store_zeros<D / 8, S::QUERIES, S::THREADS>(x.out, (int64_t(row) * x.heads + head) * D, x.heads * D, there);
        for (int i = int(threadIdx.x); i < there; i += S::THREADS) x.lse.store(int64_t(head) * x.rows + row + i, 0.0f);
        return;
    }
    // The first visible key of any query of the tile, and the number of keys visible from there on.
    int from = larger(0, past + 1 - window), left = past + there - from;
    int key = t.k_start + from, column = head / int(x.group) * D;
    // v's address is computed for each tile, which takes fewer registers than keeping both.
    int64_t k_at = int64_t(key) * x.k_stride + column + Copy::start(x.k_stride);
    int64_t q_at = int64_t(row) * x.q_stride + head * D + Copy::start(x.q_stride);
    Copy::template copy<S::QUERIES>(q_rows, x.q.offset(q_at), x.q_stride, there);
    Copy::template copy<KEYS>(k_rows, x.k.offset(k_at), x.k_stride, left);
    copy_async_commit();

    int first = warp_id() * 16 * MT;
    // The distance from the first remaining key to the warp's first query.
    int ahead = left - there + first;
    float o[MT][D / 8][4] = {}, s[MT][KEYS / 8][4];
    RowSums<MT> rows;
    for_row_halves<MT>([&](int m, int half, int) { rows.max[m][half] = nothing(), rows.sum[m][half] = 0.0f; });
    for (; left > 0; left -= KEYS, ahead -= KEYS) {
        copy_async_wait<0>();
        sync_block();
        int64_t v_at = int64_t(key) * x.v_stride + column + Copy::start(x.v_stride);
        Copy::template copy<KEYS>(v_rows, x.v.offset(v_at), x.v_stride, left);
        copy_async_commit();
        scores(s, LeftRows<D, MT, 0>(q_rows, first), k_rows);
        copy_async_wait<0>();
        sync_block();
        key += KEYS, k_at += int64_t(KEYS) * x.k_stride;
        Copy::template copy<KEYS>(k_rows, x.k.offset(k_at), x.k_stride, left - KEYS);
        copy_async_commit();
        if (x.bend != 0.0f) for_scores(s, [&](float &e, int, int, int) { e = bent(e, x.bend); });
        hide_unseen<true>(s, ahead, window);
        online_softmax(s, rows, o, x.factor);
        uint32_t p[MT][KEYS / 16][4];
        round_tile(p, s);
        add_product<D>(o, p, v_rows, 0);
    }
    // The last iteration started to copy zeros.
    copy_async_wait<0>();
    finish<S>(x, rows, o, q_rows);
}

} // namespace attention

#define PARAMETERS                                                                                                     \
    In<bf16> q, In<bf16> k, In<bf16> v, Out<bf16> out, Out<float> lse, In<uint32_t> tiles, uint32_t heads,       \
        uint32_t group, uint32_t rows, uint32_t q_stride, uint32_t k_stride, uint32_t v_stride, float factor,        \
        float bend, uint32_t window
#define ARGUMENTS {q, k, v, out, lse, tiles, heads, group, rows, q_stride, k_stride, v_stride, factor, bend, window}

// out: [rows, heads D] and lse: [heads, rows] of queries q: [rows, heads D], keys k and values v:
// [any, heads / group D], whose rows are q_stride, k_stride and v_stride values apart. tiles: [.,
// 5] has q_start, q_len, k_start, k_len of a span and the tile's first query in it; one block per
// tile and head, heads fastest. Spans without keys get zeros. factor > 0 and bend convert scores to
// exponents (attention.cuh); window: at most 2^30, which means none. Heads of 64 values, tiles of
// 128 queries.
KERNEL BOUNDS(128, 2) attention_forward_64(PARAMETERS) {
    attention::forward<attention::ForwardShape<64, 2, 4, 64>>(ARGUMENTS);
}
// Like attention_forward_64, heads of 80 values.
KERNEL BOUNDS(128, 2) attention_forward_80(PARAMETERS) {
    attention::forward<attention::ForwardShape<80, 2, 4, 64>>(ARGUMENTS);
}
// Like attention_forward_64, heads of 96 values.
KERNEL BOUNDS(128, 2) attention_forward_96(PARAMETERS) {
    attention::forward<attention::ForwardShape<96, 2, 4, 64>>(ARGUMENTS);
}
// Like attention_forward_64, heads of 128 values.
KERNEL BOUNDS(128, 2) attention_forward_128(PARAMETERS) {
    attention::forward<attention::ForwardShape<128, 2, 4, 48>>(ARGUMENTS);
}
// Like attention_forward_64, heads of 256 values; tiles of 64 queries.
KERNEL BOUNDS(128, 2) attention_forward_256(PARAMETERS) {
    attention::forward<attention::ForwardShape<256, 1, 4, 64>>(ARGUMENTS);
}
