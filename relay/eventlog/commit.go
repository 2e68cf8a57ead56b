package eventlog

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// Run writes appended and offered events and applies retention until ctx ends. It then
// commits the queue, refuses new events, waits for a snapshot in progress, and returns why
// ctx ended. It may be called again after that.
//
// The loop commits a batch each time it wakes, and signals itself when the batch was not the
// whole queue. One step of retention follows each batch at most, so that an appender waits for
// no more than that. After a step, retention pauses until resume.
//
// Two goroutines run beside the loop, and end with it: the check of the chains (verifyLoop), whose result
// is in Stats, and during a snapshot Options.Snapshot, whose result reaches the loop over a channel.
func (s *Store) Run(ctx context.Context) error {
	if err := s.start(); err != nil {
		return err
	}
	var wg sync.WaitGroup // the goroutines of a snapshot and of the check of the chains
	snapshotCtx, cancel := context.WithCancel(ctx)
	wg.Go(func() { s.verifyLoop(snapshotCtx) })
	defer func() {
		cancel()
		wg.Wait()
		s.retention.resetState()
	}()
	var offersDue <-chan time.Time // fires offerInterval after the first offer that waits; nil: none waits
	var resume time.Time           // when the pause after a step of retention is over
	step := time.NewTimer(0)
	defer step.Stop()
	check := time.NewTimer(firstRetention)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			s.drain()
			return context.Cause(ctx)
		case <-s.offerReady:
			if offersDue == nil { // gather more offers, to save transactions
				offersDue = time.After(offerInterval)
			}
			continue
		case <-offersDue:
			offersDue = nil
		case <-s.appendReady:
		case <-check.C:
			check.Reset(retentionInterval)
			s.space.checkNow = true
		case <-s.retainNow:
			s.space.checkNow = true
		case snap := <-s.retention.results:
			s.handleSnapshot(snapshotCtx, &wg, snap)
		case <-step.C:
		case done := <-s.probes:
			done <- s.writeProbe()
		}
		if s.commitBatch() {
			signal(s.appendReady)
		} else {
			offersDue = nil
		}
		// A reader prevents that the write-ahead log is emptied. Try again soon, also without a commit:
		// after pinnedAfter, offered calls are dropped and retention waits (fileSpace).
		if !s.space.busySince.IsZero() {
			s.checkpoint()
			step.Reset(pinnedRetry)
		}
		if s.space.checkNow {
			s.space.checkNow = false
			s.startRetention(snapshotCtx, &wg)
		}
		if s.removing() && !time.Now().Before(resume) {
			pause, again := s.removeStep()
			if resume = time.Now().Add(pause); again {
				step.Reset(pause)
			}
		}
	}
}

// start moves the state to running, from idle or, when Run is called again, from ended. Offers
// of the idle state are still in the queue. It waits for replays that read the table, whose pages must
// not change meanwhile.
func (s *Store) start() error {
	s.tableMu.Lock()
	s.table = nil // from here on the pages change; its file is closed with the others
	s.tableMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case stateClosed:
		return ErrClosed
	case stateRunning:
		return errors.New("eventlog: Run is already running")
	}
	s.state = stateRunning
	s.startOnce.Do(func() { close(s.started) })
	signal(s.offerReady) // offers made before Run
	return nil
}

// drain commits the queue and refuses new events, so that callers of Append get a result when
// the relay stops. After a failed commit it drops the rest: the disk would refuse each batch
// again.
func (s *Store) drain() {
	s.mu.Lock()
	s.state = stateEnded
	failed := s.stats.FailedCommits
	s.mu.Unlock()
	for s.commitBatch() {
		var dropped []*appendRequest
		s.mu.Lock()
		if s.stats.FailedCommits > failed {
			dropped = s.dropQueueLocked()
		}
		s.mu.Unlock()
		s.dropped(dropped)
	}
}

// commitBatch commits the next batch, and reports whether more was queued than one batch may have.
// What was queued during the commit has signaled: an offer of these waits for others.
func (s *Store) commitBatch() (more bool) {
	batch, more := s.takeBatch()
	if len(batch) > 0 {
		s.commit(batch)
	}
	return more
}

// commit stores a batch of requests and answers their callers. If there is no place for a new tenant
// (maxChains), each request is stored separately, so that only those of that tenant fail. After damage,
// commitWithoutCalls tries to save a part of the batch. Any other error fails the whole batch: most are of
// the disk, and each request would meet them.
func (s *Store) commit(batch []*appendRequest) {
	s.beginWrite()
	defer s.endWrite()
	batch, err := s.reserveSpace(batch)
	if err == nil && len(batch) > 0 {
		err = s.commitAll(batch)
	}
	if isDamage(err) {
		batch, err = s.commitWithoutCalls(batch, err)
	}
	if errors.Is(err, errTooManyChains) && len(batch) > 1 {
		for _, r := range batch {
			s.answer([]*appendRequest{r}, s.commitAll([]*appendRequest{r}))
		}
		return
	}
	s.answer(batch, err)
}

