// A mixture of experts around its products: the router's choice of experts for each token and its
// gradient, the weights of the experts' rows, and the sums of each token's rows.
// crates/ops/src/ops/experts holds the definitions.
#include "compat.cuh"

namespace {

// Experts per lane, so 1024 in all. At most 32 are chosen, one for each lane.
constexpr int PER_LANE = 32;
constexpr int THREADS = 256;
constexpr uint32_t NONE = 0xffffffffu;

// The logits of one token: lane l has those of the experts l, l + 32, ...
struct Logits {
    float values[PER_LANE];
    // Bit i: expert 32 i + lane exists and is not chosen yet.
    uint32_t left;
    // True if one of this lane's logits is NaN. It counts as the smallest number, so that all lanes
    // agree about the best.
    bool has_nan;
};

template <class T> DEVICE inline Logits load_logits(In<T> logits, int64_t token, uint32_t experts) {
    Logits x;
    x.left = 0;
    x.has_nan = false;
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        uint32_t expert = uint32_t(32 * i) + threadIdx.x % 32;
        bool there = expert < experts;
        float value = there ? widen(logits.load(token * experts + expert)) : 0.0f;
        bool is_nan = value != value;
        x.values[i] = is_nan ? bits_to_float(0xff800000u) : value;
        x.has_nan = x.has_nan || is_nan;
        if (there) x.left |= 1u << i;
    }
    return x;
}

// An expert and its logit.
struct Best {
    float value;
    uint32_t expert;
};

// Returns the largest logit that is left, of equal ones that of the first expert, in every lane.
DEVICE inline Best best_left(const Logits &x) {
    Best best{0.0f, NONE};
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        bool is_left = ((x.left >> i) & 1) != 0;
        if (is_left && (best.expert == NONE || x.values[i] > best.value))
            best = Best{x.values[i], uint32_t(32 * i) + threadIdx.x % 32};
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        Best other{shuffle_xor(best.value, distance), shuffle_xor(best.expert, distance)};
        bool larger = other.value > best.value || (other.value == best.value && other.expert < best.expert);
        if (other.expert != NONE && (best.expert == NONE || larger)) best = other;
    }
    return best;
}

// Returns the sum of exp(logit - max) over all experts that are left, in every lane.
DEVICE inline float sum_of_left(const Logits &x, float max) {
    float sum = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; i++) if (((x.left >> i) & 1) != 0) sum += expf(x.values[i] - max);
    return warp_sum(sum);
}

// Bits of a router's flags.
constexpr uint32_t RENORMALIZE = 1, SIGMOID = 2;

DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Keeps only the experts of the `chosen` best of `groups` groups, by the sum of their two best
// values.
DEVICE inline void keep_groups(Logits &x, uint32_t experts, uint32_t groups, uint32_t chosen) {
    uint32_t lane = threadIdx.x % 32, size = experts / groups, all = x.left;
    // Lane g has the value of group g.
    float mine = 0.0f;
    KEEP_LOOP for (uint32_t g = 0; g < groups; g++) {
        x.left = 0;
        UNROLL for (int i = 0; i < PER_LANE; i++)
            if (((all >> i) & 1) != 0 && (uint32_t(32 * i) + lane) / size == g) x.left |= 1u << i;
        float sum = 0.0f;
        KEEP_LOOP for (uint32_t j = 0; j < 2 && j < size; j++) {
            Best best = best_left(x);
            if (best.expert % 32 == lane) x.left &= ~(1u << best.expert / 32);
            sum += best.value;
        }
        if (g == lane) mine = sum;
    }
    // Bit g: group g is chosen.
    uint32_t kept = 0;
    KEEP_LOOP for (uint32_t j = 0; j < chosen; j++) {
        bool is_left = lane < groups && ((kept >> lane) & 1) == 0;
        Best best{is_left ? mine : 0.0f, is_left ? lane : NONE};
        for (int distance = 16; distance > 0; distance /= 2) {
            Best other{shuffle_xor(best.value, distance), shuffle_xor(best.expert, distance)};
            bool larger = other.value > best.value || (other.value == best.value && other.expert < best.expert);
            if (other.expert != NONE && (best.expert == NONE || larger)) best = other;
        }
        if (best.expert != NONE) kept |= 1u << best.expert;
    }
    x.left = 0;
    UNROLL for (int i = 0; i < PER_LANE; i++)
        if (((all >> i) & 1) != 0 && ((kept >> (uint32_t(32 * i) + lane) / size) & 1) != 0) x.left |= 1u << i;
}

