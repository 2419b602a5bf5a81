#!/usr/bin/env python3
"""Checks that a test fails without each barrier, wait, mask, bound and epilogue condition of the
kernels.

    scripts/mutate_kernels.py                 removes each in turn; a test must fail
    scripts/mutate_kernels.py --only FILE     only those of one kernel file
    scripts/mutate_kernels.py --uncovered     only looks for conditions that the list omits
    scripts/mutate_kernels.py --find          prints the fastest failing test, for new entries of
                                              the list

kernels/mutants.toml lists the mutants: a piece of a kernel's source, its replacement (empty by
default), and the test that fails. A mutant is compiled for the emulator like the kernels of a test
build and linked with their other objects to a shared library, which FINETUNE_EMU_LIBRARY names to
the tests. Each line therefore claims exactly: this test passes on the kernels and fails on this
mutant. A mutant that changes no result, a shortcut, gives the reason in `survives`, and its test
must pass.

A piece of text that is missing in its file, or occurs more than once without `nth`, is an error. So
is a barrier or a condition in no entry: the list follows the kernels. A surviving mutant, or an
error, ends in exit code 1. Needs Python 3.11, cargo and g++.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
LIST = KERNELS / "mutants.toml"
VARIABLE = "FINETUNE_EMU_LIBRARY"

# Kinds of source pieces that an entry changes.
KINDS = ("barrier", "wait", "mask", "bound", "epilogue", "condition")

# Kinds that the list must cover.
REQUIRED = re.compile(
    r"\bsync_(?:block|warp)\(\)|\bcopy_async_(?:commit\(|wait<)|\bhide_unseen<"
    r"|\bif\b|&&|\|\||[^?]\?[^?]|\b(?:smaller|larger)\("
)

# Options of crates/backends/build.rs for the emulator, except optimization, which changes no value.
COMPILE = (
    "g++ -std=c++17 -O0 -fPIC -w -DKERNEL_EMU -U_FORTIFY_SOURCE -fno-strict-aliasing -ffp-contract=off -c -xc++"
).split()

# Time limit after which a test counts as hung, only if it takes a tenth of it on the unchanged
# kernels.
LEAST_LIMIT_SECS = 20
LIMIT_FACTOR = 10


class Bad(Exception):
    """An error of the list, the kernels or the tools, as text."""


class Mutant:
    """An entry of the list, with its location in the file."""

    def __init__(self, table, entry):
        kinds = [kind for kind in KINDS if kind in entry]
        known = {*KINDS, "nth", "by", "into", "test", "survives"}
        if len(kinds) != 1 or set(entry) - known:
            accepted = f"one of {', '.join(KINDS)}; nth, by, into, test, survives"
            raise Bad(f"{LIST.name}, {table['file']}: {entry}; accepted: {accepted}")
        self.kind, self.file = kinds[0], table["file"]
        self.text, self.by = entry[self.kind], entry.get("by", "")
        self.into = entry.get("into", table.get("into", self.file))
        self.test = entry.get("test", table.get("test"))
        self.tests, self.survives = table["tests"], entry.get("survives")
        source = (KERNELS / self.file).read_text()
        places = [match.start() for match in re.finditer(re.escape(self.text), source)]
        nth = entry.get("nth")
        if not places or (nth is None and len(places) > 1) or (nth is not None and not 0 < nth <= len(places)):
            raise Bad(f"{LIST.name}, {self.file}: {self.text!r} occurs {len(places)} times, nth is {nth}")
        if self.by == self.text:
            raise Bad(f"{LIST.name}, {self.file}: {self.text!r} is to become the same")
        self.start = places[(nth or 1) - 1]
        self.end = self.start + len(self.text)
        self.line = source.count("\n", 0, self.start) + 1
        self.source = source[: self.start] + self.by + source[self.end :]

    def filter(self):
        """Returns the name of its test, or with :: at the end that of a module whose tests all
        run."""
        return f"{self.tests}::{self.test}" if self.test else f"{self.tests}::"

    def __str__(self):
        text = " ".join(self.text.split())
        change = f" -> {' '.join(self.by.split())}" if self.by else ""
        return f"{self.file}:{self.line} {self.kind} {text}{change}"


def read_list():
    tables = tomllib.loads(LIST.read_text())["kernels"]
    return tables, [Mutant(table, entry) for table in tables for entry in table["mutants"]]


def without_comments(source):
    """Returns the text with comments replaced by spaces."""
    return re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), source)


def uncovered(tables, mutants):
    """Returns text of the listed files that looks like a barrier or a condition and is in no
    entry."""
    found = []
    for file in {table["file"] for table in tables if table.get("complete", True)}:
        source = (KERNELS / file).read_text()
        covered = [(m.start, m.end) for m in mutants if m.file == file]
        for left in (left for table in tables if table["file"] == file for left in table.get("left_out", [])):
            places = [match.span() for match in re.finditer(re.escape(left["text"]), source)]
            if not places or not left["why"]:
                raise Bad(f"{LIST.name}, {file}: the text of left_out does not occur: {left['text']!r}")
            covered += places
        for match in REQUIRED.finditer(without_comments(source)):
            if not any(start <= match.start() and match.end() <= end for start, end in covered):
                line = source.count("\n", 0, match.start()) + 1
                found.append(f"{file}:{line} {source.splitlines()[line - 1].strip()}")
    return sorted(found)


def build(features):
    """Builds the library crate's tests; returns them and the archive of kernels that they link."""
    command = ["cargo", "test", "--locked", "--features", features, "--lib", "--no-run", "--message-format=json"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if told.returncode:
        raise Bad("the tests do not build")
    binary = archive = None
    for line in told.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") == "build-script-executed" and "finetune-backends" in message["package_id"]:
            archive = Path(message["out_dir"]) / "libfinetune_kernels.a"
        if message.get("executable") and message["target"]["name"] == "finetune_ops":
            binary = Path(message["executable"])
    if not binary or not archive or not archive.exists():
        raise Bad(f"cargo named no tests or no kernels: {binary}, {archive}; is kernel-emu among {features}?")
    return binary, archive


class Outcome:
    """The result of a test: "passed", "failed" or "hung", and the reason."""

    def __init__(self, what, why, secs):
        self.what, self.why, self.secs = what, why, secs


class Tests:
    """The test binary, and kernel libraries for it."""

    def __init__(self, binary, archive, scratch):
        self.binary, self.archive, self.scratch = binary, archive, scratch
        listed = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout
        self.names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
        # Seconds on the unchanged kernels.
        self.usual = {}

    def link(self, name, into, changed):
        """Compiles the file `into` with `changed` (a name and its source) and links it with the
        other kernels."""
        place = self.scratch / name
        place.mkdir()
        sources = {into: (KERNELS / into).read_text(), **dict([changed])}
        for file, source in sources.items():
            (place / file).write_text(source)
        made, library = place / "kernels.o", place / "kernels.so"
        run([*COMPILE, f"-I{KERNELS}", place / into, "-o", made])
        # The archive's own object of this file is not linked, for its functions are already
        # defined.
        link = ["-Wl,-u,finetune_emu_launch", "-Wl,-Bsymbolic", "-Wl,-z,defs"]
        run(["g++", "-shared", *link, made, self.archive, "-o", library])
        made.unlink()
        return library

    def run(self, library, wanted, limit):
        """Runs one test, or those of a module."""
        exact = [] if wanted.endswith("::") else ["--exact"]
        env = {**os.environ, VARIABLE: str(library), "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        start = time.monotonic()
        command = [self.binary, wanted, *exact, "--test-threads", "1"]
        try:
            done = subprocess.run(
                command, cwd=ROOT / "crates/ops", env=env, capture_output=True, text=True, errors="replace", timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Outcome("hung", f"not done after {limit:.0f} s", limit)
        secs, told = time.monotonic() - start, done.stdout + done.stderr
        if f"{VARIABLE} is" in told or re.search(r"^running 0 tests", told, re.M):
            raise Bad(f"{wanted} with {library}: {told}")
        return Outcome("passed" if done.returncode == 0 else "failed", reason(told, done.returncode), secs)

    def usual_secs(self, library, wanted):
        """Returns the seconds of the test on the unchanged kernels, where it must pass."""
        if wanted not in self.usual:
            if not any(name == wanted or (wanted.endswith("::") and name.startswith(wanted)) for name in self.names):
                raise Bad(f"there is no test {wanted}")
            outcome = self.run(library, wanted, None)
            if outcome.what != "passed":
                raise Bad(f"{wanted} fails on the kernels as they are: {outcome.why}")
            self.usual[wanted] = outcome.secs
        return self.usual[wanted]

    def judge(self, library, wanted):
        """Returns the result on a mutant."""
        return self.run(library, wanted, max(LEAST_LIMIT_SECS, LIMIT_FACTOR * self.usual[wanted]))


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Bad(f"{' '.join(map(str, command))}: {done.stderr[:2000]}")


def reason(told, code):
    """Returns the line of a failing test that holds the reason."""
    fault = re.search(r"(kernel \w+, block [^\n]*?)(?:\\n|\"|\n|$)", told)
    if fault:
        return fault[1]
    panic = re.search(r"panicked at [^\n]*\n([^\n]*)", told) or re.search(r"^(Error: [^\n]*)", told, re.M)
    return panic[1] if panic else f"exit code {code}"


def find(tests, library, mutant, usual):
    """Returns the fastest test that fails on a mutant; tries those of its module from the fastest
    on."""
    names = [name for name in tests.names if name.startswith(mutant.tests + "::")]
    for name in sorted(names, key=lambda name: tests.usual_secs(usual, name)):
        outcome = tests.judge(library, name)
        if outcome.what != "passed":
            return f"test = \"{name.removeprefix(mutant.tests + '::')}\"  {outcome.secs:.1f} s, {outcome.why}"
    return "SURVIVED all tests"


def try_one(tests, number, mutant, usual, arguments):
    """Returns a line about a mutant, and true if the result is as listed."""
    start = time.monotonic()
    library = tests.link(str(number), mutant.into, (mutant.file, mutant.source))
    compiled = time.monotonic() - start
    if arguments.find:
        return f"{mutant}\n    {find(tests, library, mutant, usual)}", True
    outcome = tests.judge(library, mutant.filter())
    library.unlink()
    good = (outcome.what == "passed") == bool(mutant.survives)
    if outcome.what == "passed":
        verdict, why = ("equal", mutant.survives) if good else ("SURVIVED", "")
    else:
        verdict, why = "caught" if good else "CAUGHT, WHICH IS TO SURVIVE", outcome.why
    return f"{verdict}  {mutant}  [{compiled:.1f} + {outcome.secs:.1f} s, {mutant.filter()}]  {why}", good


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants whose line contains it")
    parser.add_argument("--uncovered", action="store_true", help="compile and run nothing")
    parser.add_argument("--find", action="store_true", help="try all tests of an entry's module")
    parser.add_argument("--features", default="kernel-emu", help="of the test build, commas between (kernel-emu)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    return parser.parse_args()


def main():
    arguments = parse()
    tables, mutants = read_list()
    left = uncovered(tables, mutants)
    if left:
        raise Bad("in no entry of " + LIST.name + ":\n    " + "\n    ".join(left))
    if arguments.uncovered:
        print(f"{len(mutants)} mutants; no barrier and no condition is left out")
        return True
    chosen = [mutant for mutant in mutants if arguments.only in str(mutant)]
    if not chosen:
        raise Bad(f"no mutant is called {arguments.only}")
    binary, archive = build(arguments.features)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        tests = Tests(binary, archive, Path(scratch))
        into = chosen[0].into
        usual = tests.link("as-it-is", into, (into, (KERNELS / into).read_text()))
        if not arguments.find:
            for wanted in sorted({mutant.filter() for mutant in chosen}):
                tests.usual_secs(usual, wanted)
            secs = sum(tests.usual.values())
            print(f"{len(tests.usual)} tests pass on the kernels as they are, {secs:.0f} s", flush=True)
        all_good = True
        with ThreadPoolExecutor(arguments.jobs) as pool:
            tried = [pool.submit(try_one, tests, *of, usual, arguments) for of in enumerate(chosen)]
            for line, good in (one.result() for one in tried):
                all_good = all_good and good
                print(line, flush=True)
    print(f"{len(chosen)} mutants, {time.monotonic() - start:.0f} s: {'as listed' if all_good else 'NOT as listed'}")
    return all_good


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except Bad as error:
        sys.exit(f"mutate_kernels.py: {error}")
