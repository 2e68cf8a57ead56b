package test

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// vault is a plugin whose answers have secrets and an output schema.
type vault struct{}

const vaultSchema = `{"type":"object","additionalProperties":false,"required":["user","password","pin"],` +
	`"properties":{"user":{"type":"string"},"password":{"type":"string"},"pin":{"type":"integer"},"kind":{"enum":["S3CRET"]},"notes":{"type":"string"}}}`

func (vault) Manifest() *kernel.Manifest {
	tool := func(name string) *kernel.Tool {
		return &kernel.Tool{Name: name, ToolInfo: &kernel.ToolInfo{Description: "A test.", InputSchema: json.RawMessage(`{"type":"object"}`),
			OutputSchema: json.RawMessage(vaultSchema), Scope: manifest.ScopeCallReadOnly}}
	}
	return &kernel.Manifest{Name: "vault", Version: "1.0.0", Tools: []*kernel.Tool{tool("vault.get"), tool("vault.enum"), tool("vault.large")},
		Resources: []*kernel.Resource{{URI: "mcp://vault/all.json", Name: "all", Scope: manifest.ScopeCallReadOnly}}}
}

func (vault) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	answer := `{"user":"ann","password":"S3CRET","pin":5813}`
	switch r.Tool {
	case "vault.enum":
		answer = `{"user":"ann","password":"x","pin":1,"kind":"S3CRET"}`
	case "vault.large":
		answer = `{"user":"ann","password":"x","pin":1,"notes":"` + strings.Repeat("water the beans ", 1000) + `"}`
	}
	return &kernel.Result{Structured: json.RawMessage(answer)}, nil
}

func (vault) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return []byte(`{"password":"S3CRET"}`), nil
}

func withVault(o *relay.Options) {
	withBuiltins(o)
	o.Plugins = append(o.Plugins, func(*kernel.Kernel) kernel.Plugin { return vault{} })
}

// checkAnnounced validates a structured result against the schema that the client was given, as the
// official clients do; they also refuse a result without structured content.
func checkAnnounced(t *testing.T, c *mcpClient, res *mcp.CallToolResult, tool string) {
	t.Helper()
	list := c.list()
	i := slices.IndexFunc(list, func(l *mcp.Tool) bool { return l.Name == tool })
	if i < 0 {
		t.Fatalf("%s is not listed", tool)
	}
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	for name, doc := range map[string]any{"schema.json": list[i].OutputSchema, "result.json": res.StructuredContent} {
		v, err := jsonschema.UnmarshalJSON(strings.NewReader(mustMarshal(t, doc)))
		if err != nil {
			t.Fatal(err)
		}
		if name == "result.json" {
			defer func() {
				s, err := compiler.Compile("schema.json")
				if err != nil {
					t.Fatalf("%s: the announced schema: %v", tool, err)
				}
				if err := s.Validate(v); err != nil {
					t.Errorf("%s: %v\n%s", tool, err, mustMarshal(t, res.StructuredContent))
				}
			}()
		} else if err := compiler.AddResource(name, v); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStagesKeepTheSchema: whatever redact and compress rewrite, a client of each era gets what its
// tools/list announced, and no secret.
func TestStagesKeepTheSchema(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2025-06-18", "2025-11-25", "2026-07-28"} {
		t.Run(version, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *testRelay) {
				admin := r.admin()
				c := r.mcp(r.agent, version, "")
				before := mustMarshal(t, c.list())
				secretFree := func(tool string) *mcp.CallToolResult {
					t.Helper()
					res := c.call(tool, nil, nil)
					checkAnnounced(t, c, res, tool)
					if all := mustMarshal(t, res); strings.Contains(all, "S3CRET") || strings.Contains(all, "5813") {
						t.Errorf("%s: %s", tool, all)
					}
					return res
				}
				r.control(admin, "kernel.middleware.configure", `{"name":"redact","config":{"fields":["password","pin"],"patterns":["S3CRET"]}}`)
				r.control(admin, "kernel.middleware.enable", `{"name":"redact"}`)
				if after := mustMarshal(t, c.list()); after != before {
					t.Errorf("redact changed the list: %s", after)
				}
				res := secretFree("vault.get")
				if got := mustMarshal(t, res.StructuredContent); res.IsError || got != `{"password":"[redacted]","pin":0,"user":"ann"}` || mustMarshal(t, res.Meta["agentctl/redacted"]) != `["/pin"]` {
					t.Errorf("got %s, _meta %v", got, res.Meta)
				}
				if res = secretFree("vault.enum"); !res.IsError || !strings.Contains(mustMarshal(t, res.Content), `\"kind\":\"[redacted]\"`) {
					t.Errorf("an enum: %s", mustMarshal(t, res))
				}
				if a := r.call("vault.get", `{}`); a.status != http.StatusOK || a.body != `{"user":"ann","password":"[redacted]","pin":0}` {
					t.Errorf("over HTTP: %d %s", a.status, a.body)
				}
				if a := r.call("vault.enum", `{}`); a.status != http.StatusInternalServerError || !strings.Contains(a.body, `"reason":"redact"`) || strings.Contains(a.body, "S3CRET") {
					t.Errorf("an enum over HTTP: %d %s", a.status, a.body)
				}

				dropSignals(c.tools)
				r.control(admin, "kernel.middleware.configure", `{"name":"compress","config":{"force":true}}`)
				r.control(admin, "kernel.middleware.enable", `{"name":"compress"}`)
				wantSignal(t, "compress", c.tools)
				res = c.call("vault.large", nil, nil)
				checkAnnounced(t, c, res, "vault.large")
				if !strings.Contains(mustMarshal(t, res.StructuredContent), `"agentctl/packed"`) {
					t.Errorf("not packed: %s", mustMarshal(t, res))
				}
				secretFree("vault.get")
				secretFree("vault.enum")
				node := r.device(mockOptions{name: "attic"}).node
				if res = c.call("fleet.describe", map[string]any{"board": node}, nil); res.IsError {
					t.Errorf("a plugin that calls others, while results are packed: %s", mustMarshal(t, res))
				}
				r.control(admin, "kernel.middleware.disable", `{"name":"compress"}`)
				wantSignal(t, "compress is off", c.tools)
			}, withVault)
		})
	}
}