// Chooses by scores with a bias or in groups, or by sigmoids.
template <class T>
DEVICE inline void choose_scores(In<T> logits, In<float> bias, Out<uint32_t> ids, Out<float> weights, int64_t token,
                                 uint32_t experts, uint32_t chosen, uint32_t flags, uint32_t groups,
                                 uint32_t of_token, float factor, float sum_offset) {
    uint32_t lane = threadIdx.x % 32;
    Logits x = load_logits(logits, token, experts);
    bool is_sigmoid = (flags & SIGMOID) != 0;
    float max = is_sigmoid ? 0.0f : best_left(x).value;
    float all = is_sigmoid ? 1.0f : sum_of_left(x, max);
    // Without bias and groups by logits, whose order scores keep: they have fewer ties.
    bool by_logit = bias.is_null() && groups == 0;
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        if (by_logit || ((x.left >> i) & 1) == 0) continue;
        float score = is_sigmoid ? sigmoid(x.values[i]) : expf(x.values[i] - max) / all;
        x.values[i] = score + (bias.is_null() ? 0.0f : bias.load(32 * i + lane));
    }
    if (groups != 0) keep_groups(x, experts, groups, of_token);
    uint32_t mine = 0;
    KEEP_LOOP for (uint32_t j = 0; j < chosen; j++) {
        Best best = best_left(x);
        if (best.expert % 32 == lane) x.left &= ~(1u << best.expert / 32);
        if (j == lane) mine = best.expert;
    }
    float weight = 0.0f;
    if (lane < chosen) {
        float logit = widen(logits.load(token * experts + mine));
        weight = is_sigmoid ? sigmoid(logit) : expf(logit - max) / all;
    }
    float sum = (flags & RENORMALIZE) != 0 ? warp_sum(weight) + sum_offset : 1.0f;
    if (warp_max(x.has_nan ? 1.0f : 0.0f) > 0.0f) sum = bits_to_float(0x7fc00000u);
    if (lane < chosen) {
        ids.store(token * chosen + lane, mine);
        weights.store(token * chosen + lane, weight / sum * factor);
    }
}

template <class T>
DEVICE inline void choose(In<T> logits, In<float> bias, Out<uint32_t> ids, Out<float> weights, uint32_t tokens,
                          uint32_t experts, uint32_t chosen, uint32_t flags, uint32_t groups, uint32_t of_token,
                          float factor, float sum_offset) {
    int64_t token = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    uint32_t lane = threadIdx.x % 32;
    if (!bias.is_null() || groups != 0 || (flags & SIGMOID) != 0) {
        choose_scores(logits, bias, ids, weights, token, experts, chosen, flags, groups, of_token, factor, sum_offset);
        return;
    }
    bool renormalize = (flags & RENORMALIZE) != 0;
    Logits x = load_logits(logits, token, experts);
    Best mine{0.0f, 0};
    float max = 0.0f;
    KEEP_LOOP for (uint32_t j = 0; j < chosen; j++) {
        Best best = best_left(x);
        if (best.expert % 32 == lane) x.left &= ~(1u << best.expert / 32);
        if (j == lane) mine = best;
        if (j == 0) max = best.value;
    }
    float weight = lane < chosen ? expf(mine.value - max) : 0.0f;
    float sum = warp_sum(weight);
    if (!renormalize) sum += sum_of_left(x, max);
    // A NaN anywhere makes NaNs of the weights, so that the loss shows it.
    if (warp_max(x.has_nan ? 1.0f : 0.0f) > 0.0f) sum = bits_to_float(0x7fc00000u);
    if (lane < chosen) {
        ids.store(token * chosen + lane, mine.expert);
        weights.store(token * chosen + lane, weight / sum * factor);
    }
}

