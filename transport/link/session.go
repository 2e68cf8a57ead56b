package link

import (
	"bytes"
	"context"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
)

// Session is the relay's end of a link whose device is authenticated and announced.
//
// The reading goroutine (Run's own, or readAvailable) handles messages and, at the end,
// calls shutdown. A writer goroutine exists while frames are queued. Close starts a third
// one, which closes the connection and thereby ends the other two; shutdown waits for the
// writer and the closer.
type Session struct {
	Grant
	ID         string // a resumed session keeps it
	BootID     string
	InstanceID string
	Version    string // agent_version, for people only
	V21        bool   // the link speaks Subprotocol21

	conn         Conn
	opt          AcceptOptions
	timeBaseMS   int64        // session time at timeBaseAt; set before auth_ok
	timeBaseAt   int64        // as monotonicNow
	grantEnd     atomic.Int64 // as monotonicNow; math.MaxInt64: never
	lastReadAt   atomic.Int64 // as monotonicNow
	peerPingedAt atomic.Int64 // as monotonicNow; 0 before the first ping

	// Owned by the reading goroutine.
	unsolicitedAcks int
	floodTokens     float64 // see takeTokens
	refilledAt      int64   // when floodTokens was computed; 0 before the first message

	runWriter func() // s.drainQueue; a method value is an allocation, so it is made once

	owner       SessionOwner // of a polled session
	poller      *Poller      // watches it under key
	key         uint64
	readerState atomic.Uint32 // polled, reading, moreInput, peerClosed

	mu          sync.Mutex // protects the fields below
	pings       pingLog
	probe       *probe   // of active callers of Probe
	queue       [][]byte // frames to write, from head on; nil is a ping
	head        int
	writing     bool // there is a writer, or tryPing writes
	closeCode   int  // of this end's close; 0 while it has not closed
	closeReason string

	wg sync.WaitGroup // the writer and the closer
}

// epoch is the zero of monotonicNow.
var epoch = time.Now()

// monotonicNow is nanoseconds on the monotonic clock, for atomic fields.
func monotonicNow() int64 { return int64(time.Since(epoch)) }

var (
	errBackpressure = &codedError{"link: the device does not read", CloseTooLarge, "backpressure"}
	errFlood        = &codedError{"link: the device sends too much", CloseRateLimited, "rate_limited"}
)

// SessionHandler handles a device's messages. Calls come from the reading goroutine, one
// at a time; byte slices are the handler's only until it returns. An error ends the link.
type SessionHandler interface {
	// OnAnnounce replaces the manifest; the first one is the result of Accept.
	OnAnnounce(m *Manifest)
	// OnAck handles the answer to a command; known is false if there is no such command.
	OnAck(inReplyTo string, a CmdAck) (known bool)
	OnMetric(m Metric) error
	OnStreamEnd(e *StreamEnd)
	OnEvent(e *Event)
}

// Run reads the link until it ends and returns why; it waits for the session's goroutines.
// The link is closed when it returns. CloseCode of the error is the code that ended the
// link, whichever side sent it, or 0 when it broke. Run is called once, when the device's
// tools can be called: it begins with the announce_ack.
func (s *Session) Run(ctx context.Context, h SessionHandler) error {
	s.startWriter()
	stop := context.AfterFunc(ctx, func() { s.Close(CloseDraining, "draining") })
	defer stop()
	handle := func(msg []byte) error { return s.handle(msg, h) }
	var err error
	for err == nil {
		err = s.conn.Read(handle)
	}
	return s.shutdown(err)
}

// shutdown closes a link whose read failed with err, waits for the session's goroutines
// and returns the reason as Run does.
func (s *Session) shutdown(err error) error {
	code, reason := closeCodeFor(err)
	s.mu.Lock()
	if s.closeCode != 0 && s.closeCode != CloseGoingAway { // the read failed because this end has closed
		code, reason = s.closeCode, s.closeReason
		err = &CloseError{Code: code, Reason: reason, Err: err}
	}
	s.closeLocked(code, reason)
	s.mu.Unlock()
	s.wg.Wait()
	if CloseCode(err) != 0 || code == CloseGoingAway {
		return err // closed with a code, or broken
	}
	return &CloseError{Code: code, Reason: reason, Err: err}
}

