package control

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"agentctl/strictjson"

	"github.com/creachadair/jrpc2/channel"
)

var _ channel.Channel = (*serverChannel)(nil)

// serverChannel is what jrpc2 reads requests from and writes answers to. It stands
// between the library, which takes in whatever comes, and the client:
//
//   - Messages, their header lines and their parts are bounded.
//   - What is not a sound request is answered here, and the library never sees it.
//   - The next request is read when the one before is answered: nothing is queued but
//     in the socket's own buffer, and requests keep their order.
//   - A client has a few seconds to say hello, and to finish a message it began.
type serverChannel struct {
	*wire
	buffer      chan []byte // the one memory for large messages, of all connections
	connectedAt time.Time   // when the client came
	helloDone   bool        // a good hello was said; only touched by who has the turn, as the next

	isStreamed bool // the answer to the request in work is out already

	idle       chan struct{} // a token while no request is in work
	onAnswered []func()      // run when the request in work is answered

	drainMu    sync.Mutex // protects the fields below
	isDraining bool
}

func newServerChannel(w *wire, large chan []byte) *serverChannel {
	c := &serverChannel{wire: w, buffer: large, connectedAt: time.Now(), idle: make(chan struct{}, 1)}
	c.idle <- struct{}{}
	return c
}

// Recv returns the next request that jrpc2 shall work off.
func (c *serverChannel) Recv() ([]byte, error) {
	select {
	case <-c.idle:
	case <-c.closed:
		return nil, io.EOF
	}
	for {
		request, reply, err := c.read()
		if err != nil {
			c.sendCloseReason(err)
			return nil, io.EOF
		}
		if request != nil {
			return request, nil
		}
		if reply != nil {
			if err := c.write(frame(reply)); err != nil {
				return nil, io.EOF
			}
		}
	}
}

// read reads one message and judges it.
func (c *serverChannel) read() (request, reply []byte, err error) {
	var byHello time.Time
	if !c.helloDone {
		byHello = c.connectedAt.Add(helloTimeout)
	}
	c.setReadDeadline(byHello)
	if err := c.reader.waitMessage(); err != nil {
		return nil, nil, err
	}
	by := time.Now().Add(frameTimeout)
	if !c.helloDone && byHello.Before(by) {
		by = byHello
	}
	c.setReadDeadline(by)
	n, err := c.reader.header()
	if err != nil {
		return nil, nil, err
	}
	if n > maxSmallMessage {
		return c.readLarge(n, by)
	}
	body := make([]byte, n)
	if err := c.reader.body(body); err != nil {
		return nil, nil, err
	}
	request, reply = checkMessage(body)
	return request, reply, nil
}

// readLarge is the end of read for a large message. There is memory for one, so that
// all clients together cannot make the daemon grow; the others wait for their turn.
// What it returns is small.
func (c *serverChannel) readLarge(n int, by time.Time) (request, reply []byte, err error) {
	timer := time.NewTimer(time.Until(by))
	defer timer.Stop()
	var mem []byte
	select {
	case mem = <-c.buffer:
	case <-c.closed:
		return nil, nil, io.EOF
	case <-timer.C:
		return nil, nil, os.ErrDeadlineExceeded
	}
	defer func() { c.buffer <- mem }()
	if mem == nil {
		mem = make([]byte, MaxMessage)
	}
	if err := c.reader.body(mem[:n]); err != nil {
		return nil, nil, err
	}
	request, reply = checkMessage(mem[:n])
	return request, reply, nil
}

// sendCloseReason tells a client why it is hung up on, where that helps it.
func (c *serverChannel) sendCloseReason(err error) {
	var why *Error
	switch {
	case errors.Is(err, errFraming):
		why = newError(CodeParse, err.Error())
	case !errors.Is(err, os.ErrDeadlineExceeded) || c.drainStarted():
		return // gone, or the daemon stops
	case !c.helloDone:
		why = newError(CodeUnauthorized, "say hello within 5 s of connecting")
	default:
		why = newError(CodeParse, "a message that began must end within 10 s")
	}
	c.write(frame(why.answer(nil)))
}

// Send writes the answer to the request in work, unless it was streamed; that ends its
// turn.
func (c *serverChannel) Send(body []byte) (err error) {
	if !c.isStreamed {
		err = c.write(frame(body))
	}
	c.isStreamed = false
	c.finishRequest()
	return err
}

// afterAnswer has fn run when the request in work is answered, on the way to the next.
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

// setReadDeadline bounds the reads from now on; the zero time is no bound.
func (c *serverChannel) setReadDeadline(t time.Time) {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	if !c.isDraining {
		c.nc.SetReadDeadline(t)
	}
}

// drain lets the request in work be answered, and reads no other. A newcomer may still
// ask what it came for: it could not know that the daemon was about to stop.
func (c *serverChannel) drain() {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	c.isDraining = true
	c.nc.SetReadDeadline(c.connectedAt.Add(newConnGrace))
}

func (c *serverChannel) drainStarted() bool {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	return c.isDraining
}

// checkMessage looks at a message. A sound request is handed on, any other is replied to, or
// not when it needs no reply. The results of a large message do not share its memory.
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
	_, result := m["result"]
	_, fault := m["error"]
	if _, isMethod := m["method"]; !isMethod && (result || fault) {
		return nil, nil // an answer: nothing was asked, and answering answers would not end
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

// member is a value of a message, kept only if it may be part of a request.
type member struct {
	raw     strictjson.Raw
	tooLong bool
}

// UnmarshalJSON copies what is not too long.
func (m *member) UnmarshalJSON(b []byte) error {
	if m.tooLong = len(b) > MaxParams; !m.tooLong {
		m.raw = bytes.Clone(b)
	}
	return nil
}

// normalizeRequest is a sound request without the blanks around its members.
func normalizeRequest(m map[string]member) []byte {
	b := []byte(`{"jsonrpc":"2.0"`)
	for _, name := range []string{"id", "method", "params"} {
		if raw := m[name].raw; raw != nil {
			b = append(append(append(append(b, `,"`...), name...), `":`...), raw...)
		}
	}
	return append(b, '}')
}

// countCommas counts the commas outside strings: the members and elements, about.
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

func objectError(body []byte) *Error {
	switch err := strictjson.Check(body); {
	case err != nil:
		return newError(CodeParse, err.Error())
	case bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte{'['}):
		return newError(CodeInvalidRequest, "batches are not supported: send one request a message")
	}
	return newError(CodeInvalidRequest, "a request is an object")
}

// requestIDOf returns the id, nil when there is none.
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

func checkRequest(m map[string]member) *Error {
	for name := range m {
		switch name {
		case "jsonrpc", "id", "method", "params":
		default:
			return newError(CodeInvalidRequest, "a request has only jsonrpc, id, method and params")
		}
	}
	var method string
	if string(m["jsonrpc"].raw) != `"2.0"` {
		return newError(CodeInvalidRequest, `jsonrpc is not "2.0"`)
	}
	if strictjson.Unmarshal(m["method"].raw, &method) != nil || method == "" || len(method) > 64 {
		return newError(CodeInvalidRequest, "method is not a string of 1 to 64 bytes")
	}
	switch params := m["params"]; {
	case params.tooLong:
		return errParams("params", "is longer than %d bytes", MaxParams)
	case params.raw != nil && params.raw[0] != '{' && string(params.raw) != "null":
		return errParams("params", "must be an object")
	}
	return nil
}
