// Token embedding: rows of the table times a factor, the table's gradient, and columns of A for
// LoRA on it. Sums have the order of crates/ops/src/ops/embedding.rs, token by token, so the
// results are bit-identical to the CPU's.
//
// For gradients the host sorts the positions of tokens by id, equal ids in the order of the batch:
// `places` lists them, `ids` the distinct ids, and id i has places[starts[i]] to places[starts[i +
// 1]]. Skipped tokens are not listed, or have the id `skip`.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;

// Computes y[n] = table[ids[n]] * factor for one row n, a block's work.
template <class T, class Y>
DEVICE inline void embed(In<T> table, In<uint32_t> ids, Out<Y> y, int width, float factor) {
    constexpr int V = sizeof(T) == 2 && sizeof(Y) == 2 ? 8 : 4;
    In<T> from = table.offset(int64_t(ids.load(blockIdx.x)) * width);
    Out<Y> to = y.offset(int64_t(blockIdx.x) * width);
    bool whole = from.is_aligned(sizeof(T) * V) && to.is_aligned(sizeof(Y) * V);
    for (int c = int(threadIdx.x) * V; c < width; c += THREADS * V) {
        if (whole && c + V <= width) {
            float x[V];
            load_values<T, V>(x, from, c);
            UNROLL for (int i = 0; i < V; i++) x[i] *= factor;
            store_values<Y, V>(to, c, x);
        } else {
            for (int i = 0; i < V; i++)
                if (c + i < width) to.store(c + i, nearest<Y>(widen(from.load(c + i)) * factor));
        }
    }
}

// Number of tokens whose rows a thread reads before it adds them.
constexpr int AT_ONCE = 4;

// Columns of a block: four for each thread.
constexpr int COLUMNS = 4 * THREADS;

// Adds rows of dy to four columns of the gradient, in the order of the tokens.
template <class T>
DEVICE inline void add_tokens(float (&sum)[4], In<uint32_t> places, In<T> dy, int64_t start, int64_t end, int width,
                              int c, float factor, bool whole) {
    for (int64_t k = start; k < end; k += AT_ONCE) {
        float x[AT_ONCE][4];
        UNROLL for (int t = 0; t < AT_ONCE; t++) {
            if (k + t >= end) continue;
            In<T> row = dy.offset(int64_t(places.load(k + t)) * width);
            if (whole) {
                load_values<T, 4>(x[t], row, c);
            } else {
                UNROLL for (int i = 0; i < 4; i++) x[t][i] = c + i < width ? widen(row.load(c + i)) : 0.0f;
            }
        }
        UNROLL for (int t = 0; t < AT_ONCE; t++)
            if (k + t < end) UNROLL for (int i = 0; i < 4; i++) sum[i] += x[t][i] * factor;
    }
}

template <class T>
DEVICE inline void embed_backward(InOut<float> grad, In<uint32_t> ids, In<uint32_t> starts, In<uint32_t> places,
                                  In<T> dy, int width, float factor, uint32_t skip) {
    uint32_t id = ids.load(blockIdx.x);
    int c = int(blockIdx.y) * COLUMNS + 4 * int(threadIdx.x);
    if (id == skip || c >= width) return;
    int64_t start = starts.load(blockIdx.x), end = starts.load(blockIdx.x + 1);
    InOut<float> row = grad.offset(int64_t(id) * width);
    bool whole = width % 4 == 0 && grad.is_aligned(16) && dy.is_aligned(4 * sizeof(T));
    float sum[4] = {};
    if (whole) load_values<float, 4>(sum, row, c);
    UNROLL for (int i = 0; i < 4; i++)
        if (!whole && c + i < width) sum[i] = row.load(c + i);
    add_tokens(sum, places, dy, start, end, width, c, factor, whole);
    if (whole) store_values<float, 4>(row, c, sum);
    UNROLL for (int i = 0; i < 4; i++)
        if (!whole && c + i < width) row.store(c + i, sum[i]);
}

