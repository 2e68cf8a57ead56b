package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

func subscribe(t testing.TB, k *kernel.Kernel, tenant string) *kernel.Subscription {
	t.Helper()
	s, err := k.Subscribe(tenant)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// pending says whether Ready is signalled, and takes the signal.
func pending(s *kernel.Subscription) bool {
	select {
	case <-s.Ready():
		return true
	default:
		return false
	}
}

// A burst is one signal and one change, and only tenants that can see it are notified.
func TestSubscribeCoalesces(t *testing.T) {
	k := kernel.New(kernel.Options{})
	a, b := subscribe(t, k, "a"), subscribe(t, k, "b")
	p := board("a", nodeA)
	for range 1000 {
		load(t, k, p)
		k.NotifyChange("a", kernel.Change{Updated: []string{"z://1", "a://1"}, Prompts: true})
		k.Unload(p)
	}
	if !pending(a) || pending(a) {
		t.Error("a burst is not one signal")
	}
	c := a.Next()
	if !c.Tools || !c.Resources || !c.Prompts || !slices.Equal(c.Updated, []string{"a://1", "z://1"}) {
		t.Errorf("got %+v", c)
	}
	if c := a.Next(); c.Tools || c.Resources || c.Prompts || len(c.Updated) != 0 {
		t.Errorf("then got %+v", c)
	}
	if pending(b) {
		t.Errorf("the other tenant was notified of %+v", b.Next())
	}
	// A change of shared tools notifies every tenant.
	load(t, k, newPlugin("zoo", "", "x:y"))
	if !pending(a) || !pending(b) {
		t.Error("a change of a shared plugin did not reach all tenants")
	}
	a.Close()
	a.Close()
	k.NotifyChange("", kernel.Change{Tools: true})
	if pending(a) {
		t.Error("notified after Close")
	}
}

// What a replacement says: nothing when a client sees the same, else the old and the new.
func TestReplaceNotifies(t *testing.T) {
	without := board("a", nodeA)
	without.m.Resources = nil
	scoped := board("a", nodeA)
	scoped.m.Tools[0].Scope = "x:y"
	moved := board("b", nodeA)
	tests := []struct {
		name string
		p    *plugin
		a, b string
	}{
		{"the same", board("a", nodeA), "{false false false false [] false}", "{false false false false [] false}"},
		{"without its resource", without, "{true true false false [] false}", "{false false false false [] false}"},
		{"with another scope", scoped, "{true true false false [] false}", "{false false false false [] false}"},
		{"in another tenant", moved, "{true true false false [] false}", "{true true false false [] false}"},
	}
	for _, tt := range tests {
		k := kernel.New(kernel.Options{})
		load(t, k, board("a", nodeA))
		a, b := subscribe(t, k, "a"), subscribe(t, k, "b")
		if err := k.Load(tt.p, true); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(a.Next()); got != tt.a {
			t.Errorf("%s: the tenant was notified of %s, want %s", tt.name, got, tt.a)
		}
		if got := fmt.Sprint(b.Next()); got != tt.b {
			t.Errorf("%s: the other tenant was notified of %s, want %s", tt.name, got, tt.b)
		}
	}
}

func TestSubscriptionsAreBounded(t *testing.T) {
	k := kernel.New(kernel.Options{})
	subs := make([]*kernel.Subscription, kernel.MaxSubscriptions)
	for i := range subs {
		subs[i] = subscribe(t, k, "a")
	}
	if _, err := k.Subscribe("a"); !errors.Is(err, kernel.ErrTooManySubscriptions) {
		t.Errorf("one more: %v", err)
	}
	for _, s := range subs[2:] {
		s.Close()
	}
	subscribe(t, k, "a")
	// So are the URIs that wait for a reader who does not come.
	for i := range kernel.MaxWatched + 100 {
		k.NotifyChange("a", kernel.Change{Updated: []string{fmt.Sprint("x://", i)}})
	}
	if n := len(subs[1].Next().Updated); n != kernel.MaxWatched {
		t.Errorf("%d URIs are pending, want %d", n, kernel.MaxWatched)
	}
}

// watched is a plugin whose Watch counts its work and reports a change each second.
type watched struct {
	*plugin
	started, running atomic.Int64
}

func newWatched(tenant, node string) *watched {
	w := &watched{plugin: board(tenant, node)}
	w.watch = func(ctx context.Context, _ string, changed func()) error {
		w.started.Add(1)
		w.running.Add(1)
		defer w.running.Add(-1)
		for {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(time.Second):
				changed()
			}
		}
	}
	return w
}

