package enroll

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestUnusualIdentityFiles: a named pipe does not block Load, and a huge file is not read
// to its end.
func TestUnusualIdentityFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	id, err := Load(dir)
	if err != nil || id.Damage() == nil || !strings.Contains(id.Damage().Problem, "not a regular file") {
		t.Fatalf("a pipe: %v, %+v", err, id)
	}
	if st, err := os.Lstat(id.Damage().Aside); err != nil || st.Mode().Type() != os.ModeNamedPipe {
		t.Errorf("set aside is %v, %v; want the pipe", st, err)
	}
	if err := os.Truncate(path, 64<<30); err != nil { // sparse
		t.Fatal(err)
	}
	if id, err := Load(dir); err != nil || id.Damage() == nil || id.Damage().Aside == "" {
		t.Errorf("64 GiB: %v, %+v", err, id.Damage())
	}
}
