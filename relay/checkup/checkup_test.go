package checkup

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
)

func slow() bool { return os.Getenv("AGENTCTL_SLOW") != "" }

// newStateDir makes the state directory of a relay that was stopped: with tokens, revocations, an
// authority, events of both classes and an audit log.
func newStateDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	s, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		m, err := s.Mint(t.Context(), auth.MintRequest{Class: "agent", Tenant: fmt.Sprintf("tenant-%d", i%3), Subject: fmt.Sprintf("agent-%d", i)})
		if err != nil {
			t.Fatal(err)
		}
		if i%4 == 0 {
			if _, err := s.Revoke(t.Context(), auth.RevokeRequest{JTI: m[0].JTI}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := s.Authority(auth.AuthorityOptions{Names: func() []string { return []string{"relay.example"} }}); err != nil {
		t.Fatal(err)
	}
	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- log.Run(ctx) }()
	<-log.Started()
	for i := range 150 {
		e := eventlog.Event{Tenant: fmt.Sprintf("tenant-%d", i%3), Type: "ticket.created", Aggregate: fmt.Sprint(i), Payload: json.RawMessage(fmt.Sprintf(`{"n":%d,"text":"%s"}`, i, strings.Repeat("x", i*37%500)))}
		if i%3 == 0 {
			e.Type, e.Payload = "call", json.RawMessage(fmt.Sprintf(`{"tool":"sys.read","actor":"ci-%d","trace_id":"%032x"}`, i%5, i))
		}
		if _, err := log.Append(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.FollowEventLog(func() auth.EventLogRecord { return auth.EventLogRecord{ID: log.ID(), LastSeq: log.Last()} }); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-done
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	var audit strings.Builder
	for i := range 100 {
		fmt.Fprintf(&audit, `{"ts":"2026-11-20T00:00:%02d.000Z","tenant":"default","actor":"ci-%d","tool":"sys.read","decision":"allowed"}`+"\n", i%60, i)
	}
	if err := os.WriteFile(filepath.Join(dir, "audit.jsonl"), []byte(audit.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func run(t testing.TB, dir string) *Report {
	t.Helper()
	r, err := Run(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// snapshot describes every file of a directory.
func snapshot(t testing.TB, dir string) (s string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var sum [32]byte
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			sum = sha256.Sum256(b)
		}
		s += fmt.Sprintf("%s %s %d %x\n", path, info.Mode(), info.ModTime().UnixNano(), sum)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A sound directory has no problem, and nothing in it changes: while the relay runs, after it was
// killed and after it was stopped.
func TestSound(t *testing.T) {
	dir := newStateDir(t)
	check := func(what, dir string) {
		t.Helper()
		before := snapshot(t, dir)
		r := run(t, dir)
		if !r.Sound || len(r.Problems) != 0 {
			t.Errorf("%s: %+v", what, r.Problems)
		}
		for _, s := range r.Stores {
			if s.State != Sound {
				t.Errorf("%s: %+v", what, s)
			}
		}
		if after := snapshot(t, dir); after != before {
			t.Errorf("%s: files changed:\n%s\n%s", what, before, after)
		}
	}
	check("stopped", dir)

	s, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Mint(t.Context(), auth.MintRequest{Class: "agent", Tenant: "late"}); err != nil {
		t.Fatal(err)
	}
	killed := filepath.Join(t.TempDir(), "killed")
	if err := os.CopyFS(killed, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir(killed, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			return os.Chmod(path, 0o700)
		}
		return errors.Join(err, os.Chmod(path, 0o600))
	}); err != nil {
		t.Fatal(err)
	}
	check("killed", killed)
	os.Remove(filepath.Join(killed, "relay.db-shm"))
	check("killed, and copied without the index", killed)
	if r := run(t, dir); !r.Sound { // in use by this process, which shares its map of the index
		t.Errorf("in use: %+v", r.Problems)
	}
}

// Each block of each file is damaged, one at a time, in several ways. What is not noticed must be in a place
// that is not used.
func TestEachBlock(t *testing.T) {
	dir := newStateDir(t)
	patterns := []struct {
		name   string
		damage func(b []byte, at int)
	}{
		{"zeros", func(b []byte, _ int) { clear(b) }},
		{"0xff", func(b []byte, _ int) {
			for i := range b {
				b[i] = 0xff
			}
		}},
		{"one bit", func(b []byte, at int) { b[(at*7919+1361)%len(b)] ^= 1 << (at % 8) }},
	}
	type rate struct{ tried, unnoticed, unused int }
	rates := map[string]*rate{}
	files := []string{"relay.json", "relay.db", "events.db", "audit.jsonl", "authority.pem", "server.pem"}
	keys, _ := filepath.Glob(filepath.Join(dir, "keys", "*"))
	for _, k := range keys {
		files = append(files, filepath.Join("keys", filepath.Base(k)))
	}
	for _, name := range files {
		path := filepath.Join(dir, name)
		sound, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range patterns {
			for at := 0; at < len(sound); at += 4096 {
				repeat := 1
				if p.name == "one bit" && slow() {
					repeat = 16
				}
				if !slow() && len(sound) > 5*4096 && (at/4096)%len(patterns) != i {
					continue
				}
				for n := range repeat {
					b := slices.Clone(sound)
					p.damage(b[at:min(at+4096, len(b))], at/4096+n)
					if slices.Equal(b, sound) {
						continue
					}
					if err := os.WriteFile(path, b, 0o600); err != nil {
						t.Fatal(err)
					}
					key := fmt.Sprintf("%-14s %s", name, p.name)
					if strings.HasPrefix(name, "keys") {
						key = "keys           " + p.name
					}
					if rates[key] == nil {
						rates[key] = &rate{}
					}
					r := rates[key]
					r.tried++
					if report := run(t, dir); report.Sound {
						r.unnoticed++
						if isUnused(t, path, sound, b) {
							r.unused++
						} else if !strings.Contains(key, "relay.db") && !strings.Contains(key, "audit") {
							i := 0
							for b[i] == sound[i] {
								i++
							}
							t.Logf("%s: byte %d: %q became %q", name, i, sound[max(0, i-20):min(len(sound), i+20)], b[max(0, i-20):min(len(b), i+20)])
						}
					}
				}
			}
		}
		if err := os.WriteFile(path, sound, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for key, r := range rates {
		t.Logf("%s: %d of %d noticed, %d of the others in unused space", key, r.tried-r.unnoticed, r.tried, r.unused)
		missed := r.unnoticed - r.unused
		// A changed letter of relay.db or of an audit line is still a letter.
		if text := strings.HasSuffix(key, "one bit") && (strings.HasPrefix(key, "relay.db") || strings.HasPrefix(key, "audit")); !text && missed > 0 {
			t.Errorf("%s: %d of %d damages were not noticed", key, missed, r.tried)
		} else if text && missed*4 > r.tried*3 && r.tried > 8 {
			t.Errorf("%s: %d of %d damages were not noticed", key, missed, r.tried)
		}
	}
	if r := run(t, dir); !r.Sound {
		t.Errorf("restored: %+v", r.Problems)
	}
}

// Files that do not belong together, or that others can read.
func TestProblems(t *testing.T) {
	sound := newStateDir(t)
	tests := []struct {
		name   string
		damage func(dir string) error
		store  string
		repair Repair
		what   string
	}{
		{"readable key", func(dir string) error {
			keys, _ := filepath.Glob(filepath.Join(dir, "keys", "*"))
			return os.Chmod(keys[0], 0o644)
		}, "directory", RepairPermission, "mode 0644"},
		{"open directory", func(dir string) error { return os.Chmod(dir, 0o755) }, "directory", RepairPermission, "mode 0755"},
		{"no relay.json", func(dir string) error { return os.Remove(filepath.Join(dir, "relay.json")) }, "relay.json", RepairRestart, "no such file"},
		{"no relay.db", func(dir string) error { return os.Remove(filepath.Join(dir, "relay.db")) }, "relay.db", RepairRestore, "missing"},
		{"empty relay.db", func(dir string) error { return os.Truncate(filepath.Join(dir, "relay.db"), 0) }, "relay.db", RepairRestore, "empty"},
		{"no events.db", func(dir string) error { return os.Remove(filepath.Join(dir, "events.db")) }, "events.db", RepairRestore, "missing"},
		{"no signing key", func(dir string) error { return os.RemoveAll(filepath.Join(dir, "keys")) }, "keys", RepairRestore, "has no file"},
		{"no authority", func(dir string) error { return os.Remove(filepath.Join(dir, "authority.pem")) }, "authority", RepairRestore, "missing"},
		{"truncated events.db", func(dir string) error { return os.Truncate(filepath.Join(dir, "events.db"), 20000) }, "events.db", RepairSalvage, ""},
		{"another relay's events.db", func(dir string) error {
			b, err := os.ReadFile(filepath.Join(newStateDir(t), "events.db"))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "events.db"), b, 0o600)
		}, "events.db", RepairRestore, "not the one that is recorded"},
		{"a cut audit line", func(dir string) error {
			b, err := os.ReadFile(filepath.Join(dir, "audit.jsonl"))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "audit.jsonl"), append(b[:1000:1000], b[1030:]...), 0o600)
		}, "audit", RepairNone, "not JSON"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "copy")
			if err := os.CopyFS(dir, os.DirFS(sound)); err != nil {
				t.Fatal(err)
			}
			_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if d.IsDir() {
					return os.Chmod(path, 0o700)
				}
				return os.Chmod(path, 0o600)
			})
			if err := tt.damage(dir); err != nil {
				t.Fatal(err)
			}
			r := run(t, dir)
			if r.Sound || !slices.ContainsFunc(r.Problems, func(p Problem) bool {
				return p.Store == tt.store && p.Repair == tt.repair && strings.Contains(p.What, tt.what) && !p.Warning
			}) {
				t.Errorf("%+v", r.Problems)
			}
		})
	}
}

// A salvaged log takes the place of the old one, and the relay goes on with it.
func TestSalvageAndReplace(t *testing.T) {
	dir := newStateDir(t)
	path := filepath.Join(dir, eventlog.FileName)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	clear(b[len(b)/2/4096*4096:][:4096])
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := run(t, dir); r.Sound {
		t.Fatal("the damage is not noticed")
	}
	result, err := Salvage(t.Context(), dir, filepath.Join(t.TempDir(), "new"), true, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if result.Events < 100 {
		t.Errorf("%+v", result.SalvageReport)
	}
	if r := run(t, dir); !r.Sound {
		t.Errorf("%+v", r.Problems)
	}
	if kept, err := os.ReadFile(filepath.Join(result.Replaced, eventlog.FileName)); err != nil || !slices.Equal(kept, b) {
		t.Errorf("the old log: %v", err)
	}
	s, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	record := s.EventLog()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	log, err := eventlog.Open(eventlog.Options{Path: path, Expect: eventlog.Expect{Exists: true, ID: record.ID, Last: record.LastSeq}})
	if err != nil {
		t.Fatalf("the relay refuses it: %v", err)
	}
	log.Close()
}
