package link

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/gorilla/websocket"

	"agentctl/transport/netpoll"
)

// Upgrader turns requests into links; the name keeps the WebSocket library in this room.
type Upgrader = websocket.Upgrader

// NewUpgrader makes the relay's upgrader. checkOrigin decides about requests with an
// Origin header; devices send none.
func NewUpgrader(checkOrigin func(*http.Request) bool) *Upgrader {
	return &websocket.Upgrader{
		HandshakeTimeout:  AuthTimeout,
		WriteBufferSize:   bufferSize,
		WriteBufferPool:   &writeBuffers,
		Subprotocols:      []string{Subprotocol},
		CheckOrigin:       checkOrigin,
		EnableCompression: false, // what comes out of inflate has no bound
	}
}

// Upgrade turns a request into a Conn, or answers it with an error.
func Upgrade(u *Upgrader, w http.ResponseWriter, r *http.Request) (Conn, error) {
	ws, err := u.Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	c := newRelayConn(ws.NetConn())
	if ws.Subprotocol() != Subprotocol {
		_ = c.Close(CloseUpgradeRequired, "upgrade_required")
		return nil, errors.New("link: the client did not offer subprotocol " + Subprotocol)
	}
	return c, nil
}

// relayConn is the relay's end of a link. Of the WebSocket library it uses the opening
// handshake: it speaks the frames of RFC 6455 §5 itself, because a relay has thousands of
// these, most of them silent. While nothing arrives it holds no buffer, and once it rests
// with a Poller no goroutine waits for it either: reads then never wait, and what came of
// a frame is kept until more comes.
type relayConn struct {
	conn   net.Conn        // TLS or plain
	poll   *netpoll.Reader // reads the socket below nc; nil: reads wait
	limit  int             // of a message
	onPing func(ping bool)

	// Of the reading goroutine only.
	buf       *[]byte // what was read, in a buffer of readBuffers; nil: nothing
	off       int     // how much of it has been understood
	message   []byte  // the message whose last fragment has not come
	fragments int     // its fragments so far

	closed         sync.Once
	closing        atomic.Bool
	writeMu        sync.Mutex // one frame at a time; protects the fields below
	closeSent      bool       // a close frame was written
	closeInitiated bool       // and it was not the answer to the peer's
}

var _ Conn = (*relayConn)(nil)

// newRelayConn takes an upgraded connection.
func newRelayConn(nc net.Conn) *relayConn {
	setUserTimeout(nc)
	return &relayConn{conn: nc, limit: MaxFrame}
}

func (c *relayConn) SetReadLimit(n int)                { c.limit = n }
func (c *relayConn) OnPing(fn func(ping bool))         { c.onPing = fn }
func (c *relayConn) SetReadDeadline(t time.Time) error { return c.conn.SetReadDeadline(t) }

// Opcodes (RFC 6455 §5.2).
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xA
)

const (
	maxControlPayload = 125     // bytes of a control frame's payload
	maxFragments      = 1 << 12 // fragments of a message
)

// frameHeader is the head of one frame.
type frameHeader struct {
	fin    bool
	op     byte
	length uint64
	mask   [4]byte
	size   int // of the head itself, bytes; 0: it has not come whole
}

// protocolError is a breach of RFC 6455, answered with 1002.
type protocolError string

func (v protocolError) Error() string { return "link: websocket: " + string(v) }

// parseHeader reads a head as a client must send it.
func parseHeader(b []byte) (f frameHeader, err error) {
	if len(b) < 2 {
		return f, nil
	}
	f.fin, f.op, f.length = b[0]&0x80 != 0, b[0]&0x0f, uint64(b[1]&0x7f)
	switch {
	case b[0]&0x70 != 0:
		return f, protocolError("reserved bits are set")
	case b[1]&0x80 == 0:
		return f, protocolError("a frame is not masked")
	case f.op > opBinary && f.op < opClose, f.op > opPong:
		return f, protocolError("an unknown opcode")
	case f.op >= opClose && (!f.fin || f.length > maxControlPayload):
		return f, protocolError("a long or fragmented control frame")
	}
	n := 2
	switch f.length {
	case 126:
		if len(b) < n+2 {
			return f, nil
		}
		f.length, n = uint64(binary.BigEndian.Uint16(b[n:])), n+2
	case 127:
		if len(b) < n+8 {
			return f, nil
		}
		f.length, n = binary.BigEndian.Uint64(b[n:]), n+8
		if f.length>>63 != 0 { // RFC 6455 §5.2: never set
			return f, ErrTooLarge
		}
	}
	if len(b) < n+4 {
		return f, nil
	}
	f.mask, f.size = [4]byte(b[n:]), n+4
	return f, nil
}

