//go:build !windows

package atomicfile

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestOwner: what root writes belongs to the owner of the directory.
func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Skip(err)
	}
	path := filepath.Join(dir, "file")
	if err := Replace(path, nil); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if s := st.Sys().(*syscall.Stat_t); s.Uid != 65534 || s.Gid != 65534 {
		t.Errorf("owner %d:%d, want 65534:65534", s.Uid, s.Gid)
	}
}

// TestOpen: a file that root makes belongs to the owner of its directory, one that exists keeps
// its owner, and a link is not followed.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	if f, err := Open(link, 0o600); err == nil || exists(outside) {
		t.Errorf("a link was followed: %v", f.Name())
	}
	isRoot := os.Geteuid() == 0
	if isRoot {
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Skip(err)
		}
	}
	path, sub := filepath.Join(dir, "file"), filepath.Join(dir, "a", "b")
	for range 2 {
		f, err := Open(path, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := MkdirAll(sub, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, made := range []string{path, filepath.Dir(sub), sub} {
		st, err := os.Stat(made)
		if err != nil {
			t.Fatal(err)
		}
		if uid := st.Sys().(*syscall.Stat_t).Uid; isRoot && uid != 65534 {
			t.Errorf("%s belongs to %d, want 65534", made, uid)
		}
	}
	if err := MkdirAll(filepath.Join(path, "below a file"), 0o700); err == nil {
		t.Error("a directory was made below a file")
	}
	if err := MkdirAll(path, 0o700); err == nil {
		t.Error("a file counts as a directory")
	}
	if !isRoot {
		return
	}
	owned := filepath.Join(dir, "root's")
	if err := os.WriteFile(owned, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Open(owned, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if st, _ := f.Stat(); st.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Error("the owner of an existing file was changed")
	}
}
