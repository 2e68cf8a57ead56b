package eventlog

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// schema1 is the schema of the first format.
const schema1 = `
CREATE TABLE events (
  seq          INTEGER PRIMARY KEY,
  tenant       TEXT    NOT NULL,
  type         TEXT    NOT NULL,
  aggregate_id TEXT    NOT NULL,
  payload      TEXT    NOT NULL,
  created_at   INTEGER NOT NULL
) STRICT;
CREATE TABLE retention (
  id   INTEGER PRIMARY KEY CHECK (id = 1),
  mark INTEGER NOT NULL
) STRICT;
INSERT INTO retention (id, mark) VALUES (1, 0);
PRAGMA application_id = 1634166017;
`

// copyFile copies testdata into a new state directory.
func copyFile(t testing.TB, from string) (path string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	path = logPath(t)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// lines are events as `events replay -o ndjson` prints them.
func lines(t testing.TB, r selector) string {
	t.Helper()
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	for _, e := range all(t, r, Query{}) {
		if err := enc.Encode(e); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// A log that a relay of the first format wrote comes through byte for byte, before and after it
// is converted.
func TestMigrate(t *testing.T) {
	path := copyFile(t, "testdata/format1.db")
	b, err := os.ReadFile("testdata/format1.ndjson")
	if err != nil {
		t.Fatal(err)
	}
	want := string(b)
	r, err := OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := lines(t, r); got != want {
		t.Errorf("the old log reads as\n%s", got)
	}
	if v, err := r.Verify(t.Context(), VerifyOptions{}); err != nil || v.Rows != 46 {
		t.Errorf("%+v, %v", v, err)
	}
	last, err := r.LastGiven(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Close()

	s := open(t, Options{Path: path})
	if got := lines(t, s); got != want {
		t.Errorf("the new log reads as\n%s", got)
	}
	const mark = 7353728531128323 // of the old log
	if st := s.Stats(); st.Events != 46 || st.Calls != 11 || st.Mark != mark || st.Last != last || s.CanResume(mark-2, Query{}) || !s.CanResume(mark-1, Query{}) {
		t.Errorf("stats %+v", st)
	}
	if len(s.ID()) != 32 {
		t.Errorf("id %q", s.ID())
	}
	stop := run(t, s)
	if seq := mustAppend(t, s, event("ticket.created", "x", 1)); seq <= last {
		t.Errorf("seq %d after %d", seq, last)
	}
	stop()
	if v, err := verifyFile(t.Context(), path, VerifyOptions{}); err != nil || len(v.Faults) > 0 || v.Rows != 47 {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := os.Stat(path + migrationSuffix); !os.IsNotExist(err) {
		t.Errorf("left behind: %v", err)
	}
	integrity(t, path)
}

// oldLog makes a log of the first format that was not closed: half of it is in the write-ahead
// log.
func oldLog(t testing.TB, events int) (path string) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, FileName)
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := db.Exec(query, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec("PRAGMA journal_mode = WAL")
	exec("PRAGMA wal_autocheckpoint = 0")
	exec(schema1)
	exec("BEGIN")
	for i := range events {
		if i == events/2 {
			exec("COMMIT")
			exec("PRAGMA wal_checkpoint(TRUNCATE)")
			exec("BEGIN")
		}
		typ, payload := "call", fmt.Sprintf(`{"tool":"sysecho.x.echo.invoke","node_id":"x","decision":"allow","code":"","actor":"demo-%d","trace_id":"%032x"}`, i%7, i)
		if i%10 == 0 {
			typ, payload = "ticket.created", fmt.Sprintf(`{"n":%d}`, i)
		}
		exec("INSERT INTO events VALUES (?, ?, ?, 'x', ?, ?)", epoch<<12+int64(i), fmt.Sprintf("tenant-%d", i%3), typ, payload, epoch+int64(i))
	}
	exec("COMMIT")
	copied := filepath.Join(t.TempDir(), FileName) // as it is now, before the raw connection is closed
	for _, suffix := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + suffix)
		if err == nil {
			err = os.WriteFile(copied+suffix, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return copied
}

// kill -9 during a conversion loses nothing: the next start begins it again.
func TestMigrateKilled(t *testing.T) {
	events, rounds, step := 3_000, 6, 10*time.Millisecond
	if slow() {
		events, rounds, step = 6_000, 60, 2*time.Millisecond
	}
	path := oldLog(t, events)
	if r, err := OpenReader(path); err != nil {
		t.Fatal(err)
	} else {
		if got := all(t, r, Query{}); len(got) != events {
			t.Fatalf("%d events", len(got))
		}
		r.Close()
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for round := range rounds {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), migrateEnv+"="+path)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill := time.AfterFunc(time.Duration(round)*step, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		kill.Stop()
		if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			killed++
		}
		// Not a Reader: it cannot roll back, which a file needs that was killed as its
		// write-ahead log was closed.
		db, n, last := openRaw(t, path), 0, uint64(0)
		if err := db.QueryRow("SELECT count(*), max(seq) FROM events").Scan(&n, &last); err != nil || n != events || last != uint64(epoch<<12)+uint64(events)-1 {
			t.Fatalf("round %d: %d events up to %d, %v", round, n, last, err)
		}
		format, err := checkFormat(t.Context(), db)
		if err != nil {
			t.Fatal(err)
		}
		if db.Close(); format == 2 {
			break
		}
	}
	s := open(t, Options{Path: path})
	if st := s.Stats(); st.Events != int64(events) || st.Calls != int64(events)*9/10 || st.Tenants != 3 || killed == 0 {
		t.Errorf("killed %d times; stats %+v", killed, st)
	}
	if v, err := s.Verify(t.Context(), VerifyOptions{}); err != nil || len(v.Faults) > 0 || v.Rows != int64(events) {
		t.Errorf("%+v, %v", v, err)
	}
	t.Logf("killed %d times", killed)
}

// migrateEnv makes the test binary a child that opens the log it names.
const migrateEnv = "EVENTLOG_TEST_MIGRATE"

func migrateUntilKilled(path string) error {
	s, err := Open(Options{Path: path})
	if err != nil {
		return err
	}
	return s.Close()
}

// An old log is not what was recorded, and one that another program has open stays as it is.
func TestMigrateRefused(t *testing.T) {
	path := copyFile(t, "testdata/format1.db")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Path: path, Expect: Expect{Exists: true, ID: strings.Repeat("a", 32)}}); err == nil || !strings.Contains(err.Error(), "older agentctl") {
		t.Errorf("recorded: %v", err)
	}
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	tx, err := db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.QueryRow("SELECT count(*) FROM events").Scan(new(int)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Path: path}); err == nil || !strings.Contains(err.Error(), "locked by another process") {
		t.Errorf("in use: %v", err)
	}
	tx.Rollback()
	db.Close()
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the old log changed: %v", err)
	}
}
