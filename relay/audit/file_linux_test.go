package audit

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestAuditFile checks that a symbolic link is not followed and that a pipe does not block.
func TestAuditFile(t *testing.T) {
	for name, plant := range map[string]func(path string) error{
		"link": func(path string) error { return os.Symlink(filepath.Join(filepath.Dir(path), "elsewhere"), path) },
		"pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		dir := t.TempDir()
		if err := plant(filepath.Join(dir, "audit.jsonl")); err != nil {
			t.Fatal(err)
		}
		a, err := Open(Options{Dir: dir})
		if err == nil {
			_ = a.Close()
			t.Errorf("a %s is opened", name)
		}
		if _, err := os.Lstat(filepath.Join(dir, "elsewhere")); err == nil {
			t.Errorf("a file was made where the %s leads", name)
		}
	}
}
