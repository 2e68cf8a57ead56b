package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// fakeFleet is boards of tenants, and the kernel through which they are asked.
type fakeFleet struct {
	tenants map[string][]Board
	tools   map[string][]manifest.Tool // by node id; default: fullTools
	frames  map[string][]byte          // of open streams

	mu      sync.Mutex
	calls   []kernel.Request // as the kernel got them
	busy    int              // calls in progress
	busiest int
	answer  func(nodeID, kind string) (string, error)
	delay   func(nodeID string) time.Duration
}

func (f *fakeFleet) Lookup(tenant, ref string) (Board, bool) {
	for _, b := range f.tenants[tenant] {
		if b.ID == ref || b.Name == ref {
			return b, true
		}
	}
	return Board{}, false
}

func (f *fakeFleet) List(tenant string) []Board { return slices.Clone(f.tenants[tenant]) }

func (f *fakeFleet) Protocol(string) string { return "v2.1" }

func (f *fakeFleet) Tools(_ context.Context, _, nodeID string) ([]manifest.Tool, error) {
	if list, ok := f.tools[nodeID]; ok {
		return list, nil
	}
	return projectTools(nodeID, manifest.KindEcho, manifest.KindMetrics, manifest.KindHistory, manifest.KindInfo, manifest.KindModules, manifest.KindJournal), nil
}

func (f *fakeFleet) Frame(nodeID string) ([]byte, time.Time, bool) {
	frame, ok := f.frames[nodeID]
	return frame, time.Now(), ok
}

// projectTools are the tools of a board with one capability of each kind.
func projectTools(nodeID string, kinds ...string) (list []manifest.Tool) {
	for _, name := range kinds {
		kind, _ := manifest.LookupKind(name)
		c := &manifest.Capability{Kind: name, SafetyClass: manifest.ReadOnly}
		c.CapID = name[strings.LastIndexByte(name, '.')+1:]
		for i := range kind.Verbs {
			v := &kind.Verbs[i]
			c.Verbs = append(c.Verbs, v.Name)
			n := manifest.ToolName{Short: kind.Short, NodeID: nodeID, CapID: c.CapID, Verb: v.Name}
			list = append(list, manifest.Tool{Canonical: n.String(), Capability: c, Kind: kind, Verb: v})
		}
	}
	return list
}

// call answers as the kernel would.
func (f *fakeFleet) call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	f.mu.Lock()
	f.calls = append(f.calls, *r)
	f.busy++
	f.busiest = max(f.busiest, f.busy)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.busy--
		f.mu.Unlock()
	}()
	name, _ := manifest.ParseToolName(r.Tool)
	if f.delay != nil {
		select {
		case <-time.After(f.delay(name.NodeID)):
		case <-ctx.Done():
			return nil, &manifest.Error{Code: manifest.DeadlineExceeded, Reason: "device", Outcome: manifest.OutcomeUnknown}
		}
	}
	if !r.Caller.Has(manifest.ScopeCallReadOnly) {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Reason: "scope"}
	}
	kind, _ := manifest.LookupShort(name.Short)
	text, err := f.answer(name.NodeID, kind.Name)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: json.RawMessage(text)}, nil
}

type scopes []string

func (s scopes) Has(v string) bool { return slices.Contains(s, v) }

var reader = &kernel.Caller{Tenant: "default", Actor: "reader", Scopes: scopes{manifest.ScopeToolsList, manifest.ScopeCallReadOnly}}

// run calls a tool of the plugin as the kernel does.
func run(t testing.TB, p *Plugin, c *kernel.Caller, name, args string) (string, error) {
	t.Helper()
	for _, tool := range tools() {
		if tool.name != name {
			continue
		}
		if args == "" {
			args = "{}"
		}
		normal, err := tool.input.Check([]byte(args))
		if err != nil {
			return "", err
		}
		res, err := tool.call(t.Context(), p, &kernel.Request{Caller: c, Tool: name, Arguments: normal, Stream: true})
		if err != nil {
			return "", err
		}
		return string(res.Structured), nil
	}
	t.Fatalf("no tool %s", name)
	return "", nil
}

