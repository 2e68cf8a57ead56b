package gateway

import (
	"iter"
	"sort"
)

// ring holds the newest events, bounded in number and in bytes, for subscribers that
// resume. Ids rise but may have gaps. Gateway.mu protects it.
type ring struct {
	slots     []*event // grows up to maxEvents as events arrive
	maxEvents int
	head      int // index of the oldest event
	n         int
	bytes     int
	last      uint64 // newest id ever pushed
	floor     uint64 // events up to this id are not, or no longer, in the ring
}

func newRing(maxEvents int, firstID uint64) ring {
	return ring{maxEvents: maxEvents, last: firstID - 1, floor: firstID - 1}
}

// push appends an event and evicts the oldest ones beyond the bounds.
func (r *ring) push(e *event) {
	for r.n > 0 && (r.n == r.maxEvents || r.bytes+len(e.frame) > maxRingBytes) {
		old := r.slots[r.head]
		r.slots[r.head] = nil
		r.head = (r.head + 1) % len(r.slots)
		r.n--
		r.bytes -= len(old.frame)
		r.floor = old.id
	}
	if r.n == len(r.slots) {
		r.grow()
	}
	r.slots[(r.head+r.n)%len(r.slots)] = e
	r.n++
	r.bytes += len(e.frame)
	r.last = e.id
}

// grow doubles the slots, up to maxEvents, so that a gateway with few events does not hold
// memory for a full ring.
func (r *ring) grow() {
	slots := make([]*event, min(r.maxEvents, max(64, 2*len(r.slots))))
	for i := range r.n {
		slots[i] = r.at(i)
	}
	r.slots, r.head = slots, 0
}

// at returns the i-th oldest event.
func (r *ring) at(i int) *event { return r.slots[(r.head+i)%len(r.slots)] }

// since yields the events above id, oldest first. The ring must not change meanwhile. When
// id is below floor, events in between are missing.
func (r *ring) since(id uint64) iter.Seq[*event] {
	return func(yield func(*event) bool) {
		first := sort.Search(r.n, func(i int) bool { return r.at(i).id > id })
		for i := first; i < r.n && yield(r.at(i)); i++ {
		}
	}
}

// oldest returns the id of the oldest event, or the next id while there is none.
func (r *ring) oldest() uint64 {
	if r.n > 0 {
		return r.at(0).id
	}
	return r.last + 1
}

// restart empties the ring; ids continue above last.
func (r *ring) restart(last uint64) {
	*r = ring{maxEvents: r.maxEvents, last: last, floor: last}
}
