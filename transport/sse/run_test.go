//go:build linux

package sse

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"agentctl/transport/fanout"
)

// runTopic serves a topic; every end of a Run is sent to ends.
func runTopic(t *testing.T, secure bool, o Options, topic *fanout.Topic[[]byte]) (*server, chan error) {
	ends := make(chan error, 64)
	s := serve(t, secure, o, func(ctx context.Context, w *Writer) Code {
		sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
		defer sub.Close()
		err := runStream(ctx, w, sub)
		ends <- err
		if errors.Is(err, errOffline) {
			return DeviceOffline
		}
		return CodeOf(err)
	})
	return s, ends
}

func waitEnd(t *testing.T, ends chan error, want error) {
	t.Helper()
	select {
	case err := <-ends:
		if !errors.Is(err, want) {
			t.Errorf("ended with %v, want %v", err, want)
		}
	case <-time.After(testTimeout):
		t.Fatal("the stream does not end")
	}
}

// waitSubscribers waits until n handlers have subscribed.
func waitSubscribers(t *testing.T, topic *fanout.Topic[[]byte], n int) {
	t.Helper()
	if !eventually(testTimeout, func() bool { return topic.Len() == n }) {
		t.Fatalf("%d readers, want %d", topic.Len(), n)
	}
}

// RFC-0009 §7: a client that closes its side is noticed at once; as long as it
// reads it gets what was sent and close 1000.
func TestHalfClose(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		var topic fanout.Topic[[]byte]
		s, ends := runTopic(t, secure, Options{}, &topic)
		c, _ := s.open(0)
		waitSubscribers(t, &topic, 1)
		topic.Publish(metricFrame(1))
		if ev, err := NewReader(c.br, ReaderOptions{}).Next(); err != nil || ev.Type != "metric" {
			t.Fatalf("got %+v, %v", ev, err)
		}
		start := time.Now()
		if err := c.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		waitEnd(t, ends, ErrPeerClosed)
		if d := time.Since(start); d > time.Second {
			t.Errorf("noticed after %v", d)
		}
		got, err := c.events()
		wantStream(t, got, err, 0, Normal)
	})
}

// A client that is gone for good, by FIN or RST, ends its stream too.
func TestDisconnect(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		var topic fanout.Topic[[]byte]
		s, ends := runTopic(t, secure, Options{}, &topic)
		for _, linger := range []int{-1, 0} {
			c, _ := s.open(0)
			waitSubscribers(t, &topic, 1)
			c.tcp.SetLinger(linger)
			c.tcp.Close()
			waitEnd(t, ends, ErrPeerClosed)
			waitSubscribers(t, &topic, 0)
		}
		if !eventually(testTimeout, func() bool { return s.streams.Stats().Open == 0 }) {
			t.Error("a stream stays open")
		}
		if st := s.streams.Stats(); st.Closes[Normal] != 2 || st.Lingering != 0 {
			t.Errorf("stats %+v", st)
		}
	})
}

// A client that goes on sending is not served forever.
func TestTalkativeClient(t *testing.T) {
	var topic fanout.Topic[[]byte]
	s, ends := runTopic(t, false, Options{}, &topic)
	c, _ := s.open(0)
	if _, err := c.Write(make([]byte, maxInput)); err != nil {
		t.Fatal(err)
	}
	waitEnd(t, ends, ErrPeerClosed)
}

func TestSourceEnds(t *testing.T) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		var topic fanout.Topic[[]byte]
		s, ends := runTopic(t, secure, Options{}, &topic)
		c, _ := s.open(0)
		waitSubscribers(t, &topic, 1)
		topic.Publish(metricFrame(1))
		topic.Publish(metricFrame(2))
		topic.Close(errOffline) // what is queued goes first
		waitEnd(t, ends, errOffline)
		got, err := c.events()
		wantStream(t, got, err, 2, DeviceOffline)
	})
}

// RFC-0009 §7: on shutdown every stream ends with close 1000, and Drain waits for that.
func TestShutdown(t *testing.T) {
	var topic fanout.Topic[[]byte]
	shutdown := errors.New("shutdown")
	ctx, cancel := context.WithCancelCause(context.Background())
	ends := make(chan error, 8)
	s := serve(t, false, Options{}, func(_ context.Context, w *Writer) Code {
		sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{})
		defer sub.Close()
		err := runStream(ctx, w, sub)
		ends <- err
		return CodeOf(err)
	})
	var clients []*client
	for range 4 {
		c, _ := s.open(0)
		clients = append(clients, c)
	}
	short, stop := context.WithCancel(context.Background())
	stop()
	if err := s.streams.Drain(short); !errors.Is(err, context.Canceled) {
		t.Errorf("drain with open streams: %v", err)
	}
	refused := s.dial(0) // after Drain began
	if line, err := refused.br.ReadString('\n'); err != nil || line != "HTTP/1.1 503 Service Unavailable\r\n" {
		t.Errorf("new stream: %q, %v", line, err)
	}
	cancel(shutdown)
	long, stop := context.WithTimeout(context.Background(), testTimeout)
	defer stop()
	if err := s.streams.Drain(long); err != nil {
		t.Error(err)
	}
	for _, c := range clients {
		waitEnd(t, ends, shutdown)
		got, err := c.events()
		wantStream(t, got, err, 0, Normal)
	}
	if st := s.streams.Stats(); st.Open != 0 || st.Closes[Normal] != 4 {
		t.Errorf("stats %+v", st)
	}
}

