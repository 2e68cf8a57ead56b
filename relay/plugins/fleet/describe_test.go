package fleet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// describe calls fleet.describe, which must succeed with an answer of at most maxDescription bytes.
func describe(t *testing.T, p *Plugin, c *kernel.Caller, board string) string {
	t.Helper()
	data, err := call(t, p, c, "fleet.describe", `{"board":"`+board+`"}`)
	if err != nil {
		t.Fatalf("fleet.describe %s: %v", board, err)
	}
	if len(data) > maxDescription {
		t.Errorf("fleet.describe %s: an answer of %d bytes, want at most %d", board, len(data), maxDescription)
	}
	return data
}

// has checks that an answer has all of these parts.
func has(t *testing.T, data string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(data, part) {
			t.Errorf("the answer has no %s: %s", part, data)
		}
	}
}

func TestDescribe(t *testing.T) {
	p := newFleet(1).plugin()
	p.opt.Now = func() time.Time { return time.UnixMilli(946684799000) } // a second before the board's clock
	data := describe(t, p, reader, "board-000")
	has(t, data,
		`"name":"board-000"`, `"id":"`+nodeID(0), `"protocol":"v2.1"`,
		`"info":{"model":"Model 0"`, `"clock":{"synchronized":true,"offset_ms":1000}`,
		`"modules":["cpu","memory","disk","load","temperature","power","wear"]`, `"temperature_c":40`, `"wear_pre_eol":3`,
		`{"tool":"snapshot","title":"Metrics snapshot"}`, `{"tool":"history","title":"Metrics history","arguments":{"type":"object","required":["from_ms"`,
		`{"tool":"journal","title":"Journal","needs_scope":"boards:inspect"}`)
	if strings.Contains(data, "missing") {
		t.Errorf("something is missing of a board that answers: %s", data)
	}
}

// A board that is offline is described from what the relay knows, without a call.
func TestDescribeOfflineBoard(t *testing.T) {
	f := newFleet(1)
	f.boards[0].Status, f.boards[0].LastSeenMS = Offline, 1700000000000
	has(t, describe(t, f.plugin(), reader, nodeID(0)),
		`"missing":{"figures":"offline","info":"offline","modules":"offline"}`, `"last_seen_ms":1700000000000`, `"tool":"journal"`)
	if f.calls() != 0 {
		t.Errorf("%d calls of a board that is offline", f.calls())
	}
}

// A caller who may not call the board learns what there is, and which scope is missing.
func TestDescribeWithoutTheScope(t *testing.T) {
	lister := &kernel.Caller{Tenant: "default", Actor: "lister", Scopes: scopes{manifest.ScopeToolsList}}
	p := newFleet(1).plugin()
	describe(t, p, reader, "board-000") // the figures are known now
	data := describe(t, p, lister, "board-000")
	has(t, data, `"missing":{"figures":"refused","info":"refused","modules":"refused"}`, `"needs_scope":"tools:call:read_only"`)
	if strings.Contains(data, `"cpu_pct":0`) || strings.Contains(data, `"modules":[`) {
		t.Errorf("a caller without the scope sees figures: %s", data)
	}
}

// Of a board with more tools than fit, the arguments are left out and the tools stay.
func TestDescribeManyTools(t *testing.T) {
	f := newFleet(1)
	f.announce(0, manifest.KindMetrics)
	for i := range 20 {
		list := projectTools(nodeID(0), manifest.KindHistory)
		list[0].Capability.CapID = fmt.Sprintf("history_%d", i)
		f.tools[nodeID(0)] = append(f.tools[nodeID(0)], list...)
	}
	data := describe(t, f.plugin(), reader, "board-000")
	has(t, data, "history_0", "history_19")
	if strings.Contains(data, `"arguments"`) {
		t.Errorf("the answer of %d bytes has arguments", len(data))
	}
}
