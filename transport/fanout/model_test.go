package fanout

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// modelSubscriber is a subscriber as the documentation describes it, in plain slices.
type modelSubscriber struct {
	sub     *Subscriber[int]
	opts    SubscribeOptions[int]
	replay  []int
	queue   []int
	dropped uint64
	err     error
	closed  bool
}

func (m *modelSubscriber) publish(v int) {
	if m.err != nil {
		return
	}
	if m.opts.Key != nil && m.opts.Overflow == Coalesce {
		same := func(w int) bool { return m.opts.Key(w) == m.opts.Key(v) }
		if i := slices.IndexFunc(m.queue, same); i >= 0 {
			m.queue[i] = v
			return
		}
	}
	if len(m.queue) < m.opts.Buffer {
		m.queue = append(m.queue, v)
		return
	}
	m.dropped++
	switch m.opts.Overflow {
	case CloseSubscriber:
		m.err = ErrOverflow
	case Coalesce:
		m.queue = append(m.queue[1:], v)
	}
}

func (m *modelSubscriber) take(n int) []int {
	var out []int
	for ; n > 0 && len(m.replay) > 0; n-- {
		out, m.replay = append(out, m.replay[0]), m.replay[1:]
	}
	for ; n > 0 && len(m.queue) > 0; n-- {
		out, m.queue = append(out, m.queue[0]), m.queue[1:]
	}
	return out
}

// TestModel runs random sequences of operations against the model.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ring := rapid.IntRange(0, 6).Draw(t, "ring")
		topic := New[int](Options{Ring: ring})
		var values []int // value i has the number i+1; value = number
		var subs []*modelSubscriber
		pick := func(t *rapid.T) *modelSubscriber {
			if len(subs) == 0 {
				t.Skip("no subscriber yet")
			}
			return subs[rapid.IntRange(0, len(subs)-1).Draw(t, "subscriber")]
		}
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(t *rapid.T) {
				v := len(values) + 1
				values = append(values, v)
				if got := topic.Publish(v); got != uint64(v) {
					t.Fatalf("number %d, want %d", got, v)
				}
				for _, m := range subs {
					m.publish(v)
				}
			},
			"subscribe": func(t *rapid.T) {
				m := &modelSubscriber{opts: SubscribeOptions[int]{
					Buffer:   rapid.IntRange(1, 12).Draw(t, "buffer"),
					Overflow: Overflow(rapid.IntRange(0, 2).Draw(t, "policy")),
				}}
				if k := rapid.IntRange(0, 4).Draw(t, "keys"); k > 0 {
					m.opts.Key = func(v int) string { return fmt.Sprint(v % k) }
				}
				last, missed := len(values), false
				if rapid.Bool().Draw(t, "resume") {
					after := rapid.IntRange(0, last+2).Draw(t, "after")
					m.opts.Resume, m.opts.After = true, uint64(after)
					oldest := max(0, last-ring)
					if after < oldest || after > last {
						missed, after = true, oldest
					}
					m.replay = slices.Clone(values[after:])
				}
				m.sub = topic.Subscribe(m.opts)
				if m.sub.Missed() != missed {
					t.Fatalf("missed %v, want %v", m.sub.Missed(), missed)
				}
				subs = append(subs, m)
			},
			"next": func(t *rapid.T) {
				m := pick(t)
				want := m.take(1)
				v, ok := m.sub.Next()
				if ok != (len(want) == 1) || (ok && v != want[0]) {
					t.Fatalf("got %v %v, want %v", v, ok, want)
				}
			},
			"take": func(t *rapid.T) {
				m := pick(t)
				n := rapid.IntRange(0, 20).Draw(t, "n")
				want := m.take(n)
				var got []int
				for range n {
					if v, ok := m.sub.Next(); ok {
						got = append(got, v)
					}
				}
				if !slices.Equal(got, want) {
					t.Fatalf("got %v, want %v", got, want)
				}
			},
			"receive": func(t *rapid.T) { // as a select loop would, before it takes
				m := pick(t)
				select {
				case <-m.sub.Ready():
				default:
				}
				if _, ok := m.sub.Next(); ok != (len(m.take(1)) == 1) {
					t.Fatalf("after a token Next returned %v", ok)
				}
			},
			"close": func(t *rapid.T) {
				m := pick(t)
				m.sub.Close()
				m.closed, m.replay, m.queue = true, nil, nil
				if m.err == nil {
					m.err = ErrClosed
				}
			},
			"": func(t *rapid.T) {
				live := 0
				for i, m := range subs {
					if m.err == nil {
						live++
					}
					if !errors.Is(m.sub.Err(), m.err) || m.sub.Dropped() != m.dropped {
						t.Fatalf("subscriber %d: %v %d, want %v %d", i, m.sub.Err(), m.sub.Dropped(), m.err, m.dropped)
					}
					want := m.err != nil || len(m.replay)+len(m.queue) > 0
					if isReady(m.sub) != want {
						t.Fatalf("subscriber %d: ready %v, want %v", i, !want, want)
					}
				}
				if topic.Len() != live {
					t.Fatalf("%d subscribers, want %d", topic.Len(), live)
				}
			},
		})
	})
}
