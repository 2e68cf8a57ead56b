package link

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"agentctl/transport/netpoll"
)

// Poller watches sessions from one goroutine, so that a silent link has none.
type Poller struct {
	ep *netpoll.Epoll

	mu    sync.Mutex // protects the fields below
	slots []slot
	free  []uint32
}

// slot holds a watched session. The kernel may still tell about one that has left: its
// key has an older turn.
type slot struct {
	turn uint32
	s    *Session
}

// NewPoller makes a Poller; Run must be called. The error is errors.ErrUnsupported where
// the kernel has no epoll; sessions then do without.
func NewPoller() (*Poller, error) {
	ep, err := netpoll.New()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	return &Poller{ep: ep}, nil
}

// Run wakes sessions until ctx ends. Those that still rest then rest for good: it is the
// last to end.
func (p *Poller) Run(ctx context.Context) error { return p.ep.Run(ctx, p.tell) }

func (p *Poller) tell(key uint64, what netpoll.Events) {
	i, turn := uint32(key), uint32(key>>32)
	p.mu.Lock()
	var s *Session
	if at := p.slots[i]; at.turn == turn {
		s = at.s
	}
	p.mu.Unlock()
	switch {
	case s == nil:
	case what&netpoll.PeerClosed != 0:
		s.scheduleRead(statePeerClosed)
	default:
		s.scheduleRead(0)
	}
}

// add begins to watch a session, whose turn must be running.
func (p *Poller) add(s *Session, sock *netpoll.Socket) (key uint64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		p.slots = append(p.slots, slot{})
		p.free = append(p.free, uint32(len(p.slots)-1))
	}
	i := p.free[len(p.free)-1]
	key = uint64(p.slots[i].turn)<<32 | uint64(i)
	if err := p.ep.Add(sock, key, netpoll.Readable); err != nil {
		return 0, err
	}
	p.free = p.free[:len(p.free)-1]
	p.slots[i].s = s
	return key, nil
}

func (p *Poller) remove(key uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := uint32(key)
	p.slots[i] = slot{turn: p.slots[i].turn + 1}
	p.free = append(p.free, i)
}

// SessionOwner is told what a device sends, and that its link is over.
type SessionOwner interface {
	SessionHandler
	// OnClosed is the last call: what Run would have returned.
	OnClosed(err error)
}

// Bits of Session.turn.
const (
	statePolled     uint32 = 1 << iota // Start was called, and the session rests with a Poller
	stateReading                       // a goroutine reads
	stateMoreInput                     // something came meanwhile
	statePeerClosed                    // the peer has gone; never cleared
)

// Start serves the link until it ends, as Run does and instead of it, and returns at once;
// the caller waits for h.Over. With a Poller a goroutine reads only while there is something to read;
// without one, or where this link cannot rest, one waits.
func (s *Session) Start(p *Poller, h SessionOwner) {
	s.owner = h
	if c, ok := s.conn.(pollable); ok && p != nil && s.startPolling(p, c) {
		return
	}
	go func() { h.OnClosed(s.Run(context.Background(), h)) }()
}

// startPolling gives the link to p; false: it must be read by a goroutine.
func (s *Session) startPolling(p *Poller, c pollable) bool {
	sock := c.socket()
	if sock == nil {
		return false
	}
	s.readerState.Store(statePolled | stateReading)
	key, err := p.add(s, sock)
	if err != nil {
		s.readerState.Store(0)
		return false
	}
	s.poller, s.key = p, key
	c.setNonblocking()
	s.wg.Add(1)
	go s.runWriter()     // announce_ack, as Run
	go s.readAvailable() // what came with the handshake
	return true
}

// scheduleRead has somebody read.
func (s *Session) scheduleRead(bits uint32) {
	for {
		was := s.readerState.Load()
		if was&statePolled == 0 {
			return
		}
		next := was | bits | stateReading
		if was&stateReading != 0 {
			next |= stateMoreInput
		}
		if !s.readerState.CompareAndSwap(was, next) {
			continue
		}
		if was&stateReading == 0 {
			go s.readAvailable()
		}
		return
	}
}

// readAvailable reads until nothing is there, or the link has ended.
func (s *Session) readAvailable() {
	c := s.conn.(pollable)
	handle := func(msg []byte) error { return s.handle(msg, s.owner) }
	for {
		was := s.readerState.And(^stateMoreInput) &^ stateMoreInput
		c.onReadable(was&statePeerClosed != 0)
		var err error
		for err == nil {
			err = c.Read(handle)
		}
		if !errors.Is(err, netpoll.ErrWouldBlock) {
			s.poller.remove(s.key)
			s.owner.OnClosed(s.shutdown(err))
			return // stateReading for good: nobody wakes it
		}
		if s.readerState.CompareAndSwap(was, was&^stateReading) {
			return
		}
	}
}
