package gateway

import "agentctl/transport/sse"

// shard is the gateway's part of one shard of the engine: the events that it has not delivered
// yet, and its subscribers by filter.
//
// A subscriber's life:
//
//	added     join handed it over, with the missing events of the ring preloaded
//	open      in a group; events are written at once
//	blocked   its writer queues or drops, until the connection accepts more; see OnReady
//	removed   its connection failed or closed, it stalled, its identity ended, or the
//	          gateway stops; see OnEnd
type shard struct {
	*sse.Shard
	g       *Gateway
	streams sse.Streams // counts the streams of this shard

	// Protected by Gateway.mu.
	events      []*event // not delivered yet, at most maxBacklog
	spare       []*event // an empty slice for the next events
	subscribers int      // those that the engine has not added yet included

	// Of the shard's goroutine alone.
	taken  []*event          // by Take
	groups map[string]*group // by eventFilter.key
	lastID uint64            // newest event delivered
	chunks []chunk           // scratch of Deliver
}

// group is the subscribers of a shard with equal filters, so that matching and joining
// events is done once for all of them. It exists while it has any.
type group struct {
	filter      eventFilter
	key         string
	subscribers []*subscriber
}

// chunk is one or more whole events that are written at once, shared by all subscribers of
// a group.
type chunk struct {
	b           []byte
	events      int // 0 for an event of the gateway itself
	first, last uint64
}

func newShard(g *Gateway) *shard {
	s := &shard{g: g, groups: make(map[string]*group)}
	s.Shard = g.engine.AddShard(s)
	return s
}

// pushLocked queues an event for delivery. Without subscribers it queues nothing: later
// subscribers get the event from the ring. The caller holds Gateway.mu.
func (s *shard) pushLocked(e *event) {
	if s.subscribers > 0 {
		s.events = append(s.events, e)
		s.Signal()
	}
}

// Take implements sse.Feed. The events are taken before new subscribers are added: those join
// with a joinedAt that covers the events of this round which they were preloaded with.
func (s *shard) Take() {
	g := s.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(s.events) > 0 {
		s.taken, s.events, s.spare = s.events, s.spare[:0], nil
	}
	broadcastLocked(&g.backlogTaken)
}

// Deliver implements sse.Feed: it sends the events to every group whose filter they match. The
// order of one subscriber's events is kept; the order between subscribers does not matter.
func (s *shard) Deliver() {
	events := s.taken
	if len(events) == 0 {
		return
	}
	for _, gr := range s.groups {
		s.buildChunks(gr, events)
		if len(s.chunks) == 0 {
			continue
		}
		for i := len(gr.subscribers) - 1; i >= 0; i-- { // OnEnd moves the last one to i
			c := gr.subscribers[i]
			if c.joinedAt >= s.chunks[0].first {
				s.deliverSince(c, events)
				continue
			}
			for j := range s.chunks {
				if !c.send(&s.chunks[j]) {
					break
				}
			}
		}
	}
	clear(s.chunks)
	s.chunks = s.chunks[:0]
	s.lastID = events[len(events)-1].id
	if s.taken = nil; cap(events) <= 64 { // a larger one is left to the garbage collector
		clear(events)
		s.g.mu.Lock()
		s.spare = events[:0]
		s.g.mu.Unlock()
	}
}

// join puts a subscriber into the group of its filter.
func (s *shard) join(c *subscriber) {
	key := c.filter.key()
	gr := s.groups[key]
	if gr == nil {
		gr = &group{filter: c.filter, key: key}
		s.groups[key] = gr
	}
	c.filter = eventFilter{} // an equal one is the group's
	c.group, c.index = gr, len(gr.subscribers)
	gr.subscribers = append(gr.subscribers, c)
}

// leave takes a subscriber out of its group, if it is in one.
func (s *shard) leave(c *subscriber) {
	gr := c.group
	if gr == nil {
		return
	}
	n := len(gr.subscribers) - 1
	gr.subscribers[c.index] = gr.subscribers[n]
	gr.subscribers[c.index].index = c.index
	gr.subscribers[n] = nil
	if gr.subscribers = gr.subscribers[:n]; n == 0 {
		delete(s.groups, gr.key)
	}
	c.group = nil
}

// deliverSince sends events to a subscriber that joined in between them: it was preloaded
// with those up to joinedAt.
func (s *shard) deliverSince(c *subscriber, events []*event) {
	filter := &c.group.filter
	for _, e := range events {
		if ch := e.chunk(); e.id > c.joinedAt && filter.matches(e.tenant, e.topic) && !c.send(&ch) {
			return
		}
	}
}

// buildChunks sets s.chunks to the events that a group is sent. Consecutive events are
// joined up to maxChunk; a chunk of one event shares the event's own bytes.
func (s *shard) buildChunks(gr *group, events []*event) {
	s.chunks = s.chunks[:0]
	for _, e := range events {
		if !gr.filter.matches(e.tenant, e.topic) {
			continue
		}
		n := len(s.chunks)
		if n == 0 || len(s.chunks[n-1].b)+len(e.frame) > maxChunk {
			s.chunks = append(s.chunks, e.chunk())
			continue
		}
		ch := &s.chunks[n-1]
		if ch.events == 1 {
			ch.b = append(make([]byte, 0, min(maxChunk, 8*(len(ch.b)+len(e.frame)))), ch.b...)
		}
		ch.b, ch.events, ch.last = append(ch.b, e.frame...), ch.events+1, e.id
	}
}