// newFleet makes a plugin with n boards named board-000 and so on, the figures of which follow from
// their numbers.
func newFleet(n int) (*fakeFleet, *Plugin) {
	f := &fakeFleet{tenants: make(map[string][]Board), frames: make(map[string][]byte), tools: make(map[string][]manifest.Tool)}
	for i := range n {
		f.tenants["default"] = append(f.tenants["default"], Board{ID: boardID(i), Name: fmt.Sprintf("board-%03d", i), NameSet: true, Status: Online})
	}
	f.answer = func(nodeID, kind string) (string, error) {
		i := nodeNumber(nodeID)
		switch kind {
		case manifest.KindMetrics:
			return fmt.Sprintf(`{"cpu_pct":%d,"mem_bytes":%d,"mem_total_bytes":1000,"disk_pct":50,"load_1m":1,"load_5m":1,"load_15m":1}`, i%100, i%1000), nil
		case manifest.KindModules:
			return fmt.Sprintf(`{"temperature":{"hottest_c":%d,"zones":[]},"power":{"throttled":%v},"wear":{"pre_eol":"urgent"},"unavailable":[]}`, 40+i%50, i%2 == 1), nil
		}
		return `{"model":"Pi","uptime_s":5,"time_ms":946684800000,"clock_synchronized":true}`, nil
	}
	return f, New(Options{Call: f.call, Boards: f})
}

func boardID(i int) string { return fmt.Sprintf("01j8zz3f0v4q7k2m9x5c1b%04d", i) }

func nodeNumber(id string) (i int) {
	_, _ = fmt.Sscanf(id[22:], "%04d", &i)
	return i
}

