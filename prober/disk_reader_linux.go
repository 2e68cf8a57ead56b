package prober

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// diskTimeout is how long a reading waits for statfs, once for each call that
// hangs: a slow network mount answers within it, a dead one costs one late sample.
const diskTimeout = 250 * time.Millisecond

var (
	errDiskHung   = errors.New("no answer from statfs, a dead network mount hangs like this")
	errDiskNoSize = errors.New("this filesystem has no size (ramfs, proc), choose one that fills up")
	errDiskRange  = errors.New("block counts contradict each other")
)

// diskReader asks statfs how full a filesystem is. The kernel may keep such a call for
// ever on a dead NFS mount, and nothing can end it, so it runs in a goroutine of
// its own, one call at a time. While a call is out no other is made: the last
// figure is given until it is older than maxAge, then an error.
//
// request, answer and close are called from one goroutine.
type diskReader struct {
	path   string
	statfs func(string, *unix.Statfs_t) error
	maxAge func() time.Duration

	requests chan struct{}   // one call each; closed by close
	results  chan diskResult // room for the one answer that can be due
	done     chan struct{}   // closed when the goroutine is gone
	timer    *time.Timer     // armed only while answer waits

	isRunning bool       // the goroutine was started
	isPending bool       // a call is out
	hasWaited bool       // and was waited for already
	last      diskResult // the newest figure; at is zero before the first
}

type diskResult struct {
	pct float64
	err error
	at  time.Time
}

func newDiskReader(path string, statfs func(string, *unix.Statfs_t) error, maxAge func() time.Duration) *diskReader {
	return &diskReader{
		path:     path,
		statfs:   statfs,
		maxAge:   maxAge,
		requests: make(chan struct{}, 1),
		results:  make(chan diskResult, 1),
		done:     make(chan struct{}),
	}
}

// request starts a call unless one is out.
func (d *diskReader) request() {
	if !d.isRunning {
		d.isRunning = true
		d.timer = time.NewTimer(time.Hour)
		d.timer.Stop()
		go d.run()
	}
	if !d.isPending {
		d.isPending, d.hasWaited = true, false
		d.requests <- struct{}{}
	}
}

// run makes the calls. It never blocks on answers: one call, one answer, and ask
// makes no second call before the answer was taken.
func (d *diskReader) run() {
	defer close(d.done)
	var st unix.Statfs_t
	for range d.requests {
		a := diskResult{}
		if a.err = d.call(&st); a.err == nil {
			a.pct, a.err = usedPct(uint64(st.Blocks), uint64(st.Bfree), uint64(st.Bavail))
		}
		a.at = time.Now()
		d.results <- a
	}
}

func (d *diskReader) call(st *unix.Statfs_t) error {
	for {
		if err := d.statfs(d.path, st); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// usage gives the figure of the call that ask made, or the last one.
func (d *diskReader) usage() (float64, error) {
	if a, ok := d.receive(); ok {
		d.isPending = false
		if a.err != nil {
			return 0, fmt.Errorf("statfs %s: %w; try: df %s", d.path, a.err, d.path)
		}
		d.last = a
		return a.pct, nil
	}
	if age := time.Since(d.last.at); d.last.at.IsZero() || age > d.maxAge() {
		return 0, fmt.Errorf("statfs %s: %w; try: df %s", d.path, errDiskHung, d.path)
	}
	return d.last.pct, nil
}

// receive waits for an answer, but for one that hangs only the first time.
func (d *diskReader) receive() (a diskResult, ok bool) {
	select {
	case a = <-d.results:
		return a, true
	default:
	}
	if d.hasWaited {
		return a, false
	}
	d.hasWaited = true
	d.timer.Reset(diskTimeout)
	defer d.timer.Stop()
	select {
	case a = <-d.results:
		return a, true
	case <-d.timer.C:
		return a, false
	}
}

// close ends the goroutine. A call that hangs cannot be ended: it is left to the
// end of the process after a moment, and the error says so.
func (d *diskReader) close() error {
	close(d.requests)
	if !d.isRunning {
		return nil
	}
	d.timer.Reset(diskTimeout)
	defer d.timer.Stop()
	select {
	case <-d.done:
		return nil
	case <-d.timer.C:
		return fmt.Errorf("close statfs %s: %w; left to the end of the process", d.path, errDiskHung)
	}
}

// usedPct is what df prints: the share of used blocks in those that are used or
// that an ordinary user may still take.
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
