//go:build linux

package control

import (
	"runtime"
	"testing"
	"time"

	"agentctl/prober"
)

func benchServer(b *testing.B) *Client {
	b.Helper()
	r := onSocket(b, Options{})
	c, err := Dial(b.Context(), r.srv.Addr())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	b.ReportAllocs()
	return c
}

// BenchmarkSnapshot is a request and its answer, both ends.
func BenchmarkSnapshot(b *testing.B) {
	c := benchServer(b)
	for b.Loop() {
		if _, err := c.Snapshot(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDial is what a command does: connect, hello, one request, close.
func BenchmarkDial(b *testing.B) {
	r := onSocket(b, Options{})
	b.ReportAllocs()
	for b.Loop() {
		c, err := Dial(b.Context(), r.srv.Addr())
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.Snapshot(b.Context()); err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// BenchmarkEmit is what a sample costs while somebody takes events.
func BenchmarkEmit(b *testing.B) {
	srv, err := NewServer(Options{Prober: prober.New(prober.Options{})})
	if err != nil {
		b.Fatal(err)
	}
	srv.subscribe()
	s := prober.Sample{TSMS: 1_893_456_000_000, CPUPct: 12.5, MemTotalBytes: 1 << 34, MemBytes: 1 << 31}
	b.ReportAllocs()
	for b.Loop() {
		s.Mono += time.Minute // all modules are due
		srv.publishMetrics(s)
	}
}

// BenchmarkIdleClient reports what a client that is connected and silent costs the
// daemon in memory: heap and stacks.
func BenchmarkIdleClient(b *testing.B) {
	r := onSocket(b, Options{})
	before := memory()
	for range MaxClients {
		nc := r.dial()
		defer nc.Close()
		nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
		if _, err := nc.Read(make([]byte, 1<<10)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(memory()-before)/MaxClients, "B/client")
	b.ReportMetric(0, "ns/op")
}

func memory() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
