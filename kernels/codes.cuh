// Codes of 4 and 8 bits in memory, and the values of small floats, for kernels that dequantize.
// quant/small_floats.rs and quant/e4m3.rs define the values.
#pragma once
#include "compat.cuh"

// A number of values that form a block, with constants for a fast division by it.
struct BlockSize {
    uint32_t size;
    int32_t shift;
    DEVICE int64_t block_of(int64_t at) const {
        if (shift >= 0) return at >> shift;
        if (at >> 32 == 0) return uint32_t(at) / size;
        return int64_t(uint64_t(at) / size);
    }
};

// Returns the codes of V values from value `at` on, the first `there` of which exist, in memory
// order. Two codes of 4 bits share a byte, the first in the high nibble.
template <int BITS, int V> DEVICE inline Bytes8 codes_at(In<uint8_t> codes, int64_t at, int there) {
    constexpr int BYTES = V * BITS / 8;
    Bytes8 packed{{0, 0}};
    int64_t first = at * BITS / 8;
    if (there == V) {
        if (BYTES == 8) return codes.load8(first);
        if (BYTES == 4) return Bytes8{{codes.load4(first), 0}};
    }
    int bytes = BITS == 4 ? (there + 1) / 2 : there;
    UNROLL for (int i = 0; i < BYTES; i++)
        if (i < bytes) packed.word[i / 4] |= uint32_t(codes.load(first + i)) << (8 * (i % 4));
    return packed;
}

// Returns the i-th of these codes.
template <int BITS> DEVICE inline uint32_t code_of(const Bytes8 &packed, int i) {
    if (BITS == 4) return (packed.word[0] >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0))) & 15u;
    return (packed.word[i / 4] >> (8 * (i % 4))) & 255u;
}

// Returns the code of value `at`.
template <int BITS> DEVICE inline uint32_t code_at(In<uint8_t> codes, int64_t at) {
    uint32_t byte = codes.load(at * BITS / 8);
    if (BITS == 8) return byte;
    return at % 2 == 0 ? byte >> 4 : byte & 15u;
}

// Returns the i-th number of 16 bits of `bytes`, of any alignment.
DEVICE inline uint32_t pair_at(In<uint8_t> bytes, int64_t i) {
    return uint32_t(bytes.load(2 * i)) | uint32_t(bytes.load(2 * i + 1)) << 8;
}

// Returns the whole number below 2^23 in f32, without the slow conversion.
DEVICE inline float whole_number(uint32_t n) { return bits_to_float(0x4b000000u | n) - 8388608.0f; }
// Returns the number of a signed byte.
DEVICE inline float signed_number(uint32_t byte) { return whole_number(byte ^ 0x80u) - 128.0f; }

// Returns the number of a float with FRACTION bits of fraction and an exponent with this bias.
// `magnitude` is its bits without the sign; subnormal numbers are exact too.
template <int FRACTION, int BIAS> DEVICE inline float small_float(uint32_t sign, uint32_t magnitude) {
    return bits_to_float(sign << 31 | magnitude << (23 - FRACTION)) * bits_to_float(uint32_t(254 - BIAS) << 23);
}

DEVICE inline float f16_value(uint32_t bits) {
    uint32_t sign = bits >> 15, magnitude = bits & 0x7fffu;
    // Infinities and NaN keep the largest exponent.
    float above = bits_to_float(sign << 31 | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return magnitude < 0x7c00u ? small_float<10, 15>(sign, magnitude) : above;
}
DEVICE inline float bf16_value(uint32_t bits) { return bits_to_float(bits << 16); }
DEVICE inline float e4m3_value(uint32_t bits) {
    uint32_t magnitude = bits & 0x7fu;
    return magnitude < 0x7fu ? small_float<3, 7>(bits >> 7, magnitude) : bits_to_float(0x7fc00000u);
}
DEVICE inline float e2m1_value(uint32_t bits) { return small_float<1, 1>(bits >> 3, bits & 7u); }
// A power of two, of which the smallest is subnormal in f32; 255 is NaN.
DEVICE inline float e8m0_value(uint32_t exponent) {
    uint32_t power = exponent > 0 ? exponent << 23 : 0x00400000u;
    return bits_to_float(exponent < 255 ? power : 0x7fc00000u);
}
