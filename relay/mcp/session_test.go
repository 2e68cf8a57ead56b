package mcp

import (
	"context"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const listBody = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`

func sessionHead(token, id string) map[string]string {
	h := map[string]string{"Mcp-Session-Id": id, "Mcp-Protocol-Version": legacyEra}
	if token != "" {
		h["Authorization"] = "Bearer " + token
	}
	return h
}

// TestForeignSession: a session answers to the identity that opened it and to no other
// else, whatever the method.
func TestForeignSession(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	id := e.initialize("default/alice")
	for _, tok := range []string{"default/mallory", "other/alice", "other/mallory"} {
		for _, m := range []string{"POST", "GET", "DELETE"} {
			body := ""
			if m == "POST" {
				body = listBody
			}
			if res := e.do(m, sessionHead(tok, id), body); res.StatusCode != 404 {
				t.Errorf("%s as %s: %d, want 404", m, tok, res.StatusCode)
			}
		}
	}
	// Another token of the same subject is at home, with its own scopes.
	res := e.do("POST", sessionHead("default/alice/tools:list", id), listBody)
	if body := readAll(t, res); res.StatusCode != 200 || strings.Contains(body, nodeA) {
		t.Errorf("with fewer scopes: %d %s, want an empty list", res.StatusCode, body)
	}
	res = e.do("POST", sessionHead("default/alice", id), listBody)
	if body := readAll(t, res); res.StatusCode != 200 || !strings.Contains(body, nodeA) {
		t.Errorf("as the owner: %d %s, want the board", res.StatusCode, body)
	}
}

func TestSessionLife(t *testing.T) {
	e := newEnv(t, Options{})
	id := e.initialize("")
	if res := e.do("POST", sessionHead("", id), `{"jsonrpc":"2.0","id":9,"method":"ping"}`); res.StatusCode != 200 || !strings.Contains(readAll(t, res), `"result":{}`) {
		t.Error("ping is not answered with {}")
	}
	if res := e.do("DELETE", sessionHead("", id), ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d, want 204", res.StatusCode)
	}
	tests := []struct {
		name, method string
		head         map[string]string
		body         string
		want         int
	}{
		{"ended session", "POST", sessionHead("", id), listBody, 404},
		{"ended session, GET", "GET", sessionHead("", id), "", 404},
		{"ended session, DELETE", "DELETE", sessionHead("", id), "", 404},
		{"unknown session", "POST", sessionHead("", "NOBODY"), listBody, 404},
		{"no session", "POST", nil, listBody, 400},
		{"no session, GET", "GET", nil, "", 400},
		{"no session, DELETE", "DELETE", nil, "", 400},
		{"modern GET", "GET", map[string]string{"Mcp-Protocol-Version": modernEra}, "", 405},
		{"modern DELETE", "DELETE", map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Session-Id": "x"}, "", 405},
		{"another method", "PUT", nil, listBody, 405},
		{"unknown old version", "POST", map[string]string{"Mcp-Protocol-Version": "2020-01-01"}, strings.Replace(listBody, "tools/list", "initialize", 1), 400},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			res := e.do(tt.method, tt.head, tt.body)
			if res.StatusCode != tt.want {
				t.Errorf("status %d, want %d", res.StatusCode, tt.want)
			}
			if tt.want == 405 && res.Header.Get("Allow") == "" {
				t.Error("405 without Allow")
			}
		})
	}
	if s := e.h.Stats(); s.Sessions != 0 {
		t.Errorf("stats %+v, want no session", s)
	}
}

// TestDeleteEndsCalls: ending a session cancels the calls in it.
func TestDeleteEndsCalls(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	e.load(b)
	id := e.initialize("")
	go func() {
		res, err := e.srv.Client().Do(newRequest(t, e, sessionHead("", id), `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"`+streamA+`"}}`))
		if err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
		}
	}()
	f := wait(t, "stream", b.streams)
	if res := e.do("DELETE", sessionHead("", id), ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d", res.StatusCode)
	}
	wait(t, "close of the stream", f.closed)
}

func newRequest(t *testing.T, e *env, head map[string]string, body string) *http.Request {
	req, err := http.NewRequest("POST", e.url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	for k, v := range head {
		req.Header.Set(k, v)
	}
	return req
}

func TestSessionBounds(t *testing.T) {
	e := newEnv(t, Options{MaxSessions: 8}) // 4 of an identity, 6 of a tenant
	init := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}`
	wantRefused := func(token, what string) {
		t.Helper()
		res := e.do("POST", map[string]string{"Authorization": "Bearer " + token}, init)
		if res.StatusCode != 429 || res.Header.Get("Retry-After") == "" || !strings.Contains(readAll(t, res), "E_RATE_LIMITED") {
			t.Errorf("%s: %d, want 429", what, res.StatusCode)
		}
	}
	first := e.initialize("a/x")
	for range 3 {
		e.initialize("a/x")
	}
	wantRefused("a/x", "fifth session of an identity")
	e.initialize("a/y")
	e.initialize("a/y")
	wantRefused("a/y", "seventh session of a tenant")
	e.initialize("b/x")
	e.initialize("b/x")
	wantRefused("c/x", "ninth session")
	// One that nobody has used for a while gives way.
	e.h.mu.RLock()
	e.h.sessions[first].lastUsed.Store(monotonicNanos(time.Now().Add(-2 * time.Minute)))
	e.h.mu.RUnlock()
	e.initialize("a/y")
	if res := e.do("POST", sessionHead("a/x", first), listBody); res.StatusCode != 404 {
		t.Errorf("the idle session: %d, want 404", res.StatusCode)
	}
	if s := e.h.Stats(); s.Sessions != 8 || s.SessionPool.InUse != 8 || s.SessionPool.Refused == 0 {
		t.Errorf("stats %+v, want 8 sessions", s)
	}
	// A malformed initialize leaves nothing behind.
	e2 := newEnv(t, Options{MaxSessions: 1})
	for range 3 {
		e2.do("POST", nil, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":[]}`)
	}
	e2.initialize("")
}

