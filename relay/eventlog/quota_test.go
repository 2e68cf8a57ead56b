package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

// call is an event about a call as the kernel writes it.
func call(tenant string, i int) kernel.Event {
	return kernel.Event{Tenant: tenant, Type: "call", Aggregate: "sysecho.01m81db3frzmy9qmn6ptx9583c.echo.invoke", Payload: json.RawMessage(fmt.Sprintf(
		`{"tool":"sysecho.01m81db3frzmy9qmn6ptx9583c.echo.invoke","node_id":"01m81db3frzmy9qmn6ptx9583c","decision":"allow","code":"","actor":"agent-%d","trace_id":"%032x"}`, i%5, i))}
}

// stateEvent is an event of state with a payload of some size.
func stateEvent(tenant, about string, size int) kernel.Event {
	return kernel.Event{Tenant: tenant, Type: "ticket.created", Aggregate: about, Payload: json.RawMessage(`{"x":"` + strings.Repeat("x", size) + `"}`)}
}

// appendAll appends events until they are kept, 128 at a time, and checks the size of the files after each.
func appendAll(t *testing.T, s *Store, n int, make func(i int) kernel.Event) {
	t.Helper()
	for i := 0; i < n; i += 128 {
		var group []kernel.Event
		for j := range 128 {
			group = append(group, make(i+j))
		}
		_, err := s.Append(context.Background(), group...)
		for tries := 0; errors.Is(err, kernel.ErrLogFull) && tries < 100; tries++ {
			time.Sleep(time.Second)
			_, err = s.Append(context.Background(), group...)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := fileBytes(s.path); n > s.opts.MaxBytes {
			t.Fatalf("the files have %d of %d bytes; stats %+v", n, s.opts.MaxBytes, s.Stats())
		}
	}
}

// kept counts the events of a tenant and class.
func kept(t *testing.T, s *Store, tenant string, class Class) (n int) {
	t.Helper()
	for _, e := range all(t, s, Query{Tenant: tenant}) {
		if classOf(e.Type) == class {
			n++
		}
	}
	return n
}

func checkChains(t *testing.T, s *Store) {
	t.Helper()
	if v, err := s.Verify(context.Background(), VerifyOptions{}); err != nil || len(v.Faults) > 0 || v.Rows != s.Stats().Events {
		t.Errorf("verification %+v, %v; stats %+v", v, err, s.Stats())
	}
}

// A tenant that floods the log with calls loses its own oldest calls: not its state, and nothing of
// other tenants. The files stay within the bound at each moment. With AGENTCTL_SLOW=1 the calls
// share their texts (callRow), and the log has space for many more.
func TestFloodOfCalls(t *testing.T) {
	flood := 128 * 25
	floodCall := func(i int) kernel.Event {
		e := call("flood", i)
		e.Payload = append(e.Payload[:len(e.Payload)-1], `,"last":1}`...)
		return e
	}
	if slow() {
		flood, floodCall = 128*100, func(i int) kernel.Event { return call("flood", i) }
	}
	withStore(t, Options{MaxBytes: minBytes}, func(t *testing.T, s *Store) {
		for i := range 40 {
			mustAppend(t, s, call("small", i), stateEvent("small", fmt.Sprint(i), 500), stateEvent("flood", fmt.Sprint(i), 500))
		}
		appendAll(t, s, flood, floodCall) // nearly half more than the log has space for
		time.Sleep(2 * time.Minute)
		if a, b, c := kept(t, s, "small", ClassCalls), kept(t, s, "small", ClassState), kept(t, s, "flood", ClassState); a != 40 || b != 40 || c != 40 {
			t.Errorf("kept %d calls and %d of state of the small tenant, %d of state of the other", a, b, c)
		}
		st := s.Stats()
		if n := kept(t, s, "flood", ClassCalls); n < flood/4 || n > flood*3/4 || st.Removed != uint64(flood-n) || st.Dropped > 0 || st.OverBound {
			t.Errorf("%d of %d calls kept; stats %+v", n, flood, st)
		}
		tail := all(t, s, Query{Tenant: "flood", Types: []string{"call"}})
		if last := tail[len(tail)-1]; string(last.Payload) != string(floodCall(flood-1).Payload) || tail[0].Seq+uint64(len(tail))-1 != last.Seq {
			t.Errorf("not the newest are kept: %d from %d to %d", len(tail), tail[0].Seq, last.Seq)
		}
		// What was removed concerns the readers of its tenant and class only.
		first := st.First - 1
		for _, q := range []Query{{Tenant: "small"}, {Types: []string{"ticket.*"}}} {
			if !s.CanResume(first, q) {
				t.Errorf("%+v cannot resume", q)
			}
		}
		if s.CanResume(first, Query{Tenant: "flood"}) || s.CanResume(first, Query{}) {
			t.Error("a gap is not noticed")
		}
		t.Logf("%.1f bytes a call", float64(st.CallBytes)/float64(st.Calls))
		checkChains(t, s)
	})
}

// A tenant that floods the log with state loses its own oldest events, once its snapshots are stored.
// The snapshots of other tenants are not.
func TestFloodOfState(t *testing.T) {
	o := Options{MaxBytes: 2 << 20, Snapshot: func(context.Context) ([]kernel.Event, error) {
		return []kernel.Event{stateEvent("flood", "open", 100), stateEvent("small", "open", 100)}, nil
	}}
	withStore(t, o, func(t *testing.T, s *Store) {
		for i := range 40 {
			mustAppend(t, s, call("small", i), stateEvent("small", fmt.Sprint(i), 500), call("flood", i))
		}
		appendAll(t, s, 128*40, func(i int) kernel.Event { return stateEvent("flood", fmt.Sprint(i), 500) })
		time.Sleep(2 * time.Minute)
		if a, b, c := kept(t, s, "small", ClassCalls), kept(t, s, "small", ClassState), kept(t, s, "flood", ClassCalls); a != 40 || b != 40 || c != 40 {
			t.Errorf("kept %d calls and %d of state of the small tenant, %d calls of the other", a, b, c)
		}
		st := s.Stats()
		if n := kept(t, s, "flood", ClassState); n < 500 || n > 3000 || st.Snapshots == 0 || st.Dropped > 0 {
			t.Errorf("%d kept; stats %+v", n, st)
		}
		if got := all(t, s, Query{Tenant: "flood", Aggregates: []string{"open"}}); len(got) == 0 {
			t.Error("no snapshot")
		}
		checkChains(t, s)
	})
}

// What the calls of tenant a may use depends on the log, its tenant and its class. Retention begins above
// the bound and ends below 7/8 of it; 5/8 leaves space for the last step.
func TestQuotas(t *testing.T) {
	const logBytes, quota = 3 << 19, 1 << 17
	const callBytes = 64 // of one call, about
	tests := []struct {
		name     string
		opts     Options
		other    string // another tenant, which has an event
		calls    int    // of tenant a
		min, max int64  // bytes of its calls afterwards
	}{
		{"a tenant that is alone", Options{MaxTenantBytes: quota}, "", 128 * 20, quota / 8 * 9, quota / 8 * 11},
		{"a tenant that is not alone", Options{MaxTenantBytes: quota}, "b", 128 * 20, quota / 8 * 5, quota},
		{"a quota of calls", Options{Calls: Quota{MaxBytes: quota}}, "", 128 * 20, quota / 8 * 5, quota},
		{"an age of state", Options{State: Quota{MaxAge: time.Minute}}, "", 128 * 4, quota / 8, quota / 8 * 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.opts.MaxBytes = logBytes
			withStore(t, tt.opts, func(t *testing.T, s *Store) {
				others := int64(0)
				if tt.other != "" {
					others = 1
					mustAppend(t, s, stateEvent(tt.other, "x", 10))
				}
				appendAll(t, s, tt.calls, func(i int) kernel.Event { return call("a", i) })
				time.Sleep(3 * time.Minute)
				st := s.Stats()
				if st.CallBytes < tt.min || st.CallBytes > tt.max {
					t.Errorf("the calls use %d bytes, want %d to %d", st.CallBytes, tt.min, tt.max)
				}
				if want := int64(tt.calls)*callBytes > tt.max; (st.Removed > 0) != want {
					t.Errorf("%d of %d calls were removed, want some: %v", st.Removed, tt.calls, want)
				}
				if st.Events-st.Calls != others {
					t.Errorf("%d events of state are left, want %d", st.Events-st.Calls, others)
				}
			})
		})
	}
}

