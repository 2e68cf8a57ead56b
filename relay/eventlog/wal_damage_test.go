package eventlog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"agentctl/sqlitefile"
)

// A damaged frame hides the events behind it from SQLite, which reports nothing. Open refuses.
func TestDamagedWAL(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	for i := range 20 {
		if _, err := s.Append(context.Background(), event("ticket.created", fmt.Sprint(i), i)); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	copied := filepath.Join(t.TempDir(), FileName)
	for _, suffix := range []string{"", "-wal"} { // as kill -9 leaves them
		b, err := os.ReadFile(path + suffix)
		if err == nil && suffix != "" {
			b[len(b)/2] ^= 1
		}
		if err == nil {
			err = os.WriteFile(copied+suffix, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	again, err := Open(Options{Path: copied})
	if err == nil {
		again.Close()
	}
	var damage *sqlitefile.WALDamage
	if !errors.Is(err, ErrDamaged) || !errors.As(err, &damage) || damage.Lost == 0 {
		t.Errorf("Open: %v", err)
	}
}
