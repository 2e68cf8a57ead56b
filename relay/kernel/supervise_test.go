package kernel_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// faultyPlugin is a plugin that is no device: its calls are detached from their callers.
func faultyPlugin() *plugin { return newPlugin("zoo", "", "x:y") }

func callFaulty(k *kernel.Kernel) error {
	_, err := k.Call(context.Background(), &kernel.Request{Caller: caller("a", "x:y"), Tool: "zoo.do"})
	return err
}

func info(t *testing.T, k *kernel.Kernel, name string) kernel.PluginInfo {
	t.Helper()
	for _, p := range k.Info().Plugins {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no plugin %s", name)
	return kernel.PluginInfo{}
}

// A plugin that ignores its context holds neither its callers nor more goroutines than it
// may have calls; what it answers later is dropped, streams are closed.
func TestPluginThatIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.m.MaxConcurrency, p.m.CallTimeout = 3, 2*time.Second
		late := newStream()
		var running atomic.Int64
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			running.Add(1)
			defer running.Add(-1)
			time.Sleep(time.Hour)
			return &kernel.Result{Stream: late}, nil
		}
		load(t, k, p)
		for range 3 {
			start := time.Now()
			wantCode(t, "slow", callFaulty(k), manifest.DeadlineExceeded, "gateway_deadline")
			if took := time.Since(start); took != 2*time.Second {
				t.Errorf("held its caller for %v, want 2s", took)
			}
		}
		for range 10 {
			wantCode(t, "all places taken", callFaulty(k), manifest.RateLimited, "concurrency")
		}
		if n := running.Load(); n != 3 {
			t.Errorf("%d calls run, at most 3 may", n)
		}
		if in := info(t, k, "zoo"); in.InFlight != 3 || in.Timeouts != 3 || in.Calls != 3 {
			t.Errorf("notified %+v", in)
		}
		time.Sleep(2 * time.Hour)
		if late.closed.Load() != 3 || running.Load() != 0 {
			t.Errorf("%d of 3 late streams were closed, %d calls run", late.closed.Load(), running.Load())
		}
		p.call = nil
		if err := callFaulty(k); err != nil {
			t.Errorf("once they have ended: %v", err)
		}
	})
}

// A caller who leaves is not held either, and that is no fault of the plugin.
func TestCallerLeavesASlowPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			time.Sleep(4 * time.Second)
			return &kernel.Result{}, nil
		}
		load(t, k, p)
		for range 20 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			start := time.Now()
			_, err := k.Call(ctx, &kernel.Request{Caller: caller("a", "x:y"), Tool: "zoo.do"})
			if cancel(); err == nil || time.Since(start) != time.Millisecond {
				t.Fatalf("got %v after %v", err, time.Since(start))
			}
		}
		if in := info(t, k, "zoo"); in.State != kernel.StateLoaded || in.Timeouts != 0 {
			t.Errorf("notified %+v", in)
		}
		time.Sleep(10 * time.Second)
	})
}

// What is a fault, and what is none: after ten of a kind the plugin is still asked, or not.
func TestFaults(t *testing.T) {
	answer := func(res *kernel.Result, err error) func(context.Context, *kernel.Request) (*kernel.Result, error) {
		return func(context.Context, *kernel.Request) (*kernel.Result, error) { return res, err }
	}
	tests := []struct {
		name  string
		call  func(context.Context, *kernel.Request) (*kernel.Result, error)
		code  manifest.Code
		asked int64
	}{
		{"an answer", answer(&kernel.Result{Structured: json.RawMessage(`{"ok":true}`)}, nil), "", 10},
		{"a refusal", answer(nil, manifest.E(manifest.BadRequest, "illegal transition")), manifest.BadRequest, 10},
		{"a failure of the tool's own", answer(&kernel.Result{IsError: true}, nil), "", 10},
		{"an internal error", answer(nil, manifest.E(manifest.Internal, "broken")), manifest.Internal, 5},
		{"an error of the plugin's own", answer(nil, errors.New("broken")), manifest.Internal, 5},
		{"a lie", answer(&kernel.Result{Structured: json.RawMessage(`{"lie":true}`)}, nil), manifest.Internal, 5},
		{"nothing", answer(nil, nil), manifest.Internal, 5},
		{"a panic", func(context.Context, *kernel.Request) (*kernel.Result, error) { panic("canary9876") }, manifest.Internal, 5},
		{"silence", func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, manifest.DeadlineExceeded, 5},
	}
	for _, inline := range []bool{false, true} {
		for _, tt := range tests {
			synctest.Test(t, func(t *testing.T) {
				k := kernel.New(kernel.Options{})
				p := faultyPlugin()
				p.m.Inline, p.m.CallTimeout = inline, time.Second
				p.m.Tools[0].CheckResult = func(b []byte) error {
					if string(b) != `{"ok":true}` {
						return errors.New("canary9876")
					}
					return nil
				}
				p.call = tt.call
				load(t, k, p)
				for i := range 10 {
					err := callFaulty(k)
					want := tt.code
					if int64(i) >= tt.asked {
						wantCode(t, tt.name, err, manifest.Internal, "breaker")
						if ms := manifest.AsError(err).RetryAfterMS; ms < 1 || ms > 1000 {
							t.Errorf("%s: retry after %d ms, the breaker opens for a second", tt.name, ms)
						}
						continue
					}
					if (want == "") != (err == nil) || (err != nil && manifest.AsError(err).Code != want) {
						t.Errorf("%s, call %d: got %v, want %q", tt.name, i+1, err, want)
					}
				}
				if n := p.calls.Load(); n != tt.asked {
					t.Errorf("%s: asked %d times, want %d", tt.name, n, tt.asked)
				}
				state := kernel.StateLoaded
				if tt.asked < 10 {
					state = kernel.StateOpen
				}
				if in := info(t, k, "zoo"); in.State != state {
					t.Errorf("%s: the state is %s, want %s", tt.name, in.State, state)
				}
			})
		}
	}
}

