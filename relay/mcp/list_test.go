package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func TestListTools(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		const boards = 150 // 450 tools: three pages
		for i := range boards {
			e.load(newBoard("default", fmt.Sprintf("01j8zz3f0v4q7k2m9x5c1b%04d", i)))
		}
		e.load(newBoard("other", nodeB))
		cs := e.client("", version, nil)
		var names []string
		pages := 0
		for cursor := ""; ; pages++ {
			res, err := cs.ListTools(context.Background(), &sdk.ListToolsParams{Cursor: cursor})
			if err != nil {
				t.Fatal(err)
			}
			if len(res.Tools) != min(pageSize, 3*boards-len(names)) {
				t.Errorf("%d tools on page %d", len(res.Tools), pages)
			}
			if version == modernEra && (res.CacheScope != "private" || res.TTLMs <= 0) {
				t.Errorf("cache %q %d, want private and a time", res.CacheScope, res.TTLMs)
			}
			for _, tool := range res.Tools {
				names = append(names, tool.Name)
				if len(tool.Name) > 64 || tool.Meta["x-safety-class"] != "read_only" || tool.Title == "" || tool.InputSchema == nil || tool.OutputSchema == nil {
					t.Fatalf("tool %+v", tool)
				}
				a := tool.Annotations
				if !a.ReadOnlyHint || *a.DestructiveHint || !a.IdempotentHint || *a.OpenWorldHint {
					t.Fatalf("annotations %+v", a)
				}
			}
			if cursor = res.NextCursor; cursor == "" {
				break
			}
		}
		if len(names) != 3*boards || pages != 2 {
			t.Fatalf("%d tools on %d pages, want %d on 3", len(names), pages+1, 3*boards)
		}
		for i := 1; i < len(names); i++ {
			if names[i-1] >= names[i] {
				t.Fatalf("%s comes before %s", names[i-1], names[i])
			}
		}
		if strings.Contains(strings.Join(names, " "), nodeB) {
			t.Error("another tenant's board is in the list")
		}
		for _, cursor := range []string{"x", "AAAA", makeCursor("a b"), makeCursor("a") + "=", strings.Repeat("A", 2000)} {
			_, err := cs.ListTools(context.Background(), &sdk.ListToolsParams{Cursor: cursor})
			var f *jsonrpc.Error
			if !errors.As(err, &f) || f.Code != jsonrpc.CodeInvalidParams {
				t.Errorf("cursor %.20q: %v, want invalid params", cursor, err)
			}
		}
	})
}

// TestListIsStable wants byte-equal answers.
func TestListIsStable(t *testing.T) {
	e := newEnv(t, Options{})
	for _, n := range []string{nodeB, nodeA} {
		e.load(newBoard("default", n))
	}
	head := map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/list"}
	body := `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{` + modernMeta + `}}`
	first := readAll(t, e.do("POST", head, body))
	if second := readAll(t, e.do("POST", head, body)); first != second || !strings.Contains(first, echoA) {
		t.Errorf("two lists differ:\n%s\n%s", first, second)
	}
}

func TestListFlat(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		e.load(newBoard("default", nodeA))
		e.load(&dotted{})
		cs := e.clientAt(e.url+"?names=flat", "", version, nil)
		res, err := cs.ListTools(context.Background(), nil)
		if err != nil || len(res.Tools) != 5 {
			t.Fatalf("%v %v", res, err)
		}
		ok := regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
		for _, tool := range res.Tools {
			if !ok.MatchString(tool.Name) {
				t.Errorf("name %q", tool.Name)
			}
			if strings.HasSuffix(tool.Name, "_subscribe") {
				continue
			}
			got := callTool(t, cs, tool.Name, nil)
			if got.IsError {
				t.Errorf("%s: %v", tool.Name, errorOf(t, got))
			}
		}
		if res := callTool(t, cs, "tickets.list", nil); res.IsError {
			t.Errorf("the dotted name: %v", errorOf(t, res))
		}
		// A tool that comes later is found under its flat name as well.
		e.load(&dotted{more: true})
		until(t, "tickets_close", func() bool {
			_, err := cs.CallTool(context.Background(), &sdk.CallToolParams{Name: "tickets_close"})
			return err == nil
		})
	})
}

// dotted is a plugin whose tools are no device's.
type dotted struct{ more bool }

func (d *dotted) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: "tickets", Version: "1.0.0"}
	names := []string{"tickets.list", "tickets.open_one"}
	if d.more {
		names = append(names, "tickets.close")
	}
	for _, n := range names {
		m.Tools = append(m.Tools, &kernel.Tool{Name: n, ToolInfo: &kernel.ToolInfo{Description: "d", Scope: manifest.ScopeCallReadOnly}})
	}
	return m
}

func (*dotted) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{Content: []json.RawMessage{json.RawMessage(`{"type":"text","text":"done"}`)}}, nil
}

