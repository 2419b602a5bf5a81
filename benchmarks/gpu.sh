#!/usr/bin/env bash
# What a machine with an NVIDIA GPU is asked once it has the binary: every op against its reference, the golden trajectories,
# two ranks on the one GPU over NCCL (two processes, see two_ranks.py) beside one rank, and LoRA on a Qwen3-0.6B shape beside
# PEFT. Needs Python 3, no Rust and no network; under thirteen minutes.
#
#     benchmarks/gpu.sh BINARY OUT_DIR
#
# OUT_DIR/gpu.json gets everything, with the facts of the machine; OUT_DIR/parts/ what each part said. A part that fails or
# runs over its time is recorded, the rest goes on, and the exit code is 1 at the end.
#   PYTHON=python3      the interpreter, with torch, transformers and peft for PEFT's half
#   FINETUNE_COMMIT=…   the commit of the binary, where there is no git
#   GPU_SH_DRY=1        the same on the CPU with a tiny shape, to try the script out
set -uo pipefail

if [ $# -ne 2 ] || [ ! -x "$1" ]; then
    echo "usage: benchmarks/gpu.sh BINARY OUT_DIR" >&2
    exit 2
fi
binary=$(realpath "$1")
mkdir -p "$2/parts" || exit 1
out=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 CARGO_TERM_COLOR=never
rm -f "$out"/parts/*

# A toolkit's libraries may be there as the wheels that PyTorch brings, where the loader does not look.
if ldd "$binary" 2>/dev/null | grep -q 'not found'; then
    wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
    for folder in "$wheels"/*/lib /usr/local/cuda/lib64; do
        [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    done
    export LD_LIBRARY_PATH
fi

# part NAME SECONDS COMMAND...: runs it under the limit and keeps what it says.
part() {
    local name=$1 limit=$2
    shift 2
    echo "gpu.sh: $name (at most $limit s)" >&2
    timeout --kill-after=5 "$limit" "$@" >"$out/parts/$name.json" 2>"$out/parts/$name.err"
    echo $? >"$out/parts/$name.rc"
}

if [ -n "${GPU_SH_DRY:-}" ]; then
    device=(--device cpu --shape tiny --dtype f32 --seq 64 --micro-batch 2 --steps 4 --warmup 1)
    golden=()
    shared=()
else
    device=(--device cuda --shape 0.6b --dtype bf16 --seq 2048 --micro-batch 2 --accumulation 2 --steps 10 --warmup 3)
    golden=(--gpus 0)
    shared=(--gpu 0)
    part facts 20 nvidia-smi
fi
part libraries 20 ldd "$binary"
part doctor 30 "$binary" doctor
part selftest 90 "$binary" doctor --selftest
part golden 120 "$python" "$here/golden.py" --binary "$binary" --timeout 30 ${golden[@]+"${golden[@]}"}
part two_ranks 200 "$python" "$here/two_ranks.py" --binary "$binary" --timeout 40 ${shared[@]+"${shared[@]}"}
part lora 250 "$python" "$here/side_by_side.py" --binary "$binary" --mode lora "${device[@]}" --timeout 120

exec "$python" "$here/collect.py" --binary "$binary" --python "$python" --parts "$out/parts" --out "$out/gpu.json"
