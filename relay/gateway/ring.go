package gateway

// ring holds the newest events, bounded in number and in bytes.
type ring struct {
	slots     []*event // grows up to max as events come
	maxEvents int
	head      int // the oldest
	n         int
	bytes     int
	last      uint64 // newest id given
	floor     uint64 // events up to this one are not, or no longer, in the ring
}

func newRing(size int, first uint64) ring {
	return ring{maxEvents: size, last: first - 1, floor: first - 1}
}

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

func (r *ring) grow() {
	slots := make([]*event, min(r.maxEvents, max(64, 2*len(r.slots))))
	for i := range r.n {
		slots[i] = r.at(i)
	}
	r.slots, r.head = slots, 0
}

func (r *ring) at(i int) *event { return r.slots[(r.head+i)%len(r.slots)] }

// after is the place of the first event above id, n for none.
func (r *ring) after(id uint64) int {
	lo, hi := 0, r.n
	for lo < hi {
		if mid := (lo + hi) / 2; r.at(mid).id > id {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// oldest is the id of the oldest event, or the next id.
func (r *ring) oldest() uint64 {
	if r.n > 0 {
		return r.at(0).id
	}
	return r.last + 1
}

// restart forgets all and goes on above last.
func (r *ring) restart(last uint64) {
	*r = ring{maxEvents: r.maxEvents, last: last, floor: last}
}
