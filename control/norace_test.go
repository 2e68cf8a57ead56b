//go:build linux && !race

package control

import "time"

const raceEnabled = false

const (
	historyDivisor = 1
	loadDivisor    = 1
	attackTime     = time.Second
)
