//go:build linux

package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/prober"
)

// tape is a history that was written down.
type tape []HistoryRow

func (t tape) Query(ctx context.Context, q HistoryQuery, fn func(HistoryRow) error) error {
	in := func(ts int64) bool { return ts >= q.FromMS && (q.ToMS == 0 || ts <= q.ToMS) }
	for i, row := range t {
		if !in(row.TS) || q.StepMS > 0 && i+1 < len(t) && in(t[i+1].TS) && t[i+1].TS/q.StepMS == row.TS/q.StepMS {
			continue
		}
		if err := fn(row); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// historyFunc is a History made of a function, which gets the number of the call, from 1.
type historyFunc struct {
	mu    sync.Mutex
	calls int
	query func(ctx context.Context, call int, q HistoryQuery, fn func(HistoryRow) error) error
}

func (h *historyFunc) Query(ctx context.Context, q HistoryQuery, fn func(HistoryRow) error) error {
	h.mu.Lock()
	h.calls++
	call := h.calls
	h.mu.Unlock()
	return h.query(ctx, call, q, fn)
}

// bubbleStart is when a bubble's time begins, in ms.
const bubbleStart int64 = 946_684_800_000

// rowAt is a row whose cpu is known by its time.
func rowAt(ts int64) HistoryRow {
	return HistoryRow{TS: ts, Sample: &prober.Sample{TSMS: ts, CPUPct: float64(ts%101) + 0.25, MemTotalBytes: 1 << 34, MemBytes: 1 << 33}}
}

// seconds are n rows, one a second.
func seconds(from int64, n int) (t tape) {
	for i := range n {
		t = append(t, rowAt(from+int64(i)*1000))
	}
	return t
}

func TestHistory(t *testing.T) {
	const from = bubbleStart - 10_000
	recorded := seconds(from, 5) // then nothing for 5 s
	recorded[1].Readings = []prober.Reading{readingOf("temperature.hottest_c", 40.5)}
	recorded = append(recorded, HistoryRow{TS: from + 4500, Readings: []prober.Reading{readingOf("temperature.hottest_c", 41), readingOf("temperature.cpu-thermal", 1)}})
	at := func(offsets ...int64) string { // the items by their times
		return strings.ReplaceAll(strings.Trim(fmt.Sprint(offsets), "[]"), " ", ",")
	}
	tests := []struct {
		name, params string
		want         string
		keys         string // of the first item
	}{
		{"all", `{"from_ts":0,"to_ts":0}`, at(0, 1000, 2000, 3000, 4000), "[cpu memory ts]"},
		{"both ends are in", fmt.Sprintf(`{"from_ts":%d,"to_ts":%d}`, from+1000, from+3000), at(1000, 2000, 3000), "[cpu memory ts]"},
		{"ends between rows", fmt.Sprintf(`{"from_ts":%d,"to_ts":%d}`, from+1001, from+2999), at(2000), "[cpu memory ts]"},
		{"one moment", fmt.Sprintf(`{"from_ts":%d,"to_ts":%d}`, from+2000, from+2000), at(2000), "[cpu memory ts]"},
		{"a module", `{"from_ts":0,"to_ts":0,"modules":["memory"]}`, at(0, 1000, 2000, 3000, 4000), "[memory ts]"},
		{"frame and more", `{"from_ts":0,"to_ts":0,"modules":["cpu","temperature"]}`, at(0, 1000, 2000, 3000, 4000, 4500), "[cpu ts]"},
		{"beyond the frame", `{"from_ts":0,"to_ts":0,"modules":["temperature"]}`, at(1000, 4500), "[temperature ts]"},
		{"steps", fmt.Sprintf(`{"from_ts":0,"to_ts":%d,"step_ms":2000,"modules":["mem","cpu"]}`, from+4000), at(1000, 3000, 4000), "[cpu memory ts]"},
		{"step 0", `{"from_ts":0,"to_ts":0,"step_ms":0,"limit":0}`, at(0, 1000, 2000, 3000, 4000), "[cpu memory ts]"},
		{"a limit", `{"from_ts":0,"to_ts":0,"limit":2}`, at(0, 1000), "[cpu memory ts]"},
		{"a limit counts items", `{"from_ts":0,"to_ts":0,"limit":2,"modules":["temperature"]}`, at(1000, 4500), "[temperature ts]"},
		{"a limit that is not reached", `{"from_ts":0,"to_ts":0,"limit":9000000000000}`, at(0, 1000, 2000, 3000, 4000), "[cpu memory ts]"},
		{"nothing then: a snapshot", fmt.Sprintf(`{"from_ts":%d,"to_ts":%d}`, from+5000, from+6000), at(10_000), "[cpu memory ts]"},
		{"nothing of a module: a bare snapshot", fmt.Sprintf(`{"from_ts":%d,"to_ts":%d,"modules":["wear"]}`, from, from+6000), at(10_000), "[ts]"},
		{"from the future till now", `{"from_ts":4000000000000,"to_ts":0}`, at(10_000), "[cpu memory ts]"},
		{"in the future", `{"from_ts":4000000000000,"to_ts":5000000000000}`, at(10_000), "[cpu memory ts]"},
	}
	recorded = append(recorded, HistoryRow{TS: from + 4600, Readings: []prober.Reading{readingOf("fan.rpm", 1)}})
	inBubble(t, Options{History: recorded}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		for _, tt := range tests {
			res := p.ok("query_history", tt.params)
			items, _ := res["items"].([]any)
			var times []int64
			for _, item := range items {
				times = append(times, int64(item.(map[string]any)["ts"].(float64))-from)
			}
			if got := at(times...); got != tt.want || res["ok"] != true {
				t.Errorf("%s: got %v at %s, want %s", tt.name, res, got, tt.want)
				continue
			}
			if got := fmt.Sprint(keys(items[0].(map[string]any))); got != tt.keys {
				t.Errorf("%s: items have %s, want %s", tt.name, got, tt.keys)
			}
		}
		p.ok("start", `{"modules":["cpu"]}`) // what is started is what is meant
		items := p.ok("query_history", `{"from_ts":0,"to_ts":0}`)["items"].([]any)
		if got := fmt.Sprint(keys(items[0].(map[string]any))); got != "[cpu ts]" {
			t.Errorf("with cpu started items have %s", got)
		}
		if err := p.send(`{"jsonrpc":"2.0","method":"query_history","params":{"from_ts":0,"to_ts":0}}`); err != nil {
			t.Fatal(err)
		}
		p.ok("snapshot", "")
		if got := p.take(""); len(got) != 0 {
			t.Errorf("a notification is answered: %v", got)
		}
	})
}

// historyOf is a History that answers each query in the same way.
func historyOf(query func(ctx context.Context, fn func(HistoryRow) error) error) History {
	return &historyFunc{query: func(ctx context.Context, _ int, _ HistoryQuery, fn func(HistoryRow) error) error {
		return query(ctx, fn)
	}}
}

// errCardGone is the error of a disk that was removed.
var errCardGone = errors.New("the card is gone")

// A history that fails after its first row is an error, not a partial answer.
func TestHistoryFails(t *testing.T) {
	tests := []struct {
		name  string
		query func(ctx context.Context, fn func(HistoryRow) error) error
		text  string        // in the error
		takes time.Duration // of the bubble's time
	}{
		{"breaks off", func(_ context.Context, fn func(HistoryRow) error) error {
			return errors.Join(fn(rowAt(1)), errCardGone)
		}, "card is gone", 0},
		{"panics", func(context.Context, func(HistoryRow) error) error { panic("a bug") }, "a bug in the daemon", 0},
		{"takes too long", func(ctx context.Context, _ func(HistoryRow) error) error { <-ctx.Done(); return ctx.Err() }, "step_ms", queryTimeout},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, Options{History: historyOf(tt.query)}, func(t *testing.T, r *rig) {
				begin := time.Now()
				m := r.peer().hello("").call("query_history", `{"from_ts":0,"to_ts":0}`)
				if m.code() != CodeInternal || !strings.Contains(fmt.Sprint(m), tt.text) {
					t.Errorf("got %v, want an internal error with %q", m, tt.text)
				}
				if took := time.Since(begin); took != tt.takes {
					t.Errorf("it took %v, want %v", took, tt.takes)
				}
			})
		})
	}
}