// found decodes an answer of fleet.find.
func found(t testing.TB, data string, err error) (out struct {
	Matched       int            `json:"matched"`
	Boards        []foundBoard   `json:"boards"`
	Unknown       map[string]int `json:"unknown"`
	UnknownBoards []string       `json:"unknown_boards"`
	Next          string         `json:"next_cursor"`
}) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > MaxAnswer {
		t.Errorf("an answer of %d bytes", len(data))
	}
	if err := json.Unmarshal([]byte(data), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestFindSelects(t *testing.T) {
	f, p := newFleet(0)
	f.tenants["other"] = []Board{{ID: boardID(99), Name: "theirs", Status: Online}}
	f.tenants["default"] = []Board{
		{ID: boardID(1), Name: "attic", NameSet: true, Tags: []string{"pi", "roof"}, Status: Online},
		{ID: boardID(2), Name: "cellar", NameSet: true, Tags: []string{"pi"}, Description: "Behind the Boiler", Status: Offline, LastSeenMS: 7},
		{ID: boardID(3), Name: "proposed", Status: Suspect, CloneSuspected: true},
	}
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
		data, err := run(t, p, reader, "fleet.find", args)
		var names []string
		for _, b := range found(t, data, err).Boards {
			names = append(names, b.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
	data, err := run(t, p, reader, "fleet.find", `{"status":"suspect"}`)
	if b := found(t, data, err).Boards[0]; b.NameSet == nil || *b.NameSet || !b.Clone {
		t.Errorf("a proposed name, a suspected clone: %s", data)
	}
	for _, args := range []string{`{"cursor":"!"}`, `{"cursor":"` + makeCursor("7353845376603110") + `"}`, `{"where":"cpu_pct"}`, `{"status":"up"}`, `{"limit":0}`, `{"tags":"pi"}`} {
		if _, err := run(t, p, reader, "fleet.find", args); manifest.AsError(err).Code != manifest.ManifestInvalid {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// An error about an argument has an example, and a pattern is said in words.
func TestArgumentErrorsHaveExamples(t *testing.T) {
	_, p := newFleet(1)
	for _, tool := range tools() {
		for _, f := range tool.input {
			if f.Name == "cursor" || f.Name == "arguments" {
				continue // no value holds for every call
			}
			given := map[string]any{f.Name: struct{}{}}
			for _, other := range tool.input {
				if other.Required && other.Name != f.Name {
					given[other.Name] = other.Example
				}
			}
			args, _ := json.Marshal(given)
			if _, err := run(t, p, reader, tool.name, string(args)); !strings.Contains(fmt.Sprint(err), `; for example {"`+f.Name+`":`) {
				t.Errorf("%s %s: %v", tool.name, args, err)
			}
		}
	}
	for args, want := range map[string]string{
		`{"metrics":["CPU"]}`: `must be keys of metrics in lower case, of a-z, 0-9 and _; for example {"metrics":["cpu_pct","temperature_c"]}`,
		`{"boards":["*"]}`:    `must be names, ids, starts of ids, tag:T, status:online or all; for example {"boards":["attic","tag:lab"]}`,
	} {
		if _, err := run(t, p, reader, "fleet.query", args); !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestFindPages pages through boards with as many attributes as they can have: each page fits, and
// every board comes once.
func TestFindPages(t *testing.T) {
	f, p := newFleet(300)
	for i := range f.tenants["default"] {
		b := &f.tenants["default"][i]
		b.Name, b.NameSet, b.Status, b.CloneSuspected, b.LastSeenMS = fmt.Sprintf("%s-%03d", strings.Repeat("n", 28), i%150), false, Suspect, true, math.MaxInt64
		for range 16 {
			b.Tags = append(b.Tags, strings.Repeat("t", 32))
		}
		for kind := range map[string]bool{manifest.KindMetrics: true, manifest.KindModules: true} {
			p.figures.put(b.ID, kind, []byte(`{"cpu_pct":99.99,"mem_bytes":9007199254740991,"mem_total_bytes":9007199254740991,"disk_pct":99.99,"load_1m":99999.99,"load_5m":99999.99,`+
				`"load_15m":99999.99,"temperature":{"hottest_c":-12.345},"network":{"bytes_in_per_s":1e12,"bytes_out_per_s":1e12},`+
				`"power":{"under_voltage":true,"freq_capped":true,"throttled":true,"soft_temp_limit":true},"wear":{"used_pct":99.99,"pre_eol":"urgent"}}`), time.Now())
		}
	}
	var where []string
	for i := range metrics {
		if key := metrics[numMetrics-1-i].key; len(strings.Join(where, " and "))+len(key)+10 < maxWhere {
			where = append(where, key+">=-99")
		}
	}
	seen := make(map[string]bool)
	cursor := ""
	for range 1000 {
		args, _ := json.Marshal(map[string]any{"where": strings.Join(where, " and "), "limit": 50})
		if cursor != "" {
			args = append(args[:len(args)-1], `,"cursor":"`+cursor+`"}`...)
		}
		data, err := run(t, p, reader, "fleet.find", string(args))
		out := found(t, data, err)
		if out.Matched != 300 || len(out.Boards) == 0 || len(out.Boards[0].Figures) < len(where) {
			t.Fatalf("%s", data)
		}
		for _, b := range out.Boards {
			if seen[b.ID] {
				t.Fatalf("%s comes twice", b.ID)
			}
			seen[b.ID] = true
		}
		if cursor = out.Next; cursor == "" {
			break
		}
	}
	if len(seen) != 300 {
		t.Errorf("%d boards on all pages", len(seen))
	}
}

func TestFindWhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, p := newFleet(200)
		list := f.tenants["default"]
		list[10].Status, list[20].Status = Offline, Suspect
		f.tools[boardID(30)] = projectTools(boardID(30), manifest.KindEcho)
		f.delay = func(id string) time.Duration {
			if id == boardID(40) {
				return time.Hour
			}
			return time.Millisecond
		}
		began := time.Now()
		data, err := run(t, p, reader, "fleet.find", `{"where":"cpu_pct >= 98"}`)
		out := found(t, data, err)
		if out.Matched != 4 || out.Boards[0].Name != "board-098" || out.Boards[0].Figures["cpu_pct"] != 98 {
			t.Errorf("%s", data)
		}
		if fmt.Sprint(out.Unknown) != "map[no_answer:1 not_measured:1 offline:1 suspect:1]" || len(out.UnknownBoards) != 4 {
			t.Errorf("unknown %v", out.Unknown)
		}
		if took := time.Since(began); took != askTimeout || f.busiest != maxAsked || len(f.calls) != 197 {
			t.Errorf("%d calls, %d at a time, took %v", len(f.calls), f.busiest, took)
		}
		if r := f.calls[0]; r.Caller != reader {
			t.Errorf("a board was asked as %+v", r.Caller)
		}
		// Warm figures are used; what is not known of them is asked, and only where it decides.
		f.calls = nil
		time.Sleep(maxFigureAge - 2*time.Second)
		data, err = run(t, p, reader, "fleet.find", `{"where":"cpu_pct >= 98 and temperature_c > 85"}`)
		if out := found(t, data, err); out.Matched != 4 || out.Boards[0].Figures["temperature_c"] != 88 || *out.Boards[0].AgeS != 29 {
			t.Errorf("%s", data)
		}
		if len(f.calls) != 5 { // temperatures of 4, and the silent board
			t.Errorf("%d calls with warm figures", len(f.calls))
		}
		f.calls = nil
		time.Sleep(3 * time.Second)
		if _, err = run(t, p, reader, "fleet.find", `{"where":"cpu_pct >= 98"}`); err != nil || len(f.calls) != 197 {
			t.Errorf("%d calls when the figures are old, %v", len(f.calls), err)
		}
		// A frame of an open stream is as good as a snapshot.
		f.calls = nil
		time.Sleep(maxFigureAge + time.Second)
		for i := range list {
			f.frames[boardID(i)] = []byte(`{"cpu_pct":1}`)
		}
		data, err = run(t, p, reader, "fleet.find", `{"where":"cpu_pct = 1"}`)
		if out := found(t, data, err); out.Matched != 199 || len(f.calls) != 0 { // the board that is offline has none
			t.Errorf("%d calls: %s", len(f.calls), data)
		}
	})
}

// TestFindSlowFleet: a fleet that does not answer costs a bounded time, and is reported.
func TestFindSlowFleet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const boards = 5000
		f, p := newFleet(boards)
		f.delay = func(string) time.Duration { return time.Hour }
		began := time.Now()
		data, err := run(t, p, reader, "fleet.find", `{"where":"cpu_pct > 1"}`)
		out := found(t, data, err)
		if took := time.Since(began); took != askAllTimeout {
			t.Errorf("took %v", took)
		}
		if n, left := out.Unknown[noAnswer], out.Unknown[notAsked]; n == 0 || left == 0 || n+left != boards || len(out.UnknownBoards) != maxUnknownBoards {
			t.Errorf("%s", data)
		}
	})
}

// TestAskingShare: one identity asks with 4 calls at a time, and that of another is not affected.
func TestAskingShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, p := newFleet(1)
		f.delay = func(string) time.Duration { return 500 * time.Millisecond }
		other := &kernel.Caller{Tenant: "default", Actor: "other", Scopes: reader.Scopes}
		var wg sync.WaitGroup
		var limited, served int
		var mu sync.Mutex
		for i := range 6 {
			wg.Go(func() {
				c := reader
				if i == 5 {
					time.Sleep(time.Millisecond)
					c = other
				}
				_, err := run(t, p, c, "fleet.find", `{"where":"cpu_pct >= 0"}`)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					served++
				case manifest.AsError(err).Code == manifest.RateLimited && c == reader:
					limited++
				default:
					t.Errorf("%s: %v", c.Actor, err)
				}
			})
		}
		wg.Wait()
		if limited != 1 || served != 5 || len(p.used) != 0 {
			t.Errorf("%d limited, %d served, %d remain", limited, served, len(p.used))
		}
	})
}

