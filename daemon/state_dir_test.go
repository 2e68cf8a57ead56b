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
	"time"

	"go.uber.org/zap"

	"agentctl/atomicfile"
	"agentctl/config"
	"agentctl/manifest"
	"agentctl/statedir"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// stateFiles are whole files of a state directory, by name. The history is a database, whose damage
// package history tests.
func stateFiles(t *testing.T) (files map[string]string, node string) {
	t.Helper()
	dir := t.TempDir()
	if err := config.SaveSettings(filepath.Join(dir, config.SettingsFile), config.Settings{"base_interval_ms": {Value: int64(5000)}, "modules": {Value: []string{"wear"}}}); err != nil {
		t.Fatal(err)
	}
	settings, err := os.ReadFile(filepath.Join(dir, config.SettingsFile))
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

// TestStateDirDamage: the daemon starts whatever has the place of a file of its state directory,
// keeps what was there, and says in its status what is wrong.
func TestStateDirDamage(t *testing.T) {
	t.Parallel()
	files, node := stateFiles(t)
	for name, whole := range files {
		variants := map[string]func(path string) error{
			"missing":   os.Remove,
			"directory": func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
			"noise":     func(path string) error { return os.WriteFile(path, []byte("\xff\x00\x13{{{: ]"), 0o600) },
		}
		for n := 0; n < len(whole); n += 64 {
			variants[fmt.Sprint("cut at ", n)] = func(path string) error { return os.WriteFile(path, []byte(whole[:n]), 0o600) }
		}
		for variant, damage := range variants {
			t.Run(name+" "+variant, func(t *testing.T) {
				dir, err := os.MkdirTemp("", "ac")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = os.RemoveAll(dir) })
				state := filepath.Join(dir, "s")
				if err := os.Mkdir(state, 0o700); err != nil {
					t.Fatal(err)
				}
				for name, text := range files {
					writeFile(t, filepath.Join(state, name), text)
				}
				path := filepath.Join(state, name)
				if err := damage(path); err != nil {
					t.Fatal(err)
				}
				before := contentsOf(t, state)
				s := startDaemon(t, dir, state).status()
				if s.NodeID == "" || s.NodeID != node && name != enroll.CredentialFile {
					t.Errorf("the board is %s, want %s", s.NodeID, node)
				}
				aside, err := atomicfile.Aside(state)
				if err != nil {
					t.Fatal(err)
				}
				isReported := slices.ContainsFunc(s.StateDir.SetAside, func(f SetAsideFile) bool {
					return f.File == name && f.Problem != "" && strings.HasPrefix(f.Aside, name)
				})
				switch isDamaged := variant != "missing"; {
				case name == enroll.FileName || name == config.SettingsFile:
					if isReported != isDamaged || (len(aside) > 0) != isDamaged {
						t.Errorf("status %+v, set aside %q", s.StateDir, aside)
					}
				case name == enroll.CredentialFile:
					if s.Join == nil || !strings.Contains(s.Join.Hint, "agentctl invite") || s.Join.State != map[bool]string{true: JoinDamaged, false: JoinLost}[isDamaged] {
						t.Errorf("join %+v", s.Join)
					}
				}
				for name, text := range before { // what was there is still there, under this name or another
					if name != "daemon.lock" && name != ".disk-probe" && !slices.Contains(mapValues(contentsOf(t, state)), text) {
						t.Errorf("the content of %s is gone: %q", name, text)
					}
				}
			})
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
	t.Parallel() // three seconds pass until a disk counts as hung
	b := newTestDaemon(t, "")
	hang := make(chan struct{})
	defer close(hang)
	go func() { _, _ = statedir.Do(b.disk, func() (int, error) { <-hang; return 0, nil }) }()
	for b.status().StateDir.State != statedir.Hung {
		time.Sleep(50 * time.Millisecond)
	}
	began := time.Now()
	if err := b.reloadConfig(); err == nil {
		t.Error("a reload read a disk that hangs")
	}
	b.saveNodeID(linkReady("01hzx9k3m4p7q8r9s0t1v2w3xy"))
	if s := b.status(); s.NodeID != "01hzx9k3m4p7q8r9s0t1v2w3xy" || s.StateDir.State != statedir.Hung || s.StateDir.Hint() == "" {
		t.Errorf("status %+v", s.StateDir)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("it took %v", took)
	}
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

func mapValues(m map[string]string) []string { return slices.Collect(maps.Values(m)) }

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
	dir, err := os.MkdirTemp("", "ac")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	state := filepath.Join(dir, "s")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
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
	err = filepath.WalkDir(state, func(path string, e os.DirEntry, err error) error {
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
