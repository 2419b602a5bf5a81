// AdamW (arXiv 1711.05101) over all pieces of parameters in one launch, with moments in f32 (src/ops/adamw.rs) or in 8
// bits (src/ops/adamw_int8.rs, arXiv 2110.02861): the operations in the same order, so the bits are the CPU's.
//
// A piece is a row of WORDS numbers in device memory: addresses of its values, gradient and moments, its length, the
// group whose rates it takes. Blocks are dealt out to pieces by `first_block`: piece i has blocks first_block[i] to
// first_block[i + 1], each CHUNK of its values (BLOCKS_OF_STATE blocks of 256 with 8 bits). Blocks have 256 threads.
#include "compat.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 4096;
constexpr int STATE_BLOCK = 256;
constexpr int BLOCKS_OF_STATE = 64;

// The columns of a piece's row. VALUE is the address of the bf16 value kept beside the f32 one, or 0; MEAN and SQUARE
// are of f32 moments, or of their codes with one f32 scale for each 256 at MEAN_SCALE and SQUARE_SCALE.
enum { PARAM, GRADIENT, MEAN, SQUARE, VALUE, LENGTH, GROUP, MEAN_SCALE, SQUARE_SCALE, WORDS };

// The columns of a group's rates: 1 - rate * decay, rate / (1 - beta1^t), sqrt(1 - beta2^t), beta1, beta2, eps.
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

struct Piece {
    In<int64_t> row;
    int64_t length;
    DEVICE uint64_t address(int column) const { return uint64_t(row.load(column)); }
    DEVICE InOut<float> floats(int column) const { return in_out_at<float>(address(column), length); }
    DEVICE In<float> gradient() const { return in_at<float>(address(GRADIENT), length); }
    DEVICE InOut<bf16> value() const { return in_out_at<bf16>(address(VALUE), length); }
    DEVICE InOut<uint8_t> codes(int column) const { return in_out_at<uint8_t>(address(column), length); }
    DEVICE InOut<float> scales(int column) const {
        return in_out_at<float>(address(column), (length + STATE_BLOCK - 1) / STATE_BLOCK);
    }
    DEVICE Rates rates(In<float> table, float grad_scale) const {
        In<float> r = table.offset(row.load(GROUP) * RATES);
        return Rates{r.load(DECAY), r.load(STEP), r.load(ROOT), r.load(BETA1), r.load(BETA2), r.load(EPS), grad_scale};
    }
};

// The piece of this block, and the number of the block among those of the piece.
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

// Four values of a piece from value `at` on.
DEVICE inline void four_values(InOut<float> param, In<float> gradient, InOut<float> mean, InOut<float> square,
                               InOut<bf16> value, int64_t at, const Rates &rates) {
    Bytes16 p = param.load16(at), g = gradient.load16(at), m = mean.load16(at), v = square.load16(at);
    float x[4], y[4], z[4];
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = value_of<float>(p, i);
        y[i] = value_of<float>(m, i);
        z[i] = value_of<float>(v, i);
        rates.update(x[i], y[i], z[i], value_of<float>(g, i));
    }
    param.store16(at, bytes_of<float>([&](int i) { return x[i]; }));
    mean.store16(at, bytes_of<float>([&](int i) { return y[i]; }));
    square.store16(at, bytes_of<float>([&](int i) { return z[i]; }));
    if (!value.is_null()) value.store8(at, Bytes8{{pack(x[0], x[1]), pack(x[2], x[3])}});
}

DEVICE inline void one_value(InOut<float> param, In<float> gradient, InOut<float> mean, InOut<float> square,
                             InOut<bf16> value, int64_t at, const Rates &rates) {
    float x = param.load(at), y = mean.load(at), z = square.load(at);
    rates.update(x, y, z, gradient.load(at));
    param.store(at, x);
    mean.store(at, y);
    square.store(at, z);
    if (!value.is_null()) value.store(at, nearest<bf16>(x));
}

// A dynamic map with the index that finds nearest codes (DynamicMap of src/quant/codes.rs), in shared memory.
struct DynamicMap {
    // 256 values, then 256 limits.
    Shared<float> map;
    // One byte for each leading bits of a magnitude, four in a word; first of numbers that are not negative.
    Shared<uint32_t> starts;
    static constexpr uint32_t LEAST = (127 - 22) << 7;
    static constexpr uint32_t BUCKETS = (22 << 7) + 1;
    static constexpr int WORDS_OF_STARTS = (2 * int(BUCKETS) + 3) / 4;

