package control

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"agentctl/strictjson"

	"github.com/creachadair/jrpc2/channel"
)

var _ channel.Channel = (*serverChannel)(nil)

// serverChannel is the channel from which jrpc2 reads requests and to which it writes
// answers. The library accepts anything; the channel protects it from the client:
//
//   - Messages, their header lines and their parts are bounded.
//   - A message that is not a valid request is answered here and does not reach jrpc2.
//   - The next request is read after the previous one was answered, so requests keep their
//     order and nothing is queued but in the socket's buffer.
//   - hello must come within helloTimeout, and the rest of a message within frameTimeout.
//
// idle holds a token while no request is in progress. Recv takes it and Send (or the end of
// a notification) returns it; its holder may use helloDone, isStreamed and onAnswered.
type serverChannel struct {
	*wire
	// buffer holds the server's one buffer for large messages while it is free.
	buffer chan []byte
	// connectedAt starts the time for hello, and the grace of a new client in drain.
	connectedAt time.Time
	// uid is the user who connected, and peerErr why it is not known.
	uid, gid uint32
	peerErr  error
	// isClient is set when the connection has one of MaxClients places; Server.mu protects it.
	isClient bool

	idle chan struct{}
	// helloDone is set when a valid hello was handled: helloTimeout no longer applies.
	helloDone bool
	// isStreamed is set when the answer was written already, so that Send does not.
	isStreamed bool
	// onAnswered are run when the request is answered.
	onAnswered []func()

	// drainMu protects isDraining, and setting the read deadline by it.
	drainMu    sync.Mutex
	isDraining bool
}

// newServerChannel returns a channel that is idle. buffer is shared by all connections.
func newServerChannel(w *wire, buffer chan []byte) *serverChannel {
	c := &serverChannel{wire: w, buffer: buffer, connectedAt: time.Now(), idle: make(chan struct{}, 1)}
	c.idle <- struct{}{}
	return c
}

// Recv returns the next request for jrpc2 to handle.
func (c *serverChannel) Recv() ([]byte, error) {
	select {
	case <-c.idle:
	case <-c.closed:
		return nil, io.EOF
	}
	for {
		request, reply, err := c.read()
		switch {
		case err != nil:
			c.sendCloseReason(err)
			return nil, io.EOF
		case request != nil:
			return request, nil
		case reply != nil && c.write(frame(reply)) != nil:
			return nil, io.EOF
		}
	}
}

// read reads one message and checks it.
func (c *serverChannel) read() (request, reply []byte, err error) {
	var helloDeadline time.Time // zero: none
	if !c.helloDone {
		helloDeadline = c.connectedAt.Add(helloTimeout)
	}
	c.setReadDeadline(helloDeadline)
	if err := c.reader.waitMessage(); err != nil {
		return nil, nil, err
	}
	deadline := time.Now().Add(frameTimeout)
	if !c.helloDone && helloDeadline.Before(deadline) {
		deadline = helloDeadline
	}
	c.setReadDeadline(deadline)
	n, err := c.reader.header()
	if err != nil {
		return nil, nil, err
	}
	if n > maxSmallMessage {
		return c.readLarge(n, deadline)
	}
	body := make([]byte, n)
	if err := c.reader.body(body); err != nil {
		return nil, nil, err
	}
	request, reply = checkMessage(body)
	return request, reply, nil
}

// readLarge is the end of read for a large message. The connections share one buffer, so
// that clients cannot make the daemon grow; others wait for it. What it returns is small.
func (c *serverChannel) readLarge(n int, deadline time.Time) (request, reply []byte, err error) {
	var buf []byte
	select {
	case buf = <-c.buffer:
	case <-c.closed:
		return nil, nil, io.EOF
	case <-time.After(time.Until(deadline)):
		return nil, nil, os.ErrDeadlineExceeded
	}
	defer func() { c.buffer <- buf }()
	if buf == nil {
		buf = make([]byte, MaxMessage)
	}
	if err := c.reader.body(buf[:n]); err != nil {
		return nil, nil, err
	}
	request, reply = checkMessage(buf[:n])
	return request, reply, nil
}

// sendCloseReason sends the client the reason for which the connection is closed, where that
// helps it: an error without an id, since it answers no request.
func (c *serverChannel) sendCloseReason(err error) {
	var reason *Error
	switch {
	case errors.Is(err, errFraming):
		reason = newError(CodeParse, err.Error())
	case !errors.Is(err, os.ErrDeadlineExceeded) || c.drainStarted():
		return // the client is gone, or the daemon stops
	case !c.helloDone:
		reason = newError(CodeUnauthorized, "say hello within 5 s of connecting")
	default:
		reason = newError(CodeParse, "a message that began must end within 10 s")
	}
	c.write(frame(reason.answer(nil)))
}

// Send writes the answer to the request in progress, unless it was streamed, and finishes
// the request.
func (c *serverChannel) Send(body []byte) (err error) {
	if !c.isStreamed {
		err = c.write(frame(body))
	}
	c.isStreamed = false
	c.finishRequest()
	return err
}

// afterAnswer runs fn when the request in progress is answered, before the next one is read.
// It keeps the order that clients rely on: the answer to start, then the event state.
func (c *serverChannel) afterAnswer(fn func()) { c.onAnswered = append(c.onAnswered, fn) }