template <class T>
DEVICE inline void columns_of(In<T> a, In<uint32_t> ids, Out<T> y, int64_t tokens, uint32_t r, int64_t vocab) {
    int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= tokens * r) return;
    int64_t n = at / r;
    y.store(at, a.load((at - n * r) * vocab + ids.load(n)));
}

template <class T>
DEVICE inline void columns_of_backward(InOut<float> grad, In<uint32_t> ids, In<uint32_t> starts, In<uint32_t> places,
                                       In<T> du, int64_t count, uint32_t r, int64_t vocab, uint32_t skip) {
    int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= count * r) return;
    int64_t i = at / r, j = at - i * r;
    uint32_t id = ids.load(i);
    if (id == skip) return;
    float sum = grad.load(j * vocab + id);
    for (int64_t k = starts.load(i); k < starts.load(i + 1); k++)
        sum += widen(du.load(int64_t(places.load(k)) * r + j));
    grad.store(j * vocab + id, sum);
}

} // namespace

// y: `[N, width]` from table: `[V, width]`. One block a token.
KERNEL BOUNDS(256, 6) embed_bf16_bf16(In<bf16> table, In<uint32_t> ids, Out<bf16> y, uint32_t width, float factor) {
    embed(table, ids, y, int(width), factor);
}
// Like embed_bf16_bf16.
KERNEL BOUNDS(256, 6) embed_bf16_f32(In<bf16> table, In<uint32_t> ids, Out<float> y, uint32_t width, float factor) {
    embed(table, ids, y, int(width), factor);
}
// Like embed_bf16_bf16.
KERNEL BOUNDS(256, 6) embed_f32_bf16(In<float> table, In<uint32_t> ids, Out<bf16> y, uint32_t width, float factor) {
    embed(table, ids, y, int(width), factor);
}
// Like embed_bf16_bf16.
KERNEL BOUNDS(256, 6) embed_f32_f32(In<float> table, In<uint32_t> ids, Out<float> y, uint32_t width, float factor) {
    embed(table, ids, y, int(width), factor);
}

// `grad[id] += factor * dy[n]` for the tokens n of each id; grad: `[V, width]`, dy: `[N, width]`.
// Blocks: one for each listed id along x, for each 1024 columns along y.
KERNEL BOUNDS(256, 4) embed_backward_bf16(InOut<float> grad, In<uint32_t> ids, In<uint32_t> starts, In<uint32_t> places,
    In<bf16> dy, uint32_t width, float factor, uint32_t skip) {
    embed_backward(grad, ids, starts, places, dy, int(width), factor, skip);
}
// Like embed_backward_bf16.
KERNEL BOUNDS(256, 4) embed_backward_f32(InOut<float> grad, In<uint32_t> ids, In<uint32_t> starts, In<uint32_t> places,
    In<float> dy, uint32_t width, float factor, uint32_t skip) {
    embed_backward(grad, ids, starts, places, dy, int(width), factor, skip);
}

// `y[n, j] = a[j, ids[n]]`; a: `[r, vocab]`, y: `[tokens, r]`. A thread a value, 256 a block.
KERNEL BOUNDS(256, 6) columns_of_f32(In<float> a, In<uint32_t> ids, Out<float> y, int64_t tokens, uint32_t r,
    int64_t vocab) {
    columns_of(a, ids, y, tokens, r, vocab);
}

// `grad[j, id] += du[n, j]` for the tokens n of each of `count` listed ids; grad: `[r, vocab]`, du:
// `[N, r]`. A thread for each id and j, 256 a block.
KERNEL BOUNDS(256, 6) columns_of_backward_f32(InOut<float> grad, In<uint32_t> ids, In<uint32_t> starts,
    In<uint32_t> places, In<float> du, int64_t count, uint32_t r, int64_t vocab, uint32_t skip) {
    columns_of_backward(grad, ids, starts, places, du, count, r, vocab, skip);
}
