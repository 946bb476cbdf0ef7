#!/usr/bin/env bash
# Let this machine run the programs of another one, to build its image here.
#
#   scripts/emulate.sh arm64                 # or amd64, on an arm64 machine; nothing where it is native
#
# Needs root on a Debian or Ubuntu machine. Installs QEMU's user mode from the distribution and has the
# kernel call it; the emulator is opened once for all, so containers need no copy of it.
set -euo pipefail
export LC_ALL=C

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 64; }
die() { printf 'emulate: error: %s\n' "$*" >&2; exit 1; }

[[ $# -eq 1 && $1 =~ ^(amd64|arm64)$ ]] || usage
[[ $(dpkg --print-architecture) != "$1" ]] || exit 0
case $1 in amd64) machine=x86_64 ;; arm64) machine=aarch64 ;; esac
handler=/proc/sys/fs/binfmt_misc/qemu-$machine
((EUID == 0)) || die "only root tells the kernel what runs a program: run this as root"

if ! command -v "qemu-$machine-static" >/dev/null || ! command -v update-binfmts >/dev/null; then
  log=$(mktemp)
  { apt-get -q update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends qemu-user-static binfmt-support; } \
    >"$log" 2>&1 || { tail -n 20 "$log" >&2; die "apt-get failed"; }
  rm "$log"
fi
# A machine without systemd, or a container, may lack the kernel's table.
[[ -e /proc/sys/fs/binfmt_misc/register ]] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc ||
  die "the kernel has no binfmt_misc"
[[ -e $handler ]] || update-binfmts --enable "qemu-$machine"
# F: the interpreter is opened now; without it, a container would look for it in its own files.
grep -q '^flags:.*F' "$handler" || die "$handler: its flags lack F: remove it (echo -1 >$handler) and run this again"
printf 'emulate: programs for %s run here\n' "$1" >&2
