package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/transport/sse"
)

var (
	errBelowRing = errors.New("gateway: position is below the ring")
	errRetention = errors.New("gateway: the log's retention was faster than a client")
)

// subscribe opens a stream. Every client resumes: one that names no id does so from the
// end, so that the first line's id and its first event agree.
func (g *Gateway) subscribe(w http.ResponseWriter, r *http.Request) {
	id, err := g.identify(r, ScopeSubscribe)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	v, err := requestedView(r, id)
	if err != nil {
		g.denied(w, r, err)
		return
	}
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		return
	}
	if n := g.subscribers.Add(1); n > int64(g.opts.MaxSubscribers) {
		g.subscribers.Add(-1)
		g.unavailable(w, r, "the gateway has as many subscribers as it may have")
		return
	}
	who := id.Tenant + "\n" + id.Subject
	own := g.quotas.acquireStream(who, id.open, max(1, g.opts.MaxSubscribers/identityShare))
	if own == nil {
		g.subscribers.Add(-1)
		g.slowDown(w, r, 10*time.Second, "too many streams of this identity are open")
		return
	}
	out := func() { own.releaseStream(); g.subscribers.Add(-1) }
	pos, first, ctx, ok := g.startPosition(r)
	if !ok {
		out()
		g.unavailable(w, r, "the gateway is stopping; connect again")
		return
	}
	defer g.replays.Done()
	conn, err := sse.Detach(w, r)
	if err != nil {
		out()
		if !errors.Is(err, sse.ErrPeerClosed) {
			g.fail(w, r, http.StatusInternalServerError, manifest.Internal, err.Error())
		}
		return
	}
	g.connections.Add(1)
	c := &subscriber{out: conn, view: v, isActive: id.Active, identity: who, quota: own}
	if err := g.start(ctx, c, pos, first); err != nil {
		conn.Close()
		out()
	}
}

// requestedView is what an identity may see of what the request asks for.
func requestedView(r *http.Request, id Identity) (view, error) {
	topics, ok := parseTopics(r.URL.Query()["topics"])
	if !ok {
		return view{}, refused(manifest.BadRequest,
			fmt.Sprintf("topics is a list like a,b,log/* of at most %d names: each begins with a letter, a digit or _, and has up to 128 of A-Z a-z 0-9 _ . / -", maxTopics))
	}
	v := view{tenant: id.Tenant, admin: id.Scopes.Has(ScopeAdmin), topics: topics, granted: id.Topics}
	for _, t := range topics {
		name := strings.TrimSuffix(t, "/*")
		if adminTopic(name) && !v.admin {
			return view{}, refused(manifest.SafetyDenied, "the topics audit and kernel need the scope "+ScopeAdmin)
		}
		if name == t && !v.granted.match(t) {
			return view{}, refused(manifest.SafetyDenied, "the token does not cover this topic")
		}
	}
	return v, nil
}