// Without a row, the answer is a snapshot; without a snapshot, it is an error.
func TestHistoryFallsBackToSnapshot(t *testing.T) {
	fails := historyOf(func(context.Context, func(HistoryRow) error) error { return errCardGone })
	for name, history := range map[string]History{"history fails": fails, "no history": nil} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Options{History: history}, func(t *testing.T, r *rig) {
				p := r.peer().hello("")
				items, _ := p.ok("query_history", `{"from_ts":0,"to_ts":0,"modules":["disk"]}`)["items"].([]any)
				if len(items) != 1 {
					t.Fatalf("got %v, want one item", items)
				}
				item := items[0].(map[string]any)
				if item["ts"] != float64(time.Now().UnixMilli()) || fmt.Sprint(keys(item)) != "[disk ts]" {
					t.Errorf("got %v, want the disk now", item)
				}
				r.source.setFail(errors.New("proc is gone"))
				time.Sleep(5 * time.Second) // the newest sample is too old then
				if m := p.call("query_history", `{"from_ts":0,"to_ts":0}`); m.code() != CodeInternal {
					t.Errorf("got %v without a snapshot, want an internal error", m)
				}
			})
		})
	}
}

// Values that JSON does not have, and states that the catalogue does not have, are left out. So are
// rows of nothing else.
func TestHistoryLeavesOutWhatIsNoNumber(t *testing.T) {
	recorded := tape{
		{TS: 1, Sample: &prober.Sample{CPUPct: nan()}},
		{TS: 2, Readings: []prober.Reading{readingOf("wear.used_pct", nan()), readingOf("wear.pre_eol", 7)}},
		rowAt(3),
	}
	inBubble(t, Options{History: recorded}, func(t *testing.T, r *rig) {
		items, _ := r.peer().hello("").ok("query_history", `{"from_ts":0,"to_ts":0,"modules":["cpu","wear"]}`)["items"].([]any)
		if len(items) != 1 || items[0].(map[string]any)["ts"] != 3.0 {
			t.Errorf("got %v, want the item of 3 ms", items)
		}
	})
}

