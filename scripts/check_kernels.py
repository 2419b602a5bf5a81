#!/usr/bin/env python3
"""Checks the code that nvcc makes of kernels/*.cu against kernels/limits.toml. Needs no GPU.

    source scripts/cuda-env.sh              # provides nvcc if it is missing
    scripts/check_kernels.py                # exit code 1 if a kernel breaks a limit
    scripts/check_kernels.py --table        # also prints the resources of each kernel

The files are compiled with the options of crates/backends/build.rs, kernels/nvcc.options. ptxas
then reports registers, stack, spills and shared memory of each kernel for each architecture. The
PTX shows the instructions that move memory and compute, and in loops with products on tensor cores
the reads of shared memory for each. limits.toml holds the limits of each kernel; the rules for
every kernel are here: no access to local memory, no atomic sum of floats, no warning of nvcc.

Newer GPUs run the PTX of compute_90, which their driver compiles. ptxas does the same here for the
architectures in `from_ptx`, and only stack and spills are compared with the limits.

`--kernels FOLDER` checks another folder instead, such as a copy with a lower limit, to show that a
breach is detected.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    # Python before 3.11; pip, with which scripts/cuda-env.sh fetches nvcc, includes the same
    # parser.
    from pip._vendor import tomli as tomllib

KERNELS = Path(__file__).resolve().parent.parent / "kernels"

# Number of files compiled at a time.
AT_ONCE = 2

# Limits of a multiprocessor of sm_80 and sm_90: 32-bit registers, threads and blocks.
REGISTERS = 65536
RESIDENT_THREADS = 2048
RESIDENT_BLOCKS = 32
# The most registers that a thread can address.
REGISTERS_OF_A_THREAD = 255

# The names that `uses` accepts, and their PTX instructions.
USES = {
    "mma.sync": "products on tensor cores",
    "ldmatrix": "matrices from shared memory to registers",
    "cp.async": "asynchronous copies of 16 bytes from global to shared memory",
    "load16": "loads of 16 bytes from global memory",
    "load8": "loads of 8 bytes from global memory",
    "store16": "stores of 16 bytes to global memory",
    "store8": "stores of 8 bytes to global memory",
}


# sm_120 holds 1,536 threads and ignores the bound of a kernel that asks for more; the bounds are
# for RESIDENT_THREADS, which Limit.faults holds them to.
FEWER_THREADS = re.compile(r"Value of threads per SM for entry \w+ is out of range. .minnctapersm will be ignored")


class Refused(Exception):
    """The check cannot be made."""


@dataclass
class Limit:
    """The limits and required instructions of a kernel: a line of limits.toml, which explains the
    names."""

    file: str
    threads: int
    blocks: int
    uses: list
    shared: int = 0
    stack: int = 0
    spills: int = 0
    # The same, as compiled from PTX for the architectures in `from_ptx`.
    ptx_stack: int = 0
    ptx_spills: int = 0
    # ldmatrix and mma.sync of its innermost loop with products; their ratio is the limit.
    loop: list = field(default_factory=list)
    reason: str = ""

    @property
    def registers(self) -> int:
        """Returns the most registers of a thread with which the blocks fit; a warp gets multiples
        of 8 for each thread."""
        return min(REGISTERS // (self.threads * self.blocks) // 8 * 8, REGISTERS_OF_A_THREAD)

    def faults(self):
        """Yields the errors of the line itself."""
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            yield f"`threads` is {self.threads}; accepted: multiples of 32 up to 1024"
        elif not self.threads <= self.blocks * self.threads <= RESIDENT_THREADS:
            yield f"{self.blocks} blocks of {self.threads} threads; a multiprocessor holds {RESIDENT_THREADS} threads"
        if unknown := sorted(set(map(str, self.uses)) - set(USES)):
            yield f"`uses` names {', '.join(unknown)}; accepted: {', '.join(USES)}"
        is_pair = len(self.loop) == 2 and all(type(count) is int and count > 0 for count in self.loop)
        if {"mma.sync", "ldmatrix"} <= set(self.uses) and not is_pair:
            yield f"`loop` is {self.loop}; accepted beside mma.sync and ldmatrix: the numbers of ldmatrix and mma.sync"
        if (self.stack or self.spills or self.ptx_stack or self.ptx_spills) and not self.reason:
            yield "`stack`, `spills`, `ptx_stack` and `ptx_spills` above 0 want a `reason`"


@dataclass
class Found:
    """Resources and instructions of a kernel on one architecture."""

    file: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0
    # Threads of BOUNDS, 0 if absent.
    bounds: int = 0
    uses: set = field(default_factory=set)
    # ldmatrix and mma.sync of the innermost loop with products, as the compiler unrolls it.
    loop: tuple = (0, 0)
    # Forbidden instructions: the reason, and the first line with it.
    forbidden: dict = field(default_factory=dict)


def load_limits(path: Path):
    """Returns the architectures of limits.toml, those that run PTX, and the limit of each kernel by
    its name."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"cannot read {path}: {error}") from error
    architectures, from_ptx, limits = table.pop("architectures", []), table.pop("from_ptx", []), {}
    kinds = {item.name: item.type for item in fields(Limit) if item.name != "file"}
    if strange := [key for key, value in table.items() if not isinstance(value, dict)]:
        raise Refused(f"{path}: unknown key {', '.join(strange)}; accepted: architectures, from_ptx, a table for each .cu file")
    for file, kernel in ((file, kernel) for file in table for kernel in table[file]):
        where, line = f"limits.toml, {kernel} of {file}", table[file][kernel]
        if not isinstance(line, dict):
            raise Refused(f"{where} is {line!r}; a kernel has {{ threads = .., blocks = .., uses = [..] }}")
        if unknown := sorted(set(line) - set(kinds)):
            raise Refused(f"{where}: unknown key {', '.join(unknown)}; accepted: {', '.join(kinds)}")
        for key, value in line.items():
            if type(value).__name__ != kinds[key]:
                raise Refused(f"{where}: `{key}` is {value!r}; accepted: {kinds[key]}")
        if missing := [key for key in ("threads", "blocks", "uses") if key not in line]:
            raise Refused(f"{where}: {', '.join(missing)} is missing; every kernel says it")
        if kernel in limits:
            raise Refused(f"{where}: {limits[kernel].file} has a kernel of that name; a kernel has one file")
        limits[kernel] = Limit(file, **line)
        for fault in limits[kernel].faults():
            raise Refused(f"{where}: {fault}")
    if not architectures or not limits:
        raise Refused(f"{path} has no `architectures` or no kernels; nothing would be checked")
    return architectures, from_ptx, limits


