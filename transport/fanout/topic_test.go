package fanout

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func drain[T any](s *Subscriber[T]) []T {
	var out []T
	for v, ok := s.Next(); ok; v, ok = s.Next() {
		out = append(out, v)
	}
	return out
}

func isReady[T any](s *Subscriber[T]) bool { return len(s.ready) > 0 || s.Err() != nil }

func TestOverflow(t *testing.T) {
	tests := []struct {
		name    string
		opts    SubscribeOptions[int]
		want    []int
		dropped uint64
		err     error
	}{
		{"close keeps what was queued", SubscribeOptions[int]{Buffer: 3}, []int{1, 2, 3}, 1, ErrOverflow},
		{"drop the new ones", SubscribeOptions[int]{Buffer: 3, Overflow: DropAndCount}, []int{1, 2, 3}, 4, nil},
		{"keep the newest", SubscribeOptions[int]{Buffer: 3, Overflow: Coalesce}, []int{5, 6, 7}, 4, nil},
		{"one slot", SubscribeOptions[int]{Buffer: 1, Overflow: Coalesce}, []int{7}, 6, nil},
		{"default buffer holds all", SubscribeOptions[int]{}, []int{1, 2, 3, 4, 5, 6, 7}, 0, nil},
		{"by key, in the place of the first", SubscribeOptions[int]{Buffer: 3, Overflow: Coalesce, Key: func(v int) string { return string(rune('a' + v%3)) }}, []int{7, 5, 6}, 0, nil},
		{"by key, too many keys", SubscribeOptions[int]{Buffer: 2, Overflow: Coalesce, Key: func(v int) string { return string(rune('a' + v%3)) }}, []int{6, 7}, 5, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var topic Topic[int]
			s := topic.Subscribe(tt.opts)
			defer s.Close()
			for v := 1; v <= 7; v++ {
				topic.Publish(v)
			}
			if got := drain(s); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
			if got := s.Dropped(); got != tt.dropped {
				t.Errorf("dropped %d, want %d", got, tt.dropped)
			}
			if err := s.Err(); !errors.Is(err, tt.err) {
				t.Errorf("err %v, want %v", err, tt.err)
			}
			wantSubscribers := 1
			if tt.err != nil {
				wantSubscribers = 0
			}
			if st := topic.Stats(); st.Subscribers != wantSubscribers || st.Published != 7 || st.Dropped != tt.dropped {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

// A subscriber that overflows must not take another one's place on the list with it.
func TestOverflowSparesOthers(t *testing.T) {
	var topic Topic[int]
	var subs []*Subscriber[int]
	for i := range 9 {
		subs = append(subs, topic.Subscribe(SubscribeOptions[int]{Buffer: 1 + i%3}))
	}
	for v := range 3 {
		topic.Publish(v)
	}
	for i, s := range subs {
		want := []int{0, 1, 2}[:1+i%3]
		if got := drain(s); !slices.Equal(got, want) {
			t.Errorf("subscriber %d got %v, want %v", i, got, want)
		}
	}
	if n := topic.Len(); n != 3 {
		t.Errorf("%d subscribers left, want the 3 with space", n)
	}
}

func TestResume(t *testing.T) {
	tests := []struct {
		name   string
		after  uint64
		want   []int
		missed bool
	}{
		{"from the middle of the ring", 8, []int{9, 10}, false},
		{"nothing missed", 10, nil, false},
		{"just older than the ring", 6, []int{7, 8, 9, 10}, false},
		{"a value is gone", 5, []int{7, 8, 9, 10}, true},
		{"never seen", 0, []int{7, 8, 9, 10}, true},
		{"from the future", 11, []int{7, 8, 9, 10}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			topic := New[int](Options{Ring: 4})
			for v := 1; v <= 10; v++ {
				topic.Publish(v)
			}
			s := topic.Subscribe(SubscribeOptions[int]{Resume: true, After: tt.after})
			defer s.Close()
			if s.Missed() != tt.missed {
				t.Errorf("missed %v, want %v", s.Missed(), tt.missed)
			}
			if got := isReady(s); got != (len(tt.want) > 0) {
				t.Errorf("ready %v", got)
			}
			topic.Publish(11)
			if got := drain(s); !slices.Equal(got, append(tt.want, 11)) {
				t.Errorf("got %v, want %v and 11", got, tt.want)
			}
		})
	}
}

func TestPublishAt(t *testing.T) {
	topic := New[string](Options{Ring: 2, FirstSeq: 1000})
	if s := topic.Subscribe(SubscribeOptions[string]{Resume: true, After: 999}); s.Missed() {
		t.Error("an empty topic at its beginning: values are missing")
	}
	if s := topic.Subscribe(SubscribeOptions[string]{Resume: true, After: 12}); !s.Missed() {
		t.Error("a number from before the topic's first one was not reported")
	}
	for _, seq := range []uint64{1005, 1010, 1020} {
		if err := topic.PublishAt(seq, "x"); err != nil {
			t.Fatal(err)
		}
	}
	for _, seq := range []uint64{0, 1010, 1020} {
		if err := topic.PublishAt(seq, "y"); !errors.Is(err, ErrOrder) {
			t.Errorf("seq %d: %v, want ErrOrder", seq, err)
		}
	}
	if got := topic.Publish("z"); got != 1021 {
		t.Errorf("next number %d, want 1021", got)
	}
	// 1010 left the ring: whoever saw it or a hole above it misses nothing.
	for after, missed := range map[uint64]bool{1009: true, 1010: false, 1015: false, 1021: false} {
		if s := topic.Subscribe(SubscribeOptions[string]{Resume: true, After: after}); s.Missed() != missed {
			t.Errorf("after %d: missed %v, want %v", after, !missed, missed)
		}
	}
}

func TestLastMaxAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for within, want := range map[time.Duration][]int{5 * time.Second: {7, 8}, 4 * time.Second: {8}, 0: {8}} {
			var topic Topic[int]
			topic.Publish(7)
			time.Sleep(4 * time.Second)
			s := topic.Subscribe(SubscribeOptions[int]{LastMaxAge: within})
			topic.Publish(8)
			if got := drain(s); !slices.Equal(got, want) {
				t.Errorf("within %v: got %v, want %v", within, got, want)
			}
		}
	})
}