// TestListScope: the list needs its scope or any call scope, and shows only
// what the caller may call.
func TestListScope(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	head := func(tok string) map[string]string { return map[string]string{"Authorization": "Bearer " + tok} }
	for tok, want := range map[string]int{"default/a/tools:call:read_only": 3, "default/a/tools:list": 0, "default/a/tools:call:mutating": 0} {
		_, m := e.modern("tools/list", "", "", head(tok))
		if got := len(m["result"].(map[string]any)["tools"].([]any)); got != want {
			t.Errorf("%s sees %d tools, want %d", tok, got, want)
		}
	}
	res, m := e.modern("tools/list", "", "", head("default/a/tickets:read"))
	if res.StatusCode != 403 || m["error"].(map[string]any)["code"] != "E_SAFETY_DENIED" {
		t.Errorf("without a scope: %d %v, want 403 E_SAFETY_DENIED", res.StatusCode, m)
	}
	id := e.initialize("default/b/tickets:read")
	res = e.do("POST", map[string]string{"Authorization": "Bearer default/b/tickets:read", "Mcp-Session-Id": id, "Mcp-Protocol-Version": legacyEra},
		`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`)
	if res.StatusCode != 403 {
		t.Errorf("without a scope in a session: %d, want 403", res.StatusCode)
	}
	if recs := e.records(); len(recs) != 2 || recs[0].Decision != kernel.Denied || recs[0].Code != manifest.SafetyDenied {
		t.Errorf("audit %+v, want two denials", recs)
	}
}

func TestResources(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		a := newBoard("default", nodeA)
		e.load(a)
		e.load(newBoard("other", nodeB))
		cs := e.client("", version, nil)
		res, err := cs.ListResources(context.Background(), nil)
		uri := "mcp://devices/" + nodeA + "/metrics.json"
		if err != nil || len(res.Resources) != 1 || res.Resources[0].URI != uri || res.Resources[0].MIMEType != "application/json" {
			t.Fatalf("%+v %v", res, err)
		}
		got, err := cs.ReadResource(context.Background(), &sdk.ReadResourceParams{URI: uri})
		if err != nil || got.Contents[0].Text != `{"cpu_pct":1.5}` {
			t.Fatalf("%+v %v", got, err)
		}
		var f *jsonrpc.Error
		for _, bad := range []string{"mcp://devices/" + nodeB + "/metrics.json", "file:///etc/passwd", "x y", strings.Repeat("u", 600)} {
			if _, err := cs.ReadResource(context.Background(), &sdk.ReadResourceParams{URI: bad}); !errors.As(err, &f) || f.Code != jsonrpc.CodeInvalidParams {
				t.Errorf("read %.40q: %v, want invalid params", bad, err)
			}
		}
		a.online = func() error { return manifest.E(manifest.NodeOffline, "the board is offline") }
		e.load(a)
		cs2 := e.client("", version, nil) // the first one may answer from its cache
		if _, err := cs2.ReadResource(context.Background(), &sdk.ReadResourceParams{URI: uri}); !errors.As(err, &f) || f.Code != RPCCode(manifest.NodeOffline) {
			t.Errorf("offline: %v, want %d", err, RPCCode(manifest.NodeOffline))
		}
		tpl, err := cs.ListResourceTemplates(context.Background(), nil)
		if err != nil || len(tpl.ResourceTemplates) != 0 {
			t.Errorf("templates %+v %v, want none", tpl, err)
		}
		if _, err := cs.ListPrompts(context.Background(), nil); err == nil {
			t.Error("prompts are listed though no plugin has any")
		}
	})
}

func TestRPCCodesAvoidReservedRange(t *testing.T) {
	for _, c := range manifest.Codes {
		if n := RPCCode(c); n >= -32768 && n <= -32000 {
			t.Errorf("%s has the reserved code %d", c, n)
		}
	}
}

// TestHints: a tool that changes something says what a client may assume, and nothing if nothing
// is known. An unlisted one can be called all the same.
func TestHints(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	b.m.Name = "hints"
	b.m.Tools = nil
	for name, h := range map[string]kernel.Hints{"hints.none": 0, "hints.adds": kernel.HintSafe | kernel.HintLocal, "hints.sets": kernel.HintIdempotent | kernel.HintLocal} {
		b.m.Tools = append(b.m.Tools, &kernel.Tool{Name: name, ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeToolsList, Hints: h}})
	}
	b.m.Tools = append(b.m.Tools, &kernel.Tool{Name: "hints.hidden", ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeToolsList, Unlisted: true}})
	e.load(b)
	_, list := e.modern("tools/list", "", "", nil)
	got := map[string]any{}
	for _, tool := range list["result"].(map[string]any)["tools"].([]any) {
		m := tool.(map[string]any)
		text, _ := json.Marshal(m["annotations"])
		got[m["name"].(string)] = string(text)
	}
	want := map[string]any{
		"hints.none": "null",
		"hints.adds": `{"destructiveHint":false,"idempotentHint":false,"openWorldHint":false,"readOnlyHint":false}`,
		"hints.sets": `{"destructiveHint":true,"idempotentHint":true,"openWorldHint":false,"readOnlyHint":false}`,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	// A caller without the scope of a tool learns that, by either spelling of the name.
	for _, name := range []string{"hints.adds", "hints_adds"} {
		_, m := e.modern("tools/call", name, `"name":"`+name+`","arguments":{}`, map[string]string{"Authorization": "Bearer default/ann/" + manifest.ScopeTicketsRead})
		if text, _ := json.Marshal(m); !strings.Contains(string(text), "lacks the scope tools:list that this tool needs") {
			t.Errorf("%s: %s", name, text)
		}
	}
	if _, ok := e.kernel.Tool(&kernel.Caller{Tenant: "default", Scopes: scopes{manifest.ScopeToolsList}}, "hints.hidden"); !ok {
		t.Error("an unlisted tool is not found by its name")
	}
}