// unmask undoes the client's masking, in place.
func unmask(b []byte, mask [4]byte) {
	word := uint64(binary.LittleEndian.Uint32(mask[:]))
	word |= word << 32
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^word)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= mask[i&3]
	}
}

// Read calls fn with the next message. A connection at rest gives netpoll.ErrWouldBlock
// instead of waiting for one.
func (c *relayConn) Read(fn func([]byte) error) error {
	for {
		done, err := c.nextMessage(fn)
		if err == nil && !done {
			err = c.readMore()
		}
		if done || err != nil {
			return c.ended(err)
		}
	}
}

// ended lets the buffer go when nothing waits in it, and tells a breach to the peer.
func (c *relayConn) ended(err error) error {
	if err == nil {
		return nil
	}
	if c.buf != nil && (c.off == len(*c.buf) || !errors.Is(err, netpoll.ErrWouldBlock)) {
		if cap(*c.buf) <= maxPooledBuffer {
			*c.buf = (*c.buf)[:0]
			readBuffers.Put(c.buf)
		}
		c.buf, c.off = nil, 0
	}
	var v protocolError
	if errors.As(err, &v) {
		c.writeClose(websocket.CloseProtocolError, string(v), true)
	}
	return err
}

// readMore reads once.
func (c *relayConn) readMore() error {
	if c.buf == nil {
		c.buf = readBuffers.Get().(*[]byte)
	}
	b := *c.buf
	switch {
	case c.off == len(b):
		b, c.off = b[:0], 0
	case len(b) == cap(b) && c.off > 0:
		b, c.off = b[:copy(b, b[c.off:])], 0
	case len(b) == cap(b):
		b = append(b, 0)[:len(b)] // nextMessage has refused what is over the limit
	}
	var n int
	var err error
	if _, secure := c.conn.(*tls.Conn); c.poll != nil && !secure {
		n, err = c.poll.Read(b[len(b):cap(b)])
	} else {
		n, err = c.conn.Read(b[len(b):cap(b)])
	}
	*c.buf = b[:len(b)+n]
	if err == io.EOF {
		return io.ErrUnexpectedEOF // no close frame came
	}
	if n > 0 {
		return nil // the error comes again
	}
	return err
}

// nextMessage handles the frames that have come, up to the end of a message: done, and fn has
// had it.
func (c *relayConn) nextMessage(fn func([]byte) error) (done bool, err error) {
	for c.buf != nil {
		b := (*c.buf)[c.off:]
		f, err := parseHeader(b)
		if err != nil || f.size == 0 {
			return false, err
		}
		if f.op < opClose {
			if err := c.checkDataFrame(&f); err != nil {
				return false, err
			}
		}
		if uint64(len(b)-f.size) < f.length {
			return false, nil
		}
		end := f.size + int(f.length)
		payload := b[f.size:end:end] // without room for what fn might append: there the next frame lies
		unmask(payload, f.mask)
		c.off += end
		switch {
		case f.op >= opClose:
			if err := c.handleControl(f.op, payload); err != nil {
				return false, err
			}
		case f.fin && f.op == opText:
			return true, fn(payload)
		default:
			c.message = append(c.message, payload...)
			c.fragments++
			if f.fin {
				whole := c.message
				c.message, c.fragments = nil, 0
				return true, fn(whole)
			}
		}
	}
	return false, nil
}

// checkDataFrame checks the head of a data frame against the message it belongs to.
func (c *relayConn) checkDataFrame(f *frameHeader) error {
	switch {
	case f.op == opContinuation && c.fragments == 0:
		return protocolError("a continuation of nothing")
	case f.op != opContinuation && c.fragments > 0:
		return protocolError("a message within a message")
	case f.op == opBinary:
		return ErrNotText
	case f.length > uint64(max(0, c.limit-len(c.message))), c.fragments >= maxFragments:
		return ErrTooLarge
	}
	return nil
}

