#!/usr/bin/env bash
# Ranks on the CPU, one thread each, beside PyTorch DDP and FSDP over gloo: same shape, same run.
#
#     benchmarks/scaling.sh BINARY OUT.json        PYTHON=python3 with torch, transformers and peft
#     SHAPE=135m SEQ=512 STEPS=6 RANKS=2 MODES="lora full" STRATEGIES="ddp fsdp"
#     SETTINGS="--set train.recompute=block ..."   of finetune's rows instead of recompute=none;
#                                                  TORCH=no omits PyTorch
#
# Each line of OUT.json is one side of one row; peak_rss_bytes is the sum over all ranks.
set -euo pipefail
binary=$(realpath "$1")
out=$(realpath -m "$2")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
shape=${SHAPE:-135m} seq=${SEQ:-512} steps=${STEPS:-6} ranks=${RANKS:-2}
read -ra settings <<<"${SETTINGS:---set train.recompute=none}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$here HF_HUB_OFFLINE=1
"$python" -c "from pathlib import Path; from shapes import write_model; write_model(Path('$scratch/m'), '$shape', $seq, $((2 + steps)) * $ranks)"
: >"$out"
for mode in ${MODES:-lora full}; do
    adapter=()
    [ "$mode" = full ] || adapter=(--set adapter.r=16 --set adapter.lora_alpha=32)
    for strategy in ${STRATEGIES:-ddp fsdp}; do
        for count in 1 $ranks; do
            [ "$count" = 1 ] && [ "$strategy" != ddp ] && continue
            /usr/bin/time -f '%M' -o "$scratch/rss" "$binary" bench scaling --model "$scratch/m" --dataset "$scratch/m/text.jsonl" \
                --ranks "$count" --threads 1 --steps "$steps" --json --quiet --offline \
                --set model.init=random --set model.dtype=f32 --set data.format=text --set data.packing=false \
                --set data.shuffle=false --set data.max_seq_len="$seq" --set optimizer.learning_rate=1e-4 \
                "${settings[@]}" --set parallel.strategy="$strategy" ${adapter[@]+"${adapter[@]}"} >"$scratch/ours"
            "$python" - "$scratch/ours" "$(cat "$scratch/rss")" "$mode" "${settings[*]}" >>"$out" <<'PY'
import json, sys
row = json.load(open(sys.argv[1]))[0] | {"side": "finetune", "mode": sys.argv[3], "settings": sys.argv[4], "peak_rss_bytes": int(sys.argv[2].split()[-1]) * 1024}
print(json.dumps(row))
PY
        done
        [ "${TORCH:-yes}" = no ] || "$python" "$here/torch_ranks.py" --strategy "$strategy" --ranks "$ranks" --shape "$shape" --mode "$mode" \
            --seq "$seq" --steps $((2 + steps)) 2>/dev/null | sed 's/^{/{"side": "torch", /' >>"$out"
    done
done
cat "$out"
