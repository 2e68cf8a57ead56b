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

// While the relay runs its databases are damaged: whoever needs them learns that a repeat does not
// help, and readyz says which store it is.
func TestDamageWhileRunning(t *testing.T) {
	dir := t.TempDir()
	opt := Options{StateDir: dir, Listen: "127.0.0.1:0"}
	admin := &kernel.Caller{Tenant: auth.DefaultTenant, Actor: "ann", Scopes: allScopes{}}
	create := func(r *Relay) error {
		_, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: admin, Tool: "tickets.create",
			Arguments: fmt.Appendf(nil, `{"title":"x","body":%q}`, strings.Repeat("y", 900))})
		return err
	}
	for start := range 2 { // the second start has an empty write-ahead log and a cold cache
		r, err := Open(opt)
		if err != nil {
			t.Fatal(err)
		}
		stop := run(t, r)
		if start == 0 {
			for range 400 {
				if err := create(r); err != nil {
					t.Fatal(err)
				}
			}
			stop()
			continue
		}
		overwrite(t, filepath.Join(dir, storeEvents))
		overwrite(t, filepath.Join(dir, storeIdentities))
		appends := map[string]bool{"tickets.create": true, "ingest": true}
		for what, change := range map[string]func() error{
			"replay": func() error {
				return r.events.Replay(t.Context(), 0, func(kernel.Event) error { return nil })
			},
			"tickets.create": func() error { return create(r) },
			"ingest": func() error {
				_, err := gatewayLog{r.events, r.queue.Append}.Append(t.Context(), gateway.Event{Topic: "x/y", Data: []byte("1")})
				return err
			},
			"tokens": func() error {
				_, err := r.store.Mint(t.Context(), auth.MintRequest{Class: "agent"})
				return mintError(err)
			},
			"list of nodes": func() error {
				_, _, err := r.store.Nodes(t.Context(), auth.NodeQuery{Tenant: auth.DefaultTenant, Limit: 1})
				return err
			},
			"invites": func() error {
				_, _, err := r.store.CreateInvite(t.Context(), auth.InviteRequest{Class: "board"})
				return inviteError(err)
			},
		} {
			err := change()
			if err == nil && appends[what] {
				continue // the pages that it needs were still in memory
			}
			if err == nil {
				t.Errorf("%s: done on a damaged store", what)
				continue
			}
			if e := manifest.AsError(err); e.Code != manifest.Internal || e.PublicReason() != storage.Reason || e.Retryable() {
				t.Errorf("%s: %+v", what, e)
			}
		}
		code, body := get(r, "/readyz")
		if code != 503 || !strings.Contains(body, "events.db is damaged") || !strings.Contains(body, "relay.db is damaged") {
			t.Errorf("readyz: %d %s", code, body)
		}
		stop()
	}
}
