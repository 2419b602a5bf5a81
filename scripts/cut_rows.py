#!/usr/bin/env python3
"""Cuts a small data set into many short rows, for scripts/recipes_learn.py.

  scripts/cut_rows.py SET > ROWS.jsonl

A .txt file gives a row of `text` for each two lines, rows of `text` one for each sentence, and rows
of `messages` one of `prompt` and `completion` for each turn, which answers the turn before it.
"""

import json
import pathlib
import re
import sys


def rows_of(path):
    """Yields the rows of a data set."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        lines = [line for line in text.splitlines() if line.strip()]
        for first, second in zip(lines[::2], lines[1::2]):
            yield {"text": f"{first}\n{second}"}
        return
    for row in map(json.loads, text.splitlines()):
        if "text" in row:
            yield from ({"text": part} for part in re.split(r"(?<=[.!?])\s+", row["text"]) if len(part) > 1)
            continue
        turns = [message["content"] for message in row["messages"] if message["content"].strip()]
        for before, turn in zip(turns, turns[1:]):
            yield {"prompt": f"{before}\n", "completion": turn}


for row in rows_of(pathlib.Path(sys.argv[1])):
    print(json.dumps(row, ensure_ascii=False))
