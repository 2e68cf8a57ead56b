package handlers_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober/history"
)

const historyOut = "mcp://schemas/system.history.query.output@1.0.0"

// recorded is a history with a value for each step that has says has one.
type recorded struct {
	oldest int64
	value  float64
	has    func(start int64) bool
	delay  time.Duration // of each step
	err    error
	asked  handlers.HistoryQuery
}

func (r *recorded) Oldest(context.Context) int64 { return r.oldest }

func (r *recorded) Series(ctx context.Context, q handlers.HistoryQuery, fn func(int64, []float64) error) error {
	r.asked = q
	for start := q.FromMS; start < q.EndMS; start += q.StepMS {
		if r.delay > 0 {
			time.Sleep(r.delay)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		values := slices.Repeat([]float64{r.value}, len(q.Metrics))
		values[len(values)-1] = math.NaN()
		if r.has != nil && !r.has(start) {
			continue
		}
		if err := fn(start, values); err != nil {
			return err
		}
	}
	return r.err
}

// result is the output of query.
type result struct {
	FromMS  int64                 `json:"from_ms"`
	StepMS  int64                 `json:"step_ms"`
	Metrics map[string][]*float64 `json:"metrics"`
	Next    string                `json:"next_cursor"`
}

// queryHistory calls the handler through a Mux and checks its answer against the schema.
func queryHistory(t *testing.T, r handlers.Recorded, args string) (out result, raw []byte, err error) {
	t.Helper()
	m := mux(t, handlers.Options{}, handlers.NewHistory(r, fixed(now, true)))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	raw, _, err = m.Call(ctx, tool(t, "syshist.NODE.history.query"), []byte(args))
	if err != nil {
		return out, nil, err
	}
	if err := manifest.CheckResult(historyOut, raw, node); err != nil {
		t.Fatalf("%.200s: %v", raw, err)
	}
	if len(raw) > 60<<10 {
		t.Errorf("a page of %d bytes", len(raw))
	}
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}
	return out, raw, nil
}