// Ages of the classes differ; a chain that is empty goes on with its hashes.
func TestClassAge(t *testing.T) {
	withStore(t, Options{MaxAge: 30 * 24 * time.Hour, Calls: Quota{MaxAge: time.Hour}}, func(t *testing.T, s *Store) {
		mustAppend(t, s, call("a", 1), stateEvent("a", "x", 10))
		time.Sleep(2 * time.Hour)
		if st := s.Stats(); st.Calls != 0 || st.Events != 1 {
			t.Errorf("stats %+v", st)
		}
		mustAppend(t, s, call("a", 2), call("b", 3))
		checkChains(t, s)
		var words int
		if err := s.Reader.db.QueryRow("SELECT count(*) FROM words").Scan(&words); err != nil || words != 4 {
			t.Errorf("%d words, %v: those of removed calls stay", words, err)
		}
	})
}

// While another program keeps a snapshot, the write-ahead log cannot be emptied. Stats shows it, and calls
// are dropped; events of state are stored. Afterwards the log is as before.
func TestPinned(t *testing.T) {
	withStore(t, Options{MaxBytes: 4 << 20}, func(t *testing.T, s *Store) {
		mustAppend(t, s, stateEvent("a", "first", 10))
		closeSnapshot := takeSnapshot(t, s.path)
		for i := 0; s.Stats().Pinned.IsZero(); i++ {
			if mustAppend(t, s, stateEvent("a", fmt.Sprint(i), 1000)); i > 4096 {
				t.Fatalf("4 MiB were appended, and the log is not pinned: %+v", s.Stats())
			}
			time.Sleep(10 * time.Millisecond) // it tries to empty the write-ahead log each pinnedRetry
		}

		const calls = 2000
		grown := fileBytes(s.path)
		for i := range calls {
			s.Offer(call("a", i))
			if i%200 == 0 {
				mustAppend(t, s, stateEvent("a", "while pinned", 10))
			}
		}
		last := mustAppend(t, s, stateEvent("a", "last", 10))
		time.Sleep(time.Second)
		if st := s.Stats(); st.Dropped != calls || st.Calls != 0 {
			t.Errorf("%d calls were dropped and %d stored, want all %d dropped", st.Dropped, st.Calls, calls)
		}
		if n := fileBytes(s.path); n > grown+200_000 {
			t.Errorf("the files grew from %d to %d bytes, want less than 200,000 more", grown, n)
		}

		closeSnapshot()
		time.Sleep(time.Second)
		if st := s.Stats(); !st.Pinned.IsZero() || st.Bytes > s.opts.MaxBytes {
			t.Errorf("without the snapshot the stats are %+v, want at most %d bytes and not pinned", st, s.opts.MaxBytes)
		}
		s.Offer(call("a", 1))
		time.Sleep(time.Second)
		if st := s.Stats(); st.Calls != 1 {
			t.Errorf("%d calls were stored afterwards, want 1", st.Calls)
		}
		if got := all(t, s, Query{After: last - 1, To: last}); len(got) != 1 || got[0].Aggregate != "last" {
			t.Errorf("event %d is %+v, want the one that was appended while the log was pinned", last, got)
		}
	})
}

