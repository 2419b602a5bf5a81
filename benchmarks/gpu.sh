#!/usr/bin/env bash
# Benchmarks the binary on a machine with an NVIDIA GPU, in parts of under nine minutes each. Needs
# Python 3.11, no Rust and no network. Run the parts in this order: an earlier one explains the
# failures of a later one.
#
#     benchmarks/gpu.sh BINARY OUT check     doctor, every op against its reference, the same under
#                                            compute-sanitizer
#     benchmarks/gpu.sh BINARY OUT kernels   golden trajectories in f32 and bf16; every op at the
#                                            shapes of an 8B model
#     benchmarks/gpu.sh BINARY OUT train     QLoRA, LoRA and full training of 0.6B to 8B shapes,
#                                            then beside PEFT
#     benchmarks/gpu.sh BINARY OUT ranks     two ranks on the one GPU over NCCL beside one rank:
#                                            values, no speed
#     benchmarks/gpu.sh BINARY OUT train lora-8b lora-8b-peft      only these steps of the part
#
# OUT/PART.json gets the figures with the facts of the machine, OUT/PART.md their tables beside the
# bars and the expected ranges of bars.toml, OUT/PART.tar.gz all output of the steps. OUT/probe.txt
# and OUT/trace are the probe's dump and the trace of two steps of QLoRA. A step that fails, exceeds
# its time or has no time left is recorded, and the rest continues. The exit code is 1 if there was
# such a step; a missed bar does not change it.
#   PYTHON=python3      the interpreter, with torch, transformers, safetensors and peft for train
#                       (and bitsandbytes, if available)
#   MODELS=FOLDER       keeps the models of random weights (28 GB, 16 of them the 8B one) between
#                       calls; default: in TMPDIR
#   SECS=530            time limit of the part
#   FINETUNE_COMMIT=…   the commit of the binary, if git is missing
#   GPU_SH_DRY=1        the same on the CPU with a tiny shape, to try the script
set -uo pipefail

usage() {
    echo "usage: benchmarks/gpu.sh BINARY OUT check|kernels|train|ranks [STEP...]; $1" >&2
    exit 2
}

[ $# -ge 3 ] || usage "three arguments are needed, $# are given"
[ -f "$1" ] && [ -x "$1" ] || usage "BINARY must be a program, $1 is none"
case $3 in check | kernels | train | ranks) ;; *) usage "there is no part \"$3\"" ;; esac
binary=$(realpath "$1")
part=$3
wanted=" ${*:4} "
mkdir -p "$2" || exit 1
out=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
models=${MODELS:-${TMPDIR:-/tmp}/finetune-benchmark-models}
until=${SECS:-530}
dry=${GPU_SH_DRY:-}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 CARGO_TERM_COLOR=never
"$python" -c 'import tomllib' 2>/dev/null || usage "PYTHON must be Python 3.11 or newer, $python is not"

scratch=$(mktemp -d) || exit 1
said=$scratch/said
mkdir "$said"
child=
trap 'rm -rf "$scratch"' EXIT
trap 'echo "gpu.sh: asked to stop" >&2; [ -z "$child" ] || kill "$child"; finish; exit 143' TERM INT

