package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

// request is a request to POST /mcp/tools/call in its parts, so that faults can be put together.
type request struct {
	method, path, origin, host, token, ctype, accept string
	pad                                              int // spaces behind the body
	name                                             string
	short, node, capID, verb                         string
	args, extra                                      string
}

func (r *testRelay) sendRequest(q request) *answer {
	r.t.Helper()
	if q.name == "" {
		q.name = q.short + "." + q.node + "." + q.capID + "." + q.verb
	}
	body := `{"tool":"` + q.name + `","arguments":` + q.args + q.extra + `}` + strings.Repeat(" ", q.pad)
	return r.do(q.method, q.path, body, map[string]string{"Origin": q.origin, "Host": q.host, "Content-Type": q.ctype,
		"Accept": q.accept, "Authorization": q.token})
}

// The order of the checks decides the answer (docs/protocol.md, "Errors"): of any two
// faults in one request, the earlier one in this list is reported. None reaches a device.
func TestOrderOfChecks(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		busy := r.device(mockOptions{script: func(*mockDevice) func(string, link.Cmd) { return func(string, link.Cmd) {} }})
		offline := r.device(mockOptions{})
		offline.kill()
		foreign := r.device(mockOptions{tenant: "other"})
		good := request{method: http.MethodPost, path: "/mcp/tools/call", token: "Bearer " + r.agent, ctype: "application/json",
			accept: "application/json", short: "sysecho", node: busy.node, capID: "echo", verb: "invoke", args: `{"message":"x"}`}
		noScope := "Bearer " + r.agentOf(auth.DefaultTenant, manifest.ScopeToolsList)
		faults := []struct {
			name   string
			put    func(q *request)
			status int
			code   manifest.Code
		}{
			{"path", func(q *request) { q.path = "/mcp/tools/calls" }, http.StatusNotFound, manifest.BadRequest},
			{"method", func(q *request) { q.method = http.MethodPut }, http.StatusMethodNotAllowed, manifest.BadRequest},
			{"host", func(q *request) { q.host = "evil.example" }, http.StatusForbidden, manifest.SafetyDenied},
			{"origin", func(q *request) { q.origin = "https://evil.example" }, http.StatusForbidden, manifest.SafetyDenied},
			{"size", func(q *request) { q.pad = 1 << 20 }, http.StatusRequestEntityTooLarge, manifest.BadRequest},
			{"token", func(q *request) { q.token = "Bearer x.y.z" }, http.StatusUnauthorized, manifest.SafetyDenied},
			{"type", func(q *request) { q.ctype = "text/plain" }, http.StatusBadRequest, manifest.BadRequest},
			{"body", func(q *request) { q.extra = `,"x":1` }, http.StatusBadRequest, manifest.BadRequest},
			{"accept", func(q *request) { q.accept = "text/event-stream" }, http.StatusBadRequest, manifest.BadRequest},
			{"syntax", func(q *request) { q.name = "Sysecho." + q.node + ".echo.invoke" }, http.StatusBadRequest, manifest.BadRequest},
			{"scope", func(q *request) { q.token = noScope }, http.StatusForbidden, manifest.SafetyDenied},
			{"owner", func(q *request) { q.node = foreign.node }, http.StatusForbidden, manifest.SafetyDenied},
			{"tool", func(q *request) { q.capID = "nosuch" }, http.StatusBadRequest, manifest.BadRequest},
			{"offline", func(q *request) { q.node = offline.node }, http.StatusServiceUnavailable, manifest.NodeOffline},
			{"schema", func(q *request) { q.args = `{}` }, http.StatusUnprocessableEntity, manifest.ManifestInvalid},
			{"busy", func(*request) {}, http.StatusTooManyRequests, manifest.RateLimited},
		}
		const waiting = 4 // calls that use up the capability's concurrency
		for range waiting {
			go func() {
				_, _ = r.tryRequest(http.MethodPost, good.path, strings.NewReader(fmt.Sprintf(`{"tool":"%s","arguments":{"message":"wait"}}`, busy.echoTool())), r.headers())
			}()
		}
		eventually(t, "four calls in flight", func() bool { return len(busy.cmds()) == waiting })
		alone := make([]*answer, len(faults))
		for i, f := range faults {
			q := good
			f.put(&q)
			alone[i] = r.sendRequest(q)
			r.wantRefusal(alone[i], f.status, f.code)
		}
		for i, first := range faults {
			for _, second := range faults[i+1:] {
				q := good
				second.put(&q)
				first.put(&q)
				a := r.sendRequest(q)
				if a.status != alone[i].status || message(a) != message(alone[i]) {
					t.Errorf("%s with %s: got %d %s, want %s", first.name, second.name, a.status, a.body, alone[i].body)
				}
			}
		}
		for _, m := range []*mockDevice{busy, offline, foreign} {
			if n := len(m.cmds()); n != 0 && (m != busy || n != waiting) {
				t.Errorf("a refused call reached a device: %d commands", n)
			}
		}
	})
}

