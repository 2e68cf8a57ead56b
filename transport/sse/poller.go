package sse

import (
	"context"
	"sync"
	"time"
)

// Poller watches many outlets from one goroutine. Where the kernel offers no such thing
// (not TCP, not Linux), an outlet has a goroutine that waits for its end, and nobody
// tells when it is writable.
type Poller struct {
	ep    *epoll        // nil where there is none
	first chan struct{} // closed by the first outlet for ep: until then nothing waits in the kernel

	mu     sync.Mutex // protects the fields below
	ended  bool
	next   uint64
	polled map[uint64]Watcher
	others map[*Outlet]struct{}
	wg     sync.WaitGroup
}

// NewPoller makes a Poller; Run must be called, which closes it.
func NewPoller() (*Poller, error) {
	ep, err := newEpoll()
	if err != nil {
		return nil, err
	}
	return &Poller{ep: ep, first: make(chan struct{}), polled: make(map[uint64]Watcher), others: make(map[*Outlet]struct{})}, nil
}

// Run tells the watchers what happens to their outlets, until ctx ends.
func (p *Poller) Run(ctx context.Context) error {
	var err error
	select {
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-p.first:
		err = p.ep.run(ctx, p.tell)
	}
	p.ep.close()
	p.mu.Lock()
	p.ended = true
	for o := range p.others {
		o.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // long ago: ends the read
	}
	p.mu.Unlock()
	p.wg.Wait()
	return err
}

func (p *Poller) tell(key uint64, writable, gone bool) {
	p.mu.Lock()
	w := p.polled[key]
	p.mu.Unlock()
	switch {
	case w == nil:
	case gone:
		w.Gone()
	case writable:
		w.Writable()
	}
}

// Add begins to watch o. told is whether Writable will be called; without it the caller
// tries Flush from time to time.
func (p *Poller) Add(o *Outlet, w Watcher) (told bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return false, ErrClosed
	}
	if p.ep != nil && o.raw.sock != nil {
		p.next++
		o.key = p.next
		p.polled[o.key] = w // before add: it may tell at once
		if err := p.ep.add(o.raw.sock, o.key); err != nil {
			delete(p.polled, o.key)
			return false, err
		}
		if p.next == 1 {
			close(p.first)
		}
		return true, nil
	}
	p.others[o] = struct{}{}
	p.wg.Go(func() {
		discard(o.conn)
		w.Gone()
	})
	return false, nil
}

// Remove ends the watching; Close of the outlet comes after it.
func (p *Poller) Remove(o *Outlet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.polled, o.key)
	delete(p.others, o)
}
