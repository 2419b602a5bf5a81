"""Writes the rows of the preference recipes from the questions of the tiny world: the same bytes on every machine.

    python3 datasets/make_pairs.py

- pairs-train.jsonl, pairs-heldout.jsonl: a story with a question, the right answer (`chosen`), and another value of the
  same kind (`rejected`).
- labelled-train.jsonl, labelled-heldout.jsonl: the same with one answer and its `label`.
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


def rows(split, first, count):
    """Question, right answer and wrong answer of `count` rows from `first` on."""
    lines = (FOLDER / f"questions-{split}.jsonl").read_text().splitlines()
    for line in lines[first : first + count]:
        question, answer = json.loads(line)["messages"]
        kind = next(kind for kind in KINDS if answer["content"] in kind)
        others = [value for value in kind if value != answer["content"]]
        wrong = others[number(question["content"], len(others))]
        yield question, answer, {"role": "assistant", "content": wrong}


def write(name, made):
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in made)
    (FOLDER / name).write_text(text)


def pairs(split, count):
    for question, answer, wrong in rows(split, 0, count):
        yield {"prompt": [question], "chosen": [answer], "rejected": [wrong]}


def labelled(split, first, count):
    for question, answer, wrong in rows(split, first, count):
        label = number(question["content"] + "label", 2) == 1
        yield {"prompt": [question], "completion": [answer if label else wrong], "label": label}


write("pairs-train.jsonl", pairs("train", 400))
write("pairs-heldout.jsonl", pairs("heldout", 80))
write("labelled-train.jsonl", labelled("train", 400, 400))
write("labelled-heldout.jsonl", labelled("heldout", 80, 70))
