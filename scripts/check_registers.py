#!/usr/bin/env python3
"""Checks that the CPU kernels of packed products keep their sums in registers.

    scripts/check_registers.py target/debug/finetune

Disassembles the kernels with objdump (binutils). A kernel that stores vectors on the stack keeps
sums in memory: the compiler does that as soon as it does not inline one of the functions between
the loops, and products then take two to six times as long with the same results, which no other
test detects. Needs a binary for x86-64 with symbols.
"""

import re
import subprocess
import sys

# Symbols of the kernels, and the least number of their multiplying instructions: fewer would mean
# that the products are somewhere else.
KERNELS = {
    "packed_gemm::avx512_bf16::add_columns": ("vdpbf16ps", 24),
    "packed_gemm::f32_kernel::multiply_avx512": ("vfmadd", 16),
    "packed_gemm::f32_kernel::multiply_avx2": ("vfmadd", 12),
}
ON_STACK = re.compile(r"v?mov[au]p[sd]\s+%[xyz]mm\d+,[^,]*\(%rsp[,)]")


def functions(binary):
    """Yields name and instructions of each function whose name contains that of a kernel."""
    lines = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", "--section=.text", binary],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    name, body = None, []
    for line in [*lines, "0 <end>:"]:
        if line.endswith(">:"):
            if name and any(kernel in name for kernel in KERNELS):
                yield name, body
            name, body = line.split("<", 1)[1][:-2], []
        else:
            body.append(line)


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} BINARY")
    multiplications, stores = dict.fromkeys(KERNELS, 0), dict.fromkeys(KERNELS, 0)
    for name, body in functions(sys.argv[1]):
        kernel = next(kernel for kernel in KERNELS if kernel in name)
        multiplications[kernel] += sum(KERNELS[kernel][0] in line for line in body)
        stores[kernel] += sum(bool(ON_STACK.search(line)) for line in body)
    bad = []
    for kernel, (instruction, least) in KERNELS.items():
        found = multiplications[kernel]
        print(f"{kernel}: {found} × {instruction}, {stores[kernel]} vectors stored on the stack")
        if found < least:
            bad.append(f"{kernel}: {found} × {instruction}, at least {least} expected")
        # A few stand outside the loops: pointers, and the vectors that a call would lose.
        if stores[kernel] > found / 4:
            bad.append(f"{kernel}: {stores[kernel]} vectors are stored on the stack, at most {found // 4} expected")
    if bad:
        sys.exit("check_registers.py: " + "\n".join(bad))


if __name__ == "__main__":
    main()
