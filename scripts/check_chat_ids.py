#!/usr/bin/env python3
"""Compares the ids of whole chats with those of transformers: same rows, same template.

    scripts/check_chat_ids.py target/debug/finetune MODEL... -- ROWS.jsonl...

The rows have `messages`, or `question` and `answer`, or `instruction` and `response`, which both
sides take for a user's and an assistant's turn. Each row of each set goes through `finetune data
--tokens` and through `apply_chat_template` of transformers with the tokenizer of each model. An EOS
that finetune adds after a template without one is allowed. A row that a template refuses must be
refused by both. Needs Python with transformers. The exit status is 1 if a row differs.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

PAIRS = [("question", "answer"), ("instruction", "response")]
ROWS = 100


def messages_of(row):
    """Returns the chat of a row."""
    if "messages" in row:
        return row["messages"]
    ask, answer = next(pair for pair in PAIRS if pair[0] in row)
    return [{"role": "user", "content": row[ask]}, {"role": "assistant", "content": row[answer]}]


def ids_of(binary, model, rows):
    """Returns the ids of each row by its number, and the numbers of rows that finetune refuses."""
    command = [binary, "data", "--offline", "--model", model, "--dataset", rows, "--tokens", "--rows", "1000000",
               "--set", "data.max_seq_len=100000", "--set", "data.on_bad_row=skip"]
    done = subprocess.run(command, capture_output=True, text=True)
    found, at = {}, None
    for line in done.stdout.splitlines():
        if head := re.match(r"row \d+, .*:(\d+): ", line):
            at = int(head[1]) - 1
            found[at] = []
        elif at is not None and (token := re.match(r"\s+\d+\s+(\d+)  (?:train|     )  ", line)):
            found[at].append(int(token[1]))
    return found


def main():
    """Prints a line for each model and set; returns the exit status."""
    binary, split = Path(sys.argv[1]).resolve(), sys.argv.index("--")
    differ = 0
    for model in map(Path, sys.argv[2:split]):
        tokenizer = AutoTokenizer.from_pretrained(model)
        for data in map(Path, sys.argv[split + 1:]):
            rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:ROWS]]
            chats = [messages_of(row) for row in rows]
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.jsonl"
                path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
                found = ids_of(binary, model, path)
            same = refused = 0
            for at, chat in enumerate(chats):
                try:
                    wanted = tokenizer.apply_chat_template(chat, return_dict=False)
                except Exception:  # Any error that a template raises.
                    wanted = None
                ours = found.get(at)
                if wanted is None and ours is None:
                    refused += 1
                elif wanted is not None and ours is not None and wanted in (ours, ours[:-1]):
                    same += 1
                else:
                    differ += 1
            print(f"{model.name:<16}{data.name:<28}{same:>5} same {refused:>5} refused by both, of {len(chats)}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
