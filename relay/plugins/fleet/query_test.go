package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// askedFleet is a fleet of boards that answer from memory, as Boards and as the kernel.
type askedFleet struct {
	boards []Board
	tools  map[string][]manifest.Tool

	// answer, if it is set, answers the calls of a board in place of the fleet.
	answer map[string]func(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, error)
	// value is what board i recorded of a metric of system.history at a time; NaN: nothing.
	value func(i int, name string, ms int64) float64

	mu       sync.Mutex
	calls    map[string]int // by kind
	inFlight atomic.Int64
	most     atomic.Int64
	lists    atomic.Int64 // calls of List
	delay    time.Duration
}

func nodeID(i int) string { return fmt.Sprintf("01hzx9k3m4p7q8r9s0t1v%05d", i) }

// newAskedFleet makes n boards with the capabilities metrics, history, modules and info.
func newAskedFleet(t *testing.T, n int) *askedFleet {
	t.Helper()
	f := &askedFleet{tools: make(map[string][]manifest.Tool), calls: make(map[string]int), answer: make(map[string]func(context.Context, manifest.ToolName, []byte) ([]byte, error)),
		value: func(i int, name string, _ int64) float64 {
			if name == "mem_total_bytes" {
				return 200
			}
			return float64(i % 50)
		}}
	for i := range n {
		f.boards = append(f.boards, Board{ID: nodeID(i), Name: fmt.Sprintf("board-%05d", i), NameSet: true, Status: Online})
		f.setTools(t, i, manifest.KindMetrics, manifest.KindHistory, manifest.KindModules, manifest.KindInfo)
	}
	return f
}

// setTools says which kinds a board announces.
func (f *askedFleet) setTools(t *testing.T, i int, kinds ...string) {
	t.Helper()
	var list []manifest.Tool
	for _, name := range kinds {
		k, _ := manifest.LookupKind(name)
		c := manifest.Capability{CapID: name[strings.IndexByte(name, '.')+1:], Kind: name, SchemaRef: k.Verbs[0].Input, SafetyClass: manifest.ReadOnly, Constraints: manifest.DefaultConstraints}
		for _, v := range k.Verbs {
			c.Verbs = append(c.Verbs, v.Name)
		}
		tools, err := manifest.Project(nodeID(i), &c)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, tools...)
	}
	f.tools[nodeID(i)] = list
}

func (f *askedFleet) Lookup(_, ref string) (Board, bool) {
	for _, b := range f.boards {
		if b.ID == ref || b.Name == ref {
			return b, true
		}
	}
	return Board{}, false
}

func (f *askedFleet) List(string) []Board {
	f.lists.Add(1)
	return slices.Clone(f.boards)
}

func (f *askedFleet) Tools(_ context.Context, _, nodeID string) ([]manifest.Tool, error) {
	return f.tools[nodeID], nil
}

func (f *askedFleet) Protocol(string) string { return "v2.1" }

func (f *askedFleet) Frame(string) ([]byte, time.Time, bool) { return nil, time.Time{}, false }

// call is the kernel of the fleet.
func (f *askedFleet) call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	name, ok := manifest.ParseToolName(r.Tool)
	if !ok {
		return nil, errors.New("a tool of no board: " + r.Tool)
	}
	now := f.inFlight.Add(1)
	defer f.inFlight.Add(-1)
	for most := f.most.Load(); now > most && !f.most.CompareAndSwap(most, now); most = f.most.Load() {
	}
	f.mu.Lock()
	f.calls[name.CapID]++
	f.mu.Unlock()
	if f.delay > 0 {
		time.Sleep(f.delay)
	}
	answer := f.answer[name.NodeID]
	if answer == nil {
		answer = f.answerFromMemory
	}
	data, err := answer(ctx, name, r.Arguments)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: data}, nil
}

