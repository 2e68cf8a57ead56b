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
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// testFleet is boards that answer from memory. It is the Boards of a plugin, and its call takes the
// place of the kernel.
type testFleet struct {
	boards []Board                    // of the tenant "default": board-000, board-001 and so on
	others map[string][]Board         // of other tenants
	tools  map[string][]manifest.Tool // by node id; a board that is not here has all
	frames map[string][]byte          // newest frames of open metric streams, by node id

	// reading is what board i measures, or has recorded, at a time. name is that of system.history; NaN
	// is nothing.
	reading func(i int, name string, at time.Time) float64
	answers map[string]answerFunc     // in place of the readings, by node id
	delay   func(i int) time.Duration // before board i answers; nil: none

	mu          sync.Mutex // protects the fields below
	requests    []kernel.Request
	lists       int // calls of List
	inFlight    int
	maxInFlight int
}

// answerFunc answers a call of a board's tool.
type answerFunc func(ctx context.Context, tool manifest.ToolName, args []byte) (string, error)

func nodeID(i int) string { return fmt.Sprintf("01j8zz3f0v4q7k2m9x5c1b%04d", i) }

func boardName(i int) string { return fmt.Sprintf("board-%03d", i) }

// boardNumber is the i of a nodeID.
func boardNumber(nodeID string) (i int) {
	_, _ = fmt.Sscanf(nodeID[22:], "%04d", &i)
	return i
}

// newFleet makes n boards that are online and have all tools. Their readings follow from their numbers.
func newFleet(n int) *testFleet {
	f := &testFleet{others: make(map[string][]Board), tools: make(map[string][]manifest.Tool), frames: make(map[string][]byte),
		answers: make(map[string]answerFunc), reading: readingByNumber}
	for i := range n {
		f.boards = append(f.boards, Board{ID: nodeID(i), Name: boardName(i), NameSet: true, Status: Online})
	}
	return f
}

// readingByNumber is the reading of a new fleet.
func readingByNumber(i int, name string, _ time.Time) float64 {
	switch name {
	case "cpu.usage_percent":
		return float64(i % 100)
	case "mem_bytes":
		return float64(i % 1000)
	case "mem_total_bytes":
		return 1000
	case "disk.usage_percent":
		return 50
	case "temperature.hottest_c":
		return float64(40 + i%50)
	case "power.throttled":
		return float64(i % 2)
	case "wear.pre_eol":
		return 2 // urgent
	case "load.load_1m", "load.load_5m", "load.load_15m":
		return 1
	}
	return math.NaN()
}

// always is a reading that is the same for all boards, names and times.
func always(v float64) func(int, string, time.Time) float64 {
	return func(int, string, time.Time) float64 { return v }
}

// plugin makes a plugin that asks the fleet.
func (f *testFleet) plugin() *Plugin { return New(Options{Call: f.call, Boards: f}) }

// announce makes a board announce these kinds and no others.
func (f *testFleet) announce(i int, kinds ...string) {
	f.tools[nodeID(i)] = projectTools(nodeID(i), kinds...)
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

// Lookup implements Boards.
func (f *testFleet) Lookup(tenant, ref string) (Board, bool) {
	for _, b := range f.of(tenant) {
		if b.ID == ref || b.Name == ref {
			return b, true
		}
	}
	return Board{}, false
}

// of returns the boards of a tenant. Every tenant but those in others sees the same boards.
func (f *testFleet) of(tenant string) []Board {
	if list, ok := f.others[tenant]; ok {
		return list
	}
	return f.boards
}

// List implements Boards.
func (f *testFleet) List(tenant string) []Board {
	f.mu.Lock()
	f.lists++
	f.mu.Unlock()
	return slices.Clone(f.of(tenant))
}

// Tools implements Boards.
func (f *testFleet) Tools(_ context.Context, _, nodeID string) ([]manifest.Tool, error) {
	if list, ok := f.tools[nodeID]; ok {
		return list, nil
	}
	return projectTools(nodeID, manifest.KindEcho, manifest.KindMetrics, manifest.KindHistory, manifest.KindInfo, manifest.KindModules, manifest.KindJournal), nil
}

// Protocol implements Boards.
func (f *testFleet) Protocol(string) string { return "v2.1" }

// Frame implements Boards.
func (f *testFleet) Frame(nodeID string) ([]byte, time.Time, bool) {
	frame, ok := f.frames[nodeID]
	return frame, time.Now(), ok
}

// call answers as the kernel would: after the check of the scope, with what the board answers.
func (f *testFleet) call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	name, ok := manifest.ParseToolName(r.Tool)
	if !ok {
		return nil, errors.New("a tool of no board: " + r.Tool)
	}
	f.mu.Lock()
	f.requests = append(f.requests, *r)
	f.inFlight++
	f.maxInFlight = max(f.maxInFlight, f.inFlight)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.inFlight--
		f.mu.Unlock()
	}()
	if f.delay != nil {
		select {
		case <-time.After(f.delay(boardNumber(name.NodeID))):
		case <-ctx.Done():
			return nil, &manifest.Error{Code: manifest.DeadlineExceeded, Reason: "device", Outcome: manifest.OutcomeUnknown}
		}
	}
	if !r.Caller.Has(manifest.ScopeCallReadOnly) {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Reason: "scope"}
	}
	answer := f.answers[name.NodeID]
	if answer == nil {
		answer = f.answer
	}
	text, err := answer(ctx, name, r.Arguments)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: json.RawMessage(text)}, nil
}

