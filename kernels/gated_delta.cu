// The gated delta rule over packed sequences, token by token in f32, and its gradients.
// crates/ops/src/ops/gated_delta holds the definition; symbols: K key heads, V value heads, a state
// S: [Dk, Dv].
//
//   S = S * decay;  missing = v - S^T k;  S = S + k (beta missing)^T;  o = S^T q
//
// A column of a state does not depend on the others, so the forward runs a block for 16 columns of
// a sequence and value head: 8 lanes share a column, whose values stay in registers.
//
// The backward has five steps. Only the second one runs over whole sequences, the others over
// chunks of 64 tokens, whose states before the forward saved:
//
//   1. the forward again, for `missing`
//   2. columns of dS, backwards: dS += q dout^T; du = dS^T k; dS = (dS - k (beta du)^T) * decay
//   3. rows of S, forwards, and of dS, backwards: the gradients of q and k of a value head
//   4. their sums over the value heads of a key head, through the norms; the gradients of v and b
//   5. the gradient of a, from that of the decays
//
// A launch processes the value heads first_head.. of the grid's y; tensors between the steps hold
// those heads alone. `pieces`: [.., 4] lists parts of sequences: first row, number of rows, 1 + the
// number of the state before (0: none), and `after`. That is the number of the first saved state
// for whole sequences, and 1 + the number of the state after (0: none) for chunks. Rows outside all
// sequences are pieces with GAP as the state before.
#include "compat.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int CHUNK = 64;
// Lanes that share a line, a column or a row of a state; lines of a block.
constexpr int LANES = 8;
constexpr int LINES = THREADS / LANES;
constexpr uint32_t GAP = 0xffffffffu;

DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE inline int smaller(int a, int b) { return a < b ? a : b; }

