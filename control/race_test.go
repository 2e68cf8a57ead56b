//go:build linux && race

package control

import "time"

const raceEnabled = true

// The race detector makes everything slow and memory large, so TestHostileClient does
// less. The divisors are of the stored rows and of the messages of an attack; attackTime is
// how long a connection of an attack lives.
const (
	historyDivisor = 10
	loadDivisor    = 40
	attackTime     = time.Second / 4
)
