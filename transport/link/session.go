package link

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
)

// Session is the relay's end of a link whose device is authenticated and announced.
type Session struct {
	Grant
	ID         string
	BootID     string
	InstanceID string
	Version    string // agent_version, for people only

	conn         Conn
	opt          AcceptOptions
	lastReadAt   atomic.Int64 // monotonic ns since epoch
	peerPingedAt atomic.Int64 // when the peer last pinged

	// Of the reading goroutine only.
	unsolicitedAcks int     // acks that answer nothing
	floodTokens     float64 // flood bucket
	refilledAt      int64   // when tokens was counted; 0 before the first

	runWriter func() // s.write; a method value made once instead of at every burst

	owner       SessionOwner // of Start
	poller      *Poller      // where it rests, under key
	key         uint64
	readerState atomic.Uint32 // whose turn it is to read: started, running, again, gone

	mu          sync.Mutex // protects the fields below
	queue       [][]byte   // from head on; nil is a ping
	head        int
	writing     bool
	closeCode   int // why this end closed; 0 while it has not
	closeReason string

	wg sync.WaitGroup // the writer and the closer
}

// epoch is the zero of the package's monotonic readings.
var epoch = time.Now()

func monotonicNow() int64 { return int64(time.Since(epoch)) }

var (
	errBackpressure = errors.New("link: the device does not read")
	errFlood        = errors.New("link: the device sends too much")
)

// SessionHandler is told what a device sends. Calls come from the session's goroutine,
// one at a time; byte slices are the handler's only until it returns.
type SessionHandler interface {
	OnAnnounce(m *Manifest)
	OnAck(inReplyTo string, a CmdAck) (known bool)
	OnMetric(m Metric) error
	OnStreamEnd(e *StreamEnd)
	OnEvent(e *Event)
}

// Run reads the link until it ends and returns why; it waits for the writer. The link
// is closed when it returns. CloseCode of the error is the code that ended the link,
// whichever side sent it, or 0 when it just broke. It is called once, when the device's
// tools are served: it begins with the announce_ack.
func (s *Session) Run(ctx context.Context, h SessionHandler) error {
	s.wg.Add(1)
	go s.runWriter()
	stop := context.AfterFunc(ctx, func() { s.Close(CloseDraining, "draining") })
	defer stop()
	handle := func(msg []byte) error { return s.handle(msg, h) }
	var err error
	for err == nil {
		err = s.conn.Read(handle)
	}
	return s.shutdown(err)
}

// shutdown closes the link that ended with err, waits for the session's goroutines and tells
// why in terms of close codes.
func (s *Session) shutdown(err error) error {
	code, reason := closeCodeFor(err)
	s.mu.Lock()
	if s.closeCode != 0 && s.closeCode != CloseGoingAway { // closed from this end; the reader fell over that
		code, reason = s.closeCode, s.closeReason
		err = &CloseError{Code: code, Reason: reason, Err: err}
	}
	s.closeLocked(code, reason)
	s.mu.Unlock()
	s.wg.Wait()
	if CloseCode(err) != 0 || code == CloseGoingAway {
		return err // the peer's code, or it broke
	}
	return &CloseError{Code: code, Reason: reason, Err: err}
}

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
			s.floodTokens += cost // it was asked for
		} else if s.unsolicitedAcks++; s.unsolicitedAcks > maxUnsolicitedAcks {
			return badFrame("too many answers to nothing")
		}
	case TypeMetric:
		m, err := e.decodeMetric()
		if err != nil {
			return err
		}
		return h.OnMetric(m)
	case TypeStreamEnd:
		var end StreamEnd
		if err := e.Decode(&end); err != nil {
			return err
		}
		id, ok := manifest.ParseULID(end.StreamID)
		if !ok || end.Reason != EndCanceled && end.Reason != EndHandlerError && end.Reason != EndShutdown {
			return badFrame("payload of stream_end")
		}
		end.StreamID = id
		h.OnStreamEnd(&end)
	case TypeEvent:
		var ev Event
		if err := e.Decode(&ev); err != nil {
			return err
		}
		if ev.Topic != TopicAlert || len(ev.Data) == 0 || len(ev.Data) > MaxEvent || ev.Data[0] != '{' || bytes.ContainsAny(ev.Data, "\r\n") {
			return badFrame("payload of event")
		}
		if !s.takeTokens(now, eventCost) {
			return errFlood
		}
		h.OnEvent(&ev)
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
		var p ErrorPayload
		if err := e.Decode(&p); err != nil {
			return err
		}
		if !p.Code.Valid() {
			return badFrame("payload of error")
		}
	default: // auth again, or a relay's word
		return badFrame(e.Type + " from a device")
	}
	return nil
}

