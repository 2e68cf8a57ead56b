package sse

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxLingering        = 1024 // descriptors kept open for stalled peers after a close
	lingerCheckInterval = time.Second
)

// Streams opens event streams and counts them. The zero value is ready for use; its
// methods may be called from any goroutine.
type Streams struct {
	opened, frames, dropped, bytes, pings atomic.Uint64

	mu        sync.Mutex // protects the fields below; taken before Conn.mu
	open      int
	draining  bool
	empty     chan struct{}   // made by Drain, closed when the last stream closes
	closes    map[Code]uint64 // 0: without a close event
	lingering map[*lingeringConn]struct{}
}

// Stats are counters since the start, except Open and Lingering, which are now.
type Stats struct {
	Open      int
	Lingering int // closed streams whose stalled peer may still read the close event
	Opened    uint64
	Frames    uint64          // events given to a connection, or to the queue of its stream
	Dropped   uint64          // events that policy Drop dropped
	Bytes     uint64          // of events, without headers and TLS
	Pings     uint64          // of policy Cut
	Closes    map[Code]uint64 // by code; 0: ended without a close event
}

// Stats returns the counters.
func (s *Streams) Stats() Stats {
	st := Stats{
		Opened: s.opened.Load(), Frames: s.frames.Load(), Dropped: s.dropped.Load(), Bytes: s.bytes.Load(), Pings: s.pings.Load(),
		Closes: map[Code]uint64{0: 0},
	}
	for c := range reasons { // all codes, so that each has a metric
		st.Closes[c] = 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(st.Closes, s.closes)
	st.Open, st.Lingering = s.open, len(s.lingering)
	return st
}

// add counts a stream as open.
func (s *Streams) add() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return ErrDraining
	}
	s.open++
	return nil
}

func (s *Streams) countClose(c Code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closes == nil {
		s.closes = make(map[Code]uint64)
	}
	s.closes[c]++
}

// done undoes add, for a stream that closed or failed to open.
func (s *Streams) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open == 0 && s.empty != nil {
		close(s.empty)
		s.empty = nil
	}
}

// Drain refuses new streams with ErrDraining and waits until the open ones are closed or ctx
// ends. It does not end streams: cancel the context of their handlers.
// http.Server.Shutdown does not wait for streams, so call Drain before the process ends.
// Connections that still linger are left to the kernel.
func (s *Streams) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	var empty chan struct{}
	if s.open > 0 {
		if s.empty == nil {
			s.empty = make(chan struct{})
		}
		empty = s.empty
	}
	s.mu.Unlock()

	if empty != nil {
		select {
		case <-empty:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.lingering {
		l.timer.Stop()
		l.conn.closeGracefully(time.Until(l.until))
	}
	s.lingering = nil
	return nil
}

// lingeringConn is a connection to a stalled peer, after the last byte and FIN were written.
// The peer may resume until then and read the close event; after that the connection is reset.
type lingeringConn struct {
	conn  *Conn
	until time.Time
	timer *time.Timer
}

// linger takes ownership of c. A timer checks once a second whether the peer has acknowledged
// everything; no goroutine waits. Beyond maxLingering, the kernel alone delivers the rest.
func (s *Streams) linger(c *Conn, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.sock == nil || s.draining || len(s.lingering) >= maxLingering {
		c.closeGracefully(d)
		return
	}
	if s.lingering == nil {
		s.lingering = make(map[*lingeringConn]struct{})
	}
	l := &lingeringConn{conn: c, until: time.Now().Add(d)}
	s.lingering[l] = struct{}{}
	l.timer = time.AfterFunc(min(d, lingerCheckInterval), func() { s.checkLingering(l) })
}

func (s *Streams) checkLingering(l *lingeringConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.lingering[l]; !ok {
		return
	}
	left := time.Until(l.until)
	switch {
	case l.conn.unacked() == 0:
		l.conn.discardInput()
		l.conn.Conn.Close()
	case left <= 0:
		l.conn.reset()
	default:
		l.timer.Reset(min(left, lingerCheckInterval))
		return
	}
	delete(s.lingering, l)
}
