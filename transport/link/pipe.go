package link

import (
	"net"
	"sync"
	"time"
)

// Pipe returns the two ends of an in-memory link. Messages are handed over directly, so
// it works inside a testing/synctest bubble.
func Pipe() (device, relay Conn) {
	a2b, b2a := make(chan pipeMsg, 16), make(chan pipeMsg, 16)
	shared := &pipeShared{done: make(chan struct{})}
	return &pipeConn{in: b2a, out: a2b, shared: shared, limit: MaxFrame, wake: make(chan struct{}, 1)},
		&pipeConn{in: a2b, out: b2a, shared: shared, limit: MaxFrame, wake: make(chan struct{}, 1)}
}

type pipeMsg struct {
	kind byte // 't' text, 'p' ping, 'o' pong
	data []byte
}

type pipeShared struct {
	once sync.Once
	done chan struct{}
	by   *pipeConn // who closed; set before done
	err  *CloseError
}

type pipeConn struct {
	in     <-chan pipeMsg
	out    chan<- pipeMsg
	shared *pipeShared
	onPing func(bool)
	limit  int           // of the reader
	wake   chan struct{} // holds a token when the deadline has changed

	mu       sync.Mutex // protects deadline
	deadline time.Time
}

var _ Conn = (*pipeConn)(nil)

// pipeTimeout is the net.Error of a deadline.
type pipeTimeout struct{}

func (pipeTimeout) Error() string   { return "link: deadline passed" }
func (pipeTimeout) Timeout() bool   { return true }
func (pipeTimeout) Temporary() bool { return true }

var _ net.Error = pipeTimeout{}

func (p *pipeConn) Read(fn func([]byte) error) error {
	for {
		m, err := p.next()
		switch {
		case err != nil:
			return err
		case m.kind == 'p':
			p.pinged(true)
			_ = p.send(pipeMsg{kind: 'o'})
		case m.kind == 'o':
			p.pinged(false)
		case len(m.data) > p.limit:
			return ErrTooLarge
		default:
			err := fn(m.data)
			clear(m.data) // as a socket's buffer is used again
			return err
		}
	}
}

func (p *pipeConn) pinged(ping bool) {
	if p.onPing != nil {
		p.onPing(ping)
	}
}

// next waits for a message; what was sent before the peer's close still comes.
func (p *pipeConn) next() (pipeMsg, error) {
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
		case <-p.shared.done:
			if p.shared.by != p {
				select {
				case m := <-p.in:
					return m, nil
				default:
				}
			}
			return pipeMsg{}, p.ended()
		case <-p.wake: // the deadline changed
		case <-timeout:
			return pipeMsg{}, pipeTimeout{}
		}
	}
}

// ended is what an end of a closed pipe sees: its own closing, or the peer's code.
func (p *pipeConn) ended() error {
	if p.shared.by == p {
		return net.ErrClosed
	}
	return p.shared.err
}

func (p *pipeConn) send(m pipeMsg) error {
	select {
	case <-p.shared.done:
		return p.ended()
	default:
	}
	t := time.NewTimer(writeTimeout)
	defer t.Stop()
	select {
	case p.out <- m:
		return nil
	case <-p.shared.done:
		return p.ended()
	case <-t.C:
		return pipeTimeout{}
	}
}

func (p *pipeConn) Write(msg []byte) error {
	return p.send(pipeMsg{kind: 't', data: append([]byte(nil), msg...)})
}

func (p *pipeConn) Ping() error          { return p.send(pipeMsg{kind: 'p'}) }
func (p *pipeConn) OnPing(fn func(bool)) { p.onPing = fn }
func (p *pipeConn) SetReadLimit(n int)   { p.limit = n }

func (p *pipeConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	p.deadline = t
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

func (p *pipeConn) Close(code int, reason string) error {
	p.shared.once.Do(func() {
		p.shared.by, p.shared.err = p, &CloseError{Code: code, Reason: reason}
		close(p.shared.done)
	})
	return nil
}