// TestFiguresNeedTheScope: who may not call boards learns no figures, warm or not.
func TestFiguresNeedTheScope(t *testing.T) {
	f, p := newFleet(3)
	if _, err := run(t, p, reader, "fleet.find", `{"where":"cpu_pct >= 0"}`); err != nil {
		t.Fatal(err)
	}
	f.calls = nil
	lister := &kernel.Caller{Tenant: "default", Actor: "lister", Scopes: scopes{manifest.ScopeToolsList}}
	data, err := run(t, p, lister, "fleet.find", "")
	if out := found(t, data, err); out.Matched != 3 || strings.Contains(data, "figures") {
		t.Errorf("%s", data)
	}
	_, err = run(t, p, lister, "fleet.find", `{"where":"cpu_pct >= 0"}`)
	if e := manifest.AsError(err); e.Code != manifest.SafetyDenied || !strings.Contains(e.Message, manifest.ScopeCallReadOnly) || len(f.calls) != 0 {
		t.Errorf("%v after %d calls", err, len(f.calls))
	}
	data, err = run(t, p, lister, "fleet.describe", `{"board":"board-000"}`)
	if err != nil || strings.Contains(data, "cpu_pct\":0") || !strings.Contains(data, `"missing":{"figures":"refused","info":"refused","modules":"refused"}`) ||
		!strings.Contains(data, `"needs_scope":"tools:call:read_only"`) {
		t.Errorf("%s %v", data, err)
	}
}

