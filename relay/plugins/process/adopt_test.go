package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// python returns the Python of the system. One of pyenv is a script that reads what the sandbox
// does not allow.
func python(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/usr/bin", "/usr/local/bin"} {
		path := filepath.Join(dir, "python3")
		if exec.Command(path, "-c", "import json").Run() == nil {
			return path
		}
	}
	t.Skip("there is no python3 in /usr/bin")
	return ""
}

// adoption is that of the test server as the plugin demo. It takes listQuiet, and is the same in each
// folder.
var adoption struct {
	sync.Mutex
	*Adoption
}

// adopted is the test server as the plugin demo of a harness.
func (r *harness) adopted() *Adoption {
	r.t.Helper()
	script, err := filepath.Abs("testdata/server.py")
	if err != nil {
		r.t.Fatal(err)
	}
	code, err := os.ReadFile(script)
	if err != nil {
		r.t.Fatal(err)
	}
	dir := r.folder("demo", "{}", "")
	if err := os.WriteFile(filepath.Join(dir, "server.py"), code, 0o644); err != nil {
		r.t.Fatal(err)
	}
	adoption.Lock()
	defer adoption.Unlock()
	if adoption.Adoption == nil {
		adoption.Adoption, err = Adopt(r.t.Context(), AdoptOptions{Name: "demo", Folder: dir, Command: []string{python(r.t), "./server.py"}, Private: r.h.o.Private, NoSandbox: r.h.o.NoSandbox})
		if err != nil {
			r.t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, manifestFile), adoption.JSON, 0o644); err != nil {
		r.t.Fatal(err)
	}
	return adoption.Adoption
}

func TestAdopt(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	a := r.adopted()
	if a.Server != "everything in python 2.1.0" || a.Manifest.Version != "2.1.0" {
		t.Errorf("server %q, version %q", a.Server, a.Manifest.Version)
	}
	var names []string
	for _, tool := range a.Manifest.Tools {
		names = append(names, tool.Name+" "+tool.Capability)
	}
	want := []string{"demo.text demo.read", "demo.links demo.read", "demo.fail demo.write", "demo.odd_name_ demo.write", "demo.slow demo.read",
		"demo.ask demo.read", "demo.evolve demo.write", "demo.picture demo.read"}
	if !slices.Equal(names, want) {
		t.Errorf("tools %q, want %q", names, want)
	}
	var left []string
	for _, l := range a.LeftOut {
		left = append(left, l.Name)
	}
	if !slices.Equal(left, []string{"a.b", "a:b", "job", "far"}) {
		t.Errorf("left out: %v", a.LeftOut)
	}
	again, err := Adopt(t.Context(), AdoptOptions{Name: "demo", Folder: filepath.Join(r.dir, "demo"), Command: a.Manifest.Command, Private: r.h.o.Private, NoSandbox: r.h.o.NoSandbox})
	if err != nil || !bytes.Equal(again.JSON, a.JSON) {
		t.Errorf("adopted again it differs: %v\n%s\n%s", err, a.JSON, again.JSON)
	}
}

