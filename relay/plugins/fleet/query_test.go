package fleet

import (
	"context"
	"encoding/json"
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
)

// wantSince checks from when to when a board of the top is said to be as it is; a zero time is none. The
// times are those of steps of the history: 5 minutes of a day.
func wantSince(t *testing.T, b topBoard, since, until time.Time) {
	t.Helper()
	for _, tt := range []struct {
		name, got string
		want      time.Time
	}{{"since", b.Since, since}, {"until", b.Until, until}} {
		got, err := time.Parse(time.RFC3339, tt.got)
		switch {
		case tt.want.IsZero() && tt.got != "":
			t.Errorf("%s: %s %s, want none", b.Name, tt.name, tt.got)
		case !tt.want.IsZero() && (err != nil || got.Sub(tt.want).Abs() > 5*time.Minute):
			t.Errorf("%s: %s %s, want %s", b.Name, tt.name, tt.got, tt.want.UTC().Format(time.RFC3339))
		}
	}
}

// hotFleet is boards at 40 to 49 °C, of which three have been above 80 since their fan failed: board 17 for
// 3 hours, board 50 for 20 hours, and board 99 for longer than the window.
func hotFleet(began time.Time, boards int) *testFleet {
	failed := map[int]time.Duration{17: 3 * time.Hour, 50: 20 * time.Hour, 99: 30 * time.Hour}
	f := newFleet(boards)
	f.reading = func(i int, _ string, at time.Time) float64 {
		if ago, ok := failed[i]; ok && !at.Before(began.Add(-ago)) {
			return 80 + float64(i)/1000
		}
		return 40 + float64(i%10)
	}
	return f
}

// "Which three boards are hottest and since when?" is one call, about now or about a day.
func TestHottestSinceWhen(t *testing.T) {
	for _, args := range []string{`{"metrics":["temperature_c"],"top":3}`, `{"metrics":["temperature_c"],"from":"24h","aggregate":"max","top":3}`} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			r := query(t, hotFleet(began, 200).plugin(), args)
			if c := r.Figures["temperature_c"]; r.Boards.Answered != 200 || c.N != 200 || c.Median != 45 {
				t.Errorf("%s: %d boards answered, %+v; want 200, and a median of 45", args, r.Boards.Answered, c)
			}
			if len(r.Top) != 3 || r.Top[0].Name != boardName(99) || r.Top[1].Name != boardName(50) || r.Top[2].Name != boardName(17) {
				t.Fatalf("%s: the hottest are %+v, want boards 99, 50 and 17", args, r.Top)
			}
			wantSince(t, r.Top[1], began.Add(-20*time.Hour), time.Time{})
			wantSince(t, r.Top[2], began.Add(-3*time.Hour), time.Time{})
			if b := r.Top[0]; b.Since != "" || b.SinceBefore != began.Add(-24*time.Hour).UTC().Format(time.RFC3339) {
				t.Errorf("%s: board 99 since %q, before %q; want before the window", args, b.Since, b.SinceBefore)
			}
			if level := r.Top[2].Level; level < 60 || level > 80 {
				t.Errorf("%s: the level is %v, want one between the usual and the high", args, level)
			}
		})
	}
}

// A query costs a board little traffic on its link.
func TestQueryTraffic(t *testing.T) {
	for _, args := range []string{`{"metrics":["temperature_c"],"top":3}`, `{"metrics":["temperature_c"],"from":"24h","aggregate":"max","top":3}`} {
		synctest.Test(t, func(t *testing.T) {
			f := hotFleet(time.Now(), 100)
			var mu sync.Mutex
			bytes := make(map[string]int) // by node id
			for _, b := range f.boards {
				f.answers[b.ID] = func(ctx context.Context, tool manifest.ToolName, args []byte) (string, error) {
					out, err := f.answer(ctx, tool, args)
					mu.Lock()
					defer mu.Unlock()
					bytes[tool.NodeID] += len(args) + len(out)
					return out, err
				}
			}
			query(t, f.plugin(), args)
			for id, n := range bytes {
				if n > 4<<10 {
					t.Errorf("%s: %d bytes of %s, want at most 4 KiB", args, n, id)
				}
			}
		})
	}
}

