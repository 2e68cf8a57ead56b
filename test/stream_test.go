package test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentctl/transport/sse"
)

// stream is a client of the metric stream on a separate connection, so that a test can
// close one half of it, stop reading, or look at the bytes.
type stream struct {
	t      testing.TB
	r      *testRelay
	conn   net.Conn
	resp   *http.Response
	raw    *buffer // what came after the head
	events chan sse.Event
	err    error // why the events ended; valid once events is closed
}

// streamOptions vary how a stream is opened.
type streamOptions struct {
	token   string
	header  map[string]string
	rcvbuf  int  // SO_RCVBUF, set before connect
	stalled bool // nothing is read behind the head until read is called
}

// subscribe opens a stream and checks that it is one.
func (m *mockDevice) subscribe(args string) *stream {
	m.t.Helper()
	return m.r.stream(m.subscribeTool(), args, streamOptions{token: m.r.agentFor(m.ok.TenantID)})
}

func (r *testRelay) stream(tool, args string, o streamOptions) *stream {
	r.t.Helper()
	s := r.post(`{"tool":"`+tool+`","arguments":`+args+`}`, o)
	if s.resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(s.resp.Body)
		r.t.Fatalf("the stream got %d %s", s.resp.StatusCode, b)
	}
	if !o.stalled {
		s.read()
	}
	return s
}

// post writes the request by hand and reads the head of the answer.
func (r *testRelay) post(body string, o streamOptions) *stream {
	r.t.Helper()
	if o.token == "" {
		o.token = r.agent
	}
	dial := r.dial
	if o.rcvbuf > 0 {
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			if e := c.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, o.rcvbuf)
			}); e != nil {
				return e
			}
			return err
		}}
		dial = d.DialContext
	}
	conn, err := dial(context.Background(), "tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	var b strings.Builder
	fmt.Fprintf(&b, "POST /mcp/tools/call HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n", r.addr, len(body))
	h := map[string]string{"Authorization": "Bearer " + o.token, "Content-Type": "application/json", "Accept": "text/event-stream"}
	for k, v := range o.header {
		h[k] = v
	}
	for k, v := range h {
		if v != "" {
			fmt.Fprintf(&b, "%s: %s\r\n", k, v)
		}
	}
	_ = conn.SetDeadline(time.Now().Add(r.within(30 * time.Second)))
	if _, err := io.WriteString(conn, b.String()+"\r\n"+body); err != nil {
		r.t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodPost})
	if err != nil {
		r.t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Time{})
	return &stream{t: r.t, r: r, conn: conn, resp: resp, raw: new(buffer), events: make(chan sse.Event, 1<<14)}
}

// read takes in what comes, in a goroutine that ends with the connection.
func (s *stream) read() {
	rd := sse.NewReader(io.TeeReader(s.resp.Body, s.raw), sse.ReaderOptions{})
	go func() {
		defer close(s.events)
		for {
			ev, err := rd.Next()
			if err != nil {
				s.err = err
				return
			}
			s.events <- ev
		}
	}()
}

// next is the next event; it must come within d of virtual time.
func (s *stream) next(d time.Duration) sse.Event {
	s.t.Helper()
	d = s.r.within(d)
	select {
	case ev, ok := <-s.events:
		if !ok {
			s.t.Fatalf("the stream ended (%v) with %q", s.err, s.raw.String())
		}
		return ev
	case <-time.After(d):
		s.t.Fatalf("no event within %s", d)
	}
	panic("not reached")
}

// metric is the next event, which must be a metric frame.
func (s *stream) metric(d time.Duration) string {
	s.t.Helper()
	ev := s.next(d)
	if ev.Type != "metric" {
		s.t.Fatalf("got event %s %s instead of a metric", ev.Type, ev.Data)
	}
	return string(ev.Data)
}

// waitEnd waits until the stream has ended and checks that its last event is a close with this
// code, that EOF follows within a second of virtual time, and that every line on the wire is one that
// RFC-0009 §5 knows. It returns the number of metric and ping events that it passed.
func (s *stream) waitEnd(code sse.Code, within time.Duration) (metrics, pings int) {
	s.t.Helper()
	within = s.r.within(within)
	deadline := time.After(within)
	var last sse.Event
	for {
		select {
		case ev, ok := <-s.events:
			if !ok {
				s.checkEnd(last, code)
				return metrics, pings
			}
			switch last = ev; ev.Type {
			case "metric":
				metrics++
			case "ping":
				pings++
			case "close":
				deadline = time.After(s.r.within(time.Second))
			}
		case <-deadline:
			s.t.Fatalf("no end of the stream within %s; last event %q", within, last.Type)
		}
	}
}

func (s *stream) checkEnd(last sse.Event, code sse.Code) {
	s.t.Helper()
	want := fmt.Sprintf("event: close\ndata: {\"code\":%d,\"reason\":\"%s\"}\n\n", code, code.Reason())
	if s.err != io.EOF || !strings.HasSuffix(s.raw.String(), want) {
		s.t.Errorf("the stream ended with %v, last event %s %s; want %q and EOF", s.err, last.Type, last.Data, want)
	}
	if n := strings.Count(s.raw.String(), "event: close\n"); n != 1 {
		s.t.Errorf("%d close events", n)
	}
	s.checkWire()
}

// checkWire compares the raw bytes with the three forms of RFC-0009 §5.
func (s *stream) checkWire() {
	s.t.Helper()
	blocks := strings.Split(s.raw.String(), "\n\n")
	for i, b := range blocks {
		event, data, _ := strings.Cut(b, "\n")
		switch {
		case i == len(blocks)-1 && b == "":
		case b == "event: ping\ndata: {}":
		case event == "event: metric" && strings.HasPrefix(data, "data: {") && !strings.Contains(data, "\n") && json.Valid([]byte(data[6:])):
		case event == "event: close" && i == len(blocks)-2 && strings.HasPrefix(data, `data: {"code":`) && !strings.Contains(data, "\n"):
		default:
			s.t.Errorf("block %d on the wire is %q", i, b)
		}
	}
}

// halfClose ends the client's side only.
func (s *stream) halfClose() {
	s.t.Helper()
	if err := s.conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		s.t.Fatal(err)
	}
}