def compile_file(nvcc: str, kernels: Path, source: Path, out: Path, from_ptx: list):
    """Compiles a file, its PTX of compute_90 also for the architectures `from_ptx`; returns the
    output of nvcc and ptxas, the PTX of each architecture, and the seconds."""
    out.mkdir()
    command = [nvcc, "--options-file", str(kernels / "nvcc.options"), str(source), "-o", str(out / "code.fatbin")]
    command += [f"-gencode=arch=compute_90,code=sm_{name}" for name in from_ptx]
    command += ["-Xptxas", "-v", "--keep", "--keep-dir", str(out)]
    start = time.monotonic()
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise Refused(f"cannot run {nvcc}: {error}; `source scripts/cuda-env.sh` gets one") from error
    if done.returncode:
        raise Refused(f"{source.name} does not compile: `{' '.join(command)}`\n{done.stdout}")
    return done.stdout, [path.read_text() for path in sorted(out.glob("*.ptx"))], time.monotonic() - start


FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def read_ptxas(text: str, found) -> list:
    """Records the output of `ptxas -v` through `found(kernel, number of the architecture)`. Returns
    the lines with warnings."""
    now, warnings = None, []
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w*'", line):
            now = found(entry[1], entry[2])
        elif "warning" in line:
            if not FEWER_THREADS.search(line):
                warnings.append(line.strip())
        elif now and (sizes := FRAME.search(line)):
            # A function that is not inlined has its own line, which counts for the kernel.
            now.stack += int(sizes[1])
            now.spills += int(sizes[2]) + int(sizes[3])
        elif now and (used := re.search(r"Used (\d+) registers", line)):
            now.registers = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            now.shared = int(shared[1]) if shared else 0
    return warnings


def use_of(opcode: str, line: str):
    """Returns the name in USES of a PTX instruction, or None."""
    for name in ("mma.sync", "ldmatrix"):
        if opcode.startswith(name + "."):
            return name
    if re.match(r"cp\.async\.c[ag]\.shared\.global", opcode):
        return "cp.async" if re.search(r"\],\s*16\b", line) else None
    access = re.match(r"(ld|st)\.global\b.*\.v(\d)\.[bsuf](\d+)$", opcode)
    if not access:
        return None
    name = f"{'load' if access[1] == 'ld' else 'store'}{int(access[2]) * int(access[3]) // 8}"
    return name if name in USES else None