template <class T>
DEVICE inline void choose_backward(In<T> logits, In<uint32_t> ids, In<float> weights, In<float> dweights, Out<T> d,
                                   uint32_t tokens, uint32_t experts, uint32_t chosen, uint32_t flags, float factor) {
    bool renormalize = (flags & RENORMALIZE) != 0, is_sigmoid = (flags & SIGMOID) != 0;
    int64_t token = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    uint32_t lane = threadIdx.x % 32;
    bool has_one = lane < chosen;
    uint32_t id = has_one ? ids.load(token * chosen + lane) : NONE;
    float w = has_one ? weights.load(token * chosen + lane) : 0.0f;
    float dw = has_one ? dweights.load(token * chosen + lane) : 0.0f;
    float dot = warp_sum(w * dw);
    Logits x = load_logits(logits, token, experts);
    float everywhere = 0.0f, max = 0.0f;
    bool only_chosen = renormalize || is_sigmoid;
    if (!only_chosen) {
        max = best_left(x).value;
        everywhere = -dot / sum_of_left(x, max);
    }
    float added = w * (dw - (renormalize ? dot / factor : 0.0f));
    if (is_sigmoid && has_one) added *= sigmoid(-widen(logits.load(token * experts + id)));
    UNROLL for (int i = 0; i < PER_LANE; i++)
        x.values[i] = only_chosen ? 0.0f : expf(x.values[i] - max) * everywhere;
    KEEP_LOOP for (uint32_t j = 0; j < chosen; j++) {
        uint32_t expert = shuffle(id, int(j));
        float more = shuffle(added, int(j));
        UNROLL for (int i = 0; i < PER_LANE; i++)
            if (expert == uint32_t(32 * i) + lane) x.values[i] += more;
    }
    UNROLL for (int i = 0; i < PER_LANE; i++)
        if (((x.left >> i) & 1) != 0) d.store(token * experts + 32 * i + lane, nearest<T>(x.values[i]));
}

// Writes the token's sum of p * pull for p = softmax(logits), and adds its gradient to d.
template <class T>
DEVICE inline void balance(In<T> logits, In<float> pull, InOut<T> d, Out<float> values, uint32_t tokens,
                           uint32_t experts) {
    int64_t token = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    uint32_t lane = threadIdx.x % 32;
    Logits x = load_logits(logits, token, experts);
    float max = best_left(x).value, sum = sum_of_left(x, max), value = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        if (((x.left >> i) & 1) == 0) continue;
        x.values[i] = expf(x.values[i] - max) / sum;
        value += x.values[i] * pull.load(32 * i + lane);
    }
    value = warp_sum(value);
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        if (((x.left >> i) & 1) == 0) continue;
        int64_t at = token * experts + 32 * i + lane;
        d.store(at, nearest<T>(widen(d.load(at)) + x.values[i] * (pull.load(32 * i + lane) - value)));
    }
    if (lane == 0) values.store(token, value);
}

template <class T>
DEVICE inline void scale(In<T> x, In<float> weights, In<uint32_t> copies, Out<T> y, int width) {
    float weight = weights.load(copies.load(blockIdx.x));
    In<T> from = x.offset(int64_t(blockIdx.x) * width);
    Out<T> to = y.offset(int64_t(blockIdx.x) * width);
    over_columns<THREADS, T>(
        width, from.is_aligned(16) && to.is_aligned(16),
        [&](int c) {
            float values[PER16<T>];
            load_values<T, PER16<T>>(values, from, c);
            UNROLL for (int i = 0; i < PER16<T>; i++) values[i] *= weight;
            store_values<T, PER16<T>>(to, c, values);
        },
        [&](int c) { to.store(c, nearest<T>(widen(from.load(c)) * weight)); });
}

