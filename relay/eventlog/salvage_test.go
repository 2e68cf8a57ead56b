package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentctl/relay/kernel"
)

// salvageEvents are events of two tenants and both classes, some of which need overflow pages.
func salvageEvents(n int) (events []kernel.Event) {
	for i := range n {
		e := kernel.Event{Tenant: []string{"default", "greenhouse"}[i%2], Aggregate: fmt.Sprintf("a-%d", i), CreatedMS: epoch + int64(i)}
		size := i * 37 % 600
		if i%40 == 0 {
			size = 9000
		}
		if e.Type = "ticket.created"; i%3 == 0 {
			e.Type, e.Aggregate = "call", "tool"
			e.Payload = json.RawMessage(fmt.Sprintf(`{"tool":"sys.read","actor":"ci-%d","trace_id":"%032x"}`, i%5, i))
		} else {
			e.Payload = json.RawMessage(fmt.Sprintf(`{"n":%d,"text":"%s"}`, i, strings.Repeat("x", size)))
		}
		events = append(events, e)
	}
	return events
}

// newLog makes a closed log with events, and returns its path and what is in it.
func newLog(t testing.TB, events []kernel.Event) (path string, stored []kernel.Event) {
	t.Helper()
	path = logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	for _, e := range events {
		mustAppend(t, s, e)
	}
	stored = all(t, s, Query{})
	stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path, stored
}

