package eventlog

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

// Retention removes old rows. It runs on the goroutine of Run, separately for each class. Calls are
// removed as they are. Events of state are removed in rounds of three phases:
//
//	idle          checked each minute and when the log is nearly full: is there a victim?
//	              Then limitSeq = the last seq now; nothing above it is removed in this round.
//	snapshotting  Options.Snapshot returns the state of each aggregate. A snapshot is
//	              stored if no event of its aggregate was committed since it was
//	              requested; the others are requested again, maxSnapshotTries times at
//	              most. A stored snapshot therefore replaces all events before it.
//	removing      in steps of a few ms the mark of a chain moves up, and its rows below it
//	              are deleted in the same transaction, until there is no victim or
//	              limitSeq is reached.
//
// A failure in any phase ends the round; the next check begins a new one.
//
// The victim is the first of these that there is (Store.victim):
//
//  1. every chain whose oldest rows are older than the MaxAge of its class
//  2. a chain larger than the MaxBytes of its class
//  3. of a tenant larger than MaxTenantBytes that is not the only one: its calls or its state
//     (losingClass)
//  4. if the log is nearly full: the largest chain of calls, or of state (losingClass)
//
// A tenant that floods the log therefore loses its own oldest rows, and calls never replace state.
// Removing begins at a bound and ends at 7/8 of it, so that it is rare.
const (
	firstRetention    = 5 * time.Second // after Run began
	retentionInterval = time.Minute
	snapshotTimeout   = 30 * time.Second
	maxSnapshotTries  = 8
	maxSnapshotEvents = 100_000
	maxChanged        = 65_536               // aggregates of retention.changed; with more of them the round fails
	minStepRows       = 32                   // rows that a step removes at least
	maxStepRows       = 2048                 // and at most
	maxStepTime       = 4 * time.Millisecond // a step that took longer halves the next one
	pauseFactor       = 4                    // the pause after a step is this many times as long as the step
	ageSlackDivisor   = 16                   // retention by age begins MaxAge/16 late, so that snapshots are rare
)

// aggregateKey identifies the aggregate of an event.
type aggregateKey struct{ tenant, aggregate string }

// keyOf returns the aggregate of an event.
func keyOf(e *kernel.Event) aggregateKey { return aggregateKey{e.Tenant, e.Aggregate} }

// retention is the state of both classes. It belongs to the goroutine of Run. The goroutine that takes
// a snapshot uses results only. A round of state ends with Run (resetState); a removal of calls continues
// when Run is called again.
type retention struct {
	calls   removal
	state   removal       // active in the phase removing
	results chan snapshot // capacity 1

	// Of a round of state.
	snapshotting bool                  // it is in that phase
	tenant       *string               // whose state is removed; nil: that of every tenant, by age
	tries        int                   // snapshots that were requested
	changed      map[aggregateKey]bool // committed since the last request; nil: none is under way, or too many changed
	wanted       map[aggregateKey]bool // aggregates still without a snapshot; nil: all
}

// removal is the removal of rows of one class.
type removal struct {
	active   bool
	limitSeq uint64 // rows above it stay in this round
	stepRows int    // rows of the next step
	removed  int64  // rows, in this round
}

// snapshot is the result of Options.Snapshot.
type snapshot struct {
	events []kernel.Event
	err    error
}

// resetState ends a round of state. It drops a result that came too late.
func (k *retention) resetState() {
	select {
	case <-k.results:
	default:
	}
	*k = retention{calls: k.calls, results: k.results}
}

// noteChanges records which aggregates changed while a snapshot is taken. The snapshot of such an
// aggregate may lack the change, and would undo it in a replay, so it is requested again.
func (k *retention) noteChanges(events []kernel.Event) {
	for i := range events {
		if k.changed == nil {
			return
		}
		k.changed[keyOf(&events[i])] = true
		if len(k.changed) > maxChanged {
			k.changed = nil
		}
	}
}

