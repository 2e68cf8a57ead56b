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
// goroutine at a time; Close may come from any. There are three: deviceConn and relayConn
// are the ends of a WebSocket, pipeConn is in memory.
type Conn interface {
	// Read calls fn with the next message; the bytes are fn's only until it returns.
	// The error is a *CloseError when the peer closed.
	Read(fn func(msg []byte) error) error
	Write(msg []byte) error
	// Ping sends a ping with a payload of at most 125 bytes, which the pong repeats.
	Ping(payload []byte) error
	// SetReadDeadline bounds the wait of Read; the zero time removes the bound.
	SetReadDeadline(t time.Time) error
	// SetReadLimit bounds a message, bytes; Read returns ErrTooLarge for a longer one. It
	// starts at MaxFrame and is called by the reading goroutine.
	SetReadLimit(n int)
	// OnPing sets the function that Read calls when the peer pings (ping true) or answers
	// a ping. It is called before the first Read. The payload is fn's only until it returns.
	OnPing(fn func(ping bool, payload []byte))
	// Subprotocol is the one that both ends agreed on: Subprotocol or Subprotocol21.
	Subprotocol() string
	// Close sends a close frame, waits until the peer has closed too, and closes: at most
	// about two seconds. Calls after the first one wait for it and do nothing else.
	Close(code int, reason string) error
}

// CloseError ends a link with a close frame: the peer's, or this end's own, when Err is
// the reason why it was sent.
type CloseError struct {
	Code   int
	Reason string // printable ASCII
	Err    error
}

// Error includes the code, for the operator of a board.
func (e *CloseError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("link closed with %d %s: %v", e.Code, e.Reason, e.Err)
	}
	return fmt.Sprintf("link closed: %d %s", e.Code, e.Reason)
}

// Unwrap returns the reason of this end's own close.
func (e *CloseError) Unwrap() error { return e.Err }

// CloseCode is the code that ended a link, or 0 when it broke without a close frame.
func CloseCode(err error) int {
	var c *CloseError
	if errors.As(err, &c) {
		return c.Code
	}
	return 0
}

// ErrNotText is a message that is not text.
var ErrNotText = fmt.Errorf("%w: not a text message", ErrBadFrame)

// Pools of buffers. A link holds a buffer only while it reads or writes a message, so that
// an idle one holds none.
var (
	readBuffers  = sync.Pool{New: func() any { return newBuffer(2048) }}       // *[]byte
	frameBuffers = sync.Pool{New: func() any { return newBuffer(bufferSize) }} // *[]byte, of relayConn
	writeBuffers sync.Pool                                                     // of the WebSocket library
)

// Sizes of buffers, bytes: of a link's I/O buffers, and of the largest one that returns to
// its pool.
const (
	bufferSize      = 1024
	maxPooledBuffer = 16 << 10
)

// newBuffer makes an empty buffer. The pools hold pointers, because a slice in an interface
// would be an allocation each time.
func newBuffer(size int) *[]byte { b := make([]byte, 0, size); return &b }

// recycle returns bp to its pool, with b, which may have grown out of *bp.
func recycle(pool *sync.Pool, bp *[]byte, b []byte) {
	if cap(b) <= maxPooledBuffer {
		*bp = b[:0]
		pool.Put(bp)
	}
}

// deviceConn is the device's end of a link, over the WebSocket library.
type deviceConn struct {
	ws     *websocket.Conn
	limit  int // of a message; the library's own limit would answer 1009, not 4413
	closed sync.Once
}

var _ Conn = (*deviceConn)(nil)

func newDeviceConn(ws *websocket.Conn) *deviceConn {
	setUserTimeout(ws.NetConn())
	return &deviceConn{ws: ws, limit: MaxFrame}
}

// setUserTimeout makes the kernel end a connection whose peer is dead, in addition to
// IdleTimeout.
func setUserTimeout(c net.Conn) {
	if s := netpoll.NewSocket(netpoll.Lowest(c)); s != nil {
		s.SetUserTimeout(tcpUserTimeout)
	}
}

// SetReadLimit bounds the messages that Read accepts.
func (c *deviceConn) SetReadLimit(n int) { c.limit = n }

