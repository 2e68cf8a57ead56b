#!/usr/bin/env bash
# Measures the performance bars, side by side in one run (docs/performance.md).
#   BENCH=quick test/bench.sh    a slice of three minutes; its figures are rough
#   test/bench.sh -only unary    some of the parts; see: bin/bench -h
# Exits 0 when a bar is missed, and not when something could not be measured.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x bin/agentctl ] && [ -x bin/agentctl-board ] || make -s build board
CGO_ENABLED=0 go build -C test/bench -o ../../bin/bench .

# What the device daemon is compared with. Without it that part is reported as not measured.
version=1.12.1
exporter=bin/node_exporter-$version
if [ ! -x "$exporter" ]; then
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  if GOBIN=$tmp CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' "github.com/prometheus/node_exporter@v$version"; then
    mv "$tmp/node_exporter" "$exporter"
  fi
  rm -rf "$tmp"
fi

args=(-node-exporter "$exporter")
[ "${BENCH:-}" != quick ] || args+=(-quick)
exec bin/bench "${args[@]}" "$@"
