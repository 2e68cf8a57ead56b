package mcp

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// sameKeys are options whose handlers take each other for earlier processes of one relay.
func sameKeys() Options { return Options{SessionKeys: randomSessionKeys()} }

func TestSessionID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opt := sameKeys()
		opt.Kernel = kernel.New(kernel.Options{})
		h := New(opt)
		other := New(Options{Kernel: opt.Kernel})
		rotated := New(Options{Kernel: opt.Kernel, SessionKeys: func() [][]byte {
			return append(other.opts.SessionKeys(), opt.SessionKeys()...)
		}})
		params := &sdk.InitializeParams{ProtocolVersion: "2025-06-18", Capabilities: &sdk.ClientCapabilities{
			Elicitation: &sdk.ElicitationCapabilities{}, Experimental: map[string]any{"x": "y"}}}
		id := h.newSessionID("default\x00a", params)
		if strings.ContainsFunc(id, func(r rune) bool { return r < '!' || r > '~' }) {
			t.Errorf("id %q is not visible ASCII", id)
		}
		c, ok := rotated.parseSessionID(id, "default\x00a")
		if !ok || c.version != "2025-06-18" || c.start != h.start || string(c.capabilities) != `{"experimental":{"x":"y"},"elicitation":{}}` {
			t.Fatalf("got %+v %v", c, ok)
		}
		refused := func(what string, h *Handler, id, owner string) {
			t.Helper()
			if _, ok := h.parseSessionID(id, owner); ok {
				t.Errorf("%s is accepted", what)
			}
		}
		refused("another relay's", other, id, "default\x00a")
		refused("another subject's", h, id, "default\x00b")
		refused("another tenant's", h, id, "default2\x00a")
		refused("one of another owner with the same bytes", h, id, "")
		refused("nothing", h, "", "default\x00a")
		refused("a longer one", h, id+"A", "default\x00a")
		refused("a long one", h, strings.Repeat("A", maxSessionID+4), "default\x00a")
		refused("an id of the SDK's", h, "KZ6VJ3GQW2N5T4X7Y2B3C4D5E6", "default\x00a")
		b, err := base64.RawURLEncoding.DecodeString(id)
		if err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] ^= 1
			refused(fmt.Sprintf("an id with another byte %d", i), h, base64.RawURLEncoding.EncodeToString(b), "default\x00a")
			b[i] ^= 1
			refused("a cut one", h, base64.RawURLEncoding.EncodeToString(b[:i]), "default\x00a")
		}
		time.Sleep(maxSessionAge)
		if _, ok := h.parseSessionID(id, "default\x00a"); !ok {
			t.Error("an id of maxSessionAge is refused")
		}
		time.Sleep(time.Second)
		refused("an older one", h, id, "default\x00a")

		// The longest ids.
		params.Capabilities.Experimental = map[string]any{"x": strings.Repeat("y", 250)}
		id = h.newSessionID("default\x00a", params)
		if c, ok := h.parseSessionID(id, "default\x00a"); !ok || !strings.Contains(string(c.capabilities), "yyy") || len(id) > maxSessionID {
			t.Errorf("%d characters: %+v %v", len(id), c, ok)
		}
		params.Capabilities.Experimental = map[string]any{"x": strings.Repeat("y", 1<<20)}
		id = h.newSessionID("default\x00a", params)
		if c, ok := h.parseSessionID(id, "default\x00a"); !ok || string(c.capabilities) != `{"elicitation":{}}` {
			t.Errorf("%d characters: %+v %v", len(id), c, ok)
		}
	})
}

// TestSessionSurvivesRestart: the next process of the relay serves the sessions of this one, with
// their version and capabilities, and says on their stream that lists may have changed.
func TestSessionSurvivesRestart(t *testing.T) {
	opt := sameKeys()
	before, after := newEnv(t, opt), newEnv(t, opt)
	after.load(newBoard("default", nodeA))
	after.load(&sessionPlugin{})
	res := before.do("POST", nil, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{"elicitation":{}},"clientInfo":{"name":"raw","version":"1"}}}`)
	id := res.Header.Get("Mcp-Session-Id")
	if id == "" || len(id) > 128 {
		t.Fatalf("id %q", id)
	}
	head := map[string]string{"Mcp-Session-Id": id, "Mcp-Protocol-Version": "2025-06-18"}
	if body := readAll(t, after.do("POST", head, listBody)); !strings.Contains(body, nodeA) {
		t.Errorf("tools/list: %s", body)
	}
	// Through the SDK too.
	if body := readAll(t, after.do("POST", head, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"session.look"}}`)); !strings.Contains(body, `{\"elicitation\":{}}`) || !strings.Contains(body, id) {
		t.Errorf("the plugin saw %s", body)
	}
	if s := after.h.Stats(); s.Sessions != 1 || s.SessionPool.InUse != 1 {
		t.Errorf("stats %+v, want one session", s)
	}
	events := dial(t, after.srv.Listener.Addr().String()).get("", id)
	got := map[any]bool{}
	for range 2 {
		got[wait(t, "notification", events)["method"]] = true
	}
	if !got["notifications/tools/list_changed"] || !got["notifications/resources/list_changed"] {
		t.Errorf("notifications %v", got)
	}
	// It ends here as every session does, and does not come back.
	if res := after.do("DELETE", head, ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d", res.StatusCode)
	}
	for _, m := range []string{"POST", "GET", "DELETE"} {
		body := ""
		if m == "POST" {
			body = listBody
		}
		if res := after.do(m, head, body); res.StatusCode != 404 {
			t.Errorf("%s afterwards: %d, want 404", m, res.StatusCode)
		}
	}
	// Nor does it in the process that issued it, where it was never closed.
	if res := before.do("DELETE", head, ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d", res.StatusCode)
	}
	if res := before.do("POST", head, listBody); res.StatusCode != 404 {
		t.Errorf("in the first process: %d, want 404", res.StatusCode)
	}
}

