#!/usr/bin/env bash
# Checks the build with feature `cuda` on a machine without a GPU. After `. scripts/cuda-env.sh`:
#
#     scripts/check_cuda_binary.sh target/debug/finetune
#
# Without a driver the loader names the missing library. With the stub libraries of cuda-env.sh,
# which report no device, the binary starts, `doctor` shows the missing GPU, a run on a GPU is
# refused with one error, and a step trains on the CPU.
set -euo pipefail
binary=$(realpath "$1")
stubs="${CUDA_HOME:?source scripts/cuda-env.sh first}/lib64/stubs"
if [[ ! -e $stubs/libcuda.so.1 ]]; then
    printf 'SKIPPED what the CUDA build does without a GPU: %s holds no stub of the driver\n' "$stubs"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
    printf '%s: %s\n' "$0" "$1" >&2
    cat "$scratch/said" >&2
    exit 1
}

# Runs the binary; its exit code must be the first argument. Keeps the output for `says`.
expect() {
    local wanted=$1 code=0
    shift
    "$@" >"$scratch/said" 2>&1 || code=$?
    ((code == wanted)) || fail "exit code $code instead of $wanted of: $*"
}

says() {
    grep -Eq -- "$1" "$scratch/said" || fail "no line says: $1"
}

if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
    expect 127 env -u LD_LIBRARY_PATH "$binary" --version
    says 'libcuda\.so\.1|libcublas|libcurand|libcudart'
fi

export LD_LIBRARY_PATH="$CUDA_HOME/lib64:$stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
expect 0 "$binary" doctor
says '^build +CPU and CUDA'
says '^GPU +none: the driver sees no device'
says '^GPU libraries +found: .*libcuda\.so'
cat "$scratch/said"

expect 1 "$binary" --recipe quickstart --set train.max_steps=1 --gpus 0 --output "$scratch/gpu"
(($(grep -c '^error: ' "$scratch/said") == 1)) || fail 'more than one error'
says '^error: cannot use GPU 0$'
says '^  caused by: the NVIDIA driver finds no GPU in this machine$'
says '^hint: '
[[ ! -e $scratch/gpu ]] || fail 'a refused run left an output folder'
cat "$scratch/said"

expect 0 "$binary" --quiet --recipe quickstart --set train.max_steps=1 --output "$scratch/cpu"
[[ -s $scratch/cpu/adapter_model.safetensors ]] || fail 'the step on the CPU left no adapter'
echo 'without a GPU: refused in one error; a step on the CPU trained'
