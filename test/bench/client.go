//go:build linux

package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gorilla/websocket"
	"golang.org/x/sys/unix"
)

// requester makes one round trip over a connection that it keeps.
type requester interface {
	do(n int) error // the n-th of all askers
	Close() error
}

// httpRequester posts JSON over one HTTP/1.1 connection. It writes the request by hand, so
// that the client's cost stays small beside the server's.
type httpRequester struct {
	net.Conn
	in   *bufio.Reader
	out  []byte
	host string
	// request returns the header lines and the body of the n-th request.
	request func(n int) (head, body []byte)
}

func dialHTTP(addr string, request func(n int) (head, body []byte)) (*httpRequester, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &httpRequester{Conn: c, in: bufio.NewReader(c), host: addr, request: request}, nil
}

// appendPost appends one POST request.
func appendPost(b []byte, path, host string, head, body []byte) []byte {
	b = append(append(append(append(b, "POST "...), path...), " HTTP/1.1\r\nHost: "...), host...)
	b = append(append(b, "\r\nContent-Type: application/json\r\n"...), head...)
	b = append(strconv.AppendInt(append(b, "Content-Length: "...), int64(len(body)), 10), "\r\n\r\n"...)
	return append(b, body...)
}

func (a *httpRequester) do(n int) error {
	head, body := a.request(n)
	path := "/mcp/tools/call"
	if bytes.HasPrefix(head, mcpHead) {
		path = "/mcp"
	}
	a.out = appendPost(a.out[:0], path, a.host, head, body)
	if _, err := a.Write(a.out); err != nil {
		return err
	}
	res, err := http.ReadResponse(a.in, nil)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK || bytes.Contains(answer, []byte(`"isError"`)) {
		return fmt.Errorf("%s: %.200s", res.Status, answer)
	}
	return nil
}

// wsRequester sends a message and waits for one.
type wsRequester struct {
	*websocket.Conn
	msg []byte
}

func dialWS(addr string, msg []byte) (*wsRequester, error) {
	c, res, err := websocket.DefaultDialer.Dial("ws://"+addr, nil)
	if err != nil {
		return nil, err
	}
	_ = res.Body.Close()
	return &wsRequester{c, msg}, nil
}

func (a *wsRequester) do(int) error {
	if err := a.WriteMessage(websocket.TextMessage, a.msg); err != nil {
		return err
	}
	_, _, err := a.ReadMessage()
	return err
}

// load keeps askers busy.
type load struct {
	askers []requester
	next   *atomic.Int64 // numbers the calls of all loads, so that devices are called in rotation
	done   atomic.Int64
	failed atomic.Int64
	reason atomic.Pointer[error]

	perSecond int // bounds the rate; at least 1

	mu   sync.Mutex // protects slot
	slot time.Time  // of the last call that was let through
}

// wait holds a caller back to the rate. What was missed is made up for by a twentieth of
// a second at most: a device's limit knows no credit.
func (l *load) wait() {
	l.mu.Lock()
	now := time.Now()
	l.slot = l.slot.Add(time.Second / time.Duration(l.perSecond))
	if late := now.Add(-time.Second / 20); l.slot.Before(late) {
		l.slot = late
	}
	d := l.slot.Sub(now)
	l.mu.Unlock()
	if d > 0 {
		time.Sleep(d)
	}
}

// measureRound runs the load for d after a warm-up, and returns what one operation cost the
// server in CPU, µs, how many a second there were, and the latencies, ms.
func (l *load) measureRound(server *process, d time.Duration) (cpu, rate float64, latency []float64, err error) {
	l.failed.Store(0)
	begin := time.Now()
	warm := min(d/4, 500*time.Millisecond)
	end := begin.Add(warm + d)
	took := make([][]float64, len(l.askers))
	var wg sync.WaitGroup
	for i, a := range l.askers {
		wg.Go(func() {
			for {
				l.wait()
				now := time.Now()
				if now.After(end) {
					return
				}
				if err := a.do(int(l.next.Add(1))); err != nil {
					l.failed.Add(1)
					l.reason.Store(&err)
					if _, ok := err.(net.Error); ok {
						return
					}
					continue
				}
				l.done.Add(1)
				if now.Sub(begin) > warm {
					took[i] = append(took[i], time.Since(now).Seconds()*1000)
				}
			}
		})
	}
	time.Sleep(warm)
	cpu0, n0, t0 := server.cpu(), l.done.Load(), time.Now()
	time.Sleep(time.Until(end) - 20*time.Millisecond)
	cpu1, n1, t1 := server.cpu(), l.done.Load(), time.Now()
	wg.Wait()
	n := float64(n1 - n0)
	if n < 100 || l.failed.Load() > int64(n/1000) {
		why := error(nil)
		if p := l.reason.Load(); p != nil {
			why = *p
		}
		return 0, 0, nil, fmt.Errorf("%.0f calls, %d failed: %w", n, l.failed.Load(), why)
	}
	for _, t := range took {
		latency = append(latency, t...)
	}
	return float64((cpu1 - cpu0).Nanoseconds()) / 1000 / n, n / t1.Sub(t0).Seconds(), latency, nil
}

func (l *load) close() {
	for _, a := range l.askers {
		_ = a.Close()
	}
}

// subscriber is one reader of a metric stream.
type subscriber struct {
	conn net.Conn
	in   *bufio.Reader
}

// subscribe opens a stream and reads the head of the answer. window, when not 0, is the
// size of the receive buffer.
func subscribe(addr, ca, token, tool string, window int) (*subscriber, error) {
	d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if window > 0 { // before the connect: a window that was offered is not taken back
			e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, window) })
			err = errors.Join(err, e)
		}
		return err
	}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		c = tls.Client(c, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
	}
	s := &subscriber{conn: c, in: bufio.NewReaderSize(c, 1024)}
	head := []byte("Accept: text/event-stream\r\nAuthorization: Bearer " + token + "\r\n")
	body := []byte(`{"tool":"` + tool + `","arguments":{"interval_ms":1000}}`)
	if _, err := c.Write(appendPost(nil, "/mcp/tools/call", addr, head, body)); err != nil {
		return nil, err
	}
	res, err := http.ReadResponse(s.in, nil)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		_ = c.Close()
		return nil, fmt.Errorf("subscribe: %s", res.Status)
	}
	return s, nil
}

// frames calls fn with the data of each metric event until the stream ends, and returns
// the close event's data, if there was one. A chunked body's sizes are lines as well;
// they are passed over.
func (s *subscriber) frames(fn func(data []byte)) (closed []byte, err error) {
	event := ""
	for {
		line, err := s.in.ReadSlice('\n')
		if err != nil {
			return closed, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if e, ok := bytes.CutPrefix(line, []byte("event: ")); ok {
			event = string(e)
		} else if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			switch event {
			case "metric":
				fn(data)
			case "close":
				closed = bytes.Clone(data)
			}
		}
	}
}
