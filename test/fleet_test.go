package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/zap"

	device "agentctl/daemon"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/link"
)

// mockFleet links n simulated boards, named board-1 and so on by themselves, and waits until the
// tools of all can be called.
func (r *testRelay) mockFleet(n int) {
	r.t.Helper()
	minted, err := r.relay.Store().Mint(r.t.Context(), auth.MintRequest{Class: "device", Count: n})
	if err != nil {
		r.t.Fatal(err)
	}
	tokens := make([]string, n)
	for i := range minted {
		tokens[i] = minted[i].Token
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = device.RunMocks(ctx, device.MockOptions{Relay: r.url, Tokens: tokens, Name: "board", Version: "test", Interval: time.Minute, Log: zap.NewNop(),
			OnReady: func() { close(ready) }})
	})
	r.t.Cleanup(func() { cancel(); wg.Wait() })
	select {
	case <-ready:
	case <-time.After(patience):
		r.t.Fatal("not all boards had a link in time")
	}
}

// structured is the structured content of a result, as JSON.
func structured(t testing.TB, res *mcp.CallToolResult) string {
	t.Helper()
	data, err := json.Marshal(res.StructuredContent)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// foundFleet is an answer of fleet.find.
type foundFleet struct {
	Matched int `json:"matched"`
	Boards  []struct {
		Name, ID, Status string
		Figures          map[string]float64
	}
	Unknown map[string]int
	Next    string `json:"next_cursor"`
}

func (c *mcpClient) find(args map[string]any) (out foundFleet) {
	c.t.Helper()
	res := c.call("fleet_find", args, nil)
	data := structured(c.t, res)
	if res.IsError || len(data) > 2048 || res.Meta["agentctl/untrusted"] != true {
		c.t.Errorf("fleet_find %v: %d bytes, _meta %v: %s", args, len(data), res.Meta, data)
	}
	if err := json.Unmarshal([]byte(data), &out); err != nil {
		c.t.Fatal(err)
	}
	return out
}

// tokensOf counts the tokens of tools as a model reads them: bytes / 4 of name, description and input
// schema.
func tokensOf(t testing.TB, tools []*mcp.Tool) int {
	t.Helper()
	size := 0
	for _, tool := range tools {
		schema, err := json.Marshal(tool.InputSchema)
		if err != nil {
			t.Fatal(err)
		}
		size += len(tool.Name) + len(tool.Description) + len(schema)
	}
	return (size + 3) / 4
}

const fleetQuery = "?toolset=fleet&names=flat"

// TestToolsetSize: the fleet toolset has at most 12 tools and 2,000 tokens, for every caller and any
// number of boards.
func TestToolsetSize(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, func(o *relay.Options) { o.DisabledPlugins = nil })
	all := r.agentOf(auth.DefaultTenant, slices.DeleteFunc(slices.Clone(manifest.Scopes), func(s string) bool { return strings.HasPrefix(s, "device:") })...)
	list := func() []*mcp.Tool { return r.mcp(all, "2026-07-28", fleetQuery).list() }
	before := list()
	r.mockFleet(3)
	after := list()
	if len(before) < 5 || len(before) > 12 || tokensOf(t, before) > 2000 {
		t.Errorf("%d tools, %d tokens", len(before), tokensOf(t, before))
	}
	a, _ := json.Marshal(before)
	if b, _ := json.Marshal(after); string(a) != string(b) {
		t.Errorf("boards change the list:\n%s\n%s", a, b)
	}
	for _, tool := range before {
		if !strings.HasPrefix(tool.Name, "fleet_") || tool.Annotations == nil || tool.Title == "" {
			t.Errorf("%s %q: %+v", tool.Name, tool.Title, tool.Annotations)
		}
	}
}

