package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// disk is the disk of a test. It works until the test sets a fault (disk.set).
type disk struct {
	mu          sync.Mutex    // protects the fields below
	hang        chan struct{} // a write does not end before it is closed; nil: writes do not hang
	writeErr    error         // of writes, which store maxWrite bytes
	maxWrite    int
	syncErr     error
	renameErr   error // of renames after the next renamesLeft
	renamesLeft int
	openErr     error
	lie         bool // a write stores half and reports success
	syncs       int  // how many there were
}

// testFile is a file on such a disk.
type testFile struct {
	*os.File
	d *disk
}

// attach puts the files of a log on the disk.
func (d *disk) attach(l *Log) {
	for _, f := range []*rotatingFile{l.writer.decisions, l.writer.refusals} {
		f.operation = operations{open: d.open, rename: d.rename}
		f.file = &testFile{f.file.(*os.File), d}
	}
}

// set changes the fields.
func (d *disk) set(fn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fn()
}

func (d *disk) open(path string) (file, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.openErr != nil {
		return nil, d.openErr
	}
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	return &testFile{f, d}, nil
}

func (d *disk) rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.renameErr != nil {
		if d.renamesLeft--; d.renamesLeft < 0 {
			return d.renameErr
		}
	}
	return os.Rename(from, to)
}

func (f *testFile) Write(b []byte) (int, error) {
	f.d.mu.Lock()
	hang, err, maxWrite, lie := f.d.hang, f.d.writeErr, f.d.maxWrite, f.d.lie
	f.d.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if lie {
		if _, err := f.File.Write(b[:len(b)/2]); err != nil {
			return 0, err
		}
		return len(b), nil
	}
	if err != nil {
		n, _ := f.File.Write(b[:min(maxWrite, len(b))])
		return n, err
	}
	return f.File.Write(b)
}

func (f *testFile) Sync() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.d.syncs++
	return f.d.syncErr
}

// hangWrites lets writes hang until release is called.
func (d *disk) hangWrites() (release func()) {
	hang := make(chan struct{})
	d.set(func() { d.hang = hang })
	return func() {
		d.set(func() { d.hang = nil })
		close(hang)
	}
}

// synced returns the number of syncs.
func (d *disk) synced() (n int) {
	d.set(func() { n = d.syncs })
	return n
}

// open makes a log on a new disk.
func open(t *testing.T, o Options) (*Log, *disk) {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{}
	d.attach(l)
	t.Cleanup(func() { _ = l.Close() })
	return l, d
}

// run runs a log; stop ends Run, closes the log and returns their errors.
func run(l *Log) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	return func() error {
		cancel()
		return errors.Join(<-done, l.Close())
	}
}

// record returns a record of an actor; its number is the trace id.
func record(actor string, n int) *kernel.Record {
	return &kernel.Record{Tenant: "default", Actor: actor, Decision: kernel.Allowed, TraceID: fmt.Sprint(n)}
}