// startRetention begins to remove rows of each class that has a victim: calls at once, state after its
// snapshot. First it shrinks files that are beyond the bound.
func (s *Store) startRetention(ctx context.Context, wg *sync.WaitGroup) {
	k := &s.retention
	if err := s.readSpace(); err != nil {
		s.recordRetention(ClassState, err)
		return
	}
	if s.space.filePages > s.space.maxPages {
		if err := s.shrink(); err != nil {
			s.recordRetention(ClassState, err)
		}
	}
	if s.bytes.Load() > s.opts.MaxBytes {
		s.truncateFiles()
	}
	if !k.calls.active {
		if v, err := s.victim(ClassCalls, nil, false); err != nil {
			s.recordRetention(ClassCalls, err)
		} else if v != nil {
			k.calls = removal{active: true, limitSeq: s.Last(), stepRows: minStepRows}
		}
	}
	if k.snapshotting || k.state.active {
		return
	}
	v, err := s.victim(ClassState, nil, false)
	switch {
	case err != nil:
		s.recordRetention(ClassState, err)
	case v != nil:
		if v.chain != nil { // by size: other tenants lose nothing and need no snapshot
			k.tenant = &v.chain.tenant
		}
		k.state = removal{limitSeq: s.Last(), stepRows: minStepRows}
		if k.state.active = s.opts.Snapshot == nil; !k.state.active {
			s.requestSnapshot(ctx, wg)
		}
	}
}

// requestRound asks for a check before the next interval is over. A round that cannot remove enough
// must not be followed by the next one at once: each one stores snapshots.
func (s *Store) requestRound() {
	if now := time.Now(); !now.Before(s.space.nextRound) {
		s.space.checkNow, s.space.nextRound = true, now.Add(roundDelay)
	}
}

// Least times between rounds that are not begun by the interval.
const (
	roundDelay       = time.Second
	failedRoundDelay = 30 * time.Second
)

// removing reports whether rows are to be removed now. It reports false while the write-ahead log
// cannot be emptied, which would grow with each deletion.
func (s *Store) removing() bool {
	return (s.retention.calls.active || s.retention.state.active) && s.space.pinned.IsZero()
}

// victim is what loses its oldest rows: those of one chain, or those of every chain of the class that
// were created before cutoff.
type victim struct {
	chain  *chain // nil: every chain
	cutoff int64  // Unix ms; math.MaxInt64 for one chain, whose rows go whatever their age
}

// victim returns the victim of a class, nil for none. With a tenant it is a chain of that tenant.
// isRemoving says that rows are being removed already: the bounds at which that ends are lower than
// those at which it begins.
func (s *Store) victim(class Class, tenant *string, isRemoving bool) (*victim, error) {
	if s.w.chains == nil {
		if err := s.w.load(context.Background()); err != nil {
			return nil, err
		}
	}
	quota := s.opts.State
	if class == ClassCalls {
		quota = s.opts.Calls
	}
	if tenant == nil {
		if v, err := s.tooOld(class, cmp.Or(quota.MaxAge, s.opts.MaxAge), isRemoving); v != nil || err != nil {
			return v, err
		}
	}
	exceeds := func(bytes, bound int64) bool {
		if isRemoving {
			bound = bound / 8 * 7
		}
		return bytes > bound
	}
	// Maps are in no order, so any of several victims may come first; removeOldest asks again each step.
	u := s.usage(class)
	for _, c := range s.w.chains {
		if c.class != class || c.isEmpty() || tenant != nil && c.tenant != *tenant {
			continue
		}
		if quota.MaxBytes > 0 && exceeds(c.bytes, quota.MaxBytes) {
			return &victim{c, math.MaxInt64}, nil
		}
		state, calls := s.tenantBytes(c.tenant)
		if !u.isAlone(c.tenant) && exceeds(state+calls, s.opts.MaxTenantBytes) && losingClass(state, calls, s.opts.MaxTenantBytes) == class {
			return &victim{c, math.MaxInt64}, nil
		}
	}
	// If the log as a whole is full, the largest chain loses rows, whoever appends now.
	level := int64(highLevelEighths)
	if isRemoving {
		level = lowLevelEighths
	}
	isFull := s.space.usedPages > s.space.maxPages/8*level
	if u.largest == nil || !isFull || losingClass(u.stateBytes, u.callBytes, s.space.maxPages*pageSize) != class {
		return nil, nil
	}
	if tenant != nil && u.largest.tenant != *tenant {
		s.requestRound() // for the tenant of the largest chain
		return nil, nil
	}
	return &victim{u.largest, math.MaxInt64}, nil
}

