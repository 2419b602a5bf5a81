"""Writes the rows of the preference recipes from the questions of the tiny world: the same bytes
on every machine.

    python3 datasets/make_pairs.py

- pairs-train.jsonl: a story with a question, the right answer (`chosen`), and another value of the
  same kind (`rejected`).
- labelled-train.jsonl: other stories, each with one answer and its `label`.
"""
import hashlib
import json
import pathlib

FOLDER = pathlib.Path(__file__).parent
KINDS = [
    "black blue green grey pink red white yellow".split(),
    "brave happy hungry lazy sad shy tired wet".split(),
    "two three four five six seven eight nine".split(),
    [f"in {town}" for town in "Cairo Delhi Lima Lund Oslo Paris Quito Rome".split()],
    "clay glass gold iron paper silver stone wood".split(),
]


def number(text, below):
    """A number below `below` that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % below


def rows(first, last):
    """Question, right answer and wrong answer of the rows from `first` to `last`."""
    for line in (FOLDER / "questions-train.jsonl").read_text().splitlines()[first:last]:
        question, answer = json.loads(line)["messages"]
        kind = next(kind for kind in KINDS if answer["content"] in kind)
        others = [value for value in kind if value != answer["content"]]
        wrong = others[number(question["content"], len(others))]
        yield question, answer, {"role": "assistant", "content": wrong}


def write(name, made):
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in made)
    (FOLDER / name).write_text(text)


def pairs(first, last):
    for question, answer, wrong in rows(first, last):
        yield {"prompt": [question], "chosen": [answer], "rejected": [wrong]}


def labelled(first, last):
    for question, answer, wrong in rows(first, last):
        label = number(question["content"] + "label", 2) == 1
        yield {"prompt": [question], "completion": [answer if label else wrong], "label": label}


write("pairs-train.jsonl", pairs(0, 400))
write("labelled-train.jsonl", labelled(400, 800))