// takeSnapshot begins a read transaction of another program.
func takeSnapshot(t *testing.T, path string) (end func()) {
	t.Helper()
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	tx, err := db.Begin()
	if err == nil {
		err = tx.QueryRow("SELECT count(*) FROM events").Scan(new(int))
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := errors.Join(tx.Rollback(), db.Close()); err != nil {
			t.Error(err)
		}
	}
}

// A log whose bound was made smaller shrinks to it.
func TestSmallerBound(t *testing.T) {
	const largeBound, smallBound = 4 << 20, 1 << 20
	path := logPath(t)
	for _, bound := range []int64{largeBound, smallBound} {
		s, err := Open(Options{Path: path, MaxBytes: bound})
		if err != nil {
			t.Fatal(err)
		}
		checkNow := make(chan struct{})
		s.retainNow = checkNow
		stop := run(t, s)
		if bound == largeBound {
			payload := json.RawMessage(`{"x":"` + strings.Repeat("x", 700) + `"}`)
			appendAll(t, s, 128*16, func(int) kernel.Event {
				return kernel.Event{Tenant: "a", Type: "call", Aggregate: "t", Payload: payload}
			})
			if n := fileBytes(path); n <= smallBound {
				t.Fatalf("the log has only %d bytes", n)
			}
		}
		for deadline := time.Now().Add(20 * time.Second); fileBytes(path) > bound && time.Now().Before(deadline); {
			checkNow <- struct{}{}
		}
		if n := fileBytes(path); n > bound {
			t.Errorf("%d of %d bytes; stats %+v", n, bound, s.Stats())
		}
		stop()
		checkChains(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	integrity(t, path)
}

// A log that has shrunk while another program read it gives the space back at the next check, also if
// nothing is appended.
func TestShrinkBesideReader(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path, MaxBytes: 4 << 20})
	stop := run(t, s)
	appendAll(t, s, 128*16, func(i int) kernel.Event {
		e := stateEvent("a", "t", 700)
		e.Type = "call"
		return e
	})
	stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db := openRaw(t, path)
	for _, q := range []string{"UPDATE chains SET mark = last + 1", "DELETE FROM calls"} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	db.Close()

	s = open(t, Options{Path: path, MaxBytes: minBytes})
	closeSnapshot := takeSnapshot(t, path)
	for s.space.filePages > s.space.maxPages {
		if err := errors.Join(s.shrink(), s.readSpace()); err != nil {
			t.Fatal(err)
		}
	}
	if n := fileBytes(path); n <= minBytes {
		t.Fatalf("the files have %d bytes while they are read, want more than %d", n, minBytes)
	}
	closeSnapshot()
	var wg sync.WaitGroup
	s.startRetention(t.Context(), &wg)
	wg.Wait()
	if n := fileBytes(path); n > minBytes || s.Stats().OverBound {
		t.Errorf("afterwards the files have %d bytes, want at most %d", n, minBytes)
	}
}

