package eventlog

import (
	"context"
	"database/sql"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
	"agentctl/sqlitefile/sqlitefiletest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		fmt.Println("error:", appendUntilKilled(path))
		os.Exit(1)
	}
	if path := os.Getenv(migrateEnv); path != "" {
		fmt.Println("error:", migrateUntilKilled(path))
		os.Exit(1)
	}
	checks := "20"
	if slow() {
		checks = "200"
	}
	flag.Set("rapid.checks", checks)
	sqlitefiletest.Main(m)
}

// slow reports whether AGENTCTL_SLOW=1 asks for the tests in full.
func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// epoch is where the tests' clocks begin: 2026-11-20 at 0:00 UTC.
const epoch int64 = 1_795_132_800_000

// clock is a wall clock that is moved by hand.
type clock struct {
	mu sync.Mutex
	ms int64
}

func newClock() *clock { return &clock{ms: epoch} }

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.UnixMilli(c.ms)
}

func (c *clock) move(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ms += d.Milliseconds()
}

func logPath(t testing.TB) string { return filepath.Join(t.TempDir(), "state", FileName) }

func open(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// run starts Run and returns when it accepts events; stop ends it and waits.
func run(t testing.TB, s *Store) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	<-s.Started()
	for !s.isRunning() { // for a moment, if Run has ended before and begins again
		runtime.Gosched()
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func (s *Store) isRunning() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state == stateRunning
}

// start opens a log and runs it until the end of the test.
func start(t testing.TB, o Options) *Store {
	t.Helper()
	s := open(t, o)
	run(t, s)
	return s
}

// event returns an event of the tenant default with the payload {"n":n}.
func event(typ, about string, n int) kernel.Event {
	return kernel.Event{Tenant: "default", Type: typ, Aggregate: about, Payload: json.RawMessage(fmt.Sprintf(`{"n":%d}`, n))}
}

func mustAppend(t testing.TB, s *Store, events ...kernel.Event) uint64 {
	t.Helper()
	seq, err := s.Append(context.Background(), events...)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

type selector interface {
	Select(context.Context, Query, func(kernel.Event) error) error
}

// all returns the events that a query selects.
func all(t testing.TB, r selector, q Query) (events []kernel.Event) {
	t.Helper()
	err := r.Select(context.Background(), q, func(e kernel.Event) error {
		events = append(events, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return events
}

// openRaw is a connection of another program, without any of our settings.
func openRaw(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, ""))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// integrity wants SQLite to find no damage in a file.
func integrity(t testing.TB, path string) {
	t.Helper()
	var said string
	if err := openRaw(t, path).QueryRow("PRAGMA integrity_check").Scan(&said); err != nil || said != "ok" {
		t.Fatalf("integrity_check: %q, %v", said, err)
	}
}
