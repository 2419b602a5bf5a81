"""Writes the tokenization cases of TRL 1.16's preference trainers as tests/golden/preference/tokenize.json: for each
answer its ids without padding, and the number of ids before the answer.

    python trim_preference.py FIXTURES/golden/preference tests/golden/preference
"""
import json
import pathlib
import sys

source, target = map(pathlib.Path, sys.argv[1:])


def unpadded(ids, attention):
    return [id for id, seen in zip(ids, attention) if seen]


def example(role, ids, attention, answer):
    ids = unpadded(ids, attention)
    answer = answer[: len(ids)]
    prompt = len(ids) - sum(answer)
    assert answer == [0] * prompt + [1] * (len(ids) - prompt), role
    return {"role": role, "ids": ids, "prompt": prompt}


def pairs(batch):
    """The sides of each pair: DPO's batches hold all chosen rows, then all rejected ones."""
    half = len(batch["input_ids"]) // 2
    for row in range(half):
        for role, at in (("chosen", row), ("rejected", half + row)):
            yield example(role, batch["input_ids"][at], batch["attention_mask"][at], batch["completion_mask"][at])


def labelled(batch):
    for row, label in enumerate(batch["label"]):
        for role, key in (("desirable" if label else "undesirable", ""), ("mismatched", "KL_")):
            names = ("input_ids", "attention_mask", "completion_mask")
            yield example(role, *(batch[f"{key}{name}"][row] for name in names))


def labels(batch):
    """The sides of ORPO and CPO, whose labels are -100 before the answer."""
    for row in range(len(batch["chosen_input_ids"])):
        for role in ("chosen", "rejected"):
            ids, attention, marks = (
                batch[f"{role}_{name}"][row] for name in ("input_ids", "attention_mask", "labels")
            )
            yield example(role, ids, attention, [int(mark != -100) for mark in marks])


READERS = {"dpo": pairs, "kto": labelled, "orpo": labels, "cpo": labels}
cases = []
for trainer, read in READERS.items():
    for case in json.loads((source / "tokenize" / f"{trainer}.json").read_text()):
        kept = {key: case[key] for key in ("name", "trainer", "model", "args", "rows")}
        kept["examples"] = list(read(case["batch"])) if case.get("batch") else []
        if "error" in case:
            kept["error"] = case["error"]
        cases.append(kept)
target.mkdir(parents=True, exist_ok=True)
lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
(target / "tokenize.json").write_text(f"[\n{lines}\n]\n")
