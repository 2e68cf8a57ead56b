package gateway

import (
	"container/list"
	"context"
	"time"

	"agentctl/transport/sse"
)

// Intervals of a shard's sweep.
const (
	activeInterval = time.Second           // between checks of the identities that can end
	retryInterval  = 50 * time.Millisecond // between writes to a blocked connection that is not polled
)

// shard is one goroutine that writes to its part of the subscribers. Publishers, joining
// requests and the poller put work into the lists below, under Gateway.mu, and wake it; step
// takes all lists at once and works without the lock.
//
// A subscriber's life:
//
//	added     join put it into added, with the missing events of the ring preloaded
//	open      in a group and in heartbeats; events are written at once
//	blocked   its writer queues or drops; OnWritable, or sweep where the poller cannot
//	          watch the connection, leads to flush, which makes it open again
//	removed   its connection failed or closed, it stalled, its identity ended, or the
//	          shard stops; group is nil, later calls do nothing
type shard struct {
	g       *Gateway
	wake    chan struct{} // holds a token while a list may be filled
	streams sse.Streams   // counts the streams of this shard

	// Protected by Gateway.mu.
	events      []*event // not delivered yet, at most maxBacklog
	spare       []*event // an empty slice for the next events
	added       []*subscriber
	writable    []*subscriber
	closed      []*subscriber
	subscribers int // those in added included

	// Of the shard's goroutine alone.
	poller     *sse.Poller
	groups     map[string]*group // by eventFilter.key
	heartbeats list.List         // of all subscribers, ordered by heartbeatAt
	expiring   int               // subscribers whose identity can end
	retries    int               // subscribers with needsRetry
	lastID     uint64            // newest event delivered
	chunks     []chunk           // scratch of deliver
	timer      *time.Timer
	sweepAt    time.Time
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
	return &shard{g: g, wake: make(chan struct{}, 1), groups: make(map[string]*group)}
}

func (s *shard) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// pushLocked queues an event for delivery. Without subscribers it queues nothing: later
// subscribers get the event from the ring. The caller holds Gateway.mu.
func (s *shard) pushLocked(e *event) {
	if s.subscribers > 0 {
		s.events = append(s.events, e)
		s.signal()
	}
}

// run delivers until ctx ends, then closes all streams.
func (s *shard) run(ctx context.Context, p *sse.Poller) {
	s.poller = p
	s.timer = time.NewTimer(time.Hour)
	defer s.timer.Stop()
	for ctx.Err() == nil {
		s.resetTimer()
		select {
		case <-ctx.Done():
		case <-s.wake:
		case <-s.timer.C:
		}
		s.step()
	}
	s.g.mu.Lock()
	added := s.added
	s.added, s.writable, s.closed, s.events = nil, nil, nil, nil
	s.g.mu.Unlock()
	for _, c := range added { // so that remove closes them like all others
		s.add(c)
	}
	for c := s.nextHeartbeat(); c != nil; c = s.nextHeartbeat() {
		s.remove(c)
	}
}

// step handles the lists and the timers that are due. New subscribers come first: the events
// they were not preloaded with are in this or a later step. Closed ones come last, so that
// events published before a client closed are counted as delivered to it.
func (s *shard) step() {
	g := s.g
	g.mu.Lock()
	events, added, writable, closed := s.events, s.added, s.writable, s.closed
	s.events, s.spare, s.added, s.writable, s.closed = s.spare[:0], nil, nil, nil, nil
	broadcastLocked(&g.backlogTaken)
	g.mu.Unlock()
	for _, c := range added {
		s.add(c)
	}
	for _, c := range writable {
		s.flush(c)
	}
	if len(events) > 0 {
		s.deliver(events)
	}
	for _, c := range closed {
		s.remove(c)
	}
	now := time.Now()
	s.sendHeartbeats(now)
	if !s.sweepAt.After(now) {
		s.sweep(now)
	}
	if cap(events) <= 64 { // a larger one is left to the garbage collector
		clear(events)
		g.mu.Lock()
		s.spare = events[:0]
		g.mu.Unlock()
	}
}

// resetTimer sets the timer to the next heartbeat or sweep, whichever comes first.
func (s *shard) resetTimer() {
	at := time.Now().Add(time.Hour)
	if c := s.nextHeartbeat(); c != nil {
		at = c.heartbeatAt
	}
	if (s.expiring > 0 || s.retries > 0) && s.sweepAt.Before(at) {
		at = s.sweepAt
	}
	s.timer.Reset(time.Until(at))
}