// Returns the sum over the lanes of a line, in each of them.
DEVICE inline float line_sum(float x) {
    UNROLL for (int distance = LANES / 2; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
}

struct Piece {
    int64_t first;
    int len;
    uint32_t before, after;
    DEVICE bool is_gap() const { return before == GAP; }
};

DEVICE inline Piece piece_of(In<uint32_t> pieces) {
    In<uint32_t> at = pieces.offset(int64_t(blockIdx.x) * 4);
    return Piece{int64_t(at.load(0)), int(at.load(1)), at.load(2), at.load(3)};
}

// The inputs of one value head.
template <class T> struct Inputs {
    In<T> qkv, a, b;
    In<float> a_log, dt_bias;
    int keys, group, dk, dv;
    uint32_t a_stride, b_stride;
    int head;

    DEVICE int values() const { return keys * group; }
    DEVICE int64_t width() const { return int64_t(2) * keys * dk + int64_t(values()) * dv; }
    DEVICE int64_t query(int64_t row) const { return row * width() + int64_t(head / group) * dk; }
    DEVICE int64_t key(int64_t row) const { return query(row) + int64_t(keys) * dk; }
    DEVICE int64_t value(int64_t row) const { return row * width() + int64_t(2) * keys * dk + int64_t(head) * dv; }
    DEVICE float rate() const { return -expf(a_log.load(head)); }
    DEVICE float shifted(int64_t row) const { return widen(a.load(row * a_stride + head)) + dt_bias.load(head); }
    DEVICE float decay(int64_t row) const { return expf(rate() * softplus(shifted(row))); }
    DEVICE float beta(int64_t row) const { return sigmoid(widen(b.load(row * b_stride + head))); }
    // Returns the inverse norm of the key or query at an index, by a warp.
    DEVICE float inverse_norm(int64_t at) const {
        float sum = 0.0f;
        for (int i = int(threadIdx.x) % 32; i < dk; i += 32) {
            float x = widen(qkv.load(at + i));
            sum = fmaf(x, x, sum);
        }
        return 1.0f / sqrtf(warp_sum(sum) + 1e-6f);
    }
    DEVICE float scale() const { return 1.0f / sqrtf(float(dk)); }
    // The index of state `number` of this head among all value heads, or of those of the grid.
    DEVICE int64_t state(int64_t number) const { return (number * values() + head) * dk * dv; }
    DEVICE int64_t local_state(int64_t number) const { return (number * gridDim.y + blockIdx.y) * dk * dv; }
    // The index of a row of this head among those of the grid.
    DEVICE int64_t local(int64_t row, int width) const { return (row * gridDim.y + blockIdx.y) * width; }
};

// Some tokens in shared memory: normed keys and queries of W values, zero from Dk on.
template <int W> struct Tokens {
    Shared<float> q, k, decay, beta;

    template <class T> DEVICE void load(const Inputs<T> &in, int64_t first, int count) const {
        int lane = int(threadIdx.x) % 32;
        for (int t = int(threadIdx.x) / 32; t < count; t += THREADS / 32) {
            int64_t key = in.key(first + t), query = in.query(first + t);
            float of_key = in.inverse_norm(key), of_query = in.inverse_norm(query) * in.scale();
            for (int i = lane; i < W; i += 32) {
                bool there = i < in.dk;
                k.store(t * W + i, there ? widen(in.qkv.load(key + i)) * of_key : 0.0f);
                q.store(t * W + i, there ? widen(in.qkv.load(query + i)) * of_query : 0.0f);
            }
            if (lane == 0) {
                decay.store(t, in.decay(first + t));
                beta.store(t, in.beta(first + t));
            }
        }
    }
};

// This thread's part of a state: lane + 8 m of one line, for m < M.
template <int M> struct Part {
    float values[M];
};

// Loads a part whose values are `stride` apart and `count` in number; `at` is that of the first
// one.
template <int M, class P> DEVICE inline void load_part(Part<M> &part, P from, int64_t at, int count, int64_t stride) {
    UNROLL for (int m = 0; m < M; m++) {
        int i = int(threadIdx.x) % LANES + LANES * m;
        if (i < count) part.values[m] = widen(from.load(at + i * stride));
    }
}
template <int M, class P>
DEVICE inline void store_part(const Part<M> &part, P to, int64_t at, int count, int64_t stride) {
    UNROLL for (int m = 0; m < M; m++) {
        int i = int(threadIdx.x) % LANES + LANES * m;
        if (i < count) to.store(at + i * stride, part.values[m]);
    }
}

// Tokens that the kernels of columns and of rows load at a time.
constexpr int STEP = 16;
constexpr int ROW_STEP = 8;

// The forward; M: Dk over 8 at most. `out` or `missing` is null. States come from `carried`, which
// gets the last one, or from the list `before`; those before chunks are stored in `saved` unless it
// is null.
template <int M, class T>
DEVICE inline void forward(const Inputs<T> &in, In<uint32_t> pieces, In<float> before, InOut<float> carried, Out<T> out,
                           Out<float> missing, Out<float> saved) {
    constexpr int W = LANES * M;
    SHARED(float, q, STEP * W);
    SHARED(float, k, STEP * W);
    SHARED(float, decays, STEP);
    SHARED(float, betas, STEP);
    Tokens<W> tokens{q, k, decays, betas};
    Piece piece = piece_of(pieces);
    int lane = int(threadIdx.x) % LANES, column = int(blockIdx.z) * LINES + int(threadIdx.x) / LANES;
    bool there = column < in.dv, writes = there && lane == 0;
    auto write = [&](int64_t row, float o, float m) {
        if (!writes) return;
        if (!out.is_null()) out.store((row * in.values() + in.head) * in.dv + column, nearest<T>(o));
        if (!missing.is_null()) missing.store(in.local(row, in.dv) + column, m);
    };
    if (piece.is_gap()) {
        for (int t = 0; t < piece.len; t++) write(piece.first + t, 0.0f, 0.0f);
        return;
    }
    Part<M> s = {};
    int count = there ? in.dk : 0;
    if (!carried.is_null())
        load_part(s, carried, in.state(0) + column, count, in.dv);
    else if (piece.before > 0)
        load_part(s, before, in.state(piece.before - 1) + column, count, in.dv);
    KEEP_LOOP for (int base = 0; base < piece.len; base += STEP) {
        int steps = smaller(STEP, piece.len - base);
        sync_block();
        tokens.load(in, piece.first + base, steps);
        sync_block();
        KEEP_LOOP for (int t = 0; t < steps; t++) {
            int token = base + t;
            if (token > 0 && token % CHUNK == 0 && !saved.is_null())
                store_part(s, saved, in.state(int64_t(piece.after) + token / CHUNK - 1) + column, count, in.dv);
            int64_t row = piece.first + token;
            float decay = decays.load(t), read = 0.0f, o = 0.0f;
            UNROLL for (int m = 0; m < M; m++) {
                s.values[m] *= decay;
                read = fmaf(s.values[m], k.load(t * W + lane + LANES * m), read);
            }
            float v = there ? widen(in.qkv.load(in.value(row) + column)) : 0.0f;
            float missed = v - line_sum(read), added = betas.load(t) * missed;
            UNROLL for (int m = 0; m < M; m++) {
                s.values[m] = fmaf(k.load(t * W + lane + LANES * m), added, s.values[m]);
                o = fmaf(s.values[m], q.load(t * W + lane + LANES * m), o);
            }
            write(row, line_sum(o), missed);
        }
    }
    if (!carried.is_null()) store_part(s, carried, in.state(0) + column, count, in.dv);
}

// Step 2, over whole sequences: du, and dS before the first token of each chunk but the first one.
template <int M, class T>
DEVICE inline void backward_columns(const Inputs<T> &in, In<uint32_t> pieces, In<T> dout, Out<float> du,
                                    Out<float> dstates) {
    constexpr int W = LANES * M;
    SHARED(float, q, STEP * W);
    SHARED(float, k, STEP * W);
    SHARED(float, decays, STEP);
    SHARED(float, betas, STEP);
    Tokens<W> tokens{q, k, decays, betas};
    Piece piece = piece_of(pieces);
    int lane = int(threadIdx.x) % LANES, column = int(blockIdx.z) * LINES + int(threadIdx.x) / LANES;
    bool there = column < in.dv, writes = there && lane == 0;
    if (piece.is_gap()) {
        for (int t = 0; t < piece.len; t++)
            if (writes) du.store(in.local(piece.first + t, in.dv) + column, 0.0f);
        return;
    }
    Part<M> d = {};
    int count = there ? in.dk : 0;
    KEEP_LOOP for (int base = (piece.len - 1) / STEP * STEP; base >= 0; base -= STEP) {
        int steps = smaller(STEP, piece.len - base);
        sync_block();
        tokens.load(in, piece.first + base, steps);
        sync_block();
        KEEP_LOOP for (int t = steps - 1; t >= 0; t--) {
            int token = base + t;
            int64_t row = piece.first + token;
            float g = there ? widen(dout.load((row * in.values() + in.head) * in.dv + column)) : 0.0f, sum = 0.0f;
            UNROLL for (int m = 0; m < M; m++) {
                d.values[m] = fmaf(q.load(t * W + lane + LANES * m), g, d.values[m]);
                sum = fmaf(d.values[m], k.load(t * W + lane + LANES * m), sum);
            }
            sum = line_sum(sum);
            if (writes) du.store(in.local(row, in.dv) + column, sum);
            float dv = betas.load(t) * sum, decay = decays.load(t);
            UNROLL for (int m = 0; m < M; m++)
                d.values[m] = fmaf(-k.load(t * W + lane + LANES * m), dv, d.values[m]) * decay;
            if (token > 0 && token % CHUNK == 0)
                store_part(d, dstates, in.local_state(int64_t(piece.after) + token / CHUNK - 1) + column, count, in.dv);
        }
    }
}

// Some tokens in shared memory for 16 rows of a state: their keys, then their queries, and vectors
// of W values, zero from Dv on: u, dout and dv.
template <int W> struct RowTokens {
    Shared<float> rows, u, dout, dv, decay;

    template <class T>
    DEVICE void load(const Inputs<T> &in, In<float> missing, In<float> du, In<T> g, int64_t first, int count) const {
        int lane = int(threadIdx.x) % 32, row = int(blockIdx.z) * LINES + lane % LINES;
        for (int t = int(threadIdx.x) / 32; t < count; t += THREADS / 32) {
            int64_t n = first + t, key = in.key(n), query = in.query(n);
            float of_key = in.inverse_norm(key), of_query = in.inverse_norm(query) * in.scale();
            float factor = lane < LINES ? of_key : of_query;
            float x = row < in.dk ? widen(in.qkv.load((lane < LINES ? key : query) + row)) : 0.0f;
            rows.store(t * 2 * LINES + lane, x * factor);
            float beta = in.beta(n);
            for (int c = lane; c < W; c += 32) {
                bool there = c < in.dv;
                u.store(t * W + c, there ? beta * missing.load(in.local(n, in.dv) + c) : 0.0f);
                dv.store(t * W + c, there ? beta * du.load(in.local(n, in.dv) + c) : 0.0f);
                dout.store(t * W + c, there ? widen(g.load((n * in.values() + in.head) * in.dv + c)) : 0.0f);
            }
            if (lane == 0) decay.store(t, in.decay(n));
        }
    }
};

// Step 3, over chunks; M: Dv over 8 at most. dkq: [rows, heads, 2, Dk] gets the gradients of the
// normed queries, then keys. slopes: [rows, heads, blocks along z] gets this block's part of the
// gradient of the logarithm of the decay from the start of the chunk to a token. It leaves out the
// products of a token with itself: they cancel, and would take the precision of decays near zero
// with them.
template <int M, class T>
DEVICE inline void backward_rows(const Inputs<T> &in, In<uint32_t> pieces, In<float> states, In<float> dstates,
                                 In<float> missing, In<float> du, In<T> dout, InOut<float> dkq, Out<float> slopes) {
    constexpr int W = LANES * M;
    SHARED(float, rows, ROW_STEP * 2 * LINES);
    SHARED(float, us, ROW_STEP * W);
    SHARED(float, gs, ROW_STEP * W);
    SHARED(float, dvs, ROW_STEP * W);
    SHARED(float, decays, ROW_STEP);
    SHARED(float, parts, CHUNK * LINES);
    RowTokens<W> tokens{rows, us, gs, dvs, decays};
    Piece piece = piece_of(pieces);
    int lane = int(threadIdx.x) % LANES, line = int(threadIdx.x) / LANES, row = int(blockIdx.z) * LINES + line;
    bool there = row < in.dk, writes = there && lane == 0;
    auto at = [&](int token, int which) { return in.local(piece.first + token, 2 * in.dk) + which * in.dk + row; };
    auto slope_at = [&](int token) { return in.local(piece.first + token, int(gridDim.z)) + blockIdx.z; };
    if (piece.is_gap()) {
        for (int t = 0; t < piece.len; t++) {
            if (writes) dkq.store(at(t, 0), 0.0f);
            if (writes) dkq.store(at(t, 1), 0.0f);
            if (threadIdx.x == 0) slopes.store(slope_at(t), 0.0f);
        }
        return;
    }
    int count = there ? in.dv : 0;
    Part<M> s = {};
    if (piece.before > 0) load_part(s, states, in.state(piece.before - 1) + int64_t(row) * in.dv, count, 1);
    KEEP_LOOP for (int base = 0; base < piece.len; base += ROW_STEP) {
        int steps = smaller(ROW_STEP, piece.len - base);
        sync_block();
        tokens.load(in, missing, du, dout, piece.first + base, steps);
        sync_block();
        KEEP_LOOP for (int t = 0; t < steps; t++) {
            float decay = decays.load(t), dk = 0.0f, dq = 0.0f, seen = 0.0f;
            float k = rows.load(t * 2 * LINES + line), q = rows.load(t * 2 * LINES + LINES + line);
            UNROLL for (int m = 0; m < M; m++) {
                int c = t * W + lane + LANES * m;
                s.values[m] *= decay;
                dk = fmaf(-s.values[m], dvs.load(c), dk);
                seen = fmaf(s.values[m], gs.load(c), seen);
                s.values[m] = fmaf(k, us.load(c), s.values[m]);
                dq = fmaf(s.values[m], gs.load(c), dq);
            }
            dk = line_sum(dk);
            dq = line_sum(dq);
            seen = line_sum(seen);
            if (lane == 0) parts.store((base + t) * LINES + line, fmaf(q, seen, k * dk));
            if (writes) dkq.store(at(base + t, 0), dq);
            if (writes) dkq.store(at(base + t, 1), dk);
        }
    }
    Part<M> d = {};
    if (piece.after > 0) load_part(d, dstates, in.local_state(piece.after - 1) + int64_t(row) * in.dv, count, 1);
    KEEP_LOOP for (int base = (piece.len - 1) / ROW_STEP * ROW_STEP; base >= 0; base -= ROW_STEP) {
        int steps = smaller(ROW_STEP, piece.len - base);
        sync_block();
        tokens.load(in, missing, du, dout, piece.first + base, steps);
        sync_block();
        KEEP_LOOP for (int t = steps - 1; t >= 0; t--) {
            float decay = decays.load(t), dk = 0.0f, later = 0.0f;
            float k = rows.load(t * 2 * LINES + line), q = rows.load(t * 2 * LINES + LINES + line);
            UNROLL for (int m = 0; m < M; m++) {
                int c = t * W + lane + LANES * m;
                later = fmaf(d.values[m], us.load(c), later);
                d.values[m] = fmaf(q, gs.load(c), d.values[m]);
                dk = fmaf(d.values[m], us.load(c), dk);
                d.values[m] = fmaf(-k, dvs.load(c), d.values[m]) * decay;
            }
            dk = line_sum(dk);
            later = line_sum(later);
            int part = (base + t) * LINES + line;
            if (lane == 0) parts.store(part, fmaf(-k, later, parts.load(part)));
            if (writes) dkq.store(at(base + t, 1), dkq.load(at(base + t, 1)) + dk);
        }
    }
    sync_block();
    int token = int(threadIdx.x);
    if (token >= piece.len) return;
    float sum = 0.0f;
    for (int i = 0; i < LINES; i++) sum += parts.load(token * LINES + i);
    slopes.store(slope_at(token), sum);
}

// Step 4: a warp for a row and key head. dq, dk, dv and db begin with the columns of the first
// head.
template <class T>
DEVICE inline void finish(Inputs<T> in, In<float> dkq, In<float> missing, In<float> du, Out<T> dq, Out<T> dk, Out<T> dv,
                          Out<T> db, uint32_t rows, int heads, uint32_t db_stride) {
    int64_t unit = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    int own = heads / in.group, first = in.head, lane = int(threadIdx.x) % 32;
    int64_t row = unit / own;
    int key = int(unit % own), member = key * in.group;
    if (row >= rows) return;
    in.head = first + member;
    // The queries, then the keys.
    for (int which = 0; which < 2; which++) {
        int64_t from = which == 0 ? in.query(row) : in.key(row);
        float inverse = in.inverse_norm(from), scale = which == 0 ? in.scale() : 1.0f, along = 0.0f;
        auto gradient = [&](int i) {
            float sum = 0.0f;
            for (int g = 0; g < in.group; g++) sum += dkq.load(((row * heads + member + g) * 2 + which) * in.dk + i);
            return sum * scale;
        };
        for (int i = lane; i < in.dk; i += 32) along = fmaf(widen(in.qkv.load(from + i)) * inverse, gradient(i), along);
        along = warp_sum(along);
        for (int i = lane; i < in.dk; i += 32) {
            float normed = widen(in.qkv.load(from + i)) * inverse;
            float d = inverse * (gradient(i) - normed * along);
            int64_t to = row * in.width() + key * in.dk + i;
            if (which == 0)
                dq.store(to, nearest<T>(d));
            else
                dk.store(to, nearest<T>(d));
        }
    }
    for (int g = 0; g < in.group; g++) {
        in.head = first + member + g;
        int64_t at = (row * heads + member + g) * in.dv, to = row * in.width() + int64_t(member + g) * in.dv;
        float beta = in.beta(row), sum = 0.0f;
        for (int c = lane; c < in.dv; c += 32) {
            float d = du.load(at + c);
            sum = fmaf(d, missing.load(at + c), sum);
            dv.store(to + c, nearest<T>(beta * d));
        }
        sum = warp_sum(sum);
        if (lane == 0) db.store(row * db_stride + member + g, nearest<T>(sum * beta * (1.0f - beta)));
    }
}

// Step 5: a block for a chunk and value head. da begins with the column of the first head. sums:
// [2, rows, heads] gets the gradients of a and of a_log in f32, or is null.
template <class T>
DEVICE inline void decays(const Inputs<T> &in, In<uint32_t> pieces, In<float> states, In<float> dstates,
                          In<float> slopes, Out<T> da, Out<float> sums, uint32_t rows, int parts, uint32_t da_stride) {
    SHARED(float, scratch, 32);
    SHARED(float, of_tokens, CHUNK);
    Piece piece = piece_of(pieces);
    float at_end = 0.0f;
    if (!piece.is_gap() && piece.after > 0) {
        int64_t s = in.state(piece.after - 1), d = in.local_state(piece.after - 1);
        for (int i = int(threadIdx.x); i < in.dk * in.dv; i += THREADS)
            at_end = fmaf(states.load(s + i), dstates.load(d + i), at_end);
    }
    at_end = block_sum(at_end, scratch);
    int token = int(threadIdx.x);
    int64_t row = piece.first + token;
    if (token < piece.len) {
        float sum = 0.0f;
        for (int i = 0; i < parts; i++) sum += slopes.load(in.local(row, parts) + i);
        of_tokens.store(token, sum);
    }
    sync_block();
    if (token >= piece.len) return;
    float sum = at_end;
    for (int i = piece.len - 1; i >= token; i--) sum += of_tokens.load(i);
    float x = in.shifted(row), rate = in.rate(), d = sum * rate * sigmoid(x);
    da.store(row * da_stride + blockIdx.y, nearest<T>(d));
    if (sums.is_null()) return;
    sums.store(in.local(row, 1), d);
    sums.store(in.local(rows + row, 1), sum * rate * softplus(x));
}

} // namespace

