package eventlog

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"agentctl/relay/kernel"
)

// BenchmarkAppend runs concurrent appenders, each waiting until its event is on the disk of
// TMPDIR: events/s durable, and how many share a commit.
func BenchmarkAppend(b *testing.B) {
	for _, appenders := range []int{1, 16, 64, 512} {
		b.Run(fmt.Sprint(appenders), func(b *testing.B) {
			s := start(b, Options{Path: logPath(b)})
			e := call("default", 7) // as the kernel writes it
			b.SetParallelism(max(1, appenders/runtime.GOMAXPROCS(0)))
			if appenders == 1 {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
			}
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := s.Append(context.Background(), e); err != nil {
						b.Error(err)
					}
				}
			})
			st := s.Stats()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			b.ReportMetric(float64(st.Appended)/float64(st.Commits), "events/commit")
		})
	}
}

// BenchmarkReplay reads a whole log.
func BenchmarkReplay(b *testing.B) {
	s := start(b, Options{Path: logPath(b)})
	events := make([]kernel.Event, MaxAppend)
	for i := range events {
		events[i] = event("call", "01HZX9K3M4P7Q8R9S0T1V2W3XY", i)
	}
	for range 80 {
		mustAppend(b, s, events...)
	}
	for b.Loop() {
		n := 0
		if err := s.Replay(context.Background(), 0, func(kernel.Event) error { n++; return nil }); err != nil || n != 80*MaxAppend {
			b.Fatal(n, err)
		}
	}
	b.ReportMetric(float64(b.N*80*MaxAppend)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkStart opens a log of 100,000 events, half of them calls, and replays the tickets in it, as a
// start does.
func BenchmarkStart(b *testing.B) {
	const tickets, others = 10_000, 90_000
	path := logPath(b)
	s := open(b, Options{Path: path})
	stop := run(b, s)
	group := make([]kernel.Event, 0, MaxAppend)
	for i := range tickets + others {
		e := call("default", i)
		switch {
		case i%10 == 0:
			e = stateEvent("default", fmt.Sprint(i), 200)
		case i%2 == 0:
			e = event("event", "log/app", i)
		}
		if group = append(group, e); len(group) == cap(group) {
			mustAppend(b, s, group...)
			group = group[:0]
		}
	}
	mustAppend(b, s, group...)
	stop()
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s, err := Open(Options{Path: path})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		if err := s.Replay(context.Background(), 0, func(kernel.Event) error { n++; return nil }, "ticket.*"); err != nil || n != tickets {
			b.Fatal(n, err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*(tickets+others))/b.Elapsed().Seconds(), "events/s")
}
