package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"agentctl/relay/kernel"
)

// request is what one caller wants kept: all of it or nothing.
type request struct {
	events  []kernel.Event
	bytes   int
	offered bool
	done    chan struct{} // closed when last and err are set; nil when offered
	last    uint64
	err     error
}

// prepare checks events and copies them: a caller may use its slices again.
func prepare(events []kernel.Event) (*request, error) {
	r := &request{events: slices.Clone(events)}
	for i := range r.events {
		e := &r.events[i]
		if err := e.Check(); err != nil {
			return nil, err
		}
		if !text(e.Tenant) || !text(e.Aggregate) {
			return nil, fmt.Errorf("eventlog: the tenant and aggregate_id of a %s event must be UTF-8 without NUL", e.Type)
		}
		if !utf8.Valid(e.Payload) {
			return nil, fmt.Errorf("eventlog: the payload of a %s event must be UTF-8", e.Type)
		}
		switch { // one line, for event streams and ndjson
		case len(e.Payload) == 0:
			e.Payload = json.RawMessage("{}")
		case !bytes.ContainsAny(e.Payload, " \t\r\n"): // as most are
			e.Payload = bytes.Clone(e.Payload)
		default:
			var b bytes.Buffer
			if err := json.Compact(&b, e.Payload); err != nil {
				return nil, err
			}
			e.Payload = b.Bytes()
		}
		r.bytes += len(e.Payload) + eventBytes
	}
	return r, nil
}

func text(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// Append implements kernel.Log. Payloads are kept compact, on one line. At most MaxAppend
// events. Errors: ErrNotRunning, kernel.ErrLogFull, what the disk said (nothing was kept;
// a later Append may succeed). When ctx ends before the transaction began, nothing is
// kept; when it ends later, the error says that the events may be.
func (s *Store) Append(ctx context.Context, events ...kernel.Event) (last uint64, err error) {
	if len(events) == 0 {
		return s.Last(), nil
	}
	if len(events) > MaxAppend {
		return 0, fmt.Errorf("eventlog: %d events at once; append at most %d", len(events), MaxAppend)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	r, err := prepare(events)
	if err != nil {
		return 0, err
	}
	r.done = make(chan struct{})
	if err := s.enqueue(r); err != nil {
		return 0, err
	}
	select {
	case <-r.done:
		return r.last, r.err
	case <-ctx.Done():
		if s.withdraw(r) {
			return 0, ctx.Err()
		}
		return 0, fmt.Errorf("eventlog: nobody waited for the disk, the events may have been kept: %w", ctx.Err())
	}
}

// Offer implements kernel.Log. An offered event is durable within 200 ms on a disk that
// keeps up. One that is not kept, whatever the reason, is counted in Stats.Dropped.
// Offers may wait for Run to begin.
func (s *Store) Offer(e kernel.Event) bool {
	r, err := prepare([]kernel.Event{e})
	if err == nil {
		r.offered = true
		err = s.enqueue(r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Offered++
	if err != nil {
		s.stats.Dropped++
	}
	return err == nil
}

func (s *Store) enqueue(r *request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state == closed:
		return ErrClosed
	case s.state == ended, s.state == idle && !r.offered:
		return ErrNotRunning
	case s.events > 0 && (s.events+len(r.events) > s.opts.MaxQueued || s.bytes+r.bytes > waitingBytes),
		r.offered && s.offers >= max(s.opts.MaxQueued/2, 1): // offers must not take the room of those who wait
		return kernel.ErrLogFull
	}
	s.countLocked(r, 1)
	s.waiting = append(s.waiting, r)
	signal := s.wake
	if r.offered {
		signal = s.offered
	}
	select {
	case signal <- struct{}{}:
	default:
	}
	return nil
}

func (s *Store) countLocked(r *request, sign int) {
	s.events += sign * len(r.events)
	s.bytes += sign * r.bytes
	if r.offered {
		s.offers += sign
	}
}

// withdraw takes a request back whose transaction has not begun.
func (s *Store) withdraw(r *request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.waiting, r)
	if i < 0 {
		return false
	}
	s.waiting = slices.Delete(s.waiting, i, i+1)
	s.countLocked(r, -1)
	return true
}

// take is the next group: the oldest requests, one at least.
func (s *Store) take() []*request {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, events, size := 0, 0, 0
	for _, r := range s.waiting {
		if n > 0 && (events+len(r.events) > groupEvents || size+r.bytes > groupBytes) {
			break
		}
		n, events, size = n+1, events+len(r.events), size+r.bytes
		s.countLocked(r, -1)
	}
	group := slices.Clone(s.waiting[:n])
	s.waiting = slices.Delete(s.waiting, 0, n)
	return group
}

func (s *Store) dropWaitingLocked() {
	for _, r := range s.waiting {
		s.countLocked(r, -1)
		if r.offered {
			s.stats.Dropped++
			continue
		}
		r.err = ErrNotRunning
		close(r.done)
	}
	s.waiting = nil
}