// handle handles one message. Each has its price in flood tokens, see takeTokens.
func (s *Session) handle(msg []byte, h SessionHandler) error {
	now, cost := monotonicNow(), frameCost(len(msg))
	s.lastReadAt.Store(now)
	if !s.takeTokens(now, cost) {
		return errFlood
	}
	e, err := Decode(msg)
	if err != nil {
		return err
	}
	switch e.Type {
	case TypeCmdAck:
		a, err := e.decodeAck()
		if err != nil {
			return err
		}
		if h.OnAck(e.InReplyTo, a) {
			s.floodTokens += cost // a command asked for it
		} else if s.unsolicitedAcks++; s.unsolicitedAcks > maxUnsolicitedAcks {
			return badFrame("too many answers to no command")
		}
		return nil
	case TypeMetric:
		m, err := e.decodeMetric()
		if err != nil {
			return err
		}
		return h.OnMetric(m)
	case TypeStreamEnd:
		var end StreamEnd
		if err := decodeValid(&e, &end); err != nil {
			return err
		}
		h.OnStreamEnd(&end)
		return nil
	case TypeEvent:
		var ev Event
		if err := decodeValid(&e, &ev); err != nil {
			return err
		}
		if !s.takeTokens(now, eventCost) {
			return errFlood
		}
		h.OnEvent(&ev)
		return nil
	case TypeAnnounce:
		if !s.takeTokens(now, announceCost) {
			return errFlood
		}
		m, ack, err := s.checkAnnounce(&e)
		if err != nil {
			return err
		}
		h.OnAnnounce(m)
		return s.Send(ack)
	case TypeError:
		return decodeValid(&e, new(ErrorPayload))
	}
	return badFrame(e.Type + " from a device") // auth again, or a message of a relay
}

// decodeValid decodes a payload and checks what its type does not express.
func decodeValid(e *Envelope, v interface{ validate() bool }) error {
	if err := e.Decode(v); err != nil {
		return err
	}
	if !v.validate() {
		return badFrame("payload of " + e.Type)
	}
	return nil
}

// validate also brings the stream id to upper case.
func (e *StreamEnd) validate() (ok bool) {
	e.StreamID, ok = manifest.ParseULID(e.StreamID)
	return ok && (e.Reason == EndCanceled || e.Reason == EndHandlerError || e.Reason == EndShutdown)
}

// validate allows one line only: the relay forwards the data unchanged.
func (e *Event) validate() bool {
	return e.Topic == TopicAlert && len(e.Data) > 0 && len(e.Data) <= MaxEvent && e.Data[0] == '{' && !bytes.ContainsAny(e.Data, "\r\n")
}

// validate knows a closed set of codes.
func (p *ErrorPayload) validate() bool { return p.Code.Valid() }

// maxUnsolicitedAcks is how many acks to no command a device may send in one session.
const maxUnsolicitedAcks = 64

// The flood limit is a token bucket: a device may send 1,000 small frames at once and 500
// a second, besides the answers to its commands. That is ten times what its streams can
// need. Messages that cost the relay more cost more tokens.
const (
	floodBurst   = 1000
	floodRate    = 500 // tokens a second
	eventCost    = 20  // besides its size: it is stored and shown to people
	announceCost = 100 // besides its size: it is stored and sent to all clients
)

// frameCost is the cost of a frame of n bytes: 1, and 16 more at MaxFrame.
func frameCost(n int) float64 { return 1 + float64(n>>12) }

// takeTokens takes the cost of a frame or ping from the bucket; false: it holds too little.
func (s *Session) takeTokens(now int64, cost float64) bool {
	if s.refilledAt == 0 {
		s.floodTokens = floodBurst
	} else {
		s.floodTokens = min(floodBurst, s.floodTokens+float64(now-s.refilledAt)/1e9*floodRate)
	}
	s.refilledAt = now
	if s.floodTokens < cost {
		return false
	}
	s.floodTokens -= cost
	return true
}

// onPing handles each ping and pong, in the reading goroutine.
func (s *Session) onPing(ping bool, payload []byte) {
	now := monotonicNow()
	s.lastReadAt.Store(now)
	if ping {
		s.peerPingedAt.Store(now)
	} else if len(payload) > 0 {
		s.onPong(payload)
	}
	if !s.takeTokens(now, 1) {
		s.Close(CloseRateLimited, "rate_limited")
	}
}

// Send queues a frame for the device; a nil frame is a ping. A full queue ends the link
// with 4413. Send does not block, and fails only when the link has ended.
func (s *Session) Send(frame []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, err := s.enqueueLocked(frame)
	if first {
		s.startWriter()
	}
	return err
}

// Enqueue is Send without writing. first reports that nobody writes: the caller calls Flush once
// it has released its locks.
func (s *Session) Enqueue(frame []byte) (first bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enqueueLocked(frame)
}

