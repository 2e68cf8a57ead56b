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

// Upgrader turns HTTP requests into links. The alias keeps the WebSocket library inside
// this package.
type Upgrader = websocket.Upgrader

// NewUpgrader makes the relay's upgrader. checkOrigin decides about requests with an
// Origin header; devices send none.
func NewUpgrader(checkOrigin func(*http.Request) bool) *Upgrader {
	return &websocket.Upgrader{
		HandshakeTimeout:  AuthTimeout,
		WriteBufferSize:   bufferSize,
		WriteBufferPool:   &writeBuffers,
		Subprotocols:      []string{Subprotocol21, Subprotocol}, // by preference
		CheckOrigin:       checkOrigin,
		EnableCompression: false, // the read limit would not bound inflated data
	}
}

// Upgrade turns a request into a Conn, or answers it with an error.
func Upgrade(u *Upgrader, w http.ResponseWriter, r *http.Request) (Conn, error) {
	ws, err := u.Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	conn := ws.NetConn()
	if h, ok := conn.(interface{ Handover() net.Conn }); ok { // of package edge
		conn = h.Handover()
	}
	c := newRelayConn(conn)
	c.v21 = ws.Subprotocol() == Subprotocol21
	if ws.Subprotocol() == "" {
		_ = c.Close(CloseUpgradeRequired, "upgrade_required")
		return nil, errors.New("link: the client did not offer subprotocol " + Subprotocol)
	}
	return c, nil
}

// relayConn is the relay's end of a link. The WebSocket library does the opening
// handshake only; relayConn reads and writes the frames of RFC 6455 §5 itself, because a
// relay has thousands of links and most of them are silent:
//
//   - While nothing arrives it holds no buffer.
//   - After setNonblocking no goroutine waits for input: reads return
//     netpoll.ErrWouldBlock, and a partial frame is buffered until the rest arrives.
//
// FuzzRelayConn compares it with the library.
//
// The close handshake (RFC 6455 §7): whoever closes first writes a close frame and waits
// until the peer closes the connection; the other end answers with a close frame and
// closes at once. A protocol error closes first, with 1002.
type relayConn struct {
	conn   net.Conn        // TLS or plain
	poll   *netpoll.Reader // reads the socket below conn without blocking; nil: reads block
	limit  int             // of a message, bytes
	v21    bool            // the subprotocol is Subprotocol21
	onPing func(ping bool, payload []byte)

	// Owned by the reading goroutine.
	buf       *[]byte // input in a buffer of readBuffers; nil: none
	off       int     // how much of it has been parsed
	message   []byte  // a fragmented message, up to here
	fragments int     // the number of its fragments; 0: no message is under way

	closed         sync.Once
	closing        atomic.Bool // Close was called
	writeMu        sync.Mutex  // one frame at a time; protects the fields below
	closeSent      bool        // a close frame was written
	closeInitiated bool        // and it did not answer the peer's
	unsent         []byte      // the rest of a frame that tryFrame has begun
}

var _ Conn = (*relayConn)(nil)

// newRelayConn takes a connection after the opening handshake.
func newRelayConn(nc net.Conn) *relayConn {
	setUserTimeout(nc)
	return &relayConn{conn: nc, limit: MaxFrame}
}

// SetReadLimit, OnPing and SetReadDeadline are called by the reading goroutine, or before
// it starts.
func (c *relayConn) SetReadLimit(n int)                        { c.limit = n }
func (c *relayConn) OnPing(fn func(ping bool, payload []byte)) { c.onPing = fn }
func (c *relayConn) SetReadDeadline(t time.Time) error         { return c.conn.SetReadDeadline(t) }

// Subprotocol is what Upgrade chose.
func (c *relayConn) Subprotocol() string {
	if c.v21 {
		return Subprotocol21
	}
	return Subprotocol
}

// Opcodes and bits of a frame header (RFC 6455 §5.2).
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8 // this one and above: control frames
	opPing         = 0x9
	opPong         = 0xA

	finBit  = 0x80 // first byte
	rsvBits = 0x70 // first byte
	opBits  = 0x0f // first byte
	maskBit = 0x80 // second byte
)

const (
	maxControlPayload = 125     // bytes (RFC 6455 §5.5)
	maxFragments      = 1 << 12 // of a message
)

// frameHeader is the header of one frame.
type frameHeader struct {
	fin    bool
	op     byte
	length uint64 // of the payload
	mask   [4]byte
	size   int // of the header itself, bytes; 0: it is not complete
}

func (h *frameHeader) isControl() bool { return h.op >= opClose }

// protocolError is a violation of RFC 6455, answered with 1002.
type protocolError string