// run runs the kernel inside a bubble until the test ends.
func run(t *testing.T, k *kernel.Kernel) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := k.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// The first watcher starts the plugin's work, the last one ends it.
func TestWatchIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := newWatched("a", nodeA)
		load(t, k, p)
		run(t, k)
		synctest.Wait()
		sub, other := subscribe(t, k, "a"), subscribe(t, k, "b")
		var release []func()
		for range 10 {
			r, err := k.Watch(reader("a"), metricsURI(nodeA))
			if err != nil {
				t.Fatal(err)
			}
			release = append(release, r)
		}
		time.Sleep(2500 * time.Millisecond)
		if p.started.Load() != 1 || p.running.Load() != 1 {
			t.Errorf("ten watchers started the work %d times", p.started.Load())
		}
		if c := sub.Next(); !slices.Equal(c.Updated, []string{metricsURI(nodeA)}) || c.Tools {
			t.Errorf("notified %+v", c)
		}
		if pending(other) {
			t.Errorf("the other tenant was notified of %+v", other.Next())
		}
		for _, r := range release[:9] {
			r()
			r() // releasing twice counts once
		}
		synctest.Wait()
		if p.running.Load() != 1 {
			t.Error("the work ended while one still watches")
		}
		release[9]()
		synctest.Wait()
		if p.running.Load() != 0 {
			t.Error("the work goes on with nobody watching")
		}
		r, err := k.Watch(reader("a"), metricsURI(nodeA))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if p.started.Load() != 2 || p.running.Load() != 1 {
			t.Errorf("a new watcher: started %d times, %d running", p.started.Load(), p.running.Load())
		}
		r()
	})
}

// Watches from before Run start with it; those of a stopped kernel are refused, and Run
// returns when all work has ended.
func TestWatchAndRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := newWatched("a", nodeA)
		load(t, k, p)
		if _, err := k.Watch(reader("a"), metricsURI(nodeA)); err != nil {
			t.Fatal(err)
		}
		gone, err := k.Watch(reader("a"), metricsURI(nodeA))
		if err != nil {
			t.Fatal(err)
		}
		gone()
		synctest.Wait()
		if p.started.Load() != 0 {
			t.Error("work began before Run")
		}
		stop := run(t, k)
		synctest.Wait()
		if p.running.Load() != 1 {
			t.Error("work did not begin with Run")
		}
		stop()
		if p.running.Load() != 0 {
			t.Error("Run returned before the work ended")
		}
		if _, err := k.Watch(reader("a"), metricsURI(nodeA)); !errors.Is(err, kernel.ErrStopped) {
			t.Errorf("Watch on a stopped kernel: %v", err)
		}
	})
}

// A released watch from before Run never starts.
func TestReleasedBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		p := newWatched("a", nodeA)
		load(t, k, p)
		release, err := k.Watch(reader("a"), metricsURI(nodeA))
		if err != nil {
			t.Fatal(err)
		}
		release()
		run(t, k)
		synctest.Wait()
		if p.started.Load() != 0 {
			t.Error("it started")
		}
	})
}

// A device that goes and comes back is another plugin with the same resource: the watch
// goes on with it.
func TestWatchFollowsTheDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		away := make(chan struct{})
		first := newWatched("a", nodeA)
		first.watch = func(ctx context.Context, _ string, _ func()) error {
			first.started.Add(1)
			select {
			case <-ctx.Done():
			case <-away:
			}
			return errors.New("the device went away")
		}
		load(t, k, first)
		run(t, k)
		sub := subscribe(t, k, "a")
		release, err := k.Watch(reader("a"), metricsURI(nodeA))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		close(away)
		k.Unload(first)
		time.Sleep(10 * time.Second)
		if n := first.started.Load(); n < 2 || n > 12 {
			t.Errorf("asked the absent device %d times in 10 s", n)
		}
		_ = sub.Next()
		second := newWatched("a", nodeA)
		load(t, k, second)
		time.Sleep(5 * time.Second)
		if second.running.Load() != 1 {
			t.Error("the device that came back is not watched")
		}
		if c := sub.Next(); len(c.Updated) != 1 {
			t.Errorf("notified %+v", c)
		}
		before := first.started.Load()
		// The same name in another tenant is not the watched device.
		k.Unload(second)
		release()
		synctest.Wait()
		if second.running.Load() != 0 || first.started.Load() != before {
			t.Error("work goes on after the release")
		}
	})
}

