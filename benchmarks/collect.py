"""Puts the parts of a benchmark and the facts of the machine into one JSON file.

    python3 collect.py --binary finetune --out cpu.json --parts parts
    python3 collect.py --binary finetune --out gpu/kernels.json --parts parts --bars kernels

Standard library only. In the folder of parts, NAME.json is a part's stdout, NAME.err its stderr,
NAME.secs its seconds and NAME.rc its exit code (124: stopped at its time limit). NAME.rc is
"skipped" or "no time" if it was not started; NAME.err then holds the reason. A part without usable
JSON is kept as its exit code and the end of its output. With `--bars` the figures are compared with
bars.toml, and a table of them is written beside the JSON.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import bars

REPOSITORY = Path(__file__).resolve().parent.parent
GPU_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "compute_cap", "power.limit", "clocks.max.sm")


def said(*line, env=None):
    """Returns the stdout of a short command, or an empty text if it fails."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, cwd=REPOSITORY, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def field(path, name):
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == name), None)


def gpus():
    table = said("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    return [dict(zip(GPU_FIELDS, map(str.strip, row.split(",")))) for row in (table or "").splitlines()]


def packages(python):
    """Returns the versions of PEFT's packages, without importing them."""
    code = (
        "import importlib.metadata as m, json\n"
        "v = {}\n"
        "for p in ('torch', 'transformers', 'peft', 'bitsandbytes'):\n"
        "    try: v[p] = m.version(p)\n"
        "    except m.PackageNotFoundError: v[p] = None\n"
        "print(json.dumps(v))"
    )
    return json.loads(said(python, "-c", code) or "{}")


def facts(args):
    binary = Path(args.binary)
    commit = os.environ.get("FINETUNE_COMMIT") or said("git", "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": bool(said("git", "status", "--porcelain", "--untracked-files=no")),
        "binary": {
            "version": said(binary.resolve(), "--version"),
            "sha256": hashlib.sha256(binary.read_bytes()).hexdigest(),
            "bytes": binary.stat().st_size,
        },
        "machine": {
            "cpu": field("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "memory": field("/proc/meminfo", "MemTotal"),
            "load_average": os.getloadavg(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "packages": packages(args.python),
            "gpus": gpus(),
        },
    }


def tail(path):
    return path.read_text(errors="replace")[-4000:] if path.is_file() else ""


def part(folder, name):
    code = tail(folder / f"{name}.rc").strip()
    if code in ("skipped", "no time"):
        return {"exit_code": None, "ok": code == "skipped", "why": tail(folder / f"{name}.err").strip()}
    result = {"exit_code": int(code) if code else None, "ok": code == "0"}
    if secs := tail(folder / f"{name}.secs").strip():
        result["secs"] = int(secs)
    if code == "124":
        result["why"] = "stopped at its time limit"
    if code != "0":
        result["stderr"] = tail(folder / f"{name}.err")
    try:
        return result | {"result": json.loads((folder / f"{name}.json").read_text())}
    except (OSError, ValueError):
        return result | {"stdout": tail(folder / f"{name}.json"), "stderr": tail(folder / f"{name}.err")}


def print_summaries(parts):
    for name, found in parts.items():
        print(f"{name}: {'ok' if found['ok'] else 'FAILED'}")
        for figure, values in (found.get("result") or {}).get("summary", {}).items():
            print(f"  {figure}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items() if v is not None))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bars", help="the part of gpu.sh whose bars these figures are held against")
    args = parser.parse_args()
    names = sorted((p.stem for p in args.parts.glob("*.rc")), key=lambda name: (args.parts / f"{name}.rc").stat().st_mtime)
    parts = {name: part(args.parts, name) for name in names}
    found = facts(args) | {"parts": parts}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.bars:
        card = next((gpu["name"] for gpu in found["machine"]["gpus"]), None)
        dry = bool(os.environ.get("GPU_SH_DRY"))
        found |= {"part": args.bars, "dry_run": dry, "bars": bars.judged(args.bars, parts, card, dry)}
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.bars:
        text = bars.report(found)
        args.out.with_suffix(".md").write_text(text)
        print(text)
    else:
        print_summaries(parts)
    sys.exit(0 if all(part["ok"] for part in parts.values()) else 1)


if __name__ == "__main__":
    main()
