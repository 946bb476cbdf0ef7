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
  'Component: main' 2>/dev/null | awk '$2 !~ /-/ && !n++ {print $1}') # reads all: apt would end by SIGPIPE
rootfs=$work/rootfs

# What `debootstrap --second-stage` does for another machine, which takes 300 s of CPU under emulation:
# this machine's own dpkg unpacks, and programs of the same names stand in for the emulated ones that
# maintainer scripts start hundreds of times (60 s in all, with the first stage). Call it in a mount
# namespace of its own.
second_stage() {
  local package file libraries=/usr/lib/x86_64-linux-gnu
  declare -A deb
  declare -a all
  while read -r package file; do deb[$package]=$rootfs$file; done <"$rootfs/debootstrap/debpaths"
  while read -r package; do all+=("${deb[$package]}"); done < <(cat "$rootfs"/debootstrap/{required,base} | xargs -n 1)
  local unpack=(dpkg --root="$rootfs" --log=/dev/null --force-architecture --force-depends --force-overwrite
    --force-confold --force-unsafe-io)
  export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true
  # in a container, debootstrap's first stage leaves a link to /proc, and its second a folder
  [[ ! -L $rootfs/proc ]] || { rm "$rootfs/proc" && mkdir "$rootfs/proc"; }
  printf '%s\n' "$(dpkg --print-architecture)" "$arch" >"$rootfs/var/lib/dpkg/arch"
  ln -s mawk "$rootfs/usr/bin/awk"
  "${unpack[@]}" --install "${deb[base-passwd]}" # first: others name its users
  rm "$rootfs/usr/bin/awk"
  "${unpack[@]}" --unpack "${all[@]}"
  rm "$rootfs/var/lib/dpkg/arch"

  printf '#!/bin/sh\nexit 101\n' >"$rootfs/usr/sbin/policy-rc.d" # no service starts
  chmod 755 "$rootfs/usr/sbin/policy-rc.d"
  # it removes a /lib64 that its architecture has no use for
  [[ ! -e $rootfs/var/lib/dpkg/info/usr-is-merged.postinst ]] || chroot "$rootfs" dpkg --configure usr-is-merged
  mkdir "$rootfs/usr/lib64" "$rootfs$libraries"
  ln -s usr/lib64 "$rootfs/lib64"
  mount --bind /lib64 "$rootfs/usr/lib64"
  mount --bind "$libraries" "$rootfs$libraries"
  # not dpkg, whose own architecture is the one that packages are for, nor ldconfig
  for package in coreutils dash findutils grep mawk openssl perl-base python3.11-minimal sed; do
    while read -r file; do
      if [[ -f $file && ! -L $file && -f $rootfs$file && ! -L $rootfs$file ]]; then
        mount --bind "$file" "$rootfs$file"
      fi
    done < <(grep -E '^(/usr)?/bin/.' "$rootfs/var/lib/dpkg/info/$package.list")
  done
  chroot "$rootfs" dpkg --configure -a --force-confold --force-unsafe-io
}

bootstrap() {
  local foreign='' release
  # shellcheck source=/dev/null
  release=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
  # the suites that this was tried with; the programs that stand in are of the same one
  [[ $(dpkg --print-architecture),$arch,$release,$suite != amd64,arm64,bookworm,bookworm ]] || foreign=--foreign
  debootstrap $foreign --arch="$arch" --variant=minbase --include=ca-certificates,python3 "$suite" "$rootfs" \
    ${mirror:+"$mirror"} || return
  [[ -n $foreign ]] || return 0
  export -f second_stage
  export rootfs arch
  unshare --mount bash -euc second_stage || return
  rm "$rootfs/lib64" "$rootfs/usr/sbin/policy-rc.d" &&
    rmdir "$rootfs/usr/lib64" "$rootfs/usr/lib/x86_64-linux-gnu"
}
bootstrap >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; die "debootstrap $suite failed"; }

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
