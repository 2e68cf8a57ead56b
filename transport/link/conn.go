package link

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"golang.org/x/sys/unix"
)

// Conn carries whole text messages. One goroutine reads; writes and pings come from one
// goroutine at a time; Close may come from any.
type Conn interface {
	// Read calls fn with the next message; the bytes are fn's only until it returns.
	// The error is a *CloseError when the peer closed.
	Read(fn func(msg []byte) error) error
	Write(msg []byte) error
	Ping() error
	// SetReadDeadline bounds the wait of Read; the zero time lifts it.
	SetReadDeadline(t time.Time) error
	// OnPing is called, from within Read, when the peer pings (ping true) or answers a
	// ping. It is set before the first Read.
	OnPing(fn func(ping bool))
	// Close sends a close frame as far as that is possible at once, and closes.
	Close(code int, reason string) error
}

// CloseError is the peer's close frame.
type CloseError struct {
	Code   int
	Reason string
}

func (e *CloseError) Error() string { return fmt.Sprintf("link closed: %d %s", e.Code, e.Reason) }

// CloseCode is the code that ended a link: the peer's, or 0 when it just broke.
func CloseCode(err error) int {
	var c *CloseError
	if errors.As(err, &c) {
		return c.Code
	}
	return 0
}

// ErrNotText is a message that is not text.
var ErrNotText = fmt.Errorf("%w: not a text message", ErrBadFrame)

// readBuffers hold a message while it is handled. An idle link holds none.
var readBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// keepBuffer is the largest buffer that goes back to the pool.
const keepBuffer = 16 << 10

// writeBuffers is shared by all links, so that an idle one holds none.
var writeBuffers sync.Pool

// bufferSize is the size of a link's I/O buffers, bytes.
const bufferSize = 1024

// Upgrader turns requests into links; the name keeps the WebSocket library in this room.
type Upgrader = websocket.Upgrader

// NewUpgrader makes the relay's upgrader. checkOrigin decides about requests with an
// Origin header; devices send none.
func NewUpgrader(checkOrigin func(*http.Request) bool) *Upgrader {
	return &websocket.Upgrader{
		HandshakeTimeout:  AuthTimeout,
		ReadBufferSize:    bufferSize,
		WriteBufferSize:   bufferSize,
		WriteBufferPool:   &writeBuffers,
		Subprotocols:      []string{Subprotocol},
		CheckOrigin:       checkOrigin,
		EnableCompression: false, // SetReadLimit does not bound what comes out of inflate
	}
}

// Upgrade turns a request into a Conn, or answers it with an error.
func Upgrade(u *Upgrader, w http.ResponseWriter, r *http.Request) (Conn, error) {
	ws, err := u.Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	if ws.Subprotocol() != Subprotocol {
		c := newWSConn(ws)
		_ = c.Close(CloseUpgradeRequired, "upgrade_required")
		return nil, errors.New("link: the client did not offer subprotocol " + Subprotocol)
	}
	return newWSConn(ws), nil
}

type wsConn struct {
	ws *websocket.Conn
}

func newWSConn(ws *websocket.Conn) *wsConn {
	ws.SetReadLimit(MaxAnnounce)
	setUserTimeout(ws.NetConn())
	return &wsConn{ws: ws}
}

// setUserTimeout makes the kernel give a dead peer up, as a back-stop of DeadAfter.
func setUserTimeout(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if u, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = u.NetConn()
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	if raw, err := tcp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(tcpUserTimeout.Milliseconds()))
		})
	}
}

func (c *wsConn) Read(fn func([]byte) error) error {
	typ, r, err := c.ws.NextReader()
	if err != nil {
		return wsError(err)
	}
	if typ != websocket.TextMessage {
		return ErrNotText
	}
	bp := readBuffers.Get().(*[]byte)
	buf := (*bp)[:0]
	defer func() {
		if cap(buf) <= keepBuffer {
			*bp = buf[:0]
			readBuffers.Put(bp)
		}
	}()
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err == io.EOF {
			return fn(buf)
		}
		if err != nil {
			return wsError(err)
		}
	}
}

func wsError(err error) error {
	var ce *websocket.CloseError
	switch {
	case errors.As(err, &ce):
		return &CloseError{Code: ce.Code, Reason: ce.Text}
	case errors.Is(err, websocket.ErrReadLimit):
		return ErrTooLarge
	}
	return err
}