template <class T>
DEVICE inline void scale_backward(InOut<T> x, InOut<T> dy, In<float> weights, In<uint32_t> copies, Out<float> dweights,
                                  int width) {
    SHARED(float, scratch, 32);
    uint32_t copy = copies.load(blockIdx.x);
    float weight = weights.load(copy), sum = 0.0f;
    InOut<T> row = x.offset(int64_t(blockIdx.x) * width), d = dy.offset(int64_t(blockIdx.x) * width);
    over_columns<THREADS, T>(
        width, row.is_aligned(16) && d.is_aligned(16),
        [&](int c) {
            float a[PER16<T>], b[PER16<T>];
            load_values<T, PER16<T>>(a, row, c);
            load_values<T, PER16<T>>(b, d, c);
            UNROLL for (int i = 0; i < PER16<T>; i++) {
                sum = fmaf(a[i], b[i], sum);
                a[i] *= weight;
                b[i] *= weight;
            }
            store_values<T, PER16<T>>(row, c, a);
            store_values<T, PER16<T>>(d, c, b);
        },
        [&](int c) {
            float a = widen(row.load(c)), b = widen(d.load(c));
            sum = fmaf(a, b, sum);
            row.store(c, nearest<T>(a * weight));
            d.store(c, nearest<T>(b * weight));
        });
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dweights.store(copy, sum);
}

template <class T>
DEVICE inline void combine(In<T> x, In<uint32_t> places, In<T> added, Out<T> y, int width, uint32_t chosen) {
    In<uint32_t> mine = places.offset(int64_t(blockIdx.x) * chosen);
    int64_t row = int64_t(blockIdx.x) * width;
    over_columns<THREADS, T>(
        width, width % PER16<T> == 0 && x.is_aligned(16) && y.is_aligned(16) && added.is_aligned(16),
        [&](int c) {
            float sum[PER16<T>] = {}, values[PER16<T>];
            for (uint32_t j = 0; j < chosen; j++) {
                load_values<T, PER16<T>>(values, x, int64_t(mine.load(j)) * width + c);
                UNROLL for (int i = 0; i < PER16<T>; i++) sum[i] += values[i];
            }
            if (!added.is_null()) {
                load_values<T, PER16<T>>(values, added, row + c);
                UNROLL for (int i = 0; i < PER16<T>; i++) sum[i] += values[i];
            }
            store_values<T, PER16<T>>(y, row + c, sum);
        },
        [&](int c) {
            float sum = 0.0f;
            for (uint32_t j = 0; j < chosen; j++) sum += widen(x.load(int64_t(mine.load(j)) * width + c));
            if (!added.is_null()) sum += widen(added.load(row + c));
            y.store(row + c, nearest<T>(sum));
        });
}

} // namespace

#define CHOOSE_BF16                                                                                                    \
    In<bf16> logits, In<float> bias, Out<uint32_t> ids, Out<float> weights, uint32_t tokens, uint32_t experts,        \
        uint32_t chosen, uint32_t flags, uint32_t groups, uint32_t of_token, float factor, float sum_offset
#define CHOOSE_F32                                                                                                     \
    In<float> logits, In<float> bias, Out<uint32_t> ids, Out<float> weights, uint32_t tokens, uint32_t experts,       \
        uint32_t chosen, uint32_t flags, uint32_t groups, uint32_t of_token, float factor, float sum_offset
#define CHOICE_BF16                                                                                                    \
    In<bf16> logits, In<uint32_t> ids, In<float> weights, In<float> dweights, Out<bf16> d, uint32_t tokens,           \
        uint32_t experts, uint32_t chosen, uint32_t flags, float factor
#define CHOICE_F32                                                                                                     \
    In<float> logits, In<uint32_t> ids, In<float> weights, In<float> dweights, Out<float> d, uint32_t tokens,         \
        uint32_t experts, uint32_t chosen, uint32_t flags, float factor