// commitWithoutCalls stores a batch after a commit that failed because of damage, without its calls:
// the table of calls may be damaged, and that of state sound. If that succeeds, calls are dropped from
// now on, until the log is opened again. It returns the requests that are not answered yet, and their
// error. A batch without events of state fails: it cannot show that their table is sound.
func (s *Store) commitWithoutCalls(batch []*appendRequest, damage error) ([]*appendRequest, error) {
	rest, calls := splitCalls(batch)
	if len(calls) == 0 || len(rest) == 0 {
		return batch, damage
	}
	s.dropped(calls)
	err := s.commitAll(rest)
	if s.space.callsDamaged = err == nil; err == nil {
		s.opts.Watch.Report("calls", storage.Problem{Kind: storage.Damaged, Detail: "events about calls cannot be stored, other events can; see: agentctl relay check"})
	}
	return rest, err
}

// dropped counts and reports offers that were not stored.
func (s *Store) dropped(offers []*appendRequest) {
	if len(offers) == 0 {
		return
	}
	s.mu.Lock()
	s.stats.Dropped += uint64(len(offers))
	s.mu.Unlock()
	if s.opts.OnDrop == nil {
		return
	}
	events := make([]kernel.Event, 0, len(offers))
	for _, r := range offers {
		events = append(events, r.events...)
	}
	s.opts.OnDrop(events)
}

// answer reports the outcome of a batch to its callers, and reports offers that were not stored.
func (s *Store) answer(batch []*appendRequest, err error) {
	var offers []*appendRequest
	for _, r := range batch {
		if err != nil && r.offered {
			offers = append(offers, r)
		}
		if r.err = err; err != nil {
			r.last = 0
		}
		if r.done != nil {
			close(r.done)
		}
	}
	s.dropped(offers)
}

// commitAll stores a batch of requests, all or none of them. Callers rely on the order: followers
// and Last first, then the statistics, and the callers of Append at the end (answer). A caller that
// has its seq can therefore read it back.
func (s *Store) commitAll(batch []*appendRequest) error {
	events, err := s.insert(batch)
	defer func() { clear(s.events) }() // keep the memory, and not the payloads
	if err == nil {
		s.retention.noteChanges(events)
		s.publish(events)
	}
	err = explain(s.opts.Path, err)
	s.recordCommit(batch, events, err)
	s.checkpoint()
	return err
}

// insert numbers the events of a batch and commits them in one transaction. The next batch
// reuses the numbers of a batch that failed, so the log has no gap. Append cannot give the numbers: they
// must follow the order of the commits, which is also that of the ring.
func (s *Store) insert(batch []*appendRequest) ([]kernel.Event, error) {
	events := s.events[:0]
	now, seq := s.opts.Now().UnixMilli(), s.nextSeq
	for _, r := range batch {
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
	s.events = events
	op := s.opts.Watch.Begin("commit")
	err := s.tx(func() error { return s.w.insert(context.Background(), events) })
	op.End(explain(s.opts.Path, err))
	if err != nil {
		// A commit can succeed and still return an error. The rows then exist, and reusing
		// their numbers would fail forever: the triggers refuse a seq that is not above the last.
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

// publish delivers durable events to followers. The ring comes before Last: a follower that
// has read up to Last must not be ahead of the ring. It does not block on a follower: one that
// falls behind loses its subscription (see Follow).
func (s *Store) publish(events []kernel.Event) {
	for _, e := range events {
		_ = s.topic.PublishAt(e.Seq, e) // cannot fail: in order, and open while Run runs
	}
	last := events[len(events)-1]
	s.last.Store(last.Seq)
	s.newestMS.Store(max(s.newestMS.Load(), last.CreatedMS)) // one goroutine commits
	if s.opts.onCommit != nil {
		s.opts.onCommit(events)
	}
}

// recordCommit counts a commit that succeeded or failed. It logs the first failure and the
// first success after one, not each batch: a full disk would otherwise fill the service log. If the log has
// a Watch, the monitor of the disk logs these instead.
func (s *Store) recordCommit(batch []*appendRequest, events []kernel.Event, err error) {
	s.mu.Lock()
	wasFailing := s.stats.LastError != ""
	if err != nil {
		s.stats.FailedCommits++
		s.stats.LastError = err.Error()
	} else {
		if s.stats.Events == 0 {
			s.stats.First = events[0].Seq
		}
		s.stats.Events += int64(len(events))
		for i := range events {
			if classOf(events[i].Type) == ClassCalls {
				s.stats.Calls++
			}
		}
		s.stats.StateBytes += s.w.grownState
		s.stats.CallBytes += s.w.grownCalls
		s.stats.Appended += uint64(len(events))
		s.stats.Commits++
		if len(batch) > 1 {
			s.stats.SharedCommits++
		}
		s.stats.LastError = ""
	}
	s.mu.Unlock()
	if s.opts.Watch != nil && storage.Classify(err) != "" { // whose monitor logs it
		return
	}
	switch {
	case err != nil && !wasFailing:
		s.log.Error("event log: events were not kept", zap.Error(err))
	case err == nil && wasFailing && s.opts.Watch == nil:
		s.log.Info("event log: writing again", zap.Uint64("seq", s.Last()))
	}
}
