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

// tenant is what one tenant has. Changes are made one at a time, in the order of the log:
// who makes one holds the gate, appends its events and applies them. Readers wait for
// nobody's disk.
type tenant struct {
	name string
	gate chan struct{} // of one: held while a change is made

	waiting atomic.Int32 // changes before the gate

	mu      sync.RWMutex // protects the fields below; written to by the holder of the gate
	tickets map[string]*entry
	order   []string          // ids, ascending
	keys    map[string]string // idempotency key -> id
	count   map[Status]int
	text    int // bytes of titles, bodies and comments
}

// entry is a ticket with what is not shown of it.
type entry struct {
	Ticket
	key string // its idempotency key, with the actor in front; may be empty
}

func newTenant(name string) *tenant {
	return &tenant{name: name, gate: make(chan struct{}, 1), tickets: make(map[string]*entry),
		keys: make(map[string]string), count: make(map[Status]int)}
}

// gateWait is how long a change waits for those before it: less than kernel.CallBudget, so
// that its caller knows that nothing was changed.
const gateWait = 4 * time.Second

// maxWaiting bounds the changes of one tenant that wait, so that a slow log leaves room for
// the calls of others (maxConcurrency).
const (
	maxWaiting     = 32
	maxConcurrency = 256
)

// lock takes the gate, or gives up with ctx or after gateWait.
func (t *tenant) lock(ctx context.Context) error {
	select {
	case t.gate <- struct{}{}:
		return nil
	default:
	}
	busy := &manifest.Error{Code: manifest.RateLimited, Message: "earlier changes wait for the event log; nothing was changed", RetryAfterMS: 1000, Reason: "event_log"}
	defer t.waiting.Add(-1)
	if t.waiting.Add(1) > maxWaiting {
		return busy
	}
	timer := time.NewTimer(gateWait)
	defer timer.Stop()
	select {
	case t.gate <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return busy
	}
}

func (t *tenant) unlock() { <-t.gate }

// get returns a copy of a ticket.
func (t *tenant) get(id string) (*Ticket, error) {
	if t != nil {
		t.mu.RLock()
		defer t.mu.RUnlock()
		if e := t.tickets[id]; e != nil {
			return e.clone(), nil
		}
	}
	// One answer for a ticket that does not exist and for one of another tenant.
	return nil, &manifest.Error{Code: manifest.BadRequest, Message: "no ticket has this id; tickets.list shows the tickets", Reason: "not_found"}
}

// list returns up to limit tickets with ids below before ("" for all), newest first.
func (t *tenant) list(status Status, before string, limit int) (page []*Ticket, more bool) {
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
		if status != "" && e.Status != status {
			continue
		}
		if len(page) == limit {
			return page, true
		}
		page = append(page, e.clone())
	}
	return page, false
}

// pick returns copies of the tickets that want chooses, oldest first.
func (t *tenant) pick(want func(*Ticket) bool) (found []*Ticket) {
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

// put adds or replaces a ticket; mu is held.
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

// remove forgets a ticket; mu is held.
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

// room finds which finished tickets give way, finished longest ago first, so that text
// more bytes and more finished tickets fit. ok is false when even all of them are not
// enough. keep is not dropped.
func (t *tenant) room(text, more int, keep string) (drop []string, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	done := more
	for s, n := range t.count {
		if s.finished() {
			done += n
		}
	}
	over := t.text + text - MaxText
	if done <= MaxFinished && over <= 0 {
		return nil, true
	}
	var finished []*entry
	for _, e := range t.tickets {
		if e.Status.finished() && e.ID != keep {
			finished = append(finished, e)
		}
	}
	slices.SortFunc(finished, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.UpdatedAt, b.UpdatedAt), cmp.Compare(a.ID, b.ID))
	})
	for _, e := range finished {
		if done <= MaxFinished && over <= 0 {
			break
		}
		drop = append(drop, e.ID)
		done--
		over -= e.size()
	}
	return drop, over <= 0
}

// unfinished counts the tickets that bound creation; the gate is held.
func (t *tenant) unfinished() (n int) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for s, c := range t.count {
		if !s.finished() {
			n += c
		}
	}
	return n
}