func (f *askedFleet) answerFromMemory(_ context.Context, tool manifest.ToolName, args []byte) ([]byte, error) {
	var i int
	_, _ = fmt.Sscanf(tool.NodeID[21:], "%d", &i)
	switch tool.CapID {
	case "metrics":
		v := func(name string) float64 { return f.value(i, name, time.Now().UnixMilli()) }
		return fmt.Appendf(nil, `{"cpu_pct":%v,"mem_bytes":%v,"mem_total_bytes":200,"disk_pct":%v,"load_1m":0,"load_5m":0,"load_15m":0}`,
			v("cpu.usage_percent"), v("mem_bytes"), v("disk.usage_percent")), nil
	case "modules":
		return fmt.Appendf(nil, `{"temperature":{"hottest_c":%v,"zones":[]},"unavailable":[]}`, f.value(i, "temperature.hottest_c", time.Now().UnixMilli())), nil
	case "info":
		return fmt.Appendf(nil, `{"model":"Model %d"}`, i%3), nil
	}
	return f.history(i, args)
}

// history answers system.history as a board does.
func (f *askedFleet) history(i int, args []byte) ([]byte, error) {
	var in struct {
		From    int64    `json:"from_ms"`
		To      int64    `json:"to_ms"`
		Step    int64    `json:"step_ms"`
		Metrics []string `json:"metrics"`
	}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, err
	}
	columns := make(map[string][]*float64)
	for _, name := range in.Metrics {
		list := []*float64{}
		for at := in.From; at < in.To; at += in.Step {
			if v := f.value(i, name, min(at+in.Step, in.To)-1); math.IsNaN(v) {
				list = append(list, nil)
			} else {
				list = append(list, &v)
			}
		}
		columns[name] = list
	}
	return json.Marshal(map[string]any{"from_ms": in.From, "step_ms": in.Step, "metrics": columns})
}

// ask calls fleet.query and checks the bounds of every answer.
func (f *askedFleet) ask(t *testing.T, p *Plugin, args string) (a queryResult, err error) {
	t.Helper()
	checked, err := queryInput.Check([]byte(args))
	if err != nil {
		t.Fatalf("%s: %v", args, err)
	}
	began := time.Now()
	res, err := p.query(t.Context(), &kernel.Request{Caller: &kernel.Caller{Tenant: "a", Actor: "agent"}, Arguments: checked})
	if took := time.Since(began); took > kernel.CallBudget-200*time.Millisecond {
		t.Errorf("%s took %v", args, took)
	}
	if err != nil {
		return a, err
	}
	if n := len(res.Structured); n > MaxAnswer {
		t.Errorf("%s: an answer of %d bytes", args, n)
	}
	if err := json.Unmarshal(res.Structured, &a); err != nil {
		t.Fatal(err)
	}
	return a, nil
}

func (f *askedFleet) mustAsk(t *testing.T, p *Plugin, args string) queryResult {
	t.Helper()
	a, err := f.ask(t, p, args)
	if err != nil {
		t.Fatalf("%s: %v", args, err)
	}
	return a
}

func (f *askedFleet) plugin() *Plugin { return New(Options{Call: f.call, Boards: f}) }

// queryResult is queryAnswer as a client reads it.
type queryResult struct {
	At, From, To, Aggregate string
	Boards                  struct {
		Matched, Answered int
		Missing           map[string]struct {
			N      int
			Boards []string
		}
	}
	Figures map[string]struct {
		N                      int
		Mean, Min, Median, Max float64
	}
	Top []struct {
		Name, ID    string
		Values      map[string]float64
		Since       string
		SinceBefore string `json:"since_before"`
		Until       string
		Level       float64
	}
	Outliers []struct {
		Name, Metric string
		Value        float64
	}
	More   int `json:"more_outliers"`
	Groups []struct {
		Group   string
		N       int
		Figures map[string]struct{ Mean float64 }
	}
	Series struct {
		StepS  int64 `json:"step_s"`
		Values map[string][]*float64
	}
}

