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
	MaxFrames  int           // frames the peer may leave unacknowledged; default 3
	HardFrames int           // as many cut at once, however young; default 64
	Grace      time.Duration // age of the oldest frame that makes MaxFrames count; default 1 s
	IdleAfter  time.Duration // no progress with bytes outstanding; default 90 s
	PingEvery  time.Duration // from the opening on; default 25 s, negative: never
	Linger     time.Duration // for a stalled peer to fetch the close event; default 30 s

	PingEvent []byte           // one whole event; default "event: ping", data {}
	Now       func() time.Time // the clock of the rules above; default time.Now
}

const (
	// patience is how long one write may wait for room. A stream of small frames
	// never waits: the kernel takes thousands.
	patience = time.Second
	// maxRest bounds what a stalled peer's frames may occupy here, when even the
	// kernel's buffer is full. One frame alone may be larger.
	maxRest = 256 << 10
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
	set(&o.Grace, time.Second)
	set(&o.IdleAfter, 90*time.Second)
	set(&o.PingEvery, 25*time.Second)
	set(&o.Linger, 30*time.Second)
	if o.MaxFrames <= 0 {
		o.MaxFrames = 3
	}
	if o.HardFrames <= 0 {
		o.HardFrames = 64
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
	streams *Streams
	opts    Options
	conn    net.Conn // what the client speaks to: raw, or TLS above it
	raw     *Conn
	opened  time.Time
	pingAt  time.Duration // next ping, since opened
	ledger  ledger
	resting bool // the last write left something in raw.rest
	closed  bool
	watcher watcher
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
	if !whole(o.PingEvent) {
		return nil, fmt.Errorf("%w: Options.PingEvent", ErrFrame)
	}
	if err := s.enter(); err != nil {
		return nil, err
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.leave()
		return nil, fmt.Errorf("sse: take over the connection: %w", err)
	}
	raw := rawConn(conn)
	if raw == nil {
		if _, isTLS := conn.(*tls.Conn); isTLS {
			s.leave()
			conn.Close()
			return nil, errors.New("sse: this TLS listener does not stand on an sse.Listener: wrap the TCP listener with sse.NewListener first")
		}
		raw = &Conn{Conn: conn}
		conn = raw
	}
	raw.own(patience)
	wr := &Writer{streams: s, opts: o, conn: conn, raw: raw, opened: o.Now(), pingAt: o.PingEvery}
	wr.ledger = ledger{
		maxFrames: o.MaxFrames, hardFrames: o.HardFrames, grace: o.Grace, idleAfter: o.IdleAfter,
		frames:  make([]mark, 0, 4),
		written: raw.Written(), acked: raw.Written() - int64(raw.outstanding()),
	}
	s.opened.Add(1)
	if err := wr.write(head(w.Header()), 0, false); err != nil {
		wr.Close(0)
		return nil, err
	}
	return wr, nil
}

// head makes the response's head. Framing headers are ours: the body has no length
// and no coding, it ends with the connection.
func head(extra http.Header) []byte {
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

func whole(b []byte) bool {
	return len(b) >= 2 && b[len(b)-1] == '\n' && b[len(b)-2] == '\n'
}

func (w *Writer) now() time.Duration { return w.opts.Now().Sub(w.opened) }

// refresh asks how far the peer has acknowledged.
func (w *Writer) refresh(now time.Duration) {
	if w.ledger.outstanding() {
		unacked := w.raw.outstanding() // before Written: TLS may write in between
		w.ledger.ack(w.raw.Written()-int64(unacked), now)
	}
}

// flush sends what an earlier write left over, without waiting, and returns how
// much still stays.
func (w *Writer) flush() int {
	if !w.resting {
		return 0
	}
	n := w.raw.flush(0)
	w.resting = n > 0
	return n
}

// write sends b in one piece, behind what is left of earlier ones.
func (w *Writer) write(b []byte, now time.Duration, frame bool) error {
	if _, err := w.conn.Write(b); err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	w.ledger.wrote(w.raw.Written(), now, frame)
	w.resting = w.raw.resting()
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
	case !whole(b):
		return ErrFrame
	}
	now := w.now()
	if w.ledger.ask(now) {
		w.refresh(now)
	}
	if w.ledger.full(now) {
		return ErrBackpressure
	}
	if n := w.flush(); n > 0 && n+len(b) > maxRest {
		return ErrBackpressure
	}
	if err := w.write(b, now, true); err != nil {
		return err
	}
	w.streams.frames.Add(1)
	w.streams.bytes.Add(uint64(len(b)))
	w.arm(now)
	return nil
}

// Ping writes the ping event unless an earlier one is still unacknowledged, so a
// stalled stream holds one at most. Pings never count for ErrBackpressure.
func (w *Writer) Ping() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
	rest := w.flush()
	w.refresh(now)
	if w.ledger.pinging() || rest > 0 {
		return nil
	}
	if err := w.write(w.opts.PingEvent, now, false); err != nil {
		return err
	}
	w.ledger.pingEnd = w.ledger.written
	w.streams.pings.Add(1)
	w.streams.bytes.Add(uint64(len(w.opts.PingEvent)))
	w.arm(now)
	return nil
}

// Check does what time asks for: it notices that the peer has acknowledged nothing
// for IdleAfter (ErrIdle) and writes the ping that is due. Run calls it when needed;
// a loop of the caller's own calls it every few seconds.
func (w *Writer) Check() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
	w.flush()
	w.refresh(now)
	if w.ledger.idle(now) {
		return ErrIdle
	}
	if w.opts.PingEvery > 0 && now >= w.pingAt {
		for w.pingAt <= now { // a late call makes up for nothing
			w.pingAt += w.opts.PingEvery
		}
		if err := w.Ping(); err != nil {
			return err
		}
	}
	w.arm(now)
	return nil
}

// due is when Check has something to do next.
func (w *Writer) due(now time.Duration) time.Duration {
	at := now + time.Hour
	if w.opts.PingEvery > 0 {
		at = w.pingAt
	}
	if t, ok := w.ledger.due(); ok {
		at = min(at, t)
	}
	if w.resting {
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
	defer w.streams.leave()
	now := w.now()
	w.refresh(now)
	stalled := c == Backpressure || c == IdleTimeout || w.ledger.stalled(now) >= w.opts.Grace

	var err error
	w.raw.finish(patience, func() { err = w.last(c, now) })
	if stalled {
		w.raw.CloseWrite()
		w.streams.linger(w.raw, w.opts.Linger)
	} else {
		w.raw.leaveToKernel(w.opts.Linger)
	}
	return err
}

// last writes the close event and TLS's own end mark.
func (w *Writer) last(c Code, now time.Duration) error {
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
