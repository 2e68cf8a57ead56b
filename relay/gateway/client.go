package gateway

import (
	"fmt"
	"time"

	"agentctl/transport/sse"
)

// client is one subscriber. It belongs to its shard's goroutine.
type client struct {
	shard *shard
	out   *sse.Outlet
	view  view // until it is in a group
	group *group
	at    int  // its place in the group
	told  bool // the Poller says when it is writable

	who    string       // its identity, by which replays are shared out
	own    *account     // of that identity
	from   uint64       // events up to this one are not for it
	given  uint64       // newest event given to it
	active func() error // whether its identity is still good; nil: it cannot end

	due        time.Time // of the next heartbeat
	prev, next *client

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

func (c *client) blocked() bool { return !c.since.IsZero() }

func (s *shard) setBlocked(c *client, yes bool) {
	if yes == c.blocked() {
		return
	}
	if yes {
		c.since = time.Now()
		if !c.told {
			if s.retry++; s.retry == 1 {
				s.look = c.since.Add(50 * time.Millisecond)
			}
		}
		return
	}
	c.since = time.Time{}
	if !c.told {
		s.retry--
	}
}

// give writes a chunk to a client, or has it wait, or drops it. False: the client ended.
func (s *shard) give(c *client, ch *chunk) bool {
	if c.blocked() {
		s.queue(c, ch)
		return true
	}
	s.count(c, ch) // before: whoever reads the event and then the counters finds it there
	s.bytes.Add(uint64(len(ch.b)))
	full, err := c.out.Offer(ch.b)
	if err != nil || (full && !c.rests(len(ch.b))) {
		s.end(c)
		return false
	}
	if full {
		s.setBlocked(c, true)
	}
	return true
}

// rests notes that some of a write of n bytes waits in the connection; false when nothing
// more may wait.
func (c *client) rests(n int) bool {
	if !c.own.hold(n) {
		return false
	}
	c.full, c.rest = true, n
	return true
}

// count says that the client has, or will have, these events.
func (s *shard) count(c *client, ch *chunk) {
	if ch.n > 0 {
		c.given = ch.last
		s.delivered.Add(uint64(ch.n))
	}
}

// queue keeps a chunk for a blocked client. Once one was dropped all are, until the
// queue is empty: one gap, told once, instead of many.
func (s *shard) queue(c *client, ch *chunk) {
	if ch.n == 0 {
		return // the gateway's own words are not worth the room
	}
	cost := len(ch.b) + chunkCost
	if c.lost > 0 || c.queued+cost > max(c.room, queueSize) || !c.own.hold(cost) {
		c.lost += uint64(ch.n)
		s.dropped.Add(uint64(ch.n))
		return
	}
	c.queue, c.queued = append(c.queue, *ch), c.queued+cost
	s.count(c, ch)
}

// drain writes what waits for a client, as far as its connection takes it.
func (s *shard) drain(c *client) {
	if c.group == nil {
		return
	}
	if c.full {
		full, err := c.out.Flush(0)
		if err != nil {
			s.end(c)
			return
		}
		if c.full = full; !full {
			c.own.release(c.rest)
			c.rest = 0
		}
	}
	for !c.full && len(c.queue) > 0 {
		b := s.next(c)
		s.bytes.Add(uint64(len(b)))
		full, err := c.out.Offer(b)
		if err != nil || (full && !c.rests(len(b))) {
			s.end(c)
			return
		}
		if c.blocked() {
			c.since = time.Now()
		}
	}
	if cap(s.joined) > 2*chunkSize {
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
		s.give(c, &chunk{b: resetFrame(fmt.Sprint(c.given), s.seen+1, n)})
	}
}

// next takes chunks off a client's queue, as many as one write may have.
func (s *shard) next(c *client) []byte {
	n, size := 1, len(c.queue[0].b)
	for n < len(c.queue) && size+len(c.queue[n].b) <= chunkSize {
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
		c.own.release(cost)
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

// Writable implements sse.Watcher.
func (c *client) Writable() {
	s := c.shard
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.members > 0 {
		s.writable = append(s.writable, c)
		s.signal()
	}
}

// Gone implements sse.Watcher.
func (c *client) Gone() {
	s := c.shard
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.members > 0 {
		s.gone = append(s.gone, c)
		s.signal()
	}
}