// readLines returns the lines of all parts of a file, the oldest first. A line that is not JSON ends the
// test.
func readLines(t *testing.T, path string) []map[string]any {
	t.Helper()
	var all []byte
	for i := maxParts; i >= 0; i-- {
		name := path
		if i > 0 {
			name = fmt.Sprintf("%s.%d", path, i)
		}
		b, err := os.ReadFile(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		all = append(all, b...)
	}
	var list []map[string]any
	for line := range bytes.Lines(all) {
		var m map[string]any
		if err := json.Unmarshal(line, &m); err != nil || line[len(line)-1] != '\n' {
			t.Fatalf("line %d is cut: %.100q", len(list)+1, line)
		}
		list = append(list, m)
	}
	return list
}

// checkNumbers wants the lines of records 0 to n-1, in this order.
func checkNumbers(t *testing.T, lines []map[string]any, n int) {
	t.Helper()
	if len(lines) < n {
		t.Fatalf("there are %d lines, want %d", len(lines), n)
	}
	for i, m := range lines[:n] {
		if m["trace_id"] != fmt.Sprint(i) {
			t.Fatalf("line %d is %v, want number %d", i+1, m, i)
		}
	}
}

// wantFault checks that an error is a fault of the store of some kind.
func wantFault(t *testing.T, what string, err error, want storage.Kind) {
	t.Helper()
	var fault *storage.Error
	if !errors.As(err, &fault) || fault.Kind != want || !errors.Is(err, errNotWritten) {
		t.Errorf("%s: got %v, want a fault of kind %q", what, err, want)
	}
}

func (l *Log) decisionsPath() string { return l.writer.decisions.path }

func TestLine(t *testing.T) {
	l, _ := open(t, Options{})
	l.Write(&kernel.Record{Tenant: "default", Actor: `a"b\c` + "\u202e", Address: netip.MustParseAddr("::ffff:192.0.2.7"), Tool: strings.Repeat("t", 300), NodeID: "n",
		Target: "x", Decision: kernel.Denied, Code: "E_BAD_REQUEST", Reason: "scope", TraceID: "id"})
	l.Write(&kernel.Record{Tenant: "default", Decision: kernel.Allowed})
	l.Flush()
	b, err := os.ReadFile(l.decisionsPath())
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(l.decisionsPath())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	first, second, _ := strings.Cut(string(b), "\n")
	_, first, _ = strings.Cut(first, "Z\"")
	_, second, _ = strings.Cut(second, "Z\"")
	if want := `,"tenant":"default","actor":"a\"b\\c` + "\u202e" + `","address":"192.0.2.7","tool":"` + strings.Repeat("t", maxField) +
		`","node_id":"n","target":"x","decision":"deny","code":"E_BAD_REQUEST","reason":"scope","trace_id":"id"}`; first != want {
		t.Errorf("got  %s\nwant %s", first, want)
	}
	if want := `,"tenant":"default","decision":"allow"}` + "\n"; second != want {
		t.Errorf("got %s, want %s", second, want)
	}
}

// TestHangingDisk: while a write hangs, Write returns at once and loses only what is beyond an
// identity's share. Others lose nothing, and nobody does once the disk answers again.
func TestHangingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		release := d.hangWrites()
		l.Write(record("first", 0))
		time.Sleep(time.Second) // the writer hangs

		const flood, others = 20_000, 200
		began := time.Now()
		for i := range flood {
			l.Write(record("flood", i))
			if i%(flood/others) == 0 {
				l.Write(record("other", i))
			}
		}
		if time.Since(began) > 0 {
			t.Errorf("the calls of Write took %v, want none to wait", time.Since(began))
		}
		wantFault(t, "Commit on the hanging disk", l.Commit(t.Context(), record("admin", 1)), storage.Hung)
		if time.Since(began) != commitTimeout {
			t.Errorf("Commit took %v, want %v", time.Since(began), commitTimeout)
		}
		release()
		time.Sleep(time.Second)
		if err := l.Commit(t.Context(), record("admin", 2)); err != nil {
			t.Errorf("Commit afterwards: %v", err)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}

		count := make(map[string]int)
		lines := readLines(t, l.decisionsPath())
		for _, m := range lines {
			count[m["actor"].(string)]++
		}
		const half = maxCost / minCost / 2 // the share of one identity
		if count["first"] != 1 || count["other"] != others || count["admin"] != 1 || count["flood"] < half*9/10 || count["flood"] > half {
			t.Errorf("lines by actor: %v; want first 1, other %d, admin 1, flood about %d", count, others, half)
		}
		s := l.Stats()
		if want := (Loss{"share", "agent", uint64(flood - count["flood"])}); s.Losses[0] != want || s.Lost != want.Lines+1 {
			t.Errorf("the losses are %+v, want %+v and one commit", s, want)
		}
		if s.Lines != uint64(len(lines)) {
			t.Errorf("%d lines are counted, want %d", s.Lines, len(lines))
		}
	})
}

// TestShares: several identities that flood leave places for others; so does a tenant with many.
func TestShares(t *testing.T) {
	var q queue
	admitted := make(map[string]int)
	add := func(tenant, actor string) {
		r := kernel.Record{Tenant: tenant, Actor: actor}
		if lost, _ := q.add(&r); lost == noLoss {
			admitted[tenant]++
			admitted[tenant+"/"+actor]++
		}
	}
	const most = maxCost / minCost
	for i := range 10 * most {
		add("a", "1")
		add("a", fmt.Sprint(i)) // a new identity each time
		add("b", "1")
	}
	for i := range 50 {
		add("c", fmt.Sprint(i))
	}
	if q.used > maxCost || len(q.entries) > most {
		t.Errorf("%d bytes, %d records", q.used, len(q.entries))
	}
	if admitted["a/1"] > most/2 || admitted["a"] > most*2/3 || admitted["b/1"] < most/8 || admitted["c"] != 50 {
		t.Errorf("a/1 %d, a %d, b/1 %d, c %d of %d", admitted["a/1"], admitted["a"], admitted["b/1"], admitted["c"], most)
	}
	// A long string counts with its length.
	q = queue{}
	r := kernel.Record{Tenant: "a", Reason: strings.Repeat("x", maxCost/4)}
	for range 4 {
		q.add(&r)
	}
	if len(q.entries) != 2 {
		t.Errorf("%d large records", len(q.entries))
	}
	entries, _ := q.take(nil)
	if lost, _ := q.add(&r); len(entries) != 2 || lost != noLoss || q.identities != nil {
		t.Errorf("%d taken, then lost %d", len(entries), lost)
	}
}

