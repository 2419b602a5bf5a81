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
# The toolkit is CUDA 13.0, for drivers from release 580. `FINETUNE_CUDA=12` before the command
# makes it CUDA 12.4, for drivers from release 550: PyPI has no nvcc of CUDA 12, so it comes from
# Debian's package (87 MB, x86-64) and the headers from PyPI. Install that binary as
# `finetune-cuda12` beside `finetune`, which becomes the one that the driver supports.
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

# Installs wheels into the folder PY in one pip call: nvcc alone would pull parts of a newer
# release.
_finetune_cuda_wheels() {
    local py=$1 toolkit=$2
    shift 2
    [ -f "$py/.complete" ] && return 0
    if ! command -v python3 >/dev/null 2>&1; then
        _finetune_cuda_say "python3 is missing: install it, or set CUDA_HOME to a CUDA 13 toolkit and put its bin on the PATH"
        return 1
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        _finetune_cuda_say "python3 has no pip: install it (\`apt install python3-pip\`, or \`python3 -m ensurepip\`)"
        return 1
    fi
    _finetune_cuda_say "fetching CUDA $toolkit from PyPI into $py (once)"
    local new="$py.new.$$"
    rm -rf "$new"
    if ! python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile --target "$new" \
        "$@" >&2; then
        rm -rf "$new"
        _finetune_cuda_say "pip could not install CUDA $toolkit (x86-64 or arm64 Linux and the network are needed)"
        return 1
    fi
    : >"$new/.complete"
    rm -rf "$py"
    # Another shell may have installed it meanwhile; its copy is as good.
    mv -T "$new" "$py" 2>/dev/null || rm -rf "$new"
    [ -f "$py/.complete" ]
}

# Prints the packages of a toolkit: CUDA 13's are one folder, CUDA 12's have no compiler.
_finetune_cuda_packages() {
    case $1 in
    13.*) echo "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==$1" ;;
    12.4) echo nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-cccl-cu12==12.4.99 ;;
    esac
}