// A window that is over says when the values fell again.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(20)
		now := time.Now()
		high, low := now.Add(-7*time.Hour), now.Add(-5*time.Hour)
		f.reading = func(i int, _ string, at time.Time) float64 {
			if i == 3 && at.After(high) && at.Before(low) {
				return 90
			}
			return 30
		}
		r := query(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h","step":"1h","aggregate":"max","top":1}`)
		if r.Top[0].Name != boardName(3) {
			t.Fatalf("the highest is %+v, want board 3", r.Top)
		}
		wantSince(t, r.Top[0], high, low)
	})
}

// A negative top names the lowest boards. A board that is like the others has been so always: no time is
// named.
func TestLowest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(20)
		f.reading = func(i int, _ string, _ time.Time) float64 {
			if i == 4 {
				return 2
			}
			return 30 + float64(i)/100 // as usual, but not the same
		}
		p := f.plugin()
		if r := query(t, p, `{"metrics":["cpu_pct"],"top":-1}`); len(r.Top) != 1 || r.Top[0].Name != boardName(4) || r.Top[0].SinceBefore == "" {
			t.Errorf("the lowest: %+v, want board 4, since before the window", r.Top)
		}
		if r := query(t, p, `{"metrics":["cpu_pct"],"top":2}`); len(r.Top) != 2 || r.Top[1].Since+r.Top[1].SinceBefore != "" {
			t.Errorf("the highest: %+v, want two that are as usual, without a time", r.Top)
		}
	})
}

// Figures of a moment ago are not asked for again; half a minute later they are. A frame is enough for what
// it has, and what the board recorded a moment ago for the rest.
func TestNowIsWarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const boards = 30
		f := newFleet(boards)
		p := f.plugin()
		for _, step := range []struct {
			wait time.Duration
			args string
			tool string // that all boards are asked for; "" for none
		}{
			{0, `{"metrics":["mem_pct"]}`, "metrics"},
			{0, `{"metrics":["mem_pct","disk_pct"]}`, ""},
			{0, `{}`, "history"},
			{29 * time.Second, `{}`, ""},
			{2 * time.Second, `{}`, "history"},
		} {
			f.forget()
			time.Sleep(step.wait)
			r := query(t, p, step.args)
			want := map[string]int{}
			if step.tool != "" {
				want[step.tool] = boards
			}
			if got := f.asked(); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s after %v: asked for %v, want %v", step.args, step.wait, got, want)
			}
			if r.Boards.Answered != boards || r.Figures["mem_pct"].Max != 2.9 {
				t.Errorf("%s: %+v, want all boards and at most 2.9 %%", step.args, r)
			}
		}
	})
}

// Where a board's figure of now comes from depends on what it has: its history, a reading of its modules, or
// nothing.
func TestNowBySource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(5)
		f.announce(0, manifest.KindMetrics, manifest.KindHistory)
		f.announce(1, manifest.KindMetrics, manifest.KindModules)
		f.announce(2, manifest.KindMetrics)
		f.announce(3)
		f.reading = func(i int, _ string, at time.Time) float64 {
			if i == 4 && at.Before(time.Now()) { // it records nothing, but can be asked to read
				return math.NaN()
			}
			return 7
		}
		r := query(t, f.plugin(), `{"metrics":["temperature_c"]}`)
		if r.Boards.Answered != 3 || r.Boards.Missing[reasonNoHistory].N != 2 {
			t.Errorf("%+v, want 3 answers, and 2 boards that can neither record nor read it", r.Boards)
		}
		if got := f.asked(); got["history"] != 2 || got["modules"] != 2 {
			t.Errorf("asked for %v, want the history of 2 boards, and a reading of 2", got)
		}
		r = query(t, f.plugin(), `{"metrics":["cpu_pct"]}`)
		if r.Boards.Answered != 4 || r.Boards.Missing[reasonNotMeasured].N != 1 {
			t.Errorf("%+v, want 4 answers, and one board without the tool", r.Boards)
		}
	})
}

// Wear is recorded once an hour: a value of up to two hours ago is one of now.
func TestNowOfWear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(1)
		f.announce(0, manifest.KindHistory)
		f.reading = func(_ int, name string, at time.Time) float64 {
			if name == "wear.pre_eol" && time.Since(at) > time.Minute/2 {
				return 2 // the history counts from 0: urgent, which is 3 here
			}
			return math.NaN()
		}
		if r := query(t, f.plugin(), `{"metrics":["wear_pre_eol"]}`); r.Figures["wear_pre_eol"].Max != 3 {
			t.Errorf("%+v, want 3", r.Figures)
		}
	})
}

