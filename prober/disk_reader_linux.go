package prober

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// diskTimeout is how long a sample waits for statfs, once for each call that hangs. A slow
// network mount answers within it; a dead one makes one sample late.
const diskTimeout = 250 * time.Millisecond

var (
	errDiskHung   = errors.New("no answer from statfs: it may be on a dead network mount")
	errDiskNoSize = errors.New("this filesystem has no size (ramfs, proc), choose one that fills up")
	errDiskRange  = errors.New("block counts contradict each other")
)

// diskReader measures with statfs how full a filesystem is. While a call hangs it returns
// the last value until that is older than maxAge, then an error. A sample calls request before its
// other readings and usage after them, so that statfs runs meanwhile.
//
// Its methods are called from one goroutine, the sampler.
type diskReader struct {
	path   string
	statfs func(string, *unix.Statfs_t) error
	maxAge func() time.Duration

	worker    worker[diskResult]
	isRunning bool // the worker was started
	// hasWaited is set when a sample has waited for the pending call; others do not.
	hasWaited bool
	// last is the newest value. Its time is zero before the first.
	last diskResult
}

type diskResult struct {
	pct float64
	err error
	at  time.Time
}

func newDiskReader(path string, statfs func(string, *unix.Statfs_t) error, maxAge func() time.Duration) *diskReader {
	return &diskReader{path: path, statfs: statfs, maxAge: maxAge, worker: newWorker[diskResult]()}
}

// request starts a call unless one is pending.
func (d *diskReader) request() {
	if !d.isRunning {
		d.isRunning = true
		go d.run()
	}
	if !d.worker.isPending {
		d.hasWaited = false
		d.worker.request()
	}
}

// run is the worker's goroutine.
func (d *diskReader) run() {
	defer close(d.worker.done)
	var st unix.Statfs_t // reused by each call
	d.worker.serve(func() diskResult { return d.measure(&st) })
}

// measure calls statfs, which may hang.
func (d *diskReader) measure(st *unix.Statfs_t) (r diskResult) {
	r.err = unix.EINTR
	for errors.Is(r.err, unix.EINTR) {
		r.err = d.statfs(d.path, st)
	}
	if r.err == nil {
		r.pct, r.err = usedPct(uint64(st.Blocks), uint64(st.Bfree), uint64(st.Bavail))
	}
	r.at = time.Now()
	return r
}

// usage returns the value of the call that request started, or the last one.
func (d *diskReader) usage() (float64, error) {
	timeout := diskTimeout
	if d.hasWaited {
		timeout = 0
	}
	d.hasWaited = true
	r, ok := d.worker.receive(timeout)
	if !ok {
		if r = d.last; r.at.IsZero() || time.Since(r.at) > d.maxAge() {
			r.err = errDiskHung
		}
	}
	if r.err != nil {
		return 0, fmt.Errorf("statfs %s: %w; try: df %s", d.path, r.err, d.path)
	}
	d.last = r
	return r.pct, nil
}

// close ends the worker. A call that hangs is left to the end of the process, and the
// error says so.
func (d *diskReader) close() error {
	d.worker.stop()
	if d.isRunning && !d.worker.hasEnded(diskTimeout) {
		return fmt.Errorf("close statfs %s: %w; left to the end of the process", d.path, errDiskHung)
	}
	return nil
}

// usedPct is what df prints: the share of used blocks in those that are used or that an
// ordinary user may still take.
func usedPct(blocks, free, avail uint64) (float64, error) {
	if blocks == 0 {
		return 0, errDiskNoSize
	}
	// Bounds each so that the sum cannot overflow.
	if free > blocks || avail > blocks {
		return 0, errDiskRange
	}
	used := float64(blocks - free)
	total := used + float64(avail)
	if total == 0 {
		return 0, errDiskRange
	}
	return round2(100 * used / total), nil
}
