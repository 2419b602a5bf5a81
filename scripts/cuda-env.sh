# Makes `cargo build --features cuda` work on a machine without GPU, driver and CUDA toolkit. Source
# it in bash:
#
#     . scripts/cuda-env.sh
#     cargo build --release --features cuda
#
# It exports CUDA_HOME, NVCC, PATH, CUDA_COMPUTE_CAP and CUDAFORGE_THREADS. An existing toolkit
# (CUDA_HOME set, nvcc on the PATH) is used as it is. Otherwise NVIDIA's own nvcc comes from PyPI
# (104 MB, once) into ~/.cache/finetune-cuda, in the layout of a toolkit, with stub libraries for
# linking: the wheels contain no libcuda, and the real cuBLAS alone is half a GB.
#
# CUDA_COMPUTE_CAP defaults to 80: its PTX runs on every GPU from Ampere on. 90 makes a binary for
# Hopper alone. A change of CUDA_HOME rebuilds candle, a change of CUDA_COMPUTE_CAP its kernels:
# keep both constant.
#
# To start the binary on this machine without a driver (the CPU works, a GPU is refused):
#     LD_LIBRARY_PATH="$CUDA_HOME/lib64:$CUDA_HOME/lib64/stubs" target/release/finetune --help
# Never do that on a machine with a GPU: the stubs would hide its driver.
#
# shellcheck shell=bash

_finetune_cuda_say() { printf 'cuda-env: %s\n' "$*" >&2; }

# Installs the wheels in one pip call: nvcc alone would pull parts of a newer release.
_finetune_cuda_wheels() {
    local py=$1 toolkit=$2
    [ -x "$py/nvidia/cu13/bin/nvcc" ] && [ -f "$py/.complete" ] && return 0
    if ! command -v python3 >/dev/null 2>&1; then
        _finetune_cuda_say "python3 is missing: install it, or set CUDA_HOME to a CUDA 13 toolkit and put its bin on the PATH"
        return 1
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        _finetune_cuda_say "python3 has no pip: install it (\`apt install python3-pip\`, or \`python3 -m ensurepip\`)"
        return 1
    fi
    _finetune_cuda_say "fetching nvcc $toolkit from PyPI into $py (104 MB, once)"
    local new="$py.new.$$"
    rm -rf "$new"
    if ! python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile --target "$new" \
        "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==$toolkit" >&2; then
        rm -rf "$new"
        _finetune_cuda_say "pip could not install cuda-toolkit $toolkit (x86-64 or arm64 Linux and the network are needed)"
        return 1
    fi
    : >"$new/.complete"
    rm -rf "$py"
    # Another shell may have installed it meanwhile; its copy is as good.
    mv -T "$new" "$py" 2>/dev/null || rm -rf "$new"
    [ -x "$py/nvidia/cu13/bin/nvcc" ]
}

# Makes a library NAME with the soname SONAME in which every function that cudarc binds for MODULE
# returns STATUS, an error of that library.
_finetune_cuda_stub() {
    local name=$1 soname=$2 module=$3 status=$4 sources=$5 out=$6
    grep -ohE 'pub (unsafe )?fn [A-Za-z0-9_]+' "$sources/$module/sys/mod.rs" | awk '{ print $NF }' | sort -u |
        grep -vE '^(is_culib_present|culib|load|from|new|default|fmt)$' |
        awk -v status="$status" '{ print "int " $1 "(void) { return " status "; }" }' >"$out/$name.c" || return 1
    cc -w -fno-builtin -shared -fPIC -Wl,-soname,"$soname" -o "$out/lib$name.so" "$out/$name.c" || return 1
    ln -sfn "lib$name.so" "$out/$soname"
}

