package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// namedFleet is three boards with names, tags and a description, and one of another tenant.
func namedFleet() *testFleet {
	f := newFleet(0)
	f.others["other"] = []Board{{ID: nodeID(99), Name: "theirs", Status: Online}}
	f.boards = []Board{
		{ID: nodeID(1), Name: "attic", NameSet: true, Tags: []string{"pi", "roof"}, Status: Online},
		{ID: nodeID(2), Name: "cellar", NameSet: true, Tags: []string{"pi"}, Description: "Behind the Boiler", Status: Offline, LastSeenMS: 7},
		{ID: nodeID(3), Name: "proposed", Status: Suspect, CloneSuspected: true},
	}
	return f
}

func TestFindSelects(t *testing.T) {
	p := namedFleet().plugin()
	for args, want := range map[string]string{
		`{}`:                                     "attic cellar proposed",
		`{"text":"ATT"}`:                         "attic",
		`{"text":"boiler"}`:                      "cellar",
		`{"text":"roof"}`:                        "attic",
		`{"text":"1b0003"}`:                      "proposed",
		`{"tag":"pi"}`:                           "attic cellar",
		`{"tag":"p"}`:                            "",
		`{"tag":"pi","status":"offline"}`:        "cellar",
		`{"status":"suspect"}`:                   "proposed",
		`{"text":"theirs"}`:                      "",
		`{"limit":1}`:                            "attic",
		`{"cursor":"` + makeCursor("b x") + `"}`: "cellar proposed",
	} {
		if r := find(t, p, reader, args); r.names() != want {
			t.Errorf("%s: found %q, want %q", args, r.names(), want)
		}
	}
}

// A name that the board proposed, and a suspected clone, are marked.
func TestFindMarksProposedNames(t *testing.T) {
	r := find(t, namedFleet().plugin(), reader, `{"status":"suspect"}`)
	if b := r.Boards[0]; b.NameSet == nil || *b.NameSet || !b.Clone {
		t.Errorf("got %s, want name_set false and clone_suspected", r.text)
	}
}

func TestFindRefusesArguments(t *testing.T) {
	p := namedFleet().plugin()
	for _, args := range []string{
		`{"cursor":"!"}`,
		`{"cursor":"` + makeCursor("7353845376603110") + `"}`, // of fleet.events
		`{"where":"cpu_pct"}`,
		`{"status":"up"}`,
		`{"limit":0}`,
		`{"tags":"pi"}`,
	} {
		refused(t, p, reader, "fleet.find", args, manifest.ManifestInvalid, "")
	}
}

// The answers about boards with the longest attributes and figures fit, and the pages have each board once.
func TestFindPages(t *testing.T) {
	const boards = 150
	f := newFleet(boards)
	p := f.plugin()
	for i := range f.boards {
		b := &f.boards[i]
		b.Name, b.NameSet, b.Status, b.CloneSuspected, b.LastSeenMS = fmt.Sprintf("%s-%03d", strings.Repeat("n", 28), i/2), false, Suspect, true, math.MaxInt64
		for range i % 17 { // rows of many sizes
			b.Tags = append(b.Tags, strings.Repeat("t", 32))
		}
		p.figures.put(b.ID, manifest.KindMetrics, []byte(`{"cpu_pct":99.99,"mem_bytes":9007199254740991,"mem_total_bytes":9007199254740991,"disk_pct":99.99,`+
			`"load_1m":99999.99,"load_5m":99999.99,"load_15m":99999.99}`), time.Now())
		p.figures.put(b.ID, manifest.KindModules, []byte(`{"temperature":{"hottest_c":-12.345},"network":{"bytes_in_per_s":1e12,"bytes_out_per_s":1e12},`+
			`"power":{"under_voltage":true,"freq_capped":true,"throttled":true,"soft_temp_limit":true},"wear":{"used_pct":99.99,"pre_eol":"urgent"}}`), time.Now())
	}
	// As many figures in the answer as a condition can have.
	var where []string
	for i := range metrics {
		if key := metrics[numMetrics-1-i].key; len(strings.Join(where, " and "))+len(key)+10 < maxWhere {
			where = append(where, key+">=-99")
		}
	}
	args := map[string]any{"where": strings.Join(where, " and "), "limit": 50}
	seen := make(map[string]bool)
	for page := 0; page == 0 || args["cursor"] != ""; page++ {
		data, err := json.Marshal(args)
		if err != nil || page > boards {
			t.Fatalf("page %d: %v", page, err)
		}
		r := find(t, p, reader, string(data))
		if r.Matched != boards || len(r.Boards) == 0 || len(r.Boards[0].Figures) < len(where) {
			t.Fatalf("page %d: %s", page, r.text)
		}
		for _, b := range r.Boards {
			if seen[b.ID] {
				t.Fatalf("page %d has %s again", page, b.ID)
			}
			seen[b.ID] = true
		}
		args["cursor"] = r.Next
	}
	if len(seen) != boards {
		t.Errorf("the pages have %d boards, want %d", len(seen), boards)
	}
}

