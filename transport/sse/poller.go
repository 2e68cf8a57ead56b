package sse

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentctl/transport/netpoll"
)

// Poller watches many outlets from one goroutine. Where the kernel offers no such thing
// (not TCP, not Linux), an outlet has a goroutine that waits for its end, and nobody
// tells when it is writable.
type Poller struct {
	ep *netpoll.Epoll // nil where there is none

	mu       sync.Mutex // protects the fields below
	ended    bool
	next     uint64
	polled   map[uint64]Watcher
	unpolled map[*Outlet]struct{}
	wg       sync.WaitGroup
}

// NewPoller makes a Poller; Run must be called, which closes it.
func NewPoller() (*Poller, error) {
	ep, err := netpoll.New()
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return nil, fmt.Errorf("sse: %w", err)
	}
	return &Poller{ep: ep, polled: make(map[uint64]Watcher), unpolled: make(map[*Outlet]struct{})}, nil
}

// Run tells the watchers what happens to their outlets, until ctx ends.
func (p *Poller) Run(ctx context.Context) error {
	err := p.ep.Run(ctx, p.dispatch)
	p.mu.Lock()
	p.ended = true
	for o := range p.unpolled {
		o.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // long ago: ends the read
	}
	p.mu.Unlock()
	p.wg.Wait()
	return err
}

func (p *Poller) dispatch(key uint64, what netpoll.Events) {
	p.mu.Lock()
	w := p.polled[key]
	p.mu.Unlock()
	switch {
	case w == nil:
	case what&netpoll.PeerClosed != 0:
		w.OnClosed()
	case what&netpoll.Writable != 0:
		w.OnWritable()
	}
}

// Add begins to watch o. told is whether Writable will be called; without it the caller
// tries Flush from time to time.
func (p *Poller) Add(o *Outlet, w Watcher) (polled bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return false, ErrClosed
	}
	if p.ep != nil && o.raw.sock != nil {
		p.next++
		o.key = p.next
		p.polled[o.key] = w // before Add: it may tell at once
		if err := p.ep.Add(o.raw.sock, o.key, netpoll.Writable); err != nil {
			delete(p.polled, o.key)
			return false, fmt.Errorf("sse: %w", err)
		}
		return true, nil
	}
	p.unpolled[o] = struct{}{}
	p.wg.Go(func() {
		discard(o.conn)
		w.OnClosed()
	})
	return false, nil
}

// Remove ends the watching; Close of the outlet comes after it.
func (p *Poller) Remove(o *Outlet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.polled, o.key)
	delete(p.unpolled, o)
}
