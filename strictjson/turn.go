package strictjson

import "runtime"

// Reading a large input takes a CPU for milliseconds, and its tree many times the memory of the
// input. Each client may send some at a time; if all were read at once, the small messages of
// others would wait for seconds. Large inputs therefore take turns on half of the CPUs.
const largeInput = 32 << 10 // bytes; half of the largest message of a link

var turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))

// Turn waits until an input of that size may be read and checked, in the order of arrival, and
// returns the end of the turn. A small input does not wait. Turns do not nest, and nothing but
// computing belongs into one: whoever waits for a peer in it stops all others.
func Turn(size int) (end func()) {
	if size <= largeInput {
		return noTurn
	}
	turns <- struct{}{}
	return endTurn
}

func noTurn()  {}
func endTurn() { <-turns }
