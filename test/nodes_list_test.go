package test

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/transport/link"
)

// listVersion is one state of GET /v1/nodes.
type listVersion struct{ etag, body string }

// listNodes gets GET /v1/nodes plain and compressed, and checks that both are the same list, and
// that neither is sent again to a client that has it.
func (r *testRelay) listNodes() listVersion {
	r.t.Helper()
	synctest.Wait() // what is under way, such as the end of a link, is a change between two requests
	get := func(changes ...string) *answer {
		return r.do(http.MethodGet, "/v1/nodes", "", r.headers(changes...))
	}
	plain, packed := get("Accept-Encoding", "identity"), get("Accept-Encoding", "gzip")
	etag, packedTag := plain.header.Get("ETag"), packed.header.Get("ETag")
	if plain.status != http.StatusOK || packed.status != http.StatusOK || len(etag) < 10 || packedTag != strings.TrimSuffix(etag, `"`)+`-gzip"` {
		r.t.Fatalf("%d %s, compressed %d %s", plain.status, etag, packed.status, packedTag)
	}
	if plain.header.Get("Content-Encoding") != "" || packed.header.Get("Content-Encoding") != "gzip" || len(packed.body) >= len(plain.body)/2 {
		r.t.Errorf("%d bytes with %v, compressed %d with %v", len(plain.body), plain.header, len(packed.body), packed.header)
	}
	zr, err := gzip.NewReader(strings.NewReader(packed.body))
	if err != nil {
		r.t.Fatal(err)
	}
	if b, err := io.ReadAll(zr); err != nil || string(b) != plain.body {
		r.t.Errorf("compressed: %s %v\nplain: %s", b, err, plain.body)
	}
	for _, a := range []*answer{plain, packed} {
		if a.header.Get("Vary") != "Accept-Encoding" || a.header.Get("Cache-Control") != "private, no-cache" {
			r.t.Errorf("headers %v", a.header)
		}
		tag := a.header.Get("ETag")
		if again := get("If-None-Match", tag); again.status != http.StatusNotModified || again.body != "" || again.header.Get("ETag") != tag {
			r.t.Errorf("If-None-Match %s: %d %s %v", tag, again.status, again.body, again.header)
		}
	}
	return listVersion{etag, plain.body}
}

// The ETag of the list of boards changes with all that the list shows, and with nothing else.
func TestNodesETag(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for range 4 {
			r.device(mockOptions{})
		}
		m := r.device(mockOptions{name: "attic"})
		admin := r.headers("Authorization", "Bearer "+r.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token)
		foreignAgent := r.headers("Authorization", "Bearer "+r.agentFor("other"))
		patch := func(body string) func() {
			return func() {
				if a := r.do(http.MethodPatch, "/v1/nodes/"+m.node, body, admin); a.status != http.StatusOK {
					t.Errorf("%s: %d %s", body, a.status, a.body)
				}
			}
		}
		before := r.listNodes()
		for _, step := range []struct {
			what, shows string
			do          func()
		}{
			{"a board connects", `"name":"cellar"`, func() { r.device(mockOptions{name: "cellar"}) }},
			{"a board is registered", `"capabilities":[]`, func() { r.mint(auth.MintRequest{Class: "device"}) }},
			{"a board is renamed", `"name":"roof"`, patch(`{"name":"roof"}`)},
			{"a board gets a tag", `"tags":["north"]`, patch(`{"add_tags":["north"]}`)},
			{"a board gets a description", `"description":"dry"`, patch(`{"description":"dry"}`)},
			{"a linked board is seen", `"last_seen_ms":`, func() { time.Sleep(6 * time.Minute) }},
			{"a board's tokens are revoked", `"online":false`, func() {
				if a := r.do(http.MethodPost, "/v1/nodes/"+m.node+"/revoke", "", admin); a.status != http.StatusOK {
					t.Errorf("%d %s", a.status, a.body)
				}
				time.Sleep(6 * time.Second)
			}},
			{"a board is removed", `"name":"cellar"`, func() { r.do(http.MethodDelete, "/v1/nodes/"+m.node, "", admin) }},
		} {
			step.do()
			after := r.listNodes()
			if after.etag == before.etag || after.body == before.body || !strings.Contains(after.body, step.shows) {
				t.Errorf("%s: ETag %s and then %s: %s", step.what, before.etag, after.etag, after.body)
			}
			stale := r.do(http.MethodGet, "/v1/nodes", "", r.headers("If-None-Match", before.etag))
			if stale.status != http.StatusOK || stale.header.Get("ETag") == before.etag {
				t.Errorf("%s: the old version is good for %d", step.what, stale.status)
			}
			before = after
		}
		// A tenant's tag is not good for another tenant, nor for a caller who may not list.
		foreign := r.do(http.MethodGet, "/v1/nodes", "", r.headers("Authorization", foreignAgent["Authorization"], "If-None-Match", before.etag))
		if foreign.status != http.StatusOK || foreign.body != "{\"nodes\":[]}\n" {
			t.Errorf("another tenant: %d %s", foreign.status, foreign.body)
		}
		events := "Bearer " + r.agentOf(auth.DefaultTenant, manifest.ScopeEventsSubscribe)
		refused := r.do(http.MethodGet, "/v1/nodes", "", r.headers("Authorization", events, "If-None-Match", before.etag))
		r.wantRefusal(refused, http.StatusForbidden, manifest.SafetyDenied)
		if tag := refused.header.Get("ETag"); tag != "" {
			t.Errorf("a refusal has the ETag %s", tag)
		}
	})
}

