package gateway

import (
	"fmt"
	"time"

	"agentctl/transport/sse"
)

// subscriber is one subscriber. It belongs to its shard's goroutine.
type subscriber struct {
	shard  *shard
	out    *sse.Outlet
	view   view // until it is in a group
	group  *group
	index  int  // its place in the group
	polled bool // the Poller says when it is writable

	identity string       // its identity, by which replays are shared out
	quota    *quota       // of that identity
	joinedAt uint64       // events up to this one are not for it
	lastID   uint64       // newest event given to it
	isActive func() error // whether its identity is still good; nil: it cannot end

	heartbeatAt time.Time // of the next heartbeat
	prev, next  *subscriber

	// A client that does not take what it is given. All zero while it keeps up.
	full   bool      // its connection has a rest of a write
	rest   int       // bytes of that write
	queue  []chunk   // waits for that
	queued int       // bytes in queue, and some for each chunk
	room   int       // bound of queued
	lost   uint64    // events dropped since the queue was full
	since  time.Time // when it took something last; zero while it keeps up
}

// chunkCost is counted for a waiting chunk besides its bytes.
const chunkCost = 64

func (c *subscriber) blocked() bool { return !c.since.IsZero() }

func (s *shard) setBlocked(c *subscriber, yes bool) {
	if yes == c.blocked() {
		return
	}
	if yes {
		c.since = time.Now()
		if !c.polled {
			if s.unpolledBlocked++; s.unpolledBlocked == 1 {
				s.sweepAt = c.since.Add(50 * time.Millisecond)
			}
		}
		return
	}
	c.since = time.Time{}
	if !c.polled {
		s.unpolledBlocked--
	}
}

// send writes a chunk to a client, or has it wait, or drops it. False: the client ended.
func (s *shard) send(c *subscriber, ch *chunk) bool {
	if c.blocked() {
		s.queue(c, ch)
		return true
	}
	s.count(c, ch) // before: whoever reads the event and then the counters finds it there
	s.bytes.Add(uint64(len(ch.b)))
	full, err := c.out.Offer(ch.b)
	if err != nil || (full && !c.rests(len(ch.b))) {
		s.remove(c)
		return false
	}
	if full {
		s.setBlocked(c, true)
	}
	return true
}

// rests notes that some of a write of n bytes waits in the connection; false when nothing
// more may wait.
func (c *subscriber) rests(n int) bool {
	if !c.quota.hold(n) {
		return false
	}
	c.full, c.rest = true, n
	return true
}

// count says that the client has, or will have, these events.
func (s *shard) count(c *subscriber, ch *chunk) {
	if ch.n > 0 {
		c.lastID = ch.last
		s.delivered.Add(uint64(ch.n))
	}
}

// queue keeps a chunk for a blocked client. Once one was dropped all are, until the
// queue is empty: one gap, told once, instead of many.
func (s *shard) queue(c *subscriber, ch *chunk) {
	if ch.n == 0 {
		return // the gateway's own words are not worth the room
	}
	cost := len(ch.b) + chunkCost
	if c.lost > 0 || c.queued+cost > max(c.room, maxQueued) || !c.quota.hold(cost) {
		c.lost += uint64(ch.n)
		s.dropped.Add(uint64(ch.n))
		return
	}
	c.queue, c.queued = append(c.queue, *ch), c.queued+cost
	s.count(c, ch)
}

// drain writes what waits for a client, as far as its connection takes it.
func (s *shard) drain(c *subscriber) {
	if c.group == nil {
		return
	}
	if c.full {
		full, err := c.out.Flush(0)
		if err != nil {
			s.remove(c)
			return
		}
		if c.full = full; !full {
			c.quota.release(c.rest)
			c.rest = 0
		}
	}
	for !c.full && len(c.queue) > 0 {
		b := s.next(c)
		s.bytes.Add(uint64(len(b)))
		full, err := c.out.Offer(b)
		if err != nil || (full && !c.rests(len(b))) {
			s.remove(c)
			return
		}
		if c.blocked() {
			c.since = time.Now()
		}
	}
	if cap(s.joined) > 2*maxChunk {
		s.joined = nil
	}
	if c.full {
		s.setBlocked(c, true)
		return
	}
	c.queue, c.room = nil, 0
	s.setBlocked(c, false)
	if n := c.lost; n > 0 {
		c.lost = 0
		s.send(c, &chunk{b: resetFrame(fmt.Sprint(c.lastID), s.lastID+1, n)})
	}
}

// next takes chunks off a client's queue, as many as one write may have.
func (s *shard) next(c *subscriber) []byte {
	n, size := 1, len(c.queue[0].b)
	for n < len(c.queue) && size+len(c.queue[n].b) <= maxChunk {
		size += len(c.queue[n].b)
		n++
	}
	b := c.queue[0].b
	if n > 1 {
		s.joined = s.joined[:0]
		for i := range n {
			s.joined = append(s.joined, c.queue[i].b...)
		}
		b = s.joined
	}
	for i := range n {
		cost := len(c.queue[i].b) + chunkCost
		c.queued -= cost
		c.quota.release(cost)
	}
	clear(c.queue[:n])
	c.queue = c.queue[n:]
	return b
}

// resetFrame tells a client that events between the one it asked for (or was given last)
// and oldest are not on its stream.
func resetFrame(requested string, oldest, dropped uint64) []byte {
	b := fmt.Appendf(nil, "event: gateway/reset\ndata: {\"requested\":%s,\"oldest\":%d", requested, oldest)
	if dropped > 0 {
		b = fmt.Appendf(b, ",\"dropped\":%d", dropped)
	}
	return append(b, "}\n\n"...)
}

// OnWritable implements sse.Watcher.
func (c *subscriber) OnWritable() {
	s := c.shard
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.subscribers > 0 {
		s.writable = append(s.writable, c)
		s.signal()
	}
}

// OnClosed implements sse.Watcher.
func (c *subscriber) OnClosed() {
	s := c.shard
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.subscribers > 0 {
		s.closed = append(s.closed, c)
		s.signal()
	}
}
