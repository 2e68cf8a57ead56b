package auth

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const nobody = 65534

// What root makes in a service's directory belongs to the service, so that `sudo
// agentctl token create` does not lock the relay out.
func TestRootChownsFilesToOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := filepath.Join(t.TempDir(), "state")
	os.Mkdir(dir, 0o700)
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, Options{StateDir: dir})
	mint(t, s, MintRequest{Class: "device"})
	if _, err := Open(Options{StateDir: dir, Audience: "https://relay.example"}); err != nil { // rewrites relay.json
		t.Fatal(err)
	}
	n := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if uid, gid, _ := ownerOf(info); uid != nobody || gid != nobody {
			t.Errorf("%s belongs to %d:%d", path, uid, gid)
		}
		n++
		return nil
	})
	if err != nil || n != 9 {
		t.Errorf("got %d files, %v", n, err)
	}
}

// A directory that this user may not write: the error names who may, and the next step.
func TestReadOnlyStateDir(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "state")
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	for path := parent; path != os.TempDir() && len(path) > 1; path = filepath.Dir(path) {
		if info, err := os.Stat(path); err != nil || info.Mode()&os.ModeSticky != 0 || os.Chmod(path, info.Mode().Perm()|0o055) != nil {
			break
		}
	}
	empty := filepath.Join(parent, "empty")
	os.Mkdir(empty, 0o755)
	filled := filepath.Join(parent, "filled") // set up, readable, not writable
	os.Rename(dir, filled)
	for path, mode := range map[string]os.FileMode{filled: 0o555, filepath.Join(filled, keysDir): 0o555, filepath.Join(filled, dbFile): 0o444, empty: 0o555} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { os.Chmod(filled, 0o700); os.Chmod(filepath.Join(filled, keysDir), 0o700) })
	for _, dir := range []string{empty, filled, filepath.Join(empty, "new")} {
		err := asNobody(t, func() error {
			s, err := Open(Options{StateDir: dir})
			if err == nil {
				s.Close()
			}
			return err
		})
		if err == nil {
			t.Errorf("%s: opened", dir)
			continue
		}
		for _, want := range []string{dir, "cannot be written", "another directory", "sudo"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %q, want %q in it", dir, err, want)
			}
		}
	}
}

// asNobody runs fn without root's rights over files. An ordinary user needs no change.
func asNobody(t *testing.T, fn func() error) error {
	t.Helper()
	if os.Geteuid() != 0 {
		return fn()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Setfsuid(nobody); err != nil {
			t.Error(err)
		}
		done <- fn()
	}()
	return <-done
}