// historyAnswer is an answer of system.history for a question about one step, in which FROM and STEP stand
// for what was asked.
func historyAnswer(format string) answerFunc {
	return func(_ context.Context, _ manifest.ToolName, args []byte) (string, error) {
		var in historyArguments
		err := json.Unmarshal(args, &in)
		return strings.NewReplacer("FROM", fmt.Sprint(in.From), "STEP", fmt.Sprint(in.Step)).Replace(format), err
	}
}

// Boards that never answer, lie, refuse or are gone are counted with the reason. They do not change the
// figures of the others, nor do they hold the call up.
func TestBoardsThatFail(t *testing.T) {
	const each = 5 // boards of a kind
	for _, tt := range []struct {
		name   string
		answer answerFunc
		reason string
	}{
		{"never answers", silent, reasonNoAnswer},
		{"more values than asked for", historyAnswer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[1,2,3,4,5]}}`), reasonBadAnswer},
		{"another time and step", historyAnswer(`{"from_ms":0,"step_ms":1000,"metrics":{"cpu.usage_percent":[1]}}`), reasonBadAnswer},
		{"another metric", historyAnswer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"load.load_1m":[1]}}`), reasonBadAnswer},
		{"no JSON", historyAnswer(`{"from_ms":`), reasonBadAnswer},
		{"a result that the kernel refused", failing(manifest.Internal, "bad_result"), reasonBadAnswer},
		{"an impossible value", historyAnswer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[1e300]}}`), reasonNotMeasured},
		{"no value", historyAnswer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[null]}}`), reasonNotMeasured},
		{"pages without end", historyAnswer(`{"from_ms":FROM,"step_ms":STEP,"metrics":{"cpu.usage_percent":[]},"next_cursor":"7"}`), reasonNoAnswer},
		{"suspect", failing(manifest.NodeOffline, "suspect"), reasonSuspect},
		{"offline", failing(manifest.NodeOffline, "offline"), reasonOffline},
		{"at its rate", failing(manifest.RateLimited, "rate"), reasonBusy},
		{"denied by a stage", failing(manifest.SafetyDenied, "acl_rule_1"), reasonRefused},
		{"fails", failing(manifest.Internal, "device"), reasonFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(2 * each)
				f.reading = always(20)
				for i := range each {
					f.answers[nodeID(i)] = tt.answer
				}
				r := query(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h"}`)
				if len(r.Boards.Missing) != 1 || r.Boards.Missing[tt.reason].N != each || len(r.Boards.Missing[tt.reason].Boards) == 0 {
					t.Errorf("missing are %+v, want %d as %s, some with names", r.Boards.Missing, each, tt.reason)
				}
				if c := r.Figures["cpu_pct"]; r.Boards.Answered != each || c.N != each || c.Min != 20 || c.Max != 20 {
					t.Errorf("%d answered, %+v; want the %d others, at 20", r.Boards.Answered, c, each)
				}
			})
		})
	}
}

// Boards that cannot be asked are counted without a call.
func TestBoardsThatAreNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(3)
		f.boards[0].Status, f.boards[1].Status = Offline, Suspect
		f.announce(2, manifest.KindMetrics)
		r := query(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h"}`)
		for _, reason := range []string{reasonOffline, reasonSuspect, reasonNoHistory} {
			if n := r.Boards.Missing[reason].N; n != 1 {
				t.Errorf("%d boards are missing as %s, want 1", n, reason)
			}
		}
		if f.calls() != 0 {
			t.Errorf("%d calls", f.calls())
		}
	})
}

// However many boards are silent, the call ends in time and the others are in the answer, as far as they
// could be asked.
func TestSilentFleet(t *testing.T) {
	for _, args := range []string{`{"metrics":["cpu_pct"]}`, `{"metrics":["cpu_pct"],"from":"1h"}`} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(2000) // more than can be asked in the time
			for i := range f.boards {
				if i%100 != 0 {
					f.answers[nodeID(i)] = silent
				}
			}
			r := query(t, f.plugin(), args)
			if r.Boards.Answered < 5 || r.Boards.Missing[reasonNotAsked].N == 0 || r.Boards.Missing[reasonNoAnswer].N < maxAsked {
				t.Errorf("%s: %+v, want some answers, at least %d silent boards, and some that were not asked", args, r.Boards, maxAsked)
			}
			if f.maxInFlight > maxAsked+maxSlow {
				t.Errorf("%s: %d boards were asked at a time, want at most %d", args, f.maxInFlight, maxAsked+maxSlow)
			}
		})
	}
}