func message(a *answer) string {
	_, rest, _ := strings.Cut(a.body, `"message":`)
	m, _, _ := strings.Cut(rest, `,"retryable"`)
	return m
}

// A stream without its Accept is refused for that, whoever asks and for whatever node.
func TestRFC0009AcceptComesFirst(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		own, foreign := r.device(mockOptions{}), r.device(mockOptions{tenant: "other"})
		noScope := "Bearer " + r.agentOf(auth.DefaultTenant, manifest.ScopeToolsList)
		for _, node := range []string{own.node, foreign.node, manifest.NewNodeID()} {
			for _, spelling := range []string{"sys." + node + ".metrics.subscribe", "sys_" + node + "_metrics_subscribe"} {
				for _, token := range []string{"Bearer " + r.agent, noScope} {
					a := r.call(spelling, `{}`, "Authorization", token)
					r.wantRefusal(a, http.StatusBadRequest, manifest.BadRequest)
					if !strings.Contains(a.body, "metrics.snapshot") {
						t.Errorf("the message does not name the snapshot tool: %s", a.body)
					}
				}
			}
		}
		if len(own.cmds())+len(foreign.cmds()) != 0 {
			t.Error("a device was asked")
		}
	})
}

// RFC-0009 §3, §10: one method; errors are envelopes; nothing is upgraded.
func TestRFC0009Methods(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	for path, allow := range map[string]string{"/mcp/tools/call": "POST", "/v1/nodes": "GET, HEAD", "/v1/device/ws": "GET, HEAD", "/schemas/": "GET, HEAD"} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch, http.MethodOptions, "SUBSCRIBE"} {
			if strings.Contains(allow, method) {
				continue
			}
			a := r.do(method, path, "", r.headers())
			r.wantRefusal(a, http.StatusMethodNotAllowed, manifest.BadRequest)
			if a.header.Get("Allow") != allow {
				t.Errorf("%s %s: Allow %q, want %q", method, path, a.header.Get("Allow"), allow)
			}
		}
	}
	if a := r.do(http.MethodHead, "/mcp/tools/call", "", r.headers()); a.status != http.StatusMethodNotAllowed || a.header.Get("Allow") != "POST" {
		t.Errorf("HEAD: %d %v", a.status, a.header)
	}
	for _, path := range []string{"/", "/mcp/tools", "/mcp/tools/call/", "/v1", "/favicon.ico", "/.well-known/oauth-protected-resource/x"} {
		r.wantRefusal(r.do(http.MethodGet, path, "", r.headers()), http.StatusNotFound, manifest.BadRequest)
	}
	m := r.device(mockOptions{})
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		a := r.do(method, "/mcp/tools/call", `{"tool":"`+m.subscribeTool()+`","arguments":{}}`, r.headers("Accept", "text/html",
			"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="))
		if a.status == http.StatusSwitchingProtocols || a.status < 400 {
			t.Errorf("%s with Upgrade: %d %s", method, a.status, a.body)
		}
	}
}

