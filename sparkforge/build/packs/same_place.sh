#!/bin/sh
# Stands in front of nvcc's cudafe++ and cicc. nvcc tells them the full path of the source, and they
# make names of it: with a path that is the same everywhere, so is the object.
for word do
  shift
  [ "$last" = --orig_src_path_name ] && word=/source/${word#"$PWD/"}
  set -- "$@" "$word"
  last=$word
done
exec "$0.real" "$@"
