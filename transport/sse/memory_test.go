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

// timed is an event and when it came, since the request.
type timed struct {
	Event
	at time.Duration
}

// pipeStream is one metric stream over a pipe, and what its source and its client do.
type pipeStream struct {
	secure   bool
	interval time.Duration    // of metric frames, the first at once; 0: none
	frames   int              // then the source ends; 0: never
	stop     func(timed) bool // after which event the client stops reading, once; nil: never
	pause    time.Duration    // for which it then reads nothing; 0: it closes
}

// streamResult is what both sides saw of a pipeStream.
type streamResult struct {
	got     []timed
	readErr error         // why the client stopped reading; nil: it closed
	reason  error         // why the server's side ended
	ended   time.Duration // when that was, since the request
}

// run runs the stream until its client has read everything or has closed.
func (p pipeStream) run(t *testing.T) (res streamResult) {
	start := time.Now()
	var streams Streams
	var topic fanout.Topic[[]byte]
	client, stopServer := p.serve(t, func(ctx context.Context, w http.ResponseWriter, r *http.Request) {
		wr, err := streams.Open(w, r, Options{})
		if err != nil {
			t.Error(err)
			return
		}
		sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
		defer sub.Close()
		res.reason = runStream(ctx, wr, sub)
		res.ended = time.Since(start)
		wr.Close(CodeOf(res.reason))
	})
	if _, err := io.WriteString(client, "POST / HTTP/1.1\r\nHost: relay.test\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
		t.Fatal(err)
	}
	response, err := http.ReadResponse(bufio.NewReader(client), nil)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait() // until it has subscribed
	publishing, stopPublishing := context.WithCancel(t.Context())
	if p.interval > 0 {
		go p.publish(publishing, &topic)
	}
	res.got, res.readErr = p.read(response.Body, start)
	client.Close()
	synctest.Wait()
	stopPublishing()
	stopServer()
	if err := streams.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	return res
}

// serve starts an HTTP server with a client's connection to it. stop cancels the handler's context and
// waits for the server.
func (p pipeStream) serve(t *testing.T, handle func(context.Context, http.ResponseWriter, *http.Request)) (client net.Conn, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	pipes := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
	ln := net.Listener(pipes)
	near, far := net.Pipe()
	client = near
	if p.secure {
		ln = tls.NewListener(NewListener(pipes), &tls.Config{Certificates: []tls.Certificate{testCert()}})
		client = tls.Client(near, clientTLS())
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		handle(ctx, w, r)
	})}
	served := make(chan struct{})
	go func() { _ = srv.Serve(ln); close(served) }()
	pipes.conns <- far
	return client, func() {
		cancel()
		synctest.Wait()
		_ = srv.Close()
		<-served
	}
}