// A condition is decided by the boards' present figures, and those of a match are in the answer.
func TestFindWhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(200) // cpu_pct is 0 to 99, twice
		f.delay = func(int) time.Duration { return time.Millisecond }
		r := find(t, f.plugin(), reader, `{"where":"cpu_pct >= 98"}`)
		if r.names() != "board-098 board-099 board-198 board-199" || r.Boards[0].Figures["cpu_pct"] != 98 {
			t.Errorf("found %s", r.text)
		}
		if f.calls() != 200 || f.maxInFlight != maxAsked {
			t.Errorf("%d calls, %d at a time; want 200, %d at a time", f.calls(), f.maxInFlight, maxAsked)
		}
		if c := f.requests[0].Caller; c != reader {
			t.Errorf("a board was asked as %+v, want the caller", c)
		}
	})
}

// Boards whose figures are not known do not match. They are counted by reason and not waited for longer
// than askTimeout.
func TestFindCountsUnknownBoards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(100)
		f.boards[10].Status, f.boards[20].Status = Offline, Suspect
		f.announce(30, manifest.KindEcho)
		f.answers[nodeID(40)] = silent
		began := time.Now()
		r := find(t, f.plugin(), reader, `{"where":"cpu_pct >= 0"}`)
		want := map[string]int{reasonOffline: 1, reasonSuspect: 1, reasonNotMeasured: 1, reasonNoAnswer: 1}
		if r.Matched != 96 || !maps.Equal(r.Unknown, want) || len(r.UnknownBoards) != 4 {
			t.Errorf("%d boards match, unknown are %v of %v; want 96, and %v", r.Matched, r.Unknown, r.UnknownBoards, want)
		}
		if took := time.Since(began); took != askTimeout {
			t.Errorf("took %v, want %v", took, askTimeout)
		}
	})
}

// Figures that are younger than maxFigureAge are not asked for again. Others are, where they decide.
func TestFindUsesWarmFigures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(100)
		p := f.plugin()
		for _, step := range []struct {
			wait    time.Duration
			where   string
			calls   int
			matched int
		}{
			{0, "cpu_pct >= 98", 100, 2},
			{maxFigureAge - 2*time.Second, "cpu_pct >= 98", 0, 2},
			{0, "cpu_pct >= 98 and temperature_c > 85", 2, 2}, // the temperature decides for two boards only
			{3 * time.Second, "cpu_pct >= 98", 100, 2},
		} {
			f.forget()
			time.Sleep(step.wait)
			r := find(t, p, reader, `{"where":"`+step.where+`"}`)
			if f.calls() != step.calls || r.Matched != step.matched {
				t.Errorf("%s after %v: %d calls, %d boards match; want %d, %d", step.where, step.wait, f.calls(), r.Matched, step.calls, step.matched)
			}
		}
	})
}

// A figure's age is that of the oldest in the row.
func TestFindShowsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFleet(1).plugin()
		find(t, p, reader, `{"where":"cpu_pct >= 0"}`)
		time.Sleep(20 * time.Second)
		r := find(t, p, reader, `{"where":"cpu_pct >= 0 and temperature_c > 0"}`)
		if b := r.Boards[0]; b.Figures["temperature_c"] != 40 || *b.AgeS != 20 {
			t.Errorf("got %s, want a temperature and the age of cpu_pct, 20 s", r.text)
		}
	})
}

// The newest frame of a stream that is open for somebody is as good as an answer.
func TestFindUsesOpenStreams(t *testing.T) {
	f := newFleet(3)
	f.boards[2].Status = Offline
	for i := range f.boards {
		f.frames[nodeID(i)] = []byte(`{"cpu_pct":1}`)
	}
	r := find(t, f.plugin(), reader, `{"where":"cpu_pct = 1"}`)
	if r.names() != "board-000 board-001" || f.calls() != 0 {
		t.Errorf("%d calls, found %s; want no call, and the boards that are online", f.calls(), r.text)
	}
}

// A fleet that does not answer costs a bounded time, and its boards are counted.
func TestFindSlowFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const boards = 2000 // more than are asked in askAllTimeout
		f := newFleet(boards)
		f.delay = func(int) time.Duration { return time.Hour }
		began := time.Now()
		r := find(t, f.plugin(), reader, `{"where":"cpu_pct > 1"}`)
		if took := time.Since(began); took != askAllTimeout {
			t.Errorf("took %v, want %v", took, askAllTimeout)
		}
		silent, left := r.Unknown[reasonNoAnswer], r.Unknown[reasonNotAsked]
		if silent == 0 || left == 0 || silent+left != boards || len(r.UnknownBoards) != maxUnknownBoards {
			t.Errorf("%d silent and %d not asked, want %d together: %s", silent, left, boards, r.text)
		}
	})
}

