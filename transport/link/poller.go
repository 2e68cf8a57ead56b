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
		s.wake(gone)
	default:
		s.wake(0)
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
	started uint32 = 1 << iota // Start was called, and the session rests with a Poller
	running                    // a goroutine reads
	again                      // something came meanwhile
	gone                       // the peer has gone; never cleared
)

// Start serves the link until it ends, as Run does and instead of it, and returns at once;
// the caller waits for h.Over. With a Poller a goroutine reads only while there is something to read;
// without one, or where this link cannot rest, one waits.
func (s *Session) Start(p *Poller, h SessionOwner) {
	s.keeper = h
	if c, ok := s.conn.(pollable); ok && p != nil && s.rest(p, c) {
		return
	}
	go func() { h.OnClosed(s.Run(context.Background(), h)) }()
}

// rest gives the link to p; false: it must be read by a goroutine.
func (s *Session) rest(p *Poller, c pollable) bool {
	sock := c.socket()
	if sock == nil {
		return false
	}
	s.turn.Store(started | running)
	key, err := p.add(s, sock)
	if err != nil {
		s.turn.Store(0)
		return false
	}
	s.poller, s.key = p, key
	c.rest()
	s.wg.Add(1)
	go s.writer() // announce_ack, as Run
	go s.work()   // what came with the handshake
	return true
}

// wake has somebody read.
func (s *Session) wake(bits uint32) {
	for {
		was := s.turn.Load()
		if was&started == 0 {
			return
		}
		next := was | bits | running
		if was&running != 0 {
			next |= again
		}
		if !s.turn.CompareAndSwap(was, next) {
			continue
		}
		if was&running == 0 {
			go s.work()
		}
		return
	}
}

// work reads until nothing is there, or the link has ended.
func (s *Session) work() {
	c := s.conn.(pollable)
	handle := func(msg []byte) error { return s.handle(msg, s.keeper) }
	for {
		was := s.turn.And(^again) &^ again
		c.fresh(was&gone != 0)
		var err error
		for err == nil {
			err = c.Read(handle)
		}
		if !errors.Is(err, netpoll.ErrWouldBlock) {
			s.poller.remove(s.key)
			s.keeper.OnClosed(s.end(err))
			return // running for good: nobody wakes it
		}
		if s.turn.CompareAndSwap(was, was&^running) {
			return
		}
	}
}