# A toolkit's libraries may exist only in PyTorch's wheels, and the driver's only in a folder that a
# container mounts: the loader looks in neither. A toolkit's stubs would hide the driver.
if ldd "$binary" 2>/dev/null | grep -q 'not found'; then
    wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
    for folder in ${wheels:+"$wheels"/*/lib} /usr/local/cuda/lib64 \
        /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib64-nvidia /usr/lib/wsl/lib; do
        [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    done
    export LD_LIBRARY_PATH
fi

is_wanted() {
    [ -z "${wanted// /}" ] || [[ $wanted == *" $1 "* ]]
}

# without NAME CODE WHY: records a step that was not started; CODE is "skipped", or "no time", which
# counts as a failure.
without() {
    is_wanted "$1" || return 0
    echo "gpu.sh: $1: $2, $3" >&2
    echo "$3" >"$said/$1.err"
    echo "$2" >"$said/$1.rc"
}

# step NAME SECONDS COMMAND...: runs the command under the limit, or the rest of the part's time,
# and keeps its output.
step() {
    local name=$1 limit=$2 start=$SECONDS left code
    shift 2
    is_wanted "$name" || return 0
    left=$((until - SECONDS))
    if [ "$left" -lt 10 ]; then
        without "$name" "no time" "the $until s of the part were used up; run it alone: gpu.sh BINARY OUT $part $name"
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "gpu.sh: $name (at most $limit s)" >&2
    # In the background, so that the shell handles signals while it runs.
    timeout --kill-after=5 "$limit" "$@" >"$said/$name.json" 2>"$said/$name.err" &
    child=$!
    wait "$child"
    code=$?
    child=
    echo $((SECONDS - start)) >"$said/$name.secs"
    # A program that ignores the limit's first signal is killed by the second.
    [ "$code" -ne 137 ] || [ $((SECONDS - start)) -lt "$limit" ] || code=124
    echo "$code" >"$said/$name.rc"
    [ "$code" -eq 0 ] || echo "gpu.sh: $name failed, exit code $code" >&2
}

check() {
    [ -n "$dry" ] || step facts 20 nvidia-smi
    step libraries 20 ldd "$binary"
    step doctor 30 "$binary" doctor
    # Receives the register contents that the instructions left, as a file of the part.
    local probe=(--probe "$out/probe.txt") kernel
    [ -z "$dry" ] || probe=()
    # Waits for each kernel, so that an error names the failing one.
    step selftest 100 env FINETUNE_CUDA_SYNC=1 "$binary" doctor --selftest ${probe[@]+"${probe[@]}"}
    sanitized memcheck memcheck
    sanitized racecheck racecheck
    # If all kernels take too long: those with the most barriers.
    for kernel in attention cross_entropy; do
        if [ "$(cat "$said/racecheck.rc" 2>/dev/null)" = 124 ] || [[ $wanted == *" racecheck-$kernel "* ]]; then
            sanitized "racecheck-$kernel" racecheck --kernel-name "kns=$kernel"
        fi
    done
}

# sanitized NAME TOOL OPTIONS...: the self-test under a tool of compute-sanitizer.
sanitized() {
    local name=$1 tool=$2 sanitizer
    shift 2
    sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
    if [ -n "$dry" ]; then
        without "$name" skipped "GPU_SH_DRY is set: nothing runs on a GPU"
    elif [ -z "$sanitizer" ]; then
        without "$name" skipped "compute-sanitizer, which comes with the CUDA toolkit, is not on PATH"
    else
        step "$name" 190 "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "$@" "$binary" doctor --selftest
    fi
}

kernels() {
    step doctor 30 "$binary" doctor
    local gpus=(--gpus 0) shapes=() long=(--tokens 8192 --max-seq-len 8192)
    if [ -n "$dry" ]; then
        gpus=() shapes=(--offline --model "$here/../tests/golden/models/tiny-llama" --tokens 64 --secs 0.02) long=()
    fi
    # The limits are the "must" bars (bars.toml).
    local golden=("$python" "$here/golden.py" --binary "$binary" --timeout 25 --limit 100 ${gpus[@]+"${gpus[@]}"})
    step golden-f32 110 "${golden[@]}" --dtype f32 --loss 1e-4
    step golden-bf16 110 "${golden[@]}" --dtype bf16 --loss 2e-2
    step ops 180 "$binary" bench ops --json ${gpus[@]+"${gpus[@]}"} ${shapes[@]+"${shapes[@]}"}
    # Attention over long rows, and the loss of equally many.
    step ops-8k 120 "$binary" bench ops --json ${gpus[@]+"${gpus[@]}"} ${shapes[@]+"${shapes[@]}"} ${long[@]+"${long[@]}"} \
        --only attention --only cross_entropy
    # Decides whether measured choices of cuBLASLt's algorithms would pay.
    if [ -n "$dry" ]; then
        without algorithms skipped "GPU_SH_DRY is set: nothing runs on a GPU"
    else
        step algorithms 90 "$binary" bench ops --json "${gpus[@]}" --algorithms 8 --only matmul
    fi
}

# model SHAPE SECONDS: makes its folder with random weights.
model() {
    step "model-$1" "$2" "$python" "$here/random_weights.py" --shape "$1" --folder "$models/$1" --device cuda
}

# row NAME SECONDS FLAGS...: one configuration, first with finetune's side alone, then with PEFT's.
row() {
    local name=$1 limit=$2 only=(--only ours)
    shift 2
    if [ "$turn" = second ]; then
        name=$name-peft only=()
    fi
    local line=("$python" "$here/side_by_side.py" --binary "$binary" --python "$python" --models "$models"
        --results "$scratch/results" --timeout 150 --device cuda --dtype bf16 --seq 2048 --micro-batch 2 --accumulation 4
        --steps 8 --warmup 3 "$@" ${only[@]+"${only[@]}"})
    [ -z "$dry" ] || line+=(--device cpu --shape tiny --dtype f32 --seq 64 --micro-batch 2 --accumulation 1 --steps 4 --warmup 1)
    # Ends by itself shortly before the limit, so that the measured figures are printed.
    local left=$((until - SECONDS))
    [ "$limit" -le "$left" ] || limit=$left
    step "$name" "$limit" "${line[@]}" --limit $((limit > 12 ? limit - 8 : 4))
}

train() {
    if [ -z "$dry" ]; then
        step facts 20 nvidia-smi
        model 8b 120
    else
        models=$scratch/models
    fi
    local turn big
    big=$(nvidia-smi --id=0 --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null)
    # finetune's side first: the bars apply to it. A run that several rows need is measured once.
    for turn in first second; do
        row qlora-8b 180 --shape 8b --mode qlora --trace "$out/trace"
        row qlora-8b-checkpointing 180 --shape 8b --mode qlora --checkpointing
        [ -n "$dry" ] || [ "$turn" = second ] || model 0.6b 60
        row lora-0.6b 120 --shape 0.6b --mode lora
        [ -n "$dry" ] || [ "$turn" = second ] || model 1.7b 60
        row full-1.7b 120 --shape 1.7b --mode full --seq 1024 --micro-batch 8 --end-after-steps
        row lora-8b 180 --shape 8b --mode lora
        [ -n "$dry" ] || [ "$turn" = second ] || model 3b 60
        row full-3b 150 --shape 3b --mode full --seq 1024 --micro-batch 8 --end-after-steps
        if [ -z "$dry" ] && [ "${big:-0}" -lt 100000 ]; then
            without "full-8b$([ "$turn" = first ] || echo -peft)" skipped "needs a GPU of over 100 GB, this one has ${big:-no} MiB"
        else
            row full-8b 180 --shape 8b --mode full --state int8 --seq 1024 --micro-batch 8 --end-after-steps
        fi
    done
}

ranks() {
    local gpu=(--gpu 0)
    [ -z "$dry" ] || gpu=()
    step doctor 30 "$binary" doctor
    step two-ranks 480 "$python" "$here/two_ranks.py" --binary "$binary" --timeout 55 ${gpu[@]+"${gpu[@]}"}
}

# Collects the figures; the exit code is 1 if a step failed.
finish() {
    if ! ls "$said"/*.rc >/dev/null 2>&1; then
        echo "gpu.sh: no step of $part was run; there is none of the name:$wanted" >&2
        return 2
    fi
    tar -C "$said" -czf "$out/$part.tar.gz" .
    "$python" "$here/collect.py" --binary "$binary" --python "$python" --parts "$said" --out "$out/$part.json" --bars "$part"
}

"$part"
finish
