#!/usr/bin/env python3
"""Runs the tests beside busy processes, three times in a row: no result may depend on the load of
the machine.

    scripts/busy_suite.py                                  all tests, beside two busy processes a
                                                           core
    scripts/busy_suite.py --times 1 -- --test faults hangs::  arguments after `--` go to cargo test

Tests are built first, alone. The script starts its busy processes itself, and ends them by their
ids. The exit status is the number of failed runs.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Ends by itself when the script is gone.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))\n"


def main():
    own, _, more = " ".join(["", *sys.argv[1:], ""]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="runs in a row [default: 3]")
    parser.add_argument("--busy", type=int, default=2, help="busy processes for each core [default: 2]")
    args = parser.parse_args(own.split())
    test = ["cargo", "test", "--no-fail-fast", *(more.split() or ["--lib", "--test", "*"])]
    if subprocess.run([*test[:3], "--no-run", *test[3:]], cwd=ROOT).returncode:
        sys.exit("cannot build the tests")
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.busy * cores)]
    failed = 0
    try:
        for run in range(1, args.times + 1):
            begun = time.monotonic()
            status = subprocess.run(test, cwd=ROOT).returncode
            failed += status != 0
            alive = sum(process.poll() is None for process in busy)
            print(f"run {run} of {args.times} beside {alive} busy processes on {cores} cores: "
                  f"{f'FAILED with exit status {status}' if status else 'passed'}, "
                  f"{time.monotonic() - begun:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    sys.exit(failed)


main()
