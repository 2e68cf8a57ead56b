package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Times of the monitor.
const (
	SlowAfter = time.Second     // an operation that takes longer is a fault
	HungAfter = 5 * time.Second // one that has not returned until then is hung

	maxFaults   = 8   // operations of one store that have a fault at once; further ones are ignored
	maxProblems = 16  // reported problems of one store; further ones are ignored
	maxDetail   = 512 // bytes of Problem.Detail; the rest is cut
)

// Problem is something that is wrong with a store.
type Problem struct {
	Kind      Kind      `json:"kind"`
	Operation string    `json:"operation,omitempty"` // "commit", "fsync" …; empty if no operation shows it
	Detail    string    `json:"detail,omitempty"`    // for the operator
	Since     time.Time `json:"since"`               // with the monotonic clock
	// Warning: the store works, so that readyz stays 200.
	Warning bool `json:"warning,omitempty"`
}

// Watch observes one store. Its methods may be called from any goroutine; the exported ones accept
// a nil Watch, which does nothing. It keeps three things, which Problems puts together:
//
//	inFlight  operations that have begun: the oldest one shows a disk that is slow or hangs now
//	faults    for each name of an operation, whether the last one failed or was slow
//	problems  what Report added, until Resolve, and damage, until the process ends
type Watch struct {
	name string
	now  func() time.Time

	mu       sync.Mutex     // a leaf lock: nothing blocks while it is held; protects the fields below
	inFlight []inFlightSlot // by Operation.slot
	free     []int32        // unused slots of inFlight
	faults   []fault        // one for each name of an operation
	problems []reported
	probe    func(context.Context) error
	stats    Stats

	// Used by Monitor.Run alone.
	probing   bool      // a probe is running
	probedAt  time.Time // when the last one began
	lastState string    // the kind of problem that was logged last; "": none
}

// inFlightSlot is an operation that has begun, or a free slot.
type inFlightSlot struct {
	name  string
	start time.Time // zero: free
}

// fault is a problem that the last operation of its name has shown.
type fault struct {
	Problem
	lasted time.Duration // of that operation
}

// reported is a problem from Report.
type reported struct {
	id string
	Problem
}

// Stats are counters of a Watch since it was made.
type Stats struct {
	Operations uint64        // that have ended
	Failed     uint64        // of those, with a fault of the disk
	Slow       uint64        // of those, longer than SlowAfter
	InFlight   int           // that have begun
	Oldest     time.Duration // age of the oldest in flight, 0 for none
}

// NewWatch makes a Watch that no Monitor has, for tests.
func NewWatch(name string) *Watch { return &Watch{name: name, now: time.Now} }

// Name returns the store's name; "" for a nil Watch.
func (w *Watch) Name() string {
	if w == nil {
		return ""
	}
	return w.name
}

// Operation is a disk operation that has begun. It is a value, so that Begin allocates nothing. End of
// the zero Operation, which a nil Watch returns, does nothing.
type Operation struct {
	w     *Watch
	name  string
	start time.Time
	slot  int32
}

// Begin brackets a disk operation until End. The names of a store's operations are constants:
// a fault of one ends when another one of the same name succeeds. The caller bounds how many
// operations it has in flight; a few connections of a database, one writer of a file.
func (w *Watch) Begin(name string) Operation {
	if w == nil {
		return Operation{}
	}
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	var slot int32
	if n := len(w.free); n > 0 {
		slot, w.free = w.free[n-1], w.free[:n-1]
	} else {
		slot = int32(len(w.inFlight))
		w.inFlight = append(w.inFlight, inFlightSlot{})
	}
	w.inFlight[slot] = inFlightSlot{name, now}
	w.stats.InFlight++
	return Operation{w, name, now, slot}
}

// End ends the operation. An error that is no fault of the disk (Classify) counts as success.
// End is called once.
func (o Operation) End(err error) {
	w := o.w
	if w == nil {
		return
	}
	kind := Classify(err) // outside of the lock; free for nil
	now := w.now()
	took := now.Sub(o.start)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inFlight[o.slot] = inFlightSlot{}
	w.free = append(w.free, o.slot)
	w.stats.InFlight--
	w.stats.Operations++
	if kind != "" {
		w.stats.Failed++
	}
	if took > SlowAfter {
		w.stats.Slow++
	}
	switch {
	case kind == Damaged: // not as a fault: the next operation, which reads other pages, would clear it
		w.reportLocked("operation", Problem{Kind: Damaged, Operation: o.name, Detail: err.Error(), Since: now})
	case kind != "":
		w.setFaultLocked(fault{Problem{Kind: kind, Operation: o.name, Detail: err.Error(), Since: now}, took})
	case took > SlowAfter:
		w.setFaultLocked(fault{Problem{Kind: Slow, Operation: o.name, Since: o.start}, took})
	case len(w.faults) > 0 && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded): // neither shows that the disk works
		w.clearFaultLocked(o.name)
	}
}