// All steps of a query together end in time: the values, the models and the changes, where each takes as long
// as it may.
func TestSlowSteps(t *testing.T) {
	for _, from := range []string{``, `"from":"1h",`} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(2000)
			f.reading = func(i int, _ string, _ time.Time) float64 { return float64(i / 25) } // different, so that changes are looked for
			for i := range f.boards {
				var calls atomic.Int64
				f.answers[nodeID(i)] = func(ctx context.Context, tool manifest.ToolName, args []byte) (string, error) {
					if i%100 != 0 || calls.Add(1) > 1 {
						return silent(ctx, tool, args)
					}
					return f.answer(ctx, tool, args)
				}
			}
			r := query(t, f.plugin(), `{"metrics":["cpu_pct"],`+from+`"group_by":"model","top":3}`)
			if len(r.Top) == 0 || len(r.Groups) == 0 {
				t.Errorf("%s: %+v, want a top and groups", from, r)
			}
		})
	}
}

// All callers of a tenant together ask maxAsked boards at a time, and one identity has maxAskingCalls calls.
func TestSlotsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const boards, calls = 200, 8
		f := newFleet(boards)
		f.delay = func(int) time.Duration { return 10 * time.Millisecond }
		p := f.plugin()
		var wg sync.WaitGroup
		var limited, answered atomic.Int64
		for range calls {
			wg.Go(func() {
				r, err := tryQuery(t, p, `{"metrics":["cpu_pct"],"from":"1h"}`)
				switch {
				case err == nil && r.Boards.Answered == boards:
					answered.Add(1)
				case err != nil && manifest.AsError(err).Code == manifest.RateLimited:
					limited.Add(1)
				default:
					t.Errorf("%+v, %v", r.Boards, err)
				}
			})
		}
		wg.Wait()
		if answered.Load() != maxAskingCalls || limited.Load() != calls-maxAskingCalls {
			t.Errorf("%d calls answered, %d limited; want %d, %d", answered.Load(), limited.Load(), maxAskingCalls, calls-maxAskingCalls)
		}
		if f.maxInFlight > maxAsked {
			t.Errorf("%d boards were asked at a time, want at most %d", f.maxInFlight, maxAsked)
		}
		if len(p.slots.tenants) != 0 || len(p.used) != 0 {
			t.Errorf("slots %v and shares %v are left behind", p.slots.tenants, p.used)
		}
	})
}

// A board with a slow card is asked for smaller steps if one takes too long, and for the rest of a page that
// it cut.
func TestSlowBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const maxStep, maxValues = 4 * time.Hour, 5 // that the board reads in time, and has on a page
		f := newFleet(1)
		f.answers[nodeID(0)] = func(_ context.Context, _ manifest.ToolName, args []byte) (string, error) {
			var in historyArguments
			if err := json.Unmarshal(args, &in); err != nil {
				return "", err
			}
			if in.Step > maxStep.Milliseconds() {
				return "", &manifest.Error{Code: manifest.DeadlineExceeded, Reason: "device"}
			}
			at := in.From
			if in.Cursor != "" {
				_, _ = fmt.Sscan(in.Cursor, &at)
			}
			page := map[string]any{"from_ms": at, "step_ms": in.Step}
			var list []float64
			for ; at < in.To && len(list) < maxValues; at += in.Step {
				list = append(list, float64(10+at/in.Step%2)) // 10 and 11 alternate
			}
			page["metrics"] = map[string]any{in.Metrics[0]: list}
			if at < in.To {
				page["next_cursor"] = fmt.Sprint(at)
			}
			data, err := json.Marshal(page)
			return string(data), err
		}
		r := query(t, f.plugin(), `{"metrics":["cpu_pct"],"from":"24h"}`)
		if r.Figures["cpu_pct"].Mean != 10.5 {
			t.Errorf("%+v, want a mean of 10.5", r.Figures)
		}
		if n := f.calls(); n != 4 {
			t.Errorf("%d calls, want one that took too long, and 3 pages of 12 values", n)
		}
	})
}

