package relay

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

// A relay whose event log was lost, emptied or put back from an older copy does not start, and
// makes no new one. Its identities stay as they are.
func TestEventLogIsTheRecordedOne(t *testing.T) {
	for name, tt := range map[string]struct {
		problem string
		spoil   func(path, older string) error
	}{
		"missing": {auth.StoreMissing, func(path, _ string) error { return os.Remove(path) }},
		"empty":   {auth.StoreEmpty, func(path, _ string) error { return os.Truncate(path, 0) }},
		"older":   {auth.StoreOlder, func(path, older string) error { return os.Rename(older, path) }},
	} {
		dir := t.TempDir()
		opt := Options{StateDir: dir, Listen: "127.0.0.1:0"}
		path, older := filepath.Join(dir, eventlog.FileName), filepath.Join(dir, "older")
		for range 2 {
			r, err := Open(opt)
			if err != nil {
				t.Fatal(name, err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(name, err)
			}
			if b, err := os.ReadFile(older); err != nil || len(b) == 0 {
				b, err = os.ReadFile(path)
				if err == nil {
					err = os.WriteFile(older, b, 0o600)
				}
				if err != nil {
					t.Fatal(name, err)
				}
				appendEvents(t, path)
			}
		}
		if err := tt.spoil(path, older); err != nil {
			t.Fatal(name, err)
		}
		r, err := Open(opt)
		if err == nil {
			r.Close()
		}
		var bad *auth.StateError
		if !errors.As(err, &bad) || bad.Store != eventlog.FileName || bad.Problem != tt.problem {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := os.Lstat(path); tt.problem == auth.StoreMissing && err == nil {
			t.Error("a new event log was made")
		}
	}
}

// appendEvents writes an event to a log that no relay has open.
func appendEvents(t *testing.T, path string) {
	t.Helper()
	s, err := eventlog.Open(eventlog.Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	stop := runStore(s, func(err error) { t.Error(err) })
	defer stop()
	if _, err := s.Append(t.Context(), eventlog.Event{Tenant: "acme", Type: "ticket.created", Aggregate: "1", Payload: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
}