#define HEADS                                                                                                          \
    int(key_heads), int(group), int(key_dim), int(value_dim), a_stride, b_stride, int(first_head + blockIdx.y)
#define OF_INPUTS {qkv, a, b, a_log, dt_bias, HEADS}

#define FORWARD_BF16                                                                                                   \
    In<bf16> qkv, In<bf16> a, In<bf16> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces, In<float> before,   \
        InOut<float> carried, Out<bf16> out, Out<float> missing, Out<float> saved, uint32_t key_heads,                 \
        uint32_t group, uint32_t key_dim, uint32_t value_dim, uint32_t a_stride, uint32_t b_stride,                    \
        uint32_t first_head
#define FORWARD_F32                                                                                                    \
    In<float> qkv, In<float> a, In<float> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces,                  \
        In<float> before, InOut<float> carried, Out<float> out, Out<float> missing, Out<float> saved,                  \
        uint32_t key_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim, uint32_t a_stride,                   \
        uint32_t b_stride, uint32_t first_head

// out: `[rows, V Dv]` or missing: `[rows, heads, Dv]`, for keys of at most 64 values. A block for a
// piece, a value head and 16 columns.
KERNEL BOUNDS(128, 4) gated_delta_64_bf16(FORWARD_BF16) {
    forward<8, bf16>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}
