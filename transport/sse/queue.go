package sse

import "sync/atomic"

// Budget bounds the bytes that are queued for a group of subscribers. The bytes of a Budget
// with a parent count against the parent too. A nil Budget is unbounded. Its methods may be
// called from any goroutine.
type Budget struct {
	max    int64 // 0: bounded by the parent alone
	parent *Budget
	used   atomic.Int64
}

// NewBudget makes a Budget of maxBytes (0: unbounded) within parent (nil: no parent).
func NewBudget(maxBytes int64, parent *Budget) *Budget {
	return &Budget{max: maxBytes, parent: parent}
}

// Used returns the number of bytes that are queued now.
func (b *Budget) Used() int64 { return b.used.Load() }

// reserve counts n bytes; false when they exceed the budget or its parent.
func (b *Budget) reserve(n int) bool {
	if b == nil {
		return true
	}
	used := b.used.Add(int64(n))
	if (b.max == 0 || used <= b.max) && b.parent.reserve(n) {
		return true
	}
	b.used.Add(int64(-n))
	return false
}

func (b *Budget) release(n int) {
	for ; b != nil; b = b.parent {
		b.used.Add(int64(-n))
	}
}

// queue holds the events that wait for one subscriber, oldest first. It has no lock; its
// owner serializes access. A batch counts against the bounds until done, so also while it
// is being written.
type queue struct {
	maxBytes   int
	maxBatches int // 0: no bound
	overhead   int // bytes counted per batch besides its content, where maxBatches is 0
	budget     *Budget

	batches []batch
	bytes   int // of all batches that are not done, overhead included
	pending int // batches that are not done
}

// batch is whole events that are written at once.
type batch struct {
	b      []byte
	events int
}

// push appends a batch; false when it exceeds a bound.
func (q *queue) push(b batch) bool {
	cost := len(b.b) + q.overhead
	if q.maxBatches > 0 && q.pending >= q.maxBatches || q.bytes+cost > q.maxBytes || !q.budget.reserve(cost) {
		return false
	}
	q.batches = append(q.batches, b)
	q.bytes += cost
	q.pending++
	return true
}

// pop takes the oldest batch for writing; the queue must not be empty.
func (q *queue) pop() batch {
	b := q.batches[0]
	q.batches[0] = batch{} // for the garbage collector
	if q.batches = q.batches[1:]; len(q.batches) == 0 {
		q.batches = nil
	}
	return b
}

// done releases the bytes that a popped batch of n bytes counted.
func (q *queue) done(n int) {
	q.bytes -= n + q.overhead
	q.pending--
	q.budget.release(n + q.overhead)
}

// clear drops all batches and releases their bytes.
func (q *queue) clear() {
	q.budget.release(q.bytes)
	q.batches, q.bytes, q.pending = nil, 0, 0
}
