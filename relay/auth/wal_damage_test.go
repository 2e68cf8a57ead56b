package auth

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentctl/sqlitefile"
)

// A damaged frame hides the changes behind it from SQLite, revocations too. Open refuses.
func TestDamagedWAL(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 12 {
		if _, err := s.Mint(t.Context(), MintRequest{Class: "agent", Tenant: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	copied := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil { // as kill -9 leaves it
		t.Fatal(err)
	}
	os.Chmod(copied, 0o700)
	os.Remove(filepath.Join(copied, dbFile+"-shm"))
	wal := filepath.Join(copied, dbFile+"-wal")
	b, err := os.ReadFile(wal)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(wal, b, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := Open(Options{StateDir: copied})
	if err == nil {
		again.Close()
	}
	var damage *sqlitefile.WALDamage
	if !errors.As(err, &damage) || damage.Lost == 0 {
		t.Errorf("Open: %v", err)
	}
}
