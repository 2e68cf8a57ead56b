package eventlog

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

// Run writes what is appended and offered, and removes what is too old or too much, until
// ctx ends; then it commits what waits, refuses what comes, and returns why ctx ended. It
// may run again after that.
func (s *Store) Run(ctx context.Context) error {
	if err := s.begin(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	taking, cancel := context.WithCancel(ctx) // a snapshot
	defer func() {
		cancel()
		wg.Wait()
		s.keep.reset()
	}()
	var soon, again <-chan time.Time
	var rested time.Time
	step := time.NewTimer(0) // of the next step of retention
	defer step.Stop()
	look := time.NewTimer(retainFirst)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			s.finish()
			return context.Cause(ctx)
		case <-s.offered:
			if soon == nil { // gather what else is offered
				soon = time.After(offerDelay)
			}
			continue
		case <-soon:
			soon = nil
		case <-s.wake:
		case <-look.C:
			look.Reset(retainEvery)
			s.retain(taking, &wg)
		case <-s.look:
			s.retain(taking, &wg)
		case snap := <-s.keep.results:
			s.keepSnapshot(taking, &wg, snap)
		case <-again:
		case <-step.C:
		}
		again = nil
		if s.commitNext() {
			again = at
		}
		// Between two groups, one step of retention: appenders wait for no more than that.
		if s.keep.removing && !time.Now().Before(rested) {
			rest, more := s.removeStep()
			if rested = time.Now().Add(rest); more {
				step.Reset(rest)
			}
		}
	}
}

// at is always ready.
var at = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

func (s *Store) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case closed:
		return ErrClosed
	case running:
		return errors.New("eventlog: Run runs already")
	}
	s.state = running
	select {
	case <-s.begun: // by an earlier Run
	default:
		close(s.begun)
	}
	select { // offers that came before, or while an earlier Run ended
	case s.offered <- struct{}{}:
	default:
	}
	return nil
}

// finish commits what waits and refuses what comes. It does not try a disk again that
// refuses.
func (s *Store) finish() {
	s.mu.Lock()
	s.state = ended
	failed := s.stats.FailedCommits
	s.mu.Unlock()
	for s.commitNext() {
		s.mu.Lock()
		if s.stats.FailedCommits > failed {
			s.dropWaitingLocked()
		}
		s.mu.Unlock()
	}
}

// commitNext commits the next group, and tells whether more waits.
func (s *Store) commitNext() (more bool) {
	group := s.take()
	if len(group) > 0 {
		s.commit(group)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}

// commit keeps a group of requests, or none of them, and answers them.
func (s *Store) commit(group []*request) {
	events, err := s.insert(group)
	if err != nil {
		err = explain(s.opts.Path, err)
		s.failed(err)
	} else {
		s.keep.touch(events)
		s.publish(events)
	}
	s.mu.Lock()
	if err == nil {
		s.committedLocked(group, events)
	}
	for _, r := range group {
		if r.offered && err != nil {
			s.stats.Dropped++
		}
	}
	s.mu.Unlock()
	for _, r := range group {
		if r.err = err; err != nil {
			r.last = 0
		}
		if r.done != nil {
			close(r.done)
		}
	}
}

// putRows is how many rows one statement inserts where there are as many.
const putRows = 16

// insert is the transaction. It gives the events their numbers.
func (s *Store) insert(group []*request) ([]kernel.Event, error) {
	var events []kernel.Event
	now, seq := s.opts.Now().UnixMilli(), s.next
	for _, r := range group {
		for _, e := range r.events {
			e.Seq = seq
			if e.CreatedMS == 0 {
				e.CreatedMS = now
			}
			events = append(events, e)
			r.last = seq
			seq++
		}
	}
	err := s.tx(func() error {
		args := make([]any, 0, 6*putRows)
		for left := events; len(left) > 0; {
			put, n := s.put, 1
			if len(left) >= putRows {
				put, n = s.putMany, putRows
			}
			args = args[:0]
			for i := range left[:n] {
				e := &left[i]
				args = append(args, int64(e.Seq), e.Tenant, e.Type, e.Aggregate, string(e.Payload), e.CreatedMS)
			}
			if _, err := put.ExecContext(context.Background(), args...); err != nil {
				return err
			}
			left = left[n:]
		}
		return nil
	})
	if err != nil {
		// Did the error come after the commit? Then the rows are there.
		last, lastErr := s.readLast()
		if lastErr != nil || last < events[0].Seq {
			return nil, err
		}
		if last != seq-1 {
			s.next = last + 1
			return nil, err
		}
	}
	s.next = seq
	return events, nil
}

// publish shows durable events to those who follow. The ring comes before Last, so that a
// follower who has read up to Last is never ahead of the ring.
func (s *Store) publish(events []kernel.Event) {
	for _, e := range events {
		_ = s.topic.PublishAt(e.Seq, e) // in order, and open while Run runs
	}
	s.last.Store(events[len(events)-1].Seq)
	if s.opts.OnCommit != nil {
		s.opts.OnCommit(events)
	}
}

func (s *Store) committedLocked(group []*request, events []kernel.Event) {
	if s.stats.Events == 0 {
		s.stats.First = events[0].Seq
	}
	s.stats.Events += int64(len(events))
	s.stats.Appended += uint64(len(events))
	s.stats.Commits++
	if len(group) > 1 {
		s.stats.SharedCommits++
	}
	if s.stats.LastError != "" {
		s.stats.LastError = ""
		s.log.Info("event log: writing again", zap.Uint64("seq", events[len(events)-1].Seq))
	}
}

// failed says once that the disk refuses, not for each group.
func (s *Store) failed(err error) {
	s.mu.Lock()
	first := s.stats.LastError == ""
	s.stats.FailedCommits++
	s.stats.LastError = err.Error()
	s.mu.Unlock()
	if first {
		s.log.Error("event log: events were not kept", zap.Error(err))
	}
}
