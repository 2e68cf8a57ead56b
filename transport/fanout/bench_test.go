package fanout

import (
	"fmt"
	"sync"
	"testing"
)

// BenchmarkPublish is the publisher's cost of one frame: to readers that lag (no
// wake-ups), and to readers that wait in their own goroutines and take it.
func BenchmarkPublish(b *testing.B) {
	frame := make([]byte, 250)
	for _, n := range []int{1000, 5000} {
		b.Run(fmt.Sprintf("lagging-%d", n), func(b *testing.B) {
			var topic Topic[[]byte]
			for range n {
				topic.Subscribe(SubscribeOptions[[]byte]{Buffer: 3, Overflow: Coalesce})
			}
			b.ReportAllocs()
			for b.Loop() {
				topic.Publish(frame)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/reader")
		})
		b.Run(fmt.Sprintf("waiting-%d", n), func(b *testing.B) {
			var topic Topic[[]byte]
			var taken, readers sync.WaitGroup
			for range n {
				s := topic.Subscribe(SubscribeOptions[[]byte]{Buffer: 3, Overflow: Coalesce})
				readers.Go(func() {
					for s.Err() == nil {
						<-s.Ready()
						for _, ok := s.Next(); ok; _, ok = s.Next() {
							taken.Done()
						}
					}
				})
			}
			b.ReportAllocs()
			for b.Loop() {
				taken.Add(n)
				topic.Publish(frame)
				taken.Wait()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/reader")
			topic.Close(nil)
			readers.Wait()
		})
	}
}