// TestCloseQueue: each record that was admitted is taken, or is among those that close returns.
func TestCloseQueue(t *testing.T) {
	for range 30 {
		var q queue
		var admitted atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					if lost, _ := q.add(&kernel.Record{Tenant: "a"}); lost == lostStopped {
						return
					} else if lost == noLoss {
						admitted.Add(1)
					}
				}
			})
		}
		runtime.Gosched()
		left := q.close()
		wg.Wait()
		if n := admitted.Load(); n != int64(len(left)) {
			t.Fatalf("%d records were admitted, %d are left", n, len(left))
		}
	}
}

// TestFullDisk: lines wait for space and are not cut in two; a commit fails at once.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watch := storage.NewWatch(Store)
		l, d := open(t, Options{Watch: watch})
		stop := run(l)
		d.set(func() { d.writeErr, d.maxWrite = syscall.ENOSPC, 30 }) // a part of a line fits
		const lines = 100
		for i := range lines {
			l.Write(record("ci", i))
			time.Sleep(10 * time.Millisecond)
		}
		if p := watch.Problems(); len(p) != 1 || p[0].Kind != storage.Full {
			t.Errorf("the problems are %+v, want a full disk", p)
		}
		began := time.Now()
		wantFault(t, "Commit on the full disk", l.Commit(t.Context(), record("admin", 0)), storage.Full)
		if time.Since(began) > writeInterval {
			t.Errorf("Commit took %v, want at most %v", time.Since(began), writeInterval)
		}
		d.set(func() { d.writeErr = nil })
		time.Sleep(2 * time.Second)
		if p := watch.Problems(); len(p) != 1 || p[0].Kind != storage.Lost || !p[0].Warning {
			t.Errorf("with space again the problems are %+v, want a warning for the lost commit", p)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		checkNumbers(t, readLines(t, l.decisionsPath()), lines)
	})
}

// TestFailingSync: a commit that is written and not synced fails.
func TestFailingSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		d.set(func() { d.syncErr = syscall.EIO })
		wantFault(t, "Commit", l.Commit(t.Context(), record("admin", 1)), storage.Failing)
		d.set(func() { d.syncErr = nil })
		if err := l.Commit(t.Context(), record("admin", 2)); err != nil {
			t.Errorf("Commit afterwards: %v", err)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestOnLost: losses are reported at most once a minute, and each of them once.
func TestOnLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports [][]Loss
		l, d := open(t, Options{OnLost: func(lost []Loss) { reports = append(reports, lost) }})
		stop := run(l)
		d.set(func() { d.syncErr = syscall.EIO })
		for i := range 3 {
			_ = l.Commit(t.Context(), record("admin", i))
			time.Sleep(2 * time.Second)
		}
		d.set(func() { d.syncErr = nil })
		time.Sleep(3 * time.Minute)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if len(reports) != 2 || reports[0][0] != (Loss{"storage", "admin", 1}) || reports[1][0] != (Loss{"storage", "admin", 2}) {
			t.Errorf("the reports are %+v, want one lost commit, and two a minute later", reports)
		}
	})
}

// TestLyingDisk: a disk that stores less than it says costs the lines of that write, and no
// others; a commit notices.
func TestLyingDisk(t *testing.T) {
	l, d := open(t, Options{})
	l.Write(record("ci", 0))
	l.Flush()
	d.set(func() { d.lie = true })
	l.Write(record("ci", 1))
	l.Flush()
	d.set(func() { d.lie = false })
	l.Write(record("ci", 2))
	l.Flush()
	b, err := os.ReadFile(l.decisionsPath())
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(b, []byte("\n"))
	if len(lines) != 4 || !json.Valid(lines[0]) || json.Valid(lines[1]) || !json.Valid(lines[2]) || l.Stats().Lost != 1 {
		t.Errorf("%d lost: %s", l.Stats().Lost, b)
	}
}