// newOldLog is newLog in the first format.
func newOldLog(t testing.TB, events []kernel.Event) (path string, stored []kernel.Event) {
	t.Helper()
	path = logPath(t)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	db := openRaw(t, path)
	if _, err := db.Exec("PRAGMA journal_mode = WAL;" + schema1); err != nil {
		t.Fatal(err)
	}
	for i, e := range events {
		e.Seq = uint64(epoch)<<12 + uint64(i)
		if _, err := db.Exec("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", int64(e.Seq), e.Tenant, e.Type, e.Aggregate, string(e.Payload), e.CreatedMS); err != nil {
			t.Fatal(err)
		}
		stored = append(stored, e)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	return path, stored
}

func salvaged(t testing.TB, from string, o SalvageOptions) (*SalvageReport, []kernel.Event) {
	t.Helper()
	o.From, o.To = from, filepath.Join(t.TempDir(), FileName)
	report, err := Salvage(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := OpenReader(o.To)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	events := all(t, r, Query{})
	last := events[len(events)-1]
	if last.Type != salvagedType || int64(len(events)) != report.Events+1 || report.Verified+report.Unverified != report.Events {
		t.Fatalf("%d events, the last is %s; report %+v", len(events), last.Type, report)
	}
	if entries, _ := os.ReadDir(filepath.Dir(o.To)); len(entries) != 1 {
		t.Errorf("%d files were left", len(entries))
	}
	return report, events[:len(events)-1]
}

// checkSubset wants events that are all among stored, unchanged.
func checkSubset(t testing.TB, what string, events, stored []kernel.Event) {
	t.Helper()
	bySeq := map[uint64]kernel.Event{}
	for _, e := range stored {
		bySeq[e.Seq] = e
	}
	last := uint64(0)
	for _, e := range events {
		if want := bySeq[e.Seq]; e.Seq <= last || e.Tenant != want.Tenant || e.Type != want.Type || e.Aggregate != want.Aggregate || string(e.Payload) != string(want.Payload) || e.CreatedMS != want.CreatedMS {
			t.Fatalf("%s: event %d is %s %s %s %.200q, it was %s %s %s %.200q", what, e.Seq, e.Tenant, e.Type, e.Aggregate, e.Payload, want.Tenant, want.Type, want.Aggregate, want.Payload)
		}
		last = e.Seq
	}
}

// A sound log comes out as it was, of either format.
func TestSalvageSound(t *testing.T) {
	events := salvageEvents(403)
	path, stored := newLog(t, events)
	s := open(t, Options{Path: path})
	id, last := s.ID(), s.Last()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	report, got := salvaged(t, path, SalvageOptions{})
	checkSubset(t, "format 2", got, stored)
	if len(got) != 403 || report.Verified != 403 || len(report.Lost) != 0 || report.Format != 2 || report.ID != id || report.Last != last+1 || report.Unreadable != 0 {
		t.Errorf("%d events; %+v", len(got), report)
	}
	if after, _ := os.ReadFile(path); string(after) != string(before) {
		t.Error("the old log changed")
	}

	path, stored = newOldLog(t, events)
	report, got = salvaged(t, path, SalvageOptions{ID: id, Last: stored[402].Seq + 10})
	checkSubset(t, "format 1", got, stored)
	if len(got) != 403 || report.Unverified != 403 || len(report.Lost) != 0 || report.Format != 1 || report.ID != id || report.Last != stored[402].Seq+11 {
		t.Errorf("%d events; %+v", len(got), report)
	}
	report, got = salvaged(t, filepath.Join("testdata", "format1.db"), SalvageOptions{})
	if want, _ := os.ReadFile("testdata/format1.ndjson"); strings.Count(string(want), "\n") != len(got) || report.Format != 1 {
		t.Errorf("%d events of an old file; %+v", len(got), report)
	}
}

// rowsOn returns how many events may be lost with each page, by SQLite's own account of its pages:
// those of a leaf, and one for an overflow page.
func rowsOn(t testing.TB, path string) map[int]int {
	t.Helper()
	db := openRaw(t, path)
	defer db.Close()
	rows, err := db.Query("SELECT pageno, name, pagetype, ncell FROM dbstat")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	pages := map[int]int{}
	for rows.Next() {
		var page, cells int
		var name, kind string
		if err := rows.Scan(&page, &name, &kind, &cells); err != nil {
			t.Fatal(err)
		}
		switch {
		case name != "events" && name != "state" && name != "calls" && name != "words":
		case name == "words":
			pages[page] = 1000 // every call
		case kind == "leaf":
			pages[page] = cells
		case kind == "overflow":
			pages[page] = 1
		}
	}
	return pages
}

// pageDamages are the ways in which TestSalvageEachPage damages a page.
var pageDamages = []func(page []byte){
	func(page []byte) { clear(page) },
	func(page []byte) { copy(page, bytes.Repeat([]byte{0xff}, len(page))) },
	func(page []byte) { clear(page[:100]) }, // its header and first cells
}

// The pages of a log are damaged one at a time. The new log has every event whose own pages are sound, and
// none that the old one did not have. Each page gets one kind of damage, in turn, and all kinds with
// AGENTCTL_SLOW=1.
func TestSalvageEachPage(t *testing.T) {
	n := 60
	if slow() {
		n = 403
	}
	events := salvageEvents(n)
	for format, makeLog := range map[int]func(testing.TB, []kernel.Event) (string, []kernel.Event){1: newOldLog, 2: newLog} {
		path, stored := makeLog(t, events)
		mayLose := rowsOn(t, path)
		sound, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damaged := filepath.Join(t.TempDir(), FileName)
		for page := range len(sound) / pageSize {
			for kind, damage := range pageDamages {
				if page%len(pageDamages) != kind && !slow() {
					continue
				}
				b := slices.Clone(sound)
				damage(b[page*pageSize : (page+1)*pageSize])
				if err := os.WriteFile(damaged, b, 0o600); err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("format %d, page %d, damage %d", format, page+1, kind)
				report, got := salvaged(t, damaged, SalvageOptions{})
				if report.Format != format {
					t.Errorf("%s: salvaged as format %d", what, report.Format)
				}
				checkSubset(t, what, got, stored)
				checkReport(t, what, report, got, stored, mayLose[page+1])
			}
		}
	}
}

// checkReport wants a salvage to have lost the events of one damaged page at most, and to have reported
// what it lost.
func checkReport(t *testing.T, what string, r *SalvageReport, got, stored []kernel.Event, onPage int) {
	t.Helper()
	lost := len(stored) - len(got)
	if lost > onPage {
		t.Errorf("%s: %d events are lost, of %d that are on the page", what, lost, onPage)
	}
	reported := uint64(r.Unreadable)
	for _, l := range r.Lost {
		reported += l.AtMost
	}
	// What is missing at the end of a log is not known, nor what an unreadable row of a chain was.
	hasEnd := got[len(got)-1].Seq == stored[len(stored)-1].Seq
	if isKnown := hasEnd && (r.Format == 1 || r.Unreadable == 0); isKnown && reported < uint64(lost) {
		t.Errorf("%s: %d events are lost, and %d reported: %+v", what, lost, reported, r)
	}
	// The hash of an event next to the damage does not fit to what is before it.
	if r.Format == 2 && r.Verified < int64(len(got))-4 {
		t.Errorf("%s: only %d of %d events are verified", what, r.Verified, len(got))
	}
}

// A log whose write-ahead log is damaged loses what is in the damaged frame, and nothing behind it.
func TestSalvageDamagedWAL(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	run(t, s)
	for _, e := range salvageEvents(60) {
		mustAppend(t, s, e)
	}
	stored := all(t, s, Query{})
	copied := filepath.Join(t.TempDir(), FileName)
	for _, suffix := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + suffix)
		if err == nil && suffix != "" {
			b[len(b)/2] ^= 1
		}
		if err == nil {
			err = os.WriteFile(copied+suffix, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	report, got := salvaged(t, copied, SalvageOptions{})
	checkSubset(t, "", got, stored)
	if len(got) < 59 || report.WAL == "" || report.Verified < 56 {
		t.Errorf("%d events of 60; %+v", len(got), report)
	}
}

// An event that was changed is kept, and counted as unverified.
func TestSalvageChangedEvent(t *testing.T) {
	path, stored := newLog(t, salvageEvents(50))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(b), `{"n":31,`, `{"n":32,`, 1)
	if err := os.WriteFile(path, []byte(changed), 0o600); err != nil || changed == string(b) {
		t.Fatal("nothing changed", err)
	}
	report, got := salvaged(t, path, SalvageOptions{})
	if len(got) != len(stored) || report.Unverified != 1 || len(report.Lost) != 0 {
		t.Errorf("%d events; %+v", len(got), report)
	}
}

// What retention has removed does not come back, and the marks stay.
func TestSalvageKeepsMarks(t *testing.T) {
	path, stored := newLog(t, salvageEvents(200))
	db := openRaw(t, path)
	mark := stored[100].Seq
	var anchors []string
	for _, q := range []string{
		"UPDATE chains SET mark = " + fmt.Sprint(mark) + ", anchor = coalesce((SELECT hash FROM (SELECT seq, chain, hash FROM state UNION ALL SELECT seq, chain, hash FROM calls) WHERE chain = chains.id AND seq < " + fmt.Sprint(mark) + " ORDER BY seq DESC LIMIT 1), anchor)",
		"DELETE FROM state WHERE seq < " + fmt.Sprint(mark), "DELETE FROM calls WHERE seq < " + fmt.Sprint(mark),
		"UPDATE chains SET rows = (SELECT count(*) FROM state WHERE chain = chains.id) + (SELECT count(*) FROM calls WHERE chain = chains.id)",
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err, anchors)
		}
	}
	db.Close()
	report, got := salvaged(t, path, SalvageOptions{})
	checkSubset(t, "", got, stored[100:])
	if len(got) != 100 || report.Verified != 100 || len(report.Lost) != 0 {
		t.Errorf("%d events; %+v", len(got), report)
	}
	s := open(t, Options{Path: report.To})
	if s.CanResume(stored[50].Seq, Query{}) || !s.CanResume(stored[120].Seq, Query{}) {
		t.Error("the marks are not those of the old log")
	}
}