// handleControl handles a control frame. Pongs go without a deadline, as Ping.
func (c *relayConn) handleControl(op byte, payload []byte) error {
	switch op {
	case opClose:
		return c.handleClose(payload)
	case opPing:
		if c.onPing != nil {
			c.onPing(true)
		}
		if err := c.write(opPong, payload, time.Time{}); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
	case opPong:
		if c.onPing != nil {
			c.onPing(false)
		}
	}
	return nil
}

// handleClose answers the peer's close frame.
func (c *relayConn) handleClose(payload []byte) error {
	code, reason := websocket.CloseNoStatusReceived, ""
	if len(payload) == 1 {
		return protocolError("half a close code")
	}
	if len(payload) >= 2 {
		code, reason = int(binary.BigEndian.Uint16(payload)), string(payload[2:])
		switch {
		case !isValidCloseCode(code):
			return protocolError("an impossible close code")
		case !utf8.ValidString(reason):
			return protocolError("a close reason that is not UTF-8")
		}
	}
	c.writeClose(code, "", false)
	return &CloseError{Code: code, Reason: printableASCII(reason)}
}

// isValidCloseCode is whether a peer may send that close code (RFC 6455 §7.4).
func isValidCloseCode(code int) bool {
	switch {
	case code >= 3000:
		return code < 5000
	case code == 1004, code == websocket.CloseNoStatusReceived, code == websocket.CloseAbnormalClosure:
		return false
	}
	return code >= websocket.CloseNormalClosure && code <= websocket.CloseTryAgainLater
}

// frameBuffers holds the buffers in which frames are put together.
var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, bufferSize); return &b }}

// write writes one frame; no deadline stays behind, at which TLS would fail to answer a
// KeyUpdate. Pings and pongs have none, since its timer is most of what an idle link costs:
// a peer that takes nothing is ended by tcpUserTimeout and by the owner's sweep.
func (c *relayConn) write(op byte, payload []byte, deadline time.Time) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if err := c.readyLocked(deadline); err != nil {
		return err
	}
	err := c.writeLocked(op, payload)
	if !deadline.IsZero() {
		_ = c.conn.SetWriteDeadline(time.Time{}) // writeClose, for which Close waits, sets its own
	}
	return err
}

func (c *relayConn) readyLocked(deadline time.Time) error {
	if err := c.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	if c.closeSent || c.closing.Load() { // asked after the deadline was set: Close sets its own after closing
		return net.ErrClosed
	}
	return nil
}

func (c *relayConn) writeLocked(op byte, payload []byte) error {
	bp := frameBuffers.Get().(*[]byte)
	b := append((*bp)[:0], 0x80|op)
	switch n := len(payload); {
	case n <= maxControlPayload:
		b = append(b, byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 127), uint64(n))
	}
	b = append(b, payload...)
	_, err := c.conn.Write(b)
	if cap(b) <= maxPooledBuffer {
		*bp = b
		frameBuffers.Put(bp)
	}
	return err
}

func (c *relayConn) Write(msg []byte) error {
	return c.write(opText, msg, time.Now().Add(writeTimeout))
}

func (c *relayConn) Ping() error { return c.write(opPing, nil, time.Time{}) }

// writeClose writes a close frame, once, within a second. first: it is not an answer.
func (c *relayConn) writeClose(code int, reason string, first bool) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if c.closeSent {
		return
	}
	c.closeSent = true
	if c.conn.SetWriteDeadline(time.Now().Add(time.Second)) == nil {
		err := c.writeLocked(opClose, websocket.FormatCloseMessage(code, reason[:min(len(reason), maxControlPayload-2)]))
		c.closeInitiated = first && err == nil
	}
}

// awaitingPeerClose is whether the peer has a close frame to read, and is yet to hang up.
func (c *relayConn) awaitingPeerClose() bool {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	return c.closeInitiated
}

func (c *relayConn) Close(code int, reason string) error {
	err := net.ErrClosed
	c.closed.Do(func() {
		c.closing.Store(true)
		_ = c.conn.SetWriteDeadline(time.Now().Add(time.Second)) // for a write that holds wmu
		c.writeClose(code, reason, true)
		if c.awaitingPeerClose() {
			c.linger()
		}
		err = c.conn.Close()
	})
	return err
}

// linger reads below TLS: nobody looks at what still comes.
func (c *relayConn) linger() {
	if tcp, ok := tcpConn(c.conn); ok {
		linger(c.conn, tcp)
		return
	}
	linger(c.conn, c.conn)
}
