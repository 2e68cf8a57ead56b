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
	if err := s.start(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	taking, cancel := context.WithCancel(ctx) // a snapshot
	defer func() {
		cancel()
		wg.Wait()
		s.retention.reset()
	}()
	var soon, again <-chan time.Time
	var rested time.Time
	step := time.NewTimer(0) // of the next step of retention
	defer step.Stop()
	look := time.NewTimer(firstRetention)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			s.drain()
			return context.Cause(ctx)
		case <-s.offerReady:
			if soon == nil { // gather what else is offered
				soon = time.After(offerInterval)
			}
			continue
		case <-soon:
			soon = nil
		case <-s.appendReady:
		case <-look.C:
			look.Reset(retentionInterval)
			s.startRetention(taking, &wg)
		case <-s.retainNow:
			s.startRetention(taking, &wg)
		case snap := <-s.retention.results:
			s.handleSnapshot(taking, &wg, snap)
		case <-again:
		case <-step.C:
		}
		again = nil
		if s.commitBatch() {
			again = alwaysReady
		}
		// Between two groups, one step of retention: appenders wait for no more than that.
		if s.retention.removing && !time.Now().Before(rested) {
			rest, more := s.removeStep()
			if rested = time.Now().Add(rest); more {
				step.Reset(rest)
			}
		}
	}
}

// alwaysReady is always ready.
var alwaysReady = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

func (s *Store) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case stateClosed:
		return ErrClosed
	case stateRunning:
		return errors.New("eventlog: Run runs already")
	}
	s.state = stateRunning
	select {
	case <-s.started: // by an earlier Run
	default:
		close(s.started)
	}
	select { // offers that came before, or while an earlier Run ended
	case s.offerReady <- struct{}{}:
	default:
	}
	return nil
}

// drain commits what waits and refuses what comes. It does not try a disk again that
// refuses.
func (s *Store) drain() {
	s.mu.Lock()
	s.state = stateEnded
	failed := s.stats.FailedCommits
	s.mu.Unlock()
	for s.commitBatch() {
		s.mu.Lock()
		if s.stats.FailedCommits > failed {
			s.dropQueueLocked()
		}
		s.mu.Unlock()
	}
}

// commitBatch commits the next group, and tells whether more waits.
func (s *Store) commitBatch() (more bool) {
	group := s.takeBatch()
	if len(group) > 0 {
		s.commit(group)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue) > 0
}

// commit keeps a group of requests, or none of them, and answers them.
func (s *Store) commit(group []*appendRequest) {
	events, err := s.insert(group)
	if err != nil {
		err = explain(s.opts.Path, err)
		s.recordCommitError(err)
	} else {
		s.retention.noteChanges(events)
		s.publish(events)
	}
	s.mu.Lock()
	if err == nil {
		s.recordCommitLocked(group, events)
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

// insertRows is how many rows one statement inserts where there are as many.
const insertRows = 16

// insert is the transaction. It gives the events their numbers.
func (s *Store) insert(group []*appendRequest) ([]kernel.Event, error) {
	var events []kernel.Event
	now, seq := s.opts.Now().UnixMilli(), s.nextSeq
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
		args := make([]any, 0, 6*insertRows)
		for left := events; len(left) > 0; {
			put, n := s.insertOne, 1
			if len(left) >= insertRows {
				put, n = s.insertMany, insertRows
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
			s.nextSeq = last + 1
			return nil, err
		}
	}
	s.nextSeq = seq
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

func (s *Store) recordCommitLocked(group []*appendRequest, events []kernel.Event) {
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

// recordCommitError says once that the disk refuses, not for each group.
func (s *Store) recordCommitError(err error) {
	s.mu.Lock()
	first := s.stats.LastError == ""
	s.stats.FailedCommits++
	s.stats.LastError = err.Error()
	s.mu.Unlock()
	if first {
		s.log.Error("event log: events were not kept", zap.Error(err))
	}
}
