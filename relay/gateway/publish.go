package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/topic"
	"agentctl/strictjson"
)

// Visible is what a subscriber may get: a log may remove the events of one tenant, or those of the topic
// audit, before others, and that concerns only who could have got them. The zero value is everything.
type Visible struct {
	Tenants []string // "" is the relay itself; empty: all
	NoAudit bool     // without the topic audit
}

// Log stores events durably; its sequence numbers are the events' ids. The relay's event
// log implements it. All methods may be called from any goroutine.
type Log interface {
	// Append stores an event and returns its id once it is durable. ErrBusy: too many are
	// queued.
	Append(ctx context.Context, e Event) (id uint64, err error)
	// Offer keeps an event soon, without waiting; false when it cannot.
	Offer(e Event) bool
	// Follow calls fn with the events above after, ordered by id: those kept first, then
	// each one as it becomes durable, until ctx ends or fn fails.
	Follow(ctx context.Context, after uint64, fn func(Event) error) error
	// Select calls fn with the events above after and up to to that v selects, ordered by id.
	Select(ctx context.Context, after, to uint64, v Visible, fn func(Event) error) error
	// CanResume reports whether nothing above after that v selects was removed, and after is
	// at most Last.
	CanResume(after uint64, v Visible) bool
	// Last is the newest durable id.
	Last() uint64
}

// normalizeEvent checks an event and returns its data as compact JSON, which is one line.
func normalizeEvent(name string, data []byte, maxData int) ([]byte, error) {
	switch {
	case !topic.Valid(name):
		return nil, ErrTopic
	case isReservedTopic(name):
		return nil, ErrReserved
	}
	if len(data) == 0 {
		data = []byte("null")
	}
	compacted := strictjson.Raw(data)
	if err := compacted.Compact(); err != nil {
		return nil, fmt.Errorf("gateway: data is not JSON: %w", err)
	}
	if len(compacted) > maxData {
		return nil, ErrTooLarge
	}
	return compacted, nil
}

// How an event is published:
//
//	publish   ingest: Log.Append, which returns once the event is durable; then waitRing
//	Emit      the relay: Log.Offer, which does not wait; the event is durable soon after
//	follow    one goroutine takes events out of the log, ordered by id, and inserts them
//	insert    ring and shards; without a log publish and Emit call it themselves
//
// With a log, follow is the only caller of insert, so the ring has the log's order and ids
// whichever request was answered first.

// publish puts a normalized event into the log, from where it reaches the ring, or without
// a log into the ring. It returns once the event is in the ring.
func (g *Gateway) publish(ctx context.Context, e Event) (uint64, error) {
	e.TimeMS = time.Now().UnixMilli()
	if g.opts.Log == nil {
		return g.insert(ctx, e, true)
	}
	id, err := g.opts.Log.Append(ctx, e)
	if err != nil {
		return 0, err
	}
	return id, g.waitRing(ctx, id)
}

// insert puts an event into the ring and queues it for the shards. An event without an id
// gets the next one. While a shard is behind, insert waits, or returns ErrBusy when wait
// is false. Ids, ring and shards change under one lock, so that join (resume.go) sees an
// event either in the ring or in the next delivery of its shard, never in both.
//
// The digest is computed before the lock, the rest of the encoding under it, because the
// signature covers the id.
func (g *Gateway) insert(ctx context.Context, e Event, wait bool) (uint64, error) {
	digest := g.signer.digest(e.Data)
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.backloggedLocked() {
		if !wait {
			return 0, ErrBusy
		}
		if err := g.waitLocked(ctx, &g.backlogTaken); err != nil {
			return 0, err
		}
	}
	if g.stopping {
		return 0, ErrStopped
	}
	if e.ID == 0 {
		e.ID = g.ring.last + 1
	} else if e.ID <= g.ring.last {
		return e.ID, nil // the log does not deliver an event twice; if it did, once is enough
	}
	ev := g.signer.encode(&e, digest)
	g.ring.push(ev)
	g.ingested.Add(1)
	for _, s := range g.shards {
		s.pushLocked(ev)
	}
	broadcastLocked(&g.ringGrew)
	return e.ID, nil
}

// backloggedLocked reports whether the queue of a shard is full.
func (g *Gateway) backloggedLocked() bool {
	return !g.stopping && slices.ContainsFunc(g.shards, func(s *shard) bool { return len(s.events) >= maxBacklog })
}

// waitRing waits until follow has put event id into the ring, so that a publisher can resume
// from the id in its response.
func (g *Gateway) waitRing(ctx context.Context, id uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.ring.last < id {
		if g.stopping {
			return ErrStopped
		}
		if err := g.waitLocked(ctx, &g.ringGrew); err != nil {
			return err
		}
	}
	return nil
}

// waitLocked releases g.mu, waits for a broadcast on ch, and locks g.mu again. It is a
// condition variable with a cancellable wait; the caller checks its condition again.
func (g *Gateway) waitLocked(ctx context.Context, ch *chan struct{}) error {
	if *ch == nil {
		*ch = make(chan struct{})
	}
	c := *ch
	g.mu.Unlock()
	defer g.mu.Lock()
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// broadcastLocked wakes all waiters of ch. It allocates nothing while there are none.
func broadcastLocked(ch *chan struct{}) {
	if *ch != nil {
		close(*ch)
		*ch = nil
	}
}

// follow puts the events of the log above after into the ring, until ctx ends. It checks
// them again: other programs may have written to the log, and a line break in one event
// would corrupt the streams of all subscribers.
func (g *Gateway) follow(ctx context.Context, after uint64) error {
	err := g.opts.Log.Follow(ctx, after, func(e Event) error {
		data, err := normalizeEvent(e.Topic, bytes.Clone(e.Data), MaxData)
		if err != nil {
			g.opts.Logger.Warn("skipped an invalid event of the event log", zap.Uint64("id", e.ID), zap.Error(err))
			return nil
		}
		e.Data = data
		_, err = g.insert(ctx, e, true)
		return err
	})
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("gateway: follow the event log: %w", err)
}

// Emit publishes an event of the relay itself; data is marshaled as JSON. It never waits and
// never fails its caller: what cannot be published is counted (Stats.EmitLost). Tenant ""
// is the relay. With a log the event is durable soon after.
func (g *Gateway) Emit(tenant, topic string, data any) {
	if g == nil { // a relay without a gateway
		return
	}
	g.emitted.Add(1)
	if err := g.emit(tenant, topic, data); err != nil {
		g.emitLost.Add(1)
	}
}

func (g *Gateway) emit(tenant, topic string, data any) (err error) {
	defer func() { // a MarshalJSON of the caller may panic
		if p := recover(); p != nil {
			err = fmt.Errorf("gateway: emit %s: panic: %v", topic, p)
		}
	}()
	raw, err := json.Marshal(data)
	if err != nil {
		return err
	}
	if err := strictjson.Check(raw); err != nil {
		return err
	}
	if raw, err = normalizeEvent(topic, raw, g.opts.MaxData); err != nil {
		return err
	}
	e := Event{Tenant: tenant, Topic: topic, Data: raw, TimeMS: time.Now().UnixMilli()}
	if g.opts.Log == nil {
		_, err = g.insert(context.Background(), e, false)
		return err
	}
	if !g.opts.Log.Offer(e) {
		return ErrBusy
	}
	return nil
}
