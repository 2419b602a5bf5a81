// A depthwise causal convolution of three or four taps over packed sequences, then perhaps SiLU,
// and its gradients. crates/ops/src/ops/causal_conv holds the definition.
//
// A thread processes one column and the rows of its block. `places`: [rows, 2] holds the number of
// rows of the same sequence before and after each row; before is NO_SPAN outside all sequences.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;
// Rows of a block of the backward.
constexpr int ROWS = 64;
constexpr uint32_t NO_SPAN = 0xffffffffu;

// A number of taps as a type.
template <int N> struct Taps { static constexpr int COUNT = N; };
template <class F> DEVICE inline void of_taps(uint32_t taps, F f) {
    if (taps == 4) f(Taps<4>{});
    else f(Taps<3>{});
}

// The inputs of one column.
template <int TAPS, class T> struct Column {
    In<T> x;
    int64_t stride;
    float weights[TAPS];
    // The inputs before row 0.
    float carried[TAPS - 1];

    DEVICE float input(int64_t row) const {
        if (row >= 0) return widen(x.load(row * stride));
        float before = carried[0];
        UNROLL for (int i = 1; i < TAPS - 1; i++) if (row == i - (TAPS - 1)) before = carried[i];
        return before;
    }
    // Returns the sum of a row with `before` inputs before it.
    DEVICE float sum(int64_t row, int before) const {
        float sum = 0.0f;
        UNROLL for (int back = TAPS - 1; back >= 0; back--)
            if (back <= before) sum = fmaf(input(row - back), weights[TAPS - 1 - back], sum);
        return sum;
    }
};

template <int TAPS, class T, class W>
DEVICE inline Column<TAPS, T> column_of(In<T> x, In<W> weight, int column, uint32_t stride) {
    Column<TAPS, T> of{x.offset(column), int64_t(stride), {}, {}};
    UNROLL for (int w = 0; w < TAPS; w++) of.weights[w] = widen(weight.load(int64_t(column) * TAPS + w));
    return of;
}

template <int TAPS> DEVICE inline int reach(uint32_t before) { return before < uint32_t(TAPS - 1) ? int(before) : TAPS - 1; }

template <int TAPS, class T, class W>
DEVICE inline void forward(In<T> x, In<W> weight, In<uint32_t> places, InOut<T> state, Out<T> y, uint32_t rows,
                           uint32_t channels, uint32_t stride, uint32_t rows_of_block, bool has_silu) {
    uint32_t column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= channels) return;
    Column<TAPS, T> of = column_of<TAPS>(x, weight, int(column), stride);
    bool is_carried = !state.is_null();
    UNROLL for (int i = 0; i < TAPS - 1; i++)
        if (is_carried) of.carried[i] = widen(state.load(int64_t(i) * channels + column));
    int64_t first = int64_t(blockIdx.y) * rows_of_block;
    int64_t end = first + rows_of_block < rows ? first + rows_of_block : rows;
    for (int64_t row = first; row < end; row++) {
        uint32_t before = places.load(2 * row);
        float sum = before == NO_SPAN ? 0.0f : of.sum(row, is_carried ? TAPS - 1 : reach<TAPS>(before));
        y.store(row * channels + column, nearest<T>(has_silu ? sum / (1.0f + expf(-sum)) : sum));
    }
    float last[TAPS - 1] = {};
    UNROLL for (int i = 0; i < TAPS - 1; i++) if (is_carried) last[i] = of.input(int64_t(rows) - (TAPS - 1) + i);
    UNROLL for (int i = 0; i < TAPS - 1; i++)
        if (is_carried) state.store(int64_t(i) * channels + column, nearest<T>(last[i]));
}

// Writes dx and, unless partial is null, the block's part of the weight's gradient.
template <int TAPS, class T, class W>
DEVICE inline void backward(In<T> x, In<W> weight, In<T> dy, In<uint32_t> places, Out<T> dx, Out<float> partial,
                            uint32_t rows, uint32_t channels, uint32_t stride, uint32_t dx_stride, bool has_silu) {
    uint32_t column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= channels) return;
    Column<TAPS, T> of = column_of<TAPS>(x, weight, int(column), stride);
    int64_t first = int64_t(blockIdx.y) * ROWS;
    int64_t end = first + ROWS < rows ? first + ROWS : rows;
    // The gradients of the sums of the last rows; rows after the block take part in its last rows.
    float ds[TAPS] = {}, dweight[TAPS] = {};
    KEEP_LOOP for (int64_t row = first; row < end + TAPS - 1; row++) {
        UNROLL for (int i = 0; i < TAPS - 1; i++) ds[i] = ds[i + 1];
        ds[TAPS - 1] = 0.0f;
        uint32_t before = row < rows ? places.load(2 * row) : NO_SPAN;
        if (before != NO_SPAN) {
            ds[TAPS - 1] = widen(dy.load(row * channels + column));
            if (has_silu) {
                float sum = of.sum(row, reach<TAPS>(before)), s = 1.0f / (1.0f + expf(-sum));
                ds[TAPS - 1] = ds[TAPS - 1] * (s * (1.0f + sum * (1.0f - s)));
            }
            UNROLL for (int back = 0; back < TAPS; back++)
                if (row < end && back <= reach<TAPS>(before))
                    dweight[TAPS - 1 - back] = fmaf(ds[TAPS - 1], of.input(row - back), dweight[TAPS - 1 - back]);
        }
        int64_t done = row - (TAPS - 1);
        if (done < first) continue;
        int after = reach<TAPS>(places.load(2 * done + 1));
        float sum = 0.0f;
        UNROLL for (int ahead = 0; ahead < TAPS; ahead++)
            if (ahead <= after) sum = fmaf(ds[ahead], of.weights[TAPS - 1 - ahead], sum);
        dx.store(done * dx_stride + column, nearest<T>(sum));
    }
    if (partial.is_null()) return;
    int64_t at = (int64_t(blockIdx.y) * channels + column) * TAPS;
    UNROLL for (int w = 0; w < TAPS; w++) partial.store(at + w, dweight[w]);
}

} // namespace