// "Which three boards are hottest and since when?" is one call, over a thousand boards, and its link
// traffic is little.
func TestHottestSinceWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour) // of virtual time: the day before is one, too
		f := newAskedFleet(t, 1000)
		began := time.Now()
		fanFailed := map[int]time.Duration{17: 3 * time.Hour, 500: 20 * time.Hour, 999: 30 * time.Hour}
		f.value = func(i int, name string, ms int64) float64 {
			if ago, ok := fanFailed[i]; ok && ms >= began.Add(-ago).UnixMilli() {
				return 80 + float64(i)/1000
			}
			return 40 + float64(i%10)
		}
		most := 0
		bytes := make(map[string]int)
		var mu sync.Mutex
		for _, b := range f.boards {
			f.answer[b.ID] = func(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, error) {
				out, err := f.answerFromMemory(ctx, tool, args)
				mu.Lock()
				defer mu.Unlock()
				bytes[tool.NodeID] += len(args) + len(out)
				most = max(most, bytes[tool.NodeID])
				return out, err
			}
		}
		for _, args := range []string{`{"metrics":["temperature_c"],"top":3}`, `{"metrics":["temperature_c"],"from":"24h","aggregate":"max","top":3}`} {
			clear(bytes)
			most = 0
			a := f.mustAsk(t, f.plugin(), args)
			if a.Boards.Matched != 1000 || a.Boards.Answered != 1000 || a.Figures["temperature_c"].Median != 45 || a.Figures["temperature_c"].N != 1000 {
				t.Errorf("%s: %+v", args, a)
			}
			var names []string
			for _, top := range a.Top {
				names = append(names, top.Name)
			}
			if !slices.Equal(names, []string{"board-00999", "board-00500", "board-00017"}) {
				t.Fatalf("%s: the hottest are %v", args, names)
			}
			if a.Top[0].Since != "" || a.Top[0].SinceBefore != began.Add(-24*time.Hour).UTC().Format(time.RFC3339) {
				t.Errorf("%s: hot since before yesterday: %+v", args, a.Top[0])
			}
			for i, ago := range map[int]time.Duration{1: 20 * time.Hour, 2: 3 * time.Hour} {
				since, err := time.Parse(time.RFC3339, a.Top[i].Since)
				if off := since.Sub(began.Add(-ago)); err != nil || off.Abs() > 5*time.Minute || a.Top[i].Until != "" || a.Top[i].Level < 60 {
					t.Errorf("%s: %+v is off by %v: %v", args, a.Top[i], off, err)
				}
			}
			if most > 4<<10 {
				t.Errorf("%s: %d bytes of a board", args, most)
			}
		}
	})
}

// A window that is over says when the values fell again, and the lowest boards are named as well.
func TestUntilAndLowest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour)
		f := newAskedFleet(t, 20)
		now := time.Now()
		f.value = func(i int, _ string, ms int64) float64 {
			ago := now.Sub(time.UnixMilli(ms))
			switch {
			case i == 3 && ago > 5*time.Hour && ago < 7*time.Hour:
				return 90
			case i == 4:
				return 2
			}
			return 30
		}
		p := f.plugin()
		a := f.mustAsk(t, p, `{"metrics":["cpu_pct"],"from":"24h","step":"1h","aggregate":"max","top":1}`)
		since, _ := time.Parse(time.RFC3339, a.Top[0].Since)
		until, _ := time.Parse(time.RFC3339, a.Top[0].Until)
		if a.Top[0].Name != "board-00003" || now.Sub(since).Round(10*time.Minute) != 7*time.Hour || now.Sub(until).Round(10*time.Minute) != 5*time.Hour {
			t.Errorf("%+v", a.Top)
		}
		if a := f.mustAsk(t, p, `{"metrics":["cpu_pct"],"top":-1}`); len(a.Top) != 1 || a.Top[0].Name != "board-00004" || a.Top[0].SinceBefore == "" {
			t.Errorf("the lowest: %+v", a.Top)
		}
		// A board that is like the others has been so always: no time is named.
		if a := f.mustAsk(t, p, `{"metrics":["cpu_pct"],"top":2}`); len(a.Top) != 2 || a.Top[1].Since+a.Top[1].SinceBefore != "" {
			t.Errorf("the usual: %+v", a.Top)
		}
	})
}