// usage is who uses the space of the log.
type usage struct {
	stateBytes, callBytes int64  // of all tenants
	largest               *chain // of the class that was asked for; nil: it has no rows
	tenant                string // the first tenant with rows; "": none has any
	hasOthers             bool   // another tenant has rows as well
}

// isAlone reports whether no other tenant has rows. The relay itself, "", is no tenant.
func (u *usage) isAlone(tenant string) bool {
	return !u.hasOthers && (u.tenant == "" || u.tenant == tenant)
}

// usage adds up the chains.
func (s *Store) usage(class Class) (u usage) {
	for _, c := range s.w.chains {
		switch {
		case c.isEmpty():
			continue
		case u.tenant == "":
			u.tenant = c.tenant
		case c.tenant != "" && c.tenant != u.tenant:
			u.hasOthers = true
		}
		if c.class == ClassCalls {
			u.callBytes += c.bytes
		} else {
			u.stateBytes += c.bytes
		}
		if c.class == class && (u.largest == nil || c.bytes > u.largest.bytes) {
			u.largest = c
		}
	}
	return u
}

// tenantBytes returns what the rows of a tenant use.
func (s *Store) tenantBytes(tenant string) (state, calls int64) {
	if c := s.w.chains[chainKey{tenant, ClassState}]; c != nil && !c.isEmpty() {
		state = c.bytes
	}
	if c := s.w.chains[chainKey{tenant, ClassCalls}]; c != nil && !c.isEmpty() {
		calls = c.bytes
	}
	return state, calls
}

// losingClass returns the class that loses rows when both together exceed a bound: calls if they have
// more than 3/8 of it or more than state, else state. So state keeps half of it, however many calls
// there are, and calls keep 3/8.
func losingClass(state, calls, bound int64) Class {
	if calls > bound/8*3 || calls >= state {
		return ClassCalls
	}
	return ClassState
}

// tooOld returns the victim by age. It reads the oldest row by seq only, since rows are removed in that
// order.
func (s *Store) tooOld(class Class, maxAge time.Duration, isRemoving bool) (*victim, error) {
	if maxAge < 0 {
		return nil, nil
	}
	var oldest int64
	err := s.queryRow("SELECT created_at FROM " + string(class) + " ORDER BY seq LIMIT 1").Scan(&oldest)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	now, limit := s.ageNow(), maxAge
	if !isRemoving {
		limit += maxAge / ageSlackDivisor
	}
	if oldest >= now.Add(-limit).UnixMilli() {
		return nil, nil
	}
	return &victim{nil, now.Add(-maxAge).UnixMilli()}, nil
}

// ageNow is the time from which the age of events is counted: the wall clock, but not later than the
// newest event of earlier runs and the uptime since then. A wall clock that is wrong by a year for an
// hour therefore removes nothing. After a time without the relay, events are kept longer by that time,
// until it is started again; MaxBytes bounds the log all the same.
func (s *Store) ageNow() time.Time {
	now := s.opts.Now()
	if latest := s.ageBase.Add(s.uptime()); latest.Before(now) {
		return latest
	}
	return now
}

