package test

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
)

// RFC 6750, RFC 9728: a caller without a token gets the metadata's URL, and can read it.
func TestResourceMetadata(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	for _, path := range []string{"/mcp", "/mcp/tools/call"} {
		for token, wantError := range map[string]bool{"": false, "Bearer x.y.z": true} {
			a := r.do(http.MethodPost, path, `{}`, r.headers("Authorization", token))
			r.wantRefusal(a, http.StatusUnauthorized, manifest.SafetyDenied)
			challenge := a.header.Get("WWW-Authenticate")
			url := regexp.MustCompile(`^Bearer .*resource_metadata="(http[^"]*)"$`).FindStringSubmatch(challenge)
			if url == nil || strings.Contains(challenge, `error="invalid_token"`) != wantError {
				t.Fatalf("%s %q: WWW-Authenticate %q", path, token, challenge)
			}
			meta := r.do(http.MethodGet, strings.TrimPrefix(url[1], r.url), "", nil)
			var m map[string]any
			if err := json.Unmarshal([]byte(meta.body), &m); err != nil || meta.status != http.StatusOK || m["resource"] != r.url+"/mcp" {
				t.Errorf("%d %s: %v", meta.status, meta.body, err)
			}
			if _, ok := m["authorization_servers"]; ok {
				t.Error("an authorization server where none is configured")
			}
		}
	}
	a := r.do(http.MethodPost, "/mcp", `{}`, r.headers("Authorization", "Bearer "+r.mint(auth.MintRequest{Class: "device"}).Token))
	r.wantRefusal(a, http.StatusForbidden, manifest.SafetyDenied)
}

// A page of another origin, or one that resolves its own name to this machine, gets
// nothing, whatever the method.
func TestForeignOrigins(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	paths := map[string][]string{
		"/mcp": {http.MethodGet, http.MethodPost, http.MethodDelete}, "/mcp/tools/call": {http.MethodPost}, "/v1/nodes": {http.MethodGet},
		"/v1/device/ws": {http.MethodGet}, "/schemas/": {http.MethodGet}, "/healthz": {http.MethodGet}, "/.well-known/oauth-protected-resource": {http.MethodGet},
	}
	for path, methods := range paths {
		for _, method := range methods {
			for k, v := range map[string]string{"Origin": "https://evil.example", "Host": "evil.example:8460"} {
				a := r.do(method, path, `{}`, r.headers(k, v, "Upgrade", "websocket", "Connection", "Upgrade", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="))
				r.wantRefusal(a, http.StatusForbidden, manifest.SafetyDenied)
				if a.header.Get("Access-Control-Allow-Origin") != "" {
					t.Errorf("%s %s: CORS headers for a foreign page", method, path)
				}
			}
			for _, origin := range []string{"null", "http://" + r.addr + ".evil.example", "http://localhost", "file://"} {
				r.wantRefusal(r.do(method, path, `{}`, r.headers("Origin", origin)), http.StatusForbidden, manifest.SafetyDenied)
			}
		}
	}
	a := r.do(http.MethodOptions, "/mcp", "", map[string]string{"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
	r.wantRefusal(a, http.StatusForbidden, manifest.SafetyDenied)
}

// A page of an allowed origin may call, and gets a matching preflight answer; a public name
// that a proxy passes on is served.
func TestAllowedOrigins(t *testing.T) {
	t.Parallel()
	const page = "https://console.example"
	r := newTestRelay(t, func(o *relay.Options) {
		o.AllowOrigin, o.Public = []string{"https://Console.example"}, "https://relay.example/"
	})
	m := r.device(mockOptions{})
	for _, path := range []string{"/mcp", "/mcp/tools/call", "/v1/nodes"} {
		a := r.do(http.MethodOptions, path, "", map[string]string{"Origin": page, "Access-Control-Request-Method": "POST", "Host": "Relay.EXAMPLE"})
		if a.status != http.StatusNoContent || a.header.Get("Access-Control-Allow-Origin") != page || a.header.Get("Vary") != "Origin" ||
			!strings.Contains(a.header.Get("Access-Control-Allow-Headers"), "Authorization") {
			t.Errorf("%s: preflight %d %v", path, a.status, a.header)
		}
	}
	a := r.call(m.echoTool(), text("x"), "Origin", page, "Host", "relay.example")
	if a.status != http.StatusOK || a.header.Get("Access-Control-Allow-Origin") != page {
		t.Errorf("%d %v %s", a.status, a.header, a.body)
	}
	init := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`
	a = r.do(http.MethodPost, "/mcp", init, r.headers("Origin", page, "Host", "relay.example", "Accept", "application/json, text/event-stream"))
	if a.status != http.StatusOK || !strings.Contains(a.body, `"protocolVersion":"2025-11-25"`) || !strings.Contains(a.header.Get("Access-Control-Expose-Headers"), "Mcp-Session-Id") {
		t.Errorf("%d %v %s", a.status, a.header, a.body)
	}
	a = r.do(http.MethodPost, "/mcp", init, r.headers("Host", "relay.example", "Authorization", ""))
	if !strings.Contains(a.header.Get("WWW-Authenticate"), `resource_metadata="https://relay.example/.well-known/oauth-protected-resource/mcp"`) {
		t.Errorf("WWW-Authenticate %q", a.header.Get("WWW-Authenticate"))
	}
}

// --anonymous: a caller without a token is a read-only one of the default tenant; a bad
// token is still a bad token.
func TestAnonymous(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		own, other := r.device(mockOptions{}), r.device(mockOptions{tenant: "other"})
		if a := r.call(own.echoTool(), text("x"), "Authorization", ""); a.status != http.StatusOK {
			t.Errorf("%d %s", a.status, a.body)
		}
		r.waitAudited("actor=anonymous", "decision=allow", "node_id="+own.node)
		r.wantRefusal(r.call(other.echoTool(), text("x"), "Authorization", ""), http.StatusForbidden, manifest.SafetyDenied)
		r.wantRefusal(r.call(own.echoTool(), text("x"), "Authorization", "Bearer x.y.z"), http.StatusUnauthorized, manifest.SafetyDenied)
		if len(other.cmds()) != 0 {
			t.Error("another tenant's device was asked")
		}
	}, func(o *relay.Options) { o.Anonymous = true })
}