// Thousands of tenants have a chain each, up to a bound; what a new tenant appends beyond it is refused and
// fails no one else. Tenants without events make place.
func TestManyTenants(t *testing.T) {
	o := Options{MaxAge: time.Hour, maxChains: 4 * MaxAppend}
	if slow() {
		o.maxChains = maxChains
	}
	withStore(t, o, func(t *testing.T, s *Store) {
		for i := 0; i < o.maxChains; i += MaxAppend {
			var group []kernel.Event
			for j := range MaxAppend {
				group = append(group, kernel.Event{Tenant: fmt.Sprintf("tenant-%d", i+j), Type: "ticket.created"})
			}
			mustAppend(t, s, group...)
		}
		errs := make(chan error, 2)
		for _, tenant := range []string{"tenant-7", "new"} {
			go func() {
				_, err := s.Append(context.Background(), kernel.Event{Tenant: tenant, Type: "ticket.created"})
				if tenant == "new" {
					err = map[bool]error{true: nil, false: fmt.Errorf("new: %w", err)}[errors.Is(err, errTooManyChains)]
				}
				errs <- err
			}()
		}
		for range 2 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		time.Sleep(2 * time.Hour)
		last := s.Last()
		mustAppend(t, s, kernel.Event{Tenant: "new", Type: "ticket.created"})
		if st := s.Stats(); st.Events != 1 || s.Last() != last+1 {
			t.Errorf("stats %+v", st)
		}
		if got, err := s.LastGiven(context.Background()); err != nil || got != last+1 {
			t.Errorf("last %d, %v; want %d", got, err, last+1)
		}
		checkChains(t, s)
	})
}

