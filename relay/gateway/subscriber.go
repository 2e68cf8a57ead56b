package gateway

import (
	"fmt"
	"time"

	"agentctl/transport/sse"
)

// subscriber is one open stream. It belongs to the goroutine of its request until join,
// and to that of its shard afterwards.
type subscriber struct {
	sse.Stream
	shard    *shard
	filter   eventFilter // until it is in a group
	group    *group      // nil before OnReady and after OnEnd
	index    int         // in group.subscribers
	quota    *quota
	joinedAt uint64 // events up to this id are not delivered by the shard
	lastID   uint64 // newest event given to the writer
}

// checkActive fails when the subscriber's identity has ended.
func (c *subscriber) checkActive() error {
	if c.Active != nil && c.Active() != nil {
		return ErrStopped
	}
	return nil
}

// OnReady implements sse.Handler. The first call puts the subscriber into its group. Once the
// queue is empty, it sends a reset for the events that were dropped.
func (c *subscriber) OnReady(dropped uint64) error {
	if c.group == nil {
		c.shard.join(c)
	}
	if dropped > 0 {
		c.send(&chunk{b: resetEvent(fmt.Sprint(c.lastID), c.shard.lastID+1, dropped)})
	}
	return nil
}

// OnEnd implements sse.Handler.
func (c *subscriber) OnEnd(error) {
	c.shard.leave(c)
	_ = c.Close(0)
	c.shard.g.onEnd(c)
}

// send passes a chunk to a subscriber's writer, which may queue or drop it. It returns false
// when the stream has ended.
func (c *subscriber) send(ch *chunk) bool {
	taken, err := c.Send(ch.b, ch.events)
	if taken && ch.events > 0 {
		c.lastID = ch.last
	}
	return err == nil
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
	return gatewayEvent("gateway/reset", append(data, '}'))
}

func heartbeat(now time.Time) []byte {
	return gatewayEvent("heartbeat", fmt.Appendf(nil, `{"ts":%d}`, now.UnixMilli()))
}

// gatewayEvent encodes an event of the gateway itself, which has no id.
func gatewayEvent(eventType string, data []byte) []byte {
	b, _ := sse.AppendEvent(nil, eventType, data) // neither has a line break
	return b
}