def why_forbidden(opcode: str):
    """Returns the reason why no kernel may have a PTX instruction, or None."""
    parts = opcode.split(".")
    if parts[0] in ("ld", "st") and "local" in parts:
        return "local memory: an array whose index is known only at run time, or an address of a variable"
    if parts[0] in ("atom", "red", "multimem"):
        if any(re.fullmatch(r"b?f(16|32|64)(x2)?", part) for part in parts):
            return "an atomic operation on floats: the order of its sums, and so their bits, would be left to chance"
        if "cas" in parts:
            return "atom.cas, of which atomic sums of floats are made: their order would be left to chance"
    return None


OPCODE = re.compile(r"\s*(?:\{\s*)?(?:@!?%?\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)")


def read_ptx(text: str, found):
    """Records the instructions in the PTX of a file; `found` as for read_ptxas."""
    architecture, now = re.search(r"^\.target sm_(\d+)", text, re.MULTILINE)[1], None
    counts, labels, lengths = [0, 0], {}, []
    for line in text.splitlines():
        if entry := re.search(r"^(?:\.\w+ )*\.(?:entry|func)\b.*?(\w+)\s*\(", line):
            now = found(entry[1], architecture)
            counts, labels, lengths = [0, 0], {}, []
        elif label := re.match(r"(\$\w+):", line):
            labels[label[1]] = tuple(counts)
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and jump[1] in labels:
            # A jump back ends a loop. Of those with products, the one with the fewest is innermost.
            loads, products = (count - before for count, before in zip(counts, labels[jump[1]]))
            if products:
                lengths.append((products, loads))
                now.loop = tuple(reversed(min(lengths)))
        elif bounds := re.match(r"\s*\.maxntid (\d+)", line):
            now.bounds = int(bounds[1])
        elif now and (instruction := OPCODE.match(line)):
            if use := use_of(instruction[1], line):
                now.uses.add(use)
                counts[0] += use == "ldmatrix"
                counts[1] += use == "mma.sync"
            if why := why_forbidden(instruction[1]):
                now.forbidden.setdefault(why, line.strip())


def frame_breaches(where: str, found: Found, limit: Limit, names: dict):
    """Yields the exceeded limits of memory of a kernel; `names` has the field of Limit for each
    field of Found."""
    takes = {
        "shared": ("bytes of shared memory of fixed size", "raise `shared` if the blocks still fit"),
        "spills": ("bytes of spilled registers, stored and loaded", "keep fewer values alive, or ask for fewer blocks"),
        "stack": ("bytes of stack", "index arrays by constants in unrolled loops"),
    }
    for name, of_limit in names.items():
        value, most, (what, remedy) = getattr(found, name), getattr(limit, of_limit), takes[name]
        # Spilled registers are on the stack: one line reports both.
        if value > most and not (name == "stack" and found.spills):
            yield f"{where}: {value} {what}, at most {most} are allowed (`{of_limit}`); {remedy}"


def breaches(kernel: str, architecture: str, found: Found, limit: Limit):
    """Yields the exceeded limits and the missing instructions of a kernel."""
    where = f"{kernel} ({found.file}) for sm_{architecture}"
    if found.registers > limit.registers:
        yield (
            f"{where}: {found.registers} registers a thread, at most {limit.registers} let {limit.blocks} blocks of "
            f"{limit.threads} threads run on a multiprocessor; keep fewer values alive (BOUNDS gives the registers of "
            "a thread), or lower `blocks`"
        )
    if found.bounds not in (0, limit.threads):
        yield f"{where}: BOUNDS says {found.bounds} threads, limits.toml {limit.threads}; mend the one that is wrong"
    yield from frame_breaches(where, found, limit, {name: name for name in ("shared", "spills", "stack")})
    if limit.loop and found.loop[0] * limit.loop[1] > limit.loop[0] * found.loop[1]:
        yield (
            f"{where}: {found.loop[0]} ldmatrix for {found.loop[1]} mma.sync in its loop, at most {limit.loop[0]} for "
            f"{limit.loop[1]} are allowed (`loop`): reads of shared memory bound such a loop; use each operand more often"
        )
    for use in limit.uses:
        if use not in found.uses:
            yield (
                f"{where}: no {use} in its PTX ({USES[use]}), which `uses` asks for; found: "
                f"{', '.join(sorted(found.uses)) or 'none of these'}; write it as an instruction, as device.cuh does, "
                "or take it out of `uses`"
            )


