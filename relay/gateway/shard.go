package gateway

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"agentctl/transport/sse"
)

// shard is one goroutine that writes to its share of the clients. Only it touches them
// after they have joined.
type shard struct {
	g    *Gateway
	wake chan struct{}

	delivered, dropped, bytes atomic.Uint64

	// protected by Gateway.mu
	events      []*event // not delivered yet, at most maxBacklog
	spare       []*event
	added       []*subscriber
	writable    []*subscriber
	closed      []*subscriber
	subscribers int // clients, those in joins included

	// the goroutine's own
	poller          *sse.Poller
	groups          map[string]*group
	first           *subscriber // by the time of the next heartbeat
	last            *subscriber
	expiring        int     // clients whose identity can end
	unpolledBlocked int     // blocked clients that nobody tells when they are writable
	lastID          uint64  // newest event handled
	chunks          []chunk // of the group at hand
	joined          []byte  // several chunks of one client's queue
	timer           *time.Timer
	sweepAt         time.Time // when to look at identities and retries next
}

// group is the clients of a shard that see the same events.
type group struct {
	view    view
	key     string
	clients []*subscriber
}

// chunk is one or more whole events, written at once.
type chunk struct {
	b           []byte
	n           int // events in it, 0 for the gateway's own words
	first, last uint64
}

func newShard(g *Gateway) *shard {
	return &shard{g: g, wake: make(chan struct{}, 1), groups: make(map[string]*group)}
}

func (s *shard) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *shard) putLocked(e *event) {
	if s.subscribers > 0 {
		s.events = append(s.events, e)
		s.signal()
	}
}

// run delivers until ctx ends, then closes all clients.
func (s *shard) run(ctx context.Context, p *sse.Poller) {
	s.poller = p
	s.timer = time.NewTimer(time.Hour)
	defer s.timer.Stop()
	for ctx.Err() == nil {
		s.arm()
		select {
		case <-ctx.Done():
		case <-s.wake:
		case <-s.timer.C:
		}
		s.step()
	}
	s.g.mu.Lock()
	joins := s.added
	s.added, s.writable, s.closed, s.events = nil, nil, nil, nil
	s.g.mu.Unlock()
	for _, c := range joins {
		s.add(c)
	}
	for s.first != nil {
		s.remove(s.first)
	}
}

// step handles what waits: who came, who can be written to again, new events, who went,
// and what is due.
func (s *shard) step() {
	g := s.g
	g.mu.Lock()
	events, joins, writable, gone := s.events, s.added, s.writable, s.closed
	s.events, s.spare, s.added, s.writable, s.closed = s.spare[:0], nil, nil, nil, nil
	if g.backlogTaken != nil {
		close(g.backlogTaken)
		g.backlogTaken = nil
	}
	g.mu.Unlock()
	for _, c := range joins {
		s.add(c)
	}
	for _, c := range writable {
		s.drain(c)
	}
	if len(events) > 0 {
		s.deliver(events)
	}
	for _, c := range gone {
		s.remove(c)
	}
	now := time.Now()
	s.sendHeartbeats(now)
	if !s.sweepAt.After(now) {
		s.sweep(now)
	}
	if cap(events) <= 64 { // a larger one is given back
		clear(events)
		g.mu.Lock()
		s.spare = events[:0]
		g.mu.Unlock()
	}
}

// arm sets the timer to what is due next.
func (s *shard) arm() {
	at := time.Now().Add(time.Hour)
	if s.first != nil {
		at = s.first.heartbeatAt
	}
	if s.expiring > 0 || s.unpolledBlocked > 0 {
		if s.sweepAt.Before(at) {
			at = s.sweepAt
		}
	}
	s.timer.Reset(time.Until(at))
}

func (s *shard) add(c *subscriber) {
	key := c.view.key()
	gr := s.groups[key]
	if gr == nil {
		gr = &group{view: c.view, key: key}
		s.groups[key] = gr
	}
	c.view = view{} // the group's, from here on
	c.group, c.index = gr, len(gr.clients)
	gr.clients = append(gr.clients, c)
	now := time.Now()
	c.heartbeatAt = now.Add(s.g.opts.Heartbeat)
	s.appendHeartbeat(c)
	if c.isActive != nil {
		if s.expiring++; s.expiring == 1 && s.unpolledBlocked == 0 {
			s.sweepAt = now.Add(time.Second)
		}
	}
	told, err := s.poller.Add(c.out, c)
	if err != nil {
		s.remove(c)
		return
	}
	c.polled = told
	s.drain(c)
}

