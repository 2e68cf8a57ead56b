package mcp

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// grouped is a plugin with one tool of each name in a group.
type grouped struct {
	name, tenant, scope string
	group               kernel.ToolGroup
	tools               []string
}

func (g *grouped) Manifest() *kernel.Manifest {
	m := &kernel.Manifest{Name: g.name, Version: "1.0.0", Tenant: g.tenant, Inline: true}
	for _, name := range g.tools {
		m.Tools = append(m.Tools, &kernel.Tool{Name: name, ToolInfo: &kernel.ToolInfo{Scope: g.scope, SafetyClass: manifest.ReadOnly, Group: g.group}})
	}
	return m
}

func (g *grouped) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{Structured: json.RawMessage("{}")}, nil
}

// loadToolsets loads a board with a tool of each group of boards, the plugin fleet and two others,
// of which one has the tools of a scope that the caller lacks.
func loadToolsets(e *env) {
	b := newBoard("default", nodeA)
	info := *b.m.Tools[0].ToolInfo
	info.Group = kernel.GroupBoardOther
	b.m.Tools = append(b.m.Tools, &kernel.Tool{Name: "sysinfo." + nodeA + ".info.get", NodeID: nodeA, ToolInfo: &info})
	for _, t := range b.m.Tools[:3] {
		t.Group = kernel.GroupBoardBasic
	}
	e.load(b)
	for _, g := range []*grouped{
		{name: "fleet", scope: manifest.ScopeToolsList, group: kernel.GroupFleet, tools: []string{"fleet.find", "fleet.call"}},
		{name: "notes", scope: manifest.ScopeToolsList, tools: []string{"notes.search"}},
		{name: "kernel", scope: manifest.ScopeKernelAdmin, tools: []string{"kernel.status"}},
		{name: "theirs", tenant: "other", scope: manifest.ScopeToolsList, tools: []string{"theirs.tool"}},
	} {
		e.load(g)
	}
}

var (
	boardTools    = []string{"sys." + nodeA + ".metrics.snapshot", "sys." + nodeA + ".metrics.subscribe", echoA}
	allBoardTools = append(slices.Clone(boardTools), "sysinfo."+nodeA+".info.get")
	fleetTools    = []string{"fleet.call", "fleet.find"}
)

func TestToolset(t *testing.T) {
	var envs [2]*env // the second one passes every request to the SDK
	for i := range envs {
		envs[i] = newEnv(t, Options{})
		envs[i].h.neverDirect = i == 1
		loadToolsets(envs[i])
	}
	for _, tt := range []struct {
		query string
		want  []string // nil: 400
	}{
		{"", append([]string{"notes.search"}, boardTools...)},
		{"?names=dotted", append([]string{"notes.search"}, boardTools...)},
		{"?toolset=fleet", fleetTools},
		{"?toolset=boards", allBoardTools},
		{"?toolset=all", slices.Concat(fleetTools, []string{"notes.search"}, allBoardTools)},
		{"?toolset=fleet,notes", append(slices.Clone(fleetTools), "notes.search")},
		{"?toolset=notes,fleet,fleet,notes", append(slices.Clone(fleetTools), "notes.search")},
		{"?toolset=notes&toolset=fleet", append(slices.Clone(fleetTools), "notes.search")},
		{"?toolset=all,notes", slices.Concat(fleetTools, []string{"notes.search"}, allBoardTools)},
		{"?toolset=notes", []string{"notes.search"}},
		{"?toolset=", nil},
		{"?toolset=fleet,", nil},
		{"?toolset=Fleet", nil},
		{"?toolset=fleet%20", nil},
		{"?toolset=kernel", nil}, // the caller may use none of its tools
		{"?toolset=theirs", nil}, // another tenant's
		{"?toolset=device:" + nodeA, nil},
		{"?toolset=" + strings.Repeat("fleet,", 16) + "fleet", nil},
		{"?toolset=%zz", nil},
	} {
		for i, e := range envs {
			e.url = e.srv.URL + "/mcp" + tt.query
			_, answer := e.modern("tools/list", "", "", nil)
			checkToolset(t, tt.query, i, answer, tt.want)
			if tt.want == nil {
				checkRefusedInitialize(t, e, tt.query)
				continue
			}
			id := e.initialize("")
			head := map[string]string{"Mcp-Session-Id": id, "Mcp-Protocol-Version": legacyEra}
			answer = nil
			body := readAll(t, e.do("POST", head, `{"jsonrpc":"2.0","id":7,"method":"tools/list"}`))
			_, body, _ = strings.Cut(body, "data: ")
			if err := json.Unmarshal([]byte(body), &answer); err != nil {
				t.Fatalf("%s: %q: %v", tt.query, body, err)
			}
			checkToolset(t, tt.query, i, answer, tt.want)
		}
	}
}

