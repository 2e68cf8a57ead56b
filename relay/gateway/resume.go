package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"agentctl/transport/sse"
)

// How a stream starts. Every subscriber resumes: one without a last event ID resumes after
// the newest event, so that the id in the first line is that of its first event. A position
// is the id of the last event that the subscriber has.
//
//	openStart   finds the position in the ring or the log, and makes the first lines
//	catchUp     while the position is below the ring: writes pages of the log (replay), or
//	            a reset when the log does not have them
//	writePage   while the ring has more above the position than fits into a queue
//	join        preloads what is left of the ring into the subscriber's queue and hands the
//	            subscriber to its shard, under the lock under which events arrive: none is
//	            missed or sent twice
//
// The goroutine of the request does all of this. It may wait for the subscriber, without a
// lock and for at most startWriteTimeout per write. New events arrive meanwhile, so start
// loops until join succeeds.
var (
	errBelowRing = errors.New("gateway: position is below the ring")
	errRetention = errors.New("gateway: the log's retention overtook a subscriber")
)

// startWriteTimeout bounds each write before join.
const startWriteTimeout = 30 * time.Second

// streamStart is where a stream starts.
type streamStart struct {
	ctx      context.Context // ends with the gateway
	shard    *shard
	position uint64 // the last event that the subscriber has
	preamble []byte // the first lines
}

