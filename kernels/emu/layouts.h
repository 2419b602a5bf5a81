// The layout of warp-wide fragments over lanes and registers: (lane, value) to the element, in the
// notation of CuTe's traits (CUTLASS, cute/atom/mma_traits_sm80.hpp), where an element of a
// column-major tile of M rows is m + M * n. PTX ISA, "Matrix fragments for mma.m16n8k16 with
// floating point type", shows the same as figures.
#pragma once

namespace emu {

struct Element {
    int row, column;
};

// A, 16 x 16: ((4,8),(2,2,2)):((32,1),(16,8,128)). Value 2 r + h is half h of register r.
inline Element element_of_a(int lane, int value) {
    int at = lane % 4 * 32 + lane / 4 * 1 + value % 2 * 16 + value / 2 % 2 * 8 + value / 4 * 128;
    return Element{at % 16, at / 16};
}

// B, 16 x 8 (k by n), which the traits index as n + 8 * k: ((4,8),(2,2)):((16,1),(8,64)).
inline Element element_of_b(int lane, int value) {
    int at = lane % 4 * 16 + lane / 4 * 1 + value % 2 * 8 + value / 2 * 64;
    return Element{at / 8, at % 8};
}

// C and D, 16 x 8: ((4,8),(2,2)):((32,1),(16,8)).
inline Element element_of_c(int lane, int value) {
    int at = lane % 4 * 32 + lane / 4 * 1 + value % 2 * 16 + value / 2 * 8;
    return Element{at % 16, at / 16};
}

// ldmatrix: register m of a lane holds, of matrix m (8 x 8), row lane / 4 and columns 2 (lane % 4)
// and the next; transposed, the matrix's rows and columns are swapped.
inline Element element_of_matrix(int lane, int half, bool transposed) {
    Element e{lane / 4, lane % 4 * 2 + half};
    return transposed ? Element{e.column, e.row} : e;
}

} // namespace emu
