package control_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
)

// declared is a plugin with a plugin.json.
type declared struct {
	manifest *kernel.Manifest
	document any
}

func (d *declared) Manifest() *kernel.Manifest { return d.manifest }
func (d *declared) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{}, nil
}
func (d *declared) Declaration() (any, string) { return d.document, "0a0b" }
func (d *declared) Health() kernel.Health {
	return kernel.Health{Down: true, Failures: 3, LastError: "it ended"}
}

// board is a connected board.
type board struct{ name string }

func (b board) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: b.name, Version: "1.0.0", Tenant: "a", Tools: []*kernel.Tool{{Name: "sysecho." + strings.TrimPrefix(b.name, "device:") + ".echo.invoke",
		ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeCallReadOnly, InputSchema: json.RawMessage(`{}`)}}}}
}
func (b board) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{}, nil
}

// pluginsJSON is what the test needs of the answers.
type pluginsJSON struct {
	Total, Boards int
	Next, Note    string
	Plugins       []struct {
		Name, State, Digest string
		Failures            int
		LastError           string `json:"last_error"`
		ManifestBytes       int    `json:"manifest_bytes"`
		Manifest            *struct {
			Tools []struct {
				Name        string
				InputSchema json.RawMessage
				Capability  string
			}
			Resources []struct {
				URI           string
				ContentSchema json.RawMessage
				Subscribable  bool
			}
		}
	}
}

// The resource has all manifests but those of boards, and stays small with any number of boards and
// any manifest; the tool shows what it leaves out.
func TestPluginManifests(t *testing.T) {
	h := newHarness(t)
	for i := range 300 {
		if err := h.k.Load(board{fmt.Sprintf("device:01hzx9k3m4p7q8r9s0t1v2w%03d", i)}, false); err != nil {
			t.Fatal(err)
		}
	}
	const contentSchema = `{"type":"array"}`
	notes := &declared{&kernel.Manifest{Name: "notes", Version: "1.0.0"}, map[string]any{"name": "notes",
		"resources": []any{map[string]any{"uri": "mcp://notes/all.json", "contentSchema": json.RawMessage(contentSchema), "subscribable": true}}}}
	large := &declared{&kernel.Manifest{Name: "large", Version: "1.0.0"}, map[string]string{"name": strings.Repeat("x", 1<<20)}}
	for _, p := range []kernel.Plugin{notes, large} {
		if err := h.k.Load(p, false); err != nil {
			t.Fatal(err)
		}
	}
	_, data, err := h.k.Read(t.Context(), admin, control.PluginsURI)
	if err != nil {
		t.Fatal(err)
	}
	var got pluginsJSON
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if len(data) > 512<<10 || got.Total != 303 || got.Boards != 300 || len(got.Plugins) != 3+200 {
		t.Errorf("%d bytes, %d plugins of which %d are boards, %d rows", len(data), got.Total, got.Boards, len(got.Plugins))
	}
	for _, want := range []string{"100 of 300 boards are left out", `{"after":"` + got.Next + `"}`, "1 manifests are left out", "kernel.introspection.plugins"} {
		if !strings.Contains(got.Note, want) {
			t.Errorf("%q is not in %q", want, got.Note)
		}
	}
	k, l, n := &got.Plugins[0], &got.Plugins[1], &got.Plugins[2]
	if k.Name != "kernel" || len(k.Manifest.Tools) < 10 || k.Manifest.Tools[0].Capability != "kernel:admin" || len(k.Manifest.Tools[0].InputSchema) == 0 || len(k.Manifest.Resources) != 4 || !k.Manifest.Resources[0].Subscribable {
		t.Errorf("kernel: %+v", k)
	}
	if l.Name != "large" || l.Manifest != nil || l.ManifestBytes < 1<<20 {
		t.Errorf("large: %+v", l)
	}
	if n.Name != "notes" || n.State != "down" || n.Failures != 3 || n.LastError != "it ended" || n.Digest != "0a0b" ||
		string(n.Manifest.Resources[0].ContentSchema) != contentSchema || !n.Manifest.Resources[0].Subscribable {
		t.Errorf("notes: %+v", n)
	}
	if b := got.Plugins[3]; b.Manifest != nil || !strings.HasPrefix(b.Name, "device:") {
		t.Errorf("the first board: %+v", b)
	}

	// Each manifest, one at a time.
	for name, size := range map[string]int{"large": 1 << 20, "device:01hzx9k3m4p7q8r9s0t1v2w299": 100, "kernel": 1000} {
		answer, err := h.call(admin, "kernel.introspection.plugins", `{"name":"`+name+`"}`)
		if err != nil || len(answer) < size {
			t.Errorf("%s: %d bytes, %v", name, len(answer), err)
		}
		var one pluginsJSON
		if err := json.Unmarshal([]byte(answer), &one); err != nil || len(one.Plugins) != 1 || one.Plugins[0].Manifest == nil {
			t.Errorf("%s: %.200s", name, answer)
		}
	}
	if _, err := h.call(admin, "kernel.introspection.plugins", `{"name":"none"}`); err == nil {
		t.Error("a plugin that is not loaded is shown")
	}
	// A page after the last board of the resource begins with the next one.
	answer, err := h.call(admin, "kernel.introspection.plugins", `{"after":"`+got.Next+`","limit":1}`)
	if err != nil || !strings.Contains(answer, "device:01hzx9k3m4p7q8r9s0t1v2w200") {
		t.Errorf("%s, %v", answer, err)
	}
}

// The counters of boards that are gone stay in the row of the boards.
func TestPluginFigures(t *testing.T) {
	h := newHarness(t)
	b := board{"device:01hzx9k3m4p7q8r9s0t1v2w3xy"}
	for range 3 {
		if err := h.k.Load(b, false); err != nil {
			t.Fatal(err)
		}
		if _, err := h.call(caller("ann", manifest.ScopeCallReadOnly), b.Manifest().Tools[0].Name, `{}`); err != nil {
			t.Fatal(err)
		}
		h.k.Unload(b)
	}
	rows := h.k.PluginFigures()
	if len(rows) != 2 || rows[0].Name != kernel.BoardFigures || rows[0].Calls != 3 || rows[0].Plugins != 0 || rows[1].Name != "kernel" || rows[1].Up != 1 {
		t.Errorf("got %+v", rows)
	}
	_, data, err := h.k.Read(t.Context(), admin, control.MetricsURI)
	if err != nil || !strings.Contains(string(data), `"plugins":[{"name":"devices","plugins":0,"up":0,"in_flight":0,"calls":3,`) {
		t.Errorf("%s, %v", data, err)
	}
	h.k.ResetCounters()
	if rows = h.k.PluginFigures(); rows[0].Calls != 0 {
		t.Errorf("after a reset: %+v", rows[0])
	}
}