// Figures of a moment ago are not asked for again; half a minute later they are. A frame is enough for
// what it has, and what the board recorded a moment ago for the rest.
func TestNowIsWarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 30)
		p := f.plugin()
		ask := func(args, tool string, wantCalls int) {
			t.Helper()
			clear(f.calls)
			a := f.mustAsk(t, p, args)
			if f.calls[tool] != wantCalls || len(f.calls) > min(1, wantCalls) {
				t.Errorf("%v, want %d of %s", f.calls, wantCalls, tool)
			}
			if a.Figures["mem_pct"].Max != 14.5 || a.Boards.Answered != 30 {
				t.Errorf("%+v", a)
			}
		}
		ask(`{"metrics":["mem_pct"]}`, "metrics", 30)
		ask(`{"metrics":["mem_pct","disk_pct"]}`, "metrics", 0)
		ask(`{}`, "history", 30)
		time.Sleep(29 * time.Second)
		ask(`{}`, "history", 0)
		time.Sleep(2 * time.Second)
		ask(`{}`, "history", 30)
	})
}

// Boards without a history, and those that do not record a module, are asked to read it; older boards
// cannot.
func TestNowIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 5)
		f.setTools(t, 0, manifest.KindMetrics, manifest.KindHistory)
		f.setTools(t, 1, manifest.KindMetrics, manifest.KindModules)
		f.setTools(t, 2, manifest.KindMetrics)
		f.setTools(t, 3)
		f.value = func(i int, name string, ms int64) float64 {
			if i == 4 && ms < time.Now().UnixMilli() { // it was recorded long ago
				return math.NaN()
			}
			return 7
		}
		a := f.mustAsk(t, f.plugin(), `{"metrics":["temperature_c"]}`)
		if a.Boards.Answered != 3 || a.Boards.Missing["no_history"].N != 2 || f.calls["modules"] != 2 || f.calls["history"] != 2 {
			t.Errorf("%+v after %v", a, f.calls)
		}
		// Wear is recorded once an hour.
		f.value = func(i int, name string, ms int64) float64 {
			if name == "wear.pre_eol" && time.Since(time.UnixMilli(ms)) > time.Minute/2 {
				return 2
			}
			return math.NaN()
		}
		if a := f.mustAsk(t, f.plugin(), `{"metrics":["wear_pre_eol"],"boards":["board-00000"]}`); a.Figures["wear_pre_eol"].Max != 3 {
			t.Errorf("%+v", a)
		}
		f.value = func(int, string, int64) float64 { return 7 }
		if a := f.mustAsk(t, f.plugin(), `{"metrics":["cpu_pct"]}`); a.Boards.Answered != 4 || a.Boards.Missing["not_measured"].N != 1 {
			t.Errorf("%+v", a)
		}
	})
}

// Boards that never answer, answer late, lie, refuse or are gone are counted with the reason and some
// names; they do not change the figures of the others, nor do they hold the call up.
func TestHostileBoards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour)
		f := newAskedFleet(t, 300)
		f.value = func(int, string, int64) float64 { return 20 }
		set := func(from, to int, answer func(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, error)) {
			for i := from; i < to; i++ {
				f.answer[nodeID(i)] = answer
			}
		}
		fail := func(e *manifest.Error) func(context.Context, manifest.ToolName, []byte) ([]byte, error) {
			return func(context.Context, manifest.ToolName, []byte) ([]byte, error) { return nil, e }
		}
		answer := func(format string) func(context.Context, manifest.ToolName, []byte) ([]byte, error) {
			return func(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, error) {
				var in struct {
					From int64 `json:"from_ms"`
					Step int64 `json:"step_ms"`
				}
				err := json.Unmarshal(args, &in)
				return []byte(strings.NewReplacer("FROM", fmt.Sprint(in.From), "STEP", fmt.Sprint(in.Step)).Replace(format)), err
			}
		}
		set(0, 150, func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, error) { // never
			<-ctx.Done()
			return nil, &manifest.Error{Code: manifest.DeadlineExceeded, Reason: "gateway_deadline"}
		})
		set(150, 160, answer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[1,2,3,4,5]}}`))
		set(160, 170, answer(`{"from_ms":0,"step_ms":1000,"metrics":{"cpu.usage_percent":[1]}}`))
		set(170, 180, answer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"load.load_1m":[1]}}`))
		set(180, 190, answer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[1e300]}}`)) // impossible
		set(190, 195, answer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[null]}}`))
		set(195, 200, answer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[]},"next_cursor":"7"}`)) // never done
		set(200, 205, fail(&manifest.Error{Code: manifest.NodeOffline, Reason: "suspect"}))
		set(205, 210, fail(&manifest.Error{Code: manifest.NodeOffline, Reason: "offline"}))
		set(210, 215, fail(&manifest.Error{Code: manifest.RateLimited, Reason: "rate"}))
		set(215, 220, fail(&manifest.Error{Code: manifest.SafetyDenied, Reason: "acl_rule_1"}))
		set(220, 225, fail(&manifest.Error{Code: manifest.Internal, Reason: "device"}))
		set(225, 230, fail(&manifest.Error{Code: manifest.Internal, Reason: "bad_result"}))
		set(230, 235, answer(`{"from_ms":`))
		f.boards[240].Status, f.boards[241].Status = Offline, Suspect
		f.setTools(t, 242, manifest.KindMetrics)
		a := f.mustAsk(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h"}`)
		want := map[string]int{missingLate: 155, missingBad: 40, missingData: 15, missingSilent: 6, missingOffline: 6, missingBusy: 5, missingDenied: 5, missingError: 5, missingHistory: 1}
		for why, n := range want {
			if got := a.Boards.Missing[why].N; got != n {
				t.Errorf("%s: %d boards, want %d", why, got, n)
			}
		}
		if len(a.Boards.Missing) != len(want) || a.Boards.Answered != 300-238 {
			t.Errorf("%+v", a.Boards)
		}
		if c := a.Figures["cpu_pct"]; c.N != a.Boards.Answered || c.Min != 20 || c.Max != 20 {
			t.Errorf("%+v", a.Figures)
		}
	})
}