# Makes the folder `nvidia/cu12` of the wheels into what `nvidia/cu13` is: headers of all wheels in
# one folder, and nvcc of Debian's package, without its libraries.
_finetune_cuda_12() {
    local py=$1 cu12="$1/nvidia/cu12" deb="$1/toolkit.deb" name
    local url='https://deb.debian.org/debian/pool/non-free/n/nvidia-cuda-toolkit/nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb'
    local sha256=cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319
    [ -f "$cu12/.complete" ] && return 0
    _finetune_cuda_say "fetching nvcc 12.4 from deb.debian.org into $py (87 MB, once)"
    rm -rf "$cu12" "$py/deb"
    mkdir -p "$cu12/bin" "$cu12/nvvm/bin" "$cu12/include" "$cu12/lib" "$py/deb"
    if ! { curl -fsSL -o "$deb" "$url" && printf '%s  %s\n' "$sha256" "$deb" | sha256sum --check --status &&
        ar p "$deb" data.tar.xz | tar -xJ -C "$py/deb"; }; then
        _finetune_cuda_say "could not fetch and unpack $url (curl, ar, xz and the network are needed), or its SHA-256 is not $sha256"
        return 1
    fi
    local tools="$py/deb/usr/lib/nvidia-cuda-toolkit"
    for name in nvcc bin2c; do [ -f "$tools/bin/$name" ] && mv "$tools/bin/$name" "$cu12/bin/"; done
    for name in cudafe++ ptxas nvlink fatbinary cuobjdump nvdisasm; do mv "$py/deb/usr/bin/$name" "$cu12/bin/" || return 1; done
    mv "$tools/bin/cicc" "$cu12/nvvm/bin/" && mv "$tools/libdevice" "$cu12/nvvm/libdevice" || return 1
    # nvcc finds its parts by this file; Debian's own nvcc has other paths built in.
    # shellcheck disable=SC2016
    printf '%s\n' 'TOP = $(_HERE_)/..' 'CICC_PATH = $(TOP)/nvvm/bin' 'NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice' \
        'PATH += $(TOP)/nvvm/bin:$(_HERE_):' 'INCLUDES += "-I$(TOP)/include" $(_SPACE_)' \
        'LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"' 'CUDAFE_FLAGS +=' 'PTXAS_FLAGS +=' \
        >"$cu12/bin/nvcc.profile"
    for name in cuda_runtime cuda_nvcc cuda_cccl; do cp -r "$py/nvidia/$name/include/." "$cu12/include/" || return 1; done
    cp "$py/nvidia/cuda_runtime/lib/libcudart.so.12" "$cu12/lib/" || return 1
    rm -rf "$py/deb" "$deb"
    : >"$cu12/.complete"
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
    local home=$1 repository=$2 release=$3 sources name new="$1.new.$$"
    sources=$(_finetune_cuda_cudarc "$repository") || return 1
    [ "$(cat "$home/.complete" 2>/dev/null)" = "$sources" ] && return 0
    if ! command -v cc >/dev/null 2>&1; then
        _finetune_cuda_say "no C compiler: install one (\`apt install g++\`)"
        return 1
    fi
    rm -rf "$new"
    mkdir -p "$new/lib64/stubs"
    for name in bin nvvm include; do ln -s "../py/nvidia/cu$release/$name" "$new/$name"; done
    for name in libcudart.so "libcudart.so.$release"; do
        ln -s "../../py/nvidia/cu$release/lib/libcudart.so.$release" "$new/lib64/$name"
    done
    # 100 is CUDA_ERROR_NO_DEVICE, 1 CUBLAS_STATUS_NOT_INITIALIZED,
    # 101 CURAND_STATUS_NOT_INITIALIZED, 11 NVRTC_ERROR_INTERNAL_ERROR.
    local stubs="$new/lib64/stubs"
    if ! { _finetune_cuda_stub cuda libcuda.so.1 driver 100 "$sources" "$stubs" &&
        _finetune_cuda_stub cublas "libcublas.so.$release" cublas 1 "$sources" "$stubs" &&
        _finetune_cuda_stub cublasLt "libcublasLt.so.$release" cublaslt 1 "$sources" "$stubs" &&
        _finetune_cuda_stub curand libcurand.so.10 curand 101 "$sources" "$stubs" &&
        _finetune_cuda_stub nvrtc "libnvrtc.so.$release" nvrtc 11 "$sources" "$stubs"; }; then
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
    local toolkit release repository cache packages
    case ${FINETUNE_CUDA:-13} in
    13) toolkit=13.0.2 ;;
    12) toolkit=12.4 ;;
    *)
        _finetune_cuda_say "FINETUNE_CUDA is \`$FINETUNE_CUDA\`; accepted: 12, 13"
        return 1
        ;;
    esac
    release=${toolkit%%.*}
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    cache="${XDG_CACHE_HOME:-$HOME/.cache}/finetune-cuda/$toolkit"
    # A toolkit that this script installed is none of the user's own.
    if [ -n "${CUDA_HOME:-}" ] && [[ $CUDA_HOME != "${cache%/*}"/* ]] && command -v nvcc >/dev/null 2>&1; then
        NVCC=${NVCC:-$(command -v nvcc)}
    else
        mkdir -p "$cache" || return 1
        read -ra packages <<<"$(_finetune_cuda_packages "$toolkit")"
        _finetune_cuda_wheels "$cache/py" "$toolkit" "${packages[@]}" || return 1
        [ "$release" = 13 ] || _finetune_cuda_12 "$cache/py" || return 1
        _finetune_cuda_home "$cache/home" "$repository" "$release" || return 1
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
unset -f _finetune_cuda_say _finetune_cuda_wheels _finetune_cuda_packages _finetune_cuda_12 _finetune_cuda_stub _finetune_cuda_cudarc _finetune_cuda_home _finetune_cuda_env
if [ "$_finetune_cuda_status" -ne 0 ]; then
    unset _finetune_cuda_status
    # shellcheck disable=SC2317
    return 1 2>/dev/null || exit 1
fi
unset _finetune_cuda_status