// Like gated_delta_64_bf16, for keys of at most 128 values.
KERNEL BOUNDS(128, 4) gated_delta_128_bf16(FORWARD_BF16) {
    forward<16, bf16>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}
// Like gated_delta_64_bf16, for keys of at most 256 values.
KERNEL BOUNDS(128, 3) gated_delta_256_bf16(FORWARD_BF16) {
    forward<32, bf16>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}
// Like gated_delta_64_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_64_f32(FORWARD_F32) {
    forward<8, float>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}
// Like gated_delta_128_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_128_f32(FORWARD_F32) {
    forward<16, float>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}
// Like gated_delta_256_bf16, in f32.
KERNEL BOUNDS(128, 3) gated_delta_256_f32(FORWARD_F32) {
    forward<32, float>(OF_INPUTS, pieces, before, carried, out, missing, saved);
}

#define COLUMNS_BF16                                                                                                   \
    In<bf16> qkv, In<bf16> a, In<bf16> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces, In<bf16> dout,      \
        Out<float> du, Out<float> dstates, uint32_t key_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim,   \
        uint32_t a_stride, uint32_t b_stride, uint32_t first_head
#define COLUMNS_F32                                                                                                    \
    In<float> qkv, In<float> a, In<float> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces, In<float> dout,  \
        Out<float> du, Out<float> dstates, uint32_t key_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim,   \
        uint32_t a_stride, uint32_t b_stride, uint32_t first_head

