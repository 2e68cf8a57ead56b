package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/gorilla/websocket"

	"agentctl/transport/netpoll"
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
	// SetReadLimit bounds a message, bytes; Read gives ErrTooLarge for a longer one. It
	// starts at MaxFrame and is called by the reading goroutine.
	SetReadLimit(n int)
	// OnPing is called, from within Read, when the peer pings (ping true) or answers a
	// ping. It is set before the first Read.
	OnPing(fn func(ping bool))
	// Close sends a close frame, gives the peer a moment to take it, and closes: at most
	// about two seconds. The first call counts; the others wait for it.
	Close(code int, reason string) error
}

// CloseError ends a link with a close frame: the peer's, or this end's own when Err
// tells why it was sent.
type CloseError struct {
	Code   int
	Reason string // printable ASCII
	Err    error
}

func (e *CloseError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("link closed with %d %s: %v", e.Code, e.Reason, e.Err)
	}
	return fmt.Sprintf("link closed: %d %s", e.Code, e.Reason)
}

func (e *CloseError) Unwrap() error { return e.Err }

// CloseCode is the code that ended a link, or 0 when it just broke.
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

// maxPooledBuffer is the largest buffer that goes back to the pool.
const maxPooledBuffer = 16 << 10

// writeBuffers is shared by all links, so that an idle one holds none.
var writeBuffers sync.Pool

// bufferSize is the size of a link's I/O buffers, bytes.
const bufferSize = 1024

// deviceConn is the device's end of a link.
type deviceConn struct {
	ws     *websocket.Conn
	limit  int // of a message; gorilla's own limit would answer 1009, not our code
	closed sync.Once
}

var _ Conn = (*deviceConn)(nil)

func newDeviceConn(ws *websocket.Conn) *deviceConn {
	setUserTimeout(ws.NetConn())
	return &deviceConn{ws: ws, limit: MaxFrame}
}

// setUserTimeout makes the kernel give a dead peer up, as a back-stop of DeadAfter.
func setUserTimeout(c net.Conn) {
	if tcp, ok := tcpConn(c); ok {
		if s := netpoll.NewSocket(tcp); s != nil {
			s.SetUserTimeout(tcpUserTimeout)
		}
	}
}

// tcpConn finds the TCP connection below TLS and listeners' wrappers.
func tcpConn(c net.Conn) (*net.TCPConn, bool) {
	for {
		if t, ok := c.(*net.TCPConn); ok {
			return t, true
		}
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, false
		}
		c = u.NetConn()
	}
}

func (c *deviceConn) SetReadLimit(n int) { c.limit = n }

func (c *deviceConn) Read(fn func([]byte) error) error {
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
		if cap(buf) <= maxPooledBuffer {
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
		if len(buf) > c.limit {
			return ErrTooLarge
		}
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
	case errors.Is(err, websocket.ErrReadLimit): // a length with the highest bit set
		return ErrTooLarge
	case !errors.As(err, &ce):
		return err
	case ce.Code == websocket.CloseAbnormalClosure: // gorilla's word for no close frame at all
		return io.ErrUnexpectedEOF
	}
	return &CloseError{Code: ce.Code, Reason: printableASCII(ce.Text)}
}

func (c *deviceConn) Write(msg []byte) error {
	if err := c.ws.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	return c.ws.WriteMessage(websocket.TextMessage, msg)
}

// Pings and pongs go without a deadline. Its timer would stay behind and wake the process
// once more for each, which is most of what an idle link costs. A peer that takes nothing
// is ended by tcpUserTimeout and by the owner's sweep.
func (c *deviceConn) Ping() error {
	if err := c.ws.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	return c.ws.WriteMessage(websocket.PingMessage, nil) // WriteControl would make a timer and a buffer
}

func (c *deviceConn) SetReadDeadline(t time.Time) error { return c.ws.SetReadDeadline(t) }

func (c *deviceConn) OnPing(fn func(bool)) {
	c.ws.SetPingHandler(func(data string) error {
		fn(true)
		err := c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Time{})
		var ne net.Error
		if errors.Is(err, websocket.ErrCloseSent) || (errors.As(err, &ne) && ne.Timeout()) {
			return nil // the reader finds out by itself
		}
		return err
	})
	c.ws.SetPongHandler(func(string) error { fn(false); return nil })
}

func (c *deviceConn) Close(code int, reason string) error {
	err := net.ErrClosed
	c.closed.Do(func() {
		e := c.ws.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(code, reason), time.Now().Add(time.Second))
		if e == nil || errors.Is(e, websocket.ErrCloseSent) { // the library's own answer, such as 1002
			linger(c.ws.NetConn(), c.ws.NetConn())
		}
		err = c.ws.Close()
	})
	return err
}

// Bounds of what Close still takes from a peer.
const (
	lingerTimeout  = time.Second
	maxLingerBytes = 1 << 20
)

// linger sends FIN and waits until the peer has closed too, reading from in. Closing a
// socket with unread input resets it, and the reset can overtake the close frame that
// says why.
func linger(conn, in net.Conn) {
	if w, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
	stop := time.AfterFunc(lingerTimeout, func() { _ = conn.Close() })
	defer stop.Stop()
	_, _ = io.CopyN(io.Discard, in, maxLingerBytes)
}
