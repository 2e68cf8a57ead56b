package link

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"agentctl/transport/netpoll"
)

// Poller waits for the input of many sessions in one goroutine, so that an idle link has
// none.
type Poller struct {
	ep *netpoll.Epoll

	mu       sync.Mutex // protects the fields below
	sessions map[uint64]*Session
	lastKey  uint64 // keys are not reused: an event may be reported after its session has ended
}

// NewPoller makes a Poller; Run must be called. The error is errors.ErrUnsupported where
// the kernel has no epoll; sessions are then started without a Poller.
func NewPoller() (*Poller, error) {
	ep, err := netpoll.New()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	return &Poller{ep: ep, sessions: make(map[uint64]*Session)}, nil
}

// Run dispatches events until ctx ends. Sessions that are still open then are not read
// any more, so it has to end last.
func (p *Poller) Run(ctx context.Context) error { return p.ep.Run(ctx, p.dispatch) }

// dispatch runs in the goroutine of Run, so it must not block: it starts a reader and
// leaves the reading to it.
func (p *Poller) dispatch(key uint64, ev netpoll.Events) {
	p.mu.Lock()
	s := p.sessions[key]
	p.mu.Unlock()
	if s == nil {
		return
	}
	if ev&netpoll.PeerClosed != 0 {
		s.scheduleRead(peerClosed)
	} else {
		s.scheduleRead(0)
	}
}

// add begins to watch a session, which must be in state reading.
func (p *Poller) add(s *Session, sock *netpoll.Socket) (key uint64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastKey++
	if err := p.ep.Add(sock, p.lastKey, netpoll.Readable); err != nil {
		return 0, err
	}
	p.sessions[p.lastKey] = s
	return p.lastKey, nil
}

// remove drops a session whose link has ended. The kernel drops the socket when it is
// closed.
func (p *Poller) remove(key uint64) {
	p.mu.Lock()
	delete(p.sessions, key)
	p.mu.Unlock()
}

// SessionOwner handles a device's messages, and the end of its link.
type SessionOwner interface {
	SessionHandler
	// OnClosed is the last call; err is what Run would have returned.
	OnClosed(err error)
}

// Bits of Session.readerState. At most one goroutine reads a polled session:
//
//	event     polled                  -> polled+reading            start a reader
//	event     polled+reading          -> polled+reading+moreInput  the reader reads on
//	no input  polled+reading          -> polled                    the reader ends
//	no input  polled+reading+moreInput -> polled+reading           the reader reads on
//	read error                           polled+reading for good: no reader is started again
const (
	polled     uint32 = 1 << iota // Start was called with a Poller; never cleared
	reading                       // a goroutine reads
	moreInput                     // an event was reported meanwhile
	peerClosed                    // an event said that the peer has closed; never cleared
)

// Start serves the link until it ends, like Run, but returns at once; the caller waits for
// h.OnClosed. With a Poller a goroutine exists only while there is input. Without one, or
// when this connection cannot be polled, one goroutine reads the link.
func (s *Session) Start(p *Poller, h SessionOwner) {
	if c, ok := s.conn.(pollable); ok && p != nil && s.startPolling(p, c, h) {
		return
	}
	go func() { h.OnClosed(s.Run(context.Background(), h)) }()
}

// startPolling hands the link to p; false: it needs a goroutine.
func (s *Session) startPolling(p *Poller, c pollable, h SessionOwner) bool {
	sock := c.socket()
	if sock == nil {
		return false
	}
	s.readerState.Store(polled | reading)
	key, err := p.add(s, sock)
	if err != nil {
		s.readerState.Store(0)
		return false
	}
	s.owner, s.poller, s.key = h, p, key
	c.setNonblocking()
	s.startWriter()      // announce_ack is queued
	go s.readAvailable() // input may have come with the handshake
	return true
}

// scheduleRead makes sure that a goroutine reads a polled session, or reads on; bits are
// added to its state.
func (s *Session) scheduleRead(bits uint32) {
	for {
		old := s.readerState.Load()
		if old&polled == 0 {
			return
		}
		next := old | bits | reading
		if old&reading != 0 {
			next |= moreInput
		}
		if s.readerState.CompareAndSwap(old, next) {
			if old&reading == 0 {
				go s.readAvailable()
			}
			return
		}
	}
}

// readAvailable reads until there is no input, or the link has ended.
func (s *Session) readAvailable() {
	c := s.conn.(pollable)
	handle := func(msg []byte) error { return s.handle(msg, s.owner) }
	for {
		old := s.readerState.And(^moreInput) &^ moreInput
		c.onReadable(old&peerClosed != 0)
		var err error
		for err == nil {
			err = c.Read(handle)
		}
		if !errors.Is(err, netpoll.ErrWouldBlock) {
			s.poller.remove(s.key)
			s.owner.OnClosed(s.shutdown(err))
			return
		}
		if s.readerState.CompareAndSwap(old, old&^reading) {
			return
		}
	}
}