func TestEnd(t *testing.T) {
	offline := errors.New("device offline")
	topic := New[int](Options{MaxSubscribers: 1, Ring: 4})
	s := topic.Subscribe(SubscribeOptions[int]{})
	full := topic.Subscribe(SubscribeOptions[int]{})
	if !errors.Is(full.Err(), ErrFull) {
		t.Errorf("second subscriber: %v, want ErrFull", full.Err())
	}
	full.Close()
	topic.Publish(1)
	topic.Close(offline)
	topic.Close(nil)
	if topic.Publish(2) != 0 || !errors.Is(topic.PublishAt(9, 2), offline) {
		t.Error("a closed topic took a value")
	}
	<-s.Ready()
	if got := drain(s); !slices.Equal(got, []int{1}) || !errors.Is(s.Err(), offline) {
		t.Errorf("got %v, %v", got, s.Err())
	}
	<-s.Ready() // stays ready at the end
	late := topic.Subscribe(SubscribeOptions[int]{Resume: true})
	<-late.Ready()
	if _, ok := late.Next(); ok || !errors.Is(late.Err(), offline) {
		t.Errorf("late subscriber: %v", late.Err())
	}
	s.Close()
	s.Close()
	late.Close()
}

func TestClosedSubscriberHoldsNothing(t *testing.T) {
	topic := New[*int](Options{Ring: 4})
	v := new(int)
	topic.Publish(v)
	s := topic.Subscribe(SubscribeOptions[*int]{Resume: true})
	topic.Publish(v)
	s.Close()
	topic.Publish(v)
	if got := drain(s); got != nil || topic.Len() != 0 {
		t.Errorf("after Close: %v, %d subscribers", got, topic.Len())
	}
	for i, p := range s.buf {
		if p != nil {
			t.Errorf("slot %d still holds a value", i)
		}
	}
}

