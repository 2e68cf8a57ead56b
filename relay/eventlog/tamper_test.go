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
	mustAppend(t, s, event("ticket.created", "t", 20))
	before := all(t, s, Query{})
	db := openRaw(t, path)
	db.SetMaxOpenConns(1)
	const first, last = "7352863948800000 + 0", "7352863948800000 + 19"
	if before[0].Seq != uint64(epoch)<<12 || uint64(epoch)<<12 != 7352863948800000 {
		t.Fatalf("first is %d", before[0].Seq)
	}
	const row, forged = " (seq, chain, type, aggregate_id, payload, created_at, hash) VALUES ", ", 2, 'forged', '', '{}', 1, zeroblob(16))"
	const call = "INSERT INTO calls (seq, chain, kind, actor, trace, rest, created_at, hash) VALUES "
	refused := []string{
		"UPDATE events SET payload = '{}'",
		"DELETE FROM events",
		"UPDATE state SET payload = '{}'",
		"UPDATE calls SET rest = '{}'",
		"UPDATE calls SET seq = seq + 100",
		"UPDATE OR IGNORE calls SET rest = '{}'",
		"UPDATE OR REPLACE calls SET seq = " + first,
		"UPDATE words SET text = ''",
		"DELETE FROM calls",
		"DELETE FROM state",
		"DELETE FROM calls WHERE seq = " + last,
		"DELETE FROM words",
		"REPLACE INTO state" + row + "(" + last + " + 1" + forged,
		"INSERT OR REPLACE INTO state" + row + "(" + last + " + 1" + forged,
		"INSERT INTO state" + row + "(" + last + " + 1" + forged + " ON CONFLICT (seq) DO UPDATE SET type = 'forged'",
		"INSERT INTO state" + row + "(17" + forged,                                                                // before the first
		"INSERT INTO state" + row + "(" + first + forged,                                                          // a seq of a call
		"INSERT INTO state (chain, type, aggregate_id, payload, created_at, hash) VALUES (2, '', '', '', 1, x'')", // a seq of SQLite's own
		"INSERT INTO state" + row + "(9000000000000000, 2, 'x', '', x'00', 1, x'')",                               // not TEXT
		"INSERT INTO state" + row + "(9000000000000000, 1, 'x', '', '{}', 1, x'')",                                // a chain of calls
		"INSERT INTO state" + row + "(9000000000000000, 7, 'x', '', '{}', 1, x'')",                                // no chain
		call + "(" + last + ", 1, 1, 1, x'', '', 1, x'')",
		call + "(" + last + " + 1, 1, 1, 1, x'', '', 1, x'')", // a seq of an event of state
		call + "(9000000000000000, 2, 1, 1, x'', '', 1, x'')",
		"INSERT INTO words VALUES (1, 1, 1, '', '', '')",
		"UPDATE chains SET mark = -1",
		"UPDATE chains SET mark = NULL",
		"UPDATE chains SET mark = 'x'",
		"UPDATE chains SET id = 9 WHERE id = 2",
		"UPDATE chains SET tenant = 'other'",
		"UPDATE chains SET head = x'00'",
		"UPDATE chains SET anchor = x'00'",
		"UPDATE chains SET last = last - 1",
		"UPDATE chains SET mark = last + 2", // numbers not given yet
		"REPLACE INTO chains SELECT id, tenant, class, 0, anchor, 0, head, 0, 0 FROM chains",
		"INSERT INTO chains VALUES (9, 'default', 'calls', 0, x'', 0, x'', 0, 0)",
		"DELETE FROM chains",
		"UPDATE log SET name = 'other'",
		"UPDATE log SET last = -1",
		"INSERT INTO log VALUES (2, 'x', 0)",
		"DELETE FROM log",
	}
	byTrigger := regexp.MustCompile("is append-only|the retention mark only grows|log has one row|the id of the log stays|there is such a chain|a chain that has events|NOT NULL constraint|cannot store|because it is a view")
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
	if _, err := db.Exec("UPDATE OR IGNORE chains SET mark = -1"); err == nil {
		t.Error("the mark went back")
	}
	if after := all(t, s, Query{}); len(after) != len(before) {
		t.Fatalf("%d events, were %d", len(after), len(before))
	}
	for i, e := range all(t, s, Query{}) {
		if string(e.Payload) != string(before[i].Payload) || e.Type != before[i].Type {
			t.Errorf("event %+v was %+v", e, before[i])
		}
	}
	mustAppend(t, s, event("call", "t", 20)) // the log still works

	// The mark may grow; then the rows below it may go, and it may not come back.
	for _, allowed := range []string{"UPDATE chains SET mark = " + first + " + 2 WHERE class = 'calls'", "DELETE FROM calls WHERE seq < " + first + " + 2"} {
		if _, err := db.Exec(allowed); err != nil {
			t.Error(err)
		}
	}
	for _, cheat := range []string{"UPDATE chains SET mark = " + first + " WHERE class = 'calls'", "DELETE FROM calls WHERE seq = " + first + " + 2", call + "(" + first + ", 1, 1, 1, x'', '', 1, x'')"} {
		if _, err := db.Exec(cheat); err == nil {
			t.Errorf("done: %s", cheat)
		}
	}
}

// The tables can be made in Postgres with INTEGER read as BIGINT and BLOB as BYTEA: no
// other types, nothing of SQLite's but STRICT.
func TestSchemaPortable(t *testing.T) {
	column := regexp.MustCompile(`^[a-z_]+ +(INTEGER( PRIMARY KEY| NOT NULL)( CHECK \(id = 1\))?|TEXT +NOT NULL( CHECK \(class IN \('state', 'calls'\)\))?|BLOB +NOT NULL),?$`)
	tables, rest, ok := strings.Cut(schema, "CREATE VIEW")
	if !ok || strings.Contains(rest, "CREATE TABLE") || strings.Contains(rest, "CREATE INDEX") {
		t.Fatal("the tables come first, then views and triggers")
	}
	columns := 0
	for _, line := range strings.Split(strings.TrimSpace(tables), "\n") {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "CREATE TABLE "), line == "", line == ") STRICT;", line == "UNIQUE (tenant, class)", strings.HasPrefix(line, "CREATE INDEX "):
		case column.MatchString(line):
			columns++
		default:
			t.Errorf("not portable: %s", line)
		}
	}
	if columns != 33 {
		t.Errorf("%d columns, want 33", columns)
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