// setFaultLocked records a fault. If the operation has one already, the time at which that began stays,
// also when the kind is another one: a disk that was slow and now fails is one fault.
func (w *Watch) setFaultLocked(f fault) {
	f.Detail = bounded(f.Detail)
	i := slices.IndexFunc(w.faults, func(g fault) bool { return g.Operation == f.Operation })
	switch {
	case i >= 0:
		f.Since = w.faults[i].Since
		w.faults[i] = f
	case len(w.faults) < maxFaults:
		w.faults = append(w.faults, f)
	}
}

// clearFaultLocked ends the fault of an operation; a probe that succeeds ends all.
func (w *Watch) clearFaultLocked(name string) {
	if name == probeName {
		w.faults = nil
		return
	}
	w.faults = slices.DeleteFunc(w.faults, func(f fault) bool { return f.Operation == name })
}

// probeName is the operation of a probe.
const probeName = "probe"

// SetProbe sets how the monitor finds out whether a fault has ended while nothing is being
// written: fn does a small durable write, or whatever the store's writes need to succeed. It
// runs in a goroutine of the monitor, one at a time, every probeInterval while a fault lasts.
func (w *Watch) SetProbe(fn func(context.Context) error) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.probe = fn
}

// Report adds a problem that the owner of the store knows of, or replaces the one of this id, whose time
// it keeps. A new problem without a time gets the present one.
func (w *Watch) Report(id string, p Problem) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reportLocked(id, p)
}

func (w *Watch) reportLocked(id string, p Problem) {
	p.Detail = bounded(p.Detail)
	i := slices.IndexFunc(w.problems, func(r reported) bool { return r.id == id })
	switch {
	case i >= 0:
		p.Since = w.problems[i].Since
		w.problems[i].Problem = p
	case len(w.problems) < maxProblems:
		if p.Since.IsZero() {
			p.Since = w.now()
		}
		w.problems = append(w.problems, reported{id, p})
	}
}

// Resolve removes a reported problem.
func (w *Watch) Resolve(id string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = slices.DeleteFunc(w.problems, func(r reported) bool { return r.id == id })
}

// Problems returns what is wrong with the store now, the worst first; nil for nothing. Of equally bad
// ones, an operation in flight comes first, then operations that have ended, then reported problems.
func (w *Watch) Problems() []Problem {
	if w == nil {
		return nil
	}
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []Problem
	if oldest, ok := w.oldestLocked(now); ok {
		list = append(list, oldest)
	}
	for i, f := range w.faults {
		if f.Operation == probeName && slices.ContainsFunc(w.faults[:i], func(g fault) bool { return g.Kind == f.Kind }) {
			continue // the same fault, which an operation has shown already
		}
		if f.Kind == Slow {
			f.Detail = fmt.Sprintf("the last one took %s", f.lasted.Round(100*time.Millisecond))
		}
		list = append(list, f.Problem)
	}
	for _, r := range w.problems {
		list = append(list, r.Problem)
	}
	slices.SortStableFunc(list, func(a, b Problem) int { return cmp.Compare(b.Kind.severity(), a.Kind.severity()) })
	return list
}

// oldestLocked describes the oldest operation in flight if it has taken longer than SlowAfter.
func (w *Watch) oldestLocked(now time.Time) (Problem, bool) {
	var oldest inFlightSlot
	for _, f := range w.inFlight {
		if !f.start.IsZero() && (oldest.start.IsZero() || f.start.Before(oldest.start)) {
			oldest = f
		}
	}
	age := now.Sub(oldest.start)
	if oldest.start.IsZero() || age <= SlowAfter {
		return Problem{}, false
	}
	p := Problem{Kind: Slow, Operation: oldest.name, Detail: "it has not returned yet", Since: oldest.start}
	if age > HungAfter {
		p.Kind = Hung
	}
	return p, true
}

// Stuck returns an *Error while an operation has been in flight for longer than d: whatever
// needs the store now waits behind it. nil otherwise, and for a nil Watch. Callers ask before they begin
// to wait. They do not ask Err, which also returns faults that their own operation could clear.
func (w *Watch) Stuck(d time.Duration) error {
	if w == nil {
		return nil
	}
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.inFlight {
		if !f.start.IsZero() && now.Sub(f.start) > d {
			return &Error{Store: w.name, Kind: Hung}
		}
	}
	return nil
}

// Err returns why a request that waited for the store got no answer: the worst problem that
// is not a warning, as an *Error, or nil for a store that works.
func (w *Watch) Err() error {
	for _, p := range w.Problems() {
		if !p.Warning {
			return &Error{Store: w.name, Kind: p.Kind}
		}
	}
	return nil
}

// Stats returns the counters; zero for a nil Watch.
func (w *Watch) Stats() Stats {
	if w == nil {
		return Stats{}
	}
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.stats
	for _, f := range w.inFlight {
		if !f.start.IsZero() {
			s.Oldest = max(s.Oldest, now.Sub(f.start))
		}
	}
	return s
}

// bounded cuts a text that an error may make long.
func bounded(s string) string {
	if len(s) > maxDetail {
		return s[:maxDetail] + "…"
	}
	return s
}
