package kernel_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A plugin that does not answer ends with the caller's budget of 5 s (RFC-0005 §7).
func TestBudget(t *testing.T) {
	block := func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	late := newStream()
	tests := []struct {
		name  string
		call  func(context.Context, *kernel.Request) (*kernel.Result, error)
		took  time.Duration
		check func()
	}{
		{"blocks", block, 5 * time.Second, nil},
		{"blocks, and explains it its own way", func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
			_, _ = block(ctx, r)
			return nil, manifest.E(manifest.NodeOffline, "gone")
		}, 5 * time.Second, nil},
		{"answers too late", func(context.Context, *kernel.Request) (*kernel.Result, error) {
			time.Sleep(5001 * time.Millisecond)
			return &kernel.Result{}, nil
		}, 5001 * time.Millisecond, nil},
		{"opens a stream too late", func(context.Context, *kernel.Request) (*kernel.Result, error) {
			time.Sleep(6 * time.Second)
			return &kernel.Result{Stream: late}, nil
		}, 6 * time.Second, func() {
			if late.closed.Load() != 1 {
				t.Error("the late stream was not closed")
			}
		}},
	}
	for _, tt := range tests {
		synctest.Test(t, func(t *testing.T) {
			var log auditLog
			k := kernel.New(kernel.Options{Audit: log.add})
			p := board("a", nodeA)
			p.call = tt.call
			load(t, k, p)
			start := time.Now()
			res, err := k.Call(context.Background(), &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)})
			wantCode(t, tt.name, err, manifest.DeadlineExceeded, "gateway_deadline")
			if res != nil {
				t.Errorf("%s: and a result", tt.name)
			}
			if took := time.Since(start); took != tt.took {
				t.Errorf("%s: took %v, want %v", tt.name, took, tt.took)
			}
			if r := log.all(); len(r) != 1 || r[0].Decision != kernel.Failed {
				t.Errorf("%s: audited %+v", tt.name, r)
			}
			if tt.check != nil {
				tt.check()
			}
		})
	}
}

// A call that ended before its plugin got it was not sent and may be repeated. Afterwards it may
// have run, so that a retry is safe only if the tool reads, unless the plugin knows better.
func TestOutcome(t *testing.T) {
	wait := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	notSent := &manifest.Error{Code: manifest.DeadlineExceeded, Message: "late", Outcome: manifest.NotSent}
	inDoubt := &manifest.Error{Code: manifest.NodeOffline, Message: "gone", Reason: "in_doubt", Outcome: manifest.OutcomeUnknown}
	tests := []struct {
		name      string
		stage     bool // the time is spent before the plugin is called
		class     manifest.SafetyClass
		fail      error // the plugin's error at the deadline; nil: that of its context
		outcome   manifest.Outcome
		retryable bool
	}{
		{"in a stage", true, manifest.ReadOnly, nil, manifest.NotSent, true},
		{"in a read-only tool", false, manifest.ReadOnly, nil, manifest.OutcomeUnknown, true},
		{"in another tool", false, "", nil, manifest.OutcomeUnknown, false},
		{"a plugin that did not send it", false, "", notSent, manifest.NotSent, true},
		{"a plugin in doubt", false, "", inDoubt, manifest.OutcomeUnknown, false},
		{"a reader in doubt", false, manifest.ReadOnly, inDoubt, manifest.OutcomeUnknown, true},
	}
	for _, tt := range tests {
		synctest.Test(t, func(t *testing.T) {
			hold := kernel.Stage{Name: "hold", Wrap: func(next kernel.Handler) kernel.Handler {
				return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
					if tt.stage {
						return nil, wait(ctx)
					}
					return next(ctx, r)
				}
			}}
			k := kernel.New(kernel.Options{Stages: []kernel.Stage{hold}})
			p := board("a", nodeA)
			for _, tool := range p.Manifest().Tools {
				tool.SafetyClass = tt.class
			}
			p.call = func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
				if err := wait(ctx); tt.fail == nil {
					return nil, err
				}
				return nil, tt.fail
			}
			load(t, k, p)
			_, err := k.Call(context.Background(), &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)})
			e := manifest.AsError(err)
			if e.Outcome != tt.outcome || e.Retryable() != tt.retryable {
				t.Errorf("%s: %v, outcome %q, retryable %v", tt.name, err, e.Outcome, e.Retryable())
			}
		})
	}
	if notSent.ReadOnly || inDoubt.ReadOnly {
		t.Error("the kernel changed the plugin's error")
	}
}