// One of 50 readers stops: it is cut, and the others get every frame.
func TestOneStalledAmongFifty(t *testing.T) {
	const readers, frames = 50, 30
	now := newClock()
	var topic fanout.Topic[[]byte]
	s, ends := runTopic(t, false, Options{Now: now.Now, PingInterval: -1}, &topic)

	stalled, slow := s.open(2304)
	head := slow.raw.Written()
	var clients []*client
	var writers []*Writer
	var heads []int64 // bytes written before the first frame
	for range readers - 1 {
		c, w := s.open(0)
		clients, writers, heads = append(clients, c), append(writers, w), append(heads, w.raw.Written())
	}
	waitSubscribers(t, &topic, readers)
	var wg sync.WaitGroup
	got := make([][]Event, len(clients))
	errs := make([]error, len(clients))
	for i, c := range clients {
		wg.Go(func() { got[i], errs[i] = c.events() })
	}
	var published int64
	for n := range frames {
		topic.Publish(metricFrame(n + 1))
		published += int64(len(metricFrame(n + 1)))
		// All prompt readers have it and their kernels have said so; then a second passes.
		// The stalled one was served too, until it is cut.
		if !eventually(testTimeout, func() bool {
			if slow.raw.Written() != head+published && len(ends) == 0 {
				return false
			}
			stalled.ackAtOnce()
			for i, w := range writers {
				if clients[i].ackAtOnce(); w.raw.Written() != heads[i]+published || w.raw.unacked() > 0 {
					return false
				}
			}
			return true
		}) {
			t.Fatalf("frame %d does not reach the prompt readers", n+1)
		}
		now.add(time.Second)
	}
	waitEnd(t, ends, ErrBackpressure)
	topic.Close(errOffline)
	wg.Wait()
	for i := range clients {
		waitEnd(t, ends, errOffline)
		wantStream(t, got[i], errs[i], frames, DeviceOffline)
	}
	cut, err := stalled.events()
	metrics := slices.IndexFunc(cut, func(ev Event) bool { return ev.Type != "metric" })
	wantStream(t, cut, err, metrics, Backpressure)
	if metrics < 4 || metrics >= frames {
		t.Errorf("the stalled reader was sent %d of %d frames", metrics, frames)
	}
}

// With real time: a burst to a reader that takes every frame is not backpressure,
// although its kernel acknowledges late. (With a grace of nothing it would be.)
func TestPromptReaderIsNotCut(t *testing.T) {
	const bursts, burst = 10, 30
	s := serve(t, false, Options{}, nil)
	c, w := s.open(0)
	r := NewReader(c.br, ReaderOptions{})
	for n := range bursts * burst {
		c.ackLate()
		if err := send(w, metricFrame(n+1)); err != nil {
			t.Fatalf("frame %d: %v", n+1, err)
		}
		if (n+1)%burst > 0 {
			continue
		}
		for range burst {
			if ev, err := r.Next(); err != nil || ev.Type != "metric" {
				t.Fatalf("after frame %d: %q, %v", n+1, ev.Data, err)
			}
		}
	}
}

// A stalled peer that never comes back is reset when its time is over.
func TestLingerEnds(t *testing.T) {
	s := serve(t, false, Options{MaxBurst: 40, Linger: 200 * time.Millisecond, UnackedGrace: time.Nanosecond, MaxUnacked: 40}, nil)
	c, w := s.open(2304)
	var err error
	for n := 0; err == nil; n++ {
		err = send(w, metricFrame(n+1))
	}
	if !errors.Is(err, ErrBackpressure) {
		t.Fatal(err)
	}
	w.Close(Backpressure)
	if st := s.streams.Stats(); st.Lingering != 1 {
		t.Errorf("stats %+v", st)
	}
	if !eventually(testTimeout, func() bool { return s.streams.Stats().Lingering == 0 }) {
		t.Error("still lingering")
	}
	if _, err := c.events(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the client read to %v, want a reset", err)
	}
}

// Beyond maxLingering a stalled socket is closed, and the kernel bounds how long it
// goes on knocking.
func TestMaxLingering(t *testing.T) {
	t.Parallel()
	s := serve(t, false, Options{Linger: time.Second}, nil)
	c, w := s.open(2304)
	for n := range 40 {
		if err := send(w, metricFrame(n+1)); err != nil {
			t.Fatal(err)
		}
	}
	if c.waitAcked(w) {
		t.Fatal("the window is not full")
	}
	w.acks.progressAt = -time.Minute // stalled for long
	crowd := make(map[*lingeringConn]struct{})
	for range maxLingering {
		crowd[new(lingeringConn)] = struct{}{}
	}
	s.streams.lingering = crowd
	w.Close(Backpressure)
	if n := len(crowd); n != maxLingering {
		t.Errorf("%d linger, want no more than %d", n, maxLingering)
	}
	s.streams.mu.Lock()
	s.streams.lingering = nil
	s.streams.mu.Unlock()
	if !eventuallyEvery(50*time.Millisecond, testTimeout, func() bool { return !socketExists(t, c.Conn) }) {
		t.Error("the kernel keeps the socket")
	}
	if _, err := c.events(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the client read to %v, want a reset", err)
	}
}
