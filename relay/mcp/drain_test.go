package mcp

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// slow is a board, or a plugin without a node, whose tool ends when the test says so, or with its call.
type slow struct {
	name, node string
	class      manifest.SafetyClass
	began      chan struct{}
	finish     chan struct{}
}

func newSlow(name, node string) *slow {
	return &slow{name: name, node: node, class: manifest.ReadOnly, began: make(chan struct{}, 8), finish: make(chan struct{})}
}

func (s *slow) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "slow", Version: "1.0.0", Tenant: "default"}
	if s.node != "" {
		m.Name = "device:" + s.node
	}
	m.Tools = []*kernel.Tool{{Name: s.name, NodeID: s.node, ToolInfo: &kernel.ToolInfo{Description: "Waits.", SafetyClass: s.class, Scope: manifest.ScopeCallReadOnly}}}
	return m
}

func (s *slow) Call(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
	s.began <- struct{}{}
	select {
	case <-s.finish:
		return &kernel.Result{Content: []json.RawMessage{json.RawMessage(`{"type":"text","text":"done"}`)}}, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// TestStopAnswersCalls: a call that is in progress when the relay stops has a moment to end, and is
// then answered with its outcome, in every way that a call can be carried.
func TestStopAnswersCalls(t *testing.T) {
	t.Parallel()
	const boardTool, pluginTool = "sysecho." + nodeA + ".echo.invoke", "slow.wait"
	for _, tt := range []struct {
		name, tool string
		isModern   bool
	}{
		{"direct, in a session", boardTool, false},
		{"SDK, in a session", pluginTool, false},
		{"mux", pluginTool, true},
	} {
		for _, ends := range []bool{true, false} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, Options{})
				p := newSlow(tt.tool, "")
				if tt.tool == boardTool {
					p.node = nodeA
				}
				e.load(p)
				params, head := `"name":"`+tt.tool+`"`, map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": tt.tool}
				if tt.isModern {
					params += "," + modernMeta
				} else {
					head = sessionHead("", e.initialize(""))
				}
				answer := make(chan string, 1)
				go func() {
					answer <- readAll(t, e.do("POST", head, `{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{`+params+`}}`))
				}()
				wait(t, "call", p.began)
				e.stop()
				if ends {
					close(p.finish)
				}
				got := wait(t, "answer", answer)
				if !strings.Contains(got, `"id":"c"`) {
					t.Fatalf("answer %q", got)
				}
				if ends {
					if !strings.Contains(got, `"text":"done"`) {
						t.Errorf("answer %s, want the result", got)
					}
					return
				}
				for _, want := range []string{`"isError":true`, `"code":"E_NODE_OFFLINE"`, `"outcome":"unknown"`, `"reason":"stopping"`, `"retryable":true`} {
					if !strings.Contains(got, want) {
						t.Errorf("answer %s, want %s", got, want)
					}
				}
			})
		}
	}
}

// TestStoppingRefuses: a request that comes while the relay stops was not handled.
func TestStoppingRefuses(t *testing.T) {
	e := newEnv(t, Options{})
	id := e.initialize("")
	e.stop()
	wait(t, "end of the drain", e.h.Drained())
	res := e.do("POST", sessionHead("", id), listBody)
	if got := readAll(t, res); res.StatusCode != 503 || !strings.Contains(got, `"outcome":"not_sent","reason":"stopping","retryable":true`) {
		t.Errorf("%d %s", res.StatusCode, got)
	}
}
