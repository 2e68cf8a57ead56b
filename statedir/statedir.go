// Package statedir watches the directory in which the daemon keeps its state, which is often on an SD
// card: it detects within ten seconds that the card is full, read-only, failing or hung, or works again.
//
//	m := statedir.New(dir)
//	for range ticker.C {       // each few seconds, in any goroutine of the caller's
//		m.Poll(isSuspect)      // does not wait for the disk
//		s := m.Status()
//	}
//
// Reading and writing a disk that hangs blocks a goroutine for good, so that a daemon passes its
// own accesses through Do, which bounds the wait.
//
// # What a probe does
//
// A probe must not wear the card. It asks the kernel about free space and flags, reads a block of a
// file past the page cache, and checks whether the block device finishes its requests. Only after a
// failure, once an hour, or on a filesystem that is not on a disk of this machine, it also replaces
// the file.
//
// # Goroutines
//
// At most two are left behind on a disk that hangs, one of Poll and one of Do. They end with the
// system call that they wait for. The package starts no other ones.
package statedir

import (
	"errors"
	"sync"
	"time"
)

// State is the state of a directory.
type State string

// The states.
const (
	OK       State = "ok"
	Full     State = "full"
	ReadOnly State = "read-only"
	Failing  State = "failing" // the disk answers with errors
	Hung     State = "hung"    // the disk does not answer
)

const (
	// hungAfter is how long an access may take before the disk counts as hung. A slow card takes
	// a second for a write while it erases blocks.
	hungAfter = 3 * time.Second
	// doTimeout is how long Do waits.
	doTimeout = 5 * time.Second
	// writeInterval is the time between writes of a probe while all is well.
	writeInterval = time.Hour
)

// ErrHung reports an access that was not made, or not finished, because the disk does not answer.
var ErrHung = errors.New("the disk of the state directory does not answer")

// Status is the state of a directory since a moment of the monotonic clock.
type Status struct {
	State     State
	Detail    string // of a failure, for a person
	Since     time.Time
	FreeBytes uint64   // that this user can write
	Damaged   []string // names of the files that were set aside, in the directory
}

// Monitor watches one directory. Its methods may be called from any goroutine, and none but Do
// waits for the disk.
type Monitor struct {
	dir   string
	probe func(p *prober, write bool) result
	slot  chan struct{} // capacity 1; holds a token while no access of Do runs

	mu      sync.Mutex // protects the fields below
	prober  prober     // used by the goroutine of the probe that runs
	status  Status
	began   time.Time // of the probe that runs; zero: none does
	doBegan time.Time // of the Do that runs; zero: none does
	written time.Time // the last good write of a probe; zero: none yet
}

// result is what a probe found.
type result struct {
	state   State
	detail  string
	free    uint64
	damaged []string
	written bool
}

// New returns a Monitor of a directory, which may be missing. It does not access the disk.
func New(dir string) *Monitor {
	m := &Monitor{dir: dir, probe: (*prober).run, slot: make(chan struct{}, 1), written: time.Now()}
	m.prober.dir = dir
	m.status = Status{State: OK, Since: time.Now()}
	m.slot <- struct{}{}
	return m
}

// Dir returns the directory.
func (m *Monitor) Dir() string { return m.dir }

// Poll starts a probe, unless one is running. isSuspect says that somebody else could not write to the
// directory: the probe then writes as well.
func (m *Monitor) Poll(isSuspect bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.began.IsZero() {
		return
	}
	m.began = time.Now()
	write := isSuspect || m.status.State != OK || time.Since(m.written) >= writeInterval
	go func() {
		r := m.probe(&m.prober, write)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.began = time.Time{}
		if r.written {
			m.written = time.Now()
		}
		m.status.FreeBytes, m.status.Damaged = r.free, r.damaged
		m.setLocked(r.state, r.detail)
	}()
}

// setLocked sets a state and, where it is another one, its beginning.
func (m *Monitor) setLocked(s State, detail string) {
	if m.status.State != s {
		m.status.Since = time.Now()
	}
	m.status.State, m.status.Detail = s, detail
}

// Status returns the present state.
func (m *Monitor) Status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, began := range []time.Time{m.began, m.doBegan} {
		if !began.IsZero() && time.Since(began) >= hungAfter && m.status.State != Hung {
			m.setLocked(Hung, ErrHung.Error())
			m.status.Since = began
		}
	}
	return m.status
}

// Do runs an access to the directory in a goroutine and waits for it, five seconds at most. One
// access runs at a time. After ErrHung fn may still be running, so it must not use variables of the
// caller.
func Do[T any](m *Monitor, fn func() (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	var none T
	timeout := time.NewTimer(doTimeout)
	defer timeout.Stop()
	select {
	case <-m.slot:
	default:
		if m.isHung() {
			return none, ErrHung
		}
		select {
		case <-m.slot:
		case <-timeout.C:
			return none, ErrHung
		}
	}
	m.setDoBegan(time.Now())
	done := make(chan answer, 1)
	go func() {
		v, err := fn()
		m.setDoBegan(time.Time{})
		m.slot <- struct{}{}
		done <- answer{v, err}
	}()
	select {
	case a := <-done:
		return a.v, a.err
	case <-timeout.C:
		return none, ErrHung
	}
}

// isHung reports whether the access of Do that runs hangs, so that another one need not wait.
func (m *Monitor) isHung() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.doBegan.IsZero() && time.Since(m.doBegan) >= hungAfter
}

func (m *Monitor) setDoBegan(t time.Time) {
	m.mu.Lock()
	m.doBegan = t
	m.mu.Unlock()
}
