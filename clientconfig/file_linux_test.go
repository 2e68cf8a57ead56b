package clientconfig

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"agentctl/atomicfile"
)

// A directory that can be written and searched but not read takes a file, and cannot be synced. A caller
// must not say that the file is unchanged. The backup is not the file: its error means that nothing was changed.
func TestWriteNotSynced(t *testing.T) {
	dir := t.TempDir()
	oldPath, newPath := filepath.Join(dir, "old.json"), filepath.Join(dir, "new.json")
	writeFile(t, oldPath, "old", 0o600)
	backup, err := Read(oldPath)
	if err != nil {
		t.Fatal(err)
	}
	file, err := Read(newPath)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o300); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(dir, 0o700) }) // so that it can be removed
	const nobody = 65534
	if os.Geteuid() == 0 { // whom modes do not bind
		for _, path := range []string{filepath.Dir(dir), dir, oldPath} {
			if err := os.Chown(path, nobody, -1); err != nil {
				t.Fatal(err)
			}
		}
	}
	var backupErr, fileErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		if os.Geteuid() == 0 {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			if err := unix.Setfsuid(nobody); err != nil {
				t.Error(err)
			}
		}
		backupErr, fileErr = backup.Write([]byte("new")), file.Write([]byte("new"))
	}()
	<-done
	if !errors.Is(backupErr, atomicfile.ErrNotDurable) || errors.Is(backupErr, ErrWritten) || readFile(t, oldPath) != "old" {
		t.Errorf("a backup that was not synced: got %v and the file %q, want ErrNotDurable without ErrWritten, and old", backupErr, readFile(t, oldPath))
	}
	if !errors.Is(fileErr, ErrWritten) || readFile(t, newPath) != "new" {
		t.Errorf("a file that was not synced: got %v and the file %q, want ErrWritten and new", fileErr, readFile(t, newPath))
	}
}