// Read collects the fragments of one message in a pooled buffer and checks the limit as it
// grows. Control frames are handled by the library meanwhile.
func (c *deviceConn) Read(fn func([]byte) error) error {
	typ, r, err := c.ws.NextReader()
	if err != nil {
		return convertError(err)
	}
	if typ != websocket.TextMessage {
		return ErrNotText
	}
	bp := readBuffers.Get().(*[]byte)
	buf := *bp
	defer func() { recycle(&readBuffers, bp, buf) }()
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case len(buf) > c.limit:
			return ErrTooLarge
		case err == io.EOF:
			return fn(buf)
		case err != nil:
			return convertError(err)
		}
	}
}

// convertError turns an error of the WebSocket library into one of this package.
func convertError(err error) error {
	var ce *websocket.CloseError
	switch {
	case errors.Is(err, websocket.ErrReadLimit): // a length with the highest bit set
		return ErrTooLarge
	case !errors.As(err, &ce):
		return err
	case ce.Code == websocket.CloseAbnormalClosure: // the library's code for a missing close frame
		return io.ErrUnexpectedEOF
	}
	return &CloseError{Code: ce.Code, Reason: printableASCII(ce.Text)}
}

// Write writes one text message within writeTimeout.
func (c *deviceConn) Write(msg []byte) error {
	_ = c.ws.SetWriteDeadline(time.Now().Add(writeTimeout)) // stores it only
	return c.ws.WriteMessage(websocket.TextMessage, msg)
}

// Ping has no write deadline, and neither have pongs: each deadline leaves a timer behind
// that wakes the process once more, which is most of what an idle link costs. A peer that
// reads nothing is detected by tcpUserTimeout and IdleTimeout. WriteControl would make a
// timer and a buffer as well.
func (c *deviceConn) Ping(payload []byte) error {
	_ = c.ws.SetWriteDeadline(time.Time{})
	return c.ws.WriteMessage(websocket.PingMessage, payload)
}

// Subprotocol is what the relay chose of those that Dial offered.
func (c *deviceConn) Subprotocol() string { return c.ws.Subprotocol() }

// SetReadDeadline may be called by any goroutine.
func (c *deviceConn) SetReadDeadline(t time.Time) error { return c.ws.SetReadDeadline(t) }

// OnPing replaces the library's handlers. A pong that cannot be written because the
// connection is closing is not an error of the reader: the close frame says why.
func (c *deviceConn) OnPing(fn func(bool, []byte)) {
	c.ws.SetPingHandler(func(data string) error {
		fn(true, []byte(data))
		err := c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Time{})
		var ne net.Error
		if errors.Is(err, websocket.ErrCloseSent) || (errors.As(err, &ne) && ne.Timeout()) {
			return nil // the next read reports the end
		}
		return err
	})
	c.ws.SetPongHandler(func(data string) error { fn(false, []byte(data)); return nil })
}

// Close sends a close frame, waits for the peer and closes, see linger.
func (c *deviceConn) Close(code int, reason string) error {
	err := net.ErrClosed
	c.closed.Do(func() {
		closeFrame := websocket.FormatCloseMessage(code, reason)
		e := c.ws.WriteControl(websocket.CloseMessage, closeFrame, time.Now().Add(closeTimeout))
		if e == nil || errors.Is(e, websocket.ErrCloseSent) { // the library has sent its own, such as 1002
			linger(c.ws.NetConn(), c.ws.NetConn())
		}
		err = c.ws.Close()
	})
	return err
}

// Bounds of Close: for writing the close frame, for the peer to close too, and of what is
// read until then, bytes.
const (
	closeTimeout   = time.Second
	lingerTimeout  = time.Second
	maxLingerBytes = 1 << 20
)

// linger sends FIN and waits until the peer has closed too, discarding what it reads from
// in. Closing a socket with unread input would reset the connection, and the reset can
// overtake the close frame that says why.
func linger(conn, in net.Conn) {
	if w, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
	stop := time.AfterFunc(lingerTimeout, func() { _ = conn.Close() })
	defer stop.Stop()
	_, _ = io.CopyN(io.Discard, in, maxLingerBytes)
}
