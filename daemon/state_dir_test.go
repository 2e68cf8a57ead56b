package daemon

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/config"
	"agentctl/manifest"
	"agentctl/statedir"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// stateFiles returns intact files of a state directory by name, and the node id in them. The history is
// a database, whose damage package history tests.
func stateFiles(t *testing.T) (files map[string]string, node string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), config.SettingsFile)
	if err := config.SaveSettings(path, config.Settings{"base_interval_ms": {Value: int64(5000)}, "modules": {Value: []string{"wear"}}}); err != nil {
		t.Fatal(err)
	}
	settings, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	node = manifest.NewNodeID()
	seed := base64.RawURLEncoding.EncodeToString(make([]byte, ed25519.SeedSize))
	return map[string]string{
		enroll.FileName:     fmt.Sprintf(`{"instance_id":"%032x","node_id":"%s","tenant_id":"default"}`, 7, node),
		config.SettingsFile: string(settings),
		enroll.CredentialFile: fmt.Sprintf(`{"relay":"https://127.0.0.1:1","node_id":"%s","tenant_id":"default","code_sha256":"00","private_key":"%s","token":"x.y.z","gen":1,"expires_at_ms":1,"request_id":"r"}`,
			node, seed),
		"joining.json": `{"relay":"https://127.0.0.1:1","code_sha256":"00","private_key":"` + seed + `"}`,
		"left.json":    `{"code_sha256":"00"}`,
		"daemon.lock":  "1\n",
		HistoryFile:    "not a database",
		".disk-probe":  "x",
	}, node
}

// missing is the one of damagesOf after which nothing is left of the file.
const missing = "missing"

// damagesOf returns what may happen to a file with this text, by name. A cut file ends at the begin of
// a line or in it.
func damagesOf(text string) map[string]func(path string) error {
	replaceBy := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	return map[string]func(path string) error{
		missing:     os.Remove,
		"directory": func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
		"noise":     replaceBy("\xff\x00\x13{{{: ]"),
		"empty":     replaceBy(""),
		"cut early": replaceBy(text[:len(text)/4]),
		"cut late":  replaceBy(text[:len(text)*3/4]),
	}
}

// TestStateDirDamage: whatever happens to one file of the state directory, the daemon starts, keeps
// what is left of the files, and reports in its status what is wrong.
func TestStateDirDamage(t *testing.T) {
	files, node := stateFiles(t)
	for name, text := range files {
		for damage, apply := range damagesOf(text) {
			t.Run(name+" "+damage, func(t *testing.T) {
				dir, state := newStateDir(t, files)
				if err := apply(filepath.Join(state, name)); err != nil {
					t.Fatal(err)
				}
				before := contentsOf(t, state)

				s := startDaemon(t, dir, state).status()
				switch name {
				case enroll.FileName, config.SettingsFile:
					wantSetAside(t, state, name, s.StateDir.SetAside, damage != missing)
				case enroll.CredentialFile:
					wantJoinState(t, s, map[bool]string{true: JoinLost, false: JoinDamaged}[damage == missing])
				}
				// Without the credential the board does not know its node any more.
				if s.NodeID == "" || s.NodeID != node && name != enroll.CredentialFile {
					t.Errorf("the board is node %q, want %s", s.NodeID, node)
				}
				wantKept(t, state, before)
			})
		}
	}
}

// newStateDir makes a state directory with these files, in a directory with a path short enough for
// the daemon's socket.
func newStateDir(t *testing.T, files map[string]string) (dir, state string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	state = filepath.Join(dir, "s")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		writeFile(t, filepath.Join(state, name), text)
	}
	return dir, state
}

// wantSetAside checks whether the file of that name was set aside, and that the status says so.
func wantSetAside(t *testing.T, state, name string, reported []SetAsideFile, want bool) {
	t.Helper()
	aside, err := atomicfile.Aside(state)
	if err != nil {
		t.Fatal(err)
	}
	isReported := slices.ContainsFunc(reported, func(f SetAsideFile) bool {
		return f.File == name && f.Problem != "" && strings.HasPrefix(f.Aside, name)
	})
	if isReported != want || (len(aside) > 0) != want {
		t.Errorf("set aside %q, status %+v, want a file that is set aside and reported: %v", aside, reported, want)
	}
}