// stepped is a time after a step of the wall clock by d: only the wall
// seconds of it are other ones (time.Time keeps them above bit 30, beside its monotonic
// reading).
func stepped(t *testing.T, at time.Time, d time.Duration) time.Time {
	s := at
	*(*uint64)(unsafe.Pointer(&s)) += uint64(d/time.Second) << 30
	if s.Sub(at) != 0 || s.Unix()-at.Unix() != int64(d/time.Second) {
		t.Fatalf("not a step of the wall clock: %v, %v", at, s)
	}
	return s
}

// TestWallClockStep: a relay without a battery gets its time after the start.
func TestWallClockStep(t *testing.T) {
	e := newEnv(t, Options{SessionIdleTimeout: time.Minute})
	e.initialize("default/idle")
	e.h.sweep(stepped(t, time.Now(), time.Hour))
	if s := e.h.Stats(); s.Sessions != 1 || s.Tenants != 1 {
		t.Errorf("after a step of the wall clock: %+v, want the session", s)
	}
}

func TestIdleSessionsAndTenantsEnd(t *testing.T) {
	e := newEnv(t, Options{SessionIdleTimeout: time.Minute})
	b := newBoard("default", nodeA)
	e.load(b)
	e.initialize("default/idle")
	streaming := e.initialize("default/streaming")
	c := dial(t, e.srv.Listener.Addr().String())
	events := c.get("default/streaming", streaming)
	until(t, "stream", func() bool { return e.listeners("default") == 1 })
	e.h.sweep(time.Now().Add(2 * time.Minute))
	if s := e.h.Stats(); s.Sessions != 1 || s.Streams != 1 {
		t.Errorf("after two minutes: %+v, want the session with a stream", s)
	}
	e.h.sweep(time.Now().Add(time.Hour))
	if s := e.h.Stats(); s.Tenants != 1 {
		t.Errorf("after an hour: %+v, want the tenant with a stream", s)
	}
	_ = c.c.Close()
	until(t, "end of the stream", func() bool { return e.h.Stats().Streams == 0 })
	for range events { // closed
	}
	e.h.sweep(time.Now().Add(2 * time.Minute))
	e.h.sweep(time.Now().Add(time.Hour))
	if s := e.h.Stats(); s.Sessions != 0 || s.Tenants != 0 {
		t.Errorf("after the end: %+v, want nothing", s)
	}
	if _, m := e.modern("tools/list", "", "", nil); m["result"] == nil {
		t.Errorf("a dropped tenant does not come back: %v", m)
	}
}

// get opens a session's stream and waits for its headers, which come at once.
func (c *rawConn) get(token, id string) <-chan map[string]any {
	c.b.Helper()
	_, err := c.c.Write([]byte("GET /mcp HTTP/1.1\r\nHost: " + c.addr + "\r\nAccept: text/event-stream\r\nAuthorization: Bearer " + token +
		"\r\nMcp-Protocol-Version: 2025-11-25\r\nMcp-Session-Id: " + id + "\r\n\r\n"))
	if err != nil {
		c.b.Fatal(err)
	}
	_ = c.c.SetReadDeadline(time.Now().Add(30 * time.Second))
	return c.events()
}

