package test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/transport/link"
)

// mcpClient is the official SDK's client, connected to the test relay, and what it received.
type mcpClient struct {
	t  testing.TB
	cs *mcp.ClientSession

	progress         chan *mcp.ProgressNotificationParams
	tools, resources chan struct{}
	updated          chan string
}

// bearer adds a token to every request.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// mcp connects a client of a protocol version at /mcp, or at /mcp?query.
func (r *testRelay) mcp(token, version, query string) *mcpClient {
	r.t.Helper()
	c := &mcpClient{t: r.t, progress: make(chan *mcp.ProgressNotificationParams, 256), tools: make(chan struct{}, 256),
		resources: make(chan struct{}, 256), updated: make(chan string, 256)}
	client := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, &mcp.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, q *mcp.ProgressNotificationClientRequest) { c.progress <- q.Params },
		ToolListChangedHandler:      func(context.Context, *mcp.ToolListChangedRequest) { c.tools <- struct{}{} },
		ResourceListChangedHandler:  func(context.Context, *mcp.ResourceListChangedRequest) { c.resources <- struct{}{} },
		ResourceUpdatedHandler:      func(_ context.Context, q *mcp.ResourceUpdatedNotificationRequest) { c.updated <- q.Params.URI },
	})
	ctx, cancel := context.WithTimeout(context.Background(), r.within(10*time.Second))
	defer cancel()
	cs, err := client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: r.url + "/mcp" + query, MaxRetries: -1,
		HTTPClient: &http.Client{Transport: bearer{token, r.http.Transport}}}, &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		r.t.Fatalf("connect as %s: %v", version, err)
	}
	r.t.Cleanup(func() { _ = cs.Close() })
	c.cs = cs
	return c
}

// eras runs a test with a client of each era of MCP.
func eras(t *testing.T, f func(t *testing.T, r *testRelay, version string)) {
	for _, version := range []string{"2025-06-18", "2025-11-25", "2026-07-28"} {
		t.Run(version, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *testRelay) { f(t, r, version) })
		})
	}
}

