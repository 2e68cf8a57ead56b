package process

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// versioned is shellServer with answers that name the version. A call with slow takes a while.
func versioned(n string) string {
	return shellServer(`case $line in *slow*) sleep 0.3;; esac; echo '{"jsonrpc":"2.0","id":'$id',"result":{"content":[],"structuredContent":{"n":"` + n + `"}}}'`)
}

// replace writes another executable, as an installer does.
func (r *harness) replace(name, run string) {
	r.t.Helper()
	path := filepath.Join(r.dir, name, "run")
	if err := os.WriteFile(path+".new", []byte(run), 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		r.t.Fatal(err)
	}
}

func (r *harness) mustReload(name string) {
	r.t.Helper()
	if _, err := r.h.Reload(r.t.Context(), name); err != nil {
		r.t.Fatal(err)
	}
}

// A reload under calls: none fails, and those in flight end with the version that began them.
func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, versioned("0"))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var stop atomic.Bool
	for range 4 {
		wg.Go(func() {
			for !stop.Load() {
				if _, err := r.call("odd.do", `{}`); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
			}
		})
	}
	for i := range 5 {
		slow := make(chan *kernel.Result, 1)
		began := r.k.Info().Plugins[0].Calls
		go func() {
			res, err := r.call("odd.do", `{"slow":1}`)
			if err != nil {
				t.Errorf("the call in flight: %v", err)
			}
			slow <- res
		}()
		until(t, "the call in flight", func() bool { return r.k.Info().Plugins[0].Calls > began })
		r.replace("odd", versioned(fmt.Sprint(i+1)))
		r.mustReload("odd")
		<-slow
	}
	stop.Store(true)
	wg.Wait()
	r.mustCall("odd.do", `{}`, `{"n":"5"}`)
}