// remove takes a client off and closes its stream.
func (s *shard) remove(c *subscriber) {
	if c.group == nil {
		return
	}
	gr := c.group
	n := len(gr.clients) - 1
	gr.clients[c.index] = gr.clients[n]
	gr.clients[c.index].index = c.index
	gr.clients[n] = nil
	if gr.clients = gr.clients[:n]; n == 0 {
		delete(s.groups, gr.key)
	}
	s.removeHeartbeat(c)
	if c.isActive != nil {
		s.expiring--
	}
	s.setBlocked(c, false)
	c.quota.release(c.queued + c.rest)
	c.group, c.queue, c.queued, c.rest = nil, nil, 0, 0
	s.poller.Remove(c.out)
	c.out.Close()
	s.g.onRemoved(c)
}

// deliver hands out events to every group that sees them.
func (s *shard) deliver(events []*event) {
	for _, gr := range s.groups {
		s.batch(gr, events)
		if len(s.chunks) == 0 {
			continue
		}
		for i := len(gr.clients) - 1; i >= 0; i-- { // remove moves the last one
			c := gr.clients[i]
			if c.joinedAt >= s.chunks[0].first {
				s.deliverSince(c, events)
				continue
			}
			for j := range s.chunks {
				if !s.send(c, &s.chunks[j]) {
					break
				}
			}
		}
	}
	clear(s.chunks)
	s.chunks = s.chunks[:0]
	s.lastID = events[len(events)-1].id
}

// deliverSince is for a client that joined among these events.
func (s *shard) deliverSince(c *subscriber, events []*event) {
	v := &c.group.view
	for _, e := range events {
		if e.id > c.joinedAt && v.matches(e.tenant, e.topic) && !s.send(c, &chunk{b: e.frame, n: 1, first: e.id, last: e.id}) {
			return
		}
	}
}

// batch makes the chunks of a group: neighbours are joined up to maxChunk, one alone is
// the event's own bytes.
func (s *shard) batch(gr *group, events []*event) {
	s.chunks = s.chunks[:0]
	for _, e := range events {
		if !gr.view.matches(e.tenant, e.topic) {
			continue
		}
		if n := len(s.chunks); n > 0 {
			if ch := &s.chunks[n-1]; len(ch.b)+len(e.frame) <= maxChunk {
				if ch.n == 1 {
					ch.b = append(make([]byte, 0, min(maxChunk, 8*(len(ch.b)+len(e.frame)))), ch.b...)
				}
				ch.b, ch.n, ch.last = append(ch.b, e.frame...), ch.n+1, e.id
				continue
			}
		}
		s.chunks = append(s.chunks, chunk{b: e.frame, n: 1, first: e.id, last: e.id})
	}
}

// sendHeartbeats writes the heartbeats that are due, or nearly: thousands of clients do not wake the
// shard one by one. All have the same period, so the first in the list is the next.
func (s *shard) sendHeartbeats(now time.Time) {
	var frame []byte
	soon := now
	if s.first != nil && !s.first.heartbeatAt.After(now) {
		soon = now.Add(s.g.opts.Heartbeat / 128)
	}
	for c := s.first; c != nil && !c.heartbeatAt.After(soon); c = s.first {
		s.removeHeartbeat(c)
		if c.heartbeatAt = c.heartbeatAt.Add(s.g.opts.Heartbeat); !c.heartbeatAt.After(soon) { // late by more than one: nothing is made up for
			c.heartbeatAt = now.Add(s.g.opts.Heartbeat)
		}
		s.appendHeartbeat(c)
		if c.blocked() {
			if now.Sub(c.since) > stallTimeout {
				s.remove(c)
			}
			continue
		}
		if frame == nil {
			frame = heartbeat(now)
		}
		s.send(c, &chunk{b: frame})
	}
}

func heartbeat(now time.Time) []byte {
	return fmt.Appendf(nil, "event: heartbeat\ndata: {\"ts\":%d}\n\n", now.UnixMilli())
}

// sweep ends the streams of identities that ended, and tries blocked clients that nobody
// tells about.
func (s *shard) sweep(now time.Time) {
	s.sweepAt = now.Add(time.Hour)
	if s.expiring == 0 && s.unpolledBlocked == 0 {
		return
	}
	var next *subscriber
	for c := s.first; c != nil; c = next {
		next = c.next
		if c.isActive != nil && c.isActive() != nil {
			s.remove(c)
		} else if c.blocked() && !c.polled {
			s.drain(c)
		}
	}
	s.sweepAt = now.Add(time.Second)
	if s.unpolledBlocked > 0 {
		s.sweepAt = now.Add(50 * time.Millisecond)
	}
}

func (s *shard) appendHeartbeat(c *subscriber) {
	c.prev, c.next = s.last, nil
	if s.last != nil {
		s.last.next = c
	} else {
		s.first = c
	}
	s.last = c
}

func (s *shard) removeHeartbeat(c *subscriber) {
	if c.prev != nil {
		c.prev.next = c.next
	} else {
		s.first = c.next
	}
	if c.next != nil {
		c.next.prev = c.prev
	} else {
		s.last = c.prev
	}
	c.prev, c.next = nil, nil
}