// Flush writes queued frames in the caller's goroutine as long as that does not block, and leaves
// the rest to a writer.
func (s *Session) Flush() {
	c, ok := s.conn.(pollable)
	for ok = ok && s.readerState.Load()&polled != 0; ok; {
		frame, more := s.nextFrame()
		if !more {
			return
		}
		written, whole, err := false, true, error(nil)
		if frame != nil { // a ping has the time at which it is written: drainQueue makes it
			written, whole, err = c.tryWrite(frame)
		}
		if err != nil {
			s.Close(CloseGoingAway, "gone")
		} else if !written {
			s.mu.Lock()
			s.queue = slices.Insert(s.queue, s.head, frame)
			s.mu.Unlock()
		}
		ok = written && whole
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.continueLocked()
}

// continueLocked starts a writer in place of a goroutine that has written itself. After the close
// it does not: shutdown may have waited for the session's goroutines already.
func (s *Session) continueLocked() {
	if s.writing = s.closeCode == 0; s.writing {
		s.startWriter()
	}
}

// enqueueLocked adds a frame to the queue. first reports that the caller has to see to its writing.
func (s *Session) enqueueLocked(frame []byte) (first bool, err error) {
	if s.closeCode != 0 {
		return false, net.ErrClosed
	}
	if len(s.queue)-s.head >= maxQueuedFrames {
		s.closeLocked(CloseTooLarge, "backpressure")
		return false, errBackpressure
	}
	if s.head > 0 && len(s.queue) == cap(s.queue) { // reuse the space in front of head
		s.queue, s.head = append(s.queue[:0], s.queue[s.head:]...), 0
	}
	s.queue = append(s.queue, frame)
	first = !s.writing
	s.writing = true
	return first, nil
}

// startWriter starts a writer; writing was set by the caller.
func (s *Session) startWriter() {
	s.wg.Add(1)
	go s.runWriter()
}

// maxIdleQueue is the largest capacity of the queue that an idle session keeps.
const maxIdleQueue = 4

// nextFrame takes the next frame out of the queue for whoever writes; nil is a ping. more is
// false, and nobody writes any longer, when there is none or the link is closed.
func (s *Session) nextFrame() (frame []byte, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head == len(s.queue) || s.closeCode != 0 {
		if s.queue, s.head = s.queue[:0], 0; cap(s.queue) > maxIdleQueue {
			s.queue = nil
		}
		s.writing = false
		return nil, false
	}
	frame = s.queue[s.head]
	s.queue[s.head] = nil
	s.head++
	return frame, true
}

// drainQueue writes queued frames until there are none, or the link is closed.
func (s *Session) drainQueue() {
	defer s.wg.Done()
	if c, ok := s.conn.(pollable); ok && c.writeRest() != nil {
		s.Close(CloseGoingAway, "gone")
	}
	for {
		frame, more := s.nextFrame()
		if !more {
			return
		}
		var payload []byte
		if frame == nil {
			s.mu.Lock()
			payload = s.appendPingLocked(nil, true)
			s.mu.Unlock()
		}
		var err error
		if frame == nil {
			err = s.conn.Ping(payload)
		} else {
			err = s.conn.Write(frame)
		}
		if err != nil {
			s.Close(CloseGoingAway, "gone")
		}
	}
}

// Close ends the link with a close code; Run returns soon after. It does not block,
// although a dead peer can delay a close frame by a second: callers close many sessions in
// one loop.
func (s *Session) Close(code int, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked(code, reason)
}

// closeLocked records the first close code and starts the closer. Later calls have no
// effect: the first reason is the one that the device is sent.
func (s *Session) closeLocked(code int, reason string) {
	if s.closeCode == 0 {
		s.closeCode, s.closeReason = code, reason
		s.endProbeLocked(net.ErrClosed)
		s.wg.Go(func() {
			_ = s.conn.Close(code, reason)
			s.scheduleRead(0) // the reader finds the connection closed
		})
	}
}

// CheckLiveness is called by the owner about once in PingInterval. It closes a link that
// has been silent for IdleTimeout and pings. On v2 it leaves out the ping when the device has
// pinged lately; on v2.1 the device needs the session time. It reports whether it pinged.
func (s *Session) CheckLiveness() (pinged bool) {
	now := monotonicNow()
	if time.Duration(now-s.lastReadAt.Load()) >= IdleTimeout {
		s.Close(CloseTimeout, "idle_timeout")
		return false
	}
	if p := s.peerPingedAt.Load(); !s.V21 && p != 0 && time.Duration(now-p) < PingInterval {
		return false
	}
	if c, ok := s.conn.(pollable); !ok || s.readerState.Load()&polled == 0 || !s.tryPing(c) {
		return s.Send(nil) == nil
	}
	return true
}

// tryPing writes a ping in the caller's goroutine, which saves starting a writer for each
// idle link. It returns false when that would block, or a writer is active.
func (s *Session) tryPing(c pollable) bool {
	s.mu.Lock()
	free := s.closeCode == 0 && !s.writing
	var payload []byte
	if free {
		s.writing = true
		payload = s.appendPingLocked(nil, false)
	}
	s.mu.Unlock()
	if !free {
		return false
	}
	written, whole, err := c.tryPing(payload)
	if err != nil {
		s.Close(CloseGoingAway, "gone")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writing = false; len(s.queue) > s.head || !whole {
		s.continueLocked()
	}
	return written || err != nil
}

// IdleTime is how long the link has been silent.
func (s *Session) IdleTime() time.Duration {
	return time.Duration(monotonicNow() - s.lastReadAt.Load())
}