// answer is what a board answers that has its readings.
func (f *testFleet) answer(_ context.Context, tool manifest.ToolName, args []byte) (string, error) {
	i := boardNumber(tool.NodeID)
	now := func(name string) string {
		if v := f.reading(i, name, time.Now()); !math.IsNaN(v) {
			return fmt.Sprint(v)
		}
		return "null"
	}
	switch tool.CapID {
	case "metrics":
		return fmt.Sprintf(`{"cpu_pct":%v,"mem_bytes":%v,"mem_total_bytes":%v,"disk_pct":%v,"load_1m":%v,"load_5m":%v,"load_15m":%v}`,
			now("cpu.usage_percent"), now("mem_bytes"), now("mem_total_bytes"), now("disk.usage_percent"), now("load.load_1m"), now("load.load_5m"), now("load.load_15m")), nil
	case "modules":
		wear := map[string]string{"0": "normal", "1": "warning", "2": "urgent"}[now("wear.pre_eol")]
		return fmt.Sprintf(`{"temperature":{"hottest_c":%v,"zones":[]},"power":{"throttled":%t},"wear":{"pre_eol":%q},"unavailable":[]}`,
			now("temperature.hottest_c"), now("power.throttled") == "1", wear), nil
	case "info":
		return fmt.Sprintf(`{"model":"Model %d","uptime_s":5,"time_ms":946684800000,"clock_synchronized":true}`, i%3), nil
	}
	return f.history(i, args)
}

// historyArguments are those of system.history.
type historyArguments struct {
	From    int64    `json:"from_ms"`
	To      int64    `json:"to_ms"`
	Step    int64    `json:"step_ms"`
	Metrics []string `json:"metrics"`
	Cursor  string   `json:"cursor"`
}

// history answers system.history in one page: of each step the reading at its end.
func (f *testFleet) history(i int, args []byte) (string, error) {
	var in historyArguments
	if err := json.Unmarshal(args, &in); err != nil {
		return "", err
	}
	columns := make(map[string][]*float64)
	for _, name := range in.Metrics {
		list := []*float64{}
		for at := in.From; at < in.To; at += in.Step {
			if v := f.reading(i, name, time.UnixMilli(min(at+in.Step, in.To)-1)); math.IsNaN(v) {
				list = append(list, nil)
			} else {
				list = append(list, &v)
			}
		}
		columns[name] = list
	}
	data, err := json.Marshal(map[string]any{"from_ms": in.From, "step_ms": in.Step, "metrics": columns})
	return string(data), err
}

// asked counts the calls of the boards' capabilities since forget.
func (f *testFleet) asked() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	count := make(map[string]int)
	for _, r := range f.requests {
		name, _ := manifest.ParseToolName(r.Tool)
		count[name.CapID]++
	}
	return count
}

// calls is how many calls of boards there were since forget.
func (f *testFleet) calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.requests)
}

// forget forgets the calls so far.
func (f *testFleet) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = nil
}

// silent is the answer of a board that does not answer.
func silent(ctx context.Context, _ manifest.ToolName, _ []byte) (string, error) {
	<-ctx.Done()
	return "", context.Cause(ctx)
}

