//go:build !race

package control

const raceEnabled = false

const slowness = 1
