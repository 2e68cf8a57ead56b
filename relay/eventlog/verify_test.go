package eventlog

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// closedLog is a log with events of both classes of two tenants, that no relay has open.
func closedLog(t *testing.T) (path string, events []kernel.Event) {
	t.Helper()
	path = logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	var group []kernel.Event
	for i := range 300 {
		tenant := []string{"a", "b"}[i%2]
		if group = append(group, call(tenant, i), stateEvent(tenant, fmt.Sprint(i), 50), event("call.refused", fmt.Sprint(i), i)); len(group) >= 150 {
			mustAppend(t, s, group...)
			group = nil
		}
	}
	events = all(t, s, Query{})
	stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path, events
}

// tamper changes a log as someone who knows about the triggers.
func tamper(t *testing.T, path string, statements ...string) {
	t.Helper()
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	rows, err := db.Query("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
	if err != nil {
		t.Fatal(err)
	}
	var drop []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		drop = append(drop, "DROP TRIGGER "+name)
	}
	rows.Close()
	for _, q := range append(drop, statements...) {
		r, err := db.Exec(q)
		if err != nil {
			t.Fatalf("%s: %v", q, err)
		}
		if n, _ := r.RowsAffected(); n == 0 && !strings.HasPrefix(q, "DROP") {
			t.Fatalf("%s: changed nothing", q)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// Whatever is changed, removed or added is found, with its place: Verify names the first event of the chain
// that does not fit. A log with changed state is not opened. One with changed calls is, and the check in the
// background reports it.
func TestTamperingIsNoticed(t *testing.T) {
	sound, events := closedLog(t)
	ticket := func(tenant string, n int) uint64 { return nthSeq(t, events, tenant, "ticket.created", n) }
	callOf := func(tenant string, n int) uint64 { return nthSeq(t, events, tenant, "call", n) }
	const newest = 149 // the number of the newest ticket of a tenant
	tests := []struct {
		name   string
		seq    uint64 // %d in tamper
		tamper string
		class  Class // of the chain that is broken
		tenant string
		found  uint64 // the first event of it that does not fit
	}{
		{"payload", ticket("a", 20), "UPDATE state SET payload = '{}' WHERE seq = %d", ClassState, "a", ticket("a", 20)},
		{"tenant", ticket("a", 5), "UPDATE state SET chain = (SELECT id FROM chains WHERE tenant = 'b' AND class = 'state') WHERE seq = %d", ClassState, "b", ticket("a", 5)},
		{"time", callOf("a", 7), "UPDATE calls SET created_at = created_at + 1 WHERE seq = %d", ClassCalls, "a", callOf("a", 7)},
		{"actor", callOf("b", 9), "UPDATE calls SET actor = kind WHERE seq = %d", ClassCalls, "b", callOf("b", 9)},
		{"trace", callOf("b", 9), "UPDATE calls SET trace = zeroblob(16) WHERE seq = %d", ClassCalls, "b", callOf("b", 9)},
		{"no such word", callOf("b", 9), "UPDATE calls SET actor = 1000 WHERE seq = %d", ClassCalls, "b", callOf("b", 9)},
		{"removed", ticket("a", 30), "DELETE FROM state WHERE seq = %d", ClassState, "a", ticket("a", 31)},
		{"the newest removed", ticket("a", newest), "DELETE FROM state WHERE seq = %d", ClassState, "a", ticket("a", newest-1) + 1},
		{"removed call", callOf("a", 30), "DELETE FROM calls WHERE seq = %d", ClassCalls, "a", callOf("a", 31)},
		{"mark moved", callOf("a", 3), "UPDATE chains SET mark = %d WHERE tenant = 'a' AND class = 'calls'", ClassCalls, "a", callOf("a", 0)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := logPath(t)
			copyLog(t, sound, path)
			tamper(t, path, fmt.Sprintf(tt.tamper, tt.seq))
			v, err := verifyFile(t.Context(), path, VerifyOptions{})
			if err != nil || len(v.Faults) == 0 || v.Faults[0].Class != tt.class || v.Faults[0].Tenant != tt.tenant || v.Faults[0].Seq != tt.found {
				t.Errorf("the faults are %+v, %v; want one of the %s of %s at event %d", v.Faults, err, tt.class, tt.tenant, tt.found)
			}
			if tt.class == ClassState {
				checkRefused(t, path, tt.found)
			} else {
				checkReported(t, path, tt.found)
			}
		})
	}
}

// nthSeq returns the seq of an event of a tenant and type, by its number from 0 on.
func nthSeq(t *testing.T, events []kernel.Event, tenant, eventType string, n int) uint64 {
	t.Helper()
	for _, e := range events {
		if e.Tenant == tenant && e.Type == eventType {
			if n--; n < 0 {
				return e.Seq
			}
		}
	}
	t.Fatalf("tenant %s has no such %s", tenant, eventType)
	return 0
}

// checkRefused wants Open to refuse a log because of an event.
func checkRefused(t *testing.T, path string, seq uint64) {
	t.Helper()
	s, err := Open(Options{Path: path})
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), fmt.Sprint(seq)) {
		t.Errorf("Open: got %v, want ErrDamaged with event %d", err, seq)
	}
}