// TestRevokedTokenEndsStreams: streams end soon after their token, and so does everything else.
func TestRevokedTokenEndsStreams(t *testing.T) {
	t.Parallel()
	e := newEnv(t, Options{OnDenied: func(w http.ResponseWriter, _ *http.Request, err error) {
		w.Header().Set("WWW-Authenticate", `Bearer resource_metadata="x"`)
		w.WriteHeader(http.StatusUnauthorized)
	}})
	e.load(newBoard("default", nodeA))
	id := e.initialize("default/gone")
	legacy := dial(t, e.srv.Listener.Addr().String()).get("default/gone", id)
	listen := dial(t, e.srv.Listener.Addr().String()).stream("Authorization: Bearer default/gone\r\nMcp-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\n",
		`{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{`+modernMeta+`,"notifications":{"toolsListChanged":true}}}`)
	wait(t, "acknowledgement", listen)
	e.revoke("default/gone")
	ended := make(chan struct{})
	go func() {
		for range legacy {
		}
		for range listen {
		}
		close(ended)
	}()
	wait(t, "end of both streams", ended)
	for _, m := range []string{"GET", "DELETE"} {
		if res := e.do(m, sessionHead("default/gone", id), ""); res.StatusCode != 401 || res.Header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s: %d, want 401", m, res.StatusCode)
		}
	}
	if res := e.do("POST", sessionHead("default/gone", id), listBody); res.StatusCode != 401 {
		t.Errorf("POST: %d, want 401", res.StatusCode)
	}
}

func TestTenantBounds(t *testing.T) {
	e := newEnv(t, Options{MaxTenants: 1, MaxInFlight: 2})
	b := newBoard("a", nodeA)
	e.load(b)
	head := func(tok string) map[string]string {
		return map[string]string{"Authorization": "Bearer " + tok, "Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": streamA}
	}
	body := `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{` + modernMeta + `,"name":"` + streamA + `"}}`
	ctx, cancel := context.WithCancel(t.Context())
	for range 2 {
		go func() {
			res, err := e.srv.Client().Do(newRequest(t, e, head("a/x"), body).WithContext(ctx))
			if err == nil {
				<-ctx.Done()
				_ = res.Body.Close()
			}
		}()
	}
	wait(t, "first stream", b.streams)
	wait(t, "second stream", b.streams)
	if res := e.do("POST", head("a/x"), body); res.StatusCode != 429 {
		t.Errorf("third request in flight: %d, want 429", res.StatusCode)
	}
	if res := e.do("POST", head("b/x"), body); res.StatusCode != 429 {
		t.Errorf("second tenant: %d, want 429", res.StatusCode)
	}
	cancel()
	until(t, "a free session", func() bool {
		res := e.do("POST", map[string]string{"Authorization": "Bearer a/x", "Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/list"},
			`{"jsonrpc":"2.0","id":3,"method":"tools/list","params":{`+modernMeta+`}}`)
		return res.StatusCode == 200
	})
}

// TestRunEndsStreamsAndSessions: Run closes all of them and leaves no goroutine.
func TestRunEndsStreamsAndSessions(t *testing.T) {
	before := runtime.NumGoroutine()
	k := kernel.New(kernel.Options{})
	h := New(Options{Kernel: k, Authenticate: func(*http.Request) (*kernel.Caller, error) {
		return &kernel.Caller{Tenant: "t", Actor: "a", Scopes: scopes{manifest.ScopeCallReadOnly}}, nil
	}})
	until(t, "New has started no goroutine", func() bool { return runtime.NumGoroutine() <= before })
	e := &env{t: t, kernel: k, h: h, gone: map[string]bool{}}
	e.serve()
	if res := e.do("POST", nil, listBody); res.StatusCode != 503 {
		t.Errorf("before Run: %d, want 503", res.StatusCode)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- h.Run(ctx) }()
	until(t, "Run", func() bool { return e.do("POST", nil, listBody).StatusCode == 400 })
	id := e.initialize("")
	get := dial(t, e.srv.Listener.Addr().String()).get("x", id)
	listen := dial(t, e.srv.Listener.Addr().String()).stream("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: subscriptions/listen\r\n",
		`{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{`+modernMeta+`,"notifications":{"toolsListChanged":true}}}`)
	wait(t, "acknowledgement", listen)
	cancel()
	wait(t, "end of Run", ran)
	for range get {
	}
	for range listen {
	}
	if res := e.do("POST", sessionHead("", id), listBody); res.StatusCode != 503 {
		t.Errorf("after Run: %d, want 503", res.StatusCode)
	}
	if err := h.Run(t.Context()); err == nil {
		t.Error("Run ran twice")
	}
	e.srv.CloseClientConnections()
	e.srv.Close()
	e.srv.Client().CloseIdleConnections()
	until(t, "end of all goroutines", func() bool { return runtime.NumGoroutine() <= before })
}

// A request of a method that nobody knows is answered as JSON-RPC answers it.
func TestUnknownMethod(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	id := e.initialize("")
	for _, method := range []string{"nosuch/method", "tools/nosuch", "server/discover"} {
		res := e.do("POST", sessionHead("", id), `{"jsonrpc":"2.0","id":7,"method":"`+method+`"}`)
		if body := readAll(t, res); res.StatusCode != 200 || !strings.Contains(body, `"id":7,"error":{"code":-32601,`) {
			t.Errorf("%s: %d %s", method, res.StatusCode, body)
		}
	}
	if res := e.do("POST", sessionHead("", id), listBody); res.StatusCode != 200 {
		t.Errorf("the session is gone: %d", res.StatusCode)
	}
}