// A version that fails a check leaves the old one, and no process.
func TestReloadThatFails(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	dir := r.folder("odd", odd, versioned("old"))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	if list := r.h.ReloadChanged(t.Context()); len(list) != 0 {
		t.Errorf("nothing has changed: %v", list)
	}
	r.replace("odd", "#!/bin/sh\nexit 3\n")
	_, err := r.h.Reload(t.Context(), "odd")
	if err == nil || !strings.Contains(err.Error(), "version 0.1.0 goes on") {
		t.Errorf("got %v", err)
	}
	r.mustCall("odd.do", `{}`, `{"n":"old"}`)
	if list := r.h.ReloadChanged(t.Context()); len(list) != 1 || list[0].Err == nil {
		t.Errorf("a program that does not start: %v", list)
	}
	if err := os.WriteFile(filepath.Join(dir, "plugin.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if list := r.h.ReloadChanged(t.Context()); len(list) != 1 || list[0].Err == nil {
		t.Errorf("a bad manifest: %v", list)
	}
	r.mustCall("odd.do", `{}`, `{"n":"old"}`)
	if err := os.WriteFile(filepath.Join(dir, "plugin.json"), []byte(strings.Replace(odd, "0.1.0", "0.2.0", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	r.replace("odd", versioned("new"))
	if list := r.h.ReloadChanged(t.Context()); len(list) != 1 || list[0].Name != "odd" || list[0].Err != nil {
		t.Errorf("a good one: %v", list)
	}
	r.mustCall("odd.do", `{}`, `{"n":"new"}`)
	if got := r.h.List(); len(got) != 1 || got[0].Version != "0.2.0" {
		t.Errorf("list: %+v", got)
	}
	if _, err := r.h.Reload(t.Context(), "even"); err != ErrNotLoaded {
		t.Errorf("a plugin that is not loaded: %v", err)
	}
}

// slowCall starts a call of the plugin odd, the first one, and returns once it is in flight.
func (r *harness) slowCall() (ended <-chan error) {
	r.t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := r.call("odd.do", `{"slow":1}`)
		done <- err
	}()
	until(r.t, "the call in flight", func() bool { return r.k.Info().Plugins[0].Calls > 0 })
	return done
}

// A reload that waited for calls in flight and then had too little time says so.
func TestReloadAfterReload(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, versioned("1"))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	ended := r.slowCall()
	r.replace("odd", versioned("2"))
	r.mustReload("odd")
	r.replace("odd", "#!/bin/sh\nexec sleep 60\n")
	ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
	defer cancel()
	if _, err := r.h.Reload(ctx, "odd"); err == nil || !strings.Contains(err.Error(), "calls in flight") {
		t.Errorf("got %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	r.mustCall("odd.do", `{}`, `{"n":"2"}`)
}

// Unload waits for the calls in flight.
func TestUnloadDrains(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, versioned("1"))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	ended := r.slowCall()
	if err := r.h.Unload(t.Context(), "odd"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
}

// fakeServer is a server in this process, for virtual time.
type fakeServer struct {
	started      atomic.Int64
	ignoresPings bool
	isStopped    atomic.Bool  // it sends nothing, and its process is stopped
	callTime     atomic.Int64 // of a call, in one thread
	dies         atomic.Bool  // at a call
	takes        atomic.Int64 // one more than the bytes that the connection takes of the next message; 0: all
}

// failingWriter fails as a pipe does whose reader has ended.
type failingWriter struct {
	net.Conn
	takes *atomic.Int64
}

func (w failingWriter) Write(b []byte) (int, error) {
	if n := w.takes.Swap(0); n > 0 {
		return int(n) - 1, syscall.EPIPE
	}
	return w.Conn.Write(b)
}

func (f *fakeServer) dial(context.Context) (*lineChannel, error) {
	f.started.Add(1)
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer theirs.Close()
		isStopped := func() bool { return f.isStopped.Load() }
		lines, gone := make(chan []byte, 1024), make(chan struct{}) // as a pipe of the system has a buffer
		go func() {
			defer close(lines)
			defer close(gone)
			for in := bufio.NewScanner(theirs); in.Scan(); {
				lines <- append([]byte(nil), in.Bytes()...)
			}
		}()
		for line := range lines {
			var m struct {
				ID     json.RawMessage `json:"id"`
				Method string          `json:"method"`
			}
			if json.Unmarshal(line, &m) != nil || m.ID == nil || isStopped() || m.Method == "ping" && f.ignoresPings {
				continue
			}
			result := `{}`
			switch m.Method {
			case "initialize":
				result = `{"protocolVersion":"2025-06-18"}`
			case "tools/list":
				result = `{"tools":[{"name":"odd.do"}]}`
			case "tools/call":
				if f.dies.Load() {
					time.Sleep(time.Millisecond) // others come meanwhile
					return
				}
				select {
				case <-time.After(time.Duration(f.callTime.Load())):
				case <-gone:
				}
				result = `{"structuredContent":{"n":1}}`
			}
			if _, err := fmt.Fprintf(theirs, `{"jsonrpc":"2.0","id":%s,"result":%s}`+"\n", m.ID, result); err != nil {
				return
			}
		}
	}()
	ch := newLineChannel(ours, failingWriter{ours, &f.takes}, func() { _ = ours.Close() }, func() error { _ = ours.Close(); return nil })
	ch.isStopped = f.isStopped.Load
	return ch, nil
}

// run supervises a plugin of the server until the test ends.
func (f *fakeServer) run(t *testing.T) (*kernel.Kernel, *[]string) {
	t.Helper()
	m, declared, err := parse([]byte(odd))
	if err != nil {
		t.Fatal(err)
	}
	k := kernel.New(kernel.Options{})
	p := newPlugin(source{manifest: m, declared: declared, dial: f.dial, kernel: k}, newWatchSet(), "test", zap.NewNop())
	var reasons []string
	p.onDown = func(_, reason string) { reasons = append(reasons, reason) }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.run(ctx, nil, func() error { return k.Load(p, false) })
	}()
	t.Cleanup(func() { cancel(); <-ended; synctest.Wait() })
	synctest.Wait()
	return k, &reasons
}

// TestLiveness: a server that sends nothing is killed and started again, and one that works is not.
func TestLiveness(t *testing.T) {
	for _, tt := range []struct {
		name     string
		noPing   bool
		stop     bool
		callTime time.Duration
		killed   time.Duration // after so long; 0: never
	}{
		{name: "healthy"},
		{name: "does not know ping", noPing: true},
		{name: "stopped", stop: true, killed: (maxUnanswered + 1) * pingInterval},
		{name: "works for long", callTime: 28 * time.Second},
		{name: "hangs in a call", callTime: time.Hour, killed: (maxUnansweredBusy + 1) * pingInterval},
		{name: "stopped in a call", stop: true, callTime: time.Hour, killed: (maxUnanswered + 1) * pingInterval},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeServer{ignoresPings: tt.noPing}
				k, reasons := f.run(t)
				f.isStopped.Store(tt.stop)
				if f.callTime.Store(int64(tt.callTime)); tt.callTime > 0 {
					_, _ = k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do"}) // its caller has left by now
				}
				start := time.Now().Add(-min(tt.callTime, kernel.CallBudget))
				if tt.killed == 0 {
					time.Sleep(5 * time.Minute)
					if n := f.started.Load(); n != 1 {
						t.Errorf("it was killed: %d starts, %v", n, *reasons)
					}
					return
				}
				for f.started.Load() == 1 {
					time.Sleep(100 * time.Millisecond)
					f.isStopped.Store(tt.stop && f.started.Load() == 1)
				}
				if took := time.Since(start); took > tt.killed+pingInterval || took < tt.killed-pingInterval {
					t.Errorf("killed after %s, want %s", took, tt.killed)
				}
				f.callTime.Store(0)
				synctest.Wait()
				if len(*reasons) != 1 || !strings.Contains((*reasons)[0], "pings") {
					t.Errorf("reasons: %v", *reasons)
				}
			})
		})
	}
}