// TestStop: Run and Close return in bounded time when the disk hangs, and say so. What was queued is
// counted as lost.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		release := d.hangWrites()
		l.Write(record("ci", 0))
		time.Sleep(time.Second) // the writer hangs
		l.Write(record("ci", 1))
		began := time.Now()
		if err := stop(); !errors.Is(err, ErrHung) || time.Since(began) != closeTimeout {
			t.Errorf("got %v after %v, want ErrHung after %v", err, time.Since(began), closeTimeout)
		}
		l.Write(record("ci", 2))
		if err := l.Commit(t.Context(), record("ci", 3)); !errors.Is(err, errNotWritten) {
			t.Errorf("Commit after Close: got %v, want errNotWritten", err)
		}
		if s := l.Stats(); s.Lost != 3 { // records 1, 2 and 3
			t.Errorf("%d records were lost, want 3: %+v", s.Lost, s)
		}
		release() // the writer that was left behind ends
	})
}

// TestCloseWithoutRun: what a disk that fails does not take is counted as lost.
func TestCloseWithoutRun(t *testing.T) {
	l, d := open(t, Options{})
	l.Write(record("ci", 0))
	d.set(func() { d.writeErr = syscall.EIO })
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if s := l.Stats(); s.Lost != 1 || s.Lines != 0 {
		t.Errorf("%d records were lost and %d lines written, want 1 and none", s.Lost, s.Lines)
	}
}

// TestLateCommits: what comes after Close is lost because the relay stops, a commit too.
func TestLateCommits(t *testing.T) {
	l, _ := open(t, Options{})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l.Write(record("ci", 0))
	if err := l.Commit(t.Context(), record("ci", 1)); err == nil {
		t.Error("a commit after Close succeeded")
	}
	for _, loss := range l.Stats().Losses {
		if (loss.Lines > 0) != (loss.Reason == "stopped" && loss.Class != "board") {
			t.Errorf("got %+v, want only losses because of the stop", loss)
		}
	}
}

// writeNumbered writes records with the numbers from n on whose lines have some bytes together, and
// returns the next number. A hundred of them are flushed at a time.
func writeNumbered(l *Log, n, bytes int) int {
	const lineBytes = 110 // of one line, about
	for range bytes / lineBytes {
		l.Write(record("ci", n))
		if n++; n%100 == 0 {
			l.Flush()
		}
	}
	l.Flush()
	return n
}

// filesBytes returns the size of all files of a log.
func filesBytes(t *testing.T, dir string) (n int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if st, err := e.Info(); err == nil {
			n += st.Size()
		}
	}
	return n
}

// TestRotation: while the file is rotated its parts together have the newest lines, and stay within the
// bound.
func TestRotation(t *testing.T) {
	l, _ := open(t, Options{MaxBytes: MinBytes})
	n := writeNumbered(l, 0, 20*int(l.writer.decisions.partSize))
	if total := filesBytes(t, l.opt.Dir); total > MinBytes || total < MinBytes*3/4 {
		t.Errorf("the files have %d bytes, want nearly %d", total, MinBytes)
	}
	lines := readLines(t, l.decisionsPath())
	if last := lines[len(lines)-1]["trace_id"]; last != fmt.Sprint(n-1) || l.Stats().Lost != 0 {
		t.Errorf("the newest line is %v and %d are lost, want number %d and none", last, l.Stats().Lost, n-1)
	}
}

// TestFailingRotation: whichever rename fails, and if the next file cannot be made, no line is lost.
func TestFailingRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{MaxBytes: MinBytes})
		part := int(l.writer.decisions.partSize)
		n := writeNumbered(l, 0, 3*part)
		for succeed := range 4 { // renames, before one fails
			d.set(func() { d.renameErr, d.renamesLeft = syscall.EIO, succeed })
			n = writeNumbered(l, n, part)
			time.Sleep(2 * time.Second) // a failed rotation is tried again
			n = writeNumbered(l, n, part/10)
			d.set(func() { d.renameErr, d.openErr = nil, syscall.ENOSPC })
			time.Sleep(2 * time.Second)
			n = writeNumbered(l, n, part/2)
			d.set(func() { d.openErr = nil })
			time.Sleep(2 * time.Second)
			n = writeNumbered(l, n, part/2)
		}
		lines := readLines(t, l.decisionsPath())
		checkNumbers(t, lines, n)
		if len(lines) != n {
			t.Errorf("there are %d lines, want %d", len(lines), n)
		}
	})
}

