#!/usr/bin/env bash
# A Docker Engine of one's own, for CI and for machines that have none.
#
#   eval "$(scripts/engine.sh start DIR)"    # prints export lines for DOCKER_HOST, DOCKER_CONFIG, PATH
#   scripts/engine.sh stop DIR               # containers end, mounts and rules go, images stay in DIR
#   scripts/engine.sh env DIR                # the export lines of an engine that runs already
#
# Needs root on a Debian machine. Everything of it (programs, sockets, images, logs) lies in DIR; no
# package of the engine is installed, no file under /etc is written, and another engine on the machine
# keeps its bridge, its firewall chains and its containers.
set -euo pipefail
export LC_ALL=C

# Two cold builds give the same digest only with the containerd image store and the exporter's
# rewrite-timestamp, which older suites' engines lack.
readonly ENGINE_SUITE=trixie
# cosign and docker-registry: for what is signed and pushed; nothing of the engine needs them.
readonly ENGINE_PACKAGES=(docker.io docker-cli containerd docker-buildx docker-compose tini cosign docker-registry)
# What the engine calls or links to but is part of the system: installed when missing.
# debootstrap is for make-base.sh, which is used together with this engine.
readonly SYSTEM_PACKAGES=(ca-certificates debootstrap iproute2 iptables libseccomp2 libsystemd0)
readonly START_SECONDS=60 STOP_SECONDS=40

log() { printf 'engine: %s\n' "$*" >&2; }
die() { log "error: $*"; exit 1; }
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 64; }

# --- programs -------------------------------------------------------------------------------------

install_system_packages() {
  local package missing=()
  for package in "${SYSTEM_PACKAGES[@]}"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  log "installing ${missing[*]}"
  # Lists may be absent on a fresh machine; without them apt finds nothing.
  { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "${missing[@]}"; } \
    >"$dir/log/apt.log" 2>&1 || die "apt-get failed, see $dir/log/apt.log"
}

# Debian's own entries of this machine ("Origin: Debian" keeps third parties out), with the suite of $1
# in place of the machine's: its mirror and proxy settings go on working, and no host name needs to
# stand in this file.
debian_sources() {
  local suite=$1 codename=$2 part mirror options='' keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [[ ! -e $keyring ]] || options="[signed-by=$keyring] "
  for part in '' -updates -security; do
    # shellcheck disable=SC2016  # $(REPO_URI) is apt's own notation
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
      "Codename: $codename$part" 'Component: main' | sort -u)
    [[ -z $mirror ]] || printf "deb $options%s $suite$part main\n" "$mirror"
  done >"$dir/apt/sources.d/$suite.list"
  [[ -s $dir/apt/sources.d/$suite.list ]]
}

fetch_programs() {
  [[ -e $root/.complete ]] && return 0
  local codename deb apt program
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
  rm -rf "$root" "$dir/apt"
  mkdir -p "$root" "$dir"/apt/{sources.d,lists/partial,cache/archives/partial,debs}
  # A fresh machine has no lists, and without them apt cannot tell whose an entry is.
  debian_sources "$codename" "$codename" || apt-get -q update >"$dir/log/apt.log" 2>&1 ||
    log "apt-get update failed, see $dir/log/apt.log; trying with the lists that are there"
  { debian_sources "$codename" "$codename" && debian_sources "$ENGINE_SUITE" "$codename"; } ||
    die "no apt source of Debian on this machine to take the engine of $ENGINE_SUITE from"
  apt=(apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$dir/apt/sources.d"
    -o Dir::State::lists="$dir/apt/lists" -o Dir::Cache="$dir/apt/cache"
    -o APT::Sandbox::User=root) # apt's own user may not enter DIR
  log "fetching the engine of Debian $ENGINE_SUITE"
  # runc alone is linked to the C library's newest symbols: it comes from the machine's own suite.
  { "${apt[@]}" update &&
    (cd "$dir/apt/debs" && "${apt[@]}" download "${ENGINE_PACKAGES[@]/%//$ENGINE_SUITE}" "runc/$codename"); } \
    >"$dir/log/apt.log" 2>&1 || die "apt-get failed, see $dir/log/apt.log"
  for deb in "$dir"/apt/debs/*.deb; do
    dpkg -x "$deb" "$root"
  done
  rm -rf "$dir/apt"
  mkdir -p "$dir/bin" "$dir/config/cli-plugins"
  # The client alone goes on the caller's PATH: containerd or runc there would change what others run.
  for program in docker cosign docker-registry; do
    ln -sfn "../root/usr/bin/$program" "$dir/bin/$program"
  done
  for deb in buildx compose; do
    ln -sfn "../../root/usr/libexec/docker/cli-plugins/docker-$deb" "$dir/config/cli-plugins/docker-$deb"
  done
  touch "$root/.complete"
}

# --- processes ------------------------------------------------------------------------------------

# pid of the daemon $1, if it is alive and truly ours: a pid file outlives kill -9, and the number may
# belong to a stranger by now.
own_pid() {
  local pid
  pid=$(cat "$run/$1.pid" 2>/dev/null) && [[ $pid =~ ^[0-9]+$ ]] || return 1
  [[ $(readlink "/proc/$pid/exe") == "$root"/usr/*bin/"$1" ]] || return 1
  printf '%s' "$pid"
}

own_shims() {
  local exe
  for exe in /proc/[0-9]*/exe; do
    [[ $(readlink "$exe") == "$root"/usr/bin/containerd-shim* ]] || continue
    exe=${exe#/proc/}
    printf '%s\n' "${exe%/exe}"
  done
}

# Start the daemon $1. It gets none of our open files: a lock that the caller holds in one (flock FILE
# engine.sh start …) would be held for as long as the engine runs.
start_daemon() {
  local name=$1
  shift
  (
    for fd in "/proc/$BASHPID"/fd/*; do
      fd=${fd##*/}
      ((fd <= 2)) || eval "exec $fd>&-"
    done
    PATH=$root/usr/bin:$root/usr/sbin:$PATH exec setsid "$@"
  ) >>"$dir/log/$name.log" 2>&1 </dev/null &
  printf '%s\n' $! >"$run/$name.pid"
}