// requestSnapshot calls Options.Snapshot in a separate goroutine, which may block on locks
// that are held around Append. Run waits for that goroutine before it returns. Sending the
// result cannot block: results holds one, and one snapshot runs at a time.
func (s *Store) requestSnapshot(ctx context.Context, wg *sync.WaitGroup) {
	s.retention.snapshotting, s.retention.changed = true, map[aggregateKey]bool{}
	s.retention.tries++
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
		defer cancel()
		events, err := s.opts.Snapshot(ctx)
		if err == nil && len(events) > maxSnapshotEvents {
			err = fmt.Errorf("eventlog: a snapshot of %d events; at most %d", len(events), maxSnapshotEvents)
		}
		s.retention.results <- snapshot{events, err}
	})
}

// handleSnapshot appends the events of a snapshot, and requests another one for the
// aggregates that have changed since the request. When none is left, removing begins. After an error, or
// maxSnapshotTries, the round ends and no row is removed. The snapshots stored so far stay: they are
// correct, and only cost space.
func (s *Store) handleSnapshot(ctx context.Context, wg *sync.WaitGroup, snap snapshot) {
	k, err := &s.retention, snap.err
	if err == nil && k.changed == nil {
		err = errors.New("eventlog: too many changes while a snapshot was taken")
	}
	var current []kernel.Event
	stale := map[aggregateKey]bool{}
	for i := range snap.events {
		switch key := keyOf(&snap.events[i]); {
		case k.tenant != nil && *k.tenant != key.tenant: // nothing of theirs is removed
		case k.wanted != nil && !k.wanted[key]: // kept in an earlier try
		case k.changed[key]:
			stale[key] = true
		default:
			current = append(current, snap.events[i])
		}
	}
	if err == nil {
		err = s.appendSnapshot(current)
	}
	switch {
	case err == nil && len(stale) == 0:
		k.state.active = true
		k.snapshotting, k.tries, k.changed, k.wanted = false, 0, nil, nil
		return
	case err == nil && k.tries < maxSnapshotTries:
		k.wanted = stale
		s.requestSnapshot(ctx, wg)
		return
	case err == nil:
		err = fmt.Errorf("eventlog: %d aggregates change faster than they can be snapshotted", len(stale))
	}
	k.resetState()
	s.space.nextRound = time.Now().Add(failedRoundDelay)
	if ctx.Err() == nil {
		s.recordRetention(ClassState, fmt.Errorf("no snapshot, so no old events were removed: %w", err))
	}
}

// appendSnapshot keeps events in batches. It runs on the writer's goroutine, so no other
// event is committed between the check of changed and the snapshot.
func (s *Store) appendSnapshot(events []kernel.Event) error {
	for len(events) > 0 {
		n, size := 0, 0
		for n < min(len(events), maxBatchEvents) && (n == 0 || size < s.space.maxBatch) {
			size += len(events[n].Payload) + eventOverhead
			n++
		}
		r, err := newAppendRequest(events[:n])
		if err == nil {
			r.isSnapshot = true
		}
		if err != nil {
			return err
		}
		events = events[n:]
		if s.commit([]*appendRequest{r}); r.err != nil {
			return r.err
		}
		s.mu.Lock()
		s.stats.Snapshots += uint64(len(r.events))
		s.mu.Unlock()
	}
	return nil
}