// du: `[rows, heads, Dv]` and dstates: `[states, heads, Dk, Dv]`, for keys of at most 64 values. A
// block for a sequence, a value head and 16 columns.
KERNEL BOUNDS(128, 4) gated_delta_backward_columns_64_bf16(COLUMNS_BF16) {
    backward_columns<8, bf16>(OF_INPUTS, pieces, dout, du, dstates);
}
// Like gated_delta_backward_columns_64_bf16, for keys of at most 128 values.
KERNEL BOUNDS(128, 4) gated_delta_backward_columns_128_bf16(COLUMNS_BF16) {
    backward_columns<16, bf16>(OF_INPUTS, pieces, dout, du, dstates);
}
// Like gated_delta_backward_columns_64_bf16, for keys of at most 256 values.
KERNEL BOUNDS(128, 3) gated_delta_backward_columns_256_bf16(COLUMNS_BF16) {
    backward_columns<32, bf16>(OF_INPUTS, pieces, dout, du, dstates);
}
// Like gated_delta_backward_columns_64_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_columns_64_f32(COLUMNS_F32) {
    backward_columns<8, float>(OF_INPUTS, pieces, dout, du, dstates);
}
// Like gated_delta_backward_columns_128_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_columns_128_f32(COLUMNS_F32) {
    backward_columns<16, float>(OF_INPUTS, pieces, dout, du, dstates);
}
// Like gated_delta_backward_columns_256_bf16, in f32.
KERNEL BOUNDS(128, 3) gated_delta_backward_columns_256_f32(COLUMNS_F32) {
    backward_columns<32, float>(OF_INPUTS, pieces, dout, du, dstates);
}

