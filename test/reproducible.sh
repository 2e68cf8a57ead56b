#!/usr/bin/env bash
# Builds the working tree's commit from two folders and compares the bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for d in a other/folder/b; do
  mkdir -p "$tmp/$d"
  git archive HEAD | tar -x -C "$tmp/$d"
  make -s -C "$tmp/$d" build board VERSION=test BUILT_AT=1700000000
done
for f in agentctl agentctl-board; do
  one=$(sha256sum < "$tmp/a/bin/$f")
  two=$(sha256sum < "$tmp/other/folder/b/bin/$f")
  [ "$one" = "$two" ] || { echo "reproducible: $f differs between two folders" >&2; exit 1; }
  echo "reproducible: $f ${one%% *}"
done
