// AdamW (arXiv 1711.05101) over all pieces of parameters in one launch, with moments in f32
// (crates/ops/src/ops/adamw.rs) or in 8 bits (crates/ops/src/ops/adamw_int8.rs, arXiv 2110.02861):
// the operations in the same order, so the bits are the CPU's.
//
// A piece is a row of WORDS numbers in device memory: the addresses of its values, gradients and
// moments, its length, and the group of its rates. `first_block` assigns blocks to pieces: piece i
// has blocks first_block[i] to first_block[i + 1], each CHUNK of its values (BLOCKS_OF_STATE blocks
// of 256 with 8 bits). Blocks have 256 threads.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 4096;
constexpr int STATE_BLOCK = 256;
constexpr int BLOCKS_OF_STATE = 64;

// The columns of a piece's row. PARAM is the address of the f32 values and VALUE that of the bf16
// copies; one of them may be 0. GRADIENT addresses f32 gradients, HALF_GRADIENT bf16 ones. MEAN and
// SQUARE address f32 moments, or their codes with one f32 scale for each 256 at MEAN_SCALE and
// SQUARE_SCALE. STREAM and FIRST determine the random bits of the first value.
enum {
    PARAM, GRADIENT, MEAN, SQUARE, VALUE, LENGTH, GROUP, MEAN_SCALE, SQUARE_SCALE, HALF_GRADIENT, STREAM, FIRST, WORDS
};

// The columns of a group's rates: 1 - rate * decay, rate / (1 - beta1^t), sqrt(1 - beta2^t), beta1,
// beta2, eps.
enum { DECAY, STEP, ROOT, BETA1, BETA2, EPS, RATES };

struct Rates {
    float decay, step, root, beta1, beta2, eps, grad_scale;
    // One value's update, in torch's order of operations.
    DEVICE void update(float &p, float &mean, float &square, float gradient) const {
        float g = gradient * grad_scale;
        p *= decay;
        mean += (g - mean) * (1.0f - beta1);
        square = square * beta2 + g * g * (1.0f - beta2);
        p -= step * (mean / (sqrtf(square) / root + eps));
    }
};

// Loads a value, or four from a multiple of four on: from the f32 array, or from the bf16 array if
// the former is null.
template <class W, class H> DEVICE inline float load_of(W wide, H half, int64_t at) {
    return wide.is_null() ? widen(half.load(at)) : wide.load(at);
}
template <class W, class H> DEVICE inline void load4_of(float (&x)[4], W wide, H half, int64_t at) {
    if (wide.is_null())
        load_values<bf16, 4>(x, half, at);
    else
        load_values<float, 4>(x, wide, at);
}

// Parameters: f32 values with or without bf16 copies, or bf16 values only, which are rounded at
// random as in crates/ops/src/ops/stochastic_rounding.rs.
struct Parameter {
    // Null if absent.
    InOut<float> wide;
    InOut<bf16> half;
    // The piece's row, with STREAM and FIRST: reading them late saves registers.
    In<int64_t> row;

    DEVICE bool is_aligned() const { return wide.is_aligned(16) && half.is_aligned(8); }
    DEVICE float load(int64_t at) const { return load_of(wide, half, at); }
    // Loads four values from a multiple of four on.
    DEVICE void load4(float (&x)[4], int64_t at) const {
        load4_of(x, wide, half, at);
    }
    DEVICE void store(int64_t at, float x) const {
        if (!wide.is_null()) {
            wide.store(at, x);
            if (!half.is_null()) half.store(at, nearest<bf16>(x));
            return;
        }
        half.store(at, bf16{uint16_t(rounded(x, noise_of_four(at) >> (16 * (at % 4))))});
    }
    DEVICE void store4(int64_t at, const float (&x)[4]) const {
        if (!wide.is_null()) {
            store_values<float, 4>(wide, at, x);
            if (!half.is_null()) store_values<bf16, 4>(half, at, x);
            return;
        }
        uint64_t noise = noise_of_four(at);
        half.store8(at, Bytes8{{rounded(x[0], noise) | rounded(x[1], noise >> 16) << 16,
                                rounded(x[2], noise >> 32) | rounded(x[3], noise >> 48) << 16}});
    }
    // Returns the random bits of the group of four values that contains value `at`, 16 bits each;
    // FIRST is a multiple of four.
    DEVICE uint64_t noise_of_four(int64_t at) const {
        return random_bits(uint64_t(row.load(STREAM)), (uint64_t(row.load(FIRST)) + uint64_t(at)) / 4);
    }
    // Returns the bits of x rounded to bf16 with the low 16 bits of `noise`.
    DEVICE static uint32_t rounded(float x, uint64_t noise) {
        uint32_t bits = float_to_bits(x);
        if ((bits & 0x7f800000u) == 0x7f800000u) return nearest<bf16>(x).bits;
        return (bits + uint32_t(noise & 0xffffu)) >> 16;
    }
};

