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

// observe counts one duration; negative ones as zero.
func (h *histogram) observe(d time.Duration) {
	us := uint64(max(d.Microseconds(), 0))
	h.buckets[min(bucketOf(us), len(h.buckets)-1)].Add(1)
}

// bucketOf returns the bucket of a number: 0 to 3 have one each; of larger numbers the
// position of the highest bit and the two bits below it choose.
func bucketOf(us uint64) int {
	if us < 4 {
		return int(us)
	}
	n := bits.Len64(us)
	return 4*(n-2) + int(us>>(n-3))&3
}

// upperBound is the largest number in a bucket.
func upperBound(bucket int) int64 {
	if bucket < 4 {
		return int64(bucket)
	}
	shift := bucket/4 - 1
	return int64(4+bucket%4+1)<<shift - 1
}

// quantile returns a number of microseconds that percent of the durations do not exceed;
// 0 when there are none. Concurrent observations may or may not be counted.
func (h *histogram) quantile(percent int64) int64 {
	var count int64
	for i := range h.buckets {
		count += h.buckets[i].Load()
	}
	if count == 0 {
		return 0
	}
	need := (count*percent + 99) / 100 // rounded up
	for i := range h.buckets {
		if need -= h.buckets[i].Load(); need <= 0 {
			return upperBound(i)
		}
	}
	return upperBound(len(h.buckets) - 1)
}

// reset sets all buckets to zero, one after the other.
func (h *histogram) reset() {
	for i := range h.buckets {
		h.buckets[i].Store(0)
	}
}