// An open breaker lets one call try after its time, which doubles with each failed try;
// one that works closes it, and then all is as at first.
func TestBreakerBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		broken := func(context.Context, *kernel.Request) (*kernel.Result, error) { panic("broken") }
		p.call = broken
		load(t, k, p)
		trip := func() {
			for range 5 {
				wantCode(t, "trip", callFaulty(k), manifest.Internal, "panic")
			}
		}
		trip()
		if k.Stats().BreakersOpen != 1 {
			t.Error("no breaker is open")
		}
		for _, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
			before := p.calls.Load()
			time.Sleep(pause*time.Second - time.Millisecond)
			wantCode(t, "a little early", callFaulty(k), manifest.Internal, "breaker")
			time.Sleep(2 * time.Millisecond)
			if in := info(t, k, "zoo"); in.State != kernel.StateHalfOpen {
				t.Errorf("after %v s the state is %s", int64(pause), in.State)
			}
			wantCode(t, "the try", callFaulty(k), manifest.Internal, "panic")
			wantCode(t, "behind the try", callFaulty(k), manifest.Internal, "breaker")
			if n := p.calls.Load() - before; n != 1 {
				t.Errorf("after %v s it was asked %d times, want once", int64(pause), n)
			}
		}
		p.call = nil
		time.Sleep(61 * time.Second)
		for range 3 {
			if err := callFaulty(k); err != nil {
				t.Errorf("fixed: %v", err)
			}
		}
		if in := info(t, k, "zoo"); in.State != kernel.StateLoaded || in.Panics != 13 {
			t.Errorf("then notified %+v", in)
		}
		p.call = broken
		trip()
		time.Sleep(1001 * time.Millisecond)
		wantCode(t, "the first pause is short again", callFaulty(k), manifest.Internal, "panic")
	})
}

// Only one call tries a half-open plugin; the others are refused.
func TestHalfOpenAllowsOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) { return nil, nil }
		load(t, k, p)
		for range 5 {
			_ = callFaulty(k)
		}
		time.Sleep(1500 * time.Millisecond)
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			time.Sleep(time.Second)
			return &kernel.Result{}, nil
		}
		before := p.calls.Load()
		errs := make(chan error, 10)
		for range 10 {
			go func() { errs <- callFaulty(k) }()
		}
		refused := 0
		for range 10 {
			if err := <-errs; err != nil {
				wantCode(t, "beside the try", err, manifest.Internal, "breaker")
				refused++
			}
		}
		if n := p.calls.Load() - before; n != 1 || refused != 9 {
			t.Errorf("%d tried, %d were refused", n, refused)
		}
	})
}

// Devices have no breaker: each call is answered for itself (RFC-0005 §8). Nor has the
// control plane.
func TestWithoutBreaker(t *testing.T) {
	broken := func(context.Context, *kernel.Request) (*kernel.Result, error) { return nil, errors.New("x") }
	p, control := board("a", nodeA), newPlugin(kernel.ControlPlugin, "", manifest.ScopeCallReadOnly)
	p.m.Tools[0].Limit = nil
	p.call, control.call = broken, broken
	k := kernel.New(kernel.Options{})
	load(t, k, p, control)
	for range 50 {
		for _, tool := range []string{echoTool(nodeA), "kernel.do"} {
			_, err := k.Call(t.Context(), &kernel.Request{Caller: reader("a"), Tool: tool, Arguments: []byte(`{"message":"x"}`)})
			wantCode(t, tool, err, manifest.Internal, "internal")
		}
	}
	if p.calls.Load() != 50 || control.calls.Load() != 50 || k.Stats().BreakersOpen != 0 {
		t.Errorf("asked %d and %d times, want 50", p.calls.Load(), control.calls.Load())
	}
}

