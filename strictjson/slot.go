package strictjson

import "runtime"

// Reading a large input takes a CPU for milliseconds, and its tree many times the memory of the
// input. Each client may send several at a time; if all were read at once, the small messages of
// others would wait for seconds. Large inputs therefore share slots for half of the CPUs.
const largeInput = 32 << 10 // bytes; half of the largest message of a link

var slots = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))

// AcquireSlot waits until an input of size bytes may be read and checked, in the order of arrival,
// and returns the function that releases the slot. A small input does not wait. Slots do not nest,
// and their holder only computes: a holder that waits for a peer blocks all other large inputs.
func AcquireSlot(size int) (release func()) {
	if size <= largeInput {
		return releaseNothing
	}
	slots <- struct{}{}
	return releaseSlot
}

func releaseNothing() {}
func releaseSlot()    { <-slots }
