#!/usr/bin/env bash
# Tests the matrix unit (AMX) on a machine without one: Linux under Bochs, which emulates a whole PC
# with a Sapphire Rapids processor, runs this project's tests with FINETUNE_CPU=amx.
#
#     scripts/emulate_amx.sh path/to/bochs path/to/vmlinuz [backends|ops|runtime|cli FILTER]...
#
# Needs, beside Rust and a C++ compiler:
# - Bochs of 2026-08-22 (commit 783b58fd6), built in its source folder, so that its BIOS is beside
#   it. scripts/bochs_amx.patch adds the part of the unit that Linux needs (XFD), and fixes how
#   Bochs stores tiles and rounds to bf16. In its folder `bochs`:
#       patch -p1 <.../scripts/bochs_amx.patch
#       ./configure --enable-x86-64 --enable-avx --enable-evex --enable-amx \
#           --enable-all-optimizations --with-nogui --disable-docbook && make
# - A kernel for x86-64 from 5.16 on that needs no modules for it: Debian's
#   linux-image-cloud-amd64 (6.1), unpacked.
# - Debian's busybox-static, cpio, isolinux, syslinux-common and xorriso (BUSYBOX, ISOLINUX and
#   SYSLINUX name other paths).
# One emulated core runs the tests, about a hundred times slower than the host. `backends`,
# `ops`, `runtime` and `cli` are test binaries, FILTER selects their tests; without arguments
# the tests listed below run.
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
bochs=$(realpath "$1") kernel=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
busybox=${BUSYBOX:-/bin/busybox}
isolinux=${ISOLINUX:-/usr/lib/ISOLINUX/isolinux.bin}
ldlinux=${SYSLINUX:-/usr/lib/syslinux/modules/bios}/ldlinux.c32
bios=${BXSHARE:-$(dirname "$bochs")/bios}
for file in "$busybox" "$isolinux" "$ldlinux" "$bios/BIOS-bochs-latest"; do
    [[ -e $file ]] || { echo "there is no $file" >&2; exit 2; }
done
[[ $# -gt 0 ]] || set -- \
    runtime instruction_set \
    backends packed_gemm \
    ops ops::attention \
    ops selftest::oracle \
    cli train::golden::lora_follows_peft \
    cli train::golden::qlora_follows_peft \
    cli train::golden::packed_products

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp} "$scratch/cd"
cp "$busybox" "$root/bin/busybox"

# Installs a binary without debug information, and its libraries, at their paths on the host.
put() {
    local library
    install -D "$1" "$root$1"
    strip -g "$root$1"
    while read -r library; do
        install -D "$library" "$root$library"
    done < <(ldd "$1" | grep -o '/[^ ]*')
}

# Prints the test binary that cargo builds with these arguments.
built() {
    local said
    said=$(cargo test --locked --no-run "$@" 2>&1) || { echo "$said" >&2; exit 1; }
    realpath "$(sed -n 's/.*Executable .* (\(.*\))$/\1/p' <<<"$said")"
}

backends=$(built --package finetune-backends --lib)
ops=$(built --package finetune-ops --lib)
runtime=$(built --package finetune-runtime --lib)
cli=$(built --test bin)
finetune=$(dirname "$cli")/../finetune
put "$backends"
put "$ops"
put "$runtime"
put "$cli"
put "$(realpath "$finetune")"
mkdir -p "$root$PWD/tests"
cp -r tests/golden "$root$PWD/tests/golden"

cat >"$root/init" <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev; mount -t tmpfs none /tmp
export PATH=/bin HOME=/tmp FINETUNE_CPU=amx
ip link set lo up
cd $PWD
dmesg -n 1
grep -m 1 'model name' /proc/cpuinfo
echo "flags: \$(grep -m 1 flags /proc/cpuinfo | grep -o 'amx_[a-z0-9]*\|avx512_bf16' | tr '\n' ' ')"
$(realpath "$finetune") doctor | grep '^instructions'
END
while [[ $# -ge 2 ]]; do
    case $1 in backends) binary=$backends ;; ops) binary=$ops ;; runtime) binary=$runtime ;; cli) binary=$cli ;; *) echo "none of backends, ops, runtime and cli: $1" >&2; exit 2 ;; esac
    [[ -n $("$binary" --list --format terse "$2") ]] || { echo "no test of $1 is called $2" >&2; exit 2; }
    printf 'echo "== %s"; %s --test-threads=1 %s || echo "FAILED: exit $?"\n' "$1 $2" "$binary" "$2" >>"$root/init"
    shift 2
done
cat >>"$root/init" <<'END'
echo '== the end'
sleep 1
poweroff -f
sleep 60
END
chmod +x "$root/init"

# clearcpuid: Bochs has fast short copies (FSRM) without fast strings (ERMS), which breaks this
# kernel's memmove.
cp "$kernel" "$scratch/cd/vmlinuz"
cp "$isolinux" "$ldlinux" "$scratch/cd/"
(cd "$root" && find . | cpio --quiet -o -H newc) >"$scratch/cd/initrd"
cat >"$scratch/cd/isolinux.cfg" <<'END'
default linux
prompt 0
noescape 1
timeout 1
label linux
    kernel vmlinuz
    append initrd=initrd console=ttyS0,115200 quiet mitigations=off nokaslr clearcpuid=fsrm audit=0 random.trust_cpu=on panic=-1 rdinit=/init
END
xorriso -as mkisofs -quiet -o "$scratch/cd.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
    -boot-info-table "$scratch/cd"
cat >"$scratch/bochsrc" <<END
plugin_ctrl: unmapped=1
cpu: model=sapphire_rapids, count=1, ips=100000000, cpuid_freq=ips, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=1024, host=1024
romimage: file=$bios/BIOS-bochs-latest, options=fastboot
vgaromimage: file=$bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path=$scratch/cd.iso, status=inserted
boot: cdrom
display_library: nogui
speaker: enabled=0
com1: enabled=1, mode=term, dev=/dev/tty
log: $scratch/log
panic: action=fatal
error: action=ignore
info: action=ignore
clock: sync=none
END
# `script` provides a terminal, to which Bochs writes the guest's serial output immediately.
SECONDS=0
script -qefc "$bochs -q -f $scratch/bochsrc" /dev/null </dev/null | while IFS= read -r line; do
    printf '%5d s  %s\n' "$SECONDS" "${line%$'\r'}"
done | tee "$scratch/said" || true
grep -q '== the end' "$scratch/said" || { tail -5 "$scratch/log" >&2; exit 1; }
! grep -q 'FAILED' "$scratch/said"
grep -q 'instructions .*amx' "$scratch/said"
