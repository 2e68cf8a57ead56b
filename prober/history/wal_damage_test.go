package history

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A damaged write-ahead log loses the samples behind the damage, not the history, and says so.
func TestDamagedWAL(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.db")
	s, c := open(t, Options{Path: path})
	for range 12 {
		record(s, c, 3)
		if err := s.Flush(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	copied := filepath.Join(t.TempDir(), "history.db")
	for _, suffix := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if suffix != "" {
			b[len(b)/2] ^= 1
		}
		if err := os.WriteFile(copied+suffix, b, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	s, c = open(t, Options{Path: copied})
	c.set(epoch + msPerDay)
	record(s, c, 3)
	if err := s.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats(); st.State != "ok" || st.Quarantined != 0 || st.Rows < 6 || st.Rows >= 39 || !strings.Contains(st.LastError, "would be lost") {
		t.Errorf("stats %+v", st)
	}
}
