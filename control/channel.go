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
	large chan []byte // the one memory for large messages, of all connections
	since time.Time   // when the client came
	hello bool        // a good hello was said; only touched by who has the turn, as the next

	streamed bool // the answer to the request in work is out already

	turn      chan struct{} // a token while no request is in work
	afterTurn []func()      // run when the request in work is answered

	dmu      sync.Mutex // protects the fields below
	draining bool
}

func newServerChannel(w *wire, large chan []byte) *serverChannel {
	c := &serverChannel{wire: w, large: large, since: time.Now(), turn: make(chan struct{}, 1)}
	c.turn <- struct{}{}
	return c
}

// Recv returns the next request that jrpc2 shall work off.
func (c *serverChannel) Recv() ([]byte, error) {
	select {
	case <-c.turn:
	case <-c.closed:
		return nil, io.EOF
	}
	for {
		request, reply, err := c.read()
		if err != nil {
			c.farewell(err)
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
	if !c.hello {
		byHello = c.since.Add(helloTimeout)
	}
	c.readBy(byHello)
	if err := c.in.wait(); err != nil {
		return nil, nil, err
	}
	by := time.Now().Add(frameTimeout)
	if !c.hello && byHello.Before(by) {
		by = byHello
	}
	c.readBy(by)
	n, err := c.in.header()
	if err != nil {
		return nil, nil, err
	}
	if n > smallBody {
		return c.readLarge(n, by)
	}
	body := make([]byte, n)
	if err := c.in.body(body); err != nil {
		return nil, nil, err
	}
	request, reply = judge(body)
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
	case mem = <-c.large:
	case <-c.closed:
		return nil, nil, io.EOF
	case <-timer.C:
		return nil, nil, os.ErrDeadlineExceeded
	}
	defer func() { c.large <- mem }()
	if mem == nil {
		mem = make([]byte, MaxMessage)
	}
	if err := c.in.body(mem[:n]); err != nil {
		return nil, nil, err
	}
	request, reply = judge(mem[:n])
	return request, reply, nil
}

// farewell tells a client why it is hung up on, where that helps it.
func (c *serverChannel) farewell(err error) {
	var why *Error
	switch {
	case errors.Is(err, errFraming):
		why = errParse(err.Error())
	case !errors.Is(err, os.ErrDeadlineExceeded) || c.isDraining():
		return // gone, or the daemon stops
	case !c.hello:
		why = errUnauthorized("say hello within 5 s of connecting")
	default:
		why = errParse("a message that began must end within 10 s")
	}
	c.write(frame(why.answer(nil)))
}

// Send writes the answer to the request in work, unless it was streamed; that ends its
// turn.
func (c *serverChannel) Send(body []byte) (err error) {
	if !c.streamed {
		err = c.write(frame(body))
	}
	c.streamed = false
	c.endTurn()
	return err
}

// after has fn run when the request in work is answered, on the way to the next.
func (c *serverChannel) after(fn func()) { c.afterTurn = append(c.afterTurn, fn) }

// endTurn lets the next request be read.
func (c *serverChannel) endTurn() {
	for _, fn := range c.afterTurn {
		fn()
	}
	c.afterTurn = nil
	select {
	case c.turn <- struct{}{}:
	default:
	}
}

// readBy bounds the reads from now on; the zero time is no bound.
func (c *serverChannel) readBy(t time.Time) {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	if !c.draining {
		c.nc.SetReadDeadline(t)
	}
}

// drain lets the request in work be answered, and reads no other. A newcomer may still
// ask what it came for: it could not know that the daemon was about to stop.
func (c *serverChannel) drain() {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.draining = true
	c.nc.SetReadDeadline(c.since.Add(newcomer))
}

func (c *serverChannel) isDraining() bool {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	return c.draining
}

// judge looks at a message. A sound request is handed on, any other is replied to, or
// not when it needs no reply. The results of a large message do not share its memory.
func judge(body []byte) (request, reply []byte) {
	if bytes.Count(body, []byte{','}) > maxItems && items(body) > maxItems {
		return nil, errRequest("too many elements").answer(nil)
	}
	var m map[string]member
	if err := strictjson.Unmarshal(body, &m); err != nil {
		return nil, notAnObject(body).answer(nil)
	}
	id, err := idOf(m)
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
	if len(body) > smallBody {
		return rebuild(m), nil
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

// rebuild is a sound request without the blanks around its members.
func rebuild(m map[string]member) []byte {
	b := []byte(`{"jsonrpc":"2.0"`)
	for _, name := range []string{"id", "method", "params"} {
		if raw := m[name].raw; raw != nil {
			b = append(append(append(append(b, `,"`...), name...), `":`...), raw...)
		}
	}
	return append(b, '}')
}

// items counts the commas outside strings: the members and elements, about.
func items(body []byte) (n int) {
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

func notAnObject(body []byte) *Error {
	switch err := strictjson.Check(body); {
	case err != nil:
		return errParse(err.Error())
	case bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte{'['}):
		return errRequest("batches are not supported: send one request a message")
	}
	return errRequest("a request is an object")
}

// idOf returns the id, nil when there is none.
func idOf(m map[string]member) (strictjson.Raw, *Error) {
	v, ok := m["id"]
	switch id := v.raw; {
	case !ok:
		return nil, nil
	case v.tooLong || len(id) > maxID:
		return nil, errRequest("the id is longer than 128 bytes")
	case id[0] != '"' && id[0] != '-' && (id[0] < '0' || id[0] > '9'):
		return nil, errRequest("the id is neither a string nor a number")
	default:
		return id, nil
	}
}

func checkRequest(m map[string]member) *Error {
	for name := range m {
		switch name {
		case "jsonrpc", "id", "method", "params":
		default:
			return errRequest("a request has only jsonrpc, id, method and params")
		}
	}
	var method string
	if string(m["jsonrpc"].raw) != `"2.0"` {
		return errRequest(`jsonrpc is not "2.0"`)
	}
	if strictjson.Unmarshal(m["method"].raw, &method) != nil || method == "" || len(method) > 64 {
		return errRequest("method is not a string of 1 to 64 bytes")
	}
	switch params := m["params"]; {
	case params.tooLong:
		return errParams("params", "is longer than %d bytes", MaxParams)
	case params.raw != nil && params.raw[0] != '{' && string(params.raw) != "null":
		return errParams("params", "must be an object")
	}
	return nil
}
