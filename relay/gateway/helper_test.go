package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/transport/sse"
)

// testTimeout is how long a test waits for something that must happen.
const testTimeout = 10 * time.Second

// testGateway is a gateway on a loopback port.
type testGateway struct {
	*Gateway
	t    *testing.T
	url  string
	stop func() error // ends it and waits; may be called more than once
}

func start(t *testing.T, o Options) *testGateway {
	t.Helper()
	o.Listen = "127.0.0.1:0"
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, g)
}

func serve(t *testing.T, g *Gateway) *testGateway {
	t.Helper()
	ready := make(chan string, 1)
	g.OnReady(func(addr string) { ready <- addr })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	r := &testGateway{Gateway: g, t: t}
	r.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(testTimeout):
			return fmt.Errorf("Run did not return")
		}
	})
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case addr := <-ready:
		r.url = "http://" + addr
	case err := <-ended:
		t.Fatal(err)
	}
	return r
}

// request makes a request with headers given as pairs, and returns status, header, body.
func (r *testGateway) request(method, path, body string, header ...string) (int, http.Header, string) {
	r.t.Helper()
	req, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	res, err := http.DefaultClient.Do(req.WithContext(ctx))
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, res.Header, string(b)
}

// post ingests an event and returns its id.
func (r *testGateway) post(topic, data string, header ...string) uint64 {
	r.t.Helper()
	status, _, body := r.request("POST", IngestPath, fmt.Sprintf(`{"topic":%q,"data":%s}`, topic, data), header...)
	var out struct {
		ID uint64 `json:"id"`
	}
	if err := json.Unmarshal([]byte(body), &out); status != http.StatusAccepted || err != nil || out.ID == 0 {
		r.t.Fatalf("post %s: %d %s", topic, status, body)
	}
	return out.ID
}

// stream is one subscriber.
type stream struct {
	t     *testing.T
	conn  net.Conn
	first string // the comment
	read  *sse.Reader
}

// open subscribes; query is what follows the path, header pairs.
func (r *testGateway) open(query string, header ...string) *stream {
	r.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	return subscribe(r.t, conn, query, header...)
}

func subscribe(t *testing.T, conn net.Conn, query string, header ...string) *stream {
	t.Helper()
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testTimeout))
	req := "GET " + StreamPath + query + " HTTP/1.1\r\nHost: 127.0.0.1\r\n"
	for i := 0; i < len(header); i += 2 {
		req += header[i] + ": " + header[i+1] + "\r\n"
	}
	if _, err := io.WriteString(conn, req+"\r\n"); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(conn)
	status, err := br.ReadString('\n')
	if err != nil || !strings.HasPrefix(status, "HTTP/1.1 200 ") {
		t.Fatalf("subscribe %s: %q %v", query, status, err)
	}
	s := &stream{t: t, conn: conn}
	for line := status; line != "\r\n"; {
		if line, err = br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		if k, v, ok := strings.Cut(line, ": "); ok && strings.EqualFold(k, "Content-Type") && !strings.HasPrefix(v, "text/event-stream") {
			t.Errorf("content type %q", v)
		}
	}
	if s.first, err = br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	s.read = sse.NewReader(br, sse.ReaderOptions{})
	return s
}

// limitReceiveBuffer keeps the kernel from growing the receive buffer to megabytes, so that
// the connection of a stalled subscriber is full after fewer events.
func (s *stream) limitReceiveBuffer() {
	s.t.Helper()
	if err := s.conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		s.t.Fatal(err)
	}
}

// next is the next event that is no heartbeat.
func (s *stream) next() sse.Event {
	s.t.Helper()
	for {
		ev, err := s.read.Next()
		if err != nil {
			s.t.Fatalf("stream ended: %v", err)
		}
		if ev.Type != "heartbeat" {
			return ev
		}
	}
}

// want reads events and compares topics and data, given as pairs.
func (s *stream) want(pairs ...string) {
	s.t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if ev := s.next(); ev.Type != pairs[i] || string(ev.Data) != pairs[i+1] {
			s.t.Fatalf("event %s %.200s, want %s %s", ev.Type, ev.Data, pairs[i], pairs[i+1])
		}
	}
}

// eventually waits for what the operating system does asynchronously.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testTimeout); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after %s: %s", testTimeout, what)
		}
	}
}