#define FORWARD_BF16                                                                                                   \
    In<bf16> x, In<bf16> weight, In<uint32_t> places, InOut<bf16> state, Out<bf16> y, uint32_t rows,                   \
        uint32_t channels, uint32_t stride, uint32_t rows_of_block, uint32_t taps, uint32_t silu
#define FORWARD_BF16_F32                                                                                               \
    In<bf16> x, In<float> weight, In<uint32_t> places, InOut<bf16> state, Out<bf16> y, uint32_t rows,                  \
        uint32_t channels, uint32_t stride, uint32_t rows_of_block, uint32_t taps, uint32_t silu
#define FORWARD_F32                                                                                                    \
    In<float> x, In<float> weight, In<uint32_t> places, InOut<float> state, Out<float> y, uint32_t rows,               \
        uint32_t channels, uint32_t stride, uint32_t rows_of_block, uint32_t taps, uint32_t silu
#define BACKWARD_BF16                                                                                                  \
    In<bf16> x, In<bf16> weight, In<bf16> dy, In<uint32_t> places, Out<bf16> dx, Out<float> partial, uint32_t rows,    \
        uint32_t channels, uint32_t stride, uint32_t dx_stride, uint32_t taps, uint32_t silu
#define BACKWARD_BF16_F32                                                                                              \
    In<bf16> x, In<float> weight, In<bf16> dy, In<uint32_t> places, Out<bf16> dx, Out<float> partial, uint32_t rows,   \
        uint32_t channels, uint32_t stride, uint32_t dx_stride, uint32_t taps, uint32_t silu
#define BACKWARD_F32                                                                                                   \
    In<float> x, In<float> weight, In<float> dy, In<uint32_t> places, Out<float> dx, Out<float> partial,               \
        uint32_t rows, uint32_t channels, uint32_t stride, uint32_t dx_stride, uint32_t taps, uint32_t silu

// y: `[rows, channels]` from x with `stride` values a row; weight: `[channels, taps]`. With a
// state, `[taps - 1, channels]`, one block along y processes all rows; the state may be null.
KERNEL BOUNDS(256, 4) causal_conv_bf16(FORWARD_BF16) {
    of_taps(taps, [&](auto n) {
        forward<decltype(n)::COUNT>(x, weight, places, state, y, rows, channels, stride, rows_of_block, silu != 0);
    });
}
// Like causal_conv_bf16, with an f32 weight.
KERNEL BOUNDS(256, 4) causal_conv_bf16_f32(FORWARD_BF16_F32) {
    of_taps(taps, [&](auto n) {
        forward<decltype(n)::COUNT>(x, weight, places, state, y, rows, channels, stride, rows_of_block, silu != 0);
    });
}
// Like causal_conv_bf16, all in f32.
KERNEL BOUNDS(256, 4) causal_conv_f32(FORWARD_F32) {
    of_taps(taps, [&](auto n) {
        forward<decltype(n)::COUNT>(x, weight, places, state, y, rows, channels, stride, rows_of_block, silu != 0);
    });
}
// dx, with `dx_stride` values a row, from dy: `[rows, channels]`; partial:
// `[blocks along y, channels, taps]` or null.
KERNEL BOUNDS(256, 4) causal_conv_backward_bf16(BACKWARD_BF16) {
    of_taps(taps, [&](auto n) {
        backward<decltype(n)::COUNT>(x, weight, dy, places, dx, partial, rows, channels, stride, dx_stride, silu != 0);
    });
}
// Like causal_conv_backward_bf16, with an f32 weight.
KERNEL BOUNDS(256, 4) causal_conv_backward_bf16_f32(BACKWARD_BF16_F32) {
    of_taps(taps, [&](auto n) {
        backward<decltype(n)::COUNT>(x, weight, dy, places, dx, partial, rows, channels, stride, dx_stride, silu != 0);
    });
}
// Like causal_conv_backward_bf16, all in f32.
KERNEL BOUNDS(256, 4) causal_conv_backward_f32(BACKWARD_F32) {
    of_taps(taps, [&](auto n) {
        backward<decltype(n)::COUNT>(x, weight, dy, places, dx, partial, rows, channels, stride, dx_stride, silu != 0);
    });
}
