package gateway

import (
	"container/list"
	"fmt"
	"time"

	"agentctl/transport/sse"
)

// subscriber is one open stream. It belongs to the goroutine of its request until join,
// and to that of its shard afterwards.
type subscriber struct {
	shard  *shard
	out    *sse.Writer
	filter eventFilter // until it is in a group
	group  *group      // nil before add and after remove
	index  int         // in group.subscribers

	quota    *quota
	joinedAt uint64       // events up to this id are not delivered by the shard
	lastID   uint64       // newest event given to out
	isActive func() error // fails when its identity has ended; nil: it cannot end

	heartbeatAt time.Time
	heartbeat   *list.Element // in shard.heartbeats

	isPolled   bool // OnWritable is called when there is room
	needsRetry bool // blocked and not polled: sweep tries again
}

// checkActive fails when the subscriber's identity has ended.
func (c *subscriber) checkActive() error {
	if c.isActive != nil && c.isActive() != nil {
		return ErrStopped
	}
	return nil
}

// OnWritable implements sse.Watcher.
func (c *subscriber) OnWritable() { c.shard.notify(&c.shard.writable, c) }

// OnClosed implements sse.Watcher.
func (c *subscriber) OnClosed() { c.shard.notify(&c.shard.closed, c) }

// notify hands c to the shard's goroutine in one of its lists. It runs in the poller's
// goroutine, so it must not wait for a write.
func (s *shard) notify(list *[]*subscriber, c *subscriber) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.subscribers > 0 {
		*list = append(*list, c)
		s.signal()
	}
}

// send passes a chunk to a subscriber's writer, which may queue or drop it. It returns false
// when the stream has ended and the subscriber was removed.
func (s *shard) send(c *subscriber, ch *chunk) bool {
	taken, err := c.out.Send(ch.b, ch.events)
	if err != nil {
		s.remove(c)
		return false
	}
	if taken && ch.events > 0 {
		c.lastID = ch.last
	}
	s.updateRetry(c)
	return true
}

// flush writes as much of a subscriber's queue as its connection accepts. Once the queue is
// empty, it sends a reset for the events that were dropped.
func (s *shard) flush(c *subscriber) {
	if c.group == nil {
		return
	}
	dropped, err := c.out.Flush()
	if err != nil {
		s.remove(c)
		return
	}
	s.updateRetry(c)
	if dropped > 0 {
		s.send(c, &chunk{b: resetEvent(fmt.Sprint(c.lastID), s.lastID+1, dropped)})
	}
}

// updateRetry makes sweep flush a blocked subscriber whose connection is not polled: one
// that is not TCP, or on a system without epoll. For others it does nothing.
func (s *shard) updateRetry(c *subscriber) {
	needed := !c.isPolled && c.group != nil && c.out.Blocked()
	if needed == c.needsRetry {
		return
	}
	c.needsRetry = needed
	if !needed {
		s.retries--
	} else if s.retries++; s.retries == 1 {
		s.sweepAt = time.Now().Add(retryInterval)
	}
}

// resetEvent reports to a subscriber that the events between requested (the id it asked for
// or received last) and oldest are missing from its stream. If dropped is not 0, it fell
// behind: it can reconnect with the id requested to get the events that ring or log still
// have.
func resetEvent(requested string, oldest, dropped uint64) []byte {
	data := fmt.Appendf(nil, `{"requested":%s,"oldest":%d`, requested, oldest)
	if dropped > 0 {
		data = fmt.Appendf(data, `,"dropped":%d`, dropped)
	}
	return ownEvent("gateway/reset", append(data, '}'))
}

func heartbeat(now time.Time) []byte {
	return ownEvent("heartbeat", fmt.Appendf(nil, `{"ts":%d}`, now.UnixMilli()))
}

// ownEvent encodes an event of the gateway itself, which has no id.
func ownEvent(eventType string, data []byte) []byte {
	b, _ := sse.AppendEvent(nil, eventType, data) // neither has a line break
	return b
}