// Whatever an adopted server answers reaches the caller, with the names and URIs of its plugin.
func TestAdoptedResults(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.adopted()
	if _, err := r.h.Load(t.Context(), "demo"); err != nil {
		t.Fatal(err)
	}
	who := caller("demo:read", "demo:write")
	for tool, want := range map[string]string{
		"demo.text":      `[{"type": "text", "text": "hello"}]`,
		"demo.picture":   `[{"type": "image", "data": "AAEC", "mimeType": "image/png"}]`,
		"demo.odd_name_": `[{"type": "text", "text": "called odd name!"}]`,
		"demo.fail":      `[{"type": "text", "text": "it broke"}]`,
		"demo.ask":       `[{"type": "text", "text": "{\"elicitation\": -32601, \"ping\": 0, \"roots\": -32601, \"sampling\": -32601}"}]`,
		"demo.links": `[{"name":"x","type":"resource_link","uri":"mcp://demo/file:///etc/passwd"} {"name":"web","type":"resource_link","uri":"https://example.org/"} ` +
			`{"name":"other","type":"resource_link","uri":"mcp://demo/mcp://tickets/open.json"} ` +
			`{"resource":{"mimeType":"text/plain","text":"A","uri":"mcp://demo/demo://a"},"type":"resource"}]`,
	} {
		res, err := r.k.Call(t.Context(), &kernel.Request{Caller: who, Tool: tool})
		if err != nil {
			t.Errorf("%s: %v", tool, err)
			continue
		}
		if got := string(bytes.Join(blocks(res.Content), []byte(" "))); "["+got+"]" != want || res.IsError != (tool == "demo.fail") {
			t.Errorf("%s: got [%s], error %v\nwant %s", tool, got, res.IsError, want)
		}
	}
	for uri, want := range map[string]string{
		"mcp://demo/demo://a":           "text/markdown content of demo://a",
		"mcp://demo/demo://b":           "image/png \x89PNG\x00",
		"mcp://demo/demo://item/7":      "text/plain content of demo://item/7",
		"mcp://demo/file:///etc/passwd": "text/plain content of file:///etc/passwd", // the server linked to its own
	} {
		res, data, err := r.k.Read(t.Context(), who, uri)
		if err != nil || res.MIME+" "+string(data) != want {
			t.Errorf("%s: %q, %v; want %q", uri, data, err, want)
		}
	}
	for _, uri := range []string{"mcp://demo/demo://item/7/8", "mcp://demo/demo://none", "mcp://demo/x", "mcp://none/demo://a", "demo://a"} {
		if _, _, err := r.k.Read(t.Context(), who, uri); !errors.Is(err, kernel.ErrNoResource) {
			t.Errorf("%s: %v", uri, err)
		}
	}
	if _, _, err := r.k.Read(t.Context(), caller("demo:write"), "mcp://demo/demo://item/7"); !errors.Is(err, kernel.ErrNoResource) {
		t.Errorf("without the scope: %v", err)
	}
}

func blocks(content []json.RawMessage) (list [][]byte) {
	for _, b := range content {
		list = append(list, b)
	}
	return list
}

func TestAdoptedPrompts(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.adopted()
	if _, err := r.h.Load(t.Context(), "demo"); err != nil {
		t.Fatal(err)
	}
	ask := func(c *kernel.Caller, method, params string) string {
		h, ok := r.k.MethodHandler(c, "", method)
		if !ok {
			return "nobody serves it"
		}
		raw, err := h.HandleMethod(t.Context(), c, nil, method, json.RawMessage(params))
		if err != nil {
			return err.Error()
		}
		return string(raw)
	}
	reader, stranger := caller("demo:read"), caller("tickets:read")
	for _, tt := range []struct {
		c                    *kernel.Caller
		method, params, want string
	}{
		{reader, "prompts/list", `{}`, `{"prompts":[{"name":"demo.greet","description":"Greets.","arguments":[{"name":"who","required":true}]}]}`},
		{stranger, "prompts/list", `{}`, `{"prompts":[]}`},
		{reader, "prompts/get", `{"name":"demo.greet","arguments":{"who":"Ann"}}`, `{"messages":[{"content":{"type": "text", "text": "Greet Ann"},"role":"user"}]}`},
		{reader, "prompts/get", `{"name":"greet"}`, kernel.ErrNoResource.Error()},
		{stranger, "prompts/get", `{"name":"demo.greet"}`, kernel.ErrNoResource.Error()},
		{reader, "resources/templates/list", `{}`, `{"resourceTemplates":[{"uriTemplate":"mcp://demo/demo://item/{id}","name":"item","description":"A resource template of the MCP server demo.","mimeType":"text/plain"}]}`},
		{stranger, "resources/templates/list", `{}`, `{"resourceTemplates":[]}`},
	} {
		var compact bytes.Buffer
		got := ask(tt.c, tt.method, tt.params)
		if json.Compact(&compact, []byte(got)) == nil {
			got = compact.String()
		}
		want := strings.ReplaceAll(tt.want, `": "`, `":"`)
		if got != strings.ReplaceAll(want, `", "`, `","`) {
			t.Errorf("%s %s: got %s, want %s", tt.method, tt.params, got, want)
		}
	}
}