// The relay runs on the log: nothing is read.
func TestSalvageRefused(t *testing.T) {
	s := start(t, Options{Path: logPath(t)})
	if _, err := Salvage(context.Background(), SalvageOptions{From: s.opts.Path, To: filepath.Join(t.TempDir(), FileName)}); err == nil || !strings.Contains(err.Error(), "another relay") {
		t.Errorf("while it runs: %v", err)
	}
	path, _ := newLog(t, salvageEvents(3))
	if _, err := Salvage(context.Background(), SalvageOptions{From: path, To: path}); err == nil || !strings.Contains(err.Error(), "another directory") {
		t.Errorf("onto itself: %v", err)
	}
}

// A replay of a damaged log returns the events before the damage, and an error.
func TestReplayUpToDamage(t *testing.T) {
	for name, newLog := range map[string]func(testing.TB, []kernel.Event) (string, []kernel.Event){"1": newOldLog, "2": newLog} {
		path, stored := newLog(t, salvageEvents(403))
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		best := 0
		for page := 4; page < len(b)/pageSize; page += 3 {
			damaged := slices.Clone(b)
			clear(damaged[(page-1)*pageSize : page*pageSize])
			to := filepath.Join(t.TempDir(), FileName)
			if err := os.WriteFile(to, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
			r, err := OpenReader(to)
			if err != nil {
				continue // the schema
			}
			var got []kernel.Event
			err = r.Select(context.Background(), Query{}, func(e kernel.Event) error { got = append(got, e); return nil })
			r.Close()
			// Without hashes SQLite does not notice that a page of a long payload is zeros.
			if len(got) < len(stored) && !errors.Is(err, ErrDamaged) {
				t.Errorf("format %s, page %d: %d events and %v", name, page, len(got), err)
			}
			best = max(best, len(got))
		}
		if best < 300 {
			t.Errorf("format %s: at most %d events before the damage", name, best)
		}
	}
}