def check(architectures: list, from_ptx: list, limits: dict, found: dict):
    """Yields every breach of limits.toml."""
    for (name, architecture), one in sorted(found.items(), key=lambda item: item[0]):
        for why, line in one.forbidden.items():
            yield f"{name} ({one.file}) for sm_{architecture}: `{line}`: {why}"
        # A function that is not inlined counts for the kernels that call it.
        if not one.registers:
            continue
        file = one.file
        if name not in limits:
            yield f"{name} ({file}) is not in limits.toml; add a line under [\"{file}\"] with threads, blocks and uses"
        elif limits[name].file != file:
            yield f"{name} is in {file}, and limits.toml has it in {limits[name].file}; move its line"
        elif architecture in from_ptx:
            where, names = f"{name} ({file}) for sm_{architecture} from PTX", {"spills": "ptx_spills", "stack": "ptx_stack"}
            yield from frame_breaches(where, one, limits[name], names)
        else:
            yield from breaches(name, architecture, one, limits[name])
    for name, limit in limits.items():
        for architecture in [*architectures, *from_ptx]:
            if not found.get((name, architecture), Found("")).registers:
                yield (
                    f"{name} of limits.toml is not in {limit.file} for sm_{architecture}; remove it there, or mend its "
                    "name or nvcc.options"
                )


def print_table(architectures: list, from_ptx: list, limits: dict, found: dict):
    """Prints the resources of each kernel beside its limits. `fit` is the number of blocks that
    registers and threads allow."""
    titles = "".join(f"{'sm_' + name:>7}{'fit':>4}{'spills':>7}{'stack':>6}" for name in architectures)
    titles += "".join(f"{'sm_' + name:>7}{'spills':>7}{'stack':>6}" for name in from_ptx)
    print(f"{'kernel':32}{'threads':>8}{'blocks':>7}{'limit':>6}{titles}{'shared':>7}  instructions")
    for name in (name for name in limits if (name, architectures[0]) in found):
        limit, shown = limits[name], ""
        for one in (found.get((name, architecture), Found("")) for architecture in architectures):
            taken = limit.threads * max(8, -(-one.registers // 8) * 8)
            fit = min(REGISTERS // taken, RESIDENT_THREADS // limit.threads, RESIDENT_BLOCKS)
            shown += f"{one.registers:7}{fit:4}{one.spills:7}{one.stack:6}"
        for newer in (found.get((name, architecture), Found("")) for architecture in from_ptx):
            shown += f"{newer.registers:7}{newer.spills:7}{newer.stack:6}"
        print(f"{name:32}{limit.threads:8}{limit.blocks:7}{limit.registers:6}{shown}{one.shared:7}", end="  ")
        loop = f" {one.loop[0]} ldmatrix for {one.loop[1]} mma" if limit.loop else ""
        print((" ".join(sorted(one.uses)) or "-") + loop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, default=KERNELS, metavar="FOLDER")
    parser.add_argument("--table", action="store_true", help="print what each kernel takes")
    arguments = parser.parse_args()
    kernels = arguments.kernels.resolve()
    home = os.environ.get("CUDA_HOME")
    nvcc = os.environ.get("NVCC") or (f"{home}/bin/nvcc" if home else "nvcc")

    architectures, from_ptx, limits = load_limits(kernels / "limits.toml")
    sources, start = sorted(kernels.glob("*.cu")), time.monotonic()
    found, lines, times = {}, [], {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        work = [pool.submit(compile_file, nvcc, kernels, file, Path(scratch, file.stem), from_ptx) for file in sources]
        for source, job in zip(sources, work):
            said, ptx, times[source.name] = job.result()

            def of(kernel, architecture, file=source.name):
                return found.setdefault((kernel, architecture), Found(file))

            lines += [f"{source.name}: nvcc warns: {warning}" for warning in read_ptxas(said, of)]
            for text in ptx:
                read_ptx(text, of)
    if arguments.table:
        print_table(architectures, from_ptx, limits, found)
        slowest = sorted(times, key=times.get, reverse=True)[:3]
        print("compiled in", ", ".join(f"{times[name]:.0f} s ({name})" for name in slowest), "and less")
    lines = list(dict.fromkeys([*lines, *check(architectures, from_ptx, limits, found)]))
    for line in lines:
        print("error:", line, file=sys.stderr)
    names = len({name for (name, _), one in found.items() if one.registers})
    result = f"{len(lines)} faults" if lines else "all within limits.toml"
    taken = time.monotonic() - start
    print(f"{names} kernels for {', '.join('sm_' + name for name in [*architectures, *from_ptx])}: {result} ({taken:.0f} s)")
    return 1 if lines else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as error:
        sys.exit(f"error: {error}")