// More different texts than a chain keeps in memory begin a new epoch, and go with its rows.
func TestWords(t *testing.T) {
	withStore(t, Options{MaxAge: time.Hour}, func(t *testing.T, s *Store) {
		n := 0
		add := func(count int) {
			t.Helper()
			for i := 0; i < count; i += 128 {
				var group []kernel.Event
				for range 128 {
					e := call("a", n)
					e.Aggregate = fmt.Sprintf("tool-%d", n)
					n++
					group = append(group, e)
				}
				mustAppend(t, s, group...)
			}
		}
		words := func() (count, epochs int) {
			t.Helper()
			if err := s.Reader.db.QueryRow("SELECT count(*), count(DISTINCT epoch) FROM words").Scan(&count, &epochs); err != nil {
				t.Fatal(err)
			}
			return count, epochs
		}
		add(2*maxChainWords + 128)
		if _, epochs := words(); epochs < 3 {
			t.Errorf("the words are in %d epochs, want 3", epochs)
		}
		time.Sleep(50 * time.Minute)
		add(maxChainWords)
		time.Sleep(30 * time.Minute)
		if count, _ := words(); count > 2*maxChainWords+10 || int64(count) < s.Stats().Events {
			t.Errorf("%d words for %d events", count, s.Stats().Events)
		}
		for i, e := range all(t, s, Query{}) {
			if want := fmt.Sprintf("tool-%d", i+n-int(s.Stats().Events)); e.Aggregate != want {
				t.Fatalf("%s, want %s", e.Aggregate, want)
			}
		}
		checkChains(t, s)
	})
}

// One tenant cannot take the whole queue, neither with offers nor with appends.
func TestQueueShares(t *testing.T) {
	s := open(t, Options{Path: logPath(t), MaxQueued: 64})
	offered := 0
	for i := range 64 {
		if s.Offer(call("flood", i)) {
			offered++
		}
	}
	if offered != 16 {
		t.Errorf("%d offers of one tenant were queued", offered)
	}
	for i := range 8 {
		if !s.Offer(call("other", i)) {
			t.Error("an offer of another tenant was refused")
		}
	}
	if st := s.Stats(); st.Dropped != 48 {
		t.Errorf("stats %+v", st)
	}
	run(t, s)
	mustAppend(t, s, call("flood", 1))
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queuedBy) != 0 {
		t.Errorf("left over: %v", s.queuedBy)
	}
}

// While a write does not end, callers of Append get an error: with their context, or after stallTimeout.
// Offers wait. Afterwards the log goes on.
func TestStalled(t *testing.T) {
	var hang chan struct{} // made in the bubble of withStore
	o := Options{onCommit: func(events []kernel.Event) {
		if events[0].Aggregate == "hang" {
			<-hang
		}
	}}
	withStore(t, o, func(t *testing.T, s *Store) {
		hang = make(chan struct{})
		appendWithin := func(timeout time.Duration, about string) <-chan error {
			result := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				_, err := s.Append(ctx, event("ticket.created", about, 1))
				result <- err
			}()
			synctest.Wait()
			return result
		}
		written := appendWithin(5*time.Second, "hang")
		queued := appendWithin(5*time.Second, "x")
		waiting := appendWithin(time.Hour, "x")
		if err := <-written; !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "may have been kept") {
			t.Errorf("the caller whose event is written got %v, want that it may have been kept", err)
		}
		if err := <-queued; !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "nothing was kept") {
			t.Errorf("the caller behind it got %v, want that nothing was kept", err)
		}
		if err := <-waiting; !errors.Is(err, ErrStalled) {
			t.Errorf("the caller without a deadline got %v, want ErrStalled", err)
		}

		began := time.Now()
		if err := <-appendWithin(time.Hour, "x"); !errors.Is(err, ErrStalled) || time.Since(began) > 0 {
			t.Errorf("a new caller got %v after %v, want ErrStalled at once", err, time.Since(began))
		}
		if !s.Offer(call("a", 1)) {
			t.Error("an offer was refused")
		}

		close(hang)
		synctest.Wait()
		if err := <-appendWithin(time.Hour, "x"); err != nil {
			t.Errorf("after the write: %v", err)
		}
		time.Sleep(time.Second)
		if st := s.Stats(); st.Calls != 1 || st.Events != 3 {
			t.Errorf("%d calls of %d events were kept, want the offer, the first event and the last one", st.Calls, st.Events)
		}
	})
}

