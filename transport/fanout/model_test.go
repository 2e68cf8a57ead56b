package fanout

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// modelSubscriber is a subscriber as the documentation describes it, in plain slices, beside the real
// one.
type modelSubscriber struct {
	sub     *Subscriber[int]
	opts    SubscribeOptions[int]
	replay  []int
	queue   []int
	dropped uint64
	err     error
}

// publish does what Overflow says with a new value.
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

// take removes up to n values: those of the replay first.
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

// model is a topic of numbers, each published under itself, with its subscribers. Its methods are the
// operations of TestModel: each does the same to the topic and to the model, and compares what both
// return.
type model struct {
	topic  *Topic[int]
	ring   int
	values []int // that were published: 1, 2, 3, ...
	subs   []*modelSubscriber
}

// TestModel: after any sequence of operations, the topic and its subscribers are as the model says.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ring := rapid.IntRange(0, 6).Draw(t, "ring")
		m := &model{topic: New[int](Options{Ring: ring}), ring: ring}
		t.Repeat(map[string]func(*rapid.T){
			"publish":   m.publish,
			"subscribe": m.subscribe,
			"next":      m.next,
			"take":      m.takeSeveral,
			"receive":   m.receive,
			"close":     m.close,
			"":          m.check, // after each of the others
		})
	})
}

// anySubscriber draws one of the subscribers, ended ones included.
func (m *model) anySubscriber(t *rapid.T) *modelSubscriber {
	if len(m.subs) == 0 {
		t.Skip("no subscriber yet")
	}
	return m.subs[rapid.IntRange(0, len(m.subs)-1).Draw(t, "subscriber")]
}

func (m *model) publish(t *rapid.T) {
	v := len(m.values) + 1
	m.values = append(m.values, v)
	if got := m.topic.Publish(v); got != uint64(v) {
		t.Fatalf("Publish returned number %d, want %d", got, v)
	}
	for _, s := range m.subs {
		s.publish(v)
	}
}

func (m *model) subscribe(t *rapid.T) {
	s := &modelSubscriber{opts: SubscribeOptions[int]{
		Buffer:   rapid.IntRange(1, 12).Draw(t, "buffer"),
		Overflow: Overflow(rapid.IntRange(0, 2).Draw(t, "policy")),
	}}
	if keys := rapid.IntRange(0, 4).Draw(t, "keys"); keys > 0 {
		s.opts.Key = func(v int) string { return fmt.Sprint(v % keys) }
	}
	missed := false
	if rapid.Bool().Draw(t, "resume") {
		last := len(m.values)
		oldest := max(0, last-m.ring)
		after := rapid.IntRange(0, last+2).Draw(t, "after")
		s.opts.Resume, s.opts.After = true, uint64(after)
		if after < oldest || after > last { // the ring lacks values, or never had the number
			missed, after = true, oldest
		}
		s.replay = slices.Clone(m.values[after:])
	}
	s.sub = m.topic.Subscribe(s.opts)
	if s.sub.Missed() != missed {
		t.Fatalf("Missed is %v, want %v", s.sub.Missed(), missed)
	}
	m.subs = append(m.subs, s)
}

// next takes one value.
func (m *model) next(t *rapid.T) {
	s := m.anySubscriber(t)
	want := s.take(1)
	v, ok := s.sub.Next()
	if ok != (len(want) == 1) || (ok && v != want[0]) {
		t.Fatalf("Next returned %v, %v, want %v", v, ok, want)
	}
}

// takeSeveral takes up to 20 values, so that queues run empty.
func (m *model) takeSeveral(t *rapid.T) {
	s := m.anySubscriber(t)
	n := rapid.IntRange(0, 20).Draw(t, "n")
	want := s.take(n)
	var got []int
	for range n {
		if v, ok := s.sub.Next(); ok {
			got = append(got, v)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("took %v, want %v", got, want)
	}
}

// receive takes the token of Ready before a value, as a select loop does.
func (m *model) receive(t *rapid.T) {
	s := m.anySubscriber(t)
	select {
	case <-s.sub.Ready():
	default:
	}
	want := len(s.take(1)) == 1
	if _, ok := s.sub.Next(); ok != want {
		t.Fatalf("Next after the token returned %v, want %v", ok, want)
	}
}

func (m *model) close(t *rapid.T) {
	s := m.anySubscriber(t)
	s.sub.Close()
	s.replay, s.queue = nil, nil
	if s.err == nil {
		s.err = ErrClosed
	}
}

// check compares what the operations did not.
func (m *model) check(t *rapid.T) {
	open := 0
	for i, s := range m.subs {
		if s.err == nil {
			open++
		}
		if !errors.Is(s.sub.Err(), s.err) || s.sub.Dropped() != s.dropped {
			t.Fatalf("subscriber %d: error %v, %d dropped; want %v, %d", i, s.sub.Err(), s.sub.Dropped(), s.err, s.dropped)
		}
		if want := s.err != nil || len(s.replay)+len(s.queue) > 0; isReady(s.sub) != want {
			t.Fatalf("subscriber %d: ready %v, want %v", i, !want, want)
		}
	}
	if m.topic.Len() != open {
		t.Fatalf("the topic has %d subscribers, want %d", m.topic.Len(), open)
	}
}
