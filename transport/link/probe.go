package link

import (
	"context"
	"net"
)

// probe is a ping for whose answer callers of Probe wait.
type probe struct {
	payload int64         // 0 until the ping is written
	waiters int           // callers
	done    chan struct{} // closed at the end
	err     error         // set before done is closed
}

// Probe pings the device and waits for the pong of that very ping: an earlier pong, or another
// message, may have been on its way since before the device died. Concurrent callers share
// one ping. The error is ctx's cause, or net.ErrClosed when the link has ended.
func (s *Session) Probe(ctx context.Context) error {
	s.mu.Lock()
	if s.closeCode != 0 {
		s.mu.Unlock()
		return net.ErrClosed
	}
	p := s.probe
	if p == nil {
		p = &probe{done: make(chan struct{})}
		s.probe = p
		first, err := s.enqueueLocked(nil)
		if first {
			s.startWriter()
		}
		if err != nil {
			s.mu.Unlock()
			return err
		}
	}
	p.waiters++
	s.mu.Unlock()
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.waiters--; p.waiters == 0 && s.probe == p {
		s.probe = nil // the next caller sends a new ping
	}
	return context.Cause(ctx)
}

// endProbeLocked ends the probe, if there is one.
func (s *Session) endProbeLocked(err error) {
	if p := s.probe; p != nil {
		s.probe, p.err = nil, err
		close(p.done)
	}
}

// appendPingLocked appends the payload of the next ping. It is empty on v2, unless
// the ping is a probe. forQueue: the ping comes from the queue and is therefore certain to be
// written, so a probe may wait for its pong.
func (s *Session) appendPingLocked(b []byte, forQueue bool) []byte {
	isProbe := forQueue && s.probe != nil && s.probe.payload == 0
	if !s.V21 && !isProbe {
		return b
	}
	payload := s.pings.next(s.NowMS())
	if isProbe {
		s.probe.payload = payload
	}
	return appendPing(b, payload)
}

// onPong handles the payload of a pong.
func (s *Session) onPong(payload []byte) {
	ms, ok := parsePing(payload)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pings.onPong(ms, s.NowMS()) && s.probe != nil && s.probe.payload == ms {
		s.endProbeLocked(nil)
	}
}
