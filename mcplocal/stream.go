package mcplocal

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// defaultInterval is how often a stream calls its tool when the caller does not say.
const defaultInterval = 5000 // milliseconds

// pollStream is a stream of the results of one tool, called once in each interval. A reader
// that is slow misses frames: only the latest is kept.
//
// One goroutine, the poller, calls the tool; the transport that serves the stream calls the
// other methods.
type pollStream struct {
	cancel context.CancelFunc // ends the poller
	done   chan struct{}      // closed when the poller has returned

	mu     sync.Mutex      // protects the fields below
	notify func()          // called when last or err has changed
	last   *manifest.Frame // nil when Next has returned it
	err    error           // why the stream ended
}

var _ kernel.Stream = (*pollStream)(nil)

// openStream opens a stream of the results of tool.
func (b *board) openStream(ctx context.Context, tool string, args json.RawMessage) (*kernel.Result, error) {
	var a struct {
		IntervalMS int64 `json:"interval_ms"`
	}
	if err := json.Unmarshal(args, &a); err != nil {
		return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not fit the tool's schema")
	}
	if a.IntervalMS == 0 {
		a.IntervalMS = defaultInterval
	}
	// The first call is made here, so that a tool that fails is an error of the call and not
	// of a stream that the client has to open first.
	first, err := b.call(ctx, tool, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // ctx bounds the opening; Close ends the stream
	s := &pollStream{notify: func() {}, cancel: cancel, done: make(chan struct{})}
	s.put(first, nil)
	go s.poll(ctx, time.Duration(a.IntervalMS)*time.Millisecond, func() (json.RawMessage, error) { return b.call(ctx, tool, nil) })
	return &kernel.Result{Stream: s}, nil
}

// poll puts the result of read once in each interval, until ctx ends or read fails.
func (s *pollStream) poll(ctx context.Context, interval time.Duration, read func() (json.RawMessage, error)) {
	defer close(s.done)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		frame, err := read()
		if s.put(frame, err); err != nil {
			return
		}
	}
}

// put replaces the latest frame, or sets the error that ends the stream.
func (s *pollStream) put(frame json.RawMessage, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.last = &manifest.Frame{Data: frame}
	}
	s.err = err
	s.notify()
}

// Notify implements kernel.Stream.
func (s *pollStream) Notify(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notify = fn
	fn()
}

// Next implements kernel.Stream.
func (s *pollStream) Next() (*manifest.Frame, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.last
	s.last = nil
	return f, f != nil
}

// Err implements kernel.Stream.
func (s *pollStream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close implements kernel.Stream. It waits for the poller.
func (s *pollStream) Close() {
	s.cancel()
	<-s.done
}
