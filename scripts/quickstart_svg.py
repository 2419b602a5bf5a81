#!/usr/bin/env python3
"""Draws docs/quickstart.svg: the loss of a run over its steps, and the planned memory of a step by
cause.

    finetune --recipe quickstart --output out 2> out.log
    python3 scripts/quickstart_svg.py out/metrics.jsonl out.log > docs/quickstart.svg

Reads the run's metrics and its printed line "memory of a step: 57.6 MiB = weights 2.27 MiB + …".
Needs only Python 3.
"""

import json
import re
import sys
from pathlib import Path

WIDTH, HEIGHT = 560, 190
LEFT, TOP = 56, 34
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
COLOURS = ["#3b82c4", "#d9822b", "#7a9a3a", "#a05ab4", "#c0504d", "#2a9d8f", "#8c8c8c"]

STYLE = """
text{font:12px system-ui,sans-serif;fill:#777}.title{font-weight:600;font-size:13px}
.end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke:#888;stroke-opacity:.3}
.train{fill:none;stroke:#3b82c4;stroke-width:1.6}.held{fill:#d9822b}
"""


def read(metrics):
    """Returns (step, loss) of training, and of the held-out rows."""
    entries = [json.loads(line) for line in Path(metrics).read_text().splitlines()]
    train = [(e["step"], e["loss"]) for e in entries if "loss" in e]
    held = [(e["step"], e["eval_loss"]) for e in entries if "eval_loss" in e]
    if not train:
        sys.exit(f"{metrics} has no steps")
    return train, held


def memory(log):
    """Returns the total of the plan's line as text, and its parts as (cause, text, bytes)."""
    found = re.search(r"^memory of a step: (.+?) = (.+)$", Path(log).read_text(), re.M)
    if not found:
        sys.exit(f"{log} has no line `memory of a step: …`")
    parts = []
    for part in found[2].split(" + "):
        cause, number, unit = re.match(r"([a-z ]+?) ([\d.]+) ([KMG]?i?B)", part).groups()
        parts.append((cause, f"{number} {unit}", float(number) * UNITS[unit]))
    return found[1], parts


def loss_chart(train, held):
    last = max(step for step, _ in train + held)
    top = max(loss for _, loss in train + held)
    x = lambda step: LEFT + step / last * WIDTH
    y = lambda loss: TOP + (1 - loss / top) * HEIGHT
    out = [f'<text class="title" x="{LEFT}" y="18">Quickstart: loss over steps (nats per token)</text>']
    out.append(f'<text x="{LEFT + 350}" y="18"><tspan fill="#3b82c4">training</tspan>  '
               '<tspan fill="#d9822b">held-out rows (dots)</tspan></text>')
    for loss in range(0, int(top) + 1, 2):
        out.append(f'<path class="grid" d="M{LEFT} {y(loss):.1f}h{WIDTH}"/>'
                   f'<text class="end" x="{LEFT - 6}" y="{y(loss) + 4:.1f}">{loss}</text>')
    for step in range(0, last + 1, 50):
        out.append(f'<text class="mid" x="{x(step):.1f}" y="{TOP + HEIGHT + 18}">{step}</text>')
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in train)
    out.append(f'<polyline class="train" points="{line}"/>')
    for step, loss in held:
        anchor, shift = ("end", -8) if step > last / 2 else ("start", 8)
        out.append(f'<circle class="held" cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4"/>'
                   f'<text text-anchor="{anchor}" x="{x(step) + shift:.1f}" y="{y(loss) - 8:.1f}">{loss:.4f}</text>')
    return out


def memory_bar(total, parts):
    all_bytes = sum(size for _, _, size in parts)
    at, top = float(LEFT), TOP + HEIGHT + 62
    out = [f'<text class="title" x="{LEFT}" y="{top - 10}">Planned memory of a step: {total}</text>']
    for n, (cause, text, size) in enumerate(parts):
        width = size / all_bytes * WIDTH
        out.append(f'<rect x="{at:.1f}" y="{top}" width="{width:.1f}" height="20" fill="{COLOURS[n % len(COLOURS)]}"/>')
        at += width
        across, down = LEFT + n % 3 * 195, top + 40 + n // 3 * 18
        out.append(f'<rect x="{across}" y="{down - 9}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/>'
                   f'<text x="{across + 15}" y="{down}">{cause} {text}</text>')
    return out, top + 40 + (len(parts) - 1) // 3 * 18 + 12


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train, held = read(sys.argv[1])
    chart = loss_chart(train, held)
    bar, height = memory_bar(*memory(sys.argv[2]))
    width = LEFT + WIDTH + 16
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">')
    print(f"<style>{STYLE}</style>")
    print("\n".join(chart + bar))
    print("</svg>")


main()
