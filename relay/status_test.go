package relay

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// run runs a relay until the test ends or stop is called.
func run(t *testing.T, r *Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	r.OnReady(func() { close(ready) })
	go func() { ended <- r.Run(ctx) }()
	<-ready
	done := false
	stop = func() {
		if done {
			return
		}
		done = true
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// get asks a route of the relay.
func get(r *Relay, path string) (status int, body string) {
	w := httptest.NewRecorder()
	r.routes().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://127.0.0.1"+path, nil))
	return w.Code, w.Body.String()
}

// awaitStatus waits for the socket and for the plugins, which Run starts beside everything else.
func awaitStatus(t *testing.T, dir string) *Status {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s, err := ReadStatus(t.Context(), dir)
		isStarting := errors.Is(err, ErrNotRunning) ||
			err == nil && slices.ContainsFunc(s.Problems, func(p string) bool { return strings.Contains(p, " is down: ") })
		if err == nil && !isStarting {
			return s
		}
		if !isStarting || time.Now().After(end) {
			t.Fatalf("%v: %+v", err, s)
		}
	}
}

// The status is served at a path of any length, to the owner alone, and ends with the relay. A
// socket that a killed relay left behind does not matter.
func TestStatusSocket(t *testing.T) {
	for name, dir := range map[string]string{"short": "s", "long": strings.Repeat("long-", 30)} {
		t.Run(name, func(t *testing.T) {
			base, err := os.MkdirTemp("", "ac")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(base) })
			dir := filepath.Join(base, dir)
			if _, err := ReadStatus(t.Context(), dir); err == nil {
				t.Error("a status without a directory")
			}
			r, err := Open(Options{StateDir: dir, Listen: "127.0.0.1:0", Version: "v9", DisabledPlugins: []string{PluginTriage}})
			if err != nil {
				t.Fatal(err)
			}
			left, err := listenStatus(dir) // as a relay that was killed
			if err != nil {
				t.Fatal(err)
			}
			_ = left.Close()
			if _, err := ReadStatus(t.Context(), dir); !errors.Is(err, ErrNotRunning) {
				t.Errorf("with a socket that nobody serves: %v", err)
			}
			stop := run(t, r)
			s := awaitStatus(t, dir)
			if s.Version != "v9" || s.URL != r.URL() || !s.Healthy() || len(s.Stores) != 3 || len(s.Plugins) != 4 || len(s.Problems) != 0 {
				t.Errorf("status %+v", s)
			}
			if info, err := os.Stat(filepath.Join(dir, statusSocket)); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("the socket: %v %v", info, err)
			}
			if _, err := listenStatus(dir); err == nil {
				t.Error("a second relay takes the socket of one that serves it")
			}
			stop()
			if _, err := ReadStatus(t.Context(), dir); !errors.Is(err, ErrNotRunning) {
				t.Errorf("after the end: %v", err)
			}
		})
	}
}

// A fault shows in readyz, in /metrics, in the status and in the control plane, and is gone after
// it ends.
func TestFaultShows(t *testing.T) {
	dir := t.TempDir()
	r, err := Open(Options{StateDir: dir, Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	run(t, r)
	watch := r.storage.Watch(storeEvents)
	watch.Report("test", storage.Problem{Kind: storage.Full, Operation: "commit"})
	if code, body := get(r, "/readyz"); code != 503 || !strings.HasPrefix(body, "storage: events.db is full (commit) since 20") {
		t.Errorf("readyz: %d %s", code, body)
	}
	metrics := string(r.writeMetrics(nil))
	if !strings.Contains(metrics, `agentctl_storage_healthy{store="events.db"} 0`) || !strings.Contains(metrics, `agentctl_storage_healthy{store="relay.db"} 1`) {
		t.Error("the metrics do not show the fault")
	}
	s := awaitStatus(t, dir)
	if s.Healthy() || len(s.Problems) != 1 || len(r.healthProblems()) != 1 {
		t.Errorf("status: healthy, or without its problem: %+v", s.Problems)
	}
	watch.Report("test", storage.Problem{Kind: storage.Lost, Warning: true})
	if code, body := get(r, "/readyz"); code != 200 || !strings.HasPrefix(body, "ready\nstorage: events.db lost data") {
		t.Errorf("readyz with a warning: %d %s", code, body)
	}
	watch.Resolve("test")
	r.reportSpace(63<<20, 100<<20)
	if code, body := get(r, "/readyz"); code != 200 || !strings.Contains(body, "events.db is nearly full") {
		t.Errorf("readyz of a disk that is nearly full: %d %s", code, body)
	}
	r.reportSpace(2<<30, 1<<40)
	if code, body := get(r, "/readyz"); code != 200 || body != "ready\n" {
		t.Errorf("readyz afterwards: %d %s", code, body)
	}
}

// A log that is missing or damaged is refused; with StartDegraded boards are served, and
// everything that shows the relay says so. The files stay as they are.
func TestStartDegraded(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"missing": os.Remove,
		"damaged": func(path string) error { return os.WriteFile(path, make([]byte, 8192), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			opt := Options{StateDir: dir, Listen: "127.0.0.1:0"}
			r, err := Open(opt)
			if err != nil {
				t.Fatal(err)
			}
			node := manifest.NewNodeID()
			if _, err := r.store.UpsertNode(t.Context(), auth.DefaultTenant, node, "roof", nil); err != nil {
				t.Fatal(err)
			}
			stop := run(t, r)
			r.queue.Offer(kernel.Event{Tenant: auth.DefaultTenant, Type: "alert.raised", Aggregate: node})
			stop()
			path := filepath.Join(dir, storeEvents)
			for _, side := range []string{"-wal", "-shm"} {
				_ = os.Remove(path + side)
			}
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if r, err := Open(opt); err == nil {
				_ = r.Close()
				t.Fatal("started on a log that is " + name)
			}
			before, _ := os.ReadFile(path)
			opt.StartDegraded = true
			if r, err = Open(opt); err != nil {
				t.Fatal(err)
			}
			stop = run(t, r)
			admin := &kernel.Caller{Tenant: auth.DefaultTenant, Actor: "ann", Scopes: allScopes{}}
			for _, tool := range []string{"tickets.list", "tickets.create"} {
				_, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: admin, Tool: tool, Arguments: []byte(`{"title":"x"}`)})
				if e := manifest.AsError(err); tool == "tickets.create" && (e.Reason != storage.Reason || e.Retryable()) {
					t.Errorf("%s: %v", tool, err)
				} else if err == nil {
					t.Errorf("%s is served", tool)
				}
			}
			res, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: admin, Tool: "agents.list"})
			if err != nil || !strings.Contains(string(res.Structured), node) {
				t.Errorf("agents.list: %v %v", res, err)
			}
			if code, body := get(r, "/readyz"); code != 200 || !strings.Contains(body, "degraded: ") {
				t.Errorf("readyz: %d %s", code, body)
			}
			s := awaitStatus(t, dir)
			if b, _ := json.Marshal(s); s.Healthy() || s.Degraded == "" {
				t.Errorf("status: %s", b)
			}
			if !strings.Contains(string(r.writeMetrics(nil)), "agentctl_relay_degraded 1") || r.notice() == "" {
				t.Error("the metrics and MCP clients do not show it")
			}
			stop()
			if after, _ := os.ReadFile(path); string(after) != string(before) {
				t.Error("the log was changed")
			}
			opt.StartDegraded = false
			if r, err := Open(opt); err == nil {
				_ = r.Close()
				t.Error("the next start accepts the log")
			}
		})
	}
}

// allScopes has every scope.
type allScopes struct{}

func (allScopes) Has(string) bool { return true }