// However many boards are silent, the call ends in time and the others are in the answer, as far as
// they could be asked.
func TestSilentFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 5000)
		for i := range f.boards {
			if i%100 != 0 {
				f.answer[nodeID(i)] = func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, error) {
					<-ctx.Done()
					return nil, context.Cause(ctx)
				}
			}
		}
		p := f.plugin()
		for _, args := range []string{`{"metrics":["cpu_pct"]}`, `{"metrics":["cpu_pct"],"from":"1h"}`} {
			a := f.mustAsk(t, p, args)
			if a.Boards.Answered < 5 || a.Boards.Missing[missingTime].N == 0 || a.Boards.Missing[missingLate].N < 64 {
				t.Errorf("%s: %+v", args, a.Boards)
			}
		}
		if most := f.most.Load(); most > maxAsked+maxSlow {
			t.Errorf("%d boards were asked at a time", most)
		}
	})
}

// All callers of a tenant together ask so many boards at a time, and one identity has a few calls.
func TestSlotsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 200)
		f.delay = 10 * time.Millisecond
		p := f.plugin()
		var wg sync.WaitGroup
		var limited, answered atomic.Int64
		for range 8 {
			wg.Go(func() {
				a, err := f.ask(t, p, `{"metrics":["cpu_pct"],"from":"1h"}`)
				switch e := manifest.AsError(err); {
				case err == nil && a.Boards.Answered == 200:
					answered.Add(1)
				case err != nil && e.Code == manifest.RateLimited:
					limited.Add(1)
				default:
					t.Errorf("%+v, %v", a.Boards, err)
				}
			})
		}
		wg.Wait()
		if limited.Load() != 8-maxAskingCalls || answered.Load() != maxAskingCalls {
			t.Errorf("%d calls answered, %d limited", answered.Load(), limited.Load())
		}
		if most := f.most.Load(); most > maxAsked {
			t.Errorf("%d boards were asked at a time", most)
		}
		if len(p.slots.tenants) != 0 || len(p.used) != 0 {
			t.Error("slots are left behind")
		}
	})
}

