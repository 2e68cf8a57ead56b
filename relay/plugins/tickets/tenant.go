package tickets

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
)

// Bounds: a tenant has at most MaxUnfinished tickets that are not finished; creating more is
// refused. Finished tickets and their text give way to new ones. So an agent that
// creates tickets in a loop fills the queue of its tenant and nothing else, and it
// cannot push out work that is not done.

// tenant has the tickets of one tenant. Changes are made one at a time, in the order of the
// log, by the holder of the change slot. mu is held only while memory is read or written,
// so readers never wait for a disk. Lock order: changeSlot, then mu.
type tenant struct {
	name       string
	maxText    int
	changeSlot chan struct{} // capacity 1: held while a change is made

	waiting atomic.Int32 // changes that wait for the slot

	mu      sync.RWMutex // protects the fields below; only the holder of changeSlot writes them
	tickets map[string]*entry
	order   []string          // ids, ascending
	keys    map[string]string // idempotency key -> id
	count   map[Status]int
	text    int // size of the tickets
}

// entry is a ticket with the parts of it that are not shown.
type entry struct {
	Ticket
	key string // actor and idempotency key; may be empty
}

// newTenant makes a tenant without tickets.
func newTenant(name string, maxText int) *tenant {
	return &tenant{name: name, maxText: maxText, changeSlot: make(chan struct{}, 1), tickets: make(map[string]*entry),
		keys: make(map[string]string), count: make(map[Status]int)}
}

// maxAcquireWait is how long a change waits for those before it: less than
// kernel.CallBudget, so that its caller learns that nothing was changed.
const maxAcquireWait = 4 * time.Second

// maxWaiting bounds the waiting changes of one tenant. It is far below maxConcurrency, so
// that a slow log leaves slots for the calls of other tenants.
const (
	maxWaiting     = 32
	maxConcurrency = 256
)

// acquire acquires the change slot, or gives up when ctx ends or after maxAcquireWait. Nothing
// was changed after an error. It first tries without waiting, so that a tenant without a queue
// pays for no timer. The caller must call release after a nil error.
func (t *tenant) acquire(ctx context.Context) error {
	select {
	case t.changeSlot <- struct{}{}:
		return nil
	default:
	}
	busy := &manifest.Error{Code: manifest.RateLimited, Message: "earlier changes wait for the event log; nothing was changed", RetryAfterMS: 1000, Reason: reasonQueue}
	defer t.waiting.Add(-1)
	if t.waiting.Add(1) > maxWaiting {
		return busy
	}
	timer := time.NewTimer(maxAcquireWait)
	defer timer.Stop()
	select {
	case t.changeSlot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return busy
	}
}

// reasonQueue is the reason of a refusal because earlier changes wait.
const reasonQueue = "queue"

// release gives the change slot back, to the change that has waited longest: goroutines that
// block on a channel are served in their order.
func (t *tenant) release() { <-t.changeSlot }

// get returns a copy of a ticket. t may be nil.
func (t *tenant) get(id string) (*Ticket, error) {
	if t != nil {
		t.mu.RLock()
		defer t.mu.RUnlock()
		if e := t.tickets[id]; e != nil {
			return e.clone(), nil
		}
	}
	// One answer for a ticket that does not exist and for one of another tenant.
	return nil, &manifest.Error{Code: manifest.BadRequest, Message: "no ticket has this id; tickets.list and fleet.tickets show the tickets", Reason: "not_found"}
}

// list returns up to limit tickets with ids below before ("" for all), newest first, and
// whether there are more; of any status and about any board if these are "". t may be nil.
func (t *tenant) list(status Status, nodeID, before string, limit int) (page []*Ticket, more bool) {
	if t == nil {
		return nil, false
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	i := len(t.order)
	if before != "" {
		i, _ = slices.BinarySearch(t.order, before)
	}
	for i--; i >= 0; i-- {
		e := t.tickets[t.order[i]]
		if status != "" && e.Status != status || nodeID != "" && e.NodeID != nodeID {
			continue
		}
		if len(page) == limit {
			return page, true
		}
		page = append(page, e.clone())
	}
	return page, false
}

// filter returns copies of the tickets for which want is true, oldest first. t may be nil.
func (t *tenant) filter(want func(*Ticket) bool) (found []*Ticket) {
	if t == nil {
		return nil
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, id := range t.order {
		if e := t.tickets[id]; want(&e.Ticket) {
			found = append(found, e.clone())
		}
	}
	return found
}

// put adds or replaces a ticket. mu is held. Ids ascend with time, so that a new ticket goes to
// the end of order; only a changed or a restored one is inserted before others.
func (t *tenant) put(e *entry) {
	t.remove(e.ID)
	t.tickets[e.ID] = e
	if n := len(t.order); n == 0 || t.order[n-1] < e.ID {
		t.order = append(t.order, e.ID)
	} else if i, found := slices.BinarySearch(t.order, e.ID); !found {
		t.order = slices.Insert(t.order, i, e.ID)
	}
	if e.key != "" {
		t.keys[e.key] = e.ID
	}
	t.count[e.Status]++
	t.text += e.size()
}

// remove removes a ticket, if it is there, with its idempotency key: a repeated create call then
// makes a new ticket. mu is held.
func (t *tenant) remove(id string) {
	e := t.tickets[id]
	if e == nil {
		return
	}
	delete(t.tickets, id)
	if i, found := slices.BinarySearch(t.order, id); found {
		t.order = slices.Delete(t.order, i, i+1)
	}
	if t.keys[e.key] == id {
		delete(t.keys, e.key)
	}
	t.count[e.Status]--
	t.text -= e.size()
}

// dropsFor selects the finished tickets to drop, those finished longest ago first, so that
// there is space for `text` more bytes and `more` more finished tickets. It never selects
// keep. ok is false when dropping all of them does not make space for the text.
//
// The caller holds the change slot, so that the numbers stay true until it commits.
func (t *tenant) dropsFor(text, more int, keep string) (drop []string, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	surplus := len(t.tickets) - t.unfinishedLocked() + more - MaxFinished
	excess := t.text + text - t.maxText
	if surplus <= 0 && excess <= 0 {
		return nil, true
	}
	var finished []*entry
	for _, e := range t.tickets {
		if e.Status.isFinished() && e.ID != keep {
			finished = append(finished, e)
		}
	}
	slices.SortFunc(finished, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.UpdatedAt, b.UpdatedAt), cmp.Compare(a.ID, b.ID))
	})
	for _, e := range finished {
		if surplus <= 0 && excess <= 0 {
			break
		}
		drop = append(drop, e.ID)
		surplus--
		excess -= e.size()
	}
	return drop, excess <= 0
}

// unfinished counts the tickets that bound the creation of new ones.
func (t *tenant) unfinished() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.unfinishedLocked()
}

// unfinishedLocked is unfinished with mu held. Each creation of a ticket calls it, so it adds up the
// counters by status and does not read the tickets.
func (t *tenant) unfinishedLocked() (n int) {
	for s, count := range t.count {
		if !s.isFinished() {
			n += count
		}
	}
	return n
}
