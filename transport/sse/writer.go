package sse

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Policy decides what a Writer does when its subscriber reads too slowly.
type Policy uint8

// The policies of a Writer.
const (
	// Cut ends the stream.
	Cut Policy = iota
	// Drop queues events up to a bound and drops what exceeds it. The caller reports to the
	// subscriber how many events were dropped.
	Drop
)

// Options of one stream. The zero value is RFC-0009's metric stream.
type Options struct {
	Policy       Policy           // default Cut
	IdleTimeout  time.Duration    // no progress while bytes wait for the peer; default 90 s
	PingInterval time.Duration    // of pings; default 25 s, negative: none
	Now          func() time.Time // the clock of the rules; default time.Now

	// Policy Cut.
	MaxUnacked   int           // frames the peer may leave unacknowledged; default 3
	MaxBurst     int           // the same within UnackedGrace; default 64
	UnackedGrace time.Duration // age of the oldest frame from which MaxUnacked counts; default 1 s
	Linger       time.Duration // for a stalled peer to read the close event; default 30 s

	// Policy Drop.
	MaxQueued int                    // bytes that may wait, QueueOverhead per Send included; default 256 KiB
	Budget    *Budget                // shared with other streams; default unbounded
	PingEvent func(time.Time) []byte // the event of a ping; nil: no pings
}

const (
	// closeTimeout is how long a stream of policy Cut that ends may go on writing what the
	// kernel's buffer did not take. It always takes small frames: it takes thousands of them.
	closeTimeout = time.Second
	// maxPending bounds the bytes that are buffered here for one subscriber once the
	// kernel's buffer is full. With policy Cut a single frame may be larger.
	maxPending    = 256 << 10
	defaultLinger = 30 * time.Second
	// maxInput bounds the bytes that a client may send after its request; a client that
	// sends more does not speak HTTP.
	maxInput = 64 << 10
)

func (o *Options) setDefaults() {
	o.UnackedGrace = cmp.Or(o.UnackedGrace, time.Second)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, 90*time.Second)
	o.PingInterval = cmp.Or(o.PingInterval, 25*time.Second)
	o.Linger = cmp.Or(o.Linger, defaultLinger)
	o.MaxUnacked = cmp.Or(o.MaxUnacked, 3)
	o.MaxBurst = cmp.Or(o.MaxBurst, 64)
	o.MaxQueued = cmp.Or(o.MaxQueued, maxPending)
	if o.Policy == Drop && o.PingEvent == nil {
		o.PingInterval = -1
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// Writer is one open stream. Its methods are for one goroutine at a time, and do not wait for
// the subscriber, SendWait excepted.
//
// Lock order: a Writer has no lock. The lock of its Conn is taken inside calls to the
// connection, because crypto/tls also writes from the goroutine that reads.
type Writer struct {
	streams *Streams
	conn    net.Conn // raw, or the TLS connection above it
	raw     *Conn
	policy  Policy
	closed  bool

	// Times are since openedAt.
	clock        func() time.Time
	openedAt     time.Time
	pingInterval time.Duration // 0 or less: no pings
	nextPing     time.Duration
	checkAt      time.Duration // when Check must be called next

	*cutState // policy Cut, else nil
	dropState // policy Drop; a value, so that fan-out reads one object less per subscriber
}

// Open answers the request with 200 and the head of an event stream, and takes the
// connection over from net/http, whose goroutine and buffers are free once the handler
// has returned. Headers already set on w are sent too. The body must have been read. The
// caller must call Close, or the connection leaks.
//
// After an error nothing was answered and the caller still can, with two exceptions: the
// connection broke (ErrPeerClosed), or it is TLS without a Listener below it.
func (s *Streams) Open(w http.ResponseWriter, r *http.Request, o Options) (*Writer, error) {
	if r.ProtoMajor != 1 {
		return nil, fmt.Errorf("sse: event stream over %s: HTTP/1.1 is needed: %w", r.Proto, errors.ErrUnsupported)
	}
	o.setDefaults()
	if err := s.add(); err != nil {
		return nil, err
	}
	conn, raw, err := takeOver(w)
	if err != nil {
		s.done()
		return nil, err
	}
	wr := newWriter(s, conn, raw, &o)
	s.opened.Add(1)
	if err := wr.writeHead(responseHead(w.Header())); err != nil {
		wr.Close(0)
		return nil, err
	}
	return wr, nil
}

func newWriter(s *Streams, conn net.Conn, raw *Conn, o *Options) *Writer {
	w := &Writer{streams: s, conn: conn, raw: raw, policy: o.Policy, clock: o.Now, openedAt: o.Now(), pingInterval: o.PingInterval}
	raw.takeOver()
	if o.Policy == Drop {
		w.dropState = newDropState(o)
	} else {
		w.cutState = newCutState(o, raw)
	}
	w.startPings()
	return w
}

func (w *Writer) now() time.Duration { return w.clock().Sub(w.openedAt) }

// startPings makes the first ping due in one interval.
func (w *Writer) startPings() {
	now := w.now()
	w.nextPing = now + w.pingInterval
	w.setCheckAt(now)
}

// pingSlack is how early a ping may be written, so that thousands of subscribers do not wake
// their goroutine one by one. Those of policy Cut are exact.
func (w *Writer) pingSlack() time.Duration {
	if w.policy == Cut {
		return 0
	}
	return w.pingInterval / 128
}

// setCheckAt sets checkAt to the first of the times at which a rule may take effect.
func (w *Writer) setCheckAt(now time.Duration) {
	w.checkAt = now + time.Hour
	if w.pingInterval > 0 {
		w.checkAt = w.nextPing
	}
	if w.policy == Cut {
		if at, ok := w.acks.nextCheck(); ok {
			w.checkAt = min(w.checkAt, at)
		}
	}
}

// takeOver hijacks the connection and finds the counted connection at or below it.
func takeOver(w http.ResponseWriter) (net.Conn, *Conn, error) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("sse: take over the connection: %w", err)
	}
	if c, ok := conn.(interface{ Handover() net.Conn }); ok { // of package edge
		conn = c.Handover()
	}
	if raw := rawConn(conn); raw != nil {
		return conn, raw, nil
	}
	if _, isTLS := conn.(*tls.Conn); isTLS {
		conn.Close()
		return nil, nil, errors.New("sse: no sse.Listener below TLS: wrap the TCP listener with sse.NewListener before tls.NewListener")
	}
	raw := &Conn{Conn: conn}
	return raw, raw, nil
}

