// A learned logit per query head, the sink, in the denominator of attention's softmax: the output
// of attention without it, and each row's log-sum-exp, become those with it.
// crates/ops/src/ops/attention_sinks holds the definition.
//
// out is [rows, heads * width], lse [heads, rows] f32, sinks [heads]. A warp processes a head of a
// row.
#include "compat.cuh"

namespace {

constexpr int WARPS = 8;

template <class T, class S>
DEVICE inline void forward(InOut<T> out, InOut<float> lse, In<S> sinks, uint32_t rows, uint32_t heads, int width) {
    int64_t number = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (number >= int64_t(rows) * heads) return;
    int64_t row = number / heads;
    int head = int(number % heads), lane = int(threadIdx.x) % 32;
    float sink = widen(sinks.load(head)), before = lse.load(int64_t(head) * rows + row);
    float factor = 1.0f / (1.0f + expf(sink - before));
    float larger = sink > before ? sink : before, smaller = sink > before ? before : sink;
    // Every lane has read the old value before lane 0 replaces it.
    sync_warp();
    if (lane == 0) lse.store(int64_t(head) * rows + row, larger + logf(1.0f + expf(smaller - larger)));
    for (int c = lane; c < width; c += 32) {
        int64_t at = number * width + c;
        out.store(at, nearest<T>(widen(out.load(at)) * factor));
    }
}

// partial[i][head], [gridDim.x, heads], = minus the sum of exp(sink - lse) * (dout . out) over the
// rows i, i + gridDim.x, ... in order. A warp sums a head.
template <class T, class S>
DEVICE inline void sink_partial(In<T> out, In<float> lse, In<T> dout, In<S> sinks, Out<float> partial, uint32_t rows,
                                uint32_t heads, int width) {
    int head = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (head >= int(heads)) return;
    float sink = widen(sinks.load(head)), sum = 0.0f;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int64_t at = (row * heads + head) * width;
        float dot = 0.0f;
        for (int c = lane; c < width; c += 32) dot = fmaf(widen(out.load(at + c)), widen(dout.load(at + c)), dot);
        sum += expf(sink - lse.load(int64_t(head) * rows + row)) * warp_sum(dot);
    }
    if (lane == 0) partial.store(int64_t(blockIdx.x) * heads + head, -sum);
}

} // namespace

// out and lse without sinks become those with them.
KERNEL BOUNDS(256, 6) attention_sinks_bf16(InOut<bf16> out, InOut<float> lse, In<bf16> sinks, uint32_t rows, uint32_t heads, uint32_t width) {
    forward(out, lse, sinks, rows, heads, int(width));
}
// Like attention_sinks_bf16, with f32 sinks.
KERNEL BOUNDS(256, 6) attention_sinks_bf16_f32(InOut<bf16> out, InOut<float> lse, In<float> sinks, uint32_t rows, uint32_t heads, uint32_t width) {
    forward(out, lse, sinks, rows, heads, int(width));
}
// Like attention_sinks_bf16, all in f32.
KERNEL BOUNDS(256, 6) attention_sinks_f32(InOut<float> out, InOut<float> lse, In<float> sinks, uint32_t rows, uint32_t heads, uint32_t width) {
    forward(out, lse, sinks, rows, heads, int(width));
}
// Partial sums of the gradient of the sinks, a row for each block.
KERNEL BOUNDS(256, 3) attention_sinks_partial_bf16(In<bf16> out, In<float> lse, In<bf16> dout, In<bf16> sinks, Out<float> partial, uint32_t rows, uint32_t heads, uint32_t width) {
    sink_partial(out, lse, dout, sinks, partial, rows, heads, int(width));
}
// Like attention_sinks_partial_bf16, with f32 sinks.
KERNEL BOUNDS(256, 3) attention_sinks_partial_bf16_f32(In<bf16> out, In<float> lse, In<bf16> dout, In<float> sinks, Out<float> partial, uint32_t rows, uint32_t heads, uint32_t width) {
    sink_partial(out, lse, dout, sinks, partial, rows, heads, int(width));
}
// Like attention_sinks_partial_bf16, all in f32.
KERNEL BOUNDS(256, 3) attention_sinks_partial_f32(In<float> out, In<float> lse, In<float> dout, In<float> sinks, Out<float> partial, uint32_t rows, uint32_t heads, uint32_t width) {
    sink_partial(out, lse, dout, sinks, partial, rows, heads, int(width));
}