// A board that answers wrongly, or not at all, takes the tools from nobody, and an error names tools as
// the caller's list spells them.
func TestFleetWithBadBoard(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		d := r.device(mockOptions{script: func(m *mockDevice) func(id string, c link.Cmd) {
			return func(id string, c link.Cmd) {
				if strings.HasSuffix(c.Tool, ".snapshot") {
					m.result(id, `{"wrong":1}`)
				}
			}
		}})
		c := r.mcp(r.agent, "2026-07-28", fleetQuery)
		for i := range 30 {
			time.Sleep(time.Second) // virtual: the board's rate limits are not the question
			tool, want := "snapshot", `"reason":"bad_result"`
			if i%3 == 0 {
				tool, want = "history", "" // it has none
			}
			if i >= 24 {
				tool, want = "echo", "E_DEADLINE_EXCEEDED"
			}
			args := map[string]any{"board": d.node, "tool": tool}
			if tool == "echo" {
				args["arguments"] = map[string]any{"message": "x"}
			}
			if res := c.call("fleet_call", args, nil); !res.IsError || !strings.Contains(structured(t, res), want) {
				t.Fatalf("call %d of %s: %s", i, tool, structured(t, res))
			}
		}
		if out := c.find(nil); out.Matched != 1 {
			t.Errorf("fleet_find: %+v", out)
		}
		if got := structured(t, c.call("fleet_describe", map[string]any{"board": "nope"}, nil)); !strings.Contains(got, "fleet_find lists your boards") {
			t.Errorf("names=flat: %s", got)
		}
		if got := structured(t, r.mcp(r.agent, "2026-07-28", "?toolset=fleet").call("fleet.describe", map[string]any{"board": "nope"}, nil)); !strings.Contains(got, "fleet.find lists your boards") {
			t.Errorf("names with dots: %s", got)
		}
	}, func(o *relay.Options) { o.DisabledPlugins = nil })
}

// TestFleet works with many boards over links, through /mcp: 1,000 in `make test-slow`.
func TestFleet(t *testing.T) {
	t.Parallel()
	boards := 30
	if os.Getenv("AGENTCTL_SLOW") != "" {
		boards = 1000
	}
	r := newTestRelay(t, func(o *relay.Options) { o.DisabledPlugins = nil })
	r.mockFleet(boards)
	c := r.mcp(r.agent, "2026-07-28", fleetQuery)
	if out := c.find(map[string]any{"status": "online"}); out.Matched != boards {
		t.Fatalf("%d boards are online", out.Matched)
	}
	const where = "cpu_pct >= 0 and mem_pct > 0 and disk_pct < 101"
	began := time.Now()
	c.find(map[string]any{"where": where})
	cold := time.Since(began)
	// On a busy machine some boards answer too late for the first question.
	var out foundFleet
	eventually(t, "a figure of each board", func() bool {
		out = c.find(map[string]any{"where": where})
		return out.Matched == boards && out.Unknown == nil
	})
	var warm []time.Duration
	for range 21 {
		eventually(t, "warm: five boards of all", func() bool {
			began = time.Now()
			out = c.find(map[string]any{"where": where, "limit": 5})
			return out.Matched == boards && len(out.Boards) == 5
		})
		warm = append(warm, time.Since(began))
	}
	slices.Sort(warm)
	t.Logf("fleet.find over %d boards: cold %v, warm p50 %v", boards, cold, warm[len(warm)/2])
	// Every board is on one page, and on one page only.
	eventually(t, "all boards on all pages", func() bool {
		seen := make(map[string]bool)
		for args := map[string]any{"where": where, "limit": min(50, boards/3)}; ; {
			out := c.find(args)
			for _, b := range out.Boards {
				if seen[b.ID] {
					t.Fatalf("%s comes twice", b.ID)
				}
				seen[b.ID] = true
			}
			if args["cursor"] = out.Next; out.Next == "" {
				return len(seen) == boards
			}
		}
	})
}