func (c *wsConn) Write(msg []byte) error {
	if err := c.ws.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	return c.ws.WriteMessage(websocket.TextMessage, msg)
}

func (c *wsConn) Ping() error {
	return c.ws.WriteControl(websocket.PingMessage, nil, time.Now().Add(writeTimeout))
}

func (c *wsConn) SetReadDeadline(t time.Time) error { return c.ws.SetReadDeadline(t) }

func (c *wsConn) OnPing(fn func(bool)) {
	c.ws.SetPingHandler(func(data string) error {
		fn(true)
		err := c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Now().Add(time.Second))
		var ne net.Error
		if errors.Is(err, websocket.ErrCloseSent) || (errors.As(err, &ne) && ne.Timeout()) {
			return nil // the reader finds out by itself
		}
		return err
	})
	c.ws.SetPongHandler(func(string) error { fn(false); return nil })
}

func (c *wsConn) Close(code int, reason string) error {
	_ = c.ws.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(code, reason), time.Now().Add(time.Second))
	return c.ws.Close()
}

// Pipe returns the two ends of an in-memory link. Messages are handed over directly, so
// it works inside a testing/synctest bubble.
func Pipe() (device, relay Conn) {
	a2b, b2a := make(chan pipeMsg, 16), make(chan pipeMsg, 16)
	done := make(chan struct{})
	shared := &pipeShared{done: done}
	return &pipeConn{in: b2a, out: a2b, shared: shared}, &pipeConn{in: a2b, out: b2a, shared: shared}
}

type pipeMsg struct {
	kind byte // 't' text, 'p' ping, 'o' pong
	data []byte
}

type pipeShared struct {
	once sync.Once
	done chan struct{}
	err  *CloseError
}

type pipeConn struct {
	in     <-chan pipeMsg
	out    chan<- pipeMsg
	shared *pipeShared
	onPing func(bool)

	mu       sync.Mutex // protects deadline and wake
	deadline time.Time
	wake     chan struct{}
}

type pipeTimeout struct{}

func (pipeTimeout) Error() string   { return "link: read deadline passed" }
func (pipeTimeout) Timeout() bool   { return true }
func (pipeTimeout) Temporary() bool { return true }

func (p *pipeConn) Read(fn func([]byte) error) error {
	for {
		p.mu.Lock()
		var timeout <-chan time.Time
		if !p.deadline.IsZero() {
			timeout = time.After(time.Until(p.deadline))
		}
		if p.wake == nil {
			p.wake = make(chan struct{}, 1)
		}
		wake := p.wake
		p.mu.Unlock()
		select {
		case m := <-p.in:
			switch m.kind {
			case 'p':
				if p.onPing != nil {
					p.onPing(true)
				}
				_ = p.send(pipeMsg{kind: 'o'})
				continue
			case 'o':
				if p.onPing != nil {
					p.onPing(false)
				}
				continue
			}
			if len(m.data) > MaxAnnounce {
				return ErrTooLarge
			}
			return fn(m.data)
		case <-p.shared.done:
			select { // what was sent before the close is still read
			case m := <-p.in:
				if m.kind == 't' {
					return fn(m.data)
				}
			default:
			}
			return p.shared.err
		case <-wake: // the deadline changed
		case <-timeout:
			return pipeTimeout{}
		}
	}
}

func (p *pipeConn) send(m pipeMsg) error {
	select {
	case <-p.shared.done:
		return p.shared.err
	default:
	}
	t := time.NewTimer(writeTimeout)
	defer t.Stop()
	select {
	case p.out <- m:
		return nil
	case <-p.shared.done:
		return p.shared.err
	case <-t.C:
		return pipeTimeout{}
	}
}

func (p *pipeConn) Write(msg []byte) error {
	return p.send(pipeMsg{kind: 't', data: append([]byte(nil), msg...)})
}
func (p *pipeConn) Ping() error          { return p.send(pipeMsg{kind: 'p'}) }
func (p *pipeConn) OnPing(fn func(bool)) { p.onPing = fn }

func (p *pipeConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	p.deadline = t
	wake := p.wake
	p.mu.Unlock()
	if wake != nil {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	return nil
}

func (p *pipeConn) Close(code int, reason string) error {
	p.shared.once.Do(func() {
		p.shared.err = &CloseError{Code: code, Reason: reason}
		close(p.shared.done)
	})
	return nil
}
