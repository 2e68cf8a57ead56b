package relay

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// overwrite damages every page of a file but the first.
func overwrite(t *testing.T, path string) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(bytes.Repeat([]byte{0xa5}, int(info.Size()-4096)), 4096)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// createTicket calls tickets.create with about a kilobyte.
func createTicket(t *testing.T, r *Relay) error {
	admin := &kernel.Caller{Tenant: auth.DefaultTenant, Actor: "ann", Scopes: allScopes{}}
	_, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: admin, Tool: "tickets.create",
		Arguments: fmt.Appendf(nil, `{"title":"x","body":%q}`, strings.Repeat("y", 900))})
	return err
}

// TestDamageWhileRunning: when the databases of a running relay are damaged, whoever needs them learns
// that a retry does not help, and readyz names both stores.
func TestDamageWhileRunning(t *testing.T) {
	opt := Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0"}
	open := func() (*Relay, func()) {
		r, err := Open(opt)
		if err != nil {
			t.Fatal(err)
		}
		return r, run(t, r)
	}
	r, stop := open()
	for range 150 { // more pages than a cache that was just opened has
		if err := createTicket(t, r); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	r, stop = open() // its write-ahead logs are empty, and its caches are cold
	overwrite(t, filepath.Join(opt.StateDir, storeEvents))
	overwrite(t, filepath.Join(opt.StateDir, storeIdentities))

	for _, tt := range []struct {
		name    string
		maySkip bool // it appends: the pages that it needs may be in memory
		use     func() error
	}{
		{"replay of events", false, func() error {
			return r.events.Replay(t.Context(), 0, func(kernel.Event) error { return nil })
		}},
		{"tickets.create", true, func() error { return createTicket(t, r) }},
		{"ingest", true, func() error {
			_, err := gatewayLog{r.events, r.queue.Append}.Append(t.Context(), gateway.Event{Topic: "x/y", Data: []byte("1")})
			return err
		}},
		{"new token", false, func() error {
			_, err := r.store.Mint(t.Context(), auth.MintRequest{Class: "agent"})
			return mintError(err)
		}},
		{"list of nodes", false, func() error {
			_, _, err := r.store.Nodes(t.Context(), auth.NodeQuery{Tenant: auth.DefaultTenant, Limit: 1})
			return err
		}},
		{"new invite", false, func() error {
			_, _, err := r.store.CreateInvite(t.Context(), auth.InviteRequest{Class: "board"})
			return inviteError(err)
		}},
	} {
		err := tt.use()
		if err == nil && tt.maySkip {
			continue
		}
		if err == nil {
			t.Errorf("%s: succeeded on a damaged store", tt.name)
			continue
		}
		if e := manifest.AsError(err); e.Code != manifest.Internal || e.PublicReason() != storage.Reason || e.Retryable() {
			t.Errorf("%s: got %+v, want %s with reason %s, not retryable", tt.name, e, manifest.Internal, storage.Reason)
		}
	}
	code, body := get(r, "/readyz")
	if code != 503 || !strings.Contains(body, "events.db is damaged") || !strings.Contains(body, "relay.db is damaged") {
		t.Errorf("readyz: %d %s, want 503 and the names of both stores", code, body)
	}
	stop()
}