// finishRequest lets the next request be read.
func (c *serverChannel) finishRequest() {
	for _, fn := range c.onAnswered {
		fn()
	}
	c.onAnswered = nil
	select {
	case c.idle <- struct{}{}:
	default:
	}
}

// setReadDeadline bounds reads from now on; the zero time is no bound.
func (c *serverChannel) setReadDeadline(t time.Time) {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	if !c.isDraining {
		c.nc.SetReadDeadline(t)
	}
}

// drain lets the request in progress be answered and reads no other one. A client that has
// just connected may still send its request: it could not know that the daemon stops.
func (c *serverChannel) drain() {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	c.isDraining = true
	c.nc.SetReadDeadline(c.connectedAt.Add(newConnGrace))
}

// drainStarted reports whether drain was called.
func (c *serverChannel) drainStarted() bool {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	return c.isDraining
}

// checkMessage returns a valid request, or the reply to an invalid one, or nothing for a
// message that needs no reply. What it returns of a large message does not share its memory.
func checkMessage(body []byte) (request, reply []byte) {
	if bytes.Count(body, []byte{','}) > maxCommas && countCommas(body) > maxCommas {
		return nil, newError(CodeInvalidRequest, "too many elements").answer(nil)
	}
	var m map[string]member
	if err := strictjson.Unmarshal(body, &m); err != nil {
		return nil, objectError(body).answer(nil)
	}
	id, err := requestIDOf(m)
	if err != nil {
		return nil, err.answer(nil)
	}
	_, hasResult := m["result"]
	_, hasError := m["error"]
	if _, hasMethod := m["method"]; !hasMethod && (hasResult || hasError) {
		return nil, nil // an answer to nothing: a reply to it might be answered without end
	}
	if err := checkRequest(m); err != nil {
		if id == nil && err.Code == CodeInvalidParams {
			return nil, nil // a notification is never answered
		}
		return nil, err.answer(id)
	}
	if len(body) > maxSmallMessage {
		return normalizeRequest(m), nil
	}
	return body, nil
}

// member is a value of a message. It is copied unless it is too long for any request.
type member struct {
	raw     strictjson.Raw
	tooLong bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (m *member) UnmarshalJSON(b []byte) error {
	if m.tooLong = len(b) > MaxParams; !m.tooLong {
		m.raw = bytes.Clone(b)
	}
	return nil
}

// normalizeRequest encodes the members of a valid request without blanks between them.
func normalizeRequest(m map[string]member) []byte {
	b := []byte(`{"jsonrpc":"2.0"`)
	for _, name := range []string{"id", "method", "params"} {
		if raw := m[name].raw; raw != nil {
			b = append(append(append(append(b, `,"`...), name...), `":`...), raw...)
		}
	}
	return append(b, '}')
}

// countCommas counts the commas outside strings, about the number of elements and members. A
// message of 1 MiB could otherwise decode into hundreds of thousands of them.
func countCommas(body []byte) (n int) {
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case ',':
			n++
		case '"':
			for i++; i < len(body) && body[i] != '"'; i++ {
				if body[i] == '\\' {
					i++
				}
			}
		}
	}
	return n
}

// objectError says why a message is not an object with unique keys.
func objectError(body []byte) *Error {
	switch err := strictjson.Check(body); {
	case err != nil:
		return newError(CodeParse, err.Error())
	case bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte{'['}):
		return newError(CodeInvalidRequest, "batches are not supported: send one request a message")
	}
	return newError(CodeInvalidRequest, "a request is an object")
}

// requestIDOf returns the id as JSON, nil when there is none. JSON-RPC 2.0 §4 discourages null
// and fractions; null is refused here, since its answer would look like an error that
// belongs to no request.
func requestIDOf(m map[string]member) (strictjson.Raw, *Error) {
	v, ok := m["id"]
	switch id := v.raw; {
	case !ok:
		return nil, nil
	case v.tooLong || len(id) > maxID:
		return nil, newError(CodeInvalidRequest, "the id is longer than 128 bytes")
	case id[0] != '"' && id[0] != '-' && (id[0] < '0' || id[0] > '9'):
		return nil, newError(CodeInvalidRequest, "the id is neither a string nor a number")
	default:
		return id, nil
	}
}

// checkRequest checks the members of a request against JSON-RPC 2.0 and our bounds.
func checkRequest(m map[string]member) *Error {
	for name := range m {
		if !slices.Contains([]string{"jsonrpc", "id", "method", "params"}, name) {
			return newError(CodeInvalidRequest, "a request has only jsonrpc, id, method and params")
		}
	}
	if string(m["jsonrpc"].raw) != `"2.0"` {
		return newError(CodeInvalidRequest, `jsonrpc is not "2.0"`)
	}
	var method string
	if strictjson.Unmarshal(m["method"].raw, &method) != nil || method == "" || len(method) > 64 {
		return newError(CodeInvalidRequest, "method is not a string of 1 to 64 bytes")
	}
	switch params := m["params"]; {
	case params.tooLong:
		return errParams("params", "is longer than %d bytes", MaxParams)
	case params.raw != nil && params.raw[0] != '{' && string(params.raw) != "null" && !isEmptyArray(params.raw):
		return errParams("params", "must be an object")
	}
	return nil
}
