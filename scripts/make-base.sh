#!/usr/bin/env bash
# A base image made from Debian's packages alone, for machines that reach no image registry.
#
#   scripts/make-base.sh [--arch ARCH] NAME [SUITE]     # SUITE: bookworm unless given; python3 is in it
#
# ARCH is Debian's name, amd64 or arm64; this machine's unless given. Another machine's programs run
# under emulation: apt-get install qemu-user-static (scripts/emulate.sh does all that is needed).
# Needs root, debootstrap and a running engine. The same packages give the same image id: times, order,
# owners and leftovers are fixed, and the image's own record is written here because `docker import`
# would put today's date in it.
set -euo pipefail
export LC_ALL=C

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 64; }
die() { printf 'make-base: error: %s\n' "$*" >&2; exit 1; }

arch=$(dpkg --print-architecture)
if [[ ${1:-} == --arch ]]; then
  [[ ${2:-} =~ ^(amd64|arm64)$ ]] || usage
  arch=$2
  shift 2
fi
[[ $# -ge 1 && $# -le 2 && $1 != -* ]] || usage
name=$1 suite=${2:-bookworm}
((EUID == 0)) || die "debootstrap makes device files and owners: run this as root"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"
docker version >/dev/null 2>&1 || die "no engine answers: see scripts/engine.sh"

work=$(mktemp -d)
# One file system: should a mount be left in the tree, what is behind it survives.
trap 'rm -rf --one-file-system "$work"' EXIT
umask 022

# The mirror this machine uses, if it is a Debian one; debootstrap knows a default.
# shellcheck disable=SC2016  # $(REPO_URI) is apt's own notation
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' 'Origin: Debian' \
  'Component: main' 2>/dev/null | awk '$2 !~ /-/ {print $1; exit}')
rootfs=$work/rootfs
debootstrap --arch="$arch" --variant=minbase --include=ca-certificates,python3 "$suite" "$rootfs" ${mirror:+"$mirror"} >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log" >&2; die "debootstrap $suite failed"; }

# Everything is dated no later than the suite's own release file. An older date would do for the image,
# but Python compares the date of a source with the one noted in its .pyc and would compile anew at
# every start.
epoch=$(sed -n 's/^Date: //p' "$rootfs"/var/lib/apt/lists/*_dists_"$suite"_*Release | head -n 1)
epoch=$(date -u -d "$epoch" +%s)
# The day an account's password was last changed: the day of the build.
sed -i -E "s/^([^:]*:[^:]*):[0-9]+:/\1:$((epoch / 86400)):/" "$rootfs"/etc/shadow*

# What differs from run to run or belongs to this machine, and what a container never reads.
rm -rf "$rootfs"/{debootstrap,var/cache/apt/*.bin,var/cache/apt/archives/*.deb,var/cache/ldconfig/aux-cache} \
  "$rootfs"/var/lib/apt/lists/* "$rootfs"/var/cache/debconf/*-old "$rootfs"/var/lib/dpkg/*-old \
  "$rootfs"/usr/share/{doc,man,info}/* "$rootfs"/etc/{hostname,resolv.conf}
find "$rootfs/var/log" -type f -delete
: >"$rootfs/etc/machine-id"
# Device files come from the engine.
find "$rootfs/dev" -mindepth 1 -delete

mkdir "$work/image"
tar --create --file "$work/image/layer.tar" --directory "$rootfs" --sort=name --numeric-owner \
  --mtime="@$epoch" --clamp-mtime --format=posix \
  --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime .
layer=$(sha256sum <"$work/image/layer.tar")
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
printf '{"architecture":"%s","os":"linux","created":"%s","config":{"Cmd":["/bin/sh"],"Env":["PATH=%s"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created":"%s","created_by":"debootstrap %s"}]}' \
  "$arch" "$created" /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  "${layer%% *}" "$created" "$suite" >"$work/image/config.json"
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" >"$work/image/manifest.json"
tar --create --directory "$work/image" --sort=name . | docker load
