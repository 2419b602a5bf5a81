// Attention, backward: the gradients of q, k and v from that of the output. FlashAttention-2, arXiv
// 2307.08691, algorithm 2, in two kernels, so that each gradient is summed by one block in a fixed
// order: with P from the scores and the saved log-sum-exp, dP = dO V^T and delta = rowsum(dO * O),
//
//   dS = P (dP - delta), times 1 - tanh^2 under a soft-cap
//   dV = P^T dO       dK = scale dS^T Q       dQ = scale dS K
//
// The first kernel processes tiles of keys and computes the transposed scores K Q^T, whose rows are
// keys, so that P^T and dS^T already have the layout of left operands. It loops over the query
// heads of the group and the queries that see the keys. The second kernel processes tiles of
// queries. Spans are whole sequences: q_len = k_len, or one of them is 0 for rows outside every
// span. Rows of all matrices are 16-byte aligned.
#include "attention.cuh"

namespace attention {

struct Backward {
    In<bf16> q, k, v, dout;
    In<float> lse, delta;
    In<uint32_t> tiles;
    uint32_t heads, group, rows, q_stride, k_stride, v_stride, d_stride;
    float factor, bend, scale;
    uint32_t window;
};

// Turns scores s and gradients dp of probabilities into P and dS. The log-sum-exp and delta of the
// query of element (m, n, v) are lse(m, n, v), in powers of 2, and delta(m, n, v). `ahead` is as in
// hide_unseen.
template <bool ROWS_ARE_QUERIES, int MT, int N, class L, class D>
DEVICE inline void score_gradient(float (&s)[MT][N][4], float (&dp)[MT][N][4], const Backward &x, L lse, D delta,
                                  int ahead) {
    for_scores(dp, [&](float &e, int m, int n, int v) { e -= delta(m, n, v); });
    if (x.bend != 0.0f)
        for_scores(s, [&](float &e, int m, int n, int v) {
            e = bent(e, x.bend);
            dp[m][n][v] *= fmaf(-e, e, 1.0f);
        });
    hide_unseen<ROWS_ARE_QUERIES>(s, ahead, int(x.window));
    for_scores(s, [&](float &e, int m, int n, int v) {
        e = fast_exp2(fmaf(e, x.factor, -lse(m, n, v)));
        dp[m][n][v] *= e;
    });
}

// WARPS warps of 16 MT keys each against QUERIES queries at a time, heads of D values; the block
// sums the PARTS-th part of the columns of dK and dV.
template <int D_, int MT_, int WARPS, int QUERIES_, int PARTS_, int HELD_K_, int HELD_V_> struct KeysShape {
    static constexpr int D = D_, MT = MT_, QUERIES = QUERIES_, PARTS = PARTS_;
    // Steps along rows of k and v of which the operands stay in registers.
    static constexpr int HELD_K = HELD_K_, HELD_V = HELD_V_;
    static constexpr int KEYS = 16 * MT * WARPS, THREADS = 32 * WARPS;
    static constexpr int CHUNKS = D / 8 / PARTS;
    // Values of one of the two stages of q and dout.
    static constexpr int STAGE = 2 * QUERIES * D;
};

// Starts to copy the log-sum-exp of QUERIES queries from `row` on, followed by their delta; zeros
// from `there` on.
template <class S> DEVICE inline void copy_sums(const Backward &x, int head, int64_t row, int there, Shared<float> sums) {
    int i = int(threadIdx.x);
    if (i >= S::QUERIES) return;
    int64_t from = int64_t(head) * x.rows + row + i;
    copy_async4(sums.offset(i), x.lse, from, i < there);
    copy_async4(sums.offset(S::QUERIES + i), x.delta, from, i < there);
}

// A tile of queries of one head to copy to shared memory.
struct Queries {
    int head, first;
};

// Starts to copy queries, dout, log-sum-exp and delta of a tile to a stage; queries from `end` on
// become zeros.
template <class S>
DEVICE inline void copy_queries(const Backward &x, const Tile &t, Queries at, int end, Shared<bf16> stage,
                                Shared<float> sums) {
    constexpr int D = S::D;
    using Copy = CopyRows<D, S::THREADS>;
    uint32_t dout_stride = x.heads * D;
    int64_t row = t.q_start + at.first;
    int64_t q_at = row * x.q_stride + at.head * D + Copy::start(x.q_stride);
    int64_t dout_at = row * dout_stride + at.head * D + Copy::start(dout_stride);
    Copy::template copy<S::QUERIES>(stage, x.q.offset(q_at), x.q_stride, end - at.first);
    Copy::template copy<S::QUERIES>(stage.offset(S::STAGE / 2), x.dout.offset(dout_at), dout_stride, end - at.first);
    copy_sums<S>(x, at.head, row, end - at.first, sums);
}

// Adds the contribution of one stage's queries to dK and dV; the first query is `ahead` after the
// block's first key.
template <class S>
DEVICE inline void add_queries(float (&dk)[S::MT][S::CHUNKS][4], float (&dv)[S::MT][S::CHUNKS][4], const Backward &x,
                               const LeftRows<S::D, S::MT, S::HELD_K> &k, const LeftRows<S::D, S::MT, S::HELD_V> &v, Shared<bf16> stage, Shared<float> sums,
                               int ahead, int chunk) {
    constexpr int D = S::D, MT = S::MT, N = S::QUERIES / 8;
    int first = warp_id() * 16 * MT, column = lane_id() % 4 * 2;
    float s[MT][N][4], dp[MT][N][4];
    uint32_t left[MT][N / 2][4];
    scores(s, k, stage);
    scores(dp, v, stage.offset(S::STAGE / 2));
    auto lse = [&](int, int n, int v) { return sums.load(column + 8 * n + v % 2) * LOG2_E; };
    auto delta = [&](int, int n, int v) { return sums.load(S::QUERIES + column + 8 * n + v % 2); };
    score_gradient<false>(s, dp, x, lse, delta, ahead - first);
    round_tile(left, s);
    add_product<D>(dv, left, stage.offset(S::STAGE / 2), chunk);
    round_tile(left, dp);
    add_product<D>(dk, left, stage, chunk);
}

// The start of a block's dK and dV in their rows, and the number of remaining rows of the span.
template <class S> struct KeysPlace {
    Tile t;
    int kv_head, row, there, chunk;
    DEVICE explicit KeysPlace(const Backward &x) {
        int kv_heads = int(x.heads / x.group), block = int(blockIdx.x) / S::PARTS;
        t = tile_of(x.tiles, uint32_t(block / kv_heads));
        kv_head = block % kv_heads;
        row = t.k_start + t.first;
        there = t.k_len - t.first;
        chunk = int(blockIdx.x) % S::PARTS * S::CHUNKS;
    }
    DEVICE int64_t out_at(uint32_t stride) const { return int64_t(row) * stride + kv_head * S::D + chunk * 8; }
};

template <class S> DEVICE inline void backward_keys(const Backward &x, Out<bf16> dk_out, Out<bf16> dv_out) {
    constexpr int D = S::D, MT = S::MT, ROWS = S::KEYS * D;
    using Copy = CopyRows<D, S::THREADS>;
    DYNAMIC_SHARED(bf16, k_rows);
    Shared<bf16> v_rows = k_rows.offset(ROWS), stages = v_rows.offset(ROWS);
    Shared<float> sums = stages.offset(2 * S::STAGE).template as<float>();
    KeysPlace<S> at(x);
    const Tile &t = at.t;
    int end = smaller(t.q_len, t.first + S::KEYS - 1 + int(x.window));
    if (end <= t.first) {
        store_zeros<S::CHUNKS, S::KEYS, S::THREADS>(dk_out, at.out_at(x.d_stride), x.d_stride, at.there);
        store_zeros<S::CHUNKS, S::KEYS, S::THREADS>(dv_out, at.out_at(x.d_stride), x.d_stride, at.there);
        return;
    }
    int64_t key = at.row, column = at.kv_head * D;
    int64_t k_at = key * x.k_stride + column + Copy::start(x.k_stride);
    int64_t v_at = key * x.v_stride + column + Copy::start(x.v_stride);
    Copy::template copy<S::KEYS>(k_rows, x.k.offset(k_at), x.k_stride, at.there);
    Copy::template copy<S::KEYS>(v_rows, x.v.offset(v_at), x.v_stride, at.there);
    Queries next{at.kv_head * int(x.group), t.first};
    int head_end = next.head + int(x.group), stage = 0;
    copy_queries<S>(x, t, next, end, stages, sums);
    copy_async_commit();

    float dk[MT][S::CHUNKS][4] = {}, dv[MT][S::CHUNKS][4] = {};
    copy_async_wait<0>();
    sync_block();
    LeftRows<D, MT, S::HELD_K> k(k_rows, warp_id() * 16 * MT);
    LeftRows<D, MT, S::HELD_V> v(v_rows, warp_id() * 16 * MT);
    while (next.head < head_end) {
        copy_async_wait<0>();
        sync_block();
        Shared<bf16> rows = stages.offset(stage * S::STAGE);
        Shared<float> row_sums = sums.offset(stage * 2 * S::QUERIES);
        int ahead = next.first - t.first;
        next.first += S::QUERIES;
        if (next.first >= end) next = Queries{next.head + 1, t.first};
        stage ^= 1;
        if (next.head < head_end)
            copy_queries<S>(x, t, next, end, stages.offset(stage * S::STAGE), sums.offset(stage * 2 * S::QUERIES));
        copy_async_commit();
        add_queries<S>(dk, dv, x, k, v, rows, row_sums, ahead, S::PARTS == 1 ? 0 : at.chunk);
    }
    sync_warp();
    // Reading it again is cheaper than keeping it in registers.
    KeysPlace<S> out(x);
    int first = warp_id() * 16 * MT;
    int64_t out_at = out.out_at(x.d_stride) + first * int64_t(x.d_stride);
    store_rows<D>(dk, [&](int, int) { return x.scale; }, k_rows, first, dk_out, out_at, x.d_stride, out.there - first);
    store_rows<D>(dv, [&](int, int) { return 1.0f; }, v_rows, first, dv_out, out_at, x.d_stride, out.there - first);
}

// WARPS warps of 16 MT queries each against KEYS keys at a time, heads of D values.
template <int D_, int MT_, int WARPS, int KEYS_, int HELD_> struct QueriesShape {
    // HELD: steps along rows of q of which the operands stay in registers.
    static constexpr int D = D_, MT = MT_, KEYS = KEYS_, HELD = HELD_, QUERIES = 16 * MT * WARPS, THREADS = 32 * WARPS;
    // Values of one of the two stages of k and v.
    static constexpr int STAGE = 2 * KEYS * D;
};

template <class S> DEVICE inline void backward_queries(const Backward &x, Out<bf16> dq_out) {
    constexpr int D = S::D, MT = S::MT, KEYS = S::KEYS, ROWS = S::QUERIES * D;
    using Copy = CopyRows<D, S::THREADS>;
    DYNAMIC_SHARED(bf16, q_rows);
    Shared<bf16> dout_rows = q_rows.offset(ROWS), stages = dout_rows.offset(ROWS);
    Shared<float> sums = stages.offset(2 * S::STAGE).template as<float>();
    int head = int(blockIdx.x % x.heads);
    Tile t = tile_of(x.tiles, blockIdx.x / x.heads);
    int64_t row = t.q_start + t.first;
    int there = t.q_len - t.first, to = smaller(t.k_len, t.first + S::QUERIES);
    int from = larger(0, t.first + 1 - int(x.window)), left = to - from;
    if (to <= t.first) {
        store_zeros<D / 8, S::QUERIES, S::THREADS>(dq_out, row * x.d_stride + head * D, x.d_stride, there);
        return;
    }
    uint32_t dout_stride = x.heads * D;
    int64_t q_at = row * x.q_stride + head * D + Copy::start(x.q_stride);
    int64_t dout_at = row * dout_stride + head * D + Copy::start(dout_stride);
    // The addresses of k and v are computed for each tile, which takes fewer registers than keeping
    // both.
    int end = t.k_start + to, column = head / int(x.group) * D;
    auto copy_keys = [&](Shared<bf16> stage, int there) {
        int64_t k_at = int64_t(end - there) * x.k_stride + column + Copy::start(x.k_stride);
        int64_t v_at = int64_t(end - there) * x.v_stride + column + Copy::start(x.v_stride);
        Copy::template copy<KEYS>(stage, x.k.offset(k_at), x.k_stride, there);
        Copy::template copy<KEYS>(stage.offset(S::STAGE / 2), x.v.offset(v_at), x.v_stride, there);
        copy_async_commit();
    };
    Copy::template copy<S::QUERIES>(q_rows, x.q.offset(q_at), x.q_stride, there);
    Copy::template copy<S::QUERIES>(dout_rows, x.dout.offset(dout_at), dout_stride, there);
    copy_sums<S>(x, head, row, there, sums);
    copy_keys(stages, left);

    int first = warp_id() * 16 * MT, ahead = t.first - from + first, stage = 0;
    copy_async_wait<0>();
    sync_block();
    LeftRows<D, MT, S::HELD> q(q_rows, first);
    LeftRows<D, MT, 0> dout(dout_rows, first);
    float dq[MT][D / 8][4] = {}, s[MT][KEYS / 8][4], dp[MT][KEYS / 8][4];
    for (; left > 0; left -= KEYS, ahead -= KEYS) {
        copy_async_wait<0>();
        sync_block();
        Shared<bf16> k_rows = stages.offset(stage * S::STAGE);
        stage ^= 1;
        copy_keys(stages.offset(stage * S::STAGE), left - KEYS);
        scores(s, q, k_rows);
        scores(dp, dout, k_rows.offset(S::STAGE / 2));
        float lse[MT][2], delta[MT][2];
        for_row_halves<MT>([&](int m, int half, int i) {
            lse[m][half] = sums.load(first + i) * LOG2_E;
            delta[m][half] = sums.load(S::QUERIES + first + i);
        });
        score_gradient<true>(s, dp, x, [&](int m, int, int v) { return lse[m][v / 2]; },
                             [&](int m, int, int v) { return delta[m][v / 2]; }, ahead);
        uint32_t d_scores[MT][KEYS / 16][4];
        round_tile(d_scores, dp);
        add_product<D>(dq, d_scores, k_rows, 0);
    }
    // The last iteration started to copy zeros.
    copy_async_wait<0>();
    sync_warp();
    // Reading it again is cheaper than keeping it in registers.
    t = tile_of(x.tiles, blockIdx.x / x.heads);
    store_rows<D>(dq, [&](int, int) { return x.scale; }, q_rows, first, dq_out,
                  int64_t(t.q_start + t.first + first) * x.d_stride + head * D, x.d_stride, t.q_len - t.first - first);
}

} // namespace attention

