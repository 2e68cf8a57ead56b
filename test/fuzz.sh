#!/usr/bin/env bash
# Runs every fuzz target of the tree for FUZZTIME each.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${FUZZTIME:=60s}"
n=0
for pkg in $(go list ./...); do
  dir=$(go list -f '{{.Dir}}' "$pkg")
  targets=$(grep -hoE '^func (Fuzz[A-Za-z0-9_]+)\(' "$dir"/*_test.go 2>/dev/null | sed -E 's/^func (Fuzz[A-Za-z0-9_]+)\(/\1/' || true)
  for t in $targets; do
    echo "fuzz: $pkg $t"
    CGO_ENABLED=0 go test -run '^$' -fuzz "^$t\$" -fuzztime "$FUZZTIME" -fuzzminimizetime 10x "$pkg" | tail -n 1
    n=$((n + 1))
  done
done
echo "fuzz: $n targets, $FUZZTIME each"
[ "$n" -gt 0 ]