// progressSession collects what a plugin sends to a client.
type progressSession struct {
	mu   sync.Mutex
	sent []string
}

func (s *progressSession) Notify(_ context.Context, _ string, params json.RawMessage) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, string(params))
	return nil
}

func (s *progressSession) Request(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return nil, errors.ErrUnsupported
}
func (s *progressSession) ProgressToken() any            { return "mine" }
func (s *progressSession) Capabilities() json.RawMessage { return nil }

func TestAdoptedProgress(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.adopted()
	if _, err := r.h.Load(t.Context(), "demo"); err != nil {
		t.Fatal(err)
	}
	s := &progressSession{}
	if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: caller("demo:read"), Tool: "demo.slow", Session: s}); err != nil {
		t.Fatal(err)
	}
	if len(s.sent) != 3 || !strings.Contains(s.sent[2], `"progressToken":"mine"`) {
		t.Errorf("progress: %q", s.sent)
	}
}

// A server that changes its tools after it was adopted shows the changed ones to nobody.
func TestAdoptedServerChanges(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	log := &kernel.MemoryLog{}
	r.h.o.Log = log
	r.adopted()
	if _, err := r.h.Load(t.Context(), "demo"); err != nil {
		t.Fatal(err)
	}
	sub, err := r.k.Subscribe("default")
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	who := caller("demo:read", "demo:write")
	if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: who, Tool: "demo.evolve"}); err != nil {
		t.Fatal(err)
	}
	var change kernel.Change
	for deadline := time.After(10 * time.Second); !change.Tools || !change.Resources; {
		select {
		case <-sub.Ready():
			c := sub.Next()
			change.Tools, change.Resources = change.Tools || c.Tools, change.Resources || c.Resources
		case <-deadline:
			t.Fatal("nobody was notified")
		}
	}
	for _, tool := range []string{"demo.text", "demo.picture", "demo.new"} {
		if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: who, Tool: tool}); manifest.AsError(err).Code != manifest.BadRequest {
			t.Errorf("%s is still offered: %v", tool, err)
		}
	}
	if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: who, Tool: "demo.links"}); err != nil {
		t.Errorf("a tool that has not changed: %v", err)
	}
	notes := strings.Join(r.h.List()[0].Notes, "\n")
	for _, want := range []string{"demo.text is withdrawn: " + reasonChanged, "demo.picture is withdrawn: " + reasonVanished, "not offered: new", "agentctl plugin adopt demo --again"} {
		if !strings.Contains(notes, want) {
			t.Errorf("notes without %q:\n%s", want, notes)
		}
	}
	list, _ := r.k.ListResources(who, "", "", 10)
	if last := list[len(list)-1]; last.URI != "mcp://demo/demo://late" || last.Description != "" || strings.Contains(last.Name, "Ignore") {
		t.Errorf("a later resource: %+v", last)
	}
	// The events are appended after the tools are withdrawn.
	until(t, "two events of withdrawn tools", func() bool {
		events := 0
		_ = log.Replay(t.Context(), 0, func(e kernel.Event) error {
			if e.Type == eventPlugin && strings.Contains(string(e.Payload), `"action":"withdraw"`) {
				events++
			}
			return nil
		})
		return events == 2
	})
}

func TestAdoptRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	adopt := func(command ...string) error {
		_, err := Adopt(t.Context(), AdoptOptions{Name: "odd", Folder: dir, Command: command, NoSandbox: sandbox.Available() != nil, Timeout: 5 * time.Second})
		return err
	}
	for want, command := range map[string][]string{
		"it ended before it answered": {"/bin/sh", "-c", "read x; exit 3"},
		"no such file":                {"/nonexistent/server"},
		"neither an absolute path":    {"a/b"},
		"not found":                   {"no-such-program-anywhere"},
		"no tools, resources":         {"/bin/sh", "-c", `read x; echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{}}}'; cat >/dev/null`},
		"of more than 4 MiB":          {"/bin/sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x"},
		"not a JSON-RPC message":      {"/bin/sh", "-c", "echo '{nonsense'; cat >/dev/null"},
		"before it answered":          {"/bin/sh", "-c", `read x; echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}}'; read x; read x`},
	} {
		if err := adopt(command...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", command, err, want)
		}
	}
	var e *AdoptError
	if err := adopt("/bin/sh", "-c", "echo gone wrong >&2; exit 3"); !errors.As(err, &e) || e.Stderr != "gone wrong" {
		t.Errorf("%v", err)
	}
	script := filepath.Join(dir, "open")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(script, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := adopt(script); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
		t.Errorf("a program that everybody may write: %v", err)
	}
	if _, err := Adopt(t.Context(), AdoptOptions{Name: "kernel", Folder: dir, Command: []string{"/bin/true"}}); err == nil {
		t.Error("the name kernel was accepted")
	}
}