// Gradients: f32 or bf16 values; the other pointer is null.
struct Gradient {
    In<float> wide;
    In<bf16> half;
    DEVICE bool is_aligned() const { return wide.is_aligned(16) && half.is_aligned(8); }
    DEVICE float load(int64_t at) const { return load_of(wide, half, at); }
    DEVICE void load4(float (&x)[4], int64_t at) const {
        load4_of(x, wide, half, at);
    }
};

struct Piece {
    In<int64_t> row;
    int64_t length;
    DEVICE uint64_t address(int column) const { return uint64_t(row.load(column)); }
    DEVICE InOut<float> floats(int column) const { return in_out_at<float>(address(column), length); }
    DEVICE Parameter parameter() const {
        return Parameter{floats(PARAM), in_out_at<bf16>(address(VALUE), length), row};
    }
    DEVICE Gradient gradient() const {
        return Gradient{in_at<float>(address(GRADIENT), length), in_at<bf16>(address(HALF_GRADIENT), length)};
    }
    DEVICE InOut<uint8_t> codes(int column) const { return in_out_at<uint8_t>(address(column), length); }
    DEVICE InOut<float> scales(int column) const {
        return in_out_at<float>(address(column), (length + STATE_BLOCK - 1) / STATE_BLOCK);
    }
    DEVICE Rates rates(In<float> table, float grad_scale) const {
        In<float> r = table.offset(row.load(GROUP) * RATES);
        return Rates{r.load(DECAY), r.load(STEP), r.load(ROOT), r.load(BETA1), r.load(BETA2), r.load(EPS), grad_scale};
    }
};

// Returns the piece of this block, and in `chunk` the number of the block within the piece.
DEVICE inline Piece piece_of_block(In<int64_t> pieces, In<uint32_t> first_block, int count, int64_t &chunk) {
    SHARED(uint32_t, found, 1);
    for (int i = int(threadIdx.x); i < count; i += THREADS)
        if (first_block.load(i) <= blockIdx.x && blockIdx.x < first_block.load(i + 1)) found.store(0, uint32_t(i));
    sync_block();
    int64_t i = found.load(0);
    chunk = int64_t(blockIdx.x) - first_block.load(i);
    In<int64_t> row = pieces.offset(i * WORDS);
    return Piece{row, row.load(LENGTH)};
}

// Updates four values of a piece from value `at` on.
DEVICE inline void four_values(Parameter param, Gradient gradient, InOut<float> mean, InOut<float> square, int64_t at,
                               const Rates &rates) {
    float p[4], g[4], m[4], v[4];
    param.load4(p, at);
    gradient.load4(g, at);
    load_values<float, 4>(m, mean, at);
    load_values<float, 4>(v, square, at);
    UNROLL for (int i = 0; i < 4; i++) rates.update(p[i], m[i], v[i], g[i]);
    param.store4(at, p);
    store_values<float, 4>(mean, at, m);
    store_values<float, 4>(square, at, v);
}

DEVICE inline void one_value(Parameter param, Gradient gradient, InOut<float> mean, InOut<float> square, int64_t at,
                             const Rates &rates) {
    float p = param.load(at), m = mean.load(at), v = square.load(at);
    rates.update(p, m, v, gradient.load(at));
    param.store(at, p);
    mean.store(at, m);
    square.store(at, v);
}