// Error is the text for logs; the peer gets it without the prefix, as the close reason.
func (e protocolError) Error() string { return "link: websocket: " + string(e) }

// parseHeader parses a header as a client must send it (RFC 6455 §5.2, §5.3). It does not
// wait for a complete header to reject one.
func parseHeader(b []byte) (h frameHeader, err error) {
	if len(b) < 2 {
		return h, nil
	}
	h.fin, h.op, h.length = b[0]&finBit != 0, b[0]&opBits, uint64(b[1]&^maskBit)
	switch {
	case b[0]&rsvBits != 0:
		return h, protocolError("reserved bits are set")
	case b[1]&maskBit == 0:
		return h, protocolError("a frame is not masked")
	case h.op > opBinary && h.op < opClose, h.op > opPong:
		return h, protocolError("an unknown opcode")
	case h.isControl() && (!h.fin || h.length > maxControlPayload):
		return h, protocolError("a long or fragmented control frame")
	}
	n := 2
	switch h.length {
	case 126: // the length follows in 2 bytes
		if len(b) < n+2 {
			return h, nil
		}
		h.length, n = uint64(binary.BigEndian.Uint16(b[n:])), n+2
	case 127: // the length follows in 8 bytes
		if len(b) < n+8 {
			return h, nil
		}
		h.length, n = binary.BigEndian.Uint64(b[n:]), n+8
		if h.length>>63 != 0 { // RFC 6455 §5.2: must be 0
			return h, ErrTooLarge
		}
	}
	if len(b) >= n+4 {
		h.mask, h.size = [4]byte(b[n:]), n+4
	}
	return h, nil
}

// unmask undoes the client's masking (RFC 6455 §5.3) in place, eight bytes at a time.
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

// Read calls fn with the next message. After setNonblocking it returns
// netpoll.ErrWouldBlock when no message is complete.
func (c *relayConn) Read(fn func([]byte) error) error {
	for {
		done, err := c.nextMessage(fn)
		if err == nil && !done {
			err = c.readMore()
		}
		if err != nil {
			c.releaseInput(err)
		}
		if done || err != nil {
			return err
		}
	}
}

// releaseInput handles a failed read: it returns the buffer to its pool unless a partial
// frame waits in it, and answers a violation of the protocol.
func (c *relayConn) releaseInput(err error) {
	if c.buf != nil && (c.off == len(*c.buf) || !errors.Is(err, netpoll.ErrWouldBlock)) {
		recycle(&readBuffers, c.buf, *c.buf)
		c.buf, c.off = nil, 0
	}
	var violation protocolError
	if errors.As(err, &violation) {
		c.writeClose(websocket.CloseProtocolError, string(violation), true)
	}
}

// readMore appends to the buffer what one read returns. It frees space first: it drops what
// has been parsed, or else lets the buffer grow, which the read limit bounds.
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
		b = append(b, 0)[:len(b)]
	}
	var in io.Reader = c.conn
	if _, isTLS := in.(*tls.Conn); c.poll != nil && !isTLS {
		in = c.poll
	}
	n, err := in.Read(b[len(b):cap(b)])
	*c.buf = b[:len(b)+n]
	switch {
	case err == io.EOF:
		return io.ErrUnexpectedEOF // without a close frame
	case n > 0:
		return nil // the next read returns the error again
	}
	return err
}

// nextMessage handles the frames in the buffer up to the end of a message. done is whether
// there was one; fn has been called then.
func (c *relayConn) nextMessage(fn func([]byte) error) (done bool, err error) {
	for c.buf != nil {
		b := (*c.buf)[c.off:]
		h, err := parseHeader(b)
		if err == nil && h.size > 0 && !h.isControl() {
			err = c.checkDataFrame(&h)
		}
		if err != nil || h.size == 0 || uint64(len(b)-h.size) < h.length {
			return false, err
		}
		end := h.size + int(h.length)
		payload := b[h.size:end:end] // no capacity beyond: the next frame is there, and fn may append
		unmask(payload, h.mask)
		c.off += end
		switch {
		case h.isControl():
			if err := c.handleControl(h.op, payload); err != nil {
				return false, err
			}
		case h.fin && h.op == opText:
			return true, fn(payload)
		default:
			c.message = append(c.message, payload...)
			c.fragments++
			if h.fin {
				whole := c.message
				c.message, c.fragments = nil, 0
				return true, fn(whole)
			}
		}
	}
	return false, nil
}