// checkToolset compares the names of a list; nil wants a refusal that says what is allowed.
func checkToolset(t *testing.T, query string, i int, answer map[string]any, want []string) {
	t.Helper()
	if want == nil {
		refusal, _ := answer["error"].(map[string]any)
		message, _ := refusal["message"].(string)
		if refusal["code"] != "E_BAD_REQUEST" || !strings.Contains(message, "toolset") || strings.Contains(message, "theirs") {
			t.Errorf("%s: %v", query, answer)
		}
		return
	}
	result, _ := answer["result"].(map[string]any)
	list, _ := result["tools"].([]any)
	var names []string
	for _, tool := range list {
		names = append(names, tool.(map[string]any)["name"].(string))
	}
	if !slices.Equal(names, want) {
		t.Errorf("%s on handler %d: %q, want %q", query, i, names, want)
	}
}

func checkRefusedInitialize(t *testing.T, e *env, query string) {
	t.Helper()
	res := e.do("POST", nil, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}`)
	if body := readAll(t, res); res.StatusCode != http.StatusBadRequest || res.Header.Get("Mcp-Session-Id") != "" {
		t.Errorf("initialize with %s: %d %s", query, res.StatusCode, body)
	}
}

// TestToolsetIsNoPermission calls tools that are outside of the toolset, in both spellings.
func TestToolsetIsNoPermission(t *testing.T) {
	e := newEnv(t, Options{})
	loadToolsets(e)
	e.url += "?toolset=fleet&names=flat"
	for _, name := range []string{echoA, strings.ReplaceAll(echoA, ".", "_"), "notes.search", "notes_search", "fleet_find"} {
		if res, answer := e.modern("tools/call", name, `"name":"`+name+`","arguments":{}`, nil); res.StatusCode != 200 || answer["result"] == nil {
			t.Errorf("%s: %d %v", name, res.StatusCode, answer)
		}
	}
}

// TestToolsetInSession keeps a session whose plugin is unloaded for a moment.
func TestToolsetInSession(t *testing.T) {
	e := newEnv(t, Options{})
	loadToolsets(e)
	e.url += "?toolset=fleet,notes"
	head := map[string]string{"Mcp-Session-Id": e.initialize(""), "Mcp-Protocol-Version": legacyEra}
	list := func() string {
		res := e.do("POST", head, `{"jsonrpc":"2.0","id":7,"method":"tools/list"}`)
		if body := readAll(t, res); res.StatusCode == 200 {
			return body
		}
		t.Fatalf("status %d", res.StatusCode)
		return ""
	}
	if !strings.Contains(list(), "notes.search") {
		t.Error("the plugin's tool is missing")
	}
	if err := e.kernel.UnloadByName("notes"); err != nil {
		t.Fatal(err)
	}
	if body := list(); strings.Contains(body, "notes.search") || !strings.Contains(body, "fleet.find") {
		t.Errorf("without the plugin: %s", body)
	}
	e.load(&grouped{name: "notes", scope: manifest.ScopeToolsList, tools: []string{"notes.search"}})
	if !strings.Contains(list(), "notes.search") {
		t.Error("the plugin's tool did not come back")
	}
}

// TestToolsetIsNotified: a client whose list has no boards is not asked to list again when one comes or
// goes, and one whose list has boards is.
func TestToolsetIsNotified(t *testing.T) {
	t.Parallel() // it waits for notifyInterval
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		loadToolsets(e)
		connect := func(query string) <-chan struct{} {
			changed := make(chan struct{}, 64)
			cs := e.clientAt(e.url+query, "", version, &sdk.ClientOptions{
				ToolListChangedHandler: func(context.Context, *sdk.ToolListChangedRequest) { changed <- struct{}{} },
			})
			if version == modernEra {
				if _, err := cs.ListTools(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
			}
			return changed
		}
		fleet, boards := connect("?toolset=fleet"), connect("?toolset=boards")
		until(t, "both streams", func() bool { return e.h.Stats().Streams == 2 })
		e.load(newBoard("default", nodeB))
		wait(t, "a change of the boards", boards)
		before := len(fleet) // both are notified in one round, the fleet's client first or second
		e.load(&grouped{name: "late", scope: manifest.ScopeToolsList, group: kernel.GroupFleet, tools: []string{"fleet.late"}})
		wait(t, "a change of the plugins", boards)
		until(t, "the change of the plugins", func() bool { return len(fleet) > before })
		if n := len(fleet); n != 1 {
			t.Errorf("%d notifications to a client that lists no boards, want that about the plugin", n)
		}
	})
}