// failing is the answer of a board, or of the kernel in its place, that is an error.
func failing(code manifest.Code, reason string) answerFunc {
	return func(context.Context, manifest.ToolName, []byte) (string, error) {
		return "", &manifest.Error{Code: code, Reason: reason}
	}
}

type scopes []string

func (s scopes) Has(v string) bool { return slices.Contains(s, v) }

// reader is a caller who may read boards.
var reader = &kernel.Caller{Tenant: "default", Actor: "reader", Scopes: scopes{manifest.ScopeToolsList, manifest.ScopeCallReadOnly}}

// call calls a tool of the plugin as the kernel does. args may be "" for none.
func call(t testing.TB, p *Plugin, c *kernel.Caller, name, args string) (string, error) {
	t.Helper()
	i := slices.IndexFunc(tools(), func(tool tool) bool { return tool.name == name })
	if i < 0 {
		t.Fatalf("no tool %s", name)
	}
	if args == "" {
		args = "{}"
	}
	normal, err := tools()[i].input.Check([]byte(args))
	if err != nil {
		return "", err
	}
	res, err := tools()[i].call(t.Context(), p, &kernel.Request{Caller: c, Tool: name, Arguments: normal, Stream: true})
	if err != nil {
		return "", err
	}
	return string(res.Structured), nil
}

// findResult is the answer of fleet.find as a client reads it.
type findResult struct {
	Matched       int
	Boards        []foundBoard
	Unknown       map[string]int
	UnknownBoards []string `json:"unknown_boards"`
	Next          string   `json:"next_cursor"`
	text          string
}

// names are the names of the boards, with spaces between them.
func (r *findResult) names() string {
	var names []string
	for _, b := range r.Boards {
		names = append(names, b.Name)
	}
	return strings.Join(names, " ")
}

// find calls fleet.find, which must succeed with an answer of at most MaxAnswer bytes.
func find(t testing.TB, p *Plugin, c *kernel.Caller, args string) (r findResult) {
	t.Helper()
	data, err := call(t, p, c, "fleet.find", args)
	if err != nil {
		t.Fatalf("fleet.find %s: %v", args, err)
	}
	if len(data) > MaxAnswer {
		t.Errorf("fleet.find %s: an answer of %d bytes, want at most %d", args, len(data), MaxAnswer)
	}
	if err := json.Unmarshal([]byte(data), &r); err != nil {
		t.Fatalf("fleet.find %s: %v", args, err)
	}
	r.text = data
	return r
}

// queryResult is the answer of fleet.query as a client reads it.
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
	Top      []topBoard
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

// topBoard is a row of the top of a queryResult.
type topBoard struct {
	Name, ID     string
	Values       map[string]float64
	Since, Until string
	SinceBefore  string `json:"since_before"`
	Level        float64
}

// tryQuery calls fleet.query, and checks the bounds that hold for every answer: bytes and time.
func tryQuery(t *testing.T, p *Plugin, args string) (r queryResult, err error) {
	t.Helper()
	began := time.Now()
	data, err := call(t, p, reader, "fleet.query", args)
	if took, limit := time.Since(began), kernel.CallBudget-200*time.Millisecond; took > limit {
		t.Errorf("fleet.query %s took %v, want at most %v", args, took, limit)
	}
	if err != nil {
		return r, err
	}
	if len(data) > MaxAnswer {
		t.Errorf("fleet.query %s: an answer of %d bytes, want at most %d", args, len(data), MaxAnswer)
	}
	if err := json.Unmarshal([]byte(data), &r); err != nil {
		t.Fatalf("fleet.query %s: %v", args, err)
	}
	return r, nil
}

// query is tryQuery, which must succeed.
func query(t *testing.T, p *Plugin, args string) queryResult {
	t.Helper()
	r, err := tryQuery(t, p, args)
	if err != nil {
		t.Fatalf("fleet.query %s: %v", args, err)
	}
	return r
}

// refused checks that a call of a tool is refused with a code, and a message that has want in it.
func refused(t testing.TB, p *Plugin, c *kernel.Caller, tool, args string, code manifest.Code, want string) {
	t.Helper()
	_, err := call(t, p, c, tool, args)
	if err == nil {
		t.Errorf("%s %s succeeded, want %s: %s", tool, args, code, want)
		return
	}
	if e := manifest.AsError(err); e.Code != code || !strings.Contains(e.Message, want) {
		t.Errorf("%s %s: %s: %s, want %s with %q", tool, args, e.Code, e.Message, code, want)
	}
}
