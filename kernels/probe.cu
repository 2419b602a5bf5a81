// Every instruction that compat.cuh wraps, and the arithmetic that kernels rely on, once each, on
// inputs that the host codes (crates/ops/src/ops/probe). The resulting registers of each lane go to
// `out`: one section per instruction, with the registers of lane 0, then those of lane 1, and so
// on. Tests compare the emulator's dump with one recorded on a GPU. All inputs come from memory, so
// that no compiler computes a result itself.
#include "compat.cuh"

namespace {

// Writes one section after another.
struct Dump {
    Out<uint32_t> out;
    int64_t end;

    // Returns the index of the first of N words of this lane in a new section.
    DEVICE int64_t place(int N) {
        int64_t at = end + int64_t(threadIdx.x) * N;
        end += int64_t(blockDim.x) * N;
        return at;
    }
    DEVICE void put(uint32_t word) { out.store(place(1), word); }
    DEVICE void put(float x) { put(float_to_bits(x)); }
    DEVICE void put(double x) {
        uint64_t bits;
        memcpy(&bits, &x, sizeof bits);
        uint32_t words[2] = {uint32_t(bits), uint32_t(bits >> 32)};
        put(words);
    }
    DEVICE void put(const Bytes8 &b) { put(b.word); }
    DEVICE void put(const Bytes16 &b) { put(b.word); }
    template <int N> DEVICE void put(const uint32_t (&words)[N]) {
        int64_t at = place(N);
        UNROLL for (int i = 0; i < N; i++) out.store(at + i, words[i]);
    }
    template <int N> DEVICE void put(const float (&x)[N]) {
        uint32_t words[N];
        UNROLL for (int i = 0; i < N; i++) words[i] = float_to_bits(x[i]);
        put(words);
    }
};

// Returns the i-th word of an input that has one per thread.
DEVICE inline uint32_t word_of(In<uint32_t> words, int i) {
    return words.load(int64_t(blockDim.x) * i + int64_t(threadIdx.x));
}
DEVICE inline float float_of(In<uint32_t> words, int i) { return bits_to_float(word_of(words, i)); }

} // namespace

