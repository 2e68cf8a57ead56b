package link

import (
	"net"
	"os"
	"sync"
	"time"
)

// Pipe returns the two ends of an in-memory link that speaks v2. It uses channels and
// timers only, so it works inside a testing/synctest bubble. Each direction buffers a few
// messages.
func Pipe() (device, relay Conn) { return newPipe(Subprotocol) }

// Pipe21 is Pipe for a link that speaks v2.1.
func Pipe21() (device, relay Conn) { return newPipe(Subprotocol21) }

func newPipe(subprotocol string) (device, relay Conn) {
	const buffered = 16
	toRelay, toDevice := make(chan pipeMsg, buffered), make(chan pipeMsg, buffered)
	closing := &pipeClose{done: make(chan struct{})}
	newEnd := func(in <-chan pipeMsg, out chan<- pipeMsg) *pipeConn {
		return &pipeConn{in: in, out: out, closing: closing, subprotocol: subprotocol, limit: MaxFrame, deadlineChanged: make(chan struct{}, 1)}
	}
	return newEnd(toDevice, toRelay), newEnd(toRelay, toDevice)
}

// pipeMsg is one frame, with an opcode of RFC 6455: opText, opPing or opPong.
type pipeMsg struct {
	op   byte
	data []byte
}

// pipeClose is the close handshake of both ends.
type pipeClose struct {
	once sync.Once
	done chan struct{} // closed after the fields below were set
	by   *pipeConn     // the end that closed
	err  *CloseError   // what the other end sees
}

// pipeConn is one end. Like a socket it reports a passed deadline as a timeout, clears the
// bytes that a handler saw, and delivers what was sent before a close.
type pipeConn struct {
	in              <-chan pipeMsg
	out             chan<- pipeMsg
	closing         *pipeClose
	onPing          func(bool, []byte)
	subprotocol     string
	limit           int           // of a message; owned by the reader
	deadlineChanged chan struct{} // of capacity 1

	mu       sync.Mutex // protects deadline
	deadline time.Time
}

var _ Conn = (*pipeConn)(nil)

// Read returns the next text message and answers pings before it.
func (p *pipeConn) Read(fn func([]byte) error) error {
	for {
		m, err := p.receive()
		switch {
		case err != nil:
			return err
		case m.op != opText:
			if p.onPing != nil {
				p.onPing(m.op == opPing, m.data)
			}
			if m.op == opPing {
				_ = p.send(pipeMsg{op: opPong, data: m.data})
			}
		case len(m.data) > p.limit:
			return ErrTooLarge
		default:
			err := fn(m.data)
			clear(m.data) // a handler that keeps the bytes fails here as it would with a socket
			return err
		}
	}
}

// receive waits for a message. What the peer sent before it closed is still received.
func (p *pipeConn) receive() (pipeMsg, error) {
	for {
		p.mu.Lock()
		deadline := p.deadline
		p.mu.Unlock()
		var timeout <-chan time.Time
		if !deadline.IsZero() {
			timeout = time.After(time.Until(deadline))
		}
		select {
		case m := <-p.in:
			return m, nil
		case <-p.closing.done:
			if p.closing.by != p {
				select {
				case m := <-p.in:
					return m, nil
				default:
				}
			}
			return pipeMsg{}, p.closeErr()
		case <-p.deadlineChanged:
		case <-timeout:
			return pipeMsg{}, os.ErrDeadlineExceeded
		}
	}
}

// closeErr is what this end of a closed pipe sees.
func (p *pipeConn) closeErr() error {
	if p.closing.by == p {
		return net.ErrClosed
	}
	return p.closing.err
}

// send waits for space in the channel, at most writeTimeout: a peer that does not read fails
// the write as it would on a socket.
func (p *pipeConn) send(m pipeMsg) error {
	select {
	case <-p.closing.done: // checked first: select would choose at random
		return p.closeErr()
	default:
	}
	select {
	case p.out <- m:
		return nil
	case <-p.closing.done:
		return p.closeErr()
	case <-time.After(writeTimeout):
		return os.ErrDeadlineExceeded
	}
}

// Write sends a copy, since the receiver clears its bytes.
func (p *pipeConn) Write(msg []byte) error {
	return p.send(pipeMsg{op: opText, data: append([]byte(nil), msg...)})
}

// Ping, OnPing, SetReadLimit and Subprotocol are as Conn says; there is no size limit for
// writing.
func (p *pipeConn) Ping(payload []byte) error {
	return p.send(pipeMsg{op: opPing, data: append([]byte(nil), payload...)})
}
func (p *pipeConn) OnPing(fn func(bool, []byte)) { p.onPing = fn }
func (p *pipeConn) SetReadLimit(n int)           { p.limit = n }
func (p *pipeConn) Subprotocol() string          { return p.subprotocol }

// SetReadDeadline also applies to a Read that is waiting.
func (p *pipeConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	p.deadline = t
	p.mu.Unlock()
	select {
	case p.deadlineChanged <- struct{}{}:
	default:
	}
	return nil
}

// Close closes both ends at once; the first code wins.
func (p *pipeConn) Close(code int, reason string) error {
	p.closing.once.Do(func() {
		p.closing.by, p.closing.err = p, &CloseError{Code: code, Reason: reason}
		close(p.closing.done)
	})
	return nil
}
