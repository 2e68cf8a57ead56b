package prober

// Source is where readings come from: the machine, a mock board, a test.
//
// Read fills in everything but TSMS and Mono. It is called from one goroutine at
// a time, so it may keep the CPU counters of the reading before; it should answer
// within milliseconds. An error means there is no reading: a Source never makes
// one up. Close is called once, after the last Read.
type Source interface {
	Read(*Sample) error
	Close() error
}