// An answer in the last moment is an answer, and the place in flight is free again.
func TestInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := board("a", nodeA)
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			time.Sleep(4999 * time.Millisecond)
			return &kernel.Result{}, nil
		}
		load(t, k, p)
		for range 6 { // more than max_concurrency
			if _, err := k.Call(context.Background(), &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)}); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A stream keeps its context long after the budget, and loses it with its caller.
func TestStreamOutlivesTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := board("a", nodeA)
		s := newStream()
		var streamCtx context.Context
		p.call = func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			streamCtx = ctx
			return &kernel.Result{Stream: s}, nil
		}
		load(t, k, p)
		ctx, cancel := context.WithCancel(context.Background())
		res, err := k.Call(ctx, &kernel.Request{Caller: reader("a"), Tool: subscribeTool(nodeA), Stream: true})
		if err != nil || res.Stream != s {
			t.Fatal(res, err)
		}
		time.Sleep(time.Hour)
		if streamCtx.Err() != nil || s.closed.Load() != 0 {
			t.Errorf("after an hour: %v, closed %d times", streamCtx.Err(), s.closed.Load())
		}
		cancel()
		synctest.Wait()
		if streamCtx.Err() == nil {
			t.Error("the stream outlives its caller")
		}
	})
}

// A streaming tool's limit is its plugin's business: joining a stream costs nothing.
func TestStreamsAreNotCharged(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := board("a", nodeA)
	p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Stream: newStream()}, nil
	}
	load(t, k, p)
	for i := range 50 {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: reader("a"), Tool: subscribeTool(nodeA), Stream: true}); err != nil {
			t.Fatalf("stream %d: %v", i+1, err)
		}
	}
}

func TestConcurrencyLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := board("a", nodeA)
		release := make(chan struct{})
		p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) {
			<-release
			return &kernel.Result{}, nil
		}
		load(t, k, p)
		call := func(tool string, args string) error {
			_, err := k.Call(context.Background(), &kernel.Request{Caller: reader("a"), Tool: tool, Arguments: []byte(args)})
			return err
		}
		errs := make(chan error, 5)
		for range 4 {
			go func() { errs <- call(echoTool(nodeA), `{"message":"x"}`) }()
		}
		synctest.Wait()
		wantCode(t, "the fifth", call(echoTool(nodeA), `{"message":"x"}`), manifest.RateLimited, "concurrency")
		go func() { errs <- call(snapshotTool(nodeA), `{}`) }() // another capability
		synctest.Wait()
		close(release)
		for range 5 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	})
}

// A caller who leaves gets (and is audited with) that reason, not that the device is slow.
func TestCallerGoesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log auditLog
		k := kernel.New(kernel.Options{Audit: log.add})
		p := board("a", nodeA)
		p.call = func(ctx context.Context, _ *kernel.Request) (*kernel.Result, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		load(t, k, p)
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(time.Second, cancel)
		_, err := k.Call(ctx, &kernel.Request{Caller: reader("a"), Tool: echoTool(nodeA), Arguments: []byte(`{"message":"x"}`)})
		wantCode(t, "cancelled", err, manifest.DeadlineExceeded, "cancelled")
		if r := log.all(); len(r) != 1 || r[0].Reason != "cancelled" {
			t.Errorf("audited %+v", r)
		}
	})
}