// responseHead makes the head of the response. The framing headers are this package's:
// the body has no length and no coding, and ends with the connection.
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

func (w *Writer) writeHead(head []byte) error {
	if w.policy == Drop {
		return w.put(head)
	}
	defer w.setCheckAt(0)
	return w.write(head, 0, false)
}

// Send writes b, which is one or more whole events; events is how many of them count in
// Stats. b is not kept or changed, so all streams may share it.
//
// Policy Cut: ErrBackpressure when the subscriber is too far behind; b was not written.
//
// Policy Drop: taken is false when b was dropped. b with events 0, such as a heartbeat, is
// dropped without being counted when other events wait. ErrBackpressure when the Budget
// is exhausted.
//
// ErrPeerClosed: the connection is broken. After an error the caller closes the stream.
func (w *Writer) Send(b []byte, events int) (taken bool, err error) {
	switch {
	case w.closed:
		return false, ErrClosed
	case !isWholeEvent(b):
		return false, ErrFrame
	case w.policy == Drop:
		return w.sendOrDrop(batch{b, events})
	}
	err = w.sendOrCut(b, events)
	return err == nil, err
}

// put writes b after the bytes that earlier writes left in raw.
func (w *Writer) put(b []byte) error {
	if _, err := w.conn.Write(b); err != nil {
		return fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	return nil
}

// Blocked reports whether bytes wait until the connection accepts more.
func (w *Writer) Blocked() bool {
	if w.policy == Cut {
		return w.hasPending
	}
	return w.unsent > 0 || len(w.queue.batches) > 0
}

// Check enforces the timeouts, and writes a ping that is due. It returns ErrIdle when bytes
// have waited for the peer for IdleTimeout without progress. A late call writes one ping,
// whatever number it missed. A Shard calls Check when needed; a caller with its own loop calls
// it every few seconds.
func (w *Writer) Check() error {
	if w.closed {
		return ErrClosed
	}
	now := w.now()
	if w.policy == Cut {
		w.flushPending()
		w.refresh(now)
	}
	if w.isIdle(now) {
		return ErrIdle
	}
	if w.pingInterval > 0 && now+w.pingSlack() >= w.nextPing {
		late := max(0, now-w.nextPing) / w.pingInterval // pings that were missed
		w.nextPing += (late + 1) * w.pingInterval
		if err := w.Ping(); err != nil {
			return err
		}
	}
	w.setCheckAt(now)
	return nil
}

func (w *Writer) isIdle(now time.Duration) bool {
	if w.policy == Cut {
		return w.acks.isIdle(now)
	}
	return w.Blocked() && time.Since(w.progressAt) > w.idleTimeout
}

// Ping writes a ping, unless the subscriber has not taken what was written before it.
func (w *Writer) Ping() error {
	switch {
	case w.closed:
		return ErrClosed
	case w.policy == Cut:
		return w.pingOrSkip(w.now())
	}
	_, err := w.sendOrDrop(batch{b: w.pingEvent(w.clock())})
	return err
}

// Close writes the close event of c (code 0: none) and ends the connection with FIN. The
// kernel delivers what it has buffered for up to Linger. Only the first call has an effect.
//
// With policy Cut, bytes that the kernel has not accepted are written by a goroutine, within a
// second, for which Streams.Drain waits; policy Drop drops them. A stalled peer may resume
// reading within Linger, then the connection is reset; no goroutine waits for it.
func (w *Writer) Close(c Code) error {
	if w.closed {
		return nil
	}
	w.closed = true
	linger, isStalled := defaultLinger, false
	if w.policy == Drop {
		w.release()
	} else {
		now := w.now()
		w.refresh(now)
		linger = w.linger
		isStalled = c == Backpressure || c == IdleTimeout || w.acks.stalledFor(now) >= w.acks.grace
	}
	err := w.writeClose(c)
	if c.Reason() == "" {
		c = 0
	}
	w.streams.countClose(c) // before FIN: whoever has read the end finds it counted
	end := func() {
		w.raw.dropPending()
		if isStalled {
			w.raw.CloseWrite()
			w.streams.linger(w.raw, linger)
		} else {
			w.raw.closeGracefully(linger)
		}
		w.streams.done() // last: Drain waits for it
	}
	if left, _ := w.raw.flush(0); left > 0 && w.policy == Cut {
		go func() {
			_, _ = w.raw.flush(closeTimeout)
			end()
		}()
		return err
	}
	end()
	return err
}

// writeClose writes the close event and the end mark of TLS.
func (w *Writer) writeClose(c Code) error {
	if c != 0 {
		event, err := AppendClose(nil, c)
		if err != nil {
			return err
		}
		if err := w.put(event); err != nil {
			return err
		}
		w.streams.bytes.Add(uint64(len(event)))
	}
	if t, ok := w.conn.(*tls.Conn); ok {
		t.CloseWrite()
	}
	return nil
}
