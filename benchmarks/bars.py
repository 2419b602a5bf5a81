"""Compares the figures of gpu.sh with bars.toml, and prints tables.

    python3 bars.py                    prints the bars
    python3 bars.py gpu/kernels.json   prints the figures of a part beside them

Standard library only (Python 3.11 or newer). The verdict on a figure is one of "target", "must"
(reached that, and not the target), "MISSED", "below the target" (where nothing is a must), "no bar"
(for this card), or the reason why it was not measured. The expected range has no verdict.
"""

import argparse
import json
import re
import tomllib
from pathlib import Path

BARS = Path(__file__).with_name("bars.toml")


def bars_of(part=None):
    """Returns the bars of one part, or all."""
    bars = tomllib.loads(BARS.read_text())["bar"]
    return [bar for bar in bars if part in (None, bar["part"])]


def source_of_expected():
    """Returns the source of the expected ranges."""
    return tomllib.loads(BARS.read_text())["expected_source"]


def at(tree, path):
    """Returns the value in `tree` under the keys `path`, joined by dots; of several paths the first
    that leads to a number."""
    for one in [path] if isinstance(path, str) else path:
        found = tree
        for key in one.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, (int, float)):
            return found
    return None


def for_card(bound, card):
    """Returns a bar's number or range, or the one for this card if the bar has one by card."""
    if not isinstance(bound, dict):
        return bound
    return next((value for name, value in bound.items() if name in (card or "")), None)


def verdict(value, must, target, at_most):
    def reached(bound):
        return value <= bound if at_most else value >= bound

    if target is not None and reached(target):
        return "target"
    if must is None:
        return "no bar" if target is None else "below the target"
    return "must" if reached(must) else "MISSED"


def why_not(step):
    """Returns the reason why a step has no figure."""
    if step is None:
        return "not run"
    if "why" in step:
        return step["why"]
    return "not in what the step printed" if step["ok"] else f"the step failed, exit code {step['exit_code']}"


def figures(bar, step):
    """Returns the figures of a bar, each with its name."""
    result = (step or {}).get("result") or {}
    if "op" not in bar:
        return [(bar["name"], at(result, bar["figure"]))]
    rows = [row for row in result.get("ops", [])
            if re.search(bar["op"], row["op"]) and re.search(bar.get("shape", ""), row["shape"])]  # fmt: skip
    named = [(f"{bar['name']}: {row['op']}, {row['shape']}, {row['dtype']}", at(row, bar["figure"])) for row in rows]
    return named or [(bar["name"], None)]


def judged(part, steps, card, dry):
    """Returns a row for each figure of the part's bars: name, value, unit, must, target, expected,
    at_most, verdict. Figures of a `dry` run, which only tries the scripts, have no verdict.
    """
    rows = []
    for bar in bars_of(part):
        step = steps.get(bar["step"])
        must, target, expected = (for_card(bar.get(bound), card) for bound in ("must", "target", "expected"))
        at_most = bar.get("at_most", False)
        for name, value in figures(bar, step):
            if value is None:
                said = why_not(step)
            else:
                said = "dry run" if dry else verdict(value, must, target, at_most)
            rows.append({"name": name, "step": bar["step"], "value": value, "unit": bar.get("unit", "tokens/s"), "must": must,
                         "target": target, "expected": expected, "at_most": at_most, "verdict": said})  # fmt: skip
    return rows


def shown(value, unit, sign=""):
    if value is None:
        return "–"
    if unit == "GB":
        value /= 1e9
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{sign}{digits} {unit}".strip()


def table(header, rows):
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines)


def expected_cell(row):
    """Returns the expected range, and how far off the figure is if that is twofold or more."""
    if row.get("expected") is None:
        return "–"
    (low, high), value = row["expected"], row["value"]
    off = max(low / value, value / high) if value else 0
    return f"{shown(low, '')} to {shown(high, row['unit'])}" + (f", off by {off:.1f}x" if off >= 2 else "")


def bars_table(rows):
    def cells(row):
        sign = "≤ " if row["at_most"] else "≥ "
        bounds = (shown(row[bound], row["unit"], sign) for bound in ("must", "target"))
        return [row["name"], shown(row["value"], row["unit"]), *bounds, expected_cell(row), row["verdict"]]

    expected = f"expected ({source_of_expected()})"
    return table(["figure", "measured", "must", "target", expected, "verdict"], map(cells, rows))


