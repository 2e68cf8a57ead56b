package kernel

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// histogram counts durations in fixed buckets, four to each power of two of microseconds,
// so that a quantile is at most a quarter too high. The zero value is ready.
type histogram struct {
	buckets [4 * 32]atomic.Int64
}

func (h *histogram) observe(d time.Duration) {
	us := uint64(max(d.Microseconds(), 0))
	h.buckets[min(bucketOf(us), len(h.buckets)-1)].Add(1)
}

// bucketOf finds the bucket of a number: 0 to 3 have one each, then the two bits behind
// the highest one choose.
func bucketOf(us uint64) int {
	if us < 4 {
		return int(us)
	}
	n := bits.Len64(us)
	return 4*(n-2) + int(us>>(n-3))&3
}

// upper is the largest number in a bucket.
func upper(bucket int) int64 {
	if bucket < 4 {
		return int64(bucket)
	}
	shift := bucket/4 - 1
	return int64(4+bucket%4+1)<<shift - 1
}

// quantile is a number of microseconds that percent of the durations do not exceed; 0
// when there are none.
func (h *histogram) quantile(percent int64) int64 {
	var all int64
	for i := range h.buckets {
		all += h.buckets[i].Load()
	}
	if all == 0 {
		return 0
	}
	need := (all*percent + 99) / 100
	for i := range h.buckets {
		if need -= h.buckets[i].Load(); need <= 0 {
			return upper(i)
		}
	}
	return upper(len(h.buckets) - 1)
}

func (h *histogram) reset() {
	for i := range h.buckets {
		h.buckets[i].Store(0)
	}
}
