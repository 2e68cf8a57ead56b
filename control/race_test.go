//go:build race

package control

const raceEnabled = true

// slowness is by how much less is done, for the detector makes all slow and memory large.
const slowness = 5
