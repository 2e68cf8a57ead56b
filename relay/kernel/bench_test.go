package kernel_test

import (
	"context"
	"encoding/json"
	"runtime"
	"testing"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// nodeID makes the id of the nth node of a fleet; they are spread as real ones are.
func nodeID(n int) string {
	const digits = "0123456789abcdefghjkmnpqrstvwxyz"
	x := uint64(n) * 0x9e3779b97f4a7c15 // a permutation: no two are equal
	b := []byte("01hzx9k3m4p7q8r9s0t1v2w3xy")
	for i := range 13 {
		b[25-i] = digits[x&31]
		x >>= 5
	}
	return string(b)
}

// loadBoards loads n boards, three tools and a resource each, whose Tool structs and strings
// exist before, so that what is measured is the kernel's.
func loadBoards(tb testing.TB, k *kernel.Kernel, n int) []*plugin {
	boards := make([]*plugin, n)
	for i := range boards {
		boards[i] = board("a", nodeID(i))
		load(tb, k, boards[i])
	}
	return boards
}

// discardLog is a log that keeps nothing.
type discardLog struct{ kernel.Log }

func (discardLog) Offer(kernel.Event) bool { return true }

// callBench is one handler reached in three ways: alone behind its argument check, as a
// device (in the caller's goroutine, its calls logged), and as a plugin whose calls are detached;
// the latter two through the default pipeline.
func callBench(tb testing.TB) map[string]func() error {
	answer := &kernel.Result{Structured: json.RawMessage(`{"message":"ping"}`)}
	p := board("a", nodeA)
	for _, t := range p.m.Tools {
		t.Limit, t.LogCalls = nil, true
	}
	p.call = func(context.Context, *kernel.Request) (*kernel.Result, error) { return answer, nil }
	zoo := newPlugin("zoo", "", manifest.ScopeCallReadOnly)
	zoo.m.Tools[0].CheckArguments = p.m.Tools[0].CheckArguments
	zoo.call = p.call
	c, args := reader("a"), json.RawMessage(`{"message":"ping"}`)
	k := kernel.New(kernel.Options{Audit: func(kernel.Record) {}, Log: discardLog{}})
	if _, err := stages.New(k.Pipeline(), stages.Options{Log: zap.NewNop()}); err != nil { // the default ones
		tb.Fatal(err)
	}
	load(tb, k, p, zoo)
	through := func(tool string) func() error {
		return func() error {
			_, err := k.Call(context.Background(), &kernel.Request{Caller: c, Tool: tool, Arguments: args})
			return err
		}
	}
	return map[string]func() error{"device": through(echoTool(nodeA)), "plugin": through("zoo.do"), "bare": func() error {
		checked, err := p.m.Tools[0].CheckArguments(args)
		if err != nil {
			return err
		}
		_, err = p.Call(context.Background(), &kernel.Request{Caller: c, Tool: echoTool(nodeA), Arguments: checked})
		return err
	}}
}

// What the kernel adds to a call is at most 10 allocations.
func TestCallAllocations(t *testing.T) {
	n := make(map[string]float64)
	for name, call := range callBench(t) {
		n[name] = testing.AllocsPerRun(200, func() {
			if err := call(); err != nil {
				t.Fatal(err)
			}
		})
	}
	for _, name := range []string{"device", "plugin"} {
		if added := n[name] - n["bare"]; added > 10 {
			t.Errorf("the kernel adds %.0f allocations to a call of a %s", added, name)
		}
	}
}

// What the kernel adds to a call, side by side. The bar is 5 us and 10 allocations.
func BenchmarkCall(b *testing.B) {
	calls := callBench(b)
	for _, name := range []string{"bare", "device", "plugin"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := calls[name](); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A device that connects and one that leaves, among 10,000.
func BenchmarkLoadUnload(b *testing.B) {
	k := kernel.New(kernel.Options{})
	loadBoards(b, k, 10_000)
	p := board("a", nodeA)
	b.ReportAllocs()
	for b.Loop() {
		if err := k.Load(p, false); err != nil {
			b.Fatal(err)
		}
		k.Unload(p)
	}
}

// A page of 200 of 30,000 tools, at rest, while devices come and go as fast as they can,
// and for a caller who may use only the very last tools. The bar is 5 ms.
func BenchmarkListTools(b *testing.B) {
	k := kernel.New(kernel.Options{})
	boards := loadBoards(b, k, 10_000)
	load(b, k, newPlugin("zoo", "", "x:y"))
	list := func(b *testing.B, c *kernel.Caller, want int) {
		b.ReportAllocs()
		after := ""
		for i := 0; b.Loop(); i++ {
			page, more := k.ListTools(c, after, 200)
			if more && len(page) != 200 || len(page) < want {
				b.Fatalf("a page of %d", len(page))
			}
			if after = ""; more {
				after = page[len(page)-1].Name
			}
		}
	}
	b.Run("rest", func(b *testing.B) { list(b, reader("a"), 1) })
	b.Run("churn", func(b *testing.B) {
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				p := boards[i%len(boards)]
				k.Unload(p)
				_ = k.Load(p, false)
			}
		}()
		list(b, reader("a"), 1)
		close(stop)
		<-stopped
	})
	b.Run("foreign", func(b *testing.B) { list(b, caller("a", "x:y"), 1) })
}

// What a change costs that 1,000 subscribers take, and one that nobody takes.
func BenchmarkFanout(b *testing.B) {
	for name, healthy := range map[string]int{"1000": 1000, "stalled": 0} {
		b.Run(name, func(b *testing.B) {
			k := kernel.New(kernel.Options{})
			subs := make([]*kernel.Subscription, 1000)
			for i := range subs {
				subs[i] = subscribe(b, k, "a")
			}
			uris := []string{"x://1"}
			b.ReportAllocs()
			for b.Loop() {
				k.NotifyChange("a", kernel.Change{Updated: uris})
				for _, s := range subs[:healthy] {
					<-s.Ready()
					s.Next()
				}
			}
			if s := k.Stats(); healthy > 0 {
				b.ReportMetric(float64(s.FanoutP99US), "p99-us")
			}
		})
	}
}

// BenchmarkRegistry reports what a tool costs the kernel's registry, without the Tool
// itself, which is the plugin's. The bar is 200 bytes at 30,000 tools.
func BenchmarkRegistry(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(registryBytes(b, 10_000), "B/tool")
	}
}

func TestRegistryBytes(t *testing.T) {
	tools := 10_000
	if raceEnabled {
		tools = 2_000
	}
	if got := registryBytes(t, tools); got > 200 {
		t.Errorf("a tool costs the registry %.0f bytes, at most 200 are planned", got)
	}
}

func registryBytes(tb testing.TB, boards int) float64 {
	all := make([]*plugin, boards)
	for i := range all {
		all[i] = board("a", nodeID(i))
	}
	before := heap()
	k := kernel.New(kernel.Options{})
	for _, p := range all {
		load(tb, k, p)
	}
	grown := heap() - before
	_, tools, _ := k.Counts()
	runtime.KeepAlive(all)
	if want := 3 * boards; tools != want {
		tb.Fatalf("%d tools, want %d", tools, want)
	}
	return float64(grown) / float64(tools)
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A sign of life that is one of many.
func BenchmarkSeen(b *testing.B) {
	k := kernel.New(kernel.Options{})
	p := kernel.Presence{Tenant: "a", ID: "agent-1", Kind: kernel.PresenceAgent, Name: "one", Transport: "http"}
	b.ReportAllocs()
	for b.Loop() {
		k.Heartbeat(p)
	}
}