#define ROWS_BF16                                                                                                      \
    In<bf16> qkv, In<bf16> a, In<bf16> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces, In<float> states,   \
        In<float> dstates, In<float> missing, In<float> du, In<bf16> dout, InOut<float> dkq, Out<float> slopes,        \
        uint32_t key_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim, uint32_t a_stride,                   \
        uint32_t b_stride, uint32_t first_head
#define ROWS_F32                                                                                                       \
    In<float> qkv, In<float> a, In<float> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces,                  \
        In<float> states, In<float> dstates, In<float> missing, In<float> du, In<float> dout, InOut<float> dkq,        \
        Out<float> slopes, uint32_t key_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim,                   \
        uint32_t a_stride, uint32_t b_stride, uint32_t first_head

// dkq: `[rows, heads, 2, Dk]` and slopes: `[rows, heads, blocks along z]`, for values of at most 64
// values. A block for a chunk, a value head and 16 rows of its state.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_64_bf16(ROWS_BF16) {
    backward_rows<8, bf16>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}
// Like gated_delta_backward_rows_64_bf16, for values of at most 128 values.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_128_bf16(ROWS_BF16) {
    backward_rows<16, bf16>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}
// Like gated_delta_backward_rows_64_bf16, for values of at most 256 values.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_256_bf16(ROWS_BF16) {
    backward_rows<32, bf16>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}