end_daemon() {
  local pid waited=0
  pid=$(own_pid "$1") || { rm -f "$run/$1.pid"; return 0; }
  kill -TERM "$pid"
  while own_pid "$1" >/dev/null; do
    ((waited++ < STOP_SECONDS * 5)) || { log "$1 ($pid) did not end: killing it"; kill -KILL "$pid" || log "$1 has just ended"; break; }
    sleep 0.2
  done
  rm -f "$run/$1.pid"
}

answers() { DOCKER_HOST="unix://$socket" "$root/usr/bin/docker" version >/dev/null 2>&1; }

# --- network --------------------------------------------------------------------------------------

# Two engines that both manage the firewall flush each other's chains, so this one has none: a bridge
# and one private range of its own, three tagged rules, and ports published by docker-proxy.
set_up_network() {
  local n used
  if [[ -s $run/range ]] && ip link show "$bridge" >/dev/null 2>&1; then
    range=$(<"$run/range")
  else
    used=$(ip -4 route show table all; ip -4 -o addr)
    for n in {31..18} none; do # from the top: other engines take these ranges from the bottom
      [[ $n != none ]] || die "no free private range for the engine's bridge"
      [[ $used == *" 172.$n."* || $used == "172.$n."* || $used == *$'\n'"172.$n."* ]] || break
    done
    range=172.$n
    ip link show "$bridge" >/dev/null 2>&1 || ip link add "$bridge" type bridge
    ip addr flush dev "$bridge"
    ip addr add "$range.0.1/24" dev "$bridge"
    ip link set "$bridge" up
    printf '%s\n' "$range" >"$run/range"
  fi
  # Forwarding is a setting of the whole machine. It stays on after stop: another engine may count on it.
  [[ $(</proc/sys/net/ipv4/ip_forward) == 1 ]] || echo 1 >/proc/sys/net/ipv4/ip_forward
  add_rule nat POSTROUTING -s "$range.0.0/16" '!' -d "$range.0.0/16" -j MASQUERADE
  add_rule filter FORWARD -s "$range.0.0/16" -j ACCEPT
  add_rule filter FORWARD -d "$range.0.0/16" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
}

add_rule() {
  local table=$1 chain=$2
  shift 2
  iptables -w -t "$table" -C "$chain" "$@" -m comment --comment "$tag" 2>/dev/null ||
    iptables -w -t "$table" -I "$chain" "$@" -m comment --comment "$tag"
}

tear_down_network() {
  local table rule words
  for table in nat filter; do
    while read -r rule; do
      read -ra words <<<"${rule/#-A/-D}"
      iptables -w -t "$table" "${words[@]}"
    done < <(iptables -w -t "$table" -S | grep -F -- "--comment $tag ")
  done
  if ip link show "$bridge" >/dev/null 2>&1; then ip link del "$bridge"; fi
  rm -f "$run/range"
}

