package eventlog

import (
	"context"
	"regexp"
	"strings"
	"testing"
)

// Another program with the file open cannot change what was logged, short of taking the
// schema apart.
func TestTriggersRefuseTampering(t *testing.T) {
	path, c := logPath(t), newClock()
	s := start(t, Options{Path: path, Now: c.now})
	for i := range 20 {
		mustAppend(t, s, event("call", "t", i))
	}
	before := all(t, s, Query{})
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	const first, last = "7352863948800000 + 0", "7352863948800000 + 19"
	if before[0].Seq != uint64(epoch)<<12 || uint64(epoch)<<12 != 7352863948800000 {
		t.Fatalf("first is %d", before[0].Seq)
	}
	refused := []string{
		"UPDATE events SET payload = '{}'",
		"UPDATE events SET seq = seq + 100",
		"UPDATE OR IGNORE events SET payload = '{}'",
		"UPDATE OR REPLACE events SET seq = " + first,
		"DELETE FROM events",
		"DELETE FROM events WHERE seq = " + last,
		"REPLACE INTO events VALUES (" + first + ", '', 'forged', '', '{}', 1)",
		"INSERT OR REPLACE INTO events VALUES (" + last + ", '', 'forged', '', '{}', 1)",
		"INSERT INTO events VALUES (" + first + ", '', 'forged', '', '{}', 1) ON CONFLICT (seq) DO UPDATE SET type = 'forged'",
		"INSERT INTO events VALUES (17, '', 'forged', '', '{}', 1)",                                       // before the first
		"INSERT INTO events (tenant, type, aggregate_id, payload, created_at) VALUES ('', '', '', '', 1)", // a seq of SQLite's own
		"INSERT INTO events VALUES (9000000000000000, '', 'x', '', x'00', 1)",                             // not TEXT
		"UPDATE retention SET mark = -1",
		"UPDATE retention SET mark = NULL",
		"UPDATE retention SET mark = 'x'",
		"UPDATE retention SET id = 2",
		"UPDATE retention SET mark = " + last + " + 2", // numbers not given yet
		"REPLACE INTO retention VALUES (1, 0)",
		"INSERT INTO retention VALUES (2, 0)",
		"DELETE FROM retention",
	}
	byTrigger := regexp.MustCompile("events is append-only|the retention mark only grows|retention has one row|NOT NULL constraint|cannot store")
	for _, recursive := range []string{"OFF", "ON"} {
		if _, err := db.Exec("PRAGMA recursive_triggers = " + recursive); err != nil {
			t.Fatal(err)
		}
		for _, cheat := range refused {
			if _, err := db.Exec(cheat); err == nil || !byTrigger.MatchString(err.Error()) {
				t.Errorf("%s: %v", cheat, err)
			}
		}
	}
	if _, err := db.Exec("UPDATE OR IGNORE retention SET mark = -1"); err == nil {
		t.Error("the mark went back")
	}
	if after := all(t, s, Query{}); len(after) != len(before) {
		t.Fatalf("%d events, were %d", len(after), len(before))
	}
	for i, e := range all(t, s, Query{}) {
		if string(e.Payload) != string(before[i].Payload) || e.Type != "call" {
			t.Errorf("event %+v was %+v", e, before[i])
		}
	}
	mustAppend(t, s, event("call", "t", 20)) // the log still works

	// The mark may grow; then the rows below it may go, and it may not come back.
	for _, allowed := range []string{"UPDATE retention SET mark = " + first + " + 2", "DELETE FROM events WHERE seq < " + first + " + 2"} {
		if _, err := db.Exec(allowed); err != nil {
			t.Error(err)
		}
	}
	for _, cheat := range []string{"UPDATE retention SET mark = " + first, "DELETE FROM events WHERE seq = " + first + " + 2", "INSERT INTO events VALUES (" + first + ", '', 'forged', '', '{}', 1)"} {
		if _, err := db.Exec(cheat); err == nil {
			t.Errorf("done: %s", cheat)
		}
	}
}

// The tables can be made in Postgres with INTEGER read as BIGINT: no other types, nothing
// of SQLite's but STRICT.
func TestSchemaPortable(t *testing.T) {
	column := regexp.MustCompile(`^(seq|id|mark|created_at) +INTEGER( PRIMARY KEY| NOT NULL)( CHECK \(id = 1\))?,?$|^(tenant|type|aggregate_id|payload) +TEXT +NOT NULL,?$`)
	tables, triggers, ok := strings.Cut(schema, "CREATE TRIGGER")
	if !ok || strings.Contains(triggers, "CREATE TABLE") || strings.Contains(triggers, "CREATE INDEX") {
		t.Fatal("the tables come first, then the triggers")
	}
	columns := 0
	for _, line := range strings.Split(strings.TrimSpace(tables), "\n") {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "CREATE TABLE "), line == ") STRICT;", strings.HasPrefix(line, "INSERT INTO retention (id, mark)"):
		case column.MatchString(line):
			columns++
		default:
			t.Errorf("not portable: %s", line)
		}
	}
	if columns != 8 {
		t.Errorf("%d columns, want 8", columns)
	}

	// And the file says the same as the text above.
	s := open(t, Options{Path: logPath(t)})
	rows, err := s.conn.QueryContext(context.Background(), "SELECT p.name || ' ' || p.type FROM pragma_table_info('events') p")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var got []string
	for rows.Next() {
		var c string
		if err := rows.Scan(&c); err != nil {
			t.Fatal(err)
		}
		got = append(got, c)
	}
	if want := "seq INTEGER, tenant TEXT, type TEXT, aggregate_id TEXT, payload TEXT, created_at INTEGER"; strings.Join(got, ", ") != want {
		t.Errorf("events has %q, want %s", got, want)
	}
}