// delta: [heads, rows] = the sums of out * dout, both [rows, heads width], over the columns of each
// head. A block of 256 threads takes 32 rows of a head, heads fastest. width is a multiple of 8.
KERNEL attention_delta(In<bf16> out, In<bf16> dout, Out<float> delta, uint32_t heads, uint32_t rows, uint32_t width) {
    uint32_t head = blockIdx.x % heads, row = blockIdx.x / heads * 32 + threadIdx.x / 8;
    int64_t at = (int64_t(row) * heads + head) * width;
    float sum = 0.0f;
    if (row < rows)
        for (uint32_t i = threadIdx.x % 8 * 8; i < width; i += 64) {
            Bytes16 o = out.load16(at + i), d = dout.load16(at + i);
            UNROLL for (int j = 0; j < 8; j++) sum = fmaf(value_of<bf16>(o, j), value_of<bf16>(d, j), sum);
        }
    UNROLL for (int distance = 4; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
    if (row < rows && threadIdx.x % 8 == 0) delta.store(int64_t(head) * rows + row, sum);
}

#define KEYS_PARAMETERS                                                                                                \
    In<bf16> q, In<bf16> k, In<bf16> v, In<bf16> dout, In<float> lse, In<float> delta, Out<bf16> dk, Out<bf16> dv,     \
        In<uint32_t> tiles, uint32_t heads, uint32_t group, uint32_t rows, uint32_t q_stride, uint32_t k_stride,       \
        uint32_t v_stride, uint32_t d_stride, float factor, float bend, float scale, uint32_t window
#define QUERIES_PARAMETERS                                                                                             \
    In<bf16> q, In<bf16> k, In<bf16> v, In<bf16> dout, In<float> lse, In<float> delta, Out<bf16> dq,                   \
        In<uint32_t> tiles, uint32_t heads, uint32_t group, uint32_t rows, uint32_t q_stride, uint32_t k_stride,       \
        uint32_t v_stride, uint32_t d_stride, float factor, float bend, float scale, uint32_t window
#define ARGUMENTS                                                                                                      \
    {q,    k,        v,        dout,     lse,      delta,  tiles, heads, group, rows,                                  \
     q_stride, k_stride, v_stride, d_stride, factor, bend,  scale, window}

// dk and dv: [rows, heads / group D], rows d_stride values apart. q, k, v, lse, factor, bend and
// window are those of the forward, and scale is that of the scores; dout: [rows, heads D]; delta:
// [heads, rows]. tiles: [., 5] has q_start, q_len, k_start, k_len of a span and the tile's first
// key in it; one block for each tile and key head, heads fastest. Spans without queries get zeros.
// Heads of 64 values, tiles of 128 keys.
KERNEL BOUNDS(128, 2) attention_backward_keys_64(KEYS_PARAMETERS) {
    attention::backward_keys<attention::KeysShape<64, 2, 4, 32, 1, 0, 0>>(ARGUMENTS, dk, dv);
}
// Like attention_backward_keys_64, heads of 80 values.
KERNEL BOUNDS(256, 1) attention_backward_keys_80(KEYS_PARAMETERS) {
    attention::backward_keys<attention::KeysShape<80, 1, 8, 32, 1, 5, 5>>(ARGUMENTS, dk, dv);
}
// Like attention_backward_keys_64, heads of 96 values.
KERNEL BOUNDS(256, 1) attention_backward_keys_96(KEYS_PARAMETERS) {
    attention::backward_keys<attention::KeysShape<96, 1, 8, 32, 1, 6, 6>>(ARGUMENTS, dk, dv);
}
// Like attention_backward_keys_64, heads of 128 values.
KERNEL BOUNDS(256, 1) attention_backward_keys_128(KEYS_PARAMETERS) {
    attention::backward_keys<attention::KeysShape<128, 1, 8, 32, 1, 8, 0>>(ARGUMENTS, dk, dv);
}
// Like attention_backward_keys_64, heads of 256 values; tiles of 64 keys, and two blocks for each
// tile and key head, one for either half of the columns.
KERNEL BOUNDS(128, 2) attention_backward_keys_256(KEYS_PARAMETERS) {
    attention::backward_keys<attention::KeysShape<256, 1, 4, 16, 2, 8, 0>>(ARGUMENTS, dk, dv);
}

// dq: [rows, heads D], rows d_stride values apart; the rest is like attention_backward_keys_64.
// tiles: those of the forward; one block per tile and head, heads fastest. Heads of 64 values,
// tiles of 128 queries.
KERNEL BOUNDS(128, 2) attention_backward_queries_64(QUERIES_PARAMETERS) {
    attention::backward_queries<attention::QueriesShape<64, 2, 4, 32, 4>>(ARGUMENTS, dq);
}
// Like attention_backward_queries_64, heads of 80 values.
KERNEL BOUNDS(128, 2) attention_backward_queries_80(QUERIES_PARAMETERS) {
    attention::backward_queries<attention::QueriesShape<80, 2, 4, 32, 4>>(ARGUMENTS, dq);
}
// Like attention_backward_queries_64, heads of 96 values.
KERNEL BOUNDS(128, 2) attention_backward_queries_96(QUERIES_PARAMETERS) {
    attention::backward_queries<attention::QueriesShape<96, 2, 4, 32, 3>>(ARGUMENTS, dq);
}
// Like attention_backward_queries_64, heads of 128 values.
KERNEL BOUNDS(128, 2) attention_backward_queries_128(QUERIES_PARAMETERS) {
    attention::backward_queries<attention::QueriesShape<128, 2, 4, 32, 0>>(ARGUMENTS, dq);
}
// Like attention_backward_queries_64, heads of 256 values, tiles of 64 queries.
KERNEL BOUNDS(128, 2) attention_backward_queries_256(QUERIES_PARAMETERS) {
    attention::backward_queries<attention::QueriesShape<256, 1, 4, 16, 8>>(ARGUMENTS, dq);
}
