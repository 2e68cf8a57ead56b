package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// disk is the disk of a test: it hangs or fails while the test sets that.
type disk struct {
	mu          sync.Mutex // protects the fields below
	hang        chan struct{}
	writeErr    error
	maxWrite    int // bytes of one write, if writeErr is set
	syncErr     error
	renameErr   error
	renamesLeft int // that succeed all the same
	openErr     error
	lie         bool // a write stores half and reports success
	syncs       int
}

type testFile struct {
	*os.File
	d *disk
}

func (d *disk) attach(l *Log) {
	for _, f := range []*rotatingFile{l.writer.decisions, l.writer.refusals} {
		f.operation = operations{open: d.open, rename: d.rename}
		f.file = &testFile{f.file.(*os.File), d}
	}
}

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
	hang, err, most, lie := f.d.hang, f.d.writeErr, f.d.maxWrite, f.d.lie
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
		n, _ := f.File.Write(b[:min(most, len(b))])
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

// record is one of an actor, with a number.
func record(actor string, n int) *kernel.Record {
	return &kernel.Record{Tenant: "default", Actor: actor, Decision: kernel.Allowed, TraceID: fmt.Sprint(n)}
}

// readLines returns the lines of all parts of a file, the oldest first, and fails for one that is
// no JSON.
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
// identity's share; nobody else loses anything, nor does anybody once the disk answers again.
func TestHangingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		hang := make(chan struct{})
		d.set(func() { d.hang = hang })
		l.Write(record("first", 0))
		time.Sleep(time.Second) // the writer hangs
		const flood = 20000
		started := time.Now()
		for i := range flood {
			l.Write(record("flood", i))
			if i%100 == 0 {
				l.Write(record("good", i))
			}
		}
		if time.Since(started) > 0 {
			t.Error("a Write waited for the disk")
		}
		if err := l.Commit(ctx, record("admin", 1)); !errors.Is(err, errNotWritten) || time.Since(started) != commitTimeout {
			t.Errorf("Commit: %v after %s", err, time.Since(started))
		}
		var fault *storage.Error
		if err := l.Commit(ctx, record("admin", 2)); !errors.As(err, &fault) || fault.Kind != storage.Hung {
			t.Errorf("Commit: %v", err)
		}
		d.set(func() { d.hang = nil })
		close(hang)
		time.Sleep(time.Second)
		if err := l.Commit(ctx, record("admin", 3)); err != nil {
			t.Error(err)
		}
		cancel()
		if err := errors.Join(<-done, l.Close()); err != nil {
			t.Fatal(err)
		}
		count := make(map[string]int)
		for _, m := range readLines(t, l.decisionsPath()) {
			count[m["actor"].(string)]++
		}
		s := l.Stats()
		half := maxCost / minCost / 2
		if count["first"] != 1 || count["good"] != flood/100 || count["admin"] != 1 || count["flood"] < half*9/10 || count["flood"] > half {
			t.Errorf("written: %v, want 1, %d, 1, and about %d of the flood", count, flood/100, half)
		}
		if lost := s.Losses[0]; lost != (Loss{"share", "agent", uint64(flood - count["flood"])}) || s.Lost != lost.Lines+2 {
			t.Errorf("counted as lost: %+v", s)
		}
		if s.Lines != uint64(len(readLines(t, l.decisionsPath()))) {
			t.Errorf("%d lines counted", s.Lines)
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

// TestFailingDisk: lines wait for a disk that fails, are not cut in two, and commits fail at once.
func TestFailingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watch := storage.NewWatch(Store)
		var events [][]Loss
		l, d := open(t, Options{Watch: watch, OnLost: func(lost []Loss) { events = append(events, lost) }})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		d.set(func() { d.writeErr, d.maxWrite = syscall.ENOSPC, 30 })
		for i := range 100 {
			l.Write(record("ci", i))
			time.Sleep(10 * time.Millisecond)
		}
		if p := watch.Problems(); len(p) != 1 || p[0].Kind != storage.Full {
			t.Errorf("problems: %+v", p)
		}
		started := time.Now()
		var fault *storage.Error
		if err := l.Commit(ctx, record("admin", 0)); !errors.As(err, &fault) || fault.Kind != storage.Full || time.Since(started) > writeInterval {
			t.Errorf("Commit: %v after %s", err, time.Since(started))
		}
		d.set(func() { d.writeErr = nil })
		time.Sleep(2 * time.Second)
		if p := watch.Problems(); len(p) != 1 || !p[0].Warning { // the commit was lost
			t.Errorf("problems: %+v", p)
		}
		d.set(func() { d.syncErr = syscall.EIO })
		if err := l.Commit(ctx, record("admin", 1)); !errors.As(err, &fault) || fault.Kind != storage.Failing {
			t.Errorf("Commit without a sync: %v", err)
		}
		d.set(func() { d.syncErr = nil })
		time.Sleep(2 * time.Second)
		if p := watch.Problems(); len(p) != 1 || !p[0].Warning {
			t.Errorf("problems: %+v", p)
		}
		time.Sleep(2 * time.Minute)
		cancel()
		if err := errors.Join(<-done, l.Close()); err != nil {
			t.Fatal(err)
		}
		if len(events) != 2 || events[0][0] != (Loss{"storage", "admin", 1}) { // a minute apart
			t.Errorf("reported: %+v", events)
		}
		lines := readLines(t, l.decisionsPath())
		for i := range 100 {
			if lines[i]["trace_id"] != fmt.Sprint(i) {
				t.Fatalf("line %d is %v", i, lines[i])
			}
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

// TestStop: Run and Close return in bounded time when the disk hangs, and say so; what is queued
// is counted as lost.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		hang := make(chan struct{})
		d.set(func() { d.hang = hang })
		l.Write(record("ci", 0))
		time.Sleep(time.Second)
		l.Write(record("ci", 1))
		started := time.Now()
		cancel()
		if err := <-done; !errors.Is(err, ErrHung) || time.Since(started) != closeTimeout {
			t.Errorf("Run: %v after %s", err, time.Since(started))
		}
		if err := l.Close(); err != nil || time.Since(started) != closeTimeout {
			t.Errorf("Close: %v after %s", err, time.Since(started))
		}
		l.Write(record("ci", 2))
		if err := l.Commit(t.Context(), record("ci", 3)); !errors.Is(err, errNotWritten) {
			t.Errorf("Commit: %v", err)
		}
		if s := l.Stats(); s.Lost != 3 {
			t.Errorf("lost: %+v", s)
		}
		close(hang) // the writer that was left behind ends
	})
	synctest.Test(t, func(t *testing.T) { // without Run
		l, d := open(t, Options{})
		l.Write(record("ci", 0))
		d.set(func() { d.writeErr = syscall.EIO })
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if s := l.Stats(); s.Lost != 1 || s.Lines != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestRotation: the parts together hold every line, in order, within the bound; also while
// renames fail, wherever they do.
func TestRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{MaxBytes: MinBytes})
		n := 0
		write := func(bytes int) {
			for range bytes / 110 {
				l.Write(record("ci", n))
				if n++; n%100 == 0 {
					l.Flush()
				}
			}
			l.Flush()
		}
		part := int(l.writer.decisions.partSize)
		write(3 * part)
		for left := range 4 { // renames that succeed before one fails
			d.set(func() { d.renameErr, d.renamesLeft = syscall.EIO, left })
			write(part)
			time.Sleep(2 * time.Second)
			write(part / 10)
			d.set(func() { d.renameErr = nil })
			d.set(func() { d.openErr = syscall.ENOSPC }) // the file is renamed, and no other can be made
			time.Sleep(2 * time.Second)
			write(part / 2)
			d.set(func() { d.openErr = nil })
			time.Sleep(2 * time.Second)
			write(part / 2)
		}
		lines := readLines(t, l.decisionsPath())
		if len(lines) != n {
			t.Fatalf("%d lines, want %d", len(lines), n)
		}
		for i, m := range lines {
			if m["trace_id"] != fmt.Sprint(i) {
				t.Fatalf("line %d is %v", i, m)
			}
		}
		write(20 * part)
		total := int64(0)
		entries, err := os.ReadDir(l.opt.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if st, err := e.Info(); err == nil {
				total += st.Size()
			}
		}
		lines = readLines(t, l.decisionsPath())
		if total > MinBytes || total < MinBytes*3/4 || lines[len(lines)-1]["trace_id"] != fmt.Sprint(n-1) || l.Stats().Lost != 0 {
			t.Errorf("%d bytes in %d files, %d lost", total, len(entries), l.Stats().Lost)
		}
		// Renames that fail for ever: the file stops at the bound.
		d.set(func() { d.renameErr, d.renamesLeft = syscall.EIO, 0 })
		write(2 * MinBytes)
		if st, err := os.Stat(l.decisionsPath()); err != nil || st.Size() > MinBytes+chunkSize {
			t.Errorf("%v, %v", st, err)
		}
	})
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

