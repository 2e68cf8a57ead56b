#!/usr/bin/env bash
# Runs every fuzz target of the tree for FUZZTIME each, as many at a time as there are CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${FUZZTIME:=60s}"

fuzz() { # package, target, file for the output
  CGO_ENABLED=0 go test -run '^$' -fuzz "^$2\$" -fuzztime "$FUZZTIME" -fuzzminimizetime 10x -parallel 1 "$1" > "$3" 2>&1
}

# Go 1.26 sometimes calls the end of the time itself a failure (golang/go#75804), above all on a busy
# machine. Such a run has found no input; it gets another one, of which one must pass.
only_late() { # file of the output
  grep -q '^ *context deadline exceeded$' "$1" && ! grep -q 'Failing input written' "$1"
}

one() { # package, target
  out=$(mktemp)
  trap 'rm -f "$out"' EXIT
  for _ in 1 2 3 4 5; do
    if fuzz "$1" "$2" "$out"; then
      printf 'fuzz: %s %s: %s\n' "$1" "$2" "$(tail -n 1 "$out")"
      return
    fi
    only_late "$out" || break
  done
  printf 'fuzz: %s %s FAILED\n%s\n' "$1" "$2" "$(cat "$out")"
  return 1
}
if [ "${1:-}" = one ]; then
  one "$2" "$3"
  exit
fi

targets=$(go list -f '{{.ImportPath}} {{.Dir}}' ./... | while read -r pkg dir; do
  { grep -hoE '^func Fuzz[A-Za-z0-9_]+\(' "$dir"/*_test.go 2>/dev/null || true; } | sed -E "s|^func (Fuzz[A-Za-z0-9_]+)\(|$pkg \1|"
done)
[ -n "$targets" ]
# xargs stops at the first failure, which has exit status 255 for it.
xargs -P "$(nproc)" -L 1 bash -c '"$0" one "$1" "$2" || exit 255' "$PWD/test/fuzz.sh" <<< "$targets"
echo "fuzz: $(wc -l <<< "$targets") targets, $FUZZTIME each"
