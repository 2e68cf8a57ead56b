#!/usr/bin/env bash
# Load and faults on a relay with 200 boards, a plugin and tickets for SOAK (default an hour), after the tests
# that need real minutes (RFC-0009 §6: a stalled reader, 90 s). See docs/performance.md.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${SOAK:=1h}"
: "${SEEDS:=1000}" # of the simulation of 20 boards and their links, ten minutes of virtual time each
AGENTCTL_SEEDS=$SEEDS CGO_ENABLED=0 go test -count=1 -timeout 1h -run 'TestSimulation' ./relay/hub
AGENTCTL_SLOW=1 CGO_ENABLED=0 go test -count=1 -timeout 15m -run 'Stall|Slow|Backpressure|Idle|SurviveKill' ./test
mkdir -p bin
CGO_ENABLED=0 go build -C test/bench -o ../../bin/bench .
exec bin/bench soak -for "$SOAK" -agentctl "${AGENTCTL:-bin/agentctl}"
