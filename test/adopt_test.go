package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/relay"
	"agentctl/relay/auth"
)

// adoptServer makes a plugin of an MCP server in dir, with the binary.
func adoptServer(t *testing.T, dir, name string, flagsAndCommand ...string) {
	t.Helper()
	args := append([]string{"plugin", "adopt", name, "--state-dir", t.TempDir(), "--plugin-dir", dir}, flagsAndCommand...)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(t, "agentctl", ""), args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("agentctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// relayWith starts a relay with adopted plugins, and mints a token for all of them.
func relayWith(t *testing.T, dir string, plugins ...string) (r *testRelay, token string) {
	t.Helper()
	r = newTestRelay(t, func(o *relay.Options) { o.PluginDir, o.ExternalPlugins = dir, plugins })
	scopes := []string{"tools:list"}
	for _, name := range plugins {
		scopes = append(scopes, name+":read", name+":write")
	}
	token = r.mint(auth.MintRequest{Class: "agent", Tenant: auth.DefaultTenant, Scopes: scopes, PluginScopes: scopes[1:]}).Token
	c := r.mcp(token, "2025-11-25", "")
	eventually(t, "the plugins to be loaded", func() bool {
		tools := c.list()
		return !slices.ContainsFunc(plugins, func(name string) bool {
			return !slices.ContainsFunc(tools, func(t *mcp.Tool) bool { return strings.HasPrefix(t.Name, name+".") })
		})
	})
	return r, token
}

// names lists the tools, prompts, resources and templates that a client sees.
func (c *mcpClient) names() string {
	c.t.Helper()
	var all []string
	for _, tool := range c.list() {
		all = append(all, tool.Name)
	}
	prompts, err := c.cs.ListPrompts(c.t.Context(), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, p := range prompts.Prompts {
		all = append(all, p.Name)
	}
	resources, err := c.cs.ListResources(c.t.Context(), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, r := range resources.Resources {
		all = append(all, r.URI)
	}
	templates, err := c.cs.ListResourceTemplates(c.t.Context(), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, r := range templates.ResourceTemplates {
		all = append(all, r.URITemplate)
	}
	return strings.Join(all, " ")
}

// read reads a resource: its type, and its text or bytes.
func (c *mcpClient) read(uri string) string {
	c.t.Helper()
	res, err := c.cs.ReadResource(c.t.Context(), &mcp.ReadResourceParams{URI: uri})
	if err != nil {
		c.t.Fatalf("%s: %v", uri, err)
	}
	return res.Contents[0].MIMEType + " " + res.Contents[0].Text + string(res.Contents[0].Blob)
}

// Clients of each era see all of a server that was written without the relay in mind: here with the
// standard library of Python.
func TestAdoptedOverMCP(t *testing.T) {
	t.Parallel()
	const python = "/usr/bin/python3"
	if exec.Command(python, "-c", "import json").Run() != nil {
		t.Skip("there is no python3 in /usr/bin")
	}
	script, err := filepath.Abs("../relay/plugins/process/testdata/server.py")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	adoptServer(t, dir, "demo", "--", python, script)
	adoptServer(t, dir, "more", "--", python, script)
	r, token := relayWith(t, dir, "demo", "more")
	for _, version := range []string{"2025-06-18", "2025-11-25", "2026-07-28"} {
		c := r.mcp(token, version, "?toolset=fleet,demo&names=flat")
		names := c.names()
		for _, want := range []string{"demo_text", "demo_odd_name_", "demo.greet", "more.greet", "mcp://demo/demo://a", "mcp://more/demo://item/{id}"} {
			if !strings.Contains(" "+names+" ", " "+want+" ") {
				t.Errorf("%s: no %s in %s", version, want, names)
			}
		}
		if strings.Contains(names, "more_text") {
			t.Errorf("%s: the toolset has tools of another plugin: %s", version, names)
		}
		for tool, want := range map[string]string{
			"demo_text":    `"content":[{"type":"text","text":"hello"}]`,
			"demo_picture": `"content":[{"type":"image","mimeType":"image/png","data":"AAEC"}]`,
			"demo_fail":    `"isError":true`,
			"demo_links":   `"uri":"mcp://demo/file:///etc/passwd"`,
		} {
			if got := mustMarshal(t, c.call(tool, map[string]any{}, nil)); !strings.Contains(got, want) {
				t.Errorf("%s: %s: %s", version, tool, got)
			}
		}
		c.call("demo_slow", map[string]any{}, mcp.Meta{"progressToken": "mine"})
		for want := 1.0; want <= 3; want++ {
			select {
			case p := <-c.progress:
				if p.Progress != want || p.ProgressToken != "mine" {
					t.Errorf("%s: progress %+v, want %v", version, p, want)
				}
			case <-time.After(patience):
				t.Fatalf("%s: no progress %v", version, want)
			}
		}
		for uri, want := range map[string]string{
			"mcp://demo/demo://a": "text/markdown content of demo://a", "mcp://demo/demo://b": "image/png \x89PNG\x00", "mcp://more/demo://item/7": "text/plain content of demo://item/7",
		} {
			if got := c.read(uri); got != want {
				t.Errorf("%s: %s: %q", version, uri, got)
			}
		}
		p, err := c.cs.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "more.greet", Arguments: map[string]string{"who": "Ann"}})
		if err != nil || !strings.Contains(mustMarshal(t, p), "Greet Ann") {
			t.Errorf("%s: %v, %v", version, p, err)
		}
		if _, err := c.cs.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "none.greet"}); err == nil {
			t.Errorf("%s: a prompt of nobody was found", version)
		}
	}
	// A change of the server's lists reaches the clients.
	c := r.mcp(token, "2025-11-25", "?toolset=fleet,demo&names=flat")
	c.call("demo_evolve", map[string]any{}, nil)
	r.waitNotified(c.tools)
	r.waitNotified(c.resources)
	eventually(t, "the changed lists", func() bool {
		names := c.names()
		return !strings.Contains(names, "demo_text") && strings.Contains(names, "mcp://demo/demo://late")
	})
}

// TestOfficialServers adopts servers that the authors of MCP publish, as people paste them.
func TestOfficialServers(t *testing.T) {
	t.Parallel()
	if os.Getenv("AGENTCTL_ADOPT") == "" {
		t.Skip("installs programs of others; `make test-adopt` runs it (AGENTCTL_ADOPT=1)")
	}
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("npm is not installed")
	}
	dir, docs := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(docs, "a.txt"), []byte("water the beans"), 0o644); err != nil {
		t.Fatal(err)
	}
	const npm = "@modelcontextprotocol/server-"
	adoptServer(t, dir, "everything", "--", "npx", "-y", npm+"everything")
	adoptServer(t, dir, "files", "--write", docs, "--", "npx", "-y", npm+"filesystem", docs)
	adoptServer(t, dir, "memory", "--env", "MEMORY_FILE_PATH=$HOME/memory.json", "--", "npx", "-y", npm+"memory")
	adoptServer(t, dir, "thinking", "--no-network", "--", "npx", "-y", npm+"sequential-thinking")
	r, token := relayWith(t, dir, "everything", "files", "memory", "thinking")
	for _, version := range []string{"2025-11-25", "2026-07-28"} {
		c := r.mcp(token, version, "?toolset=fleet,everything,files,memory,thinking&names=flat")
		for _, tt := range []struct {
			tool string
			args map[string]any
			want string
		}{
			{"everything_get-sum", map[string]any{"a": 1, "b": 2}, "The sum of 1 and 2 is 3."},
			{"everything_get-tiny-image", nil, `"type":"image"`},
			{"everything_get-resource-links", map[string]any{"count": 2}, `"uri":"mcp://everything/demo://resource/dynamic/`},
			{"everything_get-resource-reference", map[string]any{"resourceType": "Text", "resourceId": 1}, `"uri":"mcp://everything/demo://resource/dynamic/text/1"`},
			{"everything_get-structured-content", map[string]any{"location": "New York"}, `"structuredContent":{`},
			{"everything_trigger-long-running-operation", map[string]any{"duration": 1, "steps": 2}, "completed"},
			{"files_read_text_file", map[string]any{"path": filepath.Join(docs, "a.txt")}, "water the beans"},
			{"files_write_file", map[string]any{"path": filepath.Join(docs, "b.txt"), "content": version}, "Successfully"},
			{"files_read_text_file", map[string]any{"path": "/etc/hostname"}, `"isError":true`},
			{"memory_create_entities", map[string]any{"entities": []any{map[string]any{"name": "bean" + version, "entityType": "plant", "observations": []any{"green"}}}}, "bean"},
			{"memory_read_graph", nil, "bean" + version},
			{"thinking_sequentialthinking", map[string]any{"thought": "x", "nextThoughtNeeded": false, "thoughtNumber": 1, "totalThoughts": 1}, "thoughtNumber"},
		} {
			if tt.args == nil {
				tt.args = map[string]any{}
			}
			if got := mustMarshal(t, c.call(tt.tool, tt.args, mcp.Meta{"progressToken": "p"})); !strings.Contains(got, tt.want) {
				t.Errorf("%s: %s: %.500s", version, tt.tool, got)
			}
		}
		if len(c.progress) == 0 {
			t.Errorf("%s: no progress", version)
		}
		if got := c.read("mcp://everything/demo://resource/dynamic/text/3"); !strings.HasPrefix(got, "text/plain Resource 3") {
			t.Errorf("%s: %q", version, got)
		}
		if got := c.read("mcp://everything/demo://resource/dynamic/blob/3"); !strings.HasPrefix(got, "application/octet-stream Resource 3") {
			t.Errorf("%s: %q", version, got)
		}
		if got := c.read("mcp://memory/memory://knowledge-graph"); !strings.Contains(got, "bean"+version) {
			t.Errorf("%s: %q", version, got)
		}
		p, err := c.cs.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "everything.args-prompt", Arguments: map[string]string{"city": "Ulm"}})
		if err != nil || !strings.Contains(mustMarshal(t, p), "weather in Ulm") {
			t.Errorf("%s: %v, %v", version, p, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(docs, "b.txt")); err != nil || string(b) != "2026-07-28" {
		t.Errorf("the written file: %q, %v", b, err)
	}
}
