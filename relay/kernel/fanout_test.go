package kernel_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

// 1,000 subscribers follow 8 resources that change 500 times each. What each reads after
// what it is notified of never goes back, resource by resource, and ends with the last state.
func TestFanoutKeepsOrder(t *testing.T) {
	const subscribers, resources, updates = 1000, 8, 500
	k := kernel.New(kernel.Options{})
	var content [resources]atomic.Int64
	index := make(map[string]int)
	var uris []string
	for i := range resources {
		uris = append(uris, fmt.Sprint("x://", i))
		index[uris[i]] = i
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range subscribers {
		s := subscribe(t, k, "a")
		wg.Go(func() {
			defer s.Close()
			var last [resources]int64
			for {
				select {
				case <-s.Ready():
				case <-done:
				}
				for _, u := range s.Next().Updated {
					i := index[u]
					now := content[i].Load()
					if now < last[i] {
						t.Errorf("%s went back from %d to %d", u, last[i], now)
						return
					}
					last[i] = now
				}
				finished := true
				for _, n := range last {
					finished = finished && n == updates
				}
				if finished {
					return
				}
				select {
				case <-done:
					t.Errorf("the last states are %v", last)
					return
				default:
				}
			}
		})
	}
	var writers sync.WaitGroup
	for i := range resources {
		writers.Go(func() {
			for range updates {
				content[i].Add(1)
				k.NotifyChange("a", kernel.Change{Updated: uris[i : i+1]})
			}
		})
	}
	writers.Wait()
	finished := make(chan struct{})
	go func() { wg.Wait(); close(finished) }()
	select {
	case <-finished:
	case <-time.After(30 * time.Second):
		t.Error("the last change did not reach everybody")
	}
	close(done)
	<-finished
	s := k.Stats()
	if s.Changes != resources*updates || s.Delivered+s.Coalesced > s.Changes*subscribers || s.Delivered < subscribers*resources || s.Dropped != 0 {
		t.Errorf("counted %+v", s)
	}
}

// A burst is few notifications, the last state is right, and what was merged is counted.
func TestBurst(t *testing.T) {
	k := kernel.New(kernel.Options{})
	s := subscribe(t, k, "a")
	for range 1000 {
		k.NotifyChange("a", kernel.Change{Updated: []string{"x://1"}})
	}
	if c := s.Next(); len(c.Updated) != 1 || c.Missed {
		t.Errorf("notified %+v", c)
	}
	if st := k.Stats(); st.Changes != 1000 || st.Delivered != 1 || st.Coalesced != 999 || st.Pending != 0 {
		t.Errorf("counted %+v", st)
	}
}

// 1,000 stalled subscribers cost nothing while changes go on, and the healthy one
// receives all. One that fell too far behind is notified that it missed some.
func TestStalledSubscribers(t *testing.T) {
	k := kernel.New(kernel.Options{})
	stalled := make([]*kernel.Subscription, 1000)
	for i := range stalled {
		stalled[i] = subscribe(t, k, "a")
	}
	healthy := subscribe(t, k, "a")
	uris := make([]string, 2*kernel.MaxWatched)
	for i := range uris {
		uris[i] = fmt.Sprintf("x://%05d", i)
	}
	round := func() {
		for i := range uris {
			k.NotifyChange("a", kernel.Change{Updated: uris[i : i+1], Tools: i%100 == 0})
			if c := healthy.Next(); !slices.Equal(c.Updated, uris[i:i+1]) || c.Missed {
				t.Fatalf("the healthy one was notified of %+v", c)
			}
		}
	}
	round()
	before := heap()
	for range 5 {
		round()
	}
	if grown := heap() - before; grown > 256<<10 {
		t.Errorf("the heap grew by %d KiB", grown>>10)
	}
	if st := k.Stats(); st.Pending != 1000 || st.Subscriptions != 1001 {
		t.Errorf("counted %+v", st)
	}
	for i, s := range stalled {
		c := s.Next()
		if !pending(s) || len(c.Updated) != kernel.MaxWatched || !c.Missed || !c.Tools {
			t.Fatalf("stalled %d was notified of %d, missed %v", i, len(c.Updated), c.Missed)
		}
		if i == 10 {
			break
		}
	}
	if st := k.Stats(); st.Dropped != 11 || st.Pending != 989 {
		t.Errorf("counted %+v", st)
	}
	in := k.SubscriptionsInfo().Tenants
	if len(in) != 1 || in[0] != (kernel.TenantSubscriptions{Tenant: "a", Subscribers: 1001, Waiting: 12}) {
		t.Errorf("notified %+v", in)
	}
	for _, s := range append(stalled, healthy) {
		s.Close()
		if c := s.Next(); c.Tools || len(c.Updated) > 0 {
			t.Fatal("notified after Close")
		}
	}
	if in := k.SubscriptionsInfo(); len(in.Tenants) != 0 || k.Stats().Subscriptions != 0 {
		t.Errorf("left %+v", in)
	}
}

// The latency is from the first change that waits until it is taken.
func TestFanoutLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		s := subscribe(t, k, "a")
		for i := range 100 {
			k.NotifyChange("a", kernel.Change{Tools: true})
			time.Sleep(time.Millisecond)
			k.NotifyChange("a", kernel.Change{Tools: true})
			if i >= 97 {
				time.Sleep(99 * time.Millisecond)
			}
			s.Next()
		}
		st := k.Stats()
		within := func(name string, got, want int64) {
			if got < want || got > want+want/4 {
				t.Errorf("%s is %d us, want %d to a quarter more", name, got, want)
			}
		}
		within("p50", st.FanoutP50US, 1000)
		within("p95", st.FanoutP95US, 1000)
		within("p99", st.FanoutP99US, 100_000)
		k.ResetCounters()
		if st := k.Stats(); st.FanoutP99US != 0 || st.Changes != 0 || st.Coalesced != 0 {
			t.Errorf("after the reset %+v", st)
		}
	})
}

// Watches are listed by tenant and URI.
func TestWatchInfo(t *testing.T) {
	k := kernel.New(kernel.Options{})
	load(t, k, newWatched("a", nodeA), newWatched("b", nodeB))
	for range 2 {
		if _, err := k.Watch(reader("a"), metricsURI(nodeA)); err != nil {
			t.Fatal(err)
		}
	}
	release, err := k.Watch(reader("b"), metricsURI(nodeB))
	if err != nil {
		t.Fatal(err)
	}
	want := []kernel.WatchInfo{{Tenant: "a", URI: metricsURI(nodeA), Watchers: 2}, {Tenant: "b", URI: metricsURI(nodeB), Watchers: 1}}
	if got := k.SubscriptionsInfo().Watches; !slices.Equal(got, want) || k.Stats().Watches != 2 {
		t.Errorf("notified %+v", got)
	}
	release()
	if got := k.SubscriptionsInfo().Watches; len(got) != 1 {
		t.Errorf("after the release %+v", got)
	}
}
