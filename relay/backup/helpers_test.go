package backup

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/sqlitefile/sqlitefiletest"
)

func TestMain(m *testing.M) { sqlitefiletest.Main(m) }

// relayState is a state directory as a running relay has it, with both stores open.
type relayState struct {
	t      *testing.T
	dir    string
	store  *auth.Store
	events *eventlog.Store
	stop   func() // closes the stores; may be called twice
}

// openRelay opens the stores of a state directory, and makes them if there are none.
func openRelay(t *testing.T, dir string) *relayState {
	t.Helper()
	s := &relayState{t: t, dir: dir}
	var err error
	if s.store, err = auth.Open(auth.Options{StateDir: dir}); err != nil {
		t.Fatal(err)
	}
	if s.events, err = eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName)}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.events.Run(ctx) })
	<-s.events.Started()
	s.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		if err := errors.Join(s.store.Close(), s.events.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(s.stop)
	record := func() auth.EventLogRecord {
		return auth.EventLogRecord{ID: s.events.ID(), LastSeq: s.events.Last()}
	}
	if err := s.store.FollowEventLog(record); err != nil {
		t.Fatal(err)
	}
	return s
}

// newRelay opens the stores of a new state directory with one ticket and an audit log. backups is the
// name of a directory for its backups.
func newRelay(t *testing.T) (s *relayState, backups string) {
	t.Helper()
	s = openRelay(t, filepath.Join(t.TempDir(), "state"))
	s.appendTicket("1")
	if err := os.WriteFile(s.path("audit.jsonl"), []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return s, filepath.Join(t.TempDir(), "backups")
}

// path returns the path of a file in the state directory.
func (s *relayState) path(name string) string { return filepath.Join(s.dir, name) }

// mint returns a new token.
func (s *relayState) mint(req auth.MintRequest) auth.Minted {
	s.t.Helper()
	list, err := s.store.Mint(s.t.Context(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return list[0]
}

// mintAgent and mintBoard return a token of an agent, and of a new board of the tenant acme.
func (s *relayState) mintAgent() auth.Minted { return s.mint(auth.MintRequest{Class: "agent"}) }

func (s *relayState) mintBoard() auth.Minted {
	return s.mint(auth.MintRequest{Class: "device", Tenant: "acme"})
}

// revoke revokes a token.
func (s *relayState) revoke(m auth.Minted) {
	s.t.Helper()
	if _, err := s.store.Revoke(s.t.Context(), auth.RevokeRequest{JTI: m.JTI}); err != nil {
		s.t.Fatal(err)
	}
}

// appendEvent appends an event of the tenant acme, which is about a ticket or a node.
func (s *relayState) appendEvent(eventType, about string) {
	s.t.Helper()
	e := eventlog.Event{Tenant: "acme", Type: eventType, Aggregate: about, Payload: []byte("{}")}
	if _, err := s.events.Append(s.t.Context(), e); err != nil {
		s.t.Fatal(err)
	}
}

func (s *relayState) appendTicket(id string) {
	s.t.Helper()
	s.appendEvent("ticket.created", id)
}

// backup makes a backup in a directory of backups.
func (s *relayState) backup(backups string) *Result {
	s.t.Helper()
	r, err := Create(s.t.Context(), Options{StateDir: s.dir, Dir: backups})
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// checkTokens wants the relay to accept some tokens, by name, and to refuse others.
func (s *relayState) checkTokens(accepted, refused map[string]auth.Minted) {
	s.t.Helper()
	for name, m := range accepted {
		if _, err := s.store.Verify(m.Token); err != nil {
			s.t.Errorf("the token %q is refused: %v", name, err)
		}
	}
	for name, m := range refused {
		if _, err := s.store.Verify(m.Token); err == nil {
			s.t.Errorf("the token %q is accepted", name)
		}
	}
}

// checkNodes wants the relay to know some nodes.
func (s *relayState) checkNodes(nodeIDs ...string) {
	s.t.Helper()
	for _, id := range nodeIDs {
		if _, ok := s.store.NodeTenant(id); !ok {
			s.t.Errorf("node %s is gone", id)
		}
	}
}

// describeFiles says name and content of every file below a directory, those that an open of a
// database may change apart; "" if there is no directory.
func describeFiles(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, "-shm") || strings.HasSuffix(path, ".lock") {
			return err
		}
		content, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s %x\n", strings.TrimPrefix(path, dir), sha256.Sum256(content))
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return b.String()
}

// spoilDatabase are the ways in which a database is lost.
var spoilDatabase = map[string]func(path string) error{
	"missing": os.Remove,
	"empty":   func(path string) error { return os.Truncate(path, 0) },
	"damaged": func(path string) error {
		return os.WriteFile(path, []byte(strings.Repeat("no database ", 4096)), 0o600)
	},
}