// Request bodies are strict JSON: exact keys, each once, valid UTF-8, 16 levels, nothing after the value.
func TestStrictBody(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		e := m.echoTool()
		bad := []string{
			``, ` `, `null`, `true`, `[]`, `"x"`, `{}`, `{"tool":1}`, `{"tool":null,"arguments":{}}`, `{"arguments":{"message":"x"}}`,
			`{"tool":"` + e + `","arguments":null}`, `{"tool":"` + e + `","arguments":[]}`, `{"tool":"` + e + `","arguments":"{}"}`,
			`{"Tool":"` + e + `","arguments":{"message":"x"}}`, `{"tool":"` + e + `","Arguments":{"message":"x"}}`,
			`{"tool":"` + e + `","tool":"` + e + `","arguments":{"message":"x"}}`,
			`{"tool":"` + e + `","to\u006fl":"` + e + `","arguments":{"message":"x"}}`,
			`{"tool":"` + e + `","arguments":{"message":"x"},"arguments":{"message":"y"}}`,
			`{"tool":"` + e + `","arguments":{"message":"x","message":"y"}}`,
			`{"tool":"` + e + `","arguments":{"message":"x"},"name":"y"}`, `{"tool":"` + e + `","arguments":{"message":"x"},"commit_token":"y"}`,
			`{"tool":"` + e + `","arguments":{"message":"x"}} {}`, `{"tool":"` + e + `","arguments":{"message":"x"}},`,
			`{"tool":"` + e + `","arguments":{"message":"x"},}`, `{'tool':'` + e + `'}`, `{"tool":"` + e + `","arguments":{"message":"x"}`,
			"\xef\xbb\xbf" + `{"tool":"` + e + `","arguments":{"message":"x"}}`, `{"tool":"` + e + `","arguments":{"message":"` + "\xff" + `"}}`,
			`{"tool":"` + e + `","arguments":{"message":"\ud800"}}`, `{"tool":"` + e + `","arguments":{"message":"` + "a\nb" + `"}}`,
			`{"tool":"` + e + `","arguments":{"message":"x","y":` + deep(15) + `}}`, `{"tool":"` + e + `","arguments":{"message":NaN}}`,
			`{"tool":"` + e + `","arguments":{"message":1e999}}`, `{"tool":"` + e + `","arguments":{"message":01}}`,
			`{"tool":"` + e + `"/**/,"arguments":{"message":"x"}}`, deep(100000), strings.Repeat(`{"tool":`, 50000),
		}
		m.expectNoCommand(func() {
			for _, body := range bad {
				r.wantRefusal(r.callRaw(body), http.StatusBadRequest, manifest.BadRequest)
			}
			for _, ctype := range []string{"", "text/plain", "application/json; charset=latin1", "application/jsonx", "multipart/form-data", "application/json, text/plain"} {
				r.wantRefusal(r.call(e, `{"message":"x"}`, "Content-Type", ctype), http.StatusBadRequest, manifest.BadRequest)
			}
		})
		// What is only unusual is not refused.
		for _, ctype := range []string{"application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"} {
			if a := r.call(e, `{"message":"x"}`, "Content-Type", ctype); a.status != http.StatusOK {
				t.Errorf("Content-Type %q: %d %s", ctype, a.status, a.body)
			}
		}
		if a := r.callRaw("\r\n\t" + `{ "arguments" : { "m\u0065ssage" : "x" } , "tool" : "` + e + `" }` + "\n"); a.status != http.StatusOK {
			t.Errorf("white space and escapes: %d %s", a.status, a.body)
		}
		if a := r.callRaw(`{"tool":"` + m.snapshotTool() + `"}`); a.status != http.StatusOK {
			t.Errorf("no arguments: %d %s", a.status, a.body)
		}
		// 15 levels below the body's one are 16; the schema then refuses the key.
		r.wantRefusal(r.call(e, `{"message":"x","y":`+deep(14)+`}`), http.StatusUnprocessableEntity, manifest.ManifestInvalid)
	})
}

