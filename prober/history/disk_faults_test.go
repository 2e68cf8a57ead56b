//go:build linux

package history

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"modernc.org/sqlite"
)

// TestBadFile checks that recording continues whatever is at the path, and that a file of
// another program is not changed.
func TestBadFile(t *testing.T) {
	garbage := bytes.Repeat([]byte("not a database. "), 4096)
	good := goodFile(t)
	damage := func(fn func(b []byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			if err := os.WriteFile(path, fn(slices.Clone(good)), 0o640); err != nil {
				t.Fatal(err)
			}
		}
	}
	tests := []struct {
		name  string
		make  func(t *testing.T, path string)
		state string // of Stats, after a flush
		aside bool   // the file was set aside
		rows  int64  // in the file then
	}{
		{"nothing", func(*testing.T, string) {}, "ok", false, 3},
		{"no directory yet", func(t *testing.T, path string) { os.Remove(filepath.Dir(path)) }, "ok", false, 3},
		{"empty", damage(func([]byte) []byte { return nil }), "ok", false, 3},
		{"good", damage(func(b []byte) []byte { return b }), "ok", false, 5003},
		{"garbage", damage(func([]byte) []byte { return garbage }), "ok", true, 3},
		{"header overwritten", damage(func(b []byte) []byte { return append(bytes.Clone(garbage[:100]), b[100:]...) }), "ok", true, 3},
		{"page size of zero", damage(func(b []byte) []byte { b[16], b[17] = 0, 0; return b }), "ok", true, 3},
		{"schema overwritten", damage(func(b []byte) []byte { copy(b[100:4096], garbage); return b }), "ok", true, 3},
		{"cut in half", damage(func(b []byte) []byte { return b[:len(b)/8192*4096] }), "ok", true, 3},
		{"the last page overwritten", damage(func(b []byte) []byte {
			for i := len(b)/4096 - 4; i < len(b)/4096; i++ { // one of them is the tail of samples
				copy(b[i*4096:(i+1)*4096], garbage)
			}
			return b
		}), "ok", true, 3},
		{"one byte", damage(func([]byte) []byte { return []byte{'S'} }), "ok", false, 3},
		{"a directory", func(t *testing.T, path string) { os.Mkdir(path, 0o750) }, "degraded:foreign", false, 0},
		{"a pipe", func(t *testing.T, path string) { syscall.Mkfifo(path, 0o600) }, "degraded:foreign", false, 0},
		{"a link to itself", func(t *testing.T, path string) { os.Symlink(path, path) }, "degraded:foreign", false, 0},
		{"another program's", func(t *testing.T, path string) { sqlite3Shell(t, path, "CREATE TABLE theirs(x)") }, "degraded:foreign", false, 0},
		{"a newer agentctl's", damage(func(b []byte) []byte { b[71]++; return b }), "degraded:newer", false, 0},
		{"a symbolic link to nowhere", func(t *testing.T, path string) { os.Symlink("/nonexistent/x/y", path) }, "degraded:io", false, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "d", "history [1].db")
			if err := os.Mkdir(filepath.Dir(path), 0o750); err != nil {
				t.Fatal(err)
			}
			tt.make(t, path)
			before := contents(path)
			s, c := open(t, Options{Path: path})
			c.set(epoch + 10*msPerDay)
			record(s, c, 3)
			err := s.Flush(t.Context())
			st := s.Stats()
			if st.State != tt.state || (err == nil) != (tt.state == "ok") || st.Rows != tt.rows {
				t.Fatalf("Flush: %v; stats %+v; want %s, %d rows", err, st, tt.state, tt.rows)
			}
			aside, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*.corrupt-*"))
			if (len(aside) > 0) != tt.aside || (st.Quarantined > 0) != tt.aside || (st.LastError != "") != (tt.aside || tt.state != "ok") {
				t.Errorf("set aside %q, stats %+v", aside, st)
			}
			if after := contents(path); tt.state != "ok" && !bytes.Equal(before, after) {
				t.Error("a file that is not ours was changed")
			}
			// Whatever the disk is like, what was just recorded can be had.
			if got := query(t, s, Query{FromMS: epoch + 10*msPerDay}); len(got) != 3 {
				t.Errorf("%d rows, want 3", len(got))
			}
			if tt.state == "ok" {
				s.Close()
				checkIntegrity(t, path)
			}
		})
	}
}

