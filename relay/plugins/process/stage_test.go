package process

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// A server replaces the one before, and nothing stays of a process that was killed.
func TestStage(t *testing.T) {
	pluginDir := filepath.Join(t.TempDir(), "plugins")
	folder, stale, fresh := filepath.Join(pluginDir, "odd"), filepath.Join(pluginDir, stagePrefix+"1"), filepath.Join(pluginDir, stagePrefix+"2")
	for _, dir := range []string{stale, fresh, filepath.Join(folder, NPMFolder)} {
		writeCode(t, dir)
	}
	if err := os.Chtimes(stale, time.Time{}, time.Now().Add(-2*staleStage)); err != nil {
		t.Fatal(err)
	}
	s, err := NewStage(pluginDir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what a killed process left is there: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Error("what another process is using is gone")
	}
	installed := filepath.Join(s.Dir(), NPMFolder)
	writeCode(t, installed)
	if err := WriteFolder(folder, s, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(folder, NPMFolder, "code")); err != nil || string(got) != installed {
		t.Errorf("the server is %q: %v", got, err)
	}
	if got, err := os.ReadFile(filepath.Join(folder, manifestFile)); err != nil || string(got) != "{}" {
		t.Errorf("the manifest is %q: %v", got, err)
	}
	s.Remove()
	if _, err := os.Stat(s.Dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stage is there: %v", err)
	}
}

// Without a package, the manifest is all that is written, and what is installed stays.
func TestWriteFolderWithoutPackage(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "odd")
	server := filepath.Join(folder, NPMFolder)
	writeCode(t, server)
	s, err := NewStage(filepath.Dir(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Remove()
	for _, stage := range []*Stage{nil, s} {
		if err := WriteFolder(folder, stage, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(server, "code")); err != nil || string(got) != server {
			t.Errorf("the server is %q: %v", got, err)
		}
	}
}

// writeCode makes a folder with a file that has the folder's path.
func writeCode(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "code"), []byte(dir), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// All that root installs for another user belongs to that user; what a link leads to stays.
func TestStageGiveTo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may change owners")
	}
	outside, dir := filepath.Join(t.TempDir(), "file"), t.TempDir()
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Mkdir(filepath.Join(dir, "a"), 0o755),
		os.WriteFile(filepath.Join(dir, "a", "b"), nil, 0o644), os.Symlink(outside, filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	s, user := &Stage{dir}, &syscall.Credential{Uid: 65534, Gid: 65534}
	if err := s.GiveTo(user); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]uint32{dir: 65534, filepath.Join(dir, "a", "b"): 65534, filepath.Join(dir, "link"): 65534, outside: 0} {
		st, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := st.Sys().(*syscall.Stat_t).Uid; got != want {
			t.Errorf("%s belongs to %d, want %d", path, got, want)
		}
	}
	if err := s.GiveTo(user); err == nil {
		t.Error("a folder of another user was changed")
	}
	if got := OwnerOf(dir); got == nil || got.Uid != user.Uid || got.Gid != user.Gid {
		t.Errorf("the owner is %v, want %v", got, user)
	}
}