func TestHistoryOnTheWire(t *testing.T) {
	r := &recorded{value: 2.5, has: func(start int64) bool { return start != now-4000 }}
	out := func(args string) string {
		_, raw, err := queryHistory(t, r, args)
		if err != nil {
			return err.Error()
		}
		return string(raw)
	}
	args := fmt.Sprintf(`{"from_ms":%d,"to_ms":0,"step_ms":2000,"metrics":["cpu_pct","wear.used_pct"]}`, now-6000)
	want := fmt.Sprintf(`{"from_ms":%d,"step_ms":2000,"metrics":{"cpu_pct":[2.5,null,2.5,2.5],"wear.used_pct":[null,null,null,null]}}`, now-6000)
	if got := out(args); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if r.asked.Aggregate != "last" || r.asked.EndMS != now+1 {
		t.Errorf("asked %+v", r.asked)
	}
	// The window ends with the present, and begins with the first record after many empty steps.
	r.oldest = now - 2500
	args = fmt.Sprintf(`{"from_ms":%d,"to_ms":%d,"step_ms":2000,"metrics":["cpu_pct","load_1m"],"aggregate":"mean"}`, now-4_000_000, int64(now)*2)
	want = fmt.Sprintf(`{"from_ms":%d,"step_ms":2000,"metrics":{"cpu_pct":[null,2.5,2.5],"load_1m":[null,null,null]}}`, now-4000)
	if got := out(args); got != want || r.asked.Aggregate != "mean" {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	r.oldest = 1 << 53 // nothing was recorded
	r.has = func(int64) bool { return false }
	if got := out(args); got != fmt.Sprintf(`{"from_ms":%d,"step_ms":2000,"metrics":{"cpu_pct":[null],"load_1m":[null]}}`, now) {
		t.Errorf("got  %s", got)
	}
	future := fmt.Sprintf(`{"from_ms":%d,"to_ms":0,"step_ms":1000,"metrics":["cpu_pct","load_1m"]}`, now+5)
	if got := out(future); got != fmt.Sprintf(`{"from_ms":%d,"step_ms":1000,"metrics":{"cpu_pct":[],"load_1m":[]}}`, now+5) {
		t.Errorf("a window in the future: %s", got)
	}
}

func TestHistoryRefuses(t *testing.T) {
	r := &recorded{}
	for _, args := range []string{
		`{"from_ms":2000,"to_ms":2000,"step_ms":1000,"metrics":["cpu_pct"]}`,
		`{"from_ms":2000,"to_ms":9000,"step_ms":2000,"metrics":["cpu_pct"],"cursor":"5000"}`,
		`{"from_ms":2000,"to_ms":9000,"step_ms":2000,"metrics":["cpu_pct"],"cursor":"0"}`,
		`{"from_ms":2000,"to_ms":9000,"step_ms":2000,"metrics":["cpu"]}`,
	} {
		_, _, err := queryHistory(t, r, args)
		wantCode(t, args, err, manifest.ManifestInvalid)
	}
	const args = `{"from_ms":2000,"to_ms":9000,"step_ms":2000,"metrics":["cpu_pct"]}`
	r.err = errors.New("broken")
	_, _, err := queryHistory(t, r, args)
	wantCode(t, "a broken store", err, manifest.Internal)
	m := mux(t, handlers.Options{}, handlers.NewHistory(r, fixed(0, false)))
	_, _, err = m.Call(t.Context(), tool(t, "syshist.NODE.history.query"), []byte(args))
	wantCode(t, "no clock", err, manifest.Internal)
}

// pages reads a window to its end and returns all values of a metric and the pages.
func pages(t *testing.T, r handlers.Recorded, from, to, step int64, metrics []string) (values []*float64, count int) {
	t.Helper()
	cursor := ""
	for next := from; ; count++ {
		args, _ := json.Marshal(map[string]any{"from_ms": from, "to_ms": to, "step_ms": step, "metrics": metrics, "aggregate": "max"})
		if cursor != "" {
			args = fmt.Appendf(args[:len(args)-1], `,"cursor":%q}`, cursor)
		}
		out, _, err := queryHistory(t, r, string(args))
		if err != nil {
			t.Fatal(err)
		}
		page := out.Metrics[metrics[0]]
		if out.FromMS != next || len(page) > 1500 {
			t.Fatalf("page %d is of %d with %d values, want %d", count, out.FromMS, len(page), next)
		}
		next += int64(len(page)) * step
		values = append(values, page...)
		if out.Next == "" {
			return values, count + 1
		}
		if out.Next != fmt.Sprint(next) {
			t.Fatalf("page %d: next_cursor %s, want %d", count, out.Next, next)
		}
		cursor = out.Next
	}
}

// A window is the same however many pages it takes: short for all metrics, of 1,500 values for
// one, and by time when the disk is slow.
func TestHistoryPages(t *testing.T) {
	const from = now - 5000*1000 - 500
	odd := func(start int64) bool { return (start-from)/1000%5 != 0 }
	check := func(values []*float64) {
		t.Helper()
		if len(values) != 5001 {
			t.Fatalf("%d values", len(values))
		}
		for i, v := range values {
			if (v != nil) != (i%5 != 0) {
				t.Fatalf("value %d is %v", i, v)
			}
		}
	}
	values, n := pages(t, &recorded{value: 3, has: odd}, from, 0, 1000, []string{"cpu_pct", "load_1m"})
	if check(values); n != 4 {
		t.Errorf("%d pages", n)
	}
	values, n = pages(t, &recorded{value: 123456789.125, has: odd}, from, 0, 1000, history.MetricNames())
	if check(values); n < 20 || n > 25 {
		t.Errorf("%d pages of all metrics", n)
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		values, n := pages(t, &recorded{value: 3, has: odd, delay: 10 * time.Millisecond}, from, 0, 1000, []string{"cpu_pct", "load_1m"})
		took := time.Since(start) / time.Duration(n)
		if check(values); n != 28 || took > 1850*time.Millisecond {
			t.Errorf("%d pages of %v", n, took)
		}
		_, _, err := queryHistory(t, &recorded{delay: 3 * time.Second}, `{"from_ms":0,"to_ms":9000,"step_ms":2000,"metrics":["cpu_pct"]}`)
		wantCode(t, "one slow step", err, manifest.DeadlineExceeded)
	})
}

// The schemas name exactly the metrics of the history, in the order of its list.
func TestHistoryMetrics(t *testing.T) {
	var in struct {
		Properties struct {
			Metrics struct {
				MaxItems int
				Items    struct{ Enum []string }
			}
		}
	}
	var out struct {
		Properties struct {
			Metrics struct {
				MaxProperties int
				PropertyNames struct{ Enum []string }
			}
		}
	}
	for name, v := range map[string]any{"input": &in, "output": &out} {
		raw, _ := manifest.Schema("system.history.query." + name + "@1.0.0")
		if err := json.Unmarshal(raw, v); err != nil {
			t.Fatal(err)
		}
	}
	want := slices.Sorted(slices.Values(history.MetricNames()))
	for _, got := range [][]string{in.Properties.Metrics.Items.Enum, out.Properties.Metrics.PropertyNames.Enum} {
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("a schema names %v, the history has %v", got, want)
		}
	}
	if in.Properties.Metrics.MaxItems != len(want) || out.Properties.Metrics.MaxProperties != len(want) {
		t.Errorf("at most %d and %d metrics, want %d", in.Properties.Metrics.MaxItems, out.Properties.Metrics.MaxProperties, len(want))
	}
}
