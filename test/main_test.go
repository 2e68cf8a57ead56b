package test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
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
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // as a relay sets it; those of this process leave the collector alone
	}
	syscall.Umask(0o077) // commands refuse token files that others may read, and scripts make many
	code := m.Run()
	_ = os.RemoveAll(memoryDir())
	if builds.dir != "" {
		_ = os.RemoveAll(builds.dir)
	}
	os.Exit(code)
}

// patience is how long a test waits, on the real clock, for what takes milliseconds on an idle
// machine: a busy one is not to fail it. It bounds tests of what never happens at all.
const patience = 2 * time.Minute

// testVersion is the version of the tests' binaries.
const testVersion = "v0.0.0-test"

// binary returns the path of agentctl, which is built once for a whole run. env may name another platform;
// tags that leave the relay out give the board build, whose flags the Makefile has. AGENTCTL_TEST_BIN names
// a folder with binaries of testVersion to take instead, for a user who cannot build.
//
// The binaries are built without the race detector: scripts start them more than a thousand times.
func binary(t testing.TB, name, tags string, env ...string) string {
	t.Helper()
	if dir := os.Getenv("AGENTCTL_TEST_BIN"); dir != "" {
		return filepath.Join(dir, name)
	}
	path, err := buildOnce(name, func(ctx context.Context, path string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-tags", tags,
			"-ldflags", "-s -w -X agentctl/cmd/internal/cli.Version="+testVersion, "-o", path, "agentctl/cmd/agentctl")
		if tags == "agentctl_omit_relay" {
			cmd = exec.CommandContext(ctx, "make", "-s", "-C", "..", "board", "BOARD="+path, "VERSION="+testVersion)
			env = append(env, "MAKEFLAGS=", "MAKELEVEL=")
		}
		cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), env...)
		return cmd
	})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// builtPackage returns the path of the program of another package of this module, built once.
func builtPackage(importPath string) (string, error) {
	return buildOnce(strings.ReplaceAll(importPath, "/", "-"), func(ctx context.Context, path string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, importPath)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		return cmd
	})
}

// builds has what this run of the tests has built.
var builds struct {
	mu     sync.Mutex // protects the fields below; not held during a build
	dir    string     // of the programs; "" before the first one
	byName map[string]func() (string, error)
}

// buildOnce builds a program at the first call with this name, and returns its path. command makes the
// command that writes it to path.
func buildOnce(name string, command func(ctx context.Context, path string) *exec.Cmd) (string, error) {
	builds.mu.Lock()
	if builds.dir == "" {
		dir, err := os.MkdirTemp("", "agentctl-test-bin-")
		if err != nil {
			builds.mu.Unlock()
			return "", err
		}
		builds.dir, builds.byName = dir, make(map[string]func() (string, error))
	}
	build, ok := builds.byName[name]
	if !ok {
		path := filepath.Join(builds.dir, name)
		build = sync.OnceValues(func() (string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
			defer cancel()
			if out, err := command(ctx, path).CombinedOutput(); err != nil {
				return "", fmt.Errorf("build %s: %w\n%s", name, err, out)
			}
			return path, nil
		})
		builds.byName[name] = build
	}
	builds.mu.Unlock()
	return build()
}
