package eventlog

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/kernel"
)

func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkOffer offers events about calls as the kernel does, in bursts of what a busy relay has between
// two commits: CPU time of each until it is on the disk of TMPDIR.
func BenchmarkOffer(b *testing.B) {
	const burst = 2000
	for _, boards := range []int{1, 2000} {
		b.Run(fmt.Sprint("boards=", boards), func(b *testing.B) {
			s := start(b, Options{Path: logPath(b)})
			events := make([]kernel.Event, 2*boards)
			for i := range events {
				events[i] = call("default", i)
				events[i].Aggregate = fmt.Sprintf("sysecho.%026d.echo.invoke", i%boards)
			}
			b.ReportAllocs()
			b.ResetTimer()
			began := cpuTime()
			for i := 0; i < b.N; {
				for range burst {
					if !s.Offer(events[i%len(events)]) {
						b.Fatal("refused")
					}
					i++
				}
				for s.Stats().Appended < uint64(i) {
					time.Sleep(5 * time.Millisecond)
				}
			}
			b.ReportMetric(float64((cpuTime()-began).Nanoseconds())/float64(s.Stats().Appended), "cpu-ns/event")
		})
	}
}
