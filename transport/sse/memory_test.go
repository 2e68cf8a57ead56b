package sse

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/transport/fanout"
)

// pipeListener is a listener whose connections are net.Pipe: no kernel, so time
// can be synctest's.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { close(l.done); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// timed is an event and when it came, in seconds since the request.
type timed struct {
	Event
	at time.Duration
}

// pipeStream runs one stream over a pipe. The client reads events until the stream
// ends or until stop says so; then it reads nothing for pause and goes on.
type pipeStream struct {
	secure   bool
	interval time.Duration // of metric frames, the first at once; 0: none
	frames   int           // then the source ends; 0: never
	stop     func(timed) bool
	pause    time.Duration
}

// end is what the client read to, reason what ended Run, and ended when that was.
func (p pipeStream) run(t *testing.T) (got []timed, ended time.Duration, end, reason error) {
	start := time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var streams Streams
	var topic fanout.Topic[[]byte]
	pl := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
	ln := net.Listener(pl)
	if p.secure {
		ln = tls.NewListener(NewListener(pl), &tls.Config{Certificates: []tls.Certificate{testCert()}})
	}
	srv := &http.Server{
		BaseContext: func(net.Listener) context.Context { return ctx },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			wr, err := streams.Open(w, r, Options{})
			if err != nil {
				t.Error(err)
				return
			}
			sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
			defer sub.Close()
			reason = runStream(r.Context(), wr, sub)
			ended = time.Since(start)
			wr.Close(CodeOf(reason))
		}),
	}
	served := make(chan struct{})
	go func() { srv.Serve(ln); close(served) }()

	near, far := net.Pipe()
	pl.conns <- far
	client := net.Conn(near)
	if p.secure {
		client = tls.Client(near, clientTLS())
	}
	if _, err := io.WriteString(client, "POST / HTTP/1.1\r\nHost: relay.test\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(client)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait() // until it has subscribed
	if p.interval > 0 {
		go func() {
			beat := time.NewTicker(p.interval)
			defer beat.Stop()
			for n := 1; topic.Publish(metricFrame(n)) > 0; n++ {
				if n == p.frames {
					topic.Close(errOffline)
					return
				}
				select {
				case <-ctx.Done():
					return
				case <-beat.C:
				}
			}
		}()
	}
	r := NewReader(res.Body, ReaderOptions{})
	for {
		ev, err := r.Next()
		if err != nil {
			end = err
			break
		}
		e := timed{ev, time.Since(start)}
		got = append(got, e)
		if p.stop != nil && p.stop(e) {
			p.stop = nil
			if p.pause == 0 {
				break
			}
			time.Sleep(p.pause)
		}
	}
	client.Close()
	synctest.Wait()
	cancel()
	if err := streams.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	srv.Close()
	<-served
	return got, ended, end, reason
}

func times(got []timed, typ string) (out []time.Duration) {
	for _, e := range got {
		if e.Type == typ {
			out = append(out, e.at.Round(time.Second))
		}
	}
	return out
}

func bothWaysInTime(t *testing.T, f func(t *testing.T, secure bool)) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		testCert() // its key is not made of bubble time
		synctest.Test(t, func(t *testing.T) { f(t, secure) })
	})
}

// RFC-0009 §5.2: pings come at 25, 50 and 75 s whatever the interval, also
// without a frame.
func TestPingBeat(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		for _, interval := range []time.Duration{0, time.Second, 5 * time.Second, time.Minute} {
			got, _, _, reason := pipeStream{secure: secure, interval: interval, stop: func(e timed) bool { return e.at >= 75*time.Second && e.Type == "ping" }}.run(t)
			want := []time.Duration{25 * time.Second, 50 * time.Second, 75 * time.Second}
			if pings := times(got, "ping"); !slices.Equal(pings, want) {
				t.Errorf("interval %v: pings at %v, want %v", interval, pings, want)
			}
			if interval > 0 && len(times(got, "metric")) < int(75*time.Second/interval) {
				t.Errorf("interval %v: %d frames", interval, len(times(got, "metric")))
			}
			for _, e := range got {
				if e.Type != "metric" && e.Type != "ping" {
					t.Errorf("event %q", e.Type)
				}
				if e.Type == "ping" && string(e.Data) != "{}" {
					t.Errorf("ping data %q", e.Data)
				}
			}
			if !errors.Is(reason, ErrPeerClosed) {
				t.Errorf("interval %v: ended with %v", interval, reason)
			}
		}
	})
}

// RFC-0009 §9 fixture 1: 30 s at 5 s are at least 6 frames and a ping.
func TestNormalStream(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		got, _, end, reason := pipeStream{secure: secure, interval: 5 * time.Second, frames: 7}.run(t)
		if n := len(times(got, "metric")); n != 7 {
			t.Errorf("%d frames, want 7", n)
		}
		if pings := times(got, "ping"); len(pings) != 1 {
			t.Errorf("pings at %v", pings)
		}
		if last := got[len(got)-1]; last.Type != "close" || !errors.Is(end, io.EOF) || !errors.Is(reason, errOffline) {
			t.Errorf("last event %q, then %v; reason %v", last.Type, end, reason)
		}
	})
}

// A reader that stops after the first frame, over a connection without a kernel:
// 4413 when frames come fast, 4408 when they come slowly.
func TestStallInMemory(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		tests := []struct {
			interval time.Duration
			want     error
			from, to time.Duration // when the stream ends
		}{
			{time.Second, ErrBackpressure, 4 * time.Second, 5 * time.Second},       // the read one, 3, and the next
			{5 * time.Second, ErrBackpressure, 20 * time.Second, 21 * time.Second}, //
			{time.Minute, ErrIdle, 110 * time.Second, 120 * time.Second},           // 90 s after the ping at 25 s
		}
		for _, tt := range tests {
			_, ended, end, reason := pipeStream{
				secure: secure, interval: tt.interval, pause: 5 * time.Minute,
				stop: func(timed) bool { return true },
			}.run(t)
			if !errors.Is(reason, tt.want) || ended < tt.from || ended > tt.to {
				t.Errorf("interval %v: ended with %v at %v, want %v from %v to %v", tt.interval, reason, ended, tt.want, tt.from, tt.to)
			}
			if end == nil {
				t.Errorf("interval %v: the connection stays open", tt.interval)
			}
		}
	})
}

// A stall shorter than the rules allow costs nothing.
func TestShortStall(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		got, _, _, reason := pipeStream{secure: secure, interval: 5 * time.Second, frames: 10, pause: 9 * time.Second, stop: func(e timed) bool {
			return strings.HasPrefix(string(e.Data), `{"n":3,`)
		}}.run(t)
		if n := len(times(got, "metric")); n != 10 || !errors.Is(reason, errOffline) {
			t.Errorf("%d frames, %v; want 10", n, reason)
		}
	})
}

// What is pending after a stall is sent soon after the reader is back, not with the next
// frame.
func TestRestIsRetried(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		got, _, _, _ := pipeStream{secure: secure, interval: 15 * time.Second, frames: 3, pause: 17 * time.Second, stop: func(timed) bool { return true }}.run(t)
		want := []time.Duration{0, 17 * time.Second, 30 * time.Second} // the second was due at 15
		for i, at := range times(got, "metric") {
			if i >= len(want) || at < want[i] || at > want[i]+time.Second {
				t.Errorf("frame %d at %v, want %v", i+1, at, want)
			}
		}
		if n := len(times(got, "metric")); n != len(want) {
			t.Errorf("%d frames, want %d", n, len(want))
		}
	})
}