// wantJoinState checks the state of a membership that needs a new invite.
func wantJoinState(t *testing.T, s *Status, want string) {
	t.Helper()
	if s.Join == nil || s.Join.State != want || !strings.Contains(s.Join.Hint, "agentctl invite") {
		t.Errorf("join is %+v, want %s and a hint about a new invite", s.Join, want)
	}
}

// wantKept checks that all contents are still in the state directory, under their name or another. The
// daemon writes the lock and the probe anew.
func wantKept(t *testing.T, state string, before map[string]string) {
	t.Helper()
	delete(before, "daemon.lock")
	delete(before, ".disk-probe")
	after := slices.Collect(maps.Values(contentsOf(t, state)))
	for name, text := range before {
		if !slices.Contains(after, text) {
			t.Errorf("the content of %s is gone: %q", name, text)
		}
	}
}

// startDaemon makes a daemon as the command does, and waits for a probe.
func startDaemon(t *testing.T, dir, state string) *Daemon {
	t.Helper()
	source := config.Source{Path: writeFile(t, filepath.Join(dir, "config.yaml"), ""), Required: true, ForDaemon: true, SetAside: true,
		LookupEnv: func(string) (string, bool) { return "", false },
		Flags:     config.Settings{"state_dir": {Value: state}, "socket": {Value: filepath.Join(dir, "a.sock")}}}
	cfg, err := source.Load()
	if err != nil {
		t.Fatal(err)
	}
	source.SetAside = false
	d, err := New(Options{Source: source, Config: cfg, Log: zap.NewNop(), Level: zap.NewAtomicLevel(), Build: Build{Version: "v1.0.0"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.closeHistory()
		d.unlockState()
		_ = d.control.Serve(canceled(t))
	})
	d.pollStateDir(statedir.OK)
	for end := time.Now().Add(20 * time.Second); d.disk.Status().FreeBytes == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // for the probe, a few system calls
	}
	return d
}

// TestHungStateDir: while an access to the state directory hangs, status and reload answer.
func TestHungStateDir(t *testing.T) {
	const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	synctest.Test(t, func(t *testing.T) {
		b := newTestDaemon(t, "")
		hang := make(chan struct{})
		defer synctest.Wait()
		defer close(hang)
		go func() { _, _ = statedir.Do(b.disk, func() (int, error) { <-hang; return 0, nil }) }()
		for b.status().StateDir.State != statedir.Hung {
			time.Sleep(50 * time.Millisecond)
		}
		began := time.Now()
		if err := b.reloadConfig(); err == nil {
			t.Error("a reload read a disk that hangs")
		}
		b.saveNodeID(linkReady(node))
		if s := b.status(); s.NodeID != node || s.StateDir.State != statedir.Hung || s.StateDir.Hint() == "" {
			t.Errorf("status of node %s is %+v, want node %s and a disk that hangs", s.NodeID, s.StateDir, node)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("it took %v, want no wait for the disk", took)
		}
	})
}

// contentsOf returns the regular files of a directory, except those of the history's database.
func contentsOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	contents := map[string]string{}
	for _, e := range entries {
		if b, err := os.ReadFile(filepath.Join(dir, e.Name())); err == nil {
			contents[e.Name()] = string(b)
		}
	}
	return contents
}

func linkReady(node string) link.AuthOK { return link.AuthOK{NodeID: node, TenantID: "default"} }

// canceled returns a context that has ended.
func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestOwner: whatever a daemon of root makes in another user's directory belongs to that user.
func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, state := newStateDir(t, nil)
	if err := os.Chown(state, 65534, 65534); err != nil {
		t.Skip(err)
	}
	b := startDaemon(t, dir, state)
	if err := b.history.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := config.SaveSettings(b.config().SettingsPath(), config.Settings{"log_level": {Value: "debug"}}); err != nil {
		t.Fatal(err)
	}
	var names []string
	err := filepath.WalkDir(state, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		names = append(names, e.Name())
		if owner := info.Sys().(*syscall.Stat_t); owner.Uid != 65534 || owner.Gid != 65534 {
			t.Errorf("%s belongs to %d:%d", path, owner.Uid, owner.Gid)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{enroll.FileName, config.SettingsFile, HistoryFile, HistoryFile + "-wal", HistoryFile + "-shm", "daemon.lock", ".disk-probe"} {
		if !slices.Contains(names, want) {
			t.Errorf("the directory holds %q, and not %s", names, want)
		}
	}
}