// sessionPlugin has a tool that returns what it sees of its session.
type sessionPlugin struct{}

func (sessionPlugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "session", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "session.look", ToolInfo: &kernel.ToolInfo{Description: "Looks.", Scope: manifest.ScopeCallReadOnly}}}}
}

func (sessionPlugin) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{Content: []json.RawMessage{json.RawMessage(`{"type":"text","text":` + string(appendString(nil, string(r.Session.Capabilities())+" "+r.ConnID)) + `}`)}}, nil
}

// TestRecreateRefused: a session is made again for its owner alone, with a valid token.
func TestRecreateRefused(t *testing.T) {
	opt := sameKeys()
	before, after := newEnv(t, opt), newEnv(t, opt)
	id := before.initialize("default/alice")
	for token, want := range map[string]int{"default/bob": 404, "other/alice": 404, "default/gone": 401} {
		after.revoke("default/gone")
		if res := after.do("POST", sessionHead(token, id), listBody); res.StatusCode != want {
			t.Errorf("as %s: %d, want %d", token, res.StatusCode, want)
		}
	}
	if s := after.h.Stats(); s.Sessions != 0 {
		t.Errorf("%d sessions", s.Sessions)
	}
	if res := after.do("DELETE", sessionHead("default/alice", id), ""); res.StatusCode != 204 {
		t.Errorf("as the owner: %d, want 204", res.StatusCode)
	}
}

// TestRecreateOnce: requests that come at once after a restart share one session.
func TestRecreateOnce(t *testing.T) {
	opt := sameKeys()
	before, after := newEnv(t, opt), newEnv(t, opt)
	id := before.initialize("")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if res := after.do("POST", sessionHead("", id), strings.Replace(listBody, `"id":2`, fmt.Sprint(`"id":`, i), 1)); res.StatusCode != 200 {
				t.Errorf("status %d", res.StatusCode)
			}
		})
	}
	wg.Wait()
	if s := after.h.Stats(); s.Sessions != 1 || s.SessionPool.InUse != 1 {
		t.Errorf("stats %+v, want one session", s)
	}
}

// TestRecreateBounds: sessions that are made again count in the shares, and what is remembered of
// them is bounded.
func TestRecreateBounds(t *testing.T) {
	opt := sameKeys()
	before := newEnv(t, opt)
	opt.MaxSessions = 4 // 2 of an identity
	after := newEnv(t, opt)
	var ids []string
	for range 4 {
		ids = append(ids, before.initialize(""))
	}
	status := func(i, want int) {
		t.Helper()
		if res := after.do("POST", sessionHead("", ids[i]), listBody); res.StatusCode != want {
			t.Errorf("session %d: %d, want %d", i, res.StatusCode, want)
		}
	}
	status(0, 200)
	status(1, 200)
	status(2, 429)
	if res := after.do("DELETE", sessionHead("", ids[0]), ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d", res.StatusCode)
	}
	status(2, 200) // the refusal did not use it up
	status(0, 404)

	r := &after.h.recreated
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pool = edge.NewPool(2) // one of an identity
	clear(r.made)
	now := time.Now().Unix()
	if !r.addLocked(&sessionClaims{random: [idRandomLen]byte{1}, issued: now - 8*24*3600}, edge.Identity{Tenant: "default", Subject: "a"}) ||
		r.addLocked(&sessionClaims{random: [idRandomLen]byte{1}, issued: now}, edge.Identity{Tenant: "default", Subject: "a"}) ||
		!r.addLocked(&sessionClaims{random: [idRandomLen]byte{2}, issued: now}, edge.Identity{Tenant: "default", Subject: "a"}) ||
		r.addLocked(&sessionClaims{random: [idRandomLen]byte{3}, issued: now}, edge.Identity{Tenant: "default", Subject: "a"}) {
		t.Errorf("the pool does not bound what is remembered: %v", r.made)
	}
}
