package sse

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Options of one stream. The zero value is RFC-0009's metric stream.
type Options struct {
	MaxUnacked   int           // frames the peer may leave unacknowledged; default 3
	MaxBurst     int           // as many cut at once, however young; default 64
	UnackedGrace time.Duration // age of the oldest frame that makes MaxUnacked count; default 1 s
	IdleTimeout  time.Duration // no progress with bytes outstanding; default 90 s
	PingInterval time.Duration // from the opening on; default 25 s, negative: never
	Linger       time.Duration // for a stalled peer to fetch the close event; default 30 s

	PingEvent []byte           // one whole event; default "event: ping", data {}
	Now       func() time.Time // the clock of the rules above; default time.Now
}

const (
	// writeTimeout is how long one write may wait for room. A stream of small frames
	// never waits: the kernel takes thousands.
	writeTimeout = time.Second
	// maxPending bounds what a stalled peer's frames may occupy here, when even the
	// kernel's buffer is full. One frame alone may be larger.
	maxPending = 256 << 10
	// maxInput is how much a client may send after its request before it is taken
	// for one that does not speak HTTP.
	maxInput = 64 << 10
)

var defaultPing = []byte("event: ping\ndata: {}\n\n")

func (o *Options) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&o.UnackedGrace, time.Second)
	set(&o.IdleTimeout, 90*time.Second)
	set(&o.PingInterval, 25*time.Second)
	set(&o.Linger, 30*time.Second)
	if o.MaxUnacked <= 0 {
		o.MaxUnacked = 3
	}
	if o.MaxBurst <= 0 {
		o.MaxBurst = 64
	}
	if o.PingEvent == nil {
		o.PingEvent = defaultPing
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// Writer is one open stream. Its methods are for one goroutine, the request's.
type Writer struct {
	streams    *Streams
	opts       Options
	conn       net.Conn // what the client speaks to: raw, or TLS above it
	raw        *Conn
	opened     time.Time
	pingAt     time.Duration // next ping, since opened
	ledger     ackTracker
	hasPending bool // the last write left something in raw.rest
	closed     bool
	watcher    waker
}

// Open answers the request with 200 and the head of an event stream, and takes the
// connection from net/http. Headers already set on w are sent along. The body must
// have been read. The caller must call Close, or the connection leaks.
//
// On an error nothing was answered and the caller still can, with two exceptions:
// the connection broke, or it is TLS that does not stand on a Listener.
func (s *Streams) Open(w http.ResponseWriter, r *http.Request, o Options) (*Writer, error) {
	if r.ProtoMajor != 1 {
		return nil, fmt.Errorf("sse: event stream over %s: HTTP/1.1 is needed: %w", r.Proto, errors.ErrUnsupported)
	}
	o.defaults()
	if !isWholeEvent(o.PingEvent) {
		return nil, fmt.Errorf("%w: Options.PingEvent", ErrFrame)
	}
	if err := s.add(); err != nil {
		return nil, err
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.done()
		return nil, fmt.Errorf("sse: take over the connection: %w", err)
	}
	raw := rawConn(conn)
	if raw == nil {
		if _, isTLS := conn.(*tls.Conn); isTLS {
			s.done()
			conn.Close()
			return nil, errors.New("sse: this TLS listener does not stand on an sse.Listener: wrap the TCP listener with sse.NewListener first")
		}
		raw = &Conn{Conn: conn}
		conn = raw
	}
	raw.takeOver(writeTimeout)
	wr := &Writer{streams: s, opts: o, conn: conn, raw: raw, opened: o.Now(), pingAt: o.PingInterval}
	wr.ledger = ackTracker{
		maxFrames: o.MaxUnacked, maxBurst: o.MaxBurst, grace: o.UnackedGrace, idleTimeout: o.IdleTimeout,
		frames:  make([]frameMark, 0, 4),
		written: raw.Written(), acked: raw.Written() - int64(raw.unacked()),
	}
	s.opened.Add(1)
	if err := wr.write(responseHead(w.Header()), 0, false); err != nil {
		wr.Close(0)
		return nil, err
	}
	return wr, nil
}

// responseHead makes the response's head. Framing headers are ours: the body has no length
// and no coding, it ends with the connection.
func responseHead(extra http.Header) []byte {
	h := extra.Clone()
	if h == nil {
		h = http.Header{}
	}
	for _, k := range []string{"Content-Length", "Content-Encoding", "Transfer-Encoding", "Trailer", "Keep-Alive", "Upgrade"} {
		h.Del(k)
	}
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	h.Set("Connection", "close")
	h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	var buf bytes.Buffer
	buf.WriteString("HTTP/1.1 200 OK\r\n")
	h.Write(&buf) // cannot fail; replaces CR and LF in values
	buf.WriteString("\r\n")
	return buf.Bytes()
}

func isWholeEvent(b []byte) bool {
	return len(b) >= 2 && b[len(b)-1] == '\n' && b[len(b)-2] == '\n'
}

func (w *Writer) now() time.Duration { return w.opts.Now().Sub(w.opened) }

// refresh asks how far the peer has acknowledged.
func (w *Writer) refresh(now time.Duration) {
	if w.ledger.hasUnacked() {
		unacked := w.raw.unacked() // before Written: TLS may write in between
		w.ledger.acknowledged(w.raw.Written()-int64(unacked), now)
	}
}

// flush sends what an earlier write left over, without waiting, and returns how
// much still stays.
func (w *Writer) flush() int {
	if !w.hasPending {
		return 0
	}
	n := w.raw.flush(0)
	w.hasPending = n > 0
	return n
}

// write sends b in one piece, behind what is left of earlier ones.
func (w *Writer) write(b []byte, now time.Duration, frame bool) error {
	if _, err := w.conn.Write(b); err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	w.ledger.wrote(w.raw.Written(), now, frame)
	w.hasPending = w.raw.hasPending()
	return nil
}

// Frame writes one whole encoded event, such as AppendEvent makes; b is not kept
// or changed, so all streams may share it. ErrBackpressure: the reader is too far
// behind and b was not written; ErrPeerClosed: the connection is broken. After
// either the caller closes the stream.
func (w *Writer) Frame(b []byte) error {
	switch {
	case w.closed:
		return ErrClosed
	case !isWholeEvent(b):
		return ErrFrame
	}
	now := w.now()
	if w.ledger.needsRefresh(now) {
		w.refresh(now)
	}
	if w.ledger.isFull(now) {
		return ErrBackpressure
	}
	if n := w.flush(); n > 0 && n+len(b) > maxPending {
		return ErrBackpressure
	}
	if err := w.write(b, now, true); err != nil {
		return err
	}
	w.streams.frames.Add(1)
	w.streams.bytes.Add(uint64(len(b)))
	w.resetTimer(now)
	return nil
}

// Ping writes the ping event unless an earlier one is still unacknowledged, so a
// stalledFor stream holds one at most. Pings never count for ErrBackpressure.
func (w *Writer) Ping() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
	rest := w.flush()
	w.refresh(now)
	if w.ledger.pingPending() || rest > 0 {
		return nil
	}
	if err := w.write(w.opts.PingEvent, now, false); err != nil {
		return err
	}
	w.ledger.pingEnd = w.ledger.written
	w.streams.pings.Add(1)
	w.streams.bytes.Add(uint64(len(w.opts.PingEvent)))
	w.resetTimer(now)
	return nil
}

