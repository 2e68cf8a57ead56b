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
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a pipe: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 64<<30); err != nil { // sparse
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("64 GiB: %v", err)
	}
}