# --- words ----------------------------------------------------------------------------------------

print_env() {
  local path=$PATH
  [[ :$path: == *":$dir/bin:"* ]] || path=$dir/bin:$path
  printf 'export DOCKER_HOST=%q\n' "unix://$socket"
  printf 'export DOCKER_CONFIG=%q\n' "$dir/config"
  printf 'export PATH=%q\n' "$path"
}

start() {
  local waited=0 pid
  install_system_packages
  fetch_programs
  if own_pid dockerd >/dev/null && own_pid containerd >/dev/null && answers; then
    print_env
    return 0
  fi
  # Half an engine (one of the two was killed) is ended first; containers live on in their shims.
  end_daemon dockerd
  set_up_network

  if ! own_pid containerd >/dev/null; then
    # Off: the Kubernetes and plugin sockets, which have fixed places outside DIR.
    printf '%s\n' 'version = 2' \
      'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]' \
      >"$dir/containerd.toml"
    start_daemon containerd "$root/usr/bin/containerd" --config "$dir/containerd.toml" \
      --root "$dir/data/containerd" --state "$run/containerd" --address "$run/containerd.sock"
  fi

  # dockerd refuses to start while its own old pid exists, be it a stranger's or a zombie's.
  rm -f "$socket" "$run/docker.pid"
  printf '%s\n' '{"features": {"containerd-snapshotter": true}}' >"$dir/daemon.json"
  start_daemon dockerd "$root/usr/sbin/dockerd" --config-file "$dir/daemon.json" \
    --host "unix://$socket" --containerd "$run/containerd.sock" \
    --data-root "$dir/data/docker" --exec-root "$run/docker" --pidfile "$run/docker.pid" \
    --bridge "$bridge" --iptables=false --ip6tables=false --ip-masq=false \
    --default-address-pool "base=$range.128.0/17,size=24" \
    --userland-proxy-path "$root/usr/sbin/docker-proxy" --init-path "$root/usr/bin/tini-static" \
    --exec-opt native.cgroupdriver=cgroupfs --log-opt max-size=10m
  pid=$(<"$run/dockerd.pid")

  until answers; do
    kill -0 "$pid" 2>/dev/null || die "dockerd ended: $(tail -n 3 "$dir/log/dockerd.log")"
    ((waited++ < START_SECONDS * 5)) || die "no answer within $START_SECONDS s, see $dir/log/dockerd.log"
    sleep 0.2
  done
  print_env
}

stop() {
  local shim child mount
  end_daemon dockerd
  # After kill -9 of the daemons nobody is left to end the containers: each shim's child is the first
  # process of one, and with it the whole container ends.
  for shim in $(own_shims); do
    while read -rd ' ' child; do
      kill -KILL "$child" 2>/dev/null || log "process $child of a container has just ended"
    done < <(cat "/proc/$shim/task/"*/children 2>/dev/null)
    kill -KILL "$shim" 2>/dev/null || log "shim $shim has just ended"
  done
  end_daemon containerd
  # Deepest first; the kernel writes a space in a path as \040.
  while read -r mount; do
    umount -l "$(printf '%b' "$mount")" || log "$mount stays mounted"
  done < <(awk '{print $5}' /proc/self/mountinfo | grep -F "${dir// /\\040}/" | sort -r)
  tear_down_network
  rm -f "$socket" "$run"/*.pid "$run"/containerd.sock*
}

[[ $# -eq 2 ]] || usage
dir=$(realpath -m -- "$2")
root=$dir/root run=$dir/run socket=$dir/run/docker.sock
id=$(printf '%s' "$dir" | sha256sum)
tag=sparkforge-${id:0:8} bridge=sf-${id:0:8}
# The kernel's limit for a socket's path is 107 bytes, and the engine puts some below DIR.
((${#dir} <= 64)) || die "$dir: longer than 64 characters, its sockets would not fit the kernel's limit"
case $1 in
  env)
    answers || die "no engine runs in $dir"
    print_env
    ;;
  start | stop)
    ((EUID == 0)) || die "$1 needs root"
    [[ $1 == stop && ! -d $dir ]] && exit 0
    mkdir -p "$dir/log" "$run"
    exec 9>"$dir/lock"
    flock -w 120 9 || die "another engine.sh is at work in $dir"
    "$1"
    ;;
  *) usage ;;
esac