// maxUnsolicitedAcks is how many acks that answer nothing a device may send in one session.
const maxUnsolicitedAcks = 64

// A device may send 1,000 small frames at once and 500 a second, beside the answers to its
// commands: ten times what its streams can need. What costs the relay more costs the
// device more.
const (
	floodBurst   = 1000
	floodRate    = 500
	eventCost    = 20  // beside its size: it is kept, and shown to people
	announceCost = 100 // beside its size: it is written to disk and shown to every client
)

// frameCost of a frame of n bytes: 1, and 16 more at MaxFrame.
func frameCost(n int) float64 { return 1 + float64(n>>12) }

// takeTokens takes a frame's or ping's cost from the flood bucket; false: there is too little.
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

// onPing is told of each ping and pong, in the reading goroutine.
func (s *Session) onPing(ping bool) {
	now := monotonicNow()
	s.lastReadAt.Store(now)
	if ping {
		s.peerPingedAt.Store(now)
	}
	if !s.takeTokens(now, 1) {
		s.Close(CloseRateLimited, "rate_limited")
	}
}

// Send queues a frame for the device; a full queue ends the link with 4413. It never
// blocks. After an error the link has ended.
func (s *Session) Send(frame []byte) error { return s.enqueue(frame) }

// enqueue hands a frame to the writer, which lives only while there is work: an idle
// link has one goroutine. A nil frame is a ping.
func (s *Session) enqueue(frame []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closeCode != 0 {
		return net.ErrClosed
	}
	if len(s.queue)-s.head >= maxQueuedFrames {
		s.closeLocked(CloseTooLarge, "backpressure")
		return errBackpressure
	}
	if s.head > 0 && len(s.queue) == cap(s.queue) { // room in front instead of more
		s.queue, s.head = append(s.queue[:0], s.queue[s.head:]...), 0
	}
	s.queue = append(s.queue, frame)
	if !s.writing {
		s.writing = true
		s.wg.Add(1)
		go s.runWriter()
	}
	return nil
}

// maxIdleQueue is how long a queue may be that an idle session keeps.
const maxIdleQueue = 4

func (s *Session) drainQueue() {
	defer s.wg.Done()
	for {
		s.mu.Lock()
		if s.head == len(s.queue) || s.closeCode != 0 {
			if s.queue, s.head = s.queue[:0], 0; cap(s.queue) > maxIdleQueue {
				s.queue = nil
			}
			s.writing = false
			s.mu.Unlock()
			return
		}
		frame := s.queue[s.head]
		s.queue[s.head] = nil
		s.head++
		s.mu.Unlock()
		var err error
		if frame == nil {
			err = s.conn.Ping()
		} else {
			err = s.conn.Write(frame)
		}
		if err != nil {
			s.Close(CloseGoingAway, "gone")
		}
	}
}

// Close ends the link with a close code; Run returns soon after. It does not block: a
// dead peer can hold a close frame up for a second, and sweeps call this.
func (s *Session) Close(code int, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked(code, reason)
}

func (s *Session) closeLocked(code int, reason string) {
	if s.closeCode == 0 {
		s.closeCode, s.closeReason = code, reason
		s.wg.Go(func() {
			_ = s.conn.Close(code, reason)
			s.scheduleRead(0) // who reads finds out
		})
	}
}

// CheckLiveness is called by the owner's sweep, about once in PingInterval: it closes a link that
// has been silent for IdleTimeout and pings one whose device has not pinged lately.
func (s *Session) CheckLiveness() {
	now := monotonicNow()
	if time.Duration(now-s.lastReadAt.Load()) >= IdleTimeout {
		s.Close(CloseTimeout, "idle_timeout")
		return
	}
	if p := s.peerPingedAt.Load(); p != 0 && time.Duration(now-p) < PingInterval {
		return
	}
	if c, ok := s.conn.(pollable); !ok || s.readerState.Load()&statePolled == 0 || !s.tryPing(c) {
		_ = s.enqueue(nil)
	}
}

// tryPing writes a ping at once, in the caller's goroutine; false: that would have waited, or
// the writer is at work.
func (s *Session) tryPing(c pollable) bool {
	s.mu.Lock()
	free := s.closeCode == 0 && !s.writing
	s.writing = s.writing || free
	s.mu.Unlock()
	if !free {
		return false
	}
	written, err := c.tryPing()
	if err != nil {
		s.Close(CloseGoingAway, "gone")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// What came in the meantime; but once it has ended nobody waits for a writer.
	if s.writing = len(s.queue) > s.head && s.closeCode == 0; s.writing {
		s.wg.Add(1)
		go s.runWriter()
	}
	return written || err != nil
}

// IdleTime is how long the link has been silent.
func (s *Session) IdleTime() time.Duration {
	return time.Duration(monotonicNow() - s.lastReadAt.Load())
}
