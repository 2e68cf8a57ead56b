package auth

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/manifest"
)

func TestFileModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a b?c%41#d") // characters that mean something in a database URI
	s := openStore(t, Options{StateDir: dir})
	mint(t, s, MintRequest{Class: "device"})
	want := map[string]os.FileMode{
		".": 0o700, relayFile: 0o600, lockFile: 0o600, keysDir: 0o700, filepath.Join(keysDir, s.keyring.Load().signKID+".pem"): 0o600,
		recordCopy: 0o600, dbFile: 0o600, dbFile + "-wal": 0o600, dbFile + "-shm": 0o600,
	}
	found := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		info, err := d.Info()
		if err != nil {
			return err
		}
		if mode, ok := want[name]; !ok || info.Mode().Perm() != mode {
			t.Errorf("%s: got mode %v, want %v", name, info.Mode().Perm(), mode)
		}
		found++
		return nil
	})
	if err != nil || found != len(want) {
		t.Errorf("got %d files, %v, want %d", found, err, len(want))
	}
	b, err := os.ReadFile(filepath.Join(dir, relayFile))
	if err != nil || !strings.Contains(string(b), `"audience": "agentctl:`+s.relay.RelayID+`"`) {
		t.Errorf("relay.json: %s, %v", b, err)
	}
	if _, ok := manifest.ParseULID(s.relay.RelayID); !ok {
		t.Errorf("relay id %q", s.relay.RelayID)
	}
}

// What a restore left too open is narrowed; a directory that is not ours is left alone.
func TestOpenRestrictsModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, keysDir, s.keyring.Load().signKID+".pem")
	s.Close()
	for path, mode := range map[string]os.FileMode{dir: 0o755, filepath.Join(dir, keysDir): 0o755, key: 0o644, filepath.Join(dir, dbFile): 0o644} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	openStore(t, Options{StateDir: dir})
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, keysDir): 0o700, key: 0o600, filepath.Join(dir, dbFile): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: got %v, %v, want %v", path, info.Mode(), err, want)
		}
	}

	foreign := filepath.Join(t.TempDir(), "var")
	os.Mkdir(foreign, 0o755)
	os.Mkdir(filepath.Join(foreign, "log"), 0o755)
	os.Chmod(foreign, 0o755)
	openStore(t, Options{StateDir: foreign})
	if info, err := os.Stat(foreign); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("a directory with other things in it: got %v, %v", info.Mode(), err)
	}
}

// Every way a state directory can be unusable names the file and what to do.
func TestOpenRefuses(t *testing.T) {
	put := func(name, content string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, name)
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	tests := []struct {
		name  string
		spoil func(t *testing.T, dir string) // of a directory that was set up and closed
		want  []string
	}{
		{"everyone may write", func(t *testing.T, dir string) { os.Chmod(dir, 0o777) }, []string{"chmod 0700", "another directory"}},
		{"relay.json has an unknown member", put(relayFile, `{"relay_id":"01ARZ3NDEKTSV4RRFFQ69G5FAV","audience":"a","issuer":"a","created":"2026-01-01T00:00:00Z","x":1}`), []string{relayFile, "newer agentctl", "move the file away"}},
		{"relay.json without audience", put(relayFile, `{"relay_id":"01ARZ3NDEKTSV4RRFFQ69G5FAV"}`), []string{relayFile, "move the file away"}},
		{"relay.json is huge", put(relayFile, strings.Repeat(" ", maxRelayFile+1)), []string{relayFile, "move it away"}},
		{"relay.json is a link", func(t *testing.T, dir string) {
			os.Remove(filepath.Join(dir, relayFile))
			if err := os.Symlink("/etc/passwd", filepath.Join(dir, relayFile)); err != nil {
				t.Fatal(err)
			}
		}, []string{relayFile, "regular file"}},
		{"the key file without a key", func(t *testing.T, dir string) {
			files, _ := filepath.Glob(filepath.Join(dir, keysDir, "*.pem"))
			os.WriteFile(files[0], []byte("nothing"), 0o600)
		}, []string{".pem", "PKCS #8"}},
		{"another key in the key's file", func(t *testing.T, dir string) {
			files, _ := filepath.Glob(filepath.Join(dir, keysDir, "*.pem"))
			os.WriteFile(files[0], foreignPEM(t), 0o600)
		}, []string{".pem", "not the key that is recorded"}},
		{"keys is a file", func(t *testing.T, dir string) {
			os.RemoveAll(filepath.Join(dir, keysDir))
			put(keysDir, "")(t, dir)
		}, []string{"state directory"}},
		{"the database is none", put(dbFile, strings.Repeat("no database ", 1000)), []string{dbFile, "damaged"}},
		{"the database is a directory", func(t *testing.T, dir string) {
			os.Remove(filepath.Join(dir, dbFile))
			os.Mkdir(filepath.Join(dir, dbFile), 0o700)
		}, []string{dbFile, "move it away"}},
		{"the database is newer", func(t *testing.T, dir string) {
			s := openStore(t, Options{StateDir: dir})
			if _, err := s.db.writeDB.Exec("PRAGMA user_version = 99"); err != nil {
				t.Fatal(err)
			}
		}, []string{"schema 99", "newer agentctl"}},
		{"a file in place of the directory", func(t *testing.T, dir string) {
			os.RemoveAll(dir)
			os.WriteFile(dir, nil, 0o600)
		}, []string{"not a directory"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s, err := Open(Options{StateDir: dir})
			if err != nil {
				t.Fatal(err)
			}
			s.Close()
			tt.spoil(t, dir)
			s, err = Open(Options{StateDir: dir})
			if err == nil {
				s.Close()
				t.Fatal("opened")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("got %q, want %q in it", err, w)
				}
			}
		})
	}
	if _, err := Open(Options{}); err == nil || !strings.Contains(err.Error(), "no state directory") {
		t.Errorf("no directory: got %v", err)
	}
}