// Ready is level-triggered: a subscriber that takes one value a wake-up sees all.
func TestReadyOneAtATime(t *testing.T) {
	var topic Topic[int]
	s := topic.Subscribe(SubscribeOptions[int]{})
	for v := range 5 {
		topic.Publish(v)
	}
	for v := range 5 {
		<-s.Ready()
		if got, ok := s.Next(); !ok || got != v {
			t.Fatalf("got %v %v, want %v", got, ok, v)
		}
	}
	if isReady(s) {
		t.Error("ready with nothing queued")
	}
	if _, ok := s.Next(); ok {
		t.Error("a value of an empty queue")
	}
}

// Subscribers join at any moment of a running publisher and name a number they saw:
// every one must get each later number once and in order.
func TestJoinUnderLoad(t *testing.T) {
	const total, subscribers = 20_000, 16
	topic := New[uint64](Options{Ring: total})
	var wg sync.WaitGroup
	for r := range subscribers {
		wg.Go(func() {
			var seen uint64
			for round := 0; seen < total; round++ {
				s := topic.Subscribe(SubscribeOptions[uint64]{Buffer: total, Resume: true, After: seen})
				if s.Missed() {
					t.Errorf("subscriber %d: missed after %d", r, seen)
				}
				stop := seen + uint64(100*(round+r+1)) // leave and come back
				for seen < total && seen < stop {
					<-s.Ready()
					for v, ok := s.Next(); ok; v, ok = s.Next() {
						if v != seen+1 {
							t.Errorf("subscriber %d: %d follows %d", r, v, seen)
						}
						seen = v
					}
					if s.Err() != nil {
						t.Errorf("subscriber %d: %v", r, s.Err())
						return
					}
				}
				s.Close()
			}
		})
	}
	wg.Go(func() {
		for v := uint64(1); v <= total; v++ {
			topic.Publish(v)
		}
	})
	wg.Wait()
	if topic.Len() != 0 {
		t.Errorf("%d subscribers left", topic.Len())
	}
}

// One subscriber that takes nothing costs the others nothing, and the publisher never waits.
func TestStalledSubscriber(t *testing.T) {
	for _, policy := range []Overflow{CloseSubscriber, DropAndCount, Coalesce} {
		var topic Topic[int]
		stalled := topic.Subscribe(SubscribeOptions[int]{Buffer: 4, Overflow: policy})
		live := topic.Subscribe(SubscribeOptions[int]{Buffer: 1})
		for v := range 1000 {
			topic.Publish(v)
			<-live.Ready()
			if got, ok := live.Next(); !ok || got != v {
				t.Fatalf("policy %d: live subscriber got %v %v, want %v", policy, got, ok, v)
			}
		}
		if n := len(drain(stalled)); n != 4 {
			t.Errorf("policy %d: stalled subscriber kept %d values, want 4", policy, n)
		}
		if len(stalled.buf) > 4 {
			t.Errorf("policy %d: queue grew to %d slots", policy, len(stalled.buf))
		}
	}
}

func TestPublishDoesNotAllocate(t *testing.T) {
	topic := New[[]byte](Options{Ring: 8})
	frame := []byte(strings.Repeat("x", 250))
	for range 100 {
		topic.Subscribe(SubscribeOptions[[]byte]{Buffer: 3, Overflow: Coalesce})
	}
	for range 16 {
		topic.Publish(frame)
	}
	if n := testing.AllocsPerRun(100, func() { topic.Publish(frame) }); n != 0 {
		t.Errorf("%v allocations a Publish with 100 subscribers, want 0", n)
	}
}