// A body has at most one mebibyte, however its length is declared.
func TestBodySize(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		call := `{"tool":"` + m.echoTool() + `","arguments":{"message":"x"}}`
		full := call + strings.Repeat(" ", 1<<20-len(call))
		for _, chunked := range []bool{false, true} {
			post := func(body string) *answer {
				var rd io.Reader = strings.NewReader(body)
				if chunked {
					rd = struct{ io.Reader }{rd}
				}
				a, err := r.tryRequest(http.MethodPost, "/mcp/tools/call", rd, r.headers())
				if err != nil {
					t.Fatalf("chunked %v, %d bytes: %v", chunked, len(body), err)
				}
				return a
			}
			if a := post(full); a.status != http.StatusOK {
				t.Errorf("chunked %v, 1 MiB: %d %s", chunked, a.status, a.body)
			}
			m.expectNoCommand(func() { r.wantRefusal(post(full+" "), http.StatusRequestEntityTooLarge, manifest.BadRequest) })
		}
	})
}

// A body that does not come, or stops in the middle, ends in bounded time, whether
// anybody wanted to read it or not.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, tt := range []struct{ path, token, status string }{
			{"/mcp/tools/call", r.agent, "400"},
			{"/mcp/tools/call", "bad", "401"},
			{"/mcp/tools/call", "", "401"},
			{"/mcp", r.agent, "400"},
			{"/mcp", "bad", "401"},
			{"/nowhere", "", "404"},
		} {
			conn, err := r.dial(t.Context(), "tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			_ = conn.SetDeadline(start.Add(time.Minute))
			_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\nContent-Length: 100\r\n\r\n{", tt.path, r.addr, tt.token)
			b, err := io.ReadAll(conn)
			if d := time.Since(start); err != nil || d > 15*time.Second || !strings.HasPrefix(string(b), "HTTP/1.1 "+tt.status) {
				t.Errorf("%s %.5q: after %s %v %s, want %s within 15 s", tt.path, tt.token, d, err, b, tt.status)
			}
			_ = conn.Close()
		}
	})
}

// A client that does not read its answer does not keep the relay's goroutine.
func TestSlowReaderOfAnAnswer(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, path := range []string{"/v1/nodes", "/schemas/", "/schemas/agentctl.announce@1.0.0", "/.well-known/oauth-protected-resource"} {
			conn, err := r.dial(t.Context(), "tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", path, r.addr, r.agent)
			time.Sleep(time.Minute) // nothing is read: a pipe holds nothing
			_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
			if b, err := io.ReadAll(conn); err != nil || len(b) != 0 {
				t.Errorf("%s: the connection was still open: %d bytes, %v", path, len(b), err)
			}
			_ = conn.Close()
		}
	})
}

// A tenant cannot distinguish another tenant's node from one that does not exist.
func TestTenantsCannotProbe(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		foreign := r.device(mockOptions{tenant: "other"})
		gone := r.device(mockOptions{tenant: "other"})
		gone.kill()
		never := r.mint(auth.MintRequest{Class: "device", Tenant: "other"}).NodeID
		unknown := manifest.NewNodeID()
		foreign.expectNoCommand(func() {
			for _, verb := range []string{"sysecho.echo.invoke", "sys.metrics.snapshot", "sys.metrics.subscribe", "sys.nosuch.snapshot", "nosuch.echo.invoke"} {
				var want string
				for i, node := range []string{unknown, foreign.node, gone.node, never} {
					short, rest, _ := strings.Cut(verb, ".")
					a := r.call(short+"."+node+"."+rest, `{"bad":1}`, "Accept", "text/event-stream, application/json")
					r.wantRefusal(a, http.StatusForbidden, manifest.SafetyDenied)
					got := withoutVariableParts(a, node)
					if i == 0 {
						want = got
					} else if got != want {
						t.Errorf("%s: a foreign node gets\n%s\nan unknown one\n%s", verb, got, want)
					}
				}
			}
		})
		if a := r.do(http.MethodGet, "/v1/nodes", "", r.headers()); a.status != http.StatusOK || strings.Contains(a.body, foreign.node) {
			t.Errorf("the fleet of another tenant: %d %s", a.status, a.body)
		}
	})
}

// withoutVariableParts is an answer without what differs between any two: trace id, date, length of
// nothing else.
func withoutVariableParts(a *answer, node string) string {
	_, trace, _ := strings.Cut(a.body, `"trace_id":"`)
	h := a.header.Clone()
	h.Del("Date")
	return fmt.Sprint(a.status, h, strings.NewReplacer(trace[:32], "TRACE", node, "NODE").Replace(a.body))
}