// checkDataFrame checks the header of a data frame against the message under way. It
// checks the size before the payload has arrived.
func (c *relayConn) checkDataFrame(h *frameHeader) error {
	switch {
	case h.op == opContinuation && c.fragments == 0:
		return protocolError("a continuation of nothing")
	case h.op != opContinuation && c.fragments > 0:
		return protocolError("a message within a message")
	case h.op == opBinary:
		return ErrNotText
	case h.length > uint64(max(0, c.limit-len(c.message))), c.fragments >= maxFragments:
		return ErrTooLarge
	}
	return nil
}

// handleControl handles a control frame, which may come between the fragments of a message
// (RFC 6455 §5.4).
func (c *relayConn) handleControl(op byte, payload []byte) error {
	if op == opClose {
		return c.handleClose(payload)
	}
	if c.onPing != nil {
		c.onPing(op == opPing, payload)
	}
	if op == opPing {
		if err := c.write(opPong, payload, time.Time{}); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
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

// isValidCloseCode reports whether a peer may send that close code (RFC 6455 §7.4).
func isValidCloseCode(code int) bool {
	switch code {
	case 1004, websocket.CloseNoStatusReceived, websocket.CloseAbnormalClosure:
		return false
	}
	return code >= websocket.CloseNormalClosure && code <= websocket.CloseTryAgainLater || code >= 3000 && code < 5000
}

// write writes one frame. It removes the deadline afterwards: TLS answers a KeyUpdate of
// the peer while the link is idle, and a deadline that has passed would break the
// connection for good. Pings and pongs have no deadline, see deviceConn.Ping.
func (c *relayConn) write(op byte, payload []byte, deadline time.Time) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if err := c.prepareWriteLocked(deadline); err != nil {
		return err
	}
	err := c.writeLocked(op, payload)
	if !deadline.IsZero() {
		_ = c.conn.SetWriteDeadline(time.Time{}) // a concurrent Close waits for writeMu and sets its own
	}
	return err
}

// prepareWriteLocked sets the deadline and then checks for Close, in this order: Close
// sets closing first and its own deadline after that, which must not be overwritten.
func (c *relayConn) prepareWriteLocked(deadline time.Time) error {
	if err := c.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	if c.closeSent || c.closing.Load() {
		return net.ErrClosed
	}
	return nil
}

// writeLocked writes one unmasked frame with one call, after what tryFrame has left.
func (c *relayConn) writeLocked(op byte, payload []byte) error {
	if err := c.writeUnsentLocked(); err != nil {
		return err
	}
	bp := frameBuffers.Get().(*[]byte)
	b := appendFrame(*bp, op, payload)
	_, err := c.conn.Write(b)
	recycle(&frameBuffers, bp, b)
	return err
}

func (c *relayConn) writeUnsentLocked() error {
	if len(c.unsent) == 0 {
		return nil
	}
	n, err := c.conn.Write(c.unsent)
	if c.unsent = c.unsent[n:]; err == nil {
		c.unsent = nil
	}
	return err
}

// appendFrame appends an unmasked frame (RFC 6455 §5.2).
func appendFrame(b []byte, op byte, payload []byte) []byte {
	b = append(b, finBit|op)
	switch n := len(payload); {
	case n <= maxControlPayload:
		b = append(b, byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 127), uint64(n))
	}
	return append(b, payload...)
}

// Write writes one text message as a single frame, within writeTimeout.
func (c *relayConn) Write(msg []byte) error {
	return c.write(opText, msg, time.Now().Add(writeTimeout))
}

// Ping writes a ping, without a deadline.
func (c *relayConn) Ping(payload []byte) error { return c.write(opPing, payload, time.Time{}) }

// writeClose writes a close frame unless one was written before. initiated: it does not
// answer the peer's. awaitingPeerClose reports whether this end sent the first close frame:
// the peer has yet to read it and to close the connection.
func (c *relayConn) writeClose(code int, reason string, initiated bool) (awaitingPeerClose bool) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if !c.closeSent && c.conn.SetWriteDeadline(time.Now().Add(closeTimeout)) == nil {
		err := c.writeLocked(opClose, websocket.FormatCloseMessage(code, reason[:min(len(reason), maxControlPayload-2)]))
		c.closeInitiated = initiated && err == nil
	}
	c.closeSent = true
	return c.closeInitiated
}

// Close closes the connection after a close handshake. A peer that does not take part
// delays it by closeTimeout and lingerTimeout at most.
func (c *relayConn) Close(code int, reason string) error {
	err := net.ErrClosed
	c.closed.Do(func() {
		c.closing.Store(true)
		_ = c.conn.SetWriteDeadline(time.Now().Add(closeTimeout)) // ends a write that holds writeMu
		if c.writeClose(code, reason, true) {
			linger(c.conn, netpoll.Lowest(c.conn)) // below TLS: the input is discarded undecrypted
		}
		err = c.conn.Close()
	})
	return err
}