// Like gated_delta_backward_rows_64_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_64_f32(ROWS_F32) {
    backward_rows<8, float>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}
// Like gated_delta_backward_rows_128_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_128_f32(ROWS_F32) {
    backward_rows<16, float>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}
// Like gated_delta_backward_rows_256_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_rows_256_f32(ROWS_F32) {
    backward_rows<32, float>(OF_INPUTS, pieces, states, dstates, missing, du, dout, dkq, slopes);
}

#define FINISH_BF16                                                                                                    \
    In<bf16> qkv, In<bf16> a, In<bf16> b, In<float> a_log, In<float> dt_bias, In<float> dkq, In<float> missing,        \
        In<float> du, Out<bf16> dq, Out<bf16> dk, Out<bf16> dv, Out<bf16> db, uint32_t key_heads, uint32_t group,      \
        uint32_t key_dim, uint32_t value_dim, uint32_t a_stride, uint32_t b_stride, uint32_t first_head,               \
        uint32_t rows, uint32_t heads, uint32_t db_stride
#define FINISH_F32                                                                                                     \
    In<float> qkv, In<float> a, In<float> b, In<float> a_log, In<float> dt_bias, In<float> dkq, In<float> missing,     \
        In<float> du, Out<float> dq, Out<float> dk, Out<float> dv, Out<float> db, uint32_t key_heads, uint32_t group,  \
        uint32_t key_dim, uint32_t value_dim, uint32_t a_stride, uint32_t b_stride, uint32_t first_head,               \
        uint32_t rows, uint32_t heads, uint32_t db_stride

