package kernel_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Calls go on while the plugin is replaced again and again: none is refused, and none reaches a
// version that is drained.
func TestReplaceUnderLoad(t *testing.T) {
	k := kernel.New(kernel.Options{})
	caller := &kernel.Caller{Tenant: "a", Scopes: scopes("x:y")}
	version := func(inline bool) (*plugin, *atomic.Bool) {
		p, ended := newPlugin("p", "", "x:y"), new(atomic.Bool)
		p.m.Inline = inline
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			if ended.Load() {
				return nil, errors.New("called after it was drained")
			}
			return &kernel.Result{}, nil
		}
		return p, ended
	}
	p, ended := version(false)
	load(t, k, p)
	var wg sync.WaitGroup
	var stop atomic.Bool
	var calls atomic.Int64
	for range 8 {
		wg.Go(func() {
			for !stop.Load() {
				if _, err := k.Call(context.Background(), &kernel.Request{Caller: caller, Tool: "p.do"}); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
				calls.Add(1)
			}
		})
	}
	versions := 16
	if os.Getenv("AGENTCTL_SLOW") != "" {
		versions = 100
	}
	for i := range versions {
		next, nextEnded := version(i%2 == 0)
		drained, err := k.Replace(next)
		if err != nil {
			t.Fatal(err)
		}
		<-drained
		ended.Store(true)
		ended = nextEnded
		for n := calls.Load(); calls.Load() == n && !t.Failed(); {
			runtime.Gosched()
		}
	}
	stop.Store(true)
	wg.Wait()
}

// A call that had found its plugin when another version replaced it goes to that one.
func TestCallOfAReplacedPlugin(t *testing.T) {
	for _, unload := range []bool{false, true} {
		k := kernel.New(kernel.Options{})
		caller := &kernel.Caller{Tenant: "a", Scopes: scopes("x:y")}
		old, next := newPlugin("p", "", "x:y"), newPlugin("p", "", "x:y")
		next.m.Version = "2.0.0"
		next.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			return &kernel.Result{Structured: []byte(`2`)}, nil
		}
		old.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			t.Error("the old version was called")
			return &kernel.Result{}, nil
		}
		var drained <-chan struct{}
		old.m.Tools[0].CheckArguments = func(args []byte) ([]byte, error) {
			if unload {
				drained = k.Retire(old)
				return args, nil
			}
			var err error
			drained, err = k.Replace(next)
			return args, err
		}
		load(t, k, old)
		res, err := k.Call(context.Background(), &kernel.Request{Caller: caller, Tool: "p.do"})
		switch {
		case unload:
			wantCode(t, "unloaded", err, manifest.BadRequest, "name")
		case err != nil || string(res.Structured) != `2`:
			t.Errorf("got %v %v", res, err)
		}
		if !isClosed(drained) {
			t.Error("not drained, although it was never called")
		}
		if !isClosed(k.Retire(old)) {
			t.Error("not drained, although it is not loaded")
		}
	}
}

// Unloading waits for the calls in flight, those that their callers gave up included.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		caller := &kernel.Caller{Tenant: "a", Scopes: scopes("x:y")}
		p, release := newPlugin("p", "", "x:y"), make(chan struct{})
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			<-release
			return &kernel.Result{}, nil
		}
		load(t, k, p)
		ctx, cancel := context.WithCancel(t.Context())
		for _, ctx := range []context.Context{ctx, t.Context()} {
			go func() { _, _ = k.Call(ctx, &kernel.Request{Caller: caller, Tool: "p.do"}) }()
		}
		synctest.Wait()
		cancel()
		drained := k.Retire(p)
		_, err := k.Call(t.Context(), &kernel.Request{Caller: caller, Tool: "p.do"})
		wantCode(t, "after", err, manifest.BadRequest, "name")
		release <- struct{}{}
		synctest.Wait()
		if isClosed(drained) {
			t.Error("drained with a call in flight")
		}
		release <- struct{}{}
		<-drained
	})
}

// Calls that end with one process are one fault: the breaker stays closed.
func TestSharedFault(t *testing.T) {
	k := kernel.New(kernel.Options{})
	caller := &kernel.Caller{Tenant: "a", Scopes: scopes("x:y")}
	p, calls := newPlugin("p", "", "x:y"), 0
	died := &manifest.Error{Code: manifest.Internal, Message: "it ended", Reason: "plugin_died", Outcome: manifest.OutcomeUnknown}
	p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
		if calls++; calls%32 == 1 {
			return nil, died
		}
		return nil, kernel.SharedFault(died)
	}
	load(t, k, p)
	for range 128 { // four processes
		_, err := k.Call(context.Background(), &kernel.Request{Caller: caller, Tool: "p.do"})
		wantCode(t, "a call", err, manifest.Internal, "plugin_died")
	}
	if i := k.Info().Plugins[0]; i.State != kernel.StateLoaded || i.Errors != 128 {
		t.Errorf("got %+v", i)
	}
	for range 32 {
		_, _ = k.Call(context.Background(), &kernel.Request{Caller: caller, Tool: "p.do"})
	}
	if i := k.Info().Plugins[0]; i.State != kernel.StateOpen {
		t.Errorf("after five processes: %+v", i)
	}
}
