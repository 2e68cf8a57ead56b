package fanout

import (
	"fmt"
	"sync"
	"testing"
)

// BenchmarkPublish is the publisher's cost of one frame: to subscribers that lag (no
// wake-ups), and to subscribers that wait in their own goroutines and take it.
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
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/subscriber")
		})
		b.Run(fmt.Sprintf("waiting-%d", n), func(b *testing.B) {
			var topic Topic[[]byte]
			var taken, subscribers sync.WaitGroup
			for range n {
				s := topic.Subscribe(SubscribeOptions[[]byte]{Buffer: 3, Overflow: Coalesce})
				subscribers.Go(func() {
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
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/subscriber")
			topic.Close(nil)
			subscribers.Wait()
		})
	}
}