// add takes over a subscriber from join and writes the preloaded events. The shard has sent
// nothing to it before.
func (s *shard) add(c *subscriber) {
	key := c.filter.key()
	gr := s.groups[key]
	if gr == nil {
		gr = &group{filter: c.filter, key: key}
		s.groups[key] = gr
	}
	c.filter = eventFilter{} // an equal one is the group's
	c.group, c.index = gr, len(gr.subscribers)
	gr.subscribers = append(gr.subscribers, c)
	now := time.Now()
	c.heartbeatAt = now.Add(s.g.opts.Heartbeat)
	c.heartbeat = s.heartbeats.PushBack(c)
	if c.isActive != nil {
		if s.expiring++; s.expiring == 1 && s.retries == 0 {
			s.sweepAt = now.Add(activeInterval)
		}
	}
	var err error
	if c.isPolled, err = s.poller.Add(c.out, c); err != nil {
		s.remove(c)
		return
	}
	s.flush(c)
}

// remove takes a subscriber off the shard and closes its stream. It may be called again.
func (s *shard) remove(c *subscriber) {
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
	s.heartbeats.Remove(c.heartbeat)
	if c.isActive != nil {
		s.expiring--
	}
	s.updateRetry(c)
	s.poller.Remove(c.out)
	_ = c.out.Close(0)
	s.g.onRemoved(c)
}

// deliver sends events to every group whose filter they match. The order of one subscriber's
// events is kept; the order between subscribers does not matter.
func (s *shard) deliver(events []*event) {
	for _, gr := range s.groups {
		s.buildChunks(gr, events)
		if len(s.chunks) == 0 {
			continue
		}
		for i := len(gr.subscribers) - 1; i >= 0; i-- { // remove moves the last one to i
			c := gr.subscribers[i]
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

// deliverSince sends events to a subscriber that joined in between them: it was preloaded
// with those up to joinedAt.
func (s *shard) deliverSince(c *subscriber, events []*event) {
	filter := &c.group.filter
	for _, e := range events {
		if ch := e.chunk(); e.id > c.joinedAt && filter.matches(e.tenant, e.topic) && !s.send(c, &ch) {
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

// nextHeartbeat returns the subscriber whose heartbeat is due next, or nil. All have the same
// interval, so it is the first of the list.
func (s *shard) nextHeartbeat() *subscriber {
	if e := s.heartbeats.Front(); e != nil {
		return e.Value.(*subscriber)
	}
	return nil
}

// sendHeartbeats writes the heartbeats that are due within 1/128 of their interval, so
// that thousands of subscribers do not wake the shard one by one.
func (s *shard) sendHeartbeats(now time.Time) {
	c := s.nextHeartbeat()
	if c == nil || c.heartbeatAt.After(now) {
		return
	}
	interval := s.g.opts.Heartbeat
	soon := now.Add(interval / 128)
	beat := chunk{b: heartbeat(now)}
	for ; c != nil && !c.heartbeatAt.After(soon); c = s.nextHeartbeat() {
		if c.heartbeatAt = c.heartbeatAt.Add(interval); !c.heartbeatAt.After(soon) { // late by more than one
			c.heartbeatAt = now.Add(interval)
		}
		s.heartbeats.MoveToBack(c.heartbeat)
		if c.out.Check() != nil {
			s.remove(c)
		} else if !c.out.Blocked() {
			s.send(c, &beat)
		}
	}
}

// sweep ends the streams of identities that have ended, and flushes subscribers that need
// a retry. It visits all subscribers, so it runs only while one of them needs it, and once
// a second unless there are retries.
func (s *shard) sweep(now time.Time) {
	s.sweepAt = now.Add(time.Hour)
	if s.expiring == 0 && s.retries == 0 {
		return
	}
	var next *list.Element
	for e := s.heartbeats.Front(); e != nil; e = next {
		next = e.Next() // before remove
		if c := e.Value.(*subscriber); c.checkActive() != nil {
			s.remove(c)
		} else if c.needsRetry {
			s.flush(c)
		}
	}
	s.sweepAt = now.Add(activeInterval)
	if s.retries > 0 {
		s.sweepAt = now.Add(retryInterval)
	}
}