// TestRotationNeverSucceeds: the file stops growing at the bound.
func TestRotationNeverSucceeds(t *testing.T) {
	l, d := open(t, Options{MaxBytes: MinBytes})
	d.set(func() { d.renameErr, d.renamesLeft = syscall.EIO, 0 })
	writeNumbered(l, 0, 2*MinBytes)
	if st, err := os.Stat(l.decisionsPath()); err != nil || st.Size() < MinBytes || st.Size() > MinBytes+chunkSize {
		t.Errorf("the file has %d bytes, %v; want about %d", st.Size(), err, MinBytes)
	}
}

// TestMovedFile: lines go to the path after somebody has moved the file away, and a line of which
// a part was written starts again there.
func TestMovedFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		l.Write(record("ci", 0))
		d.set(func() { d.writeErr, d.maxWrite = syscall.EIO, 10 })
		l.Flush()
		moved := l.decisionsPath() + ".old"
		if err := os.Rename(l.decisionsPath(), moved); err != nil {
			t.Fatal(err)
		}
		d.set(func() { d.writeErr = nil })
		l.Flush()
		if lines := readLines(t, l.decisionsPath()); len(lines) != 1 {
			t.Errorf("%v", lines)
		}
	})
}

// TestTornFile: a file that ends in the middle of a line, after a power cut, costs no other line.
func TestTornFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	if err := os.WriteFile(path, []byte(`{"ts":"2026-01-02T03:04:05.678Z","ten`), 0o600); err != nil {
		t.Fatal(err)
	}
	l, _ := open(t, Options{Dir: dir, MaxAge: -1})
	l.Write(record("ci", 1))
	l.Flush()
	l.Write(record("ci", 3))
	l.Flush()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(b), "\n")
	if len(lines) != 4 || !strings.Contains(lines[1], `"trace_id":"1"`) || !strings.Contains(lines[2], `"trace_id":"3"`) {
		t.Errorf("%s", b)
	}
}

// TestAge: parts are removed when they are older than MaxAge by the time that the relay ran, not
// by a clock that jumps.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := open(t, Options{MaxAge: 80 * time.Hour})
		path := l.decisionsPath()
		first := func() string { return readLines(t, path)[0]["trace_id"].(string) }
		for i := range 200 { // an hour each
			l.Write(record("ci", i))
			l.Flush()
			// The files keep the time of the real clock; the test sets its own.
			for part := 0; part <= maxParts; part++ {
				name := l.writer.decisions.part(part)
				if part == 0 {
					name = path
				}
				if st, err := os.Stat(name); err == nil && time.Since(st.ModTime()).Abs() > 1000*time.Hour || part == 0 {
					_ = os.Chtimes(name, time.Now(), time.Now())
				}
			}
			time.Sleep(time.Hour)
		}
		if got := first(); got < "1" || len(got) != 3 || got > "120" {
			t.Errorf("the oldest line is of hour %s of 200, with 80 to keep", got)
		}
	})
	// After a restart under a clock that is a year ahead nothing is removed.
	dir := t.TempDir()
	for i := range 3 {
		name := filepath.Join(dir, FileName)
		if i > 0 {
			name += fmt.Sprint(".", i)
		}
		if err := os.WriteFile(name, []byte(`{"ts":"2026-01-02T03:04:05.678Z"}`+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().AddDate(-1, 0, -i) // as the clock sees it
		if err := os.Chtimes(name, at, at); err != nil {
			t.Fatal(err)
		}
	}
	l, _ := open(t, Options{Dir: dir})
	l.Write(record("ci", 1))
	l.Flush()
	if n := len(readLines(t, l.decisionsPath())); n != 4 {
		t.Errorf("%d lines", n)
	}
}

// refuse writes n refusals of an address.
func refuse(l *Log, n int, address, tool, reason string) {
	for range n {
		l.Write(&kernel.Record{Address: netip.MustParseAddr(address), Tool: tool, Decision: kernel.Denied, Reason: reason, TraceID: "t"})
	}
}

// TestRefusals: callers without an identity get one line for each address and minute, in a separate file.
// An IPv6 address counts with its /64. A plugin is no stranger.
func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := open(t, Options{})
		stop := run(l)
		l.Write(record("ci", 0))
		l.Write(&kernel.Record{Actor: kernel.PluginActor + "notes", Decision: kernel.Denied, Reason: "consent"})
		refuse(l, 1000, "192.0.2.1", "", "no_token")
		refuse(l, 2, "192.0.2.1", "enroll", "code_unknown")
		refuse(l, 3, "2001:db8:0:1::1", "", "invalid")
		refuse(l, 4, "2001:db8:0:1:ffff::2", "", "invalid")
		time.Sleep(time.Minute + time.Second)
		got := make(map[string]string)
		for _, m := range readLines(t, l.writer.refusals.path) {
			got[m["address"].(string)] = fmt.Sprint(m["count"], m["reasons"])
		}
		want := map[string]string{
			"192.0.2.1":         "1002 map[enroll code_unknown:2 no_token:1000]",
			"2001:db8:0:1::/64": "7 map[invalid:7]",
		}
		if !maps.Equal(got, want) {
			t.Errorf("the refusals by address are %v, want %v", got, want)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if n := len(readLines(t, l.decisionsPath())); n != 2 || l.Stats().Refusals != 1009 {
			t.Errorf("%d decisions and %d refusals, want 2 and 1009", n, l.Stats().Refusals)
		}
	})
}