// openStart finds the position that the request asks for. For an id that this gateway did
// not issue, or that neither ring nor log has, the stream starts with a reset and the whole
// ring. If ok is true, the caller must call replays.Done.
func (g *Gateway) openStart(r *http.Request, visible Visible) (st streamStart, ok bool) {
	asked := r.Header.Get("Last-Event-ID")
	if asked == "" {
		asked = r.URL.Query().Get("lastEventId") // a new EventSource cannot set headers
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.serving {
		return st, false
	}
	g.replays.Add(1)
	st = streamStart{
		ctx: g.ctx, shard: g.shards[g.nextShard%len(g.shards)], position: g.ring.last,
		preamble: sse.AppendComment(nil, fmt.Sprintf("stream start id=%d", g.ring.last+1)),
	}
	g.nextShard++
	if asked == "" {
		return st, true
	}
	requested := "null" // not an id of this gateway
	if n, err := strconv.ParseUint(asked, 10, 63); err == nil {
		requested = strconv.FormatUint(n, 10)
		if n <= g.ring.last && (n >= g.ring.floor || (g.opts.Log != nil && g.opts.Log.CanResume(n, visible))) {
			st.position = n
			return st, true
		}
	}
	st.position = g.ring.floor
	st.preamble = append(st.preamble, resetEvent(requested, g.ring.oldest(), 0)...)
	return st, true
}

// start writes a stream's first lines and everything up to the end of the ring, and hands
// the subscriber to its shard. After an error the subscriber is still the caller's.
func (g *Gateway) start(st streamStart, c *subscriber) error {
	if err := c.write(st.ctx, st.preamble, 0); err != nil {
		return err
	}
	for position := st.position; ; {
		floor, page, err := g.join(c, position)
		switch {
		case errors.Is(err, errBelowRing):
			position, err = g.catchUp(st.ctx, c, position, floor)
		case err == nil && len(page) == 0:
			return nil
		case err == nil:
			position, err = g.writePage(st.ctx, c, page)
		}
		if err != nil {
			return err
		}
	}
}

// join hands a subscriber to its shard with all events of the ring above position. When
// those exceed its queue, it returns a page of them to be written first. errBelowRing: the
// ring begins at floor, above position.
func (g *Gateway) join(c *subscriber, position uint64) (floor uint64, page []*event, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.serving {
		return 0, nil, ErrStopped
	}
	if position < g.ring.floor {
		return g.ring.floor, nil, errBelowRing
	}
	var missing []*event
	queued, size := 0, 0
	for e := range g.ring.since(position) {
		if !c.filter.matches(e.tenant, e.topic) {
			continue
		}
		if size += len(e.frame); size <= maxPage || len(missing) == 0 {
			page = append(page, e)
		}
		if queued += len(e.frame) + sse.QueueOverhead; queued > maxQueued {
			return 0, page, nil
		}
		missing = append(missing, e)
	}
	c.lastID = position
	for _, e := range missing {
		if !c.Preload(e.frame, 1) {
			return 0, nil, sse.ErrBackpressure // the client reconnects and resumes
		}
		c.lastID = e.id
	}
	c.joinedAt = g.ring.last
	if err := c.shard.Add(&c.Stream); err != nil {
		return 0, nil, err
	}
	c.shard.subscribers++
	return 0, nil, nil
}

// onEnd is called by a subscriber's shard once its stream is closed.
func (g *Gateway) onEnd(c *subscriber) {
	g.releaseStream(c.quota)
	g.mu.Lock()
	defer g.mu.Unlock()
	c.shard.subscribers--
}

// writePage writes events of the ring and returns the position after them.
func (g *Gateway) writePage(ctx context.Context, c *subscriber, page []*event) (position uint64, err error) {
	for _, e := range page {
		if err := c.write(ctx, e.frame, 1); err != nil {
			return 0, err
		}
		position = e.id
	}
	return position, c.checkActive()
}

// catchUp writes the events up to the floor of the ring, from the log if there is one. Events
// that the ring or the log's retention has removed are reported with a reset.
func (g *Gateway) catchUp(ctx context.Context, c *subscriber, position, floor uint64) (uint64, error) {
	if g.opts.Log != nil {
		var err error
		if position, err = g.replay(ctx, c, position, floor); !errors.Is(err, errRetention) {
			return position, err
		}
	}
	return floor, c.write(ctx, resetEvent(strconv.FormatUint(position, 10), floor+1, 0), 0)
}

// replay writes the events of the log above position and up to end, and returns the position
// that it reached. Heartbeats are written while it waits for a slot.
func (g *Gateway) replay(ctx context.Context, c *subscriber, position, end uint64) (uint64, error) {
	slot, err := acquireReplay(ctx, c.quota.replays, g.replaySlots, g.opts.Heartbeat, func() error {
		if err := c.checkActive(); err != nil {
			return err
		}
		return c.write(ctx, heartbeat(time.Now()), 0)
	})
	if err != nil {
		return position, err
	}
	defer slot.release()
	var buf []byte
	n, last := 0, position  // events in buf, and the position after them
	flush := func() error { // writes buf, and moves position to last
		if !g.opts.Log.CanResume(position, c.filter.visible()) { // checked after reading: what was read has no gap
			return errRetention
		}
		if err := c.checkActive(); err != nil {
			return err
		}
		if n > 0 {
			if err := c.write(ctx, buf, n); err != nil {
				return err
			}
		}
		buf, n, position = buf[:0], 0, last
		return nil
	}
	err = g.opts.Log.Select(ctx, position, end, c.filter.visible(), func(e Event) error {
		last = e.ID
		if !c.filter.matches(e.Tenant, e.Topic) {
			return nil
		}
		data, err := normalizeEvent(e.Topic, bytes.Clone(e.Data), MaxData)
		if err != nil {
			return nil // it was not served when it was published either
		}
		e.Data = data
		buf = append(buf, g.signer.encode(&e, g.signer.digest(data)).frame...)
		if n++; len(buf) < maxChunk {
			return nil
		}
		if err := flush(); err != nil {
			return err
		}
		if slot.expired() {
			return errReplayExpired
		}
		return nil
	})
	if err == nil {
		last = end // there is nothing above the last event
		err = flush()
	}
	return position, err
}

// write writes b and waits until the connection has taken it.
func (c *subscriber) write(ctx context.Context, b []byte, events int) error {
	return c.SendWait(ctx, b, events, startWriteTimeout)
}