// checkReported wants a log to run, and the check in the background to report an event.
func checkReported(t *testing.T, path string, seq uint64) {
	t.Helper()
	watch := storage.NewWatch(FileName)
	withStore(t, Options{Path: path, Watch: watch}, func(t *testing.T, s *Store) {
		time.Sleep(time.Minute)
		if v := s.Stats().Verification; v.Ended.IsZero() || len(v.Faults) != 1 || v.Faults[0].Seq != seq {
			t.Errorf("the check in the background found %+v, want event %d", v, seq)
		}
		if p := watch.Problems(); len(p) != 1 || p[0].Kind != storage.Damaged || !strings.Contains(p[0].Detail, fmt.Sprint(seq)) {
			t.Errorf("the problems are %+v, want damage at event %d", p, seq)
		}
		mustAppend(t, s, event("ticket.created", "x", 1))
	})
}

// A log that was not changed has no faults, and one in which a page cannot be read names the class.
func TestVerify(t *testing.T) {
	path, events := closedLog(t)
	v, err := verifyFile(t.Context(), path, VerifyOptions{})
	if err != nil || len(v.Faults) > 0 || v.Rows != int64(len(events)) || v.Ended.IsZero() {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err := verifyFile(t.Context(), path, VerifyOptions{Class: ClassState}); err != nil || v.Rows != 300 {
		t.Errorf("%+v, %v", v, err)
	}
	for _, class := range []Class{ClassState, ClassCalls} {
		db := openRaw(t, path)
		var page int64
		if err := db.QueryRow("SELECT max(pageno) FROM dbstat WHERE name = ? AND pagetype = 'leaf'", string(class)).Scan(&page); err != nil {
			t.Fatal(err)
		}
		db.Close()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		clear(b[(page-1)*pageSize : page*pageSize])
		damaged := logPath(t)
		if err := os.MkdirAll(strings.TrimSuffix(damaged, FileName), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(damaged, b, 0o600); err != nil {
			t.Fatal(err)
		}
		v, err := verifyFile(t.Context(), damaged, VerifyOptions{})
		if err != nil || len(v.Faults) == 0 || v.Faults[0].Class != class || v.Faults[0].Seq < events[0].Seq {
			t.Errorf("%s: %+v, %v", class, v, err)
		}
		s, err := Open(Options{Path: damaged})
		if (class == ClassState) != errors.Is(err, ErrDamaged) || class == ClassCalls && err != nil {
			t.Errorf("%s: Open: %v", class, err)
		}
		if err != nil {
			continue
		}
		// The page is the last one of calls, so no call can be stored; state can.
		stop := run(t, s)
		for i := range 5 {
			s.Offer(call("a", i))
			mustAppend(t, s, event("ticket.created", "x", i))
		}
		stop()
		if st := s.Stats(); st.Dropped != 5 || st.Appended != 5 {
			t.Errorf("stats %+v", st)
		}
		s.Close()
	}
	if _, err := verifyFile(t.Context(), path+"x", VerifyOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := verifyFile(ctx, path, VerifyOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Retention moves the marks while a log is verified.
func TestVerifyDuringRetention(t *testing.T) {
	ck := newClock()
	s := open(t, Options{Path: logPath(t), Now: ck.now, MaxAge: time.Second})
	checkNow := make(chan struct{})
	s.retainNow = checkNow
	s.uptime = func() time.Duration { return ck.now().Sub(time.UnixMilli(epoch)) }
	run(t, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		rounds := 150
		if slow() {
			rounds = 500
		}
		for i := range rounds {
			if _, err := s.Append(context.Background(), call("a", i), call("b", i), stateEvent("a", "x", 10)); err != nil {
				t.Error(err)
			}
			ck.move(500 * time.Millisecond)
			checkNow <- struct{}{}
		}
	}()
	n := 0
	for running := true; running; n++ {
		select {
		case <-done:
			running = false
		default:
		}
		if v, err := s.Verify(t.Context(), VerifyOptions{}); err != nil || len(v.Faults) > 0 {
			t.Fatalf("%+v, %v", v, err)
		}
	}
	if s.Stats().Removed == 0 { // how many depends on the machine
		t.Errorf("stats %+v", s.Stats())
	}
	t.Logf("verified %d times, %d removed", n, s.Stats().Removed)
}

// Every payload of a call comes back byte for byte, through the Reader and the view.
func TestCallPayloads(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	db := openRaw(t, s.path)
	rapid.Check(t, func(rt *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"", `"`, `"actor":`, `","trace_id":"`, strings.Repeat("x", 600), "agent-7"}))
		quote := func(name string) string {
			b, err := json.Marshal(text.Draw(rt, name))
			if err != nil {
				rt.Fatal(err)
			}
			return string(b)
		}
		trace := rapid.OneOf(rapid.StringMatching("[0-9a-f]{32}"), rapid.SampledFrom([]string{"", "ABCDEF0123456789ABCDEF0123456789", "0123"}), rapid.StringMatching("[0-9a-fA-F]{30,34}")).Draw(rt, "trace")
		payload := rapid.SampledFrom([]string{
			`{"tool":` + quote("tool") + `,"node_id":"n","decision":"allow","code":"","actor":` + quote("actor") + `,"trace_id":"` + trace + `"}`,
			`{"tool":` + quote("tool2") + `,"trace_id":"` + trace + `"}`,
			`{"trace_id":"` + trace + `"}`,
			`{"x":` + quote("x") + `}`,
			`{}`,
		}).Draw(rt, "payload")
		e := kernel.Event{Tenant: "a", Type: rapid.SampledFrom([]string{"call", "call.refused", "call.x"}).Draw(rt, "type"), Aggregate: rapid.SampledFrom([]string{"", "tool"}).Draw(rt, "about"), Payload: json.RawMessage(payload)}
		seq, err := s.Append(context.Background(), e)
		if err != nil {
			rt.Fatal(err)
		}
		var viewed string
		if err := db.QueryRow("SELECT payload FROM events WHERE seq = ?", int64(seq)).Scan(&viewed); err != nil {
			rt.Fatal(err)
		}
		got := all(t, s, Query{After: seq - 1})
		if len(got) != 1 || string(got[0].Payload) != payload || viewed != payload || got[0].Type != e.Type || got[0].Aggregate != e.Aggregate {
			rt.Fatalf("%s came back as %s and %+v", payload, viewed, got)
		}
	})
	checkChains(t, s)
}

// The script of docs/eventlog.md checks a log without this package.
func TestScriptOfDocs(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed here; CI has it")
	}
	docs, err := os.ReadFile("../../docs/eventlog.md")
	if err != nil {
		t.Fatal(err)
	}
	script := regexp.MustCompile("(?s)```python\n(.*?)```").FindSubmatch(docs)
	if script == nil {
		t.Fatal("docs/eventlog.md has no script")
	}
	path, _ := closedLog(t)
	verify := func() (string, error) {
		cmd := exec.Command(python, "-", path)
		cmd.Stdin = bytes.NewReader(script[1])
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := verify(); err != nil || !strings.Contains(out, "a state: 150 events, good") {
		t.Errorf("%s%v", out, err)
	}
	var seq int64
	db := openRaw(t, path)
	if err := db.QueryRow("SELECT seq FROM call_events WHERE tenant = 'b' LIMIT 1 OFFSET 9").Scan(&seq); err != nil {
		t.Fatal(err)
	}
	db.Close()
	tamper(t, path, fmt.Sprintf("UPDATE calls SET created_at = created_at + 1 WHERE seq = %d", seq))
	if out, err := verify(); err == nil || !strings.Contains(out, fmt.Sprintf("b calls: broken at %d", seq)) || !strings.Contains(out, "a calls: 150 events, good") {
		t.Errorf("%s%v", out, err)
	}
}

// A query for types of one class reads the rows of that class only, and in the order of their key.
func TestQueryPlans(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	mustAppend(t, s, call("a", 1), stateEvent("a", "x", 1))
	for _, tt := range []struct {
		types  []string
		tables string
	}{
		{nil, "state calls"},
		{[]string{"ticket.*"}, "state"},
		{[]string{"presence.online", "presence.snapshot"}, "state"},
		{[]string{"call"}, "calls"},
		{[]string{"call.*"}, "calls"},
		{[]string{"call*"}, "state calls"},
		{[]string{"c*", "callback"}, "state calls"},
		{[]string{"callback"}, "state"},
		{[]string{"call", "ticket.created"}, "state calls"},
	} {
		q := Query{Types: tt.types}
		if got := strings.Join(s.tables(&q), " "); got != tt.tables {
			t.Errorf("%v reads %s, want %s", tt.types, got, tt.tables)
		}
		p, err := s.newPager(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		query, args := p.union("SELECT seq, payload FROM VIEW WHERE seq > ? AND seq <= ?"+p.clause, append([]any{1, int64(1 << 60)}, p.args...))
		rows, err := s.db.Query("EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		plan := readPlan(t, rows)
		if strings.Contains(plan, "SCAN") || strings.Contains(plan, "TEMP B-TREE") || strings.Contains(plan, "AUTOMATIC") || strings.Contains(plan, "SEARCH k ") != strings.Contains(tt.tables, "calls") {
			t.Errorf("%v:\n%s", tt.types, plan)
		}
	}
}

func readPlan(t *testing.T, rows *sql.Rows) (plan string) {
	t.Helper()
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var detail string
		if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
			t.Fatal(err)
		}
		plan += detail + "\n"
	}
	return plan
}