// Many servers print lines that are no messages; clients skip them. What a manifest cannot have of a
// long list is reported, and nothing of it is reported as new later.
func TestAdoptNoise(t *testing.T) {
	t.Parallel() // it waits for listQuiet
	r := newHarness(t)
	dir := r.folder("odd", "{}", "")
	server := strings.Replace(shellServer(`echo debug; echo '{"jsonrpc":"2.0","id":'$id',"result":{"content":[]}}'`), "while", "echo Starting...\nwhile", 1)
	server = strings.ReplaceAll(server, `"capabilities":{}`, `"capabilities":{"tools":{}}`)
	server = strings.ReplaceAll(server, `{"name":"odd.do"}`, `'$(seq -s, -f '{"name":"t%g","inputSchema":{"type":"object"}}' 300 | sed 's/"t2"/"t\\u0000"/')'`)
	if err := os.WriteFile(filepath.Join(dir, "server"), []byte(server), 0o755); err != nil {
		t.Fatal(err)
	}
	a, err := Adopt(t.Context(), AdoptOptions{Name: "odd", Folder: dir, Command: []string{"./server"}, Private: r.h.o.Private, NoSandbox: r.h.o.NoSandbox})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(a.LeftOut); n != 2 || a.LeftOut[1].Name != "44 more of tools" || len(a.Manifest.Tools) != kernel.MaxToolsPerPlugin-1 {
		t.Errorf("%d tools, left out: %v", len(a.Manifest.Tools), a.LeftOut)
	}
	if err := os.WriteFile(filepath.Join(dir, manifestFile), a.JSON, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.k.Call(t.Context(), &kernel.Request{Caller: caller("odd:write"), Tool: "odd.t1"}); err != nil {
		t.Error(err)
	}
	for _, line := range []string{"Starting...", "debug"} {
		if r.logs.FilterMessage("plugin stdout").FilterField(zap.String("line", line)).Len() != 1 {
			t.Errorf("the line %q is not in the log", line)
		}
	}
	if n := r.logs.FilterMessage("plugin differs from its manifest").Len(); n != 0 {
		t.Errorf("%d notes", n)
	}
}

// Root adopts for the relay's user, who may not be able to enter the folder above the state directory:
// so it is with DynamicUser=.
func TestAdoptForUser(t *testing.T) {
	if os.Geteuid() != 0 || sandbox.Available() != nil {
		t.Skip("only root may adopt for others, and only in a sandbox")
	}
	dir, err := os.MkdirTemp("", "adopt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	closed := filepath.Join(dir, "closed")
	state := filepath.Join(closed, "state")
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(closed, 0o700), os.Mkdir(state, 0o755)); err != nil {
		t.Fatal(err)
	}
	server := strings.ReplaceAll(shellServer(""), `"capabilities":{}`, `"capabilities":{"tools":{}}`)
	server = strings.ReplaceAll(server, `"odd.do"`, `"do","inputSchema":{"type":"object"}`)
	folder := filepath.Join(dir, "odd")
	if err := errors.Join(os.Mkdir(folder, 0o755), os.WriteFile(filepath.Join(folder, "server"), []byte(server), 0o755)); err != nil {
		t.Fatal(err)
	}
	adopt := func(read ...string) error {
		_, err := Adopt(t.Context(), AdoptOptions{Name: "odd", Folder: folder, Command: []string{"./server"}, Sandbox: DeclaredSandbox{Read: read},
			Private: []string{state}, User: &syscall.Credential{Uid: 65534, Gid: 65534}})
		return err
	}
	if err := adopt(); err != nil {
		t.Error(err)
	}
	if err := adopt(os.TempDir()); err == nil || !strings.Contains(err.Error(), "the relay keeps to itself") {
		t.Errorf("it reads what contains the state directory: %v", err)
	}
}

func TestPublicName(t *testing.T) {
	long := strings.Repeat("x", 80)
	for name, want := range map[string]string{"get-sum": "p.get-sum", "a.b/c ü": "p.a_b_c__", "Ab_9": "p.Ab_9", long: "p." + strings.Repeat("x", 53) + "_"} {
		if got := PublicName("p", name); !strings.HasPrefix(got, want) || len(got) > manifest.MaxToolNameLen || name != long && got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func TestURIs(t *testing.T) {
	for server, public := range map[string]string{
		"file:///a b": "mcp://p/file:///a%20b", "demo://x?y#z": "mcp://p/demo://x?y#z", "mcp://p/all.json": "mcp://p/all.json", "mcp://q/all.json": "mcp://p/mcp://q/all.json",
	} {
		if got := publicURI("p", server); got != public {
			t.Errorf("%s: %s, want %s", server, got, public)
		}
		if got := serverURI("p", public); got != strings.ReplaceAll(server, " ", "%20") {
			t.Errorf("%s: back to %s", public, got)
		}
	}
}

// A plugin cannot take the calls of another by a name that is the same without dots.
func TestFlatNames(t *testing.T) {
	k := kernel.New(kernel.Options{})
	plugin := func(name, tool string) *Plugin {
		m := &kernel.Manifest{Name: name, Version: "1.0.0", Tools: []*kernel.Tool{{Name: tool, ToolInfo: &kernel.ToolInfo{Scope: manifest.ScopeTicketsRead}}}}
		return newPlugin(source{manifest: m}, newWatchSet(), "", zap.NewNop())
	}
	first := plugin("a", "a.b_c")
	if err := k.Load(first, false); err != nil {
		t.Fatal(err)
	}
	if err := k.Load(plugin("a_b", "a_b.c"), false); err == nil || !strings.Contains(err.Error(), "names=flat") {
		t.Errorf("got %v", err)
	}
	if err := k.Load(plugin("a", "a.b_c"), true); err != nil {
		t.Errorf("in its own place: %v", err)
	}
}

func TestToolDigest(t *testing.T) {
	base := toolDigest(json.RawMessage(`{"name":"a","description":"b","inputSchema":{"type":"object","maximum":1}}`))
	for raw, same := range map[string]bool{
		`{"inputSchema":{"maximum":1.0,"type":"object"}, "description":"\u0062","name":"a","_meta":{"x":1}}`: true,
		`{"name":"a","description":"c","inputSchema":{"type":"object","maximum":1}}`:                         false,
		`{"name":"a","description":"b","inputSchema":{"type":"object","maximum":2}}`:                         false,
		`{"name":"a","description":"b","inputSchema":{"type":"object","maximum":1},"annotations":{}}`:        false,
	} {
		if (toolDigest(json.RawMessage(raw)) == base) != same {
			t.Errorf("%s: same is %v", raw, !same)
		}
	}
}

func TestNPXPackage(t *testing.T) {
	for command, want := range map[string]string{
		"npx -y @modelcontextprotocol/server-everything stdio": "@modelcontextprotocol/server-everything stdio",
		"/usr/bin/npx --yes some-server@1.2.3 -v /x":           "some-server@1.2.3 -v /x",
		"node server.js":               "no",
		"npx -y ../evil":               "error",
		"npx -y https://example.org/x": "error",
		"npx --package=x y":            "error",
		"npx -y":                       "error",
		"npx file:x":                   "error",
		"uvx mcp-server-git":           "error",
	} {
		pkg, args, isNPX, err := NPXPackage(strings.Fields(command))
		got := strings.Join(append([]string{pkg}, args...), " ")
		switch {
		case err != nil:
			got = "error"
		case !isNPX:
			got = "no"
		}
		if got != want {
			t.Errorf("%s: %s (%v), want %s", command, got, err, want)
		}
	}
}