// TestDeniedIsNotListed: what a rule denies to a caller is in none of its lists; others see it, and the
// clients are notified when rules change.
func TestDeniedIsNotListed(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2025-11-25", "2026-07-28"} {
		t.Run(version, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *testRelay) {
				admin := r.admin()
				m := r.device(mockOptions{name: "attic"})
				ann := r.mcp(r.agent, version, "?toolset=all")
				bob := r.mcp(r.agentOf(auth.DefaultTenant), version, "?toolset=all")
				lists := func(c *mcpClient) string {
					var names []string
					for _, tool := range c.list() {
						if strings.HasPrefix(tool.Name, "vault.") || strings.HasSuffix(tool.Name, ".echo.invoke") {
							names = append(names, tool.Name)
						}
					}
					res, err := c.cs.ListResources(t.Context(), nil)
					if err != nil {
						t.Fatal(err)
					}
					for _, l := range res.Resources {
						if strings.HasPrefix(l.URI, "mcp://vault/") {
							names = append(names, l.URI)
						}
					}
					describe := c.call("fleet.describe", map[string]any{"board": m.node}, nil)
					if strings.Contains(mustMarshal(t, describe.StructuredContent), `"tool":"echo"`) {
						names = append(names, "echo of the board")
					}
					return strings.ReplaceAll(strings.Join(names, " "), m.node, "NODE")
				}
				all := lists(bob)
				if all != "sysecho.NODE.echo.invoke vault.enum vault.get vault.large mcp://vault/all.json echo of the board" || lists(ann) != all {
					t.Fatalf("before: %s", all)
				}
				time.Sleep(2 * time.Second)
				dropSignals(ann.tools)
				dropSignals(ann.resources)
				r.control(admin, "kernel.middleware.configure", `{"name":"acl","config":{"rules":[`+
					`{"effect":"allow","tool":"vault.get"},{"effect":"deny","tool":"vault.*","agent":"`+r.subject()+`"},`+
					`{"effect":"deny","tool":"sysecho.*","agent":"`+r.subject()+`"},{"effect":"deny","uri":"mcp://vault/*","agent":"`+r.subject()+`"}]}}`)
				r.control(admin, "kernel.middleware.enable", `{"name":"acl"}`)
				wantSignal(t, "tools", ann.tools)
				wantSignal(t, "resources", ann.resources)
				if got := lists(ann); got != "vault.get" {
					t.Errorf("a caller whom the rules name sees %s", got)
				}
				if got := lists(bob); got != all {
					t.Errorf("another sees %s", got)
				}
				if res := ann.call("vault.enum", nil, nil); !res.IsError {
					t.Error("a tool that is not listed is served")
				}
				r.control(admin, "kernel.middleware.disable", `{"name":"acl"}`)
				wantSignal(t, "the end of the rules", ann.tools)
				if got := lists(ann); got != all {
					t.Errorf("without rules: %s", got)
				}
			}, withVault)
		})
	}
}

