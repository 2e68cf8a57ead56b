package sse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/transport/netpoll"
)

// Engine serves streams from a few goroutines, its shards. A stream needs neither a goroutine
// nor a buffer while its subscriber keeps up: its shard writes without waiting, and one epoll
// instance reports connections that are writable again, have input, or are closed.
//
// A connection that cannot be polled (not TCP, or not Linux) has a goroutine that waits for its
// end, and its shard tries again periodically while it is blocked.
type Engine struct {
	shards []*Shard
	next   atomic.Uint32  // see Next
	ep     *netpoll.Epoll // of Run; nil on systems without epoll
	wg     sync.WaitGroup // readers of connections that are not polled

	mu      sync.Mutex // protects the fields below; a leaf
	lastKey uint64
	polled  map[uint64]*Stream // by Stream.pollKey
}

// NewEngine makes an Engine without shards.
func NewEngine() *Engine { return &Engine{polled: make(map[uint64]*Stream)} }

// AddShard adds a shard. feed is what it publishes itself; nil: the handlers of its streams do
// everything. Call it before Run.
func (e *Engine) AddShard(feed Feed) *Shard {
	s := &Shard{engine: e, feed: feed, wake: make(chan struct{}, 1)}
	e.shards = append(e.shards, s)
	return s
}

// Next returns the shards in rotation.
func (e *Engine) Next() *Shard { return e.shards[int(e.next.Add(1))%len(e.shards)] }

// Run serves until ctx ends or epoll fails. Then it ends all streams with ErrDraining, and
// waits for its goroutines. It may be called again. Streams that are added before it starts are
// served once it does.
func (e *Engine) Run(ctx context.Context) error {
	ep, err := netpoll.New()
	if errors.Is(err, errors.ErrUnsupported) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("sse: %w", err)
	}
	e.ep = ep
	polling, endPolling := context.WithCancel(context.WithoutCancel(ctx))
	serving, endServing := context.WithCancel(ctx)
	defer endServing()
	var shards, poller sync.WaitGroup
	poller.Go(func() {
		if pollErr := ep.Run(polling, e.dispatch); polling.Err() == nil {
			err = pollErr
			endServing()
		}
	})
	for _, s := range e.shards {
		shards.Go(func() { s.run(serving) })
	}
	shards.Wait()
	endPolling()
	poller.Wait()
	e.wg.Wait()
	return err
}

// dispatch passes an event on to the stream's shard. The stream may have ended meanwhile.
func (e *Engine) dispatch(key uint64, events netpoll.Events) {
	e.mu.Lock()
	st := e.polled[key]
	e.mu.Unlock()
	if st == nil {
		return
	}
	var what uint32
	if events&netpoll.Readable != 0 {
		what |= eventReadable
	}
	if events&netpoll.Writable != 0 {
		what |= eventWoken
	}
	if events&netpoll.PeerClosed != 0 {
		what |= eventClosed
	}
	st.shard.notify(st, what)
}

// watch starts watching a stream's connection.
func (e *Engine) watch(st *Stream) error {
	raw := st.raw
	if e.ep == nil || raw.sock == nil {
		e.wg.Go(func() {
			discard(st.conn)
			st.shard.notify(st, eventClosed)
		})
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastKey++
	st.pollKey = e.lastKey
	e.polled[st.pollKey] = st // before Add, after which dispatch may run
	raw.ReadNonblocking(netpoll.NewReader(raw.Conn))
	if err := e.ep.Add(raw.sock, st.pollKey, netpoll.Readable|netpoll.Writable); err != nil {
		return fmt.Errorf("sse: %w", err)
	}
	return nil
}

// unwatch stops watching a stream's connection. The end of the connection ends its reader.
func (e *Engine) unwatch(st *Stream) {
	if st.pollKey == 0 {
		st.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // in the past: ends the read
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.polled, st.pollKey)
}

// discard reads until the client closes its side, or has sent too much.
func discard(r io.Reader) {
	var junk [64]byte
	for n, err := 0, error(nil); err == nil && n < maxInput; {
		var m int
		m, err = r.Read(junk[:])
		n += m
	}
}
