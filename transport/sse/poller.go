package sse

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentctl/transport/netpoll"
)

// Watcher is notified about a Writer by a Poller. The methods run in the Poller's
// goroutines and must be quick.
type Watcher interface {
	OnWritable() // the connection may accept bytes again
	OnClosed()   // the peer closed its side, or the connection broke; may be called twice
}

// Poller watches the connections of many Writers of policy Drop from one goroutine. For a
// connection that cannot be polled (not TCP, or not Linux), a goroutine waits for its end,
// and OnWritable is never called.
type Poller struct {
	ep *netpoll.Epoll // nil on systems without epoll

	mu       sync.Mutex // protects the fields below
	ended    bool
	lastKey  uint64
	polled   map[uint64]Watcher // by Writer.pollKey
	unpolled map[*Writer]struct{}
	wg       sync.WaitGroup // goroutines of unpolled
}

// NewPoller makes a Poller. Run must be called; it closes the Poller.
func NewPoller() (*Poller, error) {
	ep, err := netpoll.New()
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return nil, fmt.Errorf("sse: %w", err)
	}
	return &Poller{ep: ep, polled: make(map[uint64]Watcher), unpolled: make(map[*Writer]struct{})}, nil
}

// Run notifies the watchers until ctx ends, and waits for the Poller's goroutines. A call to
// a watcher may overlap with the Remove of its Writer and end after it.
func (p *Poller) Run(ctx context.Context) error {
	err := p.ep.Run(ctx, p.dispatch)
	p.mu.Lock()
	p.ended = true
	for w := range p.unpolled {
		w.raw.Conn.SetReadDeadline(time.Unix(1, 0)) // in the past: ends the read
	}
	p.mu.Unlock()
	p.wg.Wait()
	return err
}

func (p *Poller) dispatch(key uint64, events netpoll.Events) {
	p.mu.Lock()
	watcher := p.polled[key]
	p.mu.Unlock()
	switch {
	case watcher == nil:
	case events&netpoll.PeerClosed != 0:
		watcher.OnClosed()
	case events&netpoll.Writable != 0:
		watcher.OnWritable()
	}
}

// Add starts watching w. polled reports whether OnWritable will be called; if not, the
// caller calls Flush periodically.
func (p *Poller) Add(w *Writer, watcher Watcher) (polled bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return false, ErrClosed
	}
	if p.ep != nil && w.raw.sock != nil {
		p.lastKey++
		w.pollKey = p.lastKey
		p.polled[w.pollKey] = watcher // before Add, after which dispatch may run
		if err := p.ep.Add(w.raw.sock, w.pollKey, netpoll.Writable); err != nil {
			delete(p.polled, w.pollKey)
			return false, fmt.Errorf("sse: %w", err)
		}
		return true, nil
	}
	p.unpolled[w] = struct{}{}
	p.wg.Go(func() {
		discard(w.conn)
		watcher.OnClosed()
	})
	return false, nil
}

// Remove stops watching w. Call it before the Writer's Close.
func (p *Poller) Remove(w *Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.polled, w.pollKey)
	delete(p.unpolled, w)
}