// A resource that moved to another tenant is not watched for the old one.
func TestWatchStaysInItsTenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		first, moved := newWatched("a", nodeA), newWatched("b", nodeA)
		ended := make(chan struct{})
		first.watch = func(ctx context.Context, _ string, _ func()) error {
			select {
			case <-ctx.Done():
			case <-ended:
			}
			return errors.New("the device went away")
		}
		load(t, k, first)
		run(t, k)
		if _, err := k.Watch(reader("a"), metricsURI(nodeA)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := k.Load(moved, true); err != nil {
			t.Fatal(err)
		}
		close(ended)
		sub := subscribe(t, k, "a")
		time.Sleep(10 * time.Second)
		if moved.started.Load() != 0 || len(sub.Next().Updated) != 0 {
			t.Error("a tenant watches another tenant's device")
		}
	})
}

func TestWatchRefusals(t *testing.T) {
	k := kernel.New(kernel.Options{})
	still := board("a", nodeB)
	still.m.Resources[0].Watchable = false
	load(t, k, newWatched("a", nodeA), still)
	tests := []struct {
		name string
		c    *kernel.Caller
		uri  string
		want error
	}{
		{"no scope", caller("a"), metricsURI(nodeA), kernel.ErrNoResource},
		{"another tenant", reader("b"), metricsURI(nodeA), kernel.ErrNoResource},
		{"no such resource", reader("a"), metricsURI(unknown), kernel.ErrNoResource},
		{"a resource that does not change", reader("a"), metricsURI(nodeB), kernel.ErrNotWatchable},
	}
	for _, tt := range tests {
		if _, err := k.Watch(tt.c, tt.uri); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
}

// Watches are bounded over all tenants.
func TestWatchesAreBounded(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := newPlugin("wide", "", "x:y")
	p.m.Resources = nil
	var plugins []kernel.Plugin
	for i := range kernel.MaxWatched + 1 {
		if i%kernel.MaxToolsPerPlugin == 0 {
			p = newPlugin(fmt.Sprint("wide", i), "", "x:y")
			p.m.Resources = nil
			plugins = append(plugins, p)
		}
		p.m.Resources = append(p.m.Resources, &kernel.Resource{URI: fmt.Sprint("wide://", i), Scope: "x:y", Watchable: true})
	}
	load(t, k, plugins...)
	var last func()
	for i := range kernel.MaxWatched {
		release, err := k.Watch(caller("a", "x:y"), fmt.Sprint("wide://", i))
		if err != nil {
			t.Fatal(err)
		}
		last = release
	}
	more := fmt.Sprint("wide://", kernel.MaxWatched)
	if _, err := k.Watch(caller("a", "x:y"), more); !errors.Is(err, kernel.ErrTooManySubscriptions) {
		t.Errorf("one more: %v", err)
	}
	if _, err := k.Watch(caller("a", "x:y"), "wide://0"); err != nil {
		t.Errorf("one more on a watched resource: %v", err)
	}
	last()
	if _, err := k.Watch(caller("a", "x:y"), more); err != nil {
		t.Errorf("after a release: %v", err)
	}
}

// TestPromptsListChanged: the list of prompts changes when a plugin that has some comes, goes, or is
// replaced by a version without.
func TestPromptsListChanged(t *testing.T) {
	k := kernel.New(kernel.Options{})
	s := subscribe(t, k, "a")
	with := &methods{plugin: newPlugin("p", "", "x:y"), serves: []string{"prompts/list"}}
	without := newPlugin("p", "", "x:y")
	without.m.Version = "2.0.0"
	replace := func(p kernel.Plugin) {
		t.Helper()
		if _, err := k.Replace(p); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		name string
		do   func()
		want bool
	}{
		{"loaded", func() { load(t, k, with) }, true},
		{"replaced by one without", func() { replace(without) }, true},
		{"replaced by one with prompts", func() { replace(with) }, true},
		{"retired", func() { <-k.Retire(with) }, true},
		{"loaded without", func() { load(t, k, without) }, false},
		{"unloaded without", func() { k.Unload(without) }, false},
	} {
		step.do()
		if c := s.Next(); c.Prompts != step.want {
			t.Errorf("%s: list_changed of prompts is %t, want %t", step.name, c.Prompts, step.want)
		}
	}
}