// TestLostConnections: the calls of one lost connection are one fault, the next call finds the
// plugin up at once, and one that dies at every call backs off.
func TestLostConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeServer{}
		k, reasons := f.run(t)
		call := func() error {
			_, err := k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do"})
			return err
		}
		for range 4 {
			f.dies.Store(true)
			for range 32 {
				go func() { _ = call() }()
			}
			time.Sleep(10 * time.Millisecond)
			f.dies.Store(false)
			if err := call(); err != nil {
				t.Errorf("after the restart: %v", err)
			}
			time.Sleep(stableAfter)
		}
		i := k.Info().Plugins[0]
		if i.State != kernel.StateLoaded || len(*reasons) < 4 || i.Failures != len(*reasons) || i.LastError != "its connection ended" {
			t.Errorf("got %+v, %v", i, *reasons)
		}
		f.dies.Store(true)
		before := f.started.Load()
		for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			_ = call()
		}
		if n := f.started.Load() - before; n < 5 || n > 30 {
			t.Errorf("%d starts in 5 minutes", n)
		}
	})
}

// TestCallAfterLostConnection: who has seen the end of a connection calls the next one. The moment
// between the two is short: 40 restarts meet it about every second time, 400 always.
func TestCallAfterLostConnection(t *testing.T) {
	restarts := 40
	if os.Getenv("AGENTCTL_SLOW") != "" {
		restarts = 400
	}
	synctest.Test(t, func(t *testing.T) {
		f := &fakeServer{}
		k, _ := f.run(t)
		call := func() error {
			_, err := k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do"})
			return err
		}
		for range restarts {
			f.dies.Store(true)
			var wg sync.WaitGroup
			for range 32 {
				wg.Go(func() {
					_ = call()
					f.dies.Store(false)
					if err := call(); err != nil {
						t.Errorf("after the restart: %v", err)
					}
				})
			}
			wg.Wait()
			time.Sleep(stableAfter)
		}
	})
}

// TestCallNotSent: a call of which nothing was sent goes to the next connection, and no other one.
func TestCallNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeServer{}
		k, reasons := f.run(t)
		for i := range 20 {
			f.takes.Store(1)
			if _, err := k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do"}); err != nil {
				t.Errorf("nothing was sent: %v", err)
			}
			if len(*reasons) != i+1 {
				t.Errorf("restarts: %q", *reasons)
			}
			time.Sleep(stableAfter + time.Second) // no ping comes just now
		}
		f.takes.Store(2)
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: all, Tool: "odd.do"}); manifest.AsError(err).Outcome != manifest.OutcomeUnknown {
			t.Errorf("one byte was sent: %v", err)
		}
	})
}