// contents is what a regular file has, nil for anything else: reading a pipe would wait.
func contents(path string) []byte {
	if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() {
		return nil
	}
	b, _ := os.ReadFile(path)
	return b
}

// goodFile is a file with 5000 rows in more than 20 pages.
func goodFile(t *testing.T) []byte {
	t.Helper()
	s, c := open(t, Options{})
	for range 5 {
		record(s, c, 1000)
		flush(t, s)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(s.path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCorruptInTheMiddle checks that a query which reads a corrupt page returns what is in
// memory, and that recording continues in a new file.
func TestCorruptInTheMiddle(t *testing.T) {
	b := goodFile(t)
	copy(b[12*4096:14*4096], bytes.Repeat([]byte{0xa5}, 2*4096))
	path := filepath.Join(t.TempDir(), "history.db")
	if err := os.WriteFile(path, b, 0o640); err != nil {
		t.Fatal(err)
	}
	s, c := open(t, Options{Path: path})
	c.set(epoch + 6_000_000)
	record(s, c, 3)
	got := times(query(t, s, Query{FromMS: epoch}))
	if len(got) < 3 || !slices.IsSorted(got) || got[len(got)-1] != epoch+6_003_000 {
		t.Errorf("rows at %v, want at least those of memory, in order", got)
	}
	flush(t, s)
	st := s.Stats()
	if st.State != "ok" || st.Quarantined != 1 || st.Rows != 3 || !strings.Contains(st.LastError, "set aside as history.db.corrupt-") {
		t.Errorf("stats %+v, want a new file with 3 rows", st)
	}
	checkIntegrity(t, path)
}

// TestCorruptAgainAndAgain checks that at most maxQuarantined corrupt files are kept.
func TestCorruptAgainAndAgain(t *testing.T) {
	s, c := open(t, Options{})
	for i := range 5 {
		record(s, c, 2)
		flush(t, s)
		if err := s.closeDB(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.path, []byte(fmt.Sprint("broken ", i)), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	record(s, c, 2)
	flush(t, s)
	aside, err := filepath.Glob(s.path + ".corrupt-*")
	if err != nil || len(aside) != maxQuarantined {
		t.Errorf("set aside are %q, want the newest %d", aside, maxQuarantined)
	}
	if b, _ := os.ReadFile(aside[len(aside)-1]); string(b) != "broken 4" {
		t.Errorf("the newest holds %q", b)
	}
	if st := s.Stats(); st.Quarantined != 5 || st.State != "ok" {
		t.Errorf("stats %+v, want 5 set aside", st)
	}
}

// TestFileGone checks that a file which was removed or replaced is opened again, and that the
// old connection does not write into the new file.
func TestFileGone(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 3)
	flush(t, s)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(s.path + suffix); err != nil {
			t.Fatal(err)
		}
	}
	record(s, c, 2)
	flush(t, s)
	if st := s.Stats(); st.Rows != 2 || st.State != "ok" {
		t.Errorf("stats %+v, want a new file with 2 rows", st)
	}
	if got := sqlite3Shell(t, s.path, "SELECT count(*) FROM samples"); got != "2" {
		t.Errorf("%s rows in the new file, want 2", got)
	}

	other := filepath.Join(t.TempDir(), "other.db")
	if err := os.WriteFile(other, goodFile(t), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, s.path); err != nil {
		t.Fatal(err)
	}
	os.Remove(s.path + "-wal") // of the file before
	os.Remove(s.path + "-shm")
	c.step(2 * time.Hour)
	record(s, c, 1)
	flush(t, s)
	if st := s.Stats(); st.Rows != 5001 {
		t.Errorf("stats %+v, want 5001 rows of the file that took its place", st)
	}
	checkIntegrity(t, s.path)
}

// TestReadOnlyDirectory checks that recording continues in memory, and in the file as soon as
// it can be written.
func TestReadOnlyDirectory(t *testing.T) {
	dir := t.TempDir()
	protect := func(on bool) {
		mode := fs.FileMode(0o750)
		if on {
			mode = 0o550
		}
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() == 0 { // whom modes do not bind
		dir = mountTmpfs(t, "size=8m")
		protect = func(on bool) { remount(t, dir, on) }
	}
	s, c := open(t, Options{Path: filepath.Join(dir, "history.db")})
	protect(true)
	record(s, c, 3)
	if err := s.Flush(t.Context()); err == nil {
		t.Fatal("flushed into a read-only directory")
	}
	if st := s.Stats(); st.State != "degraded:read-only" || st.Unsaved != 3 {
		t.Errorf("stats %+v, want degraded:read-only and 3 unsaved", st)
	}
	if got := query(t, s, Query{FromMS: epoch}); len(got) != 3 {
		t.Errorf("%d rows from memory, want 3", len(got))
	}
	protect(false)
	flush(t, s)
	if st := s.Stats(); st.State != "ok" || st.Rows != 3 || st.LastError == "" {
		t.Errorf("stats %+v, want ok with 3 rows and the error kept", st)
	}
	if os.Geteuid() != 0 {
		return // the file is open, so its directory's mode matters no more
	}
	s.closeDB() // a mount with an open file cannot become read-only
	protect(true)
	record(s, c, 3)
	if err := s.Flush(t.Context()); err == nil || s.Stats().State != "degraded:read-only" {
		t.Errorf("Flush: %v; stats %+v; want degraded:read-only", err, s.Stats())
	}
	protect(false)
	flush(t, s)
	if got := query(t, s, Query{FromMS: epoch}); len(got) != 6 {
		t.Errorf("%d rows, want 6", len(got))
	}
}

// TestDiskFull: on a filesystem of a megabyte.
func TestDiskFull(t *testing.T) {
	dir := mountTmpfs(t, "size=1m")
	s, c := open(t, Options{Path: filepath.Join(dir, "history.db")})
	record(s, c, 1000)
	flush(t, s)
	ballast := filepath.Join(dir, "ballast")
	fill(t, ballast)
	saved, full := int64(1000), false
	for range 20 {
		record(s, c, 1000)
		if err := s.Flush(t.Context()); err != nil {
			full = true
			break
		}
		saved += 1000
	}
	st := s.Stats()
	if !full || st.State != "degraded:full" || st.Rows != saved {
		t.Fatalf("stats %+v, want degraded:full and %d rows", st, saved)
	}
	if got := query(t, s, Query{FromMS: epoch}); int64(len(got)) != saved+1000 {
		t.Errorf("%d rows, want %d: what was saved and what could not be", len(got), saved+1000)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	flush(t, s)
	if st := s.Stats(); st.State != "ok" || st.Rows != saved+1000 || st.Dropped != 0 {
		t.Errorf("stats %+v, want ok and %d rows", st, saved+1000)
	}
	s.Close()
	checkIntegrity(t, s.path)
}

// TestPanicInTheDatabase checks that a crash of the database code ends the use of the file, not
// the daemon.
func TestPanicInTheDatabase(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 3)
	flush(t, s)
	err := s.withDB(func(*db) error { panic("boom") })
	if !errors.Is(err, errCrash) {
		t.Fatalf("use returned %v, want %v", err, errCrash)
	}
	record(s, c, 2)
	if err := s.Flush(t.Context()); !errors.Is(err, errCrash) || s.Stats().State != "degraded:fault" {
		t.Errorf("Flush: %v; stats %+v", err, s.Stats())
	}
	if got := query(t, s, Query{FromMS: epoch}); len(got) != 2 {
		t.Errorf("%d rows, want the 2 in memory", len(got))
	}
}

// TestBusy checks that a flush fails while another program locks the file, and loses nothing.
func TestBusy(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 3)
	flush(t, s)
	other, err := (&sqlite.Driver{}).Open(s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	holder := &db{conn: other, stmts: map[string]*stmt{}}
	if err := holder.run("BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	if err := s.withDB(func(d *db) error { return d.run("PRAGMA busy_timeout = 0") }); err != nil {
		t.Fatal(err)
	}
	record(s, c, 2)
	if err := s.Flush(context.Background()); err == nil || s.Stats().State != "degraded:busy" {
		t.Errorf("Flush: %v; stats %+v; want degraded:busy", err, s.Stats())
	}
	if got := query(t, s, Query{FromMS: epoch}); len(got) != 5 {
		t.Errorf("%d rows while the file is held, want 5", len(got))
	}
	if err := holder.run("ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	flush(t, s)
	if st := s.Stats(); st.State != "ok" || st.Rows != 5 {
		t.Errorf("stats %+v, want 5 rows", st)
	}
}