// The gradients of queries, keys, values and b, of the `heads` value heads from the first one on.
KERNEL BOUNDS(128, 4) gated_delta_backward_inputs_bf16(FINISH_BF16) {
    finish<bf16>(OF_INPUTS, dkq, missing, du, dq, dk, dv, db, rows, int(heads), db_stride);
}
// Like gated_delta_backward_inputs_bf16, in f32.
KERNEL BOUNDS(128, 4) gated_delta_backward_inputs_f32(FINISH_F32) {
    finish<float>(OF_INPUTS, dkq, missing, du, dq, dk, dv, db, rows, int(heads), db_stride);
}

#define DECAYS_BF16                                                                                                    \
    In<bf16> qkv, In<bf16> a, In<bf16> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces, In<float> states,   \
        In<float> dstates, In<float> slopes, Out<bf16> da, Out<float> sums, uint32_t key_heads, uint32_t group,        \
        uint32_t key_dim, uint32_t value_dim, uint32_t a_stride, uint32_t b_stride, uint32_t first_head,               \
        uint32_t rows, uint32_t parts, uint32_t da_stride
#define DECAYS_F32                                                                                                     \
    In<float> qkv, In<float> a, In<float> b, In<float> a_log, In<float> dt_bias, In<uint32_t> pieces,                  \
        In<float> states, In<float> dstates, In<float> slopes, Out<float> da, Out<float> sums, uint32_t key_heads,     \
        uint32_t group, uint32_t key_dim, uint32_t value_dim, uint32_t a_stride, uint32_t b_stride,                    \
        uint32_t first_head, uint32_t rows, uint32_t parts, uint32_t da_stride

// The gradient of a from slopes: `[rows, heads, parts]`. A block for a chunk and a value head.
KERNEL BOUNDS(128, 8) gated_delta_backward_decays_bf16(DECAYS_BF16) {
    decays<bf16>(OF_INPUTS, pieces, states, dstates, slopes, da, sums, rows, int(parts), da_stride);
}
// Like gated_delta_backward_decays_bf16, in f32.
KERNEL BOUNDS(128, 8) gated_delta_backward_decays_f32(DECAYS_F32) {
    decays<float>(OF_INPUTS, pieces, states, dstates, slopes, da, sums, rows, int(parts), da_stride);
}