// startPosition says from which event on the stream goes and makes its first lines. With ok
// the caller calls replays.Done.
func (g *Gateway) startPosition(r *http.Request) (pos uint64, first []byte, _ context.Context, ok bool) {
	asked := r.Header.Get("Last-Event-ID")
	if asked == "" {
		asked = r.URL.Query().Get("lastEventId") // a fresh EventSource cannot set headers
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.serving {
		return 0, nil, nil, false
	}
	g.replays.Add(1)
	first = fmt.Appendf(nil, ": stream start id=%d\n\n", g.ring.last+1)
	if asked == "" {
		return g.ring.last, first, g.ctx, true
	}
	requested := "null" // no number of ours
	if n, err := strconv.ParseUint(asked, 10, 63); err == nil {
		requested = strconv.FormatUint(n, 10)
		if n <= g.ring.last && (n >= g.ring.floor || (g.opts.Log != nil && g.opts.Log.CanResume(n))) {
			return n, first, g.ctx, true
		}
	}
	return g.ring.floor, append(first, resetFrame(requested, g.ring.oldest(), 0)...), g.ctx, true
}

// start writes a client's first lines and what the log has for it, and hands it to a
// shard. An error: it did not get there.
func (g *Gateway) start(ctx context.Context, c *subscriber, pos uint64, first []byte) error {
	if err := g.write(ctx, c, first); err != nil {
		return err
	}
	for {
		floor, some, err := g.join(c, pos)
		for _, e := range some {
			if err := g.write(ctx, c, e.frame); err != nil {
				return err
			}
			pos = e.id
			g.replayed.Add(1)
		}
		if len(some) > 0 {
			if c.isActive != nil && c.isActive() != nil {
				return ErrStopped
			}
			continue
		}
		if !errors.Is(err, errBelowRing) {
			return err
		}
		if g.opts.Log != nil {
			if pos, err = g.replay(ctx, c, pos, floor); err == nil {
				continue
			}
			if !errors.Is(err, errRetention) {
				return err
			}
		}
		// The ring, or the log's retention, was faster: begin with what there is.
		if err := g.write(ctx, c, resetFrame(strconv.FormatUint(pos, 10), floor+1, 0)); err != nil {
			return err
		}
		pos = floor
	}
}

// join hands a client to a shard with all events of the ring above pos; nothing is
// missed or told twice, because this and the arrival of events exclude each other. Those
// must fit into a client's queue: of more than that it gives some to be written before.
func (g *Gateway) join(c *subscriber, pos uint64) (floor uint64, some []*event, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.serving {
		return 0, nil, ErrStopped
	}
	if pos < g.ring.floor {
		return g.ring.floor, nil, errBelowRing
	}
	queued, size := 0, 0
	for i := g.ring.after(pos); i < g.ring.n; i++ {
		e := g.ring.at(i)
		if !c.view.matches(e.tenant, e.topic) {
			continue
		}
		if queued += len(e.frame) + chunkCost; queued > maxQueued {
			return 0, some, nil
		}
		if size += len(e.frame); size <= maxReplayChunk || len(some) == 0 {
			some = append(some, e)
		}
	}
	if !c.quota.hold(queued) {
		return 0, nil, errCrowded
	}
	c.lastID, c.queued = pos, queued
	for i := g.ring.after(pos); i < g.ring.n; i++ {
		if e := g.ring.at(i); c.view.matches(e.tenant, e.topic) {
			c.queue = append(c.queue, chunk{b: e.frame, n: 1, first: e.id, last: e.id})
			c.lastID = e.id
		}
	}
	g.replayed.Add(uint64(len(c.queue)))
	c.room = c.queued + maxQueued // the replay does not count against the queue
	c.joinedAt = g.ring.last
	s := g.shards[g.nextShard%len(g.shards)]
	g.nextShard++
	c.shard = s
	s.subscribers++
	s.added = append(s.added, c)
	s.signal()
	return 0, nil, nil
}

// onRemoved is called by a client's shard at its end.
func (g *Gateway) onRemoved(c *subscriber) {
	c.quota.releaseStream()
	g.subscribers.Add(-1)
	g.mu.Lock()
	defer g.mu.Unlock()
	c.shard.subscribers--
}

// replay writes what the log has above pos and up to to, and returns how far it came.
func (g *Gateway) replay(ctx context.Context, c *subscriber, pos, to uint64) (uint64, error) {
	mine, err := g.turns.acquire(ctx, c.identity, g.opts.Heartbeat, func() error {
		if c.isActive != nil && c.isActive() != nil {
			return ErrStopped
		}
		return g.write(ctx, c, heartbeat(time.Now()))
	})
	if err != nil {
		return pos, err
	}
	defer mine.release()
	var buf []byte
	n, last := 0, pos
	flush := func() error {
		if !g.opts.Log.CanResume(pos) { // asked after reading: what was read has no hole
			return errRetention
		}
		if c.isActive != nil && c.isActive() != nil {
			return ErrStopped
		}
		g.replayed.Add(uint64(n))
		if err := g.write(ctx, c, buf); err != nil {
			return err
		}
		buf, n, pos = buf[:0], 0, last
		return nil
	}
	err = g.opts.Log.Select(ctx, pos, to, func(e Event) error {
		last = e.ID
		if !c.view.matches(e.Tenant, e.Topic) {
			return nil
		}
		data, err := normalizeEvent(e.Topic, bytes.Clone(e.Data), MaxData)
		if err != nil {
			return nil // it was not served when it came either
		}
		e.Data = data
		buf = append(buf, g.signer.encode(&e, g.signer.digest(data)).frame...)
		if n++; len(buf) < maxChunk {
			return nil
		}
		if err := flush(); err != nil {
			return err
		}
		if mine.expired() {
			return errReplayExpired
		}
		return nil
	})
	if err == nil {
		last = to // before flush, which goes there
		err = flush()
	}
	return pos, err
}

// write waits until the client's connection has taken b, for 30 s at most.
func (g *Gateway) write(ctx context.Context, c *subscriber, b []byte) error {
	g.bytes.Add(uint64(len(b)))
	full, err := c.out.Offer(b)
	if full && err == nil {
		if !c.quota.hold(len(b)) {
			return errCrowded
		}
		defer c.quota.release(len(b))
	}
	for end := time.Now().Add(30 * time.Second); full && err == nil; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Now().After(end) {
			return sse.ErrIdle
		}
		full, err = c.out.Flush(time.Second)
	}
	return err
}
