"""Copies the runs of preference training that the tests repeat, from the output of
make_preference.py into tests/golden/preference: rows, batches, first adapters, losses, norms and
metrics.

    python make_preference.py --spec spec_preference_public.json --src FIXTURES \
        --out FIXTURES/golden/preference
    python trim_preference_runs.py FIXTURES/golden/preference tests/golden/preference
"""
import json
import pathlib
import shutil
import sys

KINDS = ["dpo", "orpo", "cpo", "kto"]
# Settings that finetune does not have, or means over the whole step that TRL takes over each
# micro-batch.
LEFT_OUT = [
    "dpo_sigmoid_smoothing_ignored",
    "dpo_truncate_end",
    "dpo_ragged",
    "dpo_accum3_rpo",
    "alphapo",
    "orpo_qwen3_accum3",
    "kto_accum3",
]
source, target = map(pathlib.Path, sys.argv[1:])
for folder in sorted(path.parent for kind in KINDS for path in source.glob(f"{kind}/*/trajectory.json")):
    if folder.name in LEFT_OUT:
        continue
    whole = json.loads((folder / "trajectory.json").read_text())
    kept = {key: whole[key] for key in ["run", "batches", "data", "pad_token_id"]}
    kept["steps"] = [{key: step[key] for key in ["loss", "lr", "grad_norm", "metrics"]} for step in whole["steps"]]
    into = target / folder.relative_to(source)
    into.mkdir(parents=True, exist_ok=True)
    (into / "trajectory.json").write_text(json.dumps(kept) + "\n")
    if (folder / "adapter_step0").exists():
        shutil.copytree(folder / "adapter_step0", into / "adapter_step0", dirs_exist_ok=True)
    for file in [whole["batches"], whole["data"]]:
        (target / file).parent.mkdir(exist_ok=True)
        shutil.copy(source / file, target / file)