func nan() float64 { var zero float64; return zero / zero }

var errBug = errors.New("a bug")

// TestHistoryStream checks that a long answer has the length that its header announced,
// whatever the history returns in the second pass. With AGENTCTL_SLOW=1 it is longer than maxKeptAnswer.
func TestHistoryStream(t *testing.T) {
	const from = bubbleStart - 20_000_000
	n, kept := 1000, 64<<10 // with four modules, they are 130 KiB
	if slow() {
		n, kept = 7000, 0
	}
	all := seconds(from, n)
	longer := append(tape(nil), all...)
	for i := range longer {
		s := *longer[i].Sample
		s.CPUPct = 33.333333333333
		longer[i].Sample = &s
	}
	tests := []struct {
		name   string
		second tape
		err    error
		check  func(times []int64) bool // nil: the connection is closed
	}{
		{"the same", all, nil, func(times []int64) bool { return len(times) == n }},
		{"the oldest gone", all[n/2:], nil, func(times []int64) bool { return len(times) == n/2 && times[0] == from+int64(n)/2*1000 }},
		{"all gone", nil, nil, func(times []int64) bool { return len(times) == 0 }},
		{"later ones as well", append(all[:n:n], seconds(from+int64(n)*1000, 1000)...), nil, func(times []int64) bool { return len(times) == n }},
		{"earlier ones as well", append(seconds(from-100_000, 100), all...), nil, func(times []int64) bool { return len(times) >= n-1 && times[0] == from-100_000 }},
		{"longer ones", longer, nil, func(times []int64) bool { return len(times) > n/2 && len(times) < n }},
		{"none any more", all[:n/2], errors.New("the card is gone"), nil},
		{"a bug", all[:n/2], errBug, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := &historyFunc{query: func(ctx context.Context, call int, q HistoryQuery, fn func(HistoryRow) error) error {
				if call == 1 { // the count pass, which finds the answer slot free
					return all.Query(ctx, q, fn)
				}
				err := tt.second.Query(ctx, q, fn)
				if tt.err == errBug {
					panic(errBug)
				}
				return errors.Join(err, tt.err)
			}}
			inBubble(t, Options{History: h, keptLimit: kept}, func(t *testing.T, r *rig) {
				p := r.peer().hello(bridge) // so that events want to come in between
				body := fmt.Sprintf(`{"jsonrpc":"2.0","id":"stream me","method":"query_history","params":{"from_ts":%d,"to_ts":0,"modules":["cpu","mem","disk","load"]}}`, from-200_000)
				if err := p.send(body); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				synctest.Wait()
				var got []msg
				for _, m := range p.take("") {
					if m["method"] == nil {
						got = append(got, m)
					}
				}
				if tt.check == nil {
					select {
					case <-p.ended:
					default:
						t.Error("the connection goes on")
					}
					if len(got) != 0 {
						t.Errorf("got %d answers", len(got))
					}
					return
				}
				if len(got) != 1 || got[0]["id"] != "stream me" {
					t.Fatalf("got %d answers", len(got))
				}
				var times []int64
				for _, item := range got[0].result()["items"].([]any) {
					times = append(times, int64(item.(map[string]any)["ts"].(float64)))
				}
				if !tt.check(times) {
					t.Errorf("got %d items", len(times))
				}
				for i := 1; i < len(times); i++ {
					if times[i] <= times[i-1] {
						t.Fatalf("after %d came %d", times[i-1], times[i])
					}
				}
				p.ok("snapshot", "") // and the connection goes on
			})
		})
	}
}