// A dynamic map with its index for the nearest code (DynamicMap of
// crates/runtime/src/quant/codes.rs), in shared memory.
struct DynamicMap {
    // 256 values, then 256 limits.
    Shared<float> map;
    // One byte per prefix of a magnitude's bits, four in a word: first for non-negative numbers,
    // then for negative ones.
    Shared<uint32_t> starts;
    static constexpr uint32_t LEAST = (127 - 22) << 7;
    static constexpr uint32_t BUCKETS = (22 << 7) + 1;
    static constexpr int WORDS_OF_STARTS = (2 * int(BUCKETS) + 3) / 4;

    DEVICE float value(uint32_t code) const { return map.load(int(code)); }
    // Returns the code nearest to x; ties go to the even code.
    DEVICE uint32_t nearest_code(float x) const {
        uint32_t bits = float_to_bits(x), leading = (bits & 0x7fffffffu) >> 16;
        uint32_t bucket = leading > LEAST ? leading - LEAST : 0;
        bucket = (bucket < BUCKETS - 1 ? bucket : BUCKETS - 1) + (bits >> 31 ? BUCKETS : 0);
        uint32_t start = (starts.load(int(bucket / 4)) >> (8 * (bucket % 4))) & 255u;
        return start + (x > map.load(int(256 + start)) ? 1u : 0u);
    }
    DEVICE void fill(In<float> from, In<uint8_t> from_starts) const {
        for (int i = int(threadIdx.x); i < 512; i += THREADS) map.store(i, from.load(i));
        for (int i = int(threadIdx.x); i < WORDS_OF_STARTS; i += THREADS) starts.store(i, from_starts.load4(4 * i));
    }
};

// One moment of a block of 256 values over a warp: lane l holds values 128 k + 4 l + i.
struct Moment {
    InOut<uint8_t> codes;
    InOut<float> scales;
    DEVICE void widen(float (&x)[2][4], int64_t at, int there, bool whole, const DynamicMap &map) const {
        float scale = scales.load(at / STATE_BLOCK);
        UNROLL for (int k = 0; k < 2; k++) {
            int place = 128 * k + 4 * int(threadIdx.x % 32);
            uint32_t packed = 0;
            if (whole) packed = codes.load4(at + place);
            UNROLL for (int i = 0; i < 4; i++) {
                if (!whole && place + i < there) packed |= uint32_t(codes.load(at + place + i)) << (8 * i);
                x[k][i] = map.value((packed >> (8 * i)) & 255u) * scale;
            }
        }
    }
    // Converts the values back to codes and a scale. Magnitudes are compared by their bits, so that
    // NaN is the largest.
    DEVICE void quantize(const float (&x)[2][4], int64_t at, int there, bool whole, const DynamicMap &map) const {
        uint32_t largest = 0;
        UNROLL for (int k = 0; k < 2; k++)
            UNROLL for (int i = 0; i < 4; i++) {
                uint32_t magnitude = float_to_bits(x[k][i]) & 0x7fffffffu;
                bool counts = 128 * k + 4 * int(threadIdx.x % 32) + i < there;
                largest = counts && magnitude > largest ? magnitude : largest;
            }
        for (int distance = 16; distance > 0; distance /= 2) {
            uint32_t other = shuffle_xor(largest, distance);
            largest = other > largest ? other : largest;
        }
        float scale = bits_to_float(largest), unit = scale > 0.0f ? scale : 1.0f;
        UNROLL for (int k = 0; k < 2; k++) {
            int place = 128 * k + 4 * int(threadIdx.x % 32);
            uint32_t packed = 0;
            UNROLL for (int i = 0; i < 4; i++) {
                uint32_t code = map.nearest_code(x[k][i] / unit);
                packed |= code << (8 * i);
                if (!whole && place + i < there) codes.store(at + place + i, uint8_t(code));
            }
            if (whole) codes.store4(at + place, packed);
        }
        if (threadIdx.x % 32 == 0) scales.store(at / STATE_BLOCK, scale);
    }
};

// Updates four values, from `place` in the block of state that begins at `at` and has `there`
// values.
template <class M>
DEVICE inline void read_four(float (&x)[4], M from, int64_t at, int place, int there, bool whole) {
    if (whole) {
        from.load4(x, at + place);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++) x[i] = place + i < there ? from.load(at + place + i) : 0.0f;
}

DEVICE inline void write_four(const float (&x)[4], Parameter param, int64_t at, int place, int there, bool whole) {
    if (whole) {
        param.store4(at + place, x);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++)
        if (place + i < there) param.store(at + place + i, x[i]);
}

} // namespace