# Prints the folder of the locked cudarc's sources, which list every linked symbol.
_finetune_cuda_cudarc() {
    local repository=$1 version folder
    version=$(awk '/^name = "cudarc"$/ { getline; gsub(/version = |"/, ""); print; exit }' "$repository/Cargo.lock")
    for _ in 1 2; do
        for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"cudarc-$version"/src; do
            [ -d "$folder" ] && printf '%s\n' "$folder" && return 0
        done
        cargo fetch --quiet --locked --manifest-path "$repository/Cargo.toml" >&2 || break
    done
    _finetune_cuda_say "no sources of cudarc $version: \`cargo fetch\` must work"
    return 1
}

# Makes a folder laid out like a toolkit: lib64 beside bin, unversioned names, stubs.
_finetune_cuda_home() {
    local home=$1 repository=$2 sources name new="$1.new.$$"
    sources=$(_finetune_cuda_cudarc "$repository") || return 1
    [ "$(cat "$home/.complete" 2>/dev/null)" = "$sources" ] && return 0
    if ! command -v cc >/dev/null 2>&1; then
        _finetune_cuda_say "no C compiler: install one (\`apt install g++\`)"
        return 1
    fi
    rm -rf "$new"
    mkdir -p "$new/lib64/stubs"
    for name in bin nvvm include; do ln -s "../py/nvidia/cu13/$name" "$new/$name"; done
    for name in libcudart.so libcudart.so.13; do ln -s ../../py/nvidia/cu13/lib/libcudart.so.13 "$new/lib64/$name"; done
    # 100 is CUDA_ERROR_NO_DEVICE, 1 CUBLAS_STATUS_NOT_INITIALIZED,
    # 101 CURAND_STATUS_NOT_INITIALIZED, 11 NVRTC_ERROR_INTERNAL_ERROR.
    local stubs="$new/lib64/stubs"
    if ! { _finetune_cuda_stub cuda libcuda.so.1 driver 100 "$sources" "$stubs" &&
        _finetune_cuda_stub cublas libcublas.so.13 cublas 1 "$sources" "$stubs" &&
        _finetune_cuda_stub cublasLt libcublasLt.so.13 cublaslt 1 "$sources" "$stubs" &&
        _finetune_cuda_stub curand libcurand.so.10 curand 101 "$sources" "$stubs" &&
        _finetune_cuda_stub nvrtc libnvrtc.so.13 nvrtc 11 "$sources" "$stubs"; }; then
        rm -rf "$new"
        _finetune_cuda_say "could not compile the stub libraries"
        return 1
    fi
    printf '%s\n' "$sources" >"$new/.complete"
    rm -rf "$home"
    mv -T "$new" "$home" 2>/dev/null || rm -rf "$new"
    [ -f "$home/.complete" ]
}

_finetune_cuda_env() {
    local toolkit=13.0.2 repository cache
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    cache="${XDG_CACHE_HOME:-$HOME/.cache}/finetune-cuda/$toolkit"
    if [ -n "${CUDA_HOME:-}" ] && [ "$CUDA_HOME" != "$cache/home" ] && command -v nvcc >/dev/null 2>&1; then
        NVCC=${NVCC:-$(command -v nvcc)}
    else
        mkdir -p "$cache" || return 1
        _finetune_cuda_wheels "$cache/py" "$toolkit" || return 1
        _finetune_cuda_home "$cache/home" "$repository" || return 1
        CUDA_HOME="$cache/home"
        NVCC="$CUDA_HOME/bin/nvcc"
        case ":$PATH:" in *":$CUDA_HOME/bin:"*) ;; *) PATH="$CUDA_HOME/bin:$PATH" ;; esac
    fi
    CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
    CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}
    export CUDA_HOME NVCC PATH CUDA_COMPUTE_CAP CUDAFORGE_THREADS
}

_finetune_cuda_status=0
_finetune_cuda_env || _finetune_cuda_status=1
unset -f _finetune_cuda_say _finetune_cuda_wheels _finetune_cuda_stub _finetune_cuda_cudarc _finetune_cuda_home _finetune_cuda_env
if [ "$_finetune_cuda_status" -ne 0 ]; then
    unset _finetune_cuda_status
    # shellcheck disable=SC2317
    return 1 2>/dev/null || exit 1
fi
unset _finetune_cuda_status