// The errors and timeouts of a plugin that forwards calls are those of other plugins: they do not open
// its breaker. Its own panics do.
func TestForwardingPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.m.Forwards, p.m.Inline = true, true
		load(t, k, p)
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) { return nil, errors.New("x") }
		for range 20 {
			wantCode(t, "an error", callFaulty(k), manifest.Internal, "internal")
		}
		p.call = func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		for range 20 {
			wantCode(t, "a timeout", callFaulty(k), manifest.DeadlineExceeded, "gateway_deadline")
		}
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) { panic("broken") }
		for range 5 {
			wantCode(t, "a panic", callFaulty(k), manifest.Internal, "panic")
		}
		wantCode(t, "then", callFaulty(k), manifest.Internal, "breaker")
	})
}

// Reads are supervised as calls are.
func TestReadsAreSupervised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.read = func(context.Context, *kernel.Caller, string) ([]byte, error) { panic("canary9876") }
		load(t, k, p)
		for range 5 {
			_, _, err := k.Read(t.Context(), caller("a", "x:y"), "zoo://all")
			wantCode(t, "panic", err, manifest.Internal, "panic")
		}
		_, _, err := k.Read(t.Context(), caller("a", "x:y"), "zoo://all")
		wantCode(t, "then", err, manifest.Internal, "breaker")
	})
}

// A plugin whose Watch panics is asked again; the relay lives.
func TestPanickingWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := newWatched("a", nodeA)
		work := p.watch
		p.watch = func(ctx context.Context, uri string, changed func()) error {
			if p.started.Load() == 0 {
				p.started.Add(1)
				panic("broken")
			}
			return work(ctx, uri, changed)
		}
		load(t, k, p)
		run(t, k)
		sub := subscribe(t, k, "a")
		release, err := k.Watch(reader("a"), metricsURI(nodeA))
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		time.Sleep(5 * time.Second)
		if c := sub.Next(); len(c.Updated) != 1 {
			t.Errorf("notified %+v after the panic", c)
		}
	})
}

// The plugin gets a copy of the request: the caller of an abandoned call may go on using
// the original (the race detector reports it if they share it).
func TestRequestIsNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.m.CallTimeout = time.Millisecond
		p.call = func(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
			time.Sleep(time.Second)
			r.TraceID += r.Tool + string(r.Arguments)
			return nil, nil
		}
		load(t, k, p)
		r := &kernel.Request{Caller: caller("a", "x:y"), Tool: "zoo.do"}
		_, err := k.Call(context.Background(), r)
		wantCode(t, "slow", err, manifest.DeadlineExceeded, "gateway_deadline")
		*r = kernel.Request{}
		time.Sleep(time.Minute)
		if r.TraceID != "" {
			t.Error("the plugin wrote into its caller's request")
		}
	})
}

// recordingSession is a client's side that counts what it is notified.
type recordingSession struct {
	kernel.Session
	notified atomic.Int64
}

func (s *recordingSession) Notify(context.Context, string, json.RawMessage) error {
	s.notified.Add(1)
	return nil
}

func (s *recordingSession) Request(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	s.notified.Add(1)
	return nil, nil
}

// A plugin that was left behind says its client nothing more.
func TestNothingAfterTheResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := faultyPlugin()
		p.m.CallTimeout = time.Second
		var late [2]error
		p.call = func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			_ = r.Session.Notify(ctx, "notifications/progress", nil)
			time.Sleep(time.Minute)
			late[0] = r.Session.Notify(ctx, "notifications/progress", nil)
			_, late[1] = r.Session.Request(ctx, "roots/list", nil)
			return &kernel.Result{}, nil
		}
		load(t, k, p)
		s := &recordingSession{}
		_, err := k.Call(context.Background(), &kernel.Request{Caller: caller("a", "x:y"), Tool: "zoo.do", Session: s})
		wantCode(t, "slow", err, manifest.DeadlineExceeded, "gateway_deadline")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if s.notified.Load() != 1 || late[0] == nil || late[1] == nil {
			t.Errorf("notified %d times, late %v", s.notified.Load(), late)
		}
	})
}

// The counters count what happened, and start from zero.
func TestCounters(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := faultyPlugin()
	load(t, k, p)
	for range 3 {
		_ = callFaulty(k)
	}
	_, _ = k.Call(t.Context(), &kernel.Request{Caller: caller("a"), Tool: "zoo.do"})
	p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) { panic("x") }
	_ = callFaulty(k)
	s := k.Stats()
	if s.Plugins != 1 || s.Tools != 1 || s.Resources != 1 || s.Calls != 5 || s.Errors != 2 || s.Refused != 1 || s.Panics != 1 || s.InFlight != 0 {
		t.Errorf("notified %+v", s)
	}
	in := info(t, k, "zoo")
	if in.Calls != 4 || in.Errors != 1 || in.Panics != 1 || in.Version != "1.0.0" || in.Tools != 1 || in.Resources != 1 {
		t.Errorf("notified %+v", in)
	}
	k.ResetCounters()
	if s := k.Stats(); s.Calls+s.Errors+s.Refused+s.Panics != 0 || s.Plugins != 1 {
		t.Errorf("after the reset %+v", s)
	}
	if in := info(t, k, "zoo"); in.Calls+in.Errors+in.Panics != 0 {
		t.Errorf("after the reset %+v", in)
	}
}