// TestFleetOfOne describes and calls one board in each era, and is refused as the board's own tools
// refuse.
func TestFleetOfOne(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{name: "attic", cadence: true})
		c := r.mcp(r.agent, version, fleetQuery)
		for _, board := range []string{"attic", m.node, m.node[:20]} {
			data := structured(t, c.call("fleet_describe", map[string]any{"board": board}, nil))
			for _, want := range []string{`"id":"` + m.node, `"cpu_pct":`, `"protocol":"v2"`, `"tool":"snapshot"`, `"missing":{"info":"not_measured"`} {
				if !strings.Contains(data, want) {
					t.Errorf("%s: %s is missing in %s", board, want, data)
				}
			}
		}
		full := strings.ReplaceAll("sysecho."+m.node+".echo.invoke", ".", "_")
		args := map[string]any{"message": "hello"}
		direct := structured(t, c.call(full, args, nil)) // not in the toolset, and callable
		for _, tool := range []string{"echo", "invoke", full} {
			res := c.call("fleet_call", map[string]any{"board": "attic", "tool": tool, "arguments": args}, nil)
			if got := structured(t, res); got != direct || res.Meta["agentctl/untrusted"] != true {
				t.Errorf("%s: %s, want %s", tool, got, direct)
			}
		}
		bad := map[string]any{"board": "attic", "tool": "echo", "arguments": map[string]any{"message": "\u0007"}}
		if got := structured(t, c.call("fleet_call", bad, nil)); !strings.Contains(got, "E_MANIFEST_INVALID") {
			t.Errorf("arguments that the tool refuses: %s", got)
		}
		stream := map[string]any{"board": "attic", "tool": "subscribe", "arguments": map[string]any{"interval_ms": 1000}}
		began := time.Now()
		res := c.call("fleet_call", stream, mcp.Meta{"progressToken": "p", "agentctl/max_frames": 3})
		if got := structured(t, res); res.IsError || !strings.Contains(got, `"cpu_pct"`) {
			t.Errorf("a stream: %s", got)
		}
		if took := time.Since(began); took < time.Second || len(c.progress) < 2 {
			t.Errorf("3 frames took %v, with %d notifications", took, len(c.progress))
		}
		lister := r.mcp(r.agentOf(auth.DefaultTenant, manifest.ScopeToolsList), version, fleetQuery)
		if got := structured(t, lister.call("fleet_find", nil, nil)); !strings.Contains(got, `"matched":1`) {
			t.Errorf("find needs tools:list alone: %s", got)
		}
		if _, err := lister.cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "fleet_call", Arguments: stream}); err == nil {
			res := lister.call("fleet_call", stream, nil)
			if !res.IsError || !strings.Contains(structured(t, res), "E_SAFETY_DENIED") {
				t.Errorf("a call without its scope: %s", structured(t, res))
			}
		}
		other := r.mcp(r.agentFor("other"), version, fleetQuery)
		for _, board := range []string{"attic", m.node, m.node[:20], "nowhere"} {
			if got := structured(t, other.call("fleet_describe", map[string]any{"board": board}, nil)); !strings.Contains(got, "none of your boards") {
				t.Errorf("another tenant's %s: %s", board, got)
			}
		}
		m.kill()
		if got := structured(t, c.call("fleet_call", map[string]any{"board": "attic", "tool": "snapshot"}, nil)); !strings.Contains(got, "E_NODE_OFFLINE") {
			t.Errorf("a board that is away: %s", got)
		}
	})
}

// TestFleetMetrics: the metrics of where are those of alert rules, so that people learn one set of
// names.
func TestFleetMetrics(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, func(o *relay.Options) { o.DisabledPlugins = nil })
	c := r.mcp(r.agent, "2026-07-28", fleetQuery)
	message := structured(t, c.call("fleet_find", map[string]any{"where": "?"}, nil))
	_, list, _ := strings.Cut(message, "expected one of ")
	list, _, _ = strings.Cut(list, ";")
	keys := strings.Split(list, ", ")
	for _, s := range prober.Sensors() {
		// A rate of errors needs the network's counters, which system.modules has; where does not.
		if name := s.Metric.Name; name != "" && name != "net_errors_per_s" && !slices.Contains(keys, name) {
			t.Errorf("%s is not among %s", name, list)
		}
		if s.Frame != "" && !slices.Contains(keys, s.Frame) {
			t.Errorf("%s is not among %s", s.Frame, list)
		}
	}
	if len(keys) < 17 {
		t.Errorf("%s", fmt.Sprint(keys))
	}
}