// removeStep removes some of the oldest rows, of calls first. The number of rows adapts to the disk,
// so that a step takes about maxStepTime and appenders wait for no longer. more reports that
// there are others, to be removed after the pause. There is no pause when the log grows
// faster than it shrinks.
func (s *Store) removeStep() (pause time.Duration, more bool) {
	k := &s.retention
	class, r := ClassCalls, &k.calls
	if !r.active {
		class, r = ClassState, &k.state
	}
	s.beginWrite()
	began := time.Now()
	n, err := s.removeOldest(class, r)
	took := time.Since(began)
	s.endWrite()
	if n == 0 || err != nil {
		s.recordRetention(class, err)
		if class == ClassState && r.removed == 0 {
			s.space.nextRound = time.Now().Add(failedRoundDelay)
		}
		if *r = (removal{}); class == ClassState {
			k.resetState()
		}
		return 0, s.removing()
	}
	if took > maxStepTime {
		r.stepRows = max(r.stepRows/2, minStepRows)
	} else {
		r.stepRows = min(r.stepRows*2, maxStepRows)
	}
	if s.space.usedPages > s.space.maxPages/8*highLevelEighths {
		return 0, true
	}
	return pauseFactor * took, true
}

// removeNow removes rows to free space for a transaction that does not fit: calls, and state
// whose snapshots are stored. It makes one step without a pause, since appenders wait for it.
func (s *Store) removeNow() (removed int64, err error) {
	k := &s.retention
	if !k.calls.active {
		if v, err := s.victim(ClassCalls, nil, true); err != nil {
			return 0, err
		} else if v != nil {
			k.calls = removal{active: true, limitSeq: s.Last(), stepRows: maxStepRows / 4}
		}
	}
	if k.calls.active {
		if removed, err = s.removeOldest(ClassCalls, &k.calls); removed > 0 || err != nil {
			return removed, err
		}
	}
	if k.state.active {
		removed, err = s.removeOldest(ClassState, &k.state)
	}
	return removed, err
}

// recordRetention records how a round ended. An error does not stop the writer: the log grows
// until a later round succeeds.
func (s *Store) recordRetention(class Class, err error) {
	text := ""
	if err = explain(s.opts.Path, err); err != nil {
		text = err.Error()
	}
	s.mu.Lock()
	s.stats.RetentionError = text
	mark := s.stats.Mark
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("event log: retention failed, will retry", zap.Error(err))
		return
	}
	removed := s.retention.state.removed
	if class == ClassCalls {
		removed = s.retention.calls.removed
	}
	s.log.Info("event log: old events removed", zap.String("class", string(class)), zap.Int64("events", removed), zap.Uint64("mark", mark))
}

// removeOldest removes one step of the victim's rows, and returns how many. A step may pass rows of
// other chains only; it then moves the mark, and the next one continues there. It returns 0 if there is no
// victim, limitSeq is reached, or maxEmptySteps steps found no row of the victim.
func (s *Store) removeOldest(class Class, r *removal) (removed int64, err error) {
	for range maxEmptySteps {
		var tenant *string
		if class == ClassState {
			tenant = s.retention.tenant
		}
		v, err := s.victim(class, tenant, true)
		if err != nil || v == nil {
			return 0, err
		}
		n, more, err := s.removeRows(class, r, v)
		if r.removed += n; n > 0 || !more || err != nil {
			return n, err
		}
	}
	return 0, nil
}

// maxEmptySteps bounds how far removeOldest searches for rows of a chain at once.
const maxEmptySteps = 16

// oldRows are the oldest rows of a victim, as many as one step removes.
type oldRows struct {
	from, upTo uint64            // seq; upTo is 0 if there is no row
	removed    int64             // rows
	gone       map[*chain]*chain // to what it becomes: mark, anchor, rows and bytes
}