// publish publishes a frame at each interval, until ctx ends or the last one.
func (p pipeStream) publish(ctx context.Context, topic *fanout.Topic[[]byte]) {
	tick := time.NewTicker(p.interval)
	defer tick.Stop()
	for n := 1; topic.Publish(metricFrame(n)) > 0; n++ {
		if n == p.frames {
			topic.Close(errOffline)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// read reads the events as the client. err is nil when stop made it close.
func (p pipeStream) read(body io.Reader, start time.Time) (got []timed, err error) {
	r := NewReader(body, ReaderOptions{})
	for {
		ev, err := r.Next()
		if err != nil {
			return got, err
		}
		e := timed{ev, time.Since(start)}
		got = append(got, e)
		if p.stop == nil || !p.stop(e) {
			continue
		}
		if p.stop = nil; p.pause == 0 {
			return got, nil
		}
		time.Sleep(p.pause)
	}
}

// times returns when the events of a type came, in whole seconds.
func times(got []timed, typ string) (out []time.Duration) {
	for _, e := range got {
		if e.Type == typ {
			out = append(out, e.at.Round(time.Second))
		}
	}
	return out
}

// bothWaysInTime runs a test plain and with TLS, in virtual time.
func bothWaysInTime(t *testing.T, f func(t *testing.T, secure bool)) {
	plainAndTLS(t, func(t *testing.T, secure bool) {
		testCert() // its key is not made of bubble time
		synctest.Test(t, func(t *testing.T) { f(t, secure) })
	})
}

// TestPingInterval: RFC-0009 §5.2: pings come at 25, 50 and 75 s whatever the interval, also
// without a frame.
func TestPingInterval(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		for _, interval := range []time.Duration{0, time.Second, 5 * time.Second, time.Minute} {
			res := pipeStream{secure: secure, interval: interval, stop: func(e timed) bool { return e.at >= 75*time.Second && e.Type == "ping" }}.run(t)
			want := []time.Duration{25 * time.Second, 50 * time.Second, 75 * time.Second}
			if pings := times(res.got, "ping"); !slices.Equal(pings, want) {
				t.Errorf("interval %v: pings at %v, want %v", interval, pings, want)
			}
			if frames := len(times(res.got, "metric")); interval > 0 && frames < int(75*time.Second/interval) {
				t.Errorf("interval %v: %d frames, want at least %d", interval, frames, int(75*time.Second/interval))
			}
			for _, e := range res.got {
				if e.Type != "metric" && e.Type != "ping" {
					t.Errorf("interval %v: event %q, want metric and ping only", interval, e.Type)
				}
				if e.Type == "ping" && string(e.Data) != "{}" {
					t.Errorf("ping data %q", e.Data)
				}
			}
			if !errors.Is(res.reason, ErrPeerClosed) {
				t.Errorf("interval %v: ended with %v, want ErrPeerClosed", interval, res.reason)
			}
		}
	})
}

// TestNormalStream: RFC-0009 §9 fixture 1: 30 s at 5 s are at least 6 frames and a ping.
func TestNormalStream(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		res := pipeStream{secure: secure, interval: 5 * time.Second, frames: 7}.run(t)
		if n := len(times(res.got, "metric")); n != 7 {
			t.Errorf("%d frames, want 7", n)
		}
		if pings := times(res.got, "ping"); len(pings) != 1 {
			t.Errorf("pings at %v, want one", pings)
		}
		if last := res.got[len(res.got)-1]; last.Type != "close" || !errors.Is(res.readErr, io.EOF) || !errors.Is(res.reason, errOffline) {
			t.Errorf("the last event is %q, then %v; the server ended with %v; want close, EOF and errOffline", last.Type, res.readErr, res.reason)
		}
	})
}

// TestStallInMemory: a reader that stops after the first frame, over a connection without a kernel:
// 4413 when frames come fast, 4408 when they come slowly.
func TestStallInMemory(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		tests := []struct {
			interval time.Duration
			want     error
			from, to time.Duration // when the stream ends
		}{
			{time.Second, ErrBackpressure, 4 * time.Second, 5 * time.Second},       // at the 5th frame: one was read, 3 wait
			{5 * time.Second, ErrBackpressure, 20 * time.Second, 21 * time.Second}, // the same
			{time.Minute, ErrIdle, 110 * time.Second, 120 * time.Second},           // 90 s after the ping at 25 s
		}
		for _, tt := range tests {
			res := pipeStream{
				secure: secure, interval: tt.interval, pause: 5 * time.Minute,
				stop: func(timed) bool { return true },
			}.run(t)
			if !errors.Is(res.reason, tt.want) || res.ended < tt.from || res.ended > tt.to {
				t.Errorf("interval %v: ended with %v at %v, want %v from %v to %v", tt.interval, res.reason, res.ended, tt.want, tt.from, tt.to)
			}
			if res.readErr == nil {
				t.Errorf("interval %v: the connection stays open", tt.interval)
			}
		}
	})
}

// TestShortStall: a stall shorter than the rules allow costs no frame.
func TestShortStall(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		res := pipeStream{secure: secure, interval: 5 * time.Second, frames: 10, pause: 9 * time.Second, stop: func(e timed) bool {
			return strings.HasPrefix(string(e.Data), `{"n":3,`)
		}}.run(t)
		if n := len(times(res.got, "metric")); n != 10 || !errors.Is(res.reason, errOffline) {
			t.Errorf("%d frames, then %v; want 10, then errOffline", n, res.reason)
		}
	})
}

// TestPendingIsRetried: what is pending after a stall is sent soon after the reader is back, not with
// the next frame.
func TestPendingIsRetried(t *testing.T) {
	bothWaysInTime(t, func(t *testing.T, secure bool) {
		res := pipeStream{secure: secure, interval: 15 * time.Second, frames: 3, pause: 17 * time.Second, stop: func(timed) bool { return true }}.run(t)
		want := []time.Duration{0, 17 * time.Second, 30 * time.Second} // the second was due at 15
		for i, at := range times(res.got, "metric") {
			if i >= len(want) || at < want[i] || at > want[i]+time.Second {
				t.Errorf("frame %d at %v, want %v", i+1, at, want)
			}
		}
		if n := len(times(res.got, "metric")); n != len(want) {
			t.Errorf("%d frames, want %d", n, len(want))
		}
	})
}