func dropSignals(c chan struct{}) {
	for len(c) > 0 {
		<-c
	}
}

func wantSignal(t *testing.T, what string, c chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(5 * time.Second):
		t.Errorf("%s: no list_changed", what)
	}
}

// TestCompressedAnswers: large JSON answers have gzip for clients that accept it, small ones, event
// streams and answers about tokens have not.
func TestCompressedAnswers(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t, withVault)
	admin := r.admin()
	for range 40 {
		r.agentOf(auth.DefaultTenant)
	}
	plain := r.call("vault.large", `{}`)
	if plain.status != http.StatusOK || plain.header.Get("Content-Encoding") != "" || len(plain.body) < 10_000 {
		t.Fatalf("without Accept-Encoding: %d %v", plain.status, plain.header)
	}
	get := func(path string) func(string) *answer {
		return func(accept string) *answer {
			return r.do(http.MethodGet, path, "", map[string]string{"Authorization": "Bearer " + admin, "Accept-Encoding": accept})
		}
	}
	modern := func(accept string) *answer {
		return r.do(http.MethodPost, "/mcp", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"vault.large","_meta":{`+
			`"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}}}`,
			r.headers("Accept", "application/json, text/event-stream", "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", "vault.large", "Accept-Encoding", accept))
	}
	for _, tt := range []struct {
		name, accept string
		do           func(accept string) *answer
		want         bool
	}{
		{"a call", "gzip", func(a string) *answer { return r.call("vault.large", `{}`, "Accept-Encoding", a) }, true},
		{"a call with weights", "br;q=1, gzip;q=0.2", func(a string) *answer { return r.call("vault.large", `{}`, "Accept-Encoding", a) }, true},
		{"a call that refuses it", "gzip;q=0", func(a string) *answer { return r.call("vault.large", `{}`, "Accept-Encoding", a) }, false},
		{"a call that prefers plain", "identity, gzip;q=0.5", func(a string) *answer { return r.call("vault.large", `{}`, "Accept-Encoding", a) }, false},
		{"a small call", "gzip", func(a string) *answer { return r.call("vault.get", `{}`, "Accept-Encoding", a) }, false},
		{"a modern call", "gzip", modern, true},
		{"the schemas", "gzip", get("/schemas/"), true},
		{"tokens", "gzip", get("/v1/tokens"), false},
		{"invites", "gzip", get("/v1/invites"), false},
		{"a nonce", "gzip", get("/v1/enroll"), false},
	} {
		a := tt.do(tt.accept)
		body := a.body
		if packed := a.header.Get("Content-Encoding") == "gzip"; packed != tt.want || a.status != http.StatusOK {
			t.Errorf("%s: %d %v, want gzip: %t", tt.name, a.status, a.header, tt.want)
		} else if packed {
			zr, err := gzip.NewReader(strings.NewReader(a.body))
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(zr)
			if err != nil || len(data) < len(a.body) || a.header.Get("Vary") != "Accept-Encoding" {
				t.Errorf("%s: %d bytes of %d, %v, Vary %q", tt.name, len(a.body), len(data), err, a.header.Get("Vary"))
			}
			body = string(data)
		}
		if strings.HasPrefix(tt.name, "a call") && body != plain.body {
			t.Errorf("%s: another body: %.100s", tt.name, body)
		}
		if !json.Valid([]byte(body)) {
			t.Errorf("%s: not JSON: %.100s", tt.name, body)
		}
	}
}