    DEVICE float value(uint32_t code) const { return map.load(int(code)); }
    // The code nearest to x; halfway between two, the even one.
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
    // Codes and scale again. Magnitudes are compared by their bits, so that one that is no number is the largest.
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

template <class M> DEVICE inline void read_values(float (&x)[2][4], M from, int64_t at, int there, bool whole) {
    UNROLL for (int k = 0; k < 2; k++) {
        int place = 128 * k + 4 * int(threadIdx.x % 32);
        Bytes16 bytes{};
        if (whole) bytes = from.load16(at + place);
        UNROLL for (int i = 0; i < 4; i++)
            x[k][i] = whole ? value_of<float>(bytes, i) : place + i < there ? from.load(at + place + i) : 0.0f;
    }
}

DEVICE inline void write_values(const float (&x)[2][4], InOut<float> param, InOut<bf16> value, int64_t at, int there,
                                bool whole) {
    UNROLL for (int k = 0; k < 2; k++) {
        int place = 128 * k + 4 * int(threadIdx.x % 32);
        if (whole) {
            param.store16(at + place, bytes_of<float>([&](int i) { return x[k][i]; }));
            if (!value.is_null())
                value.store8(at + place, Bytes8{{pack(x[k][0], x[k][1]), pack(x[k][2], x[k][3])}});
            continue;
        }
        UNROLL for (int i = 0; i < 4; i++) {
            if (place + i >= there) continue;
            param.store(at + place + i, x[k][i]);
            if (!value.is_null()) value.store(at + place + i, nearest<bf16>(x[k][i]));
        }
    }
}

} // namespace

// Moments in f32. `pieces` has `count` rows; `rates` a row for each group; `grad_scale` is the factor on gradients
// (clipping), and where it is no number nothing is updated.
KERNEL BOUNDS(256, 4) adamw_f32(In<int64_t> pieces, In<uint32_t> first_block, uint32_t count, In<float> rates,
    In<float> grad_scale) {
    float scale = grad_scale.load(0);
    if (scale != scale) return;
    int64_t chunk;
    Piece piece = piece_of_block(pieces, first_block, int(count), chunk);
    Rates constants = piece.rates(rates, scale);
    InOut<float> param = piece.floats(PARAM), mean = piece.floats(MEAN), square = piece.floats(SQUARE);
    In<float> gradient = piece.gradient();
    InOut<bf16> value = piece.value();
    bool whole = param.is_aligned(16) && mean.is_aligned(16) && square.is_aligned(16) && gradient.is_aligned(16) &&
                 value.is_aligned(8);
    int64_t first = chunk * CHUNK, end = first + CHUNK < piece.length ? first + CHUNK : piece.length;
    int64_t fours = whole ? first + (end - first) / 4 * 4 : first;
    for (int64_t at = first + 4 * int(threadIdx.x); at < fours; at += 4 * THREADS)
        four_values(param, gradient, mean, square, value, at, constants);
    for (int64_t at = fours + int(threadIdx.x); at < end; at += THREADS)
        one_value(param, gradient, mean, square, value, at, constants);
}

// Moments in 8 bits, otherwise as adamw_f32; a block takes 64 blocks of state, each warp one at a time. A map is its
// 256 values and then its 256 limits; `starts` are its index's bytes, padded to a multiple of 4.
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
    InOut<float> param = piece.floats(PARAM);
    In<float> gradient = piece.gradient();
    InOut<bf16> value = piece.value();
    Moment mean{piece.codes(MEAN), piece.scales(MEAN_SCALE)}, square{piece.codes(SQUARE), piece.scales(SQUARE_SCALE)};
    bool aligned = param.is_aligned(16) && gradient.is_aligned(16) && value.is_aligned(8) && mean.codes.is_aligned(4) &&
                   square.codes.is_aligned(4);
    for (int s = int(threadIdx.x) / 32; s < BLOCKS_OF_STATE; s += THREADS / 32) {
        int64_t at = (chunk * BLOCKS_OF_STATE + s) * STATE_BLOCK;
        if (at >= piece.length) break;
        int there = int(piece.length - at < STATE_BLOCK ? piece.length - at : STATE_BLOCK);
        bool whole = aligned && there == STATE_BLOCK;
        float p[2][4], g[2][4], m[2][4], v[2][4];
        read_values(p, param, at, there, whole);
        read_values(g, gradient, at, there, whole);
        mean.widen(m, at, there, whole, of_mean);
        square.widen(v, at, there, whole, of_square);
        UNROLL for (int k = 0; k < 2; k++)
            UNROLL for (int i = 0; i < 4; i++) constants.update(p[k][i], m[k][i], v[k][i], g[k][i]);
        write_values(p, param, value, at, there, whole);
        mean.quantize(m, at, there, whole, of_mean);
        square.quantize(v, at, there, whole, of_square);
    }
}
