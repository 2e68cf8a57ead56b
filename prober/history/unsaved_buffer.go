package history

import (
	"slices"
	"sort"
)

// buffer holds unsaved items sorted by id, one for each id. When it has max items, adding
// one drops the first.
type buffer[T any] struct {
	items []item[T]
	max   int
}

// item is an unsaved sample or reading.
type item[T any] struct {
	id  int64
	seq uint64 // order of arrival
	v   T
}

// add inserts v, unless id is taken. An item with the newest id is appended, which is the
// common case; an older one is inserted in its place.
func (b *buffer[T]) add(id int64, v T, seq uint64) (dropped, repeated bool) {
	i := len(b.items)
	if i > 0 && b.items[i-1].id >= id { // the clock went back, or two came at once
		i = b.index(id)
		if b.items[i].id == id {
			return false, true
		}
	}
	if len(b.items) >= b.max {
		if i == 0 {
			return true, false // v is the oldest
		}
		b.items = slices.Delete(b.items, 0, 1)
		i--
		dropped = true
	}
	b.items = slices.Insert(b.items, i, item[T]{id, seq, v})
	return dropped, false
}

// index is that of the first item whose id is not below id.
func (b *buffer[T]) index(id int64) int {
	return sort.Search(len(b.items), func(i int) bool { return b.items[i].id >= id })
}

// between is the items from..to, both included. It is valid until the next change.
func (b *buffer[T]) between(from, to int64) []item[T] {
	i := b.index(from)
	j := i + sort.Search(len(b.items)-i, func(k int) bool { return b.items[i+k].id > to })
	return b.items[i:j]
}

// removeSaved removes what arrived up to seq, and releases memory that only an outage
// needed. It goes by seq and not by id, since a clock that went back gives new items old ids.
func (b *buffer[T]) removeSaved(seq uint64) {
	b.items = slices.DeleteFunc(b.items, func(it item[T]) bool { return it.seq <= seq })
	if cap(b.items) > 1024 && len(b.items) < cap(b.items)/8 {
		b.items = slices.Clone(b.items)
	}
}

// rebase moves the items with ids below zero by delta.
func (b *buffer[T]) rebase(delta int64) {
	early := slices.Clone(b.between(-1<<63, -1))
	b.items = slices.Delete(b.items, 0, len(early))
	for _, it := range early {
		b.add(it.id+delta, it.v, it.seq)
	}
}