// A board with a slow card is asked for smaller parts, and for the rest of a page that it cut.
func TestSlowBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour)
		f := newAskedFleet(t, 1)
		f.value = func(_ int, _ string, ms int64) float64 { return float64(ms / 1000 % 90) }
		f.answer[nodeID(0)] = func(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, error) {
			var in struct {
				From    int64    `json:"from_ms"`
				To      int64    `json:"to_ms"`
				Step    int64    `json:"step_ms"`
				Metrics []string `json:"metrics"`
				Cursor  string   `json:"cursor"`
			}
			if err := json.Unmarshal(args, &in); err != nil {
				return nil, err
			}
			if in.Step > (4 * time.Hour).Milliseconds() {
				return nil, &manifest.Error{Code: manifest.DeadlineExceeded, Reason: "device"}
			}
			start := in.From
			if in.Cursor != "" {
				_, _ = fmt.Sscan(in.Cursor, &start)
			}
			page := map[string]any{"from_ms": start, "step_ms": in.Step}
			var list []float64
			for ; start < in.To && len(list) < 5; start += in.Step {
				list = append(list, float64(10+start/in.Step%2))
			}
			if start < in.To {
				page["next_cursor"] = fmt.Sprint(start)
			}
			page["metrics"] = map[string]any{in.Metrics[0]: list}
			return json.Marshal(page)
		}
		a := f.mustAsk(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h"}`)
		if a.Boards.Answered != 1 || a.Figures["cpu_pct"].Mean != 10.5 || f.calls["history"] != 4 {
			t.Errorf("%+v after %v calls", a, f.calls)
		}
	})
}

// Groups, a series and outliers fit into the answer of any fleet, whatever its names are.
func TestAnswersFit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour)
		const boards = 1000
		f := newAskedFleet(t, boards)
		long := strings.Repeat("n", 27)
		for i := range f.boards {
			b := &f.boards[i]
			b.Name = fmt.Sprintf("%s%05d", long, i)
			for j := range 16 {
				b.Tags = append(b.Tags, fmt.Sprintf("%s-%d", strings.Repeat("t", 20), (i+j*7)%97))
			}
			if i%9 == 0 {
				b.Status = []Status{Offline, Suspect}[i%2]
			}
		}
		f.value = func(i int, name string, _ int64) float64 {
			if i%50 == 1 {
				return 99.99
			}
			return 20.12 + float64(len(name)%3)
		}
		all := `"metrics":["cpu_pct","mem_bytes","temperature_c","disk_pct"]`
		a := f.mustAsk(t, f.plugin(), `{`+all+`,"from":"24h","aggregate":"max","top":10,"group_by":"tag"}`)
		if len(a.Top) == 0 || len(a.Figures) != 4 || a.Boards.Matched != boards {
			t.Errorf("%+v", a)
		}
		a = f.mustAsk(t, f.plugin(), `{`+all+`,"from":"24h","step":"48m"}`)
		if n := len(a.Series.Values["cpu_pct"]); n != 30 || a.Series.StepS != 48*60 {
			t.Errorf("a series of %d", n)
		}
		a = f.mustAsk(t, f.plugin(), `{"group_by":"model","metrics":["cpu_pct"]}`)
		if len(a.Groups) < 4 || a.Groups[0].N < boards/4 || a.Groups[0].Figures["cpu_pct"].Mean == 0 {
			t.Errorf("%+v", a.Groups)
		}
		a = f.mustAsk(t, f.plugin(), `{"group_by":"status","metrics":["cpu_pct"]}`)
		if len(a.Groups) != 3 || a.Groups[0].Group != "online" {
			t.Errorf("%+v", a.Groups)
		}
	})
}

// Selectors name boards, tags and statuses; one that matches nothing is an error that says what there
// is.
func TestSelectors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 20)
		f.boards[3].Tags, f.boards[4].Tags, f.boards[5].Status = []string{"roof"}, []string{"roof", "lab"}, Offline
		p := f.plugin()
		for selector, want := range map[string]int{
			`"all"`: 20, `"board-00007"`: 1, `"BOARD-00007"`: 1, `"` + nodeID(9) + `"`: 1, `"tag:roof"`: 2, `"status:offline"`: 1,
			`"tag:lab","board-00004","board-00001"`: 2, `"` + nodeID(1)[:26] + `"`: 1,
		} {
			if a := f.mustAsk(t, p, `{"boards":[`+selector+`]}`); a.Boards.Matched != want {
				t.Errorf("%s: %d boards, want %d", selector, a.Boards.Matched, want)
			}
		}
		for selector, want := range map[string]string{
			"tag:cellar": "there are lab, roof", "status:suspect": "no board is suspect now", "status:gone": "online, suspect or offline", "attic": "fleet.find",
		} {
			if _, err := f.ask(t, p, `{"boards":["`+selector+`"]}`); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", selector, err, want)
			}
		}
		starts := make([]string, 64)
		for i := range starts {
			starts[i] = `"` + nodeID(0)[:20] + `"`
		}
		f.boards, f.lists = f.boards[:1], atomic.Int64{}
		if a := f.mustAsk(t, p, `{"boards":[`+strings.Join(starts, ",")+`]}`); a.Boards.Matched != 1 || f.lists.Load() != 1 {
			t.Errorf("64 starts of ids: %d boards of %d lists", a.Boards.Matched, f.lists.Load())
		}
		f.boards = nil
		if _, err := f.ask(t, p, `{}`); err == nil || !strings.Contains(err.Error(), "agentctl invite") {
			t.Errorf("no boards: %v", err)
		}
	})
}

