#!/usr/bin/env bash
# Make hash-locked requirements from the .in files:
#   scripts/lock.sh                          all of them; what still fits stays as it is locked
#   scripts/lock.sh spark-linux-arm64.txt …  these only
#   scripts/lock.sh --upgrade …              the newest versions that fit
# No version is taken in its first week, in which most malicious ones are found and removed, and no
# yanked one. An index that gives no upload times needs UV_EXCLUDE_NEWER= (empty): all are taken then.
# Needs .venv (any build.py command makes it), or another uv in UV. Packages come from the index and
# the folders that pip is configured for, where no variable of uv names others.
set -euo pipefail
fresh=
trap 'rm -f "$fresh"' EXIT
cd "$(dirname "$0")/.."

uv=${UV:-.venv/bin/uv}
found=$("${uv%/*}/python" -c 'from sparkforge.core.index import uv_variables
for name, value in uv_variables().items():
    print(f"{name}={value}")')
while IFS='=' read -r name value; do
  [[ -z $name ]] || export "$name=$value"
done <<<"$found"
: "${UV_EXCLUDE_NEWER=7 days}"
if [[ -n $UV_EXCLUDE_NEWER ]]; then export UV_EXCLUDE_NEWER; else unset UV_EXCLUDE_NEWER; fi
header='# Hash-locked; made by scripts/lock.sh. Do not edit.'

upgrade=()
if [[ ${1:-} == --upgrade ]]; then
  upgrade=(--upgrade)
  shift
fi
wanted=" $* "
made=' '

lock() { # lock INPUT OUTPUT OPTION...
  local input=$1 output=$2
  shift 2
  made+="$output "
  [[ $wanted == '  ' || $wanted == *" $output "* ]] || return 0
  fresh=$(mktemp)
  # uv keeps the versions of the file that it writes to, where they fit
  [[ ! -e requirements/$output ]] || cp "requirements/$output" "$fresh"
  local said
  if ! said=$("$uv" pip compile --generate-hashes --no-header --output-file "$fresh" \
    "${upgrade[@]}" "$@" "requirements/$input" 2>&1 >/dev/null) || [[ $said == *' is yanked'* ]]; then
    printf '%s\n%s: not locked\n' "$said" "$output" >&2
    exit 1
  fi
  { printf '%s\n' "$header"; cat "$fresh"; } >"requirements/$output"
  rm "$fresh"
  printf '%s: %s packages\n' "$output" "$(grep -c '^[a-z].*==' "requirements/$output")"
}

# the driver runs on every Python from 3.11 and on both platforms: universal
lock driver.in driver.txt --universal --python-version 3.11 --only-binary :all:
lock dev.in dev.txt --universal --python-version 3.11
# glibc 2.36: Debian 12, the oldest system that the cpu target is for
lock cpu.in cpu-linux-amd64.txt --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
  --only-binary :all:
# glibc 2.39: Ubuntu 24.04, the Spark's; FlashInfer and Triton come from our wheels, not from the lock
cuda() { # cuda OUTPUT PLATFORM
  lock spark.in "$1" --python-version 3.12 --python-platform "$2" --only-binary :all: \
    --no-emit-package flashinfer-python --no-emit-package triton
}
cuda spark-linux-arm64.txt aarch64-manylinux_2_39
cuda rtx-linux-amd64.txt x86_64-manylinux_2_39
# what reads machine code for `build.py proofs`, on either platform
lock proofs.in proofs.txt --universal --python-version 3.11 --only-binary :all:
# llama-benchy of `build.py bench`, on every Python of the driver
lock bench.in bench.txt --universal --python-version 3.11 --only-binary :all: \
  --excludes requirements/bench-excludes.txt
# the compiler of the stage kernels, on either platform
lock kernels.in kernels.txt --universal --python-version 3.11 --only-binary :all:
# the compiler of FlashInfer's modules, on either platform
lock packs.in packs.txt --universal --python-version 3.11 --only-binary :all:
# what wheels are compiled with (--wheels compile), in the Dockerfile's stage builder
lock builder-cpu.in builder-cpu-linux-amd64.txt --python-version 3.11 \
  --python-platform x86_64-manylinux_2_36 --only-binary :all:
builder() { # builder OUTPUT PLATFORM
  lock builder.in "$1" --python-version 3.12 --python-platform "$2" --only-binary :all:
}
builder builder-spark-linux-arm64.txt aarch64-manylinux_2_39
builder builder-rtx-linux-amd64.txt x86_64-manylinux_2_39
# the clients of tests/patches/test_clients.py
lock clients.in clients.txt --universal --python-version 3.11 --only-binary :all:
# what makes the docs site
lock site.in site.txt --universal --python-version 3.11 --only-binary :all:
# the agents of tests/patches/test_coding_agents.py, only by this name: package.json has their versions
made+='agents '
if [[ $wanted == *' agents '* ]]; then
  npm --prefix requirements/agents install --package-lock-only --ignore-scripts \
    --omit-lockfile-registry-resolved --before "$(date --date '7 days ago' +%F)"
fi
for name in $wanted; do
  if [[ $made != *" $name "* ]]; then
    printf '%s: no lock of that name; there are:%s\n' "$name" "$made" >&2
    exit 2
  fi
done