// One block per case: `words` holds for each lane 4 registers of a, 2 of b and 4 of d.
KERNEL probe_mma(In<uint32_t> words, Out<uint32_t> out) {
    In<uint32_t> mine = words.offset((int64_t(blockIdx.x) * 32 + int64_t(threadIdx.x)) * 10);
    uint32_t a[4], b[2];
    float d[4], first[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = mine.load(i);
    UNROLL for (int i = 0; i < 2; i++) b[i] = mine.load(4 + i);
    UNROLL for (int i = 0; i < 4; i++) d[i] = first[i] = bits_to_float(mine.load(6 + i));
    Dump dump{out, int64_t(blockIdx.x) * 32 * 8};
    mma_16816(d, a, b);
    dump.put(d);
    mma_16816_first(first, a, b);
    dump.put(first);
}

// `words`: 32 rows of 8 values of 16 bits, then the row whose address each lane gives.
KERNEL probe_ldmatrix(In<uint32_t> words, Out<uint32_t> out) {
    DYNAMIC_SHARED(uint32_t, tile);
    int lane = int(threadIdx.x);
    tile.store16(4 * lane, words.load16(4 * lane));
    sync_warp();
    Shared<bf16> row = tile.as<bf16>().offset(8 * int(words.load(128 + lane)));
    uint32_t r[4];
    Dump dump{out, 0};
    ldmatrix_x4(r, row);
    dump.put(r);
    ldmatrix_x4_transposed(r, row);
    dump.put(r);
}

// `words`: 128 to copy, then for each lane the index of its source, and 0 for a lane with nothing
// to copy.
KERNEL probe_copies(In<uint32_t> words, Out<uint32_t> out) {
    SHARED(uint32_t, wide, 128);
    SHARED(uint32_t, narrow, 32);
    int lane = int(threadIdx.x);
    int64_t from = words.load(128 + lane);
    bool there = words.load(160 + lane) != 0;
    copy_async16(wide.offset(4 * lane), words, 4 * from, there);
    copy_async_commit();
    copy_async4(narrow.offset(lane), words, from, there);
    copy_async_commit();
    Dump dump{out, 0};
    copy_async_wait<1>();
    dump.put(wide.load16(4 * lane));
    copy_async_wait<0>();
    sync_warp();
    dump.put(narrow.load(lane ^ 1));
}

// `words`: 128 to load, then for each lane its index among them; `address` is that of `words`.
// `halves`: 256 of 16 bits. `scratch`: 256 words, `listed` the address of 32 more.
KERNEL probe_memory(In<uint32_t> words, In<bf16> halves, InOut<uint32_t> scratch, uint64_t address, uint64_t listed,
    Out<uint32_t> out) {
    SHARED(uint32_t, shared, 32);
    int lane = int(threadIdx.x), p = int(words.load(128 + lane));
    Dump dump{out, 0};
    dump.put(words.load(p));
    dump.put(words.load4(p));
    dump.put(words.load8(2 * p));
    dump.put(words.load16(4 * p));
    dump.put(words.offset(32).load(p));
    dump.put(uint32_t(halves.load(p).bits));
    dump.put(halves.load4(2 * p));
    dump.put(halves.load8(4 * p));
    dump.put(halves.load16(8 * p));
    dump.put(in_at<uint32_t>(address, 160).load(p));
    out.store16(dump.place(4), words.load16(4 * p));
    out.store8(dump.place(2), words.load8(2 * p));
    out.store4(dump.place(1), words.load4(p));
    // Words that lanes write for each other.
    InOut<uint32_t> table = in_out_at<uint32_t>(listed, 32);
    table.store(p, table.load(p) + uint32_t(lane));
    scratch.store16(4 * p, words.load16(4 * lane));
    scratch.store8(128 + 2 * p, words.load8(2 * lane));
    scratch.store4(192 + p, words.load4(lane));
    scratch.store(224 + p, words.load(lane));
    shared.store(p, words.load(lane));
    sync_block();
    dump.put(table.load(lane));
    dump.put(scratch.load16(4 * lane));
    dump.put(scratch.load8(128 + 2 * lane));
    dump.put(scratch.load4(192 + lane));
    dump.put(scratch.as<bf16>().load16(2 * (128 + 4 * (lane / 2))));
    dump.put(scratch.offset(224).load(lane));
    dump.put(shared.load(lane));
}

// `words`: for each lane a word, a lane to read from, and an f32 number.
KERNEL probe_shuffles(In<uint32_t> words, Out<uint32_t> out) {
    uint32_t word = word_of(words, 0);
    int from = int(word_of(words, 1));
    float x = float_of(words, 2);
    uint32_t of_words[5];
    float of_floats[5];
    UNROLL for (int i = 0; i < 5; i++) {
        of_words[i] = shuffle_xor(word, 1 << i);
        of_floats[i] = shuffle_xor(x, 1 << i);
    }
    Dump dump{out, 0};
    dump.put(shuffle(word, from));
    dump.put(shuffle(x, from));
    dump.put(of_words);
    dump.put(of_floats);
    dump.put(warp_sum(x));
    dump.put(warp_max(x));
}

// `words`: an f32 number for each thread; four warps.
KERNEL probe_block_sum(In<uint32_t> words, Out<uint32_t> out) {
    SHARED(float, scratch, 32);
    Dump dump{out, 0};
    dump.put(block_sum(float_of(words, 0), scratch));
}

// `words`: two f32 numbers for each lane.
KERNEL probe_conversions(In<uint32_t> words, Out<uint32_t> out) {
    float low = float_of(words, 0), high = float_of(words, 1);
    uint32_t pair = word_of(words, 0);
    Dump dump{out, 0};
    dump.put(round_to_bf16(low, high));
    dump.put(uint32_t(nearest<bf16>(high).bits));
    dump.put(low_half(pair));
    dump.put(high_half(pair));
    dump.put(widen(bf16{uint16_t(pair)}));
    dump.put(float(pair));
    dump.put(float(int32_t(pair)));
}

// `words`: f32 numbers a, b and c for each lane, then finite positive x and y.
KERNEL probe_arithmetic(In<uint32_t> words, Out<uint32_t> out) {
    float a = float_of(words, 0), b = float_of(words, 1), c = float_of(words, 2);
    double x = double(float_of(words, 3)), y = double(float_of(words, 4));
    double quotient = x / y;
    Dump dump{out, 0};
    dump.put(fmaf(a, b, c));
    // Two roundings: a product and a sum are not contracted.
    dump.put(a * b + c);
    dump.put(a / b);
    dump.put(sqrtf(a));
    dump.put(1.0f / sqrtf(a));
    dump.put(fmaxf(a, b));
    dump.put(ceilf(a));
    dump.put(float(quotient));
    dump.put(quotient);
    dump.put(quotient * x + y);
    dump.put(sqrt(x));
}

// `words`: for each lane an f32 number per function in turn.
KERNEL probe_functions(In<uint32_t> words, Out<uint32_t> out) {
    Dump dump{out, 0};
    dump.put(fast_exp2(float_of(words, 0)));
    dump.put(fast_reciprocal(float_of(words, 1)));
    dump.put(rsqrtf(float_of(words, 2)));
    dump.put(expf(float_of(words, 3)));
    dump.put(logf(float_of(words, 4)));
    dump.put(tanhf(float_of(words, 5)));
}
