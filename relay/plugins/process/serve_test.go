package process

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
)

// service serves the plugin of a folder as a service manager does: Serve for each connection.
// It returns the errors of Serve.
func (r *harness) service(name string) <-chan error {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "svc") // a socket's path is short
	if err != nil {
		r.t.Fatal(err)
	}
	r.h.o.SocketDir = dir
	ln, err := net.Listen("unix", filepath.Join(dir, name+".sock"))
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended, errs := make(chan struct{}), make(chan error, 64)
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			errs <- Serve(ctx, ln, filepath.Join(r.dir, name), r.t.TempDir())
		}
	}()
	r.t.Cleanup(func() { cancel(); <-ended; _ = os.RemoveAll(dir) })
	return errs
}

// TestService: a plugin that is a service is reached at its socket, is started again with the next
// connection, and its executable is not started by the relay.
func TestService(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, shellServer(`case $line in *die*) kill -9 $$;; esac; echo '{"jsonrpc":"2.0","id":'$id',"result":{"content":[],"structuredContent":{"n":"'$MCP_AGENT_ID'"}}}'`))
	errs := r.service("odd")
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	if got := r.h.List(); len(got) != 1 || got[0].Sandbox != SandboxService {
		t.Errorf("list: %+v", got)
	}
	r.mustCall("odd.do", `{}`, `{"n":"plugin:odd"}`)
	if r.logs.FilterMessage("plugin started").Len() > 0 {
		t.Error("the relay started it itself")
	}
	if _, err := r.call("odd.do", `{"x":"die"}`); manifest.AsError(err).Reason != "plugin_died" {
		t.Errorf("a plugin that dies: %v", err)
	}
	r.mustCall("odd.do", `{}`, `{"n":"plugin:odd"}`)
	if err := r.h.Unload(t.Context(), "odd"); err != nil {
		t.Fatal(err)
	}
	err := <-errs
	if err != nil && strings.Contains(err.Error(), "signal: killed") {
		err = <-errs // it had ended before the relay connected again
	}
	if err != nil {
		t.Errorf("at the end of the connection: %v", err)
	}
}

// TestServiceReload: the next version runs beside the one that serves.
func TestServiceReload(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, versioned("1"))
	errs := r.service("odd")
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	r.replace("odd", versioned("2"))
	r.mustReload("odd")
	r.mustCall("odd.do", `{}`, `{"n":"2"}`)
	if err := r.h.Unload(t.Context(), "odd"); err != nil {
		t.Fatal(err)
	}
	if err := <-errs; err != nil {
		t.Error(err)
	}
}

// TestServiceThatStays: a plugin that ignores the end of its connection does not keep the next
// connection waiting.
func TestServiceThatStays(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, strings.TrimSuffix(shellServer(``), "\n")+"\nexec sleep 60\n")
	errs := r.service("odd")
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	if err := r.h.Unload(t.Context(), "odd"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-errs:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(stopGrace + 5*time.Second):
		t.Fatal("it runs on")
	}
	if err := r.load("odd"); err != nil {
		t.Errorf("the next start: %v", err)
	}
}

// TestSocketDirectory: who else may write there could take the relay's calls.
func TestSocketDirectory(t *testing.T) {
	r := newHarness(t)
	r.folder("odd", odd, shellServer(``))
	r.service("odd")
	if err := os.Chmod(r.h.o.SocketDir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := r.h.Check("odd"); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
		t.Errorf("got %v", err)
	}
}