func (c *mcpClient) list() []*mcp.Tool {
	c.t.Helper()
	res, err := c.cs.ListTools(context.Background(), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	return res.Tools
}

func (c *mcpClient) call(name string, args any, meta mcp.Meta) *mcp.CallToolResult {
	c.t.Helper()
	res, err := c.cs.CallTool(context.Background(), &mcp.CallToolParams{Name: name, Arguments: args, Meta: meta})
	if err != nil {
		c.t.Fatalf("%s: %v", name, err)
	}
	return res
}

// withFailure is a registered output schema as tools/list widens it: docs/protocol.md.
func withFailure(s map[string]any) map[string]any {
	words := map[string]any{"type": "string"}
	s["properties"].(map[string]any)["error"] = map[string]any{
		"type": "object", "description": "in place of the rest, when the call failed (isError)", "required": []any{"code", "message"},
		"properties": map[string]any{"code": words, "message": words, "outcome": words, "reason": words, "retryable": map[string]any{"type": "boolean"}, "trace_id": words},
	}
	s["oneOf"] = []any{map[string]any{"required": s["required"]}, map[string]any{"required": []any{"error"}}}
	delete(s, "required")
	delete(s, "$id")
	return s
}

// RFC-0009 §2, RFC-0005 §9: a device's tools as an MCP client sees them.
func TestMCPTools(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{name: "attic"})
		r.device(mockOptions{tenant: "other"})
		c := r.mcp(r.agent, version, "")
		var names []string
		for _, tool := range c.list() {
			names = append(names, tool.Name)
			if len(tool.Name) > 64 || !regexp.MustCompile(`^[a-z0-9_]+\.[0-9a-hjkmnp-tv-z]{26}\.[a-z0-9_]+\.[a-z0-9_]+$`).MatchString(tool.Name) {
				t.Errorf("name %s", tool.Name)
			}
			if tool.Meta["x-safety-class"] != "read_only" || len(tool.Meta) != 1 {
				t.Errorf("%s: _meta %v", tool.Name, tool.Meta)
			}
			if a := tool.Annotations; a == nil || !a.ReadOnlyHint || a.DestructiveHint == nil || *a.DestructiveHint {
				t.Errorf("%s: annotations %+v", tool.Name, a)
			}
			if strings.Contains(tool.Description+tool.Title, "attic") {
				t.Errorf("%s: a device's own word is in its description", tool.Name)
			}
			name, _ := manifest.ParseToolName(tool.Name)
			kind := map[string]string{"sys": "system.metrics.", "sysecho": "system.echo."}[name.Short] + name.Verb
			output := kind + ".output@1.0.0"
			if name.Verb == manifest.VerbSubscribe {
				output = kind + ".frame@1.0.0"
			}
			served := decoded(t, r.do(http.MethodGet, "/schemas/"+kind+".input@1.0.0", "", nil).body)
			if a, b := mustMarshal(t, served), mustMarshal(t, tool.InputSchema); a != b {
				t.Errorf("%s has the schema %s, served as %s", tool.Name, b, a)
			}
			registered := decoded(t, r.do(http.MethodGet, "/schemas/"+output, "", nil).body).(map[string]any)
			if a, b := mustMarshal(t, withFailure(registered)), mustMarshal(t, tool.OutputSchema); !strings.Contains(b, `"error"`) || a != b {
				t.Errorf("%s has the schema %s, served as %s", tool.Name, b, a)
			}
		}
		want := []string{m.snapshotTool(), m.subscribeTool(), m.echoTool()}
		slices.Sort(want)
		if !slices.Equal(names, want) {
			t.Errorf("tools %v, want %v", names, want)
		}
		if len(m.subscribeTool()) != 48 || len(m.echoTool()) != 46 {
			t.Errorf("%d and %d characters", len(m.subscribeTool()), len(m.echoTool()))
		}
		flat := r.mcp(r.agent, version, "?names=flat")
		for i, tool := range flat.list() {
			if !regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`).MatchString("mcp__agentctl__"+tool.Name) || tool.Name != strings.ReplaceAll(want[i], ".", "_") {
				t.Errorf("flat name %s", tool.Name)
			}
		}
		for _, client := range []*mcpClient{c, flat} { // both spellings at both
			for _, name := range []string{m.echoTool(), strings.ReplaceAll(m.echoTool(), ".", "_")} {
				if res := client.call(name, map[string]any{"message": "x"}, nil); res.IsError {
					t.Errorf("%s: %v", name, res.StructuredContent)
				}
			}
		}
	})
}

func mustMarshal(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// RFC-0005 §6.1, §6.9: calls through MCP, their results in both forms, and failures as
// results with the envelope.
func TestMCPCall(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{})
		foreign := r.device(mockOptions{tenant: "other"})
		gone := r.device(mockOptions{})
		gone.kill()
		c := r.mcp(r.agent, version, "")
		for tool, args := range map[string]any{m.echoTool(): map[string]any{"message": "ping"}, m.snapshotTool(): map[string]any{}} {
			res := c.call(tool, args, nil)
			want := m.sample(1)
			if tool == m.echoTool() {
				want = m.echo("ping")
			}
			text, ok := res.Content[0].(*mcp.TextContent)
			if res.IsError || len(res.Content) != 1 || !ok || text.Text != want || mustMarshal(t, res.StructuredContent) != mustMarshal(t, decoded(t, want)) {
				t.Errorf("%s: %+v, want %s", tool, res, want)
			}
		}
		m.expectNoCommand(func() {
			for _, f := range []struct {
				tool string
				args map[string]any
				code manifest.Code
			}{
				{m.echoTool(), map[string]any{}, manifest.ManifestInvalid},
				{m.echoTool(), map[string]any{"message": "caf\u00e9"}, manifest.ManifestInvalid},
				{m.subscribeTool(), map[string]any{"interval_ms": 1}, manifest.ManifestInvalid},
				{gone.echoTool(), map[string]any{"message": "x"}, manifest.NodeOffline},
				{foreign.echoTool(), map[string]any{"message": "x"}, manifest.SafetyDenied},
				{"sysecho." + manifest.NewNodeID() + ".echo.invoke", map[string]any{"message": "x"}, manifest.SafetyDenied},
			} {
				res := c.call(f.tool, f.args, nil)
				var e envelope
				if err := json.Unmarshal([]byte(mustMarshal(t, res.StructuredContent)), &e); err != nil || !res.IsError || e.Error.Code != string(f.code) || e.Error.TraceID == "" {
					t.Errorf("%s %v: %+v %s, want %s", f.tool, f.args, res, mustMarshal(t, res.StructuredContent), f.code)
				}
			}
			for _, name := range []string{"system.echo", "nosuch", m.tool("sysecho.nosuch.invoke"), strings.Repeat("a", 300)} {
				var fault *jsonrpc.Error
				if _, err := c.cs.CallTool(t.Context(), &mcp.CallToolParams{Name: name}); !errors.As(err, &fault) || fault.Code != jsonrpc.CodeInvalidParams {
					t.Errorf("%.40s: %v", name, err)
				}
			}
		})
		if len(foreign.cmds())+len(gone.cmds()) != 0 {
			t.Error("a refused call reached a device")
		}
	})
}

// A stream over MCP: progress at once and for each frame, at most 20 frames or 20 s, the last frame
// as the result, and the device gets the cancel.
func TestMCPStream(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{cadence: true})
		c := r.mcp(r.agent, version, "")
		for i, tt := range []struct {
			interval, frames int
			meta             mcp.Meta
			atLeast, atMost  time.Duration
		}{
			{1000, 20, mcp.Meta{}, 18 * time.Second, 21 * time.Second},
			{1000, 3, mcp.Meta{"agentctl/max_frames": 3}, time.Second, 4 * time.Second},
			{5000, 5, mcp.Meta{"agentctl/max_frames": 1000}, 19 * time.Second, 22 * time.Second},
			{5000, 2, mcp.Meta{"agentctl/max_ms": 7000}, 6 * time.Second, 8 * time.Second},
		} {
			tt.meta["progressToken"] = i
			start := time.Now()
			res := c.call(m.subscribeTool(), map[string]any{"interval_ms": tt.interval}, tt.meta)
			if took := time.Since(start); took < tt.atLeast || took > tt.atMost {
				t.Errorf("%d: took %s", i, took)
			}
			time.Sleep(100 * time.Millisecond)
			n := 0
			var last string
			for range len(c.progress) {
				if p := <-c.progress; strings.HasPrefix(p.Message, "{") {
					n++
					last = p.Message
				}
			}
			if res.IsError || n < tt.frames-1 || n > tt.frames || mustMarshal(t, res.StructuredContent) != mustMarshal(t, decoded(t, last)) {
				t.Errorf("%d: %d frames, want %d; last %s, result %s", i, n, tt.frames, last, mustMarshal(t, res.StructuredContent))
			}
			eventually(t, "cmd_cancel", func() bool { return m.count(link.TypeCmdCancel) == i+1 })
		}
		// The caller goes away: so does the stream.
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, err := c.cs.CallTool(ctx, &mcp.CallToolParams{Name: m.subscribeTool(), Arguments: map[string]any{"interval_ms": 1000}}); err == nil {
			t.Error("a cancelled call gave a result")
		}
		eventually(t, "cmd_cancel", func() bool { return m.count(link.TypeCmdCancel) == 5 })
		// The device goes: the call fails as every failure does.
		time.AfterFunc(3*time.Second, m.kill)
		if res := c.call(m.subscribeTool(), map[string]any{"interval_ms": 1000}, nil); !res.IsError || !strings.Contains(mustMarshal(t, res.StructuredContent), "E_NODE_OFFLINE") {
			t.Errorf("got %s", mustMarshal(t, res.StructuredContent))
		}
	})
}

// Devices that connect and disconnect change the list, and the client is notified within a
// second or so; other tenants' devices cause no notification.
func TestMCPListChanged(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		stay := r.device(mockOptions{})
		c := r.mcp(r.agent, version, "")
		time.Sleep(2 * time.Second)
		drain(c.tools)
		other := r.device(mockOptions{tenant: "other"})
		other.kill()
		time.Sleep(3 * time.Second)
		if len(c.tools)+len(c.resources) != 0 {
			t.Error("a notification about another tenant's devices")
		}
		come := r.device(mockOptions{})
		r.waitNotified(c.tools)
		r.waitNotified(c.resources)
		if n := len(c.list()); n != 6 {
			t.Errorf("%d tools", n)
		}
		time.Sleep(2 * time.Second)
		drain(c.tools)
		come.kill()
		r.waitNotified(c.tools)
		for _, tool := range c.list() {
			if !strings.Contains(tool.Name, stay.node) {
				t.Errorf("%s is still listed", tool.Name)
			}
		}
	})
}

func drain(c chan struct{}) {
	for len(c) > 0 {
		<-c
	}
}

func (r *testRelay) waitNotified(c chan struct{}) {
	r.t.Helper()
	select {
	case <-c:
	case <-time.After(r.within(2 * time.Second)):
		r.t.Error("no notification in time")
	}
}

// The newest metrics as a resource: listed, read, and followed with at most one update a
// second.
func TestMCPResource(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{})
		r.device(mockOptions{tenant: "other"})
		c := r.mcp(r.agent, version, "")
		uri := "mcp://devices/" + m.node + "/metrics.json"
		list, err := c.cs.ListResources(t.Context(), nil)
		if err != nil || len(list.Resources) != 1 || list.Resources[0].URI != uri || list.Resources[0].MIMEType != "application/json" {
			t.Fatalf("%+v, %v", list, err)
		}
		read := func() string {
			res, err := c.cs.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri})
			if err != nil || len(res.Contents) != 1 {
				t.Fatalf("%+v, %v", res, err)
			}
			return res.Contents[0].Text
		}
		if got := read(); got != m.sample(1) {
			t.Errorf("read %s", got)
		}
		r.waitAudited("reason=read", "decision=allow", "node_id="+m.node, "tenant="+auth.DefaultTenant)
		if err := c.cs.Subscribe(t.Context(), &mcp.SubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		for seq := int64(2); len(c.updated) == 0; seq++ { // a session that does not listen yet misses some
			if time.Sleep(time.Second); seq > 20 {
				t.Fatal("no update in 20 s")
			}
			m.metric(m.lastStream(), seq, m.sample(1))
		}
		if got := <-c.updated; got != uri {
			t.Errorf("updated %s", got)
		}
		time.Sleep(2 * time.Second)
		for len(c.updated) > 0 {
			<-c.updated
		}
		for seq := int64(2); seq <= 31; seq++ { // ten a second for three seconds
			m.metric(m.lastStream(), 100+seq, m.sample(seq))
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2 * time.Second)
		if n := len(c.updated); n < 2 || n > 5 {
			t.Errorf("%d updates for 30 frames in 3 s", n)
		}
		commands := len(m.cmds())
		if got := read(); !strings.Contains(got, `"cpu_pct":31.5`) || len(m.cmds()) != commands {
			t.Errorf("read %s", got)
		}
		for _, bad := range []string{"mcp://devices/" + manifest.NewNodeID() + "/metrics.json", "file:///etc/passwd", strings.Replace(uri, "metrics", "disks", 1)} {
			if _, err := c.cs.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: bad}); err == nil {
				t.Errorf("%s was read", bad)
			}
		}
		if err := c.cs.Unsubscribe(t.Context(), &mcp.UnsubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "cmd_cancel", func() bool { return m.count(link.TypeCmdCancel) == 1 })
	})
}

// What a token may see and do over MCP; one that ends is out within 5 s.
func TestMCPTokens(t *testing.T) {
	t.Parallel()
	eras(t, func(t *testing.T, r *testRelay, version string) {
		m := r.device(mockOptions{cadence: true})
		if tools := r.mcp(r.agentOf(auth.DefaultTenant, manifest.ScopeToolsList), version, "").list(); len(tools) != 0 {
			t.Errorf("a token that may only list is shown %d tools that it may not call", len(tools))
		}
		c := r.mcp(r.agentOf(auth.DefaultTenant, manifest.ScopeEventsSubscribe), version, "")
		if _, err := c.cs.ListTools(t.Context(), nil); err == nil {
			t.Error("a token without tools:list and tools:call lists")
		}
		cut := r.mint(auth.MintRequest{Class: "agent"})
		c = r.mcp(cut.Token, version, "")
		done := make(chan error, 1)
		go func() {
			res, err := c.cs.CallTool(context.Background(), &mcp.CallToolParams{Name: m.subscribeTool(), Arguments: map[string]any{"interval_ms": 1000}})
			if err == nil && !res.IsError {
				err = errors.New("a good result")
			}
			done <- err
		}()
		time.Sleep(3 * time.Second)
		start := time.Now()
		if _, err := r.relay.Store().Revoke(t.Context(), auth.RevokeRequest{JTI: cut.JTI}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			t.Error("the stream went on after the revocation")
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("cut after %s", took)
		}
		if _, err := c.cs.ListTools(t.Context(), nil); err == nil {
			t.Error("a revoked token lists")
		}
	})
}