// One identity has maxAskingCalls calls that ask boards. Those of another one are not refused for them.
func TestAskingShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(1)
		f.delay = func(int) time.Duration { return askTimeout / 2 }
		p := f.plugin()
		other := *reader
		other.Actor = "other"
		const where = `{"where":"cpu_pct >= 0"}`
		var wg sync.WaitGroup
		for range maxAskingCalls {
			wg.Go(func() { find(t, p, reader, where) })
		}
		synctest.Wait()
		refused(t, p, reader, "fleet.find", where, manifest.RateLimited, "ask many boards already")
		wg.Go(func() { find(t, p, &other, where) })
		wg.Wait()
		if len(p.used) != 0 {
			t.Errorf("%v still counts after the calls", p.used)
		}
	})
}

// A caller who may not call boards learns no figures, even if they are known.
func TestFiguresNeedTheScope(t *testing.T) {
	f := newFleet(3)
	p := f.plugin()
	find(t, p, reader, `{"where":"cpu_pct >= 0"}`) // they are known now
	f.forget()
	lister := &kernel.Caller{Tenant: "default", Actor: "lister", Scopes: scopes{manifest.ScopeToolsList}}
	if r := find(t, p, lister, ""); r.Matched != 3 || strings.Contains(r.text, "figures") {
		t.Errorf("found %s, want three boards without figures", r.text)
	}
	refused(t, p, lister, "fleet.find", `{"where":"cpu_pct >= 0"}`, manifest.SafetyDenied, manifest.ScopeCallReadOnly)
	if f.calls() != 0 {
		t.Errorf("%d calls of boards for a caller without the scope", f.calls())
	}
}

// While stages may answer callers differently, the figures that one caller got are not shown to another,
// nor are frames of streams, which are somebody's. The caller's own answers are used again.
func TestFiguresOfOthers(t *testing.T) {
	for _, differs := range []bool{false, true} {
		f := newFleet(2)
		f.frames[nodeID(0)] = []byte(`{"cpu_pct":1,"mem_bytes":1,"mem_total_bytes":10,"disk_pct":1,"load_1m":1,"load_5m":1,"load_15m":1}`)
		p := New(Options{Call: f.call, Boards: f, Differs: func() bool { return differs }})
		other := *reader
		other.Actor = "other"
		const where = `{"where":"cpu_pct >= 0"}`
		find(t, p, reader, where)
		f.forget()
		if r := find(t, p, &other, ""); strings.Contains(r.text, "figures") == differs {
			t.Errorf("stages differ %v: another caller sees %s", differs, r.text)
		}
		wantCalls := map[bool]int{false: 0, true: 2}[differs]
		if find(t, p, &other, where); f.calls() != wantCalls {
			t.Errorf("stages differ %v: %d calls for another caller, want %d", differs, f.calls(), wantCalls)
		}
		f.forget()
		if find(t, p, &other, where); f.calls() != 0 {
			t.Errorf("stages differ %v: %d calls although the caller's own answers are known", differs, f.calls())
		}
	}
}

// One board that reports what cannot be does not keep a caller from seeing the others.
func TestImpossibleFigures(t *testing.T) {
	f := newFleet(3)
	f.answers[nodeID(1)] = func(context.Context, manifest.ToolName, []byte) (string, error) {
		return `{"cpu_pct":1,"mem_bytes":1e308,"mem_total_bytes":1,"disk_pct":1,"load_1m":1e308,"load_5m":1,"load_15m":1}`, nil
	}
	p := f.plugin()
	if r := find(t, p, reader, `{"where":"cpu_pct >= 0"}`); r.Matched != 3 {
		t.Errorf("cpu_pct: %s, want all boards", r.text)
	}
	if r := find(t, p, reader, `{"where":"mem_pct >= 0"}`); r.Matched != 2 || r.Unknown[reasonNotMeasured] != 1 {
		t.Errorf("mem_pct: %s, want the two boards that are possible", r.text)
	}
}

// An error about an argument has an example that is valid, and says a pattern in words.
func TestArgumentErrorsHaveExamples(t *testing.T) {
	p := newFleet(1).plugin()
	for _, tool := range tools() {
		for _, f := range tool.input {
			if f.Name == "cursor" || f.Name == "arguments" {
				continue // no value is valid for every call
			}
			given := map[string]any{f.Name: struct{}{}} // no argument of this kind is an object
			for _, other := range tool.input {
				if other.Required && other.Name != f.Name {
					given[other.Name] = other.Example
				}
			}
			args, _ := json.Marshal(given)
			refused(t, p, reader, tool.name, string(args), manifest.ManifestInvalid, `; for example {"`+f.Name+`":`)
		}
	}
	refused(t, p, reader, "fleet.query", `{"metrics":["CPU"]}`, manifest.ManifestInvalid,
		`must be keys of metrics in lower case, of a-z, 0-9 and _; for example {"metrics":["cpu_pct","temperature_c"]}`)
	refused(t, p, reader, "fleet.query", `{"boards":["*"]}`, manifest.ManifestInvalid,
		`must be names, ids, starts of ids, tag:T, status:online or all; for example {"boards":["attic","tag:lab"]}`)
}
