package edge

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// directWriter is the ResponseWriter of a direct request. It sends the bytes that net/http would
// send: the whole response with its length in one write, or chunks once the handler flushes or
// writes more than maxBuffered.
type directWriter struct {
	conn   *directConn
	header http.Header

	*writerBuffers
	status    int // 0: WriteHeader was not called
	headSent  bool
	isChunked bool
	sniff     bool  // the handler has left the Content-Type to the server
	declared  int64 // the handler's Content-Length, -1: none
	written   int64 // bytes that the handler has written
	isLast    bool  // the connection ends after the response

	deadlineSet bool
	isHijacked  bool
	err         error // final
}

// writerBuffers are what a directWriter gathers before it sends it.
type writerBuffers struct {
	out  []byte // what goes out next: the head at first
	body []byte // that was not sent yet, up to maxBuffered
}

// directBuffers are for the next responses. Each buffer has at most maxKeptBuffer bytes.
var directBuffers = sync.Pool{New: func() any { return &writerBuffers{out: make([]byte, 0, 512), body: make([]byte, 0, 512)} }}

const maxKeptBuffer = 4 << 10

// maxBuffered is how much of a body is held back for its length, in bytes.
const maxBuffered = 32 << 10

var (
	errDirectFinished = errors.New("edge: the handler has returned")
	errDirectAnswered = errors.New("edge: cannot hijack: a response has begun")
)

func newDirectWriter(c *directConn) *directWriter {
	return &directWriter{conn: c, header: make(http.Header, 8), writerBuffers: directBuffers.Get().(*writerBuffers), declared: -1}
}

// Header implements http.ResponseWriter.
func (w *directWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. Changes of the header after it have no effect.
func (w *directWriter) WriteHeader(status int) {
	if w.status != 0 || status < 200 || w.isHijacked { // informational responses are not sent
		return
	}
	w.status = status
	b := append(w.out[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(append(append(b, ' '), http.StatusText(status)...), "\r\n"...)
	names := make([]string, 0, 16) // on the stack
	for name := range w.header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if !consistsOf(name, tokenByte) {
			continue
		}
		for _, v := range w.header[name] {
			if !consistsOf(v, valueByte) {
				v = headerSpaces.Replace(v)
			}
			b = append(append(append(append(b, name...), ": "...), strings.Trim(v, " \t")...), "\r\n"...)
		}
	}
	_, hasType := w.header["Content-Type"]
	w.sniff = !hasType && w.header.Get("Content-Encoding") == ""
	if v := w.header["Content-Length"]; len(v) == 1 {
		if n, err := strconv.ParseInt(v[0], 10, 64); err == nil {
			w.declared = n
		}
	}
	w.isLast = strings.EqualFold(w.header.Get("Connection"), "close")
	w.out = b
}

// headerSpaces keeps the lines of a header apart, as net/http does.
var headerSpaces = strings.NewReplacer("\n", " ", "\r", " ")

// mayHaveBody reports whether a response of the status has a body (RFC 9110 §6.4.1).
func (w *directWriter) mayHaveBody() bool {
	return w.status != http.StatusNoContent && w.status != http.StatusNotModified
}

// Write implements http.ResponseWriter.
func (w *directWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.written += int64(len(b))
	switch {
	case w.err != nil:
		return 0, w.err
	case !w.mayHaveBody():
		return 0, http.ErrBodyNotAllowed
	case w.declared >= 0 && w.written > w.declared:
		return 0, http.ErrContentLength
	}
	for rest := b; len(rest) > 0 && w.err == nil; { // in parts: a slow client must not hold copies of the whole
		if len(w.body) == maxBuffered {
			w.send(false)
		}
		n := min(len(rest), maxBuffered-len(w.body))
		w.body, rest = append(w.body, rest[:n]...), rest[n:]
	}
	return len(b), w.err
}

// FlushError implements what http.ResponseController uses.
func (w *directWriter) FlushError() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.send(false)
	return w.err
}

// Flush implements http.Flusher.
func (w *directWriter) Flush() { _ = w.FlushError() }

// SetReadDeadline has nothing to bound: the body has arrived.
func (w *directWriter) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline bounds the writes of this response.
func (w *directWriter) SetWriteDeadline(t time.Time) error {
	w.deadlineSet = !t.IsZero()
	return w.conn.SetWriteDeadline(t)
}

// Hijack implements http.Hijacker, before anything was written. What the client has sent after the
// request is discarded: whoever takes a connection over here sends an event stream.
func (w *directWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	switch {
	case w.isHijacked:
		return nil, nil, http.ErrHijacked
	case w.status != 0 || w.err != nil:
		return nil, nil, errDirectAnswered
	}
	w.isHijacked, w.err = true, http.ErrHijacked
	c := w.conn.hijack()
	return c, bufio.NewReadWriter(bufio.NewReaderSize(c, minBuffer), bufio.NewWriterSize(c, minBuffer)), nil
}

// minBuffer is the smallest that bufio makes: nobody who hijacks a direct request uses its buffers.
const minBuffer = 16

// send writes the head, if it was not sent, and the body so far. last reports that the body is
// complete.
func (w *directWriter) send(last bool) {
	if w.err != nil {
		return
	}
	b := w.out
	if !w.headSent {
		w.headSent = true
		// With the first bytes that are sent it is decided whether the body has a length: it has
		// one if it is complete by then, or if the handler has declared it.
		w.isChunked = w.declared < 0 && !last && w.mayHaveBody()
		b = w.appendHeadEnd(b)
	}
	switch {
	case !w.isChunked:
		b = append(b, w.body...)
	case len(w.body) > 0:
		b = append(strconv.AppendInt(b, int64(len(w.body)), 16), "\r\n"...)
		b = append(append(b, w.body...), "\r\n"...)
	}
	if w.isChunked && last {
		b = append(b, "0\r\n\r\n"...)
	}
	w.out, w.body = b[:0], w.body[:0]
	if len(b) > 0 {
		_, w.err = w.conn.Write(b)
	}
}

// appendHeadEnd appends the lines that the server adds to the handler's header, in the order of
// net/http.
func (w *directWriter) appendHeadEnd(b []byte) []byte {
	if w.header["Date"] == nil {
		b = append(time.Now().UTC().AppendFormat(append(b, "Date: "...), http.TimeFormat), "\r\n"...)
	}
	if w.declared < 0 && !w.isChunked && w.mayHaveBody() {
		b = append(strconv.AppendInt(append(b, "Content-Length: "...), int64(len(w.body)), 10), "\r\n"...)
	}
	if w.sniff && len(w.body) > 0 {
		b = append(append(append(b, "Content-Type: "...), http.DetectContentType(w.body)...), "\r\n"...)
	}
	if !w.isLast && w.conn.server.direct.isDraining() {
		w.isLast = true
		b = append(b, "Connection: close\r\n"...)
	}
	if w.isChunked {
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	return append(b, "\r\n"...)
}

// finish sends what is left, and reports whether the connection may serve another request.
func (w *directWriter) finish() (reuse bool) {
	if w.isHijacked {
		return false
	}
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.send(true)
	if w.deadlineSet {
		_ = w.conn.SetWriteDeadline(time.Time{})
	}
	isWhole := w.declared < 0 || w.declared == w.written || !w.mayHaveBody()
	reuse = w.err == nil && isWhole && !w.isLast
	w.err = errDirectFinished // what a goroutine of the handler writes now goes nowhere
	if max(cap(w.out), cap(w.body)) <= maxKeptBuffer {
		w.out, w.body = w.out[:0], w.body[:0]
		directBuffers.Put(w.writerBuffers)
	}
	return reuse
}