// The fleet comes in pages, in the order of node ids, of one tenant.
func TestNodesPages(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		want := make([]string, 7)
		for i := range want {
			want[i] = r.mint(auth.MintRequest{Class: "device"}).NodeID
		}
		r.mint(auth.MintRequest{Class: "device", Tenant: "other"})
		slices.Sort(want)
		var got []string
		for after, pages := "", 1; ; pages++ {
			a := r.do(http.MethodGet, "/v1/nodes?limit=3&after="+after, "", r.headers())
			var page struct {
				Nodes []struct {
					NodeID string `json:"node_id"`
				}
				Next string
			}
			if err := json.Unmarshal([]byte(a.body), &page); err != nil || a.status != http.StatusOK || len(page.Nodes) > 3 {
				t.Fatalf("%d %s %v", a.status, a.body, err)
			}
			for _, n := range page.Nodes {
				got = append(got, n.NodeID)
			}
			if after = page.Next; after == "" {
				if pages != 3 {
					t.Errorf("%d pages", pages)
				}
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		for _, limit := range []string{"0", "-1", "5001", "x", "1e3"} {
			r.wantRefusal(r.do(http.MethodGet, "/v1/nodes?limit="+limit, "", r.headers()), http.StatusBadRequest, manifest.BadRequest)
		}
		r.wantRefusal(r.do(http.MethodGet, "/v1/nodes", "", nil), http.StatusUnauthorized, manifest.SafetyDenied)
		events := "Bearer " + r.agentOf(auth.DefaultTenant, manifest.ScopeEventsSubscribe)
		r.wantRefusal(r.do(http.MethodGet, "/v1/nodes", "", r.headers("Authorization", events)), http.StatusForbidden, manifest.SafetyDenied)
	})
}

// Every kind of token gets its status. None of the refused calls reaches the device.
func TestTokens(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		claim := func(k string, v any) string {
			return r.forge(func(_, c map[string]any) { c[k] = v })
		}
		head := func(k string, v any) string {
			return r.forge(func(h, _ map[string]any) { h[k] = v })
		}
		revoked := r.mint(auth.MintRequest{Class: "agent"})
		if _, err := r.relay.Store().Revoke(t.Context(), auth.RevokeRequest{JTI: revoked.JTI}); err != nil {
			t.Fatal(err)
		}
		now := time.Now().Unix()
		good := r.forge(func(_, _ map[string]any) {})
		parts := strings.Split(good, ".")
		tests := []struct {
			name, auth string
			status     int
		}{
			{"none", "", http.StatusUnauthorized},
			{"no scheme", good, http.StatusUnauthorized},
			{"another scheme", "Basic " + good, http.StatusUnauthorized},
			{"empty", "Bearer ", http.StatusUnauthorized},
			{"two parts", "Bearer " + parts[0] + "." + parts[1], http.StatusUnauthorized},
			{"a dot too many", "Bearer " + good + ".x", http.StatusUnauthorized},
			{"huge", "Bearer " + good + strings.Repeat("A", 4096), http.StatusUnauthorized},
			{"other signature", "Bearer " + parts[0] + "." + parts[1] + "." + strings.Repeat("A", len(parts[2])), http.StatusUnauthorized},
			{"other claims", "Bearer " + parts[0] + "." + strings.Split(claim("tid", "other"), ".")[1] + "." + parts[2], http.StatusUnauthorized},
			{"alg none", "Bearer " + head("alg", "none"), http.StatusUnauthorized},
			{"alg HS256", "Bearer " + head("alg", "HS256"), http.StatusUnauthorized},
			{"typ JWT", "Bearer " + head("typ", "JWT"), http.StatusUnauthorized},
			{"unknown kid", "Bearer " + head("kid", "nobody"), http.StatusUnauthorized},
			{"kid as a path", "Bearer " + head("kid", "../keys/x"), http.StatusUnauthorized},
			{"jku", "Bearer " + head("jku", "https://evil.example/jwks"), http.StatusUnauthorized},
			{"other audience", "Bearer " + claim("aud", "agentctl:other"), http.StatusUnauthorized},
			{"other issuer", "Bearer " + claim("iss", "agentctl:other"), http.StatusUnauthorized},
			{"expired", "Bearer " + claim("exp", now-61), http.StatusUnauthorized},
			{"not yet", "Bearer " + claim("nbf", now+300), http.StatusUnauthorized},
			{"no expiry", "Bearer " + claim("exp", nil), http.StatusUnauthorized},
			{"an unknown claim", "Bearer " + claim("act", "x"), http.StatusUnauthorized},
			{"an unknown class", "Bearer " + claim("cls", "root"), http.StatusUnauthorized},
			{"a bad tenant", "Bearer " + claim("tid", "../x"), http.StatusUnauthorized},
			{"no scope claim", "Bearer " + claim("scope", nil), http.StatusForbidden},
			{"an unknown scope", "Bearer " + claim("scope", "tools:call:everything"), http.StatusForbidden},
			{"a device's", "Bearer " + m.token, http.StatusForbidden},
			{"an enrollment's", "Bearer " + r.mint(auth.MintRequest{Class: "enroll"}).Token, http.StatusForbidden},
			{"revoked", "Bearer " + revoked.Token, http.StatusForbidden},
		}
		for name, auth := range map[string]string{"good": "Bearer " + good, "scheme in another case": "bearer " + good,
			"expired within the leeway": "Bearer " + claim("exp", now-30), "early within the leeway": "Bearer " + claim("nbf", now+30)} {
			if a := r.call(m.snapshotTool(), `{}`, "Authorization", auth); a.status != http.StatusOK {
				t.Errorf("%s: %d %s", name, a.status, a.body)
			}
		}
		m.expectNoCommand(func() {
			for _, tt := range tests {
				a := r.call(m.snapshotTool(), `{}`, "Authorization", tt.auth)
				if a.status != tt.status {
					t.Errorf("%s: got %d, want %d", tt.name, a.status, tt.status)
				}
				r.wantRefusal(a, tt.status, manifest.SafetyDenied)
				if has := a.header.Get("WWW-Authenticate") != ""; has != (tt.status == http.StatusUnauthorized) {
					t.Errorf("%s: WWW-Authenticate %q", tt.name, a.header.Get("WWW-Authenticate"))
				}
			}
		})
	})
}

