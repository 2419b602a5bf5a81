// The loss of rows of logits and their gradient in place: loss = -log softmax(logits)[target],
// gradient = factor * (softmax - onehot), as in Liger and Cut Cross Entropy (arXiv 2411.09009);
// crates/ops/src/ops/cross_entropy.rs has the definition. With a cap the logits are cap *
// tanh(logit / cap) first. Logits and sums are f32.
//
// One block of 512 threads per row, which reads the row twice: for the largest logit and the sum of
// exponentials (each thread updates both in one pass, arXiv 1805.02867), then for the gradient. A
// bf16 gradient is written to the front half of its row: value c over the bytes of logit c / 2,
// which was read before. Rows may have any length. If rows start at multiples of 16 bytes (a pitch
// that is a multiple of 4), 16 bytes are read at once.
#include "compat.cuh"

namespace {

constexpr int THREADS = 512;

// Groups of 4 logits that a thread holds at once.
constexpr int GROUPS = 2;
constexpr int TILE = THREADS * GROUPS * 4;
constexpr float LOG2_E = 1.44269504f;

// Below every valid logit, and finite: minus infinity minus itself would be NaN.
constexpr float LOWEST = -3.0e38f;

// cap * tanh(logit / cap), or with CAPPED false the logit itself.
template <bool CAPPED> struct SoftCap {
    float cap, inverse;
    DEVICE explicit SoftCap(float cap) : cap(cap), inverse(CAPPED ? 1.0f / cap : 0.0f) {}
    DEVICE float tanh_of(float logit) const {
        return 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp2(2.0f * LOG2_E * (logit * inverse)));
    }
    DEVICE float of(float logit) const { return CAPPED ? cap * tanh_of(logit) : logit; }
};

// Loads four logits from column c on, capped; minus infinity past the end of the row, which adds
// nothing.
template <class M, bool CAPPED>
DEVICE inline void read_group(float (&x)[4], M row, int c, int vocab, bool whole, SoftCap<CAPPED> cap) {
    if (whole && c + 4 <= vocab) {
        Bytes16 bytes = row.load16(c);
        UNROLL for (int i = 0; i < 4; i++) x[i] = cap.of(value_of<float>(bytes, i));
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            x[i] = c + i < vocab ? cap.of(row.load(c + i)) : -bits_to_float(0x7f800000u);
    }
}

// The sums of a row for softmax and score.
struct RowSums {
    float max, sum, at_target;
    // True if another logit precedes the target: it is larger, or equal at a lower id, or NaN.
    bool beaten;
};

// Returns true if one of four logits precedes the target's; `largest` is the largest of them.
DEVICE inline bool beats(const float (&x)[4], float largest, int c, uint32_t target, float at_target) {
    if (uint32_t(c + 3) < target) return largest >= at_target;
    if (uint32_t(c) >= target) return largest > at_target;
    bool beaten = false;
    UNROLL for (int i = 0; i < 4; i++)
        beaten = beaten || (uint32_t(c + i) < target ? x[i] >= at_target : x[i] > at_target);
    return beaten;
}

template <class M, bool CAPPED>
DEVICE inline RowSums row_sums(M row, int vocab, uint32_t target, bool whole, SoftCap<CAPPED> cap) {
    SHARED(float, scratch_max, 32);
    SHARED(float, scratch_sum, 32);
    SHARED(float, scratch_beaten, 32);
    RowSums out{LOWEST, 0.0f, 0.0f, false};
    if (target < uint32_t(vocab)) out.at_target = cap.of(row.load(target));
    for (int first = 0; first < vocab; first += TILE) {
        float x[GROUPS][4];
        UNROLL for (int g = 0; g < GROUPS; g++)
            read_group(x[g], row, first + (g * THREADS + int(threadIdx.x)) * 4, vocab, whole, cap);
        UNROLL for (int g = 0; g < GROUPS; g++) {
            int c = first + (g * THREADS + int(threadIdx.x)) * 4;
            float largest = fmaxf(fmaxf(x[g][0], x[g][1]), fmaxf(x[g][2], x[g][3]));
            out.beaten = beats(x[g], largest, c, target, out.at_target) || out.beaten;
            if (largest > out.max) {
                out.sum *= fast_exp2((out.max - largest) * LOG2_E);
                out.max = largest;
            }
            UNROLL for (int i = 0; i < 4; i++) out.sum += fast_exp2((x[g][i] - out.max) * LOG2_E);
        }
    }
    float largest = block_max(out.max, scratch_max);
    out.sum = block_sum(out.sum * fast_exp2((out.max - largest) * LOG2_E), scratch_sum);
    out.max = largest;
    out.beaten = block_sum(out.beaten ? 1.0f : 0.0f, scratch_beaten) > 0.0f || out.sum != out.sum;
    return out;
}

// Writes the loss of a row that has a target, and 1 if the target is its first largest logit; zeros
// for other rows.
DEVICE inline void write_score(RowSums sums, int64_t row, bool counted, Out<float> losses, Out<uint32_t> hits) {
    if (threadIdx.x != 0) return;
    losses.store(row, counted ? (sums.max - sums.at_target) + logf(sums.sum) : 0.0f);
    hits.store(row, counted && !sums.beaten ? 1u : 0u);
}