// TestAnswerLimits checks the limits of a server that got none, which tests of long answers replace.
func TestAnswerLimits(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		if o := r.srv.o; o.answerLimit != 16<<20 || o.keptLimit != 1<<20 {
			t.Errorf("an answer has at most %d bytes, of which %d are kept; want 16 MiB and 1 MiB", o.answerLimit, o.keptLimit)
		}
	})
}

// TestHistoryTooLong checks that the step in the error makes the answer short enough. With
// AGENTCTL_SLOW=1 the limit is maxAnswer.
func TestHistoryTooLong(t *testing.T) {
	limit := 2 << 20
	if slow() {
		limit = maxAnswer
	}
	endless := &historyFunc{query: func(ctx context.Context, _ int, q HistoryQuery, fn func(HistoryRow) error) error {
		for ts := int64(1_000_000); ts <= q.ToMS; ts += max(1000, q.StepMS) {
			if err := fn(rowAt(ts)); err != nil {
				return err
			}
		}
		return nil
	}}
	inBubble(t, Options{History: endless, answerLimit: limit}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		m := p.call("query_history", `{"from_ts":0,"to_ts":400000000,"modules":["cpu","mem","disk","load"]}`)
		if m.code() != CodeInvalidParams || m.field() != "step_ms" {
			t.Fatalf("got %v", m)
		}
		detail := m["error"].(map[string]any)["data"].(map[string]any)["detail"].(string)
		var mb, step int
		if _, err := fmt.Sscanf(detail, "the answer would be longer than %d MiB: ask with step_ms %d", &mb, &step); err != nil || mb != limit>>20 || step < 2000 {
			t.Fatalf("%q: %v", detail, err)
		}
		nc := r.dial()
		defer nc.Close()
		in := newFrameReader(nc, maxAnswer)
		n := 0
		for id, body := range []string{
			`"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}`,
			fmt.Sprintf(`"method":"query_history","params":{"from_ts":0,"to_ts":400000000,"modules":["cpu","mem","disk","load"],"step_ms":%d}`, step),
		} {
			nc.Write(frame(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,%s}`, id+1, body)))
			var err error
			if n, err = in.header(); err != nil {
				t.Fatal(err)
			}
			if n < 1<<20 { // not the long one
				in.body(make([]byte, n))
			}
		}
		if n < limit*3/4 || n > limit {
			t.Errorf("with step_ms %d the answer has %d bytes", step, n)
		}
	})
}

// TestOneLongAnswer checks that a client which reads a long answer slowly delays other long
// answers only, and for at most a minute.
func TestOneLongAnswer(t *testing.T) {
	h := seconds(bubbleStart-100_000_000, 13_000) // longer than maxKeptAnswer
	const long, short = `{"from_ts":0,"to_ts":0}`, `{"from_ts":0,"to_ts":0,"limit":10}`
	inBubble(t, Options{History: h}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		slow := r.dial()
		defer slow.Close()
		go func() {
			slow.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
			slow.Write(frame([]byte(`{"jsonrpc":"2.0","id":2,"method":"query_history","params":` + long + `}`)))
		}()
		began := time.Now()
		ended := make(chan time.Duration, 1)
		go func() {
			for { // a chunk each 4 s
				if _, err := io.ReadFull(slow, make([]byte, writeSize+200)); err != nil {
					ended <- time.Since(began)
					return
				}
				time.Sleep(4 * time.Second)
			}
		}()
		time.Sleep(10 * time.Second)
		if m := p.call("query_history", long); m.code() != CodeRateLimited {
			t.Errorf("a second long answer: %v", m["error"])
		}
		if d := time.Since(began); d != 10*time.Second+callTimeout {
			t.Errorf("it was refused after %v", d)
		}
		if items := p.ok("query_history", short)["items"].([]any); len(items) != 10 {
			t.Errorf("a short answer has %d items", len(items))
		}
		if d := <-ended; d < queryTimeout || d > queryTimeout+writeTimeout {
			t.Errorf("the slow reader was cut off after %v", d)
		}
		if items := p.ok("query_history", long)["items"].([]any); len(items) != len(h) {
			t.Errorf("afterwards came %d items", len(items))
		}
	})
}

// TestHangUpEndsQuery checks that a query ends when its client has closed the connection.
func TestHangUpEndsQuery(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan error, 1)
	endless := &historyFunc{query: func(ctx context.Context, _ int, _ HistoryQuery, fn func(HistoryRow) error) (err error) {
		close(begun)
		for err == nil && ctx.Err() == nil {
			err = fn(HistoryRow{TS: 1}) // nothing that counts
		}
		ended <- err
		return err
	}}
	r := onSocket(t, Options{History: endless})
	p := r.peer().hello("")
	p.send(`{"jsonrpc":"2.0","id":1,"method":"query_history","params":{"from_ts":0,"to_ts":0}}`)
	<-begun
	p.nc.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the query ended without a reason")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the query goes on")
	}
}

// TestHalfClosedClientIsAnswered checks that a client which has shut down its writing side
// still gets its answers.
func TestHalfClosedClientIsAnswered(t *testing.T) {
	r := onSocket(t, Options{History: seconds(1_700_000_000_000, 5000)})
	nc := r.dial()
	defer nc.Close()
	nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`)))
	nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":2,"method":"query_history","params":{"from_ts":0,"to_ts":0}}`)))
	nc.(interface{ CloseWrite() error }).CloseWrite()
	b, err := io.ReadAll(nc)
	if err != nil || !bytes.HasSuffix(b, []byte(answerTail)) || bytes.Count(b, []byte(`"ts"`)) != 5000 {
		t.Errorf("got %d bytes with %d items, %v", len(b), bytes.Count(b, []byte(`"ts"`)), err)
	}
}