// RFC-0009 §8, RFC-0006 §4.1: tokens without a scope claim are refused, unless the operator
// set a date until which they count as read-only; a stream of theirs ends with it.
func TestRFC0009Scopeless(t *testing.T) {
	t.Parallel()
	for _, until := range []time.Duration{0, -time.Hour, 10 * time.Minute} {
		var date time.Time
		bubble(t, func(t *testing.T, r *testRelay) {
			m := r.device(mockOptions{cadence: true})
			token := r.forge(func(_, c map[string]any) { c["scope"], c["exp"] = nil, time.Now().Add(24*time.Hour).Unix() })
			if until <= 0 {
				m.expectNoCommand(func() {
					r.wantRefusal(r.call(m.snapshotTool(), `{}`, "Authorization", "Bearer "+token), http.StatusForbidden, manifest.SafetyDenied)
				})
				return
			}
			if a := r.call(m.snapshotTool(), `{}`, "Authorization", "Bearer "+token); a.status != http.StatusOK {
				t.Errorf("before the date: %d %s", a.status, a.body)
			}
			if a := r.do(http.MethodGet, "/v1/nodes", "", r.headers("Authorization", "Bearer "+token)); a.status != http.StatusOK {
				t.Errorf("before the date: %d %s", a.status, a.body)
			}
			s := r.stream(m.subscribeTool(), `{"interval_ms":60000}`, streamOptions{token: token})
			s.waitEnd(sse.Normal, until+5*time.Second)
			if left := time.Until(date); left > 0 {
				t.Errorf("the stream ended %s before the date", left)
			}
			r.wantRefusal(r.call(m.snapshotTool(), `{}`, "Authorization", "Bearer "+token), http.StatusForbidden, manifest.SafetyDenied)
		}, func(o *relay.Options) {
			if until != 0 {
				date = time.Now().Add(until)
				o.ScopelessUntil = date
			}
		})
	}
}
