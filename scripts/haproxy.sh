#!/usr/bin/env bash
# Put Debian's haproxy into FOLDER/bin: for the tests, on a machine that has none. Needs no root.
#
#   scripts/haproxy.sh FOLDER
set -euo pipefail

folder=$(realpath "$1")
cd "$folder"
wanted=(install --simulate --no-install-recommends haproxy)
# the lists may be missing, and only root may fetch them
apt-get "${wanted[@]}" >wanted || { apt-get -q update && apt-get "${wanted[@]}" >wanted; }
mkdir haproxy bin
while read -r word package _; do
  [[ $word == Inst ]] || continue
  apt-get -q -o APT::Sandbox::User=root download "$package"
  dpkg -x "$package"_*.deb haproxy
done <wanted
libraries=("$folder"/haproxy/usr/lib/*-linux-gnu)
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "${libraries[0]}" "$folder/haproxy/usr/sbin/haproxy" >bin/haproxy
chmod +x bin/haproxy
bin/haproxy -v