// readOldRows selects what removeRows removes: the victim's rows among the next stepRows rows of the class,
// at most an eighth of the write-ahead log. It reads in the order of seq and passes rows of other chains.
// An index by chain would avoid that, but each commit would have to write it.
func (s *Store) readOldRows(ctx context.Context, class Class, r *removal, v *victim) (old oldRows, err error) {
	limit := r.limitSeq
	if v.chain != nil {
		old.from, limit = v.chain.mark, min(limit, v.chain.last)
	}
	size := fmt.Sprintf("%d + octet_length(type) + octet_length(aggregate_id) + octet_length(payload)", rowOverhead)
	if class == ClassCalls {
		size = fmt.Sprintf("%d + length(trace) + octet_length(rest)", rowOverhead)
	}
	rows, err := s.conn.QueryContext(ctx, "SELECT seq, chain, created_at, hash, "+size+" FROM "+string(class)+" WHERE seq >= ? AND seq <= ? ORDER BY seq LIMIT ?",
		int64(old.from), int64(limit), r.stepRows)
	if err != nil {
		return old, err
	}
	defer func() { _ = rows.Close() }()
	old.gone = make(map[*chain]*chain)
	for bytes := int64(0); rows.Next() && bytes < s.space.maxWAL/8; {
		var seq uint64
		var id, created, rowBytes int64
		var hash sql.RawBytes
		if err := rows.Scan(&seq, &id, &created, &hash, &rowBytes); err != nil {
			return old, err
		}
		if created >= v.cutoff {
			break
		}
		c := s.w.byID[id]
		if c == nil || len(hash) != hashSize {
			return old, fmt.Errorf("%w: event %d has no chain", ErrDamaged, seq)
		}
		old.upTo = seq
		if v.chain != nil && c != v.chain {
			continue
		}
		g := old.gone[c]
		if g == nil {
			g = &chain{rows: c.rows, bytes: c.bytes}
			old.gone[c] = g
		}
		g.mark, g.anchor, g.rows, g.bytes = seq+1, rowHash(hash), g.rows-1, g.bytes-rowBytes
		old.removed++
		bytes += rowBytes
	}
	return old, rows.Err()
}

// removeRows moves marks and deletes the rows below them, in one transaction: a reader that sees the
// old mark sees all rows from it on. more is false when there was no row up to limitSeq.
func (s *Store) removeRows(class Class, r *removal, v *victim) (removed int64, more bool, err error) {
	ctx, table := context.Background(), string(class)
	old, err := s.readOldRows(ctx, class, r, v)
	if err != nil || old.upTo == 0 {
		return 0, false, err
	}
	// The chain's newest row was not found, although all rows up to it were read. If the mark moved past
	// it now, nothing would show this damage any more.
	if v.chain != nil && old.removed == 0 && old.upTo >= v.chain.last {
		return 0, false, fmt.Errorf("%w: the %s of tenant %q have no event %d", ErrDamaged, table, v.chain.tenant, v.chain.last)
	}
	op := s.opts.Watch.Begin("remove")
	err = s.tx(func() error {
		// The marks first: a trigger refuses to delete a row that is not below the mark of its chain.
		for c, g := range old.gone {
			c.mark, c.anchor, c.rows, c.bytes = g.mark, g.anchor, g.rows, g.bytes
			s.w.markChanged(c)
		}
		if v.chain != nil { // also past rows of other chains: the next step begins there
			v.chain.mark = max(v.chain.mark, min(old.upTo, v.chain.last)+1)
			s.w.markChanged(v.chain)
		}
		if err := s.w.updateChains(ctx); err != nil {
			return err
		}
		if old.removed == 0 {
			return nil
		}
		query, args := "DELETE FROM "+table+" WHERE seq >= ? AND seq <= ?", []any{int64(old.from), int64(old.upTo)}
		if v.chain != nil {
			query, args = query+" AND chain = ?", append(args, v.chain.id)
		}
		if _, err := s.conn.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		for c := range old.gone {
			if err := s.w.removeWords(ctx, c); err != nil {
				return err
			}
		}
		return s.w.updateChains(ctx) // the bytes of the words that removeWords has deleted
	})
	op.End(err)
	if err != nil {
		return 0, false, err
	}
	s.mu.Lock()
	s.stats.Removed += uint64(old.removed)
	s.mu.Unlock()
	s.checkpoint()
	if err := s.readSpace(); err != nil {
		return old.removed, true, err
	}
	return old.removed, true, s.refreshStats()
}