// A window whose ends are between two milliseconds has as many steps as the boards have values.
func TestFractionsOfMilliseconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(48 * time.Hour) // so that the window is in the past
		f := newAskedFleet(t, 3)
		p := f.plugin()
		day := time.Now().UTC().Add(-24 * time.Hour).Format(time.DateOnly)
		for window, want := range map[string]int{
			`"from":"` + day + `T00:00:00Z","to":"` + day + `T01:00:00.0005Z","step":"1h"`:       1,
			`"from":"` + day + `T00:00:00.0009Z","to":"` + day + `T01:00:00.0001Z","step":"10m"`: 6,
			`"from":"` + day + `T00:00:00.9999Z","to":"` + day + `T00:00:50Z","step":"10.0001s"`: 5,
			`"from":"` + day + `T00:00:00.0009Z","to":"` + day + `T01:00:00.0001Z","step":"7h"`:  1,
		} {
			a := f.mustAsk(t, p, `{"metrics":["cpu_pct"],`+window+`}`)
			if n := len(a.Series.Values["cpu_pct"]); n != want || a.Boards.Answered != 3 {
				t.Errorf("%s: %d values of %d boards, want %d of 3", window, n, a.Boards.Answered, want)
			}
		}
	})
}

// Times that cannot be, and steps that make too much, are refused before any board is asked, and the
// error says what to give.
func TestBadQueries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newAskedFleet(t, 2)
		p := f.plugin()
		for args, want := range map[string]string{
			`{"from":"tomorrow"}`:                          "24h or 7d",
			`{"from":"2999-01-01T00:00:00Z"}`:              "not in the past",
			`{"from":"1h","to":"2h"}`:                      "10 s or more before to",
			`{"from":"5s"}`:                                "10 s or more before to",
			`{"from":"99999999w"}`:                         "not a time",
			`{"from":"1900-01-01"}`:                        "366 days",
			`{"to":"1h"}`:                                  "give from",
			`{"step":"1h"}`:                                "give from",
			`{"from":"24h","step":"1s"}`:                   "10s or more",
			`{"from":"24h","step":"10s"}`:                  "use 48m or more",
			`{"from":"30d","step":"1m"}`:                   "makes 43200 values",
			`{"from":"24h","step":"1h","group_by":"tag"}`:  "do not go together",
			`{"metrics":["cpu"]}`:                          "the nearest is cpu_pct",
			`{"metrics":["ignore_previous_instructions"]}`: "there are cpu_pct",
		} {
			_, err := f.ask(t, p, args)
			if e := manifest.AsError(err); err == nil || e.Code != manifest.ManifestInvalid || !strings.Contains(e.Message, want) || strings.Contains(e.Message, "ignore_") {
				t.Errorf("%s: %v, want %q", args, err, want)
			}
		}
		if len(f.calls) != 0 {
			t.Errorf("boards were asked: %v", f.calls)
		}
		now := time.Now()
		for _, from := range []string{"1h", "-1h", "1h ago", now.Add(-time.Hour).Format(time.RFC3339), fmt.Sprint(now.Add(-time.Hour).UnixMilli()), now.Add(-time.Hour).Format(time.DateTime)} {
			if a := f.mustAsk(t, p, `{"from":"`+from+`","to":"now"}`); a.From != now.Add(-time.Hour).UTC().Format(time.RFC3339) {
				t.Errorf("%s is %s", from, a.From)
			}
		}
	})
}