// TestRefusals: strangers get one line for each address and minute in a separate file, bounded
// by the number of addresses, while the disk hangs as well.
func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		refuse := func(address, tool, reason string, n int) {
			for range n {
				l.Write(&kernel.Record{Address: netip.MustParseAddr(address), Tool: tool, Decision: kernel.Denied, Reason: reason, TraceID: "t"})
			}
		}
		path := l.writer.refusals.path
		l.Write(record("ci", 0))
		l.Write(&kernel.Record{Actor: kernel.PluginActor + "notes", Decision: kernel.Denied, Reason: "consent"}) // no stranger
		refuse("192.0.2.1", "", "no_token", 1000)
		refuse("192.0.2.1", "enroll", "code_unknown", 2)
		refuse("2001:db8:0:1::1", "", "invalid", 3)
		refuse("2001:db8:0:1:ffff::2", "", "invalid", 4)
		time.Sleep(61 * time.Second)
		lines := readLines(t, path)
		got := make(map[string]string)
		for _, m := range lines {
			got[m["address"].(string)] = fmt.Sprint(m["count"], m["reasons"])
		}
		if len(lines) != 2 || got["192.0.2.1"] != "1002 map[enroll code_unknown:2 no_token:1000]" || got["2001:db8:0:1::/64"] != "7 map[invalid:7]" {
			t.Errorf("%v", got)
		}
		hang := make(chan struct{})
		d.set(func() { d.hang = hang })
		for i := range 3 * maxRefusalAddresses {
			for reason := range 12 {
				refuse(fmt.Sprintf("10.0.%d.%d", i/256, i%256), "", fmt.Sprint(reason), 1)
			}
		}
		l.Write(record("ci", 1))
		time.Sleep(5 * time.Minute)
		d.set(func() { d.hang = nil })
		close(hang)
		time.Sleep(time.Minute)
		cancel()
		if err := errors.Join(<-done, l.Close()); err != nil {
			t.Fatal(err)
		}
		lines = readLines(t, path)[2:]
		total := 0.0
		for _, m := range lines {
			total += m["count"].(float64)
			if reasons := m["reasons"].(map[string]any); len(reasons) > maxRefusalReasons {
				t.Fatalf("%d reasons", len(reasons))
			}
		}
		if len(lines) != maxRefusalAddresses+1 || total != 3*maxRefusalAddresses*12 {
			t.Errorf("%d lines for %v refusals", len(lines), total)
		}
		if n := len(readLines(t, l.decisionsPath())); n != 3 || l.Stats().Refusals != 1009+3*maxRefusalAddresses*12 {
			t.Errorf("%d decisions, %+v", n, l.Stats())
		}
	})
}

// TestCommitIsDurable: what was committed was synced, after everything that came before it.
func TestCommitIsDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, d := open(t, Options{})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		l.Write(record("ci", 0))
		started := time.Now()
		if err := l.Commit(ctx, record("admin", 1)); err != nil || time.Since(started) > 0 || d.synced() != 1 {
			t.Errorf("%v after %s and %d syncs", err, time.Since(started), d.synced())
		}
		if lines := readLines(t, l.decisionsPath()); len(lines) != 2 || lines[1]["actor"] != "admin" {
			t.Errorf("%v", lines)
		}
		// Once a second when something was written, and not otherwise.
		time.Sleep(10 * time.Second)
		before := d.synced()
		for range 50 {
			l.Write(record("ci", 1))
			time.Sleep(100 * time.Millisecond)
		}
		if n := d.synced() - before; n < 4 || n > 6 {
			t.Errorf("%d syncs in 5 s", n)
		}
		cancel()
		<-done
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
