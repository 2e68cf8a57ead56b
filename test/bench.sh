#!/usr/bin/env bash
# Measures the performance bars, side by side in one run (docs/performance.md).
#   BENCH=quick test/bench.sh          a subset in five minutes; its figures are rough
#   test/bench.sh -only unary          some of the parts; all: bin/bench -h
#   test/bench.sh -quick -only unary -shared
#                                      a ratio while other programs use the machine
#
# Calls and event streams are measured in two ways. "saturated": the server alone on core 0, its
# clients and boards on core 1, as many callers as keep the server busy (event streams: two events
# in flight); a figure is void when the server used less than 90 % of its core. "at 2500/s", and
# "paced" for streams: the same load for every side; void when a side did not reach it.
# Exits 0 when a bar is missed, and not when something could not be measured.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" ;; esac
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

# What the event gateway is compared with, besides nchan (apt-get install nginx-light
# libnginx-mod-nchan). The module proxy serves this version of Mercure, and no list of versions,
# which "go install" asks for.
mercure_version=0.18.0
mercure=bin/mercure-$mercure_version
if [ ! -x "$mercure" ]; then
  source=$(cd "${TMPDIR:-/tmp}" && go mod download -json "github.com/dunglas/mercure@v$mercure_version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') || true
  [ -z "$source" ] || CGO_ENABLED=0 GOWORK=off go build -C "$source" -trimpath -ldflags '-s -w' -o "$PWD/$mercure" ./cmd/mercure || true
fi

args=(-node-exporter "$exporter" -mercure "$mercure")
[ "${BENCH:-}" != quick ] || args+=(-quick)
exec bin/bench "${args[@]}" "$@"
