#!/usr/bin/env bash
# LoRA and full training of a 135M Llama shape on the CPU, alternating with PyTorch + PEFT; about
# ten minutes on two quiet cores.
#
#     cargo build --release
#     PYTHON=venv/bin/python benchmarks/cpu.sh target/release/finetune
#
# Writes benchmarks/results/DATE-cpu.json: tokens/s, peak memory, time to the first step, CPU time,
# and the ratios of finetune to PEFT.
#   PYTHON=python3   the interpreter, with torch, transformers and peft
#   OUT=FILE         the file for the figures
#   THREADS=2 ROUNDS=2 STEPS=8 SEQ=512 SHAPE=135m
#   RUNS="lora-f32 lora-f32-checkpointing lora-bf16 qlora-f32 qlora-f32-checkpointing full-f32
#         full-bf16 full-bf16-nomaster"; qlora also needs bitsandbytes. nomaster: bf16 weights
#         without f32 masters, like PEFT
set -uo pipefail

if [ $# -ne 1 ] || [ ! -x "$1" ]; then
    echo "usage: benchmarks/cpu.sh BINARY" >&2
    exit 2
fi
binary=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-$here/results/$(date +%F)-cpu.json}
export PYTHONDONTWRITEBYTECODE=1
if ! "$python" -c 'import torch, transformers, peft' 2>/dev/null; then
    echo "cpu.sh: $python has no torch, transformers and peft: set PYTHON to one that has" >&2
    exit 2
fi

runs=${RUNS:-lora-f32 lora-f32-checkpointing lora-bf16 qlora-f32 qlora-f32-checkpointing full-f32 full-bf16 full-bf16-nomaster}
for run in $runs; do
    if ! [[ $run =~ ^(lora|qlora|full)-(f32|bf16)(-checkpointing|-nomaster)?$ ]]; then
        echo "cpu.sh: RUNS has $run; accepted: lora, qlora or full, -f32 or -bf16, and -checkpointing or -nomaster" >&2
        exit 2
    fi
done
parts=$(mktemp -d) || exit 1
trap 'rm -rf "$parts"' EXIT
for run in $runs; do
    IFS=- read -r mode dtype option <<<"$run"
    master=f32
    [ "$option" = nomaster ] && master=none
    echo "cpu.sh: $run" >&2
    "$python" "$here/side_by_side.py" --binary "$binary" --device cpu --shape "${SHAPE:-135m}" --mode "$mode" --dtype "$dtype" \
        --seq "${SEQ:-512}" --steps "${STEPS:-8}" --rounds "${ROUNDS:-2}" --threads "${THREADS:-2}" \
        --master "$master" $([ "$option" = checkpointing ] && echo --checkpointing) >"$parts/$run.json" 2>"$parts/$run.err"
    echo $? >"$parts/$run.rc"
done
"$python" "$here/collect.py" --binary "$binary" --python "$python" --parts "$parts" --out "$out"