def ops_table(ops):
    """Returns the table of `finetune bench ops --json`, with the rates that its shares refer to."""
    def cells(row):
        rate = f"{row['gbps']:.0f} GB/s" if row.get("gbps") is not None else f"{row.get('tflops') or 0:.0f} TFLOP/s"
        share = f"{100 * row['share']:.0f} %" if row.get("share") is not None else "–"
        fastest = row.get("fastest_algorithm")
        other = f" (algorithm {fastest['number']}: {fastest['ms']:.3f})" if fastest else ""
        return [row["op"], row["shape"], row["dtype"], f"{row['ms']:.3f}{other}", rate, share]

    rates = f"{ops['device']}: copies {shown(ops['copy_gbps'], 'GB/s')}, products {shown(ops['gemm_tflops'], 'TFLOP/s')}"
    return rates + "\n\n" + table(["op", "shape", "type", "ms", "rate", "share"], map(cells, ops["ops"]))


def sides_table(steps):
    """Returns the table of comparisons with PEFT, as far as either side was measured."""
    def against(pair, unit):
        ratio = f" = {shown(pair['ratio'], 'x')}" if pair["ratio"] else ""
        return f"{shown(pair['ours'], unit)} : {shown(pair['peft'], unit)}{ratio}"

    rows = []
    for name, step in steps.items():
        for key, what in (("summary", name), ("summary_checkpointing", f"{name}, both with checkpointing")):
            found = (step.get("result") or {}).get(key)
            if found and (name.endswith("-peft") or key == "summary_checkpointing"):
                units = {"tokens_per_sec": "", "peak_bytes": "GB", "first_step_secs": "s"}
                rows.append([what, *(against(found[figure], unit) for figure, unit in units.items())])
    return table(["ours : PEFT", "tokens/s", "memory", "start to first step"], rows) if rows else ""


def steps_table(steps):
    def outcome(step):
        if step["ok"]:
            return "skipped: " + step["why"] if "why" in step else "ok"
        lines = step.get("stderr", "").strip().splitlines()
        # A program prints its error before the hints.
        said = next((line for line in lines if re.search(r"\berror\b", line)), lines[-1] if lines else "")[-200:]
        return "FAILED: " + (step.get("why") or f"exit code {step['exit_code']}") + (f": {said}" if said else "")

    rows = ([name, f"{step.get('secs', 0)} s", outcome(step)] for name, step in steps.items())
    return table(["step", "took", "outcome"], rows)


def notes(steps):
    """Returns the notes of the steps on their comparison."""
    return [f"- {name}: {note}" for name, step in steps.items() for note in ((step.get("result") or {}).get("notes") or [])]


def report(found):
    """Returns the report of a part as Markdown: its machine, bars, ops, notes and steps."""
    cards = ", ".join(gpu["name"] for gpu in found["machine"]["gpus"]) or "no NVIDIA GPU"
    blocks = [f"# {found['part']}\n\n{found['date']}, commit {found['commit']}, {cards}, {found['machine']['cpu']}"]
    if found["dry_run"]:
        blocks.append("A dry run on the CPU with a tiny model: no figure of a GPU.")
    if found["bars"]:
        blocks.append(bars_table(found["bars"]))
    results = ((step.get("result") or {}) for step in found["parts"].values())
    blocks += [ops_table(result) for result in results if "ops" in result]
    if sides := sides_table(found["parts"]):
        blocks.append(sides)
    if said := notes(found["parts"]):
        blocks.append("\n".join(said))
    return "\n\n".join([*blocks, steps_table(found["parts"])]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", nargs="?", type=Path, help="JSON of a part of gpu.sh; default: the bars alone")
    args = parser.parse_args()
    if args.found:
        print(report(json.loads(args.found.read_text())), end="")
        return
    for bar in bars_of():
        bounds = ", ".join(f"{bound} {bar[bound]}" for bound in ("must", "target", "expected") if bound in bar)
        print(f"{bar['part']}, {bar['step']}: {bar['name']}: {bounds}{' (at most)' if bar.get('at_most') else ''}")


if __name__ == "__main__":
    main()
