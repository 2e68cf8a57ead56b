//go:build linux

package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// httpRequester posts JSON over one HTTP/1.1 connection. It writes the request by hand, so
// that the client's cost stays small beside the server's.
type httpRequester struct {
	net.Conn
	in   *bufio.Reader
	out  []byte
	host string
	// request appends the n-th request.
	request func(b []byte, host string, n int) []byte
}

func dialHTTP(addr string, request func(b []byte, host string, n int) []byte) (*httpRequester, error) {
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
	a.out = a.request(a.out[:0], a.host, n)
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

// subscriber is one reader of a metric stream.
type subscriber struct {
	conn net.Conn
	in   *bufio.Reader
}

// callEachTLS calls echo on each of n boards once, over one connection.
func (r *relayProc) callEachTLS(n int) error {
	transport := r.client().Transport.(*http.Transport)
	c, err := tls.Dial("tcp", r.addr, transport.TLSClientConfig)
	if err != nil {
		return err
	}
	a := &httpRequester{Conn: c, in: bufio.NewReader(c), host: r.addr, request: r.unaryRequest}
	defer func() { _ = a.Close() }()
	for i := range n {
		if err := a.do(i); err != nil {
			return err
		}
	}
	return nil
}

// smallWindow is a net.Dialer.Control that makes the receive buffer as small as it can be: before
// the connect, since a window that was offered is not taken back.
func smallWindow(_, _ string, raw syscall.RawConn) (err error) {
	e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
	return errors.Join(err, e)
}

// subscribeMetrics is the request of a metric stream.
func subscribeMetrics(addr, token, tool string) []byte {
	return appendPost(nil, "/mcp/tools/call", addr, []byte("Accept: text/event-stream\r\nAuthorization: Bearer "+token+"\r\n"),
		[]byte(`{"tool":"`+tool+`","arguments":{"interval_ms":1000}}`))
}

// subscribe opens a metric stream and reads the head of the answer. A reader that will stall has
// the smallest receive buffer.
func subscribe(addr, token, tool string, stalls bool) (*subscriber, error) {
	var d net.Dialer
	if stalls {
		d.Control = smallWindow
	}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	s := &subscriber{conn: c, in: bufio.NewReaderSize(c, 1024)}
	if _, err := c.Write(subscribeMetrics(addr, token, tool)); err != nil {
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