// longFleet is boards with names and tags that are as long as they can be, some of them offline, and some
// far from the others.
func longFleet(boards int) *testFleet {
	f := newFleet(boards)
	for i := range f.boards {
		b := &f.boards[i]
		b.Name = fmt.Sprintf("%s%05d", strings.Repeat("n", 27), i)
		for j := range 16 {
			b.Tags = append(b.Tags, fmt.Sprintf("%s-%d", strings.Repeat("t", 20), (i+j*7)%97))
		}
		if i%9 == 0 {
			b.Status = []Status{Offline, Suspect}[i%2]
		}
	}
	f.reading = func(i int, name string, _ time.Time) float64 {
		if i%50 == 1 {
			return 99.99
		}
		return 20.12 + float64(len(name)%3)
	}
	return f
}

// The answer of any fleet fits (query checks that), and has something of each part that was asked for.
func TestAnswersFit(t *testing.T) {
	const boards = 300
	const all = `"metrics":["cpu_pct","mem_bytes","temperature_c","disk_pct"]`
	for _, tt := range []struct {
		name, args string
		isRight    func(r queryResult) bool
	}{
		{"a top and groups by tag", `{` + all + `,"from":"24h","aggregate":"max","top":10,"group_by":"tag"}`, func(r queryResult) bool {
			return len(r.Top) > 0 && len(r.Figures) == 4 && r.Boards.Matched == boards
		}},
		{"a series", `{` + all + `,"from":"24h","step":"48m"}`, func(r queryResult) bool {
			return len(r.Series.Values["cpu_pct"]) == 30 && r.Series.StepS == 48*60
		}},
		{"groups by model", `{"group_by":"model","metrics":["cpu_pct"]}`, func(r queryResult) bool {
			return len(r.Groups) >= 4 && r.Groups[0].N >= boards/4 && r.Groups[0].Figures["cpu_pct"].Mean != 0
		}},
		{"groups by status", `{"group_by":"status","metrics":["cpu_pct"]}`, func(r queryResult) bool {
			return len(r.Groups) == 3 && r.Groups[0].Group == "online"
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if r := query(t, longFleet(boards).plugin(), tt.args); !tt.isRight(r) {
					t.Errorf("%s: %+v", tt.args, r)
				}
			})
		})
	}
}

// An answer that is too long loses the same names each time.
func TestShortenIsStable(t *testing.T) {
	shortened := func() string {
		a := &queryAnswer{Boards: answered{Missing: make(map[string]*missing)}}
		for _, why := range []string{reasonBusy, reasonFailed, reasonOffline, reasonSuspect} {
			a.Boards.Missing[why] = &missing{N: 3, Boards: []string{"a", "b", "c"}}
		}
		for range 3 {
			a.shorten()
		}
		data, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	first := shortened()
	for range 20 {
		if again := shortened(); again != first {
			t.Fatalf("%s, and then %s", first, again)
		}
	}
}

func TestSelectors(t *testing.T) {
	f := newFleet(20)
	f.boards[3].Tags, f.boards[4].Tags, f.boards[5].Status = []string{"roof"}, []string{"roof", "lab"}, Offline
	p := f.plugin()
	for selectors, want := range map[string]int{
		`"all"`:                             20,
		`"board-007"`:                       1,
		`"BOARD-007"`:                       1,
		`"` + nodeID(9) + `"`:               1,
		`"tag:roof"`:                        2,
		`"status:offline"`:                  1,
		`"tag:lab","board-004","board-001"`: 2,
	} {
		if r := query(t, p, `{"boards":[`+selectors+`]}`); r.Boards.Matched != want {
			t.Errorf("%s: %d boards, want %d", selectors, r.Boards.Matched, want)
		}
	}
	refused(t, p, reader, "fleet.query", `{"boards":["`+nodeID(10)[:25]+`"]}`, manifest.ManifestInvalid, "several board ids")
}

// A selector that matches nothing is an error that says what there is.
func TestSelectorsThatMatchNothing(t *testing.T) {
	f := newFleet(3)
	f.boards[1].Tags, f.boards[2].Tags = []string{"roof"}, []string{"roof", "lab"}
	p := f.plugin()
	for _, tt := range []struct {
		selector string
		code     manifest.Code
		want     string
	}{
		{"tag:cellar", manifest.ManifestInvalid, "there are lab, roof"},
		{"status:suspect", manifest.ManifestInvalid, "no board is suspect now"},
		{"status:gone", manifest.ManifestInvalid, "online, suspect or offline"},
		{"attic", manifest.SafetyDenied, "fleet.find"},
	} {
		refused(t, p, reader, "fleet.query", `{"boards":["`+tt.selector+`"]}`, tt.code, tt.want)
	}
	f.boards = nil
	refused(t, p, reader, "fleet.query", `{}`, manifest.BadRequest, "agentctl invite")
}

// Many starts of ids cost one list of the boards.
func TestSelectorsListOnce(t *testing.T) {
	f := newFleet(1)
	selectors := slices.Repeat([]string{`"` + nodeID(0)[:20] + `"`}, 64)
	r := query(t, f.plugin(), `{"boards":[`+strings.Join(selectors, ",")+`]}`)
	if r.Boards.Matched != 1 || f.lists != 1 {
		t.Errorf("%d boards of %d lists, want one of each", r.Boards.Matched, f.lists)
	}
}

// A window whose ends are between two milliseconds has as many steps as the boards have values.
func TestFractionsOfMilliseconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFleet(3).plugin()
		day := time.Now().UTC().Add(-24 * time.Hour).Format(time.DateOnly)
		for window, want := range map[string]int{
			`"from":"` + day + `T00:00:00Z","to":"` + day + `T01:00:00.0005Z","step":"1h"`:       1,
			`"from":"` + day + `T00:00:00.0009Z","to":"` + day + `T01:00:00.0001Z","step":"10m"`: 6,
			`"from":"` + day + `T00:00:00.9999Z","to":"` + day + `T00:00:50Z","step":"10.0001s"`: 5,
			`"from":"` + day + `T00:00:00.0009Z","to":"` + day + `T01:00:00.0001Z","step":"7h"`:  1,
		} {
			r := query(t, p, `{"metrics":["cpu_pct"],`+window+`}`)
			if n := len(r.Series.Values["cpu_pct"]); n != want || r.Boards.Answered != 3 {
				t.Errorf("%s: %d values of %d boards, want %d of 3", window, n, r.Boards.Answered, want)
			}
		}
	})
}