func TestDescribe(t *testing.T) {
	f, p := newFleet(2)
	f.tenants["default"][1].Status, f.tenants["default"][1].LastSeenMS = Offline, 1700000000000
	p.opt.Now = func() time.Time { return time.UnixMilli(946684799000) }
	data, err := run(t, p, reader, "fleet.describe", `{"board":"board-000"}`)
	for _, want := range []string{`"name":"board-000"`, `"id":"` + boardID(0), `"info":{"model":"Pi"`, `"clock":{"synchronized":true,"offset_ms":1000}`, `"protocol":"v2.1"`,
		`"modules":["cpu","memory","disk","load","temperature","power","wear"]`, `"temperature_c":40`, `"wear_pre_eol":3`,
		`{"tool":"snapshot","title":"Metrics snapshot"}`, `{"tool":"history","title":"Metrics history","arguments":{"type":"object","required":["from_ms"`,
		`{"tool":"journal","title":"Journal","needs_scope":"boards:inspect"}`} {
		if !strings.Contains(data, want) {
			t.Errorf("%s is missing in %s %v", want, data, err)
		}
	}
	if strings.Contains(data, "missing") || len(data) > maxDescription {
		t.Errorf("%d bytes: %s", len(data), data)
	}
	f.calls = nil
	data, err = run(t, p, reader, "fleet.describe", `{"board":"`+boardID(1)[:26]+`"}`)
	if err != nil || len(f.calls) != 0 || !strings.Contains(data, `"missing":{"figures":"offline","info":"offline","modules":"offline"}`) ||
		!strings.Contains(data, `"last_seen_ms":1700000000000`) || !strings.Contains(data, `"tool":"journal"`) {
		t.Errorf("offline: %s %v, %d calls", data, err, len(f.calls))
	}
	// A board with more tools than fit: their arguments are left out.
	for i := range 20 {
		f.tools[boardID(0)] = append(f.tools[boardID(0)], projectTools(boardID(0), manifest.KindHistory)...)
		f.tools[boardID(0)][i].Capability.CapID = fmt.Sprintf("history_%d", i)
	}
	if data, err = run(t, p, reader, "fleet.describe", `{"board":"board-000"}`); err != nil || len(data) > maxDescription || !strings.Contains(data, "history_19") && !strings.Contains(data, `"tool":"history"`) {
		t.Errorf("%d bytes: %s %v", len(data), data, err)
	}
}

