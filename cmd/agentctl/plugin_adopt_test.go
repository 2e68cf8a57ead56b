//go:build linux && !agentctl_omit_relay

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestAdoptInstall: a server replaces the one before, and nothing stays of a process that was killed.
func TestAdoptInstall(t *testing.T) {
	a := adoption{pluginDir: t.TempDir()}
	a.folder, a.stage = filepath.Join(a.pluginDir, "odd"), filepath.Join(a.pluginDir, stagePrefix+"1")
	stale := filepath.Join(a.pluginDir, stagePrefix+"2")
	for _, dir := range []string{stale, filepath.Join(a.folder, "server"), filepath.Join(a.stage, "server")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "code"), []byte(dir), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(stale, time.Time{}, time.Now().Add(-2*staleStage)); err != nil {
		t.Fatal(err)
	}
	removeStaleStages(a.pluginDir)
	if err := a.install([]byte("{}")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(a.folder, "server", "code")); err != nil || string(got) != filepath.Join(a.stage, "server") {
		t.Errorf("server is %q: %v", got, err)
	}
	if _, err := os.Stat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what a killed process left is there: %v", err)
	}
	if _, err := os.Stat(a.stage); err != nil {
		t.Error("what another process is using is gone")
	}
}

// TestGiveTo: all that root installs for another user belongs to that user; what a link leads to stays.
func TestGiveTo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may change owners")
	}
	outside, dir := filepath.Join(t.TempDir(), "file"), t.TempDir()
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Mkdir(filepath.Join(dir, "a"), 0o755),
		os.WriteFile(filepath.Join(dir, "a", "b"), nil, 0o644), os.Symlink(outside, filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	user := &syscall.Credential{Uid: 65534, Gid: 65534}
	if err := giveTo(user, dir); err != nil {
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
	if err := giveTo(user, dir); err == nil {
		t.Error("a folder of another user was changed")
	}
}