// Updates with moments in f32. `pieces` has `count` rows, `rates` a row per group. `grad_scale` is
// the factor on gradients (clipping); if it is NaN nothing is updated.
KERNEL BOUNDS(256, 4) adamw_f32(In<int64_t> pieces, In<uint32_t> first_block, uint32_t count, In<float> rates,
    In<float> grad_scale) {
    float scale = grad_scale.load(0);
    if (scale != scale) return;
    int64_t chunk;
    Piece piece = piece_of_block(pieces, first_block, int(count), chunk);
    Rates constants = piece.rates(rates, scale);
    Parameter param = piece.parameter();
    Gradient gradient = piece.gradient();
    InOut<float> mean = piece.floats(MEAN), square = piece.floats(SQUARE);
    bool whole = param.is_aligned() && gradient.is_aligned() && mean.is_aligned(16) && square.is_aligned(16);
    int64_t first = chunk * CHUNK, end = first + CHUNK < piece.length ? first + CHUNK : piece.length;
    int64_t fours = whole ? first + (end - first) / 4 * 4 : first;
    for (int64_t at = first + 4 * int(threadIdx.x); at < fours; at += 4 * THREADS)
        four_values(param, gradient, mean, square, at, constants);
    for (int64_t at = fours + int(threadIdx.x); at < end; at += THREADS)
        one_value(param, gradient, mean, square, at, constants);
}

// Updates with moments in 8 bits, otherwise like adamw_f32. A block processes 64 blocks of state,
// each warp one at a time. A map has 256 values, then 256 limits; `starts` has its index's bytes,
// padded to a multiple of 4.
KERNEL BOUNDS(256, 3) adamw_int8(In<int64_t> pieces, In<uint32_t> first_block, uint32_t count, In<float> rates,
    In<float> grad_scale, In<float> signed_map, In<uint8_t> signed_starts, In<float> unsigned_map,
    In<uint8_t> unsigned_starts) {
    SHARED(float, mean_map, 512);
    SHARED(uint32_t, mean_starts, DynamicMap::WORDS_OF_STARTS);
    SHARED(float, square_map, 512);
    SHARED(uint32_t, square_starts, DynamicMap::WORDS_OF_STARTS);
    float scale = grad_scale.load(0);
    if (scale != scale) return;
    DynamicMap of_mean{mean_map, mean_starts}, of_square{square_map, square_starts};
    of_mean.fill(signed_map, signed_starts);
    of_square.fill(unsigned_map, unsigned_starts);
    int64_t chunk;
    Piece piece = piece_of_block(pieces, first_block, int(count), chunk);
    Rates constants = piece.rates(rates, scale);
    Parameter param = piece.parameter();
    Gradient gradient = piece.gradient();
    Moment mean{piece.codes(MEAN), piece.scales(MEAN_SCALE)}, square{piece.codes(SQUARE), piece.scales(SQUARE_SCALE)};
    bool aligned = param.is_aligned() && gradient.is_aligned() && mean.codes.is_aligned(4) && square.codes.is_aligned(4);
    for (int s = int(threadIdx.x) / 32; s < BLOCKS_OF_STATE; s += THREADS / 32) {
        int64_t at = (chunk * BLOCKS_OF_STATE + s) * STATE_BLOCK;
        if (at >= piece.length) break;
        int there = int(piece.length - at < STATE_BLOCK ? piece.length - at : STATE_BLOCK);
        bool whole = aligned && there == STATE_BLOCK;
        float m[2][4], v[2][4];
        mean.widen(m, at, there, whole, of_mean);
        square.widen(v, at, there, whole, of_square);
        // Half of the block at a time, since all of it would not fit the registers.
        UNROLL for (int k = 0; k < 2; k++) {
            int place = 128 * k + 4 * int(threadIdx.x % 32);
            float p[4], g[4];
            read_four(p, param, at, place, there, whole);
            read_four(g, gradient, at, place, there, whole);
            UNROLL for (int i = 0; i < 4; i++) constants.update(p[i], m[k][i], v[k][i], g[i]);
            write_four(p, param, at, place, there, whole);
        }
        mean.quantize(m, at, there, whole, of_mean);
        square.quantize(v, at, there, whole, of_square);
    }
}