// Times that cannot be, and steps that make too much, are refused before any board is asked, and the error
// says what to give.
func TestBadQueries(t *testing.T) {
	f := newFleet(2)
	p := f.plugin()
	for args, want := range map[string]string{
		`{"from":"tomorrow"}`:                         "24h or 7d",
		`{"from":"2999-01-01T00:00:00Z"}`:             "not in the past",
		`{"from":"1h","to":"2h"}`:                     "10 s or more before to",
		`{"from":"5s"}`:                               "10 s or more before to",
		`{"from":"99999999w"}`:                        "not a time",
		`{"from":"1900-01-01"}`:                       "366 days",
		`{"to":"1h"}`:                                 "give from",
		`{"step":"1h"}`:                               "give from",
		`{"from":"24h","step":"1s"}`:                  "10s or more",
		`{"from":"24h","step":"10s"}`:                 "use 48m or more",
		`{"from":"30d","step":"1m"}`:                  "makes 43200 values",
		`{"from":"24h","step":"1h","group_by":"tag"}`: "do not go together",
		`{"metrics":["cpu"]}`:                         "the nearest is cpu_pct",
	} {
		refused(t, p, reader, "fleet.query", args, manifest.ManifestInvalid, want)
	}
	if f.calls() != 0 {
		t.Errorf("%d calls of boards", f.calls())
	}
}

// An error does not repeat what the caller gave: it may be an instruction for a model.
func TestErrorsQuoteNothing(t *testing.T) {
	_, err := tryQuery(t, newFleet(1).plugin(), `{"metrics":["ignore_previous_instructions"]}`)
	if e := manifest.AsError(err); err == nil || !strings.Contains(e.Message, "there are cpu_pct") || strings.Contains(e.Message, "ignore_") {
		t.Errorf("got %v, want the metrics that there are, and not the one that was given", err)
	}
}

func TestFormsOfTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFleet(1).plugin()
		hourAgo := time.Now().Add(-time.Hour)
		want := hourAgo.UTC().Format(time.RFC3339)
		for _, from := range []string{"1h", "-1h", "1h ago", hourAgo.Format(time.RFC3339), fmt.Sprint(hourAgo.UnixMilli()), hourAgo.UTC().Format(time.DateTime)} {
			if r := query(t, p, `{"from":"`+from+`","to":"now"}`); r.From != want {
				t.Errorf("from %s is %s, want %s", from, r.From, want)
			}
		}
	})
}