// A suspect board shows in the list, and its end.
func TestNodesETagSuspect(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for range 4 {
			r.device(mockOptions{})
		}
		m := r.device(mockOptions{name: "attic", script: func(*mockDevice) func(string, link.Cmd) { return func(string, link.Cmd) {} }})
		before := r.listNodes()
		m.deaf.Store(true)
		time.Sleep(time.Second) // after the last thing that it said
		_ = r.call(m.echoTool(), text("x"))
		time.Sleep(7 * time.Second)
		suspect := r.listNodes()
		if suspect.etag == before.etag || !strings.Contains(suspect.body, `"suspect":true`) {
			t.Errorf("%s and then %s: %s", before.etag, suspect.etag, suspect.body)
		}
		m.kill()
		after := r.listNodes()
		if after.etag == suspect.etag || strings.Contains(after.body, `"suspect":true`) {
			t.Errorf("%s and then %s: %s", suspect.etag, after.etag, after.body)
		}
	})
}

// What a command calls a board, the list finds by one parameter.
func TestNodesByReference(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{name: "attic"})
		other := r.device(mockOptions{tenant: "other", name: "cellar"})
		first := r.mint(auth.MintRequest{Class: "device", NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xy"}).NodeID
		second := r.mint(auth.MintRequest{Class: "device", NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xz"}).NodeID
		// A name goes before a prefix.
		if _, err := r.relay.Store().UpsertNode(context.Background(), auth.DefaultTenant, second, "01hzx9k3m4p7q8r9s0t1v2w3", nil); err != nil {
			t.Fatal(err)
		}
		for ref, want := range map[string]string{
			"attic": m.node, "ATTIC": m.node, m.node: m.node, strings.ToUpper(m.node): m.node, m.node[:24]: m.node,
			"01hzx9k3m4p7q8r9s0t1v2w3": second, "01hzx9k3m4p7q8r9s0t1v2w3x": first + " " + second,
			first: first, "cellar": "", other.node: "", other.node[:24]: "", "att": "", "": "", "%25": "", "a%20b": "",
		} {
			a := r.do(http.MethodGet, "/v1/nodes?node="+ref, "", r.headers())
			var got []string
			for _, part := range strings.Split(a.body, `"node_id":"`)[1:] {
				got = append(got, part[:26])
			}
			if a.status != http.StatusOK || strings.Join(got, " ") != want || a.header.Get("Cache-Control") != "no-store" {
				t.Errorf("%q: %d %v %v, want %s", ref, a.status, got, a.header, want)
			}
		}
		for _, query := range []string{"node=a&node=b", "node=a&name=a", "node=a&tag=b"} {
			r.wantRefusal(r.do(http.MethodGet, "/v1/nodes?"+query, "", r.headers()), http.StatusBadRequest, manifest.BadRequest)
		}
	})
}