func TestCallOne(t *testing.T) {
	f, p := newFleet(3)
	f.tools[boardID(1)] = []manifest.Tool{}
	odd := projectTools(boardID(2), manifest.KindInfo) // its only tool has a word that the board chose
	odd[0].Capability.CapID = "obey"
	f.tools[boardID(2)] = odd
	for _, tool := range []string{"snapshot", "metrics.snapshot", "sys." + boardID(0) + ".metrics.snapshot", "sys_" + boardID(0) + "_metrics_snapshot"} {
		f.calls = nil
		data, err := run(t, p, reader, "fleet.call", `{"board":"board-000","tool":"`+tool+`","arguments":{"a":1}}`)
		if err != nil || !strings.HasPrefix(data, `{"cpu_pct":0`) || len(f.calls) != 1 {
			t.Fatalf("%s: %s %v", tool, data, err)
		}
		if r := f.calls[0]; r.Tool != "sys."+boardID(0)+".metrics.snapshot" || string(r.Arguments) != `{"a":1}` || !r.Stream || r.Caller != reader || r.MarkUntrusted {
			t.Errorf("%s: the kernel got %+v", tool, r)
		}
	}
	for args, want := range map[string]string{
		`{"board":"board-000","tool":"reboot"}`:                                  "board-000 has no such tool; it has echo, snapshot, subscribe, history, info, modules, journal",
		`{"board":"board-000","tool":"sys.` + boardID(1) + `.metrics.snapshot"}`: "has no such tool",
		`{"board":"board-001","tool":"snapshot"}`:                                "never connected",
		`{"board":"board-002","tool":"snapshot"}`:                                "has no such tool; fleet.describe",
		`{"board":"nowhere","tool":"snapshot"}`:                                  "fleet.find",
		`{"board":"01j8zz","tool":"snapshot"}`:                                   "several board ids",
		`{"tool":"snapshot"}`:                                                    "board: missing",
	} {
		if _, err := run(t, p, reader, "fleet.call", args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	f.answer = func(string, string) (string, error) { return "", errNotAsked }
	if _, err := run(t, p, reader, "fleet.call", `{"board":"board-000","tool":"snapshot"}`); err != error(errNotAsked) {
		t.Errorf("the tool's own error became %v", err)
	}
	var args = []byte(`{"board":"board-000","tool":"subscribe"}`)
	_, err := p.callOne(t.Context(), &kernel.Request{Caller: reader, Arguments: args})
	if e := manifest.AsError(err); e.Reason != "unary_on_stream" {
		t.Errorf("a stream over plain HTTP: %v", err)
	}
}

func TestResolve(t *testing.T) {
	f, _ := newFleet(3)
	f.tenants["default"][2].Name = boardID(0)[:24] // a name that looks like a prefix wins over it
	f.tenants["other"] = []Board{{ID: "01zzzzzzzzzzzzzzzzzzzzzzzz", Name: "theirs"}}
	for ref, want := range map[string]string{
		boardID(1):                   boardID(1),
		strings.ToUpper(boardID(1)):  boardID(1),
		"board-001":                  boardID(1),
		boardID(1)[:26]:              boardID(1),
		boardID(0)[:24]:              boardID(2),
		boardID(0)[:22]:              "", // ambiguous
		"":                           "",
		"theirs":                     "",
		"01zzzz":                     "",
		"01zzzzzzzzzzzzzzzzzzzzzzzz": "",
	} {
		b, err := Resolve(f, "default", ref)
		if b.ID != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q %v, want %q", ref, b.ID, err, want)
		}
	}
	a, b := UnknownBoard(nil, "01zzzzzzzzzzzzzzzzzzzzzzzz"), UnknownBoard(nil, "01zzzzzzzzzzzzzzzzzzzzzzzy")
	if *a != *b {
		t.Errorf("%v and %v", a, b)
	}
}

// TestMetrics compares the table with its size, and reads every figure.
func TestMetrics(t *testing.T) {
	if len(metrics) != numMetrics {
		t.Fatalf("%d metrics, numMetrics is %d", len(metrics), numMetrics)
	}
	f := newFigures()
	f.readFrame([]byte(`{"cpu_pct":1,"mem_bytes":333,"mem_total_bytes":1000,"disk_pct":4,"load_1m":5,"load_5m":6,"load_15m":7}`), time.Now())
	f.readModules([]byte(`{"temperature":{"hottest_c":8},"network":{"bytes_in_per_s":9,"bytes_out_per_s":10},`+
		`"power":{"under_voltage":true,"freq_capped":false,"throttled":true,"soft_temp_limit":false},"wear":{"used_pct":11,"pre_eol":"warning"}}`), time.Now())
	if got := fmt.Sprint(f.values); got != "[1 33.3 333 1000 4 5 6 7 8 9 10 1 0 1 0 11 2]" {
		t.Errorf("%s", got)
	}
	f.readModules([]byte(`{"power":{}}`), time.Now()) // a later reading without them
	f.readFrame([]byte(`{}`), time.Now())
	for i := range f.values {
		if !math.IsNaN(f.values[i]) {
			t.Errorf("%s is %v", metrics[i].key, f.values[i])
		}
	}
}

// What a board answered one caller, or sends it in a stream, is not shown to another one whom the stages
// of the relay may answer differently.
func TestFiguresOfOthers(t *testing.T) {
	f, _ := newFleet(2)
	differs := false
	p := New(Options{Call: f.call, Boards: f, Differs: func() bool { return differs }})
	other := *reader
	other.Actor = "other"
	f.frames[boardID(0)] = []byte(`{"cpu_pct":1,"mem_bytes":1,"mem_total_bytes":10,"disk_pct":1,"load_1m":1,"load_5m":1,"load_15m":1}`)
	for _, differs = range []bool{false, true} {
		if _, err := run(t, p, reader, "fleet.find", `{"where":"cpu_pct >= 0"}`); err != nil {
			t.Fatal(err)
		}
		f.calls = nil
		data, err := run(t, p, &other, "fleet.find", "")
		if out := found(t, data, err); out.Matched != 2 || strings.Contains(data, "figures") == differs {
			t.Errorf("differs %v: %s", differs, data)
		}
		data, err = run(t, p, &other, "fleet.find", `{"where":"cpu_pct >= 0"}`)
		if out := found(t, data, err); out.Matched != 2 || len(f.calls) != map[bool]int{false: 0, true: 2}[differs] {
			t.Errorf("differs %v: %d calls: %s", differs, len(f.calls), data)
		}
		f.calls = nil
		if _, err = run(t, p, &other, "fleet.find", `{"where":"cpu_pct >= 0"}`); err != nil || len(f.calls) != 0 {
			t.Errorf("differs %v: the caller's own answers were not used: %d calls, %v", differs, len(f.calls), err)
		}
	}
}

// One board that reports what cannot be does not keep a caller from seeing the others.
func TestImpossibleFigures(t *testing.T) {
	f, p := newFleet(3)
	f.answer = func(nodeID, _ string) (string, error) {
		if nodeID == boardID(1) {
			return `{"cpu_pct":1,"mem_bytes":1e308,"mem_total_bytes":1,"disk_pct":1,"load_1m":1e308,"load_5m":1,"load_15m":1}`, nil
		}
		return `{"cpu_pct":1,"mem_bytes":1,"mem_total_bytes":2,"disk_pct":1,"load_1m":1,"load_5m":1,"load_15m":1}`, nil
	}
	data, err := run(t, p, reader, "fleet.find", `{"where":"cpu_pct = 1"}`)
	if out := found(t, data, err); out.Matched != 3 {
		t.Error(data)
	}
	data, err = run(t, p, reader, "fleet.find", `{"where":"mem_pct > 10"}`)
	if out := found(t, data, err); out.Matched != 2 || out.Unknown[notMeasured] != 1 {
		t.Error(data)
	}
}

// TestFigureCache: the cache is bounded and drops what is too old first.
func TestFigureCache(t *testing.T) {
	var c figureCache
	now := time.Now()
	put := func(i int, at time.Time) { c.put(fmt.Sprint(i), manifest.KindMetrics, []byte(`{"cpu_pct":1}`), at) }
	for i := range maxCachedFigures {
		put(i, now.Add(-time.Minute*time.Duration(i%2)))
	}
	put(-1, now)
	if n := len(c.boards); n != maxCachedFigures/2+1 {
		t.Errorf("%d boards after old ones were dropped", n)
	}
	for i := range maxCachedFigures {
		put(i, now)
	}
	if n := len(c.boards); n > maxCachedFigures {
		t.Errorf("%d boards", n)
	}
}