// TestManyRefusals: while the disk hangs, refusals of any number of addresses take bounded memory, and
// each of them is counted.
func TestManyRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		release := d.hangWrites()
		const addresses, reasons = 3 * maxRefusalAddresses, maxRefusalReasons + 4
		for i := range addresses {
			for reason := range reasons {
				refuse(l, 1, fmt.Sprintf("10.0.%d.%d", i/256, i%256), "", fmt.Sprint(reason))
			}
		}
		l.Write(record("ci", 1))
		time.Sleep(5 * time.Minute)
		release()
		time.Sleep(time.Minute)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		lines, total := readLines(t, l.writer.refusals.path), 0.0
		for _, m := range lines {
			total += m["count"].(float64)
			if n := len(m["reasons"].(map[string]any)); n > maxRefusalReasons {
				t.Fatalf("a line has %d reasons, want at most %d", n, maxRefusalReasons)
			}
		}
		if len(lines) != maxRefusalAddresses+1 || total != addresses*reasons {
			t.Errorf("%d lines count %v refusals, want %d lines with %d", len(lines), total, maxRefusalAddresses+1, addresses*reasons)
		}
	})
}

// TestCommitIsDurable: a commit returns after its line was synced, and everything that came before it.
func TestCommitIsDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		l.Write(record("ci", 0))
		began := time.Now()
		if err := l.Commit(t.Context(), record("admin", 1)); err != nil || time.Since(began) > 0 || d.synced() != 1 {
			t.Errorf("got %v after %v and %d syncs, want no error at once and one sync", err, time.Since(began), d.synced())
		}
		checkNumbers(t, readLines(t, l.decisionsPath()), 2)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestSyncs: the log is synced once a second while something is written, and not otherwise.
func TestSyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		stop := run(l)
		time.Sleep(10 * time.Second)
		if n := d.synced(); n != 0 {
			t.Errorf("%d syncs of an idle log, want none", n)
		}
		for i := range 50 {
			l.Write(record("ci", i))
			time.Sleep(100 * time.Millisecond)
		}
		if n := d.synced(); n < 4 || n > 6 {
			t.Errorf("%d syncs in 5 s, want about 5", n)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// BenchmarkWrite is what a call pays.
func BenchmarkWrite(b *testing.B) {
	l, err := Open(Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	r := kernel.Record{Tenant: "default", Actor: "ci", Address: netip.MustParseAddr("192.0.2.7"), Tool: "sys.0123456789abcdef01234567.sysmetrics.snapshot", NodeID: "0123456789abcdef01234567",
		Decision: kernel.Allowed, TraceID: "0af7651916cd43dd8448eb211c80319c"}
	b.ReportAllocs()
	var took time.Duration
	n := 0
	for b.Loop() {
		started := time.Now()
		for range wakeAt {
			l.Write(&r)
			n++
		}
		took += time.Since(started)
		l.Flush() // what the writer does meanwhile, on another processor
	}
	b.ReportMetric(float64(took.Nanoseconds())/float64(n), "ns/record")
	if err := l.Close(); err != nil || l.Stats().Lost > 0 {
		b.Errorf("%v, %+v", err, l.Stats())
	}
}