// Returns factor * (softmax - onehot), times the slope of the cap (1 - tanh^2), of four logits.
template <bool CAPPED>
DEVICE inline void gradient_of(float (&x)[4], int c, uint32_t target, RowSums sums, float factor, SoftCap<CAPPED> cap) {
    float inverse_sum = 1.0f / sums.sum;
    UNROLL for (int i = 0; i < 4; i++) {
        float tanh = x[i] * cap.inverse;
        float p = fast_exp2((x[i] - sums.max) * LOG2_E) * inverse_sum;
        x[i] = factor * (uint32_t(c + i) == target ? p - 1.0f : p);
        if (CAPPED) x[i] *= 1.0f - tanh * tanh;
    }
}

template <class T> DEVICE inline void write_group(InOut<float> row, int c, int vocab, bool whole, const float (&d)[4]);

template <>
DEVICE inline void write_group<float>(InOut<float> row, int c, int vocab, bool whole, const float (&d)[4]) {
    if (whole && c + 4 <= vocab) {
        row.store16(c, bytes_of<float>([&](int i) { return d[i]; }));
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (c + i < vocab) row.store(c + i, d[i]);
    }
}

template <>
DEVICE inline void write_group<bf16>(InOut<float> row, int c, int vocab, bool whole, const float (&d)[4]) {
    InOut<bf16> to = row.as<bf16>();
    if (whole && c + 4 <= vocab) {
        to.store8(c, Bytes8{{pack(d[0], d[1]), pack(d[2], d[3])}});
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (c + i < vocab) to.store(c + i, nearest<bf16>(d[i]));
    }
}

template <class T, bool CAPPED>
DEVICE inline void loss_and_gradient(InOut<float> logits, In<uint32_t> targets, In<float> factors, Out<float> losses,
                                     Out<uint32_t> hits, int vocab, int64_t pitch, float factor, SoftCap<CAPPED> cap) {
    int64_t n = blockIdx.x;
    InOut<float> row = logits.offset(n * pitch);
    bool whole = row.is_aligned(16);
    uint32_t target = targets.load(n);
    bool counted = target < uint32_t(vocab);
    RowSums sums = row_sums(row, vocab, target, whole, cap);
    write_score(sums, n, counted, losses, hits);
    if (!factors.is_null()) factor = factors.load(n);
    if (!counted) factor = 0.0f;
    for (int first = 0; first < vocab; first += TILE) {
        float x[GROUPS][4];
        UNROLL for (int g = 0; g < GROUPS; g++)
            read_group(x[g], row, first + (g * THREADS + int(threadIdx.x)) * 4, vocab, whole, cap);
        // bf16 values overwrite logits of this tile and of earlier ones: wait until all threads
        // have read them.
        if (sizeof(T) == 2) sync_block();
        UNROLL for (int g = 0; g < GROUPS; g++) {
            int c = first + (g * THREADS + int(threadIdx.x)) * 4;
            gradient_of(x[g], c, target, sums, factor, cap);
            write_group<T>(row, c, vocab, whole, x[g]);
        }
    }
}

template <bool CAPPED>
DEVICE inline void score(In<float> logits, In<uint32_t> targets, Out<float> losses, Out<uint32_t> hits, int vocab,
                         int64_t pitch, SoftCap<CAPPED> cap) {
    int64_t n = blockIdx.x;
    In<float> row = logits.offset(n * pitch);
    uint32_t target = targets.load(n);
    RowSums sums = row_sums(row, vocab, target, row.is_aligned(16), cap);
    write_score(sums, n, target < uint32_t(vocab), losses, hits);
}

} // namespace

// `logits` has a row of `vocab` f32 values every `pitch`. A row's target is an id, or at least
// `vocab` for a row without target: its gradient and its loss are zero. `factors` has the factor on
// the gradient of each row; if it is null, `factor` is used for all. `cap` is 0 for none. `losses`
// and `hits` get one value per row. One block per row.
#define LOSS \
    InOut<float> logits, In<uint32_t> targets, In<float> factors, Out<float> losses, Out<uint32_t> hits, \
    uint32_t vocab, int64_t pitch, float factor, float cap

// Turns logits into their gradient in bf16: that of row n starts at byte 4 * n * pitch.
KERNEL BOUNDS(512, 4) cross_entropy_bf16(LOSS) {
    if (cap > 0.0f)
        loss_and_gradient<bf16>(logits, targets, factors, losses, hits, int(vocab), pitch, factor,
                                SoftCap<true>(cap));
    else
        loss_and_gradient<bf16>(logits, targets, factors, losses, hits, int(vocab), pitch, factor,
                                SoftCap<false>(cap));
}

// Turns logits into their gradient in f32.
KERNEL BOUNDS(512, 4) cross_entropy_f32(LOSS) {
    if (cap > 0.0f)
        loss_and_gradient<float>(logits, targets, factors, losses, hits, int(vocab), pitch, factor,
                                 SoftCap<true>(cap));
    else
        loss_and_gradient<float>(logits, targets, factors, losses, hits, int(vocab), pitch, factor,
                                SoftCap<false>(cap));
}

// Computes only losses and hits, for evaluation.
KERNEL BOUNDS(512, 4) score_rows(In<float> logits, In<uint32_t> targets, Out<float> losses, Out<uint32_t> hits,
    uint32_t vocab, int64_t pitch, float cap) {
    if (cap > 0.0f)
        score(logits, targets, losses, hits, int(vocab), pitch, SoftCap<true>(cap));
    else
        score(logits, targets, losses, hits, int(vocab), pitch, SoftCap<false>(cap));
}
