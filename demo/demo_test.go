package demo_test

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"

	"agentctl/daemon"
	"agentctl/demo"
)

// TestRun checks the loop of the demo: every board is online, an echo comes back, and
// nothing is left behind. The port of the relay is taken, so that it uses another.
func TestRun(t *testing.T) {
	t.Setenv("TMPDIR", shortDir(t))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	tokenFile := ""
	o := demo.Options{Listen: taken.Addr().String(), AllowFreePort: true, Build: daemon.Build{Version: "v1"}}
	err = demo.Run(t.Context(), o, func(ctx context.Context, d *demo.Demo) error {
		if len(d.Nodes) != 5 || d.Nodes[0].Name != demo.MachineName {
			t.Errorf("the nodes are %v", d.Nodes)
		}
		if got, _, err := d.Echo(ctx, "hello"); got != "hello" {
			t.Errorf("the echo is %q, %v", got, err)
		}
		tokenFile = d.TokenFile
		_, err := os.Stat(tokenFile)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(tokenFile); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the token file after the demo: %v", err)
	}
}

func TestRunRefuses(t *testing.T) {
	err := demo.Run(t.Context(), demo.Options{Listen: "192.0.2.1:80"}, nil)
	if !errors.Is(err, demo.ErrNotLoopback) {
		t.Errorf("beyond loopback: %v", err)
	}
	t.Setenv("TMPDIR", "/nonexistent")
	if err := demo.Run(t.Context(), demo.Options{Listen: "127.0.0.1:0"}, nil); !errors.Is(err, demo.ErrTempDir) {
		t.Errorf("without a temporary directory: %v", err)
	}
}

// shortDir is a temporary directory with a short path, as a socket needs it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