// Check does what time asks for: it notices that the peer has acknowledged nothing
// for IdleTimeout (ErrIdle) and writes the ping that is due. Run calls it when needed;
// a loop of the caller's own calls it every few seconds.
func (w *Writer) Check() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
	w.flush()
	w.refresh(now)
	if w.ledger.isIdle(now) {
		return ErrIdle
	}
	if w.opts.PingInterval > 0 && now >= w.pingAt {
		for w.pingAt <= now { // a late call makes up for nothing
			w.pingAt += w.opts.PingInterval
		}
		if err := w.Ping(); err != nil {
			return err
		}
	}
	w.resetTimer(now)
	return nil
}

// nextCheck is when Check has something to do next.
func (w *Writer) nextCheck(now time.Duration) time.Duration {
	at := now + time.Hour
	if w.opts.PingInterval > 0 {
		at = w.pingAt
	}
	if t, ok := w.ledger.nextCheck(); ok {
		at = min(at, t)
	}
	if w.hasPending {
		at = min(at, now+time.Second)
	}
	return at
}

// Close writes the close event behind what was written, waits up to a second for
// room if there is none, and ends the connection with FIN. Code 0 writes no event.
// A peer that had stalled gets Linger to come back and read on, then RST; no
// goroutine waits for it. Only the first call has an effect.
func (w *Writer) Close(c Code) error {
	if w.closed {
		return nil
	}
	w.closed = true
	defer w.streams.done()
	now := w.now()
	w.refresh(now)
	stalled := c == Backpressure || c == IdleTimeout || w.ledger.stalledFor(now) >= w.opts.UnackedGrace

	var err error
	w.raw.finish(writeTimeout, func() { err = w.writeClose(c, now) })
	if stalled {
		w.raw.CloseWrite()
		w.streams.linger(w.raw, w.opts.Linger)
	} else {
		w.raw.closeGracefully(w.opts.Linger)
	}
	return err
}

// writeClose writes the close event and TLS's own end mark.
func (w *Writer) writeClose(c Code, now time.Duration) error {
	place := len(codes)
	defer func() { w.streams.closes[place].Add(1) }()
	if c != 0 {
		ev, err := AppendClose(nil, c)
		if err != nil {
			return err
		}
		place = c.index()
		if err := w.write(ev, now, false); err != nil {
			return err
		}
		w.streams.bytes.Add(uint64(len(ev)))
	}
	if t, ok := w.conn.(*tls.Conn); ok {
		t.CloseWrite()
	}
	return nil
}