// Open refuses a log that is not what was recorded.
func TestExpect(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	last := mustAppend(t, s, event("ticket.created", "x", 1))
	stop()
	id := s.ID()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), FileName)
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), FileName)
	for _, tt := range []struct {
		path string
		x    Expect
		want error
	}{
		{missing, Expect{Exists: true}, ErrMissing},
		{missing, Expect{ID: id}, ErrMissing},
		{missing, Expect{Last: 1}, ErrMissing},
		{empty, Expect{Exists: true}, ErrEmpty},
		{path, Expect{Exists: true, ID: strings.Repeat("0", 32)}, ErrForeign},
		{path, Expect{Exists: true, ID: id, Last: last + 1}, ErrOlder},
		{path, Expect{Exists: true, ID: id, Last: last}, nil},
		{missing, Expect{}, nil},
	} {
		s, err := Open(Options{Path: tt.path, Expect: tt.x})
		if !errors.Is(err, tt.want) || err != nil && !strings.Contains(err.Error(), tt.path) {
			t.Errorf("%+v: %v, want %v", tt.x, err, tt.want)
		}
		if err == nil {
			if got, err := s.Reader.ID(t.Context()); got != s.ID() || err != nil {
				t.Errorf("id %q, %v", got, err)
			}
			s.Close()
		}
	}
}

// While snapshots cannot be had, nothing of state can be removed: the tenant that fills the log is refused, and
// the others go on. Snapshots are not asked for again at once.
func TestReserve(t *testing.T) {
	var asked atomic.Int64
	o := Options{MaxBytes: 2 << 20, Snapshot: func(context.Context) ([]kernel.Event, error) {
		asked.Add(1)
		return nil, errors.New("the tickets are busy")
	}}
	withStore(t, o, func(t *testing.T, s *Store) {
		var err error
		for i := 0; err == nil; i++ {
			if i == 100_000 {
				t.Fatal("the log has no bound")
			}
			_, err = s.Append(context.Background(), stateEvent("flood", "x", 4000))
		}
		if !errors.Is(err, kernel.ErrLogFull) {
			t.Fatal(err)
		}
		for i := range 20 {
			mustAppend(t, s, stateEvent("small", fmt.Sprint(i), 1000))
			if _, err := s.Append(context.Background(), stateEvent("flood", "x", 1000)); !errors.Is(err, kernel.ErrLogFull) {
				t.Errorf("flood: %v", err)
			}
		}
		if n := asked.Load(); n > 2 {
			t.Errorf("%d snapshots were asked for", n)
		}
		if n := fileBytes(s.path); n > s.opts.MaxBytes {
			t.Errorf("%d bytes", n)
		}
		if _, err := s.Append(context.Background(), make([]kernel.Event, 0)...); err != nil {
			t.Error(err)
		}
		var large []kernel.Event
		for range 64 {
			large = append(large, stateEvent("small", "large", 30_000))
		}
		if _, err := s.Append(context.Background(), large...); err == nil || !strings.Contains(err.Error(), "append at most") {
			t.Errorf("a transaction larger than the write-ahead log: %v", err)
		}
	})
}