// dialHistory is a client of a daemon with this history.
func dialHistory(t *testing.T, h History) *Client {
	t.Helper()
	r := onSocket(t, Options{History: h})
	c, err := Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// An item has the values of the modules that were asked for, by their keys.
func TestClientHistory(t *testing.T) {
	h := seconds(1_700_000_000_000, 5)
	h[3].Readings = []prober.Reading{readingOf("power.throttled", 1), readingOf("wear.pre_eol", 2), readingOf("network.errors_in", 3)}
	got, err := dialHistory(t, h).History(t.Context(), HistoryQuery{Modules: []string{"cpu", "power", "wear", "network"}})
	if err != nil || len(got) != len(h) {
		t.Fatalf("got %d items, %v, want %d", len(got), err, len(h))
	}
	for i, item := range got {
		want := map[string]float64{"cpu.usage_percent": h[i].Sample.CPUPct}
		for _, r := range h[i].Readings {
			want[r.Key] = r.Value
		}
		if item.TS != h[i].TS || !maps.Equal(item.Values, want) {
			t.Errorf("item %d is %+v, want %v at %d", i, item, want, h[i].TS)
		}
	}
}

// HistoryEach returns in pages what History returns at once.
func TestClientHistoryPages(t *testing.T) {
	const page = 20
	h := seconds(1_700_000_000_000, 50)
	c := dialHistory(t, h)
	c.page = page
	tests := []HistoryQuery{
		{},
		{ToMS: h[45].TS},
		{FromMS: h[10].TS + 1, ToMS: h[10+page].TS}, // a page
		{FromMS: h[10].TS, ToMS: h[9+page].TS},
		{StepMS: 2000},
		{StepMS: 7000, ToMS: h[45].TS},
		{Limit: 1},
		{Limit: 2 * page},
		{Limit: page + 1, StepMS: 2000},
	}
	for _, q := range tests {
		want, err := c.History(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		var got []HistoryItem
		err = c.HistoryEach(t.Context(), q, func(x HistoryItem) error {
			got = append(got, x)
			return nil
		})
		same := func(a, b HistoryItem) bool { return a.TS == b.TS && maps.Equal(a.Values, b.Values) }
		if err != nil || !slices.EqualFunc(got, want, same) {
			t.Errorf("%+v: %d items in pages, %v, want the %d of one answer", q, len(got), err, len(want))
		}
	}
}

// An empty window has one item in pages as well: the newest readings.
func TestClientHistoryOfEmptyWindow(t *testing.T) {
	n := 0
	err := dialHistory(t, seconds(1_700_000_000_000, 5)).HistoryEach(t.Context(), HistoryQuery{FromMS: 1, ToMS: 2}, func(HistoryItem) error { n++; return nil })
	if err != nil || n != 1 {
		t.Errorf("got %d items, %v, want one", n, err)
	}
}

func TestClientHistoryStops(t *testing.T) {
	enough := errors.New("enough")
	err := dialHistory(t, seconds(1_700_000_000_000, 5)).HistoryEach(t.Context(), HistoryQuery{}, func(HistoryItem) error { return enough })
	if err != enough {
		t.Errorf("got %v, want the error of fn", err)
	}
}
