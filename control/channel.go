package control

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"agentctl/transport/strictjson"

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
	large chan struct{} // held by the one large message there may be
	since time.Time     // when the client came
	hello bool          // a good hello was said; only touched by who has the turn

	turn      chan struct{} // a token while no request is in work
	holdsMore bool          // the request in work holds large
	afterTurn []func()      // run when the request in work is answered

	dmu      sync.Mutex // protects the fields below
	draining bool
}

func newServerChannel(w *wire, large chan struct{}) *serverChannel {
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
		body, err := c.read()
		if err != nil {
			c.farewell(err)
			return nil, io.EOF
		}
		pass, reply := judge(body)
		if pass {
			return body, nil
		}
		c.releaseLarge()
		if reply != nil {
			if err := c.write(frame(reply)); err != nil {
				return nil, io.EOF
			}
		}
	}
}

// read reads one message.
func (c *serverChannel) read() ([]byte, error) {
	var byHello time.Time
	if !c.hello {
		byHello = c.since.Add(helloTimeout)
	}
	c.readBy(byHello)
	if err := c.in.wait(); err != nil {
		return nil, err
	}
	by := time.Now().Add(frameTimeout)
	if !c.hello && byHello.Before(by) {
		by = byHello
	}
	c.readBy(by)
	n, err := c.in.header()
	if err != nil {
		return nil, err
	}
	if n > smallBody {
		if err := c.holdLarge(by); err != nil {
			return nil, err
		}
	}
	body, err := c.in.body(n)
	if err != nil {
		c.releaseLarge()
	}
	return body, err
}

// holdLarge waits for the right to read a large message: all clients together may
// have one in memory.
func (c *serverChannel) holdLarge(by time.Time) error {
	timer := time.NewTimer(time.Until(by))
	defer timer.Stop()
	select {
	case c.large <- struct{}{}:
		c.holdsMore = true
		return nil
	case <-c.closed:
		return io.EOF
	case <-timer.C:
		return os.ErrDeadlineExceeded
	}
}

func (c *serverChannel) releaseLarge() {
	if c.holdsMore {
		c.holdsMore = false
		<-c.large
	}
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

// Send writes the answer to the request in work, which ends its turn.
func (c *serverChannel) Send(body []byte) error {
	err := c.write(frame(body))
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
	c.releaseLarge()
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

// drain lets the request in work be answered, and reads no other.
func (c *serverChannel) drain() {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.draining = true
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

func (c *serverChannel) isDraining() bool {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	return c.draining
}

// judge looks at a message. One that passes is a sound request. For any other there
// is a reply, or nil when it needs none.
func judge(body []byte) (pass bool, reply []byte) {
	if bytes.Count(body, []byte{','}) > maxItems && items(body) > maxItems {
		return false, errRequest("too many elements").answer(nil)
	}
	var m map[string]strictjson.Raw
	if err := strictjson.Unmarshal(body, &m); err != nil {
		return false, notAnObject(body).answer(nil)
	}
	id, err := idOf(m)
	if err != nil {
		return false, err.answer(nil)
	}
	if _, isMethod := m["method"]; !isMethod && (m["result"] != nil || m["error"] != nil) {
		return false, nil // an answer: nothing was asked, and answering answers would not end
	}
	if err := checkRequest(m); err != nil {
		if id == nil && err.Code == CodeInvalidParams {
			return false, nil // a notification is never answered
		}
		return false, err.answer(id)
	}
	return true, nil
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
func idOf(m map[string]strictjson.Raw) (strictjson.Raw, *Error) {
	id, ok := m["id"]
	switch {
	case !ok:
		return nil, nil
	case len(id) > maxID:
		return nil, errRequest("the id is longer than 128 bytes")
	case id[0] != '"' && id[0] != '-' && (id[0] < '0' || id[0] > '9'):
		return nil, errRequest("the id is neither a string nor a number")
	}
	return id, nil
}

func checkRequest(m map[string]strictjson.Raw) *Error {
	for name := range m {
		switch name {
		case "jsonrpc", "id", "method", "params":
		default:
			return errRequest("a request has only jsonrpc, id, method and params")
		}
	}
	var method string
	if string(m["jsonrpc"]) != `"2.0"` {
		return errRequest(`jsonrpc is not "2.0"`)
	}
	if strictjson.Unmarshal(m["method"], &method) != nil || method == "" || len(method) > 64 {
		return errRequest("method is not a string of 1 to 64 bytes")
	}
	switch params := m["params"]; {
	case len(params) > MaxParams:
		return errParams("params", "is longer than %d bytes", MaxParams)
	case len(params) > 0 && params[0] != '{' && string(params) != "null":
		return errParams("params", "must be an object")
	}
	return nil
}