// ids, weights: `[tokens, chosen]` from logits: `[tokens, experts]`, and perhaps a bias:
// `[experts]` on the scores for the choice. A warp a token, 8 a block.
KERNEL BOUNDS(256, 2) choose_experts_bf16(CHOOSE_BF16) {
    choose(logits, bias, ids, weights, tokens, experts, chosen, flags, groups, of_token, factor, sum_offset);
}
// Like choose_experts_bf16.
KERNEL BOUNDS(256, 2) choose_experts_f32(CHOOSE_F32) {
    choose(logits, bias, ids, weights, tokens, experts, chosen, flags, groups, of_token, factor, sum_offset);
}
// d: `[tokens, experts]`, the gradient of the logits from dweights: `[tokens, chosen]`. A warp a
// token, 8 a block.
KERNEL BOUNDS(256, 2) choose_experts_backward_bf16(CHOICE_BF16) {
    choose_backward(logits, ids, weights, dweights, d, tokens, experts, chosen, flags, factor);
}
// Like choose_experts_backward_bf16.
KERNEL BOUNDS(256, 2) choose_experts_backward_f32(CHOICE_F32) {
    choose_backward(logits, ids, weights, dweights, d, tokens, experts, chosen, flags, factor);
}

// values: `[tokens]`, the sums of softmax(logits) * pull; their gradients are added to d:
// `[tokens, experts]`. A warp a token, 8 a block.
KERNEL BOUNDS(256, 3) balance_experts_bf16(In<bf16> logits, In<float> pull, InOut<bf16> d, Out<float> values,
    uint32_t tokens, uint32_t experts) {
    balance(logits, pull, d, values, tokens, experts);
}
// Like balance_experts_bf16.
KERNEL BOUNDS(256, 3) balance_experts_f32(In<float> logits, In<float> pull, InOut<float> d, Out<float> values,
    uint32_t tokens, uint32_t experts) {
    balance(logits, pull, d, values, tokens, experts);
}

// `y[r] = x[r] * weights[copies[r]]`; x, y: `[R, width]`. One block a row.
KERNEL BOUNDS(256, 6) scale_rows_bf16(In<bf16> x, In<float> weights, In<uint32_t> copies, Out<bf16> y, uint32_t width) {
    scale(x, weights, copies, y, int(width));
}
// Like scale_rows_bf16.
KERNEL BOUNDS(256, 6) scale_rows_f32(In<float> x, In<float> weights, In<uint32_t> copies, Out<float> y, uint32_t width) {
    scale(x, weights, copies, y, int(width));
}
// `dweights[copies[r]] = x[r] dy[r]`; then x and dy, `[R, width]`, are multiplied by the weights of
// their rows. One block a row.
KERNEL BOUNDS(256, 6) scale_rows_backward_bf16(InOut<bf16> x, InOut<bf16> dy, In<float> weights, In<uint32_t> copies,
    Out<float> dweights, uint32_t width) {
    scale_backward(x, dy, weights, copies, dweights, int(width));
}
// Like scale_rows_backward_bf16.
KERNEL BOUNDS(256, 6) scale_rows_backward_f32(InOut<float> x, InOut<float> dy, In<float> weights, In<uint32_t> copies,
    Out<float> dweights, uint32_t width) {
    scale_backward(x, dy, weights, copies, dweights, int(width));
}
// `y[n] = added[n]` (or 0) plus the sum of `x[places[n, j]]` over the `chosen` j; y: `[N, width]`.
// One block a token.
KERNEL BOUNDS(256, 6) combine_rows_bf16(In<bf16> x, In<uint32_t> places, In<bf16> added, Out<bf16> y, uint32_t width,
    uint32_t chosen) {
    combine(x, places, added, y, int(width), chosen);
}
// Like combine_rows_bf16.
KERNEL BOUNDS(256, 6) combine_rows_f32(In<float> x, In<uint32_t> places, In<float> added, Out<float> y, uint32_t width,
    uint32_t chosen) {
    combine(x, places, added, y, int(width), chosen);
}
