package test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// update rewrites the golden files: go test ./test -update.
var update = flag.Bool("update", false, "rewrite the golden files in testdata")

func TestMain(m *testing.M) {
	flag.Parse()
	// These tests wait, for processes and disks, far more than they compute: the default, one for
	// each CPU, would leave the CPUs idle.
	if p := flag.Lookup("test.parallel"); p.Value.String() == p.DefValue {
		_ = p.Value.Set("8")
	}
	syscall.Umask(0o077) // commands refuse token files that others may read, and scripts make many
	code := m.Run()
	_ = os.RemoveAll(memoryDir())
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// built holds what this run of the tests has built.
var built struct {
	sync.Mutex
	dir  string
	done map[string]error // by the name of the binary
}

// patience is how long a test waits, on the real clock, for what takes milliseconds on an idle
// machine: a busy one is not to fail it. It bounds tests of what never happens at all.
const patience = 2 * time.Minute

// testVersion is the version of the tests' binaries.
const testVersion = "v0.0.0-test"

// binary builds agentctl once for a whole run and gives its path. env may name another
// platform; tags that leave the relay out give the board build, whose flags the Makefile
// has. AGENTCTL_TEST_BIN names a folder with binaries of that version to take instead, for a
// user who cannot build.
func binary(t testing.TB, name, tags string, env ...string) string {
	t.Helper()
	if dir := os.Getenv("AGENTCTL_TEST_BIN"); dir != "" {
		return filepath.Join(dir, name)
	}
	built.Lock()
	defer built.Unlock()
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "agentctl-test-bin-")
		if err != nil {
			t.Fatal(err)
		}
		built.dir, built.done = dir, make(map[string]error)
	}
	path := filepath.Join(built.dir, name)
	err, ok := built.done[name]
	if !ok {
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-tags", tags,
			"-ldflags", "-s -w -X agentctl/cmd/internal/cli.Version="+testVersion, "-o", path, "agentctl/cmd/agentctl")
		if tags == "agentctl_omit_relay" {
			cmd = exec.CommandContext(ctx, "make", "-s", "-C", "..", "board", "BOARD="+path, "VERSION="+testVersion)
			env = append(env, "MAKEFLAGS=", "MAKELEVEL=")
		}
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), env...)
		if out, e := cmd.CombinedOutput(); e != nil {
			err = fmt.Errorf("build %s: %w\n%s", name, e, out)
		}
		built.done[name] = err
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}
