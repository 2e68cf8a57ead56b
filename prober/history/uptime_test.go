package history

import (
	"fmt"
	"testing"
	"time"
)

// count is how many samples are in the file.
func count(t *testing.T, s *Store) string {
	t.Helper()
	return sqlite3Shell(t, s.path, "SELECT count(*) FROM samples")
}

// reopenWith is reopen with a retention.
func reopenWith(t *testing.T, s *Store, c *fakeClock, age time.Duration) *Store {
	t.Helper()
	s = reopen(t, s, c, "boot-2")
	if err := s.SetRetention(age, 0); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestNoJumpRemovesHistory: whatever the wall clock does, the samples of the last MaxAge of uptime
// stay, in the file and in queries.
func TestNoJumpRemovesHistory(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour, 40 * 24 * time.Hour, 10 * 365 * 24 * time.Hour} {
		for _, back := range []bool{false, true} {
			if raceDetector && jump < 24*time.Hour {
				continue // SQLite is slow there, and nothing here runs concurrently
			}
			t.Run(fmt.Sprint(jump, back), func(t *testing.T) {
				s, c := open(t, Options{MaxAge: 2 * time.Hour})
				rows := 0
				add := func(n int) {
					for range n {
						c.step(10 * time.Second)
						s.Add(c.sample(rows))
						rows++
						if rows%30 == 0 {
							flush(t, s)
						}
					}
				}
				shift := func(d time.Duration) { now, _ := c.now(); c.set(now + d.Milliseconds() + 500) } // no millisecond comes twice
				add(180)                                                                                  // half an hour
				shift(jump)
				add(180)
				if back {
					shift(-jump)
				}
				add(180)
				flush(t, s)
				s = reopenWith(t, s, c, 2*time.Hour)
				add(60)
				flush(t, s)
				flush(t, s)
				if got := query(t, s, Query{FromMS: 1, ToMS: maxTS}); len(got) != rows {
					t.Errorf("a query has %d rows, want %d", len(got), rows)
				}
				if got := count(t, s); got != fmt.Sprint(rows) {
					t.Errorf("%s rows in the file, want %d", got, rows)
				}
			})
		}
	}
}

// TestAgeAfterJump: what was recorded before a jump goes when it has its age, to the flush.
func TestAgeAfterJump(t *testing.T) {
	s, c := open(t, Options{MaxAge: 10 * time.Minute})
	step := func(n int) {
		for range n {
			record(s, c, 60)
			flush(t, s)
		}
	}
	step(5)
	now, _ := c.now()
	c.set(now + 40*msPerDay)
	for minute := 1; minute <= 12; minute++ {
		step(1)
		old := int64(60 * max(0, 5-max(0, minute-5)))
		got := query(t, s, Query{FromMS: 1, ToMS: now})
		// The flush before the jump ended its span, so that it is known to one flush interval.
		if n := int64(len(got)); n < old-1 || n > old+61 {
			t.Errorf("minute %d after the jump: %d old rows, want about %d", minute, n, old)
		}
	}
	step(10)
	if got := sqlite3Shell(t, s.path, fmt.Sprintf("SELECT count(*) FROM samples WHERE ts < %d", now)); got != "0" {
		t.Errorf("%s old rows are left in the file", got)
	}
}

// TestSwitchedOff: the time without the daemon does not make its history older.
func TestSwitchedOff(t *testing.T) {
	s, c := open(t, Options{MaxAge: time.Hour})
	record(s, c, 600)
	now, _ := c.now()
	c.set(now + 365*msPerDay)
	c.mono = 0
	s = reopenWith(t, s, c, time.Hour)
	record(s, c, 600)
	flush(t, s)
	flush(t, s)
	if got := count(t, s); got != "1200" {
		t.Errorf("%s rows, want those of last year too", got)
	}
	if got := query(t, s, Query{FromMS: 1}); len(got) != 1200 {
		t.Errorf("a query has %d rows", len(got))
	}
}

// TestFileWithoutSpans: rows of an earlier version age on, as if the board had run throughout.
func TestFileWithoutSpans(t *testing.T) {
	s, c := open(t, Options{MaxAge: 20 * time.Minute})
	record(s, c, 600)
	flush(t, s)
	if err := s.withDB(func(d *db) error { return d.run("DROP TABLE spans") }); err != nil {
		t.Fatal(err)
	}
	s = reopenWith(t, s, c, 20*time.Minute)
	record(s, c, 900)
	flush(t, s)
	if got := query(t, s, Query{FromMS: 1}); len(got) != 1201 {
		t.Errorf("%d rows, want the last 20 minutes", len(got))
	}
}

// TestSpansAreBounded: a clock that jumps with each flush does not fill the file.
func TestSpansAreBounded(t *testing.T) {
	s, c := open(t, Options{})
	for i := range 50 {
		record(s, c, 2)
		now, _ := c.now()
		c.set(now + int64(1-2*(i%2))*3_600_000 + 1)
		flush(t, s)
	}
	if got := sqlite3Shell(t, s.path, "SELECT count(*) BETWEEN 40 AND 51 FROM spans"); got != "1" {
		t.Error("a jump is no span")
	}
	if err := s.withDB(func(d *db) error {
		return d.run("WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 5000) " +
			"INSERT OR IGNORE INTO spans SELECT n, 1, 1795132800000 FROM i")
	}); err != nil {
		t.Fatal(err)
	}
	record(s, c, 2)
	now, _ := c.now()
	c.set(now + 3_600_000)
	flush(t, s)
	if got := sqlite3Shell(t, s.path, fmt.Sprintf("SELECT count(*) <= %d FROM spans", maxSpans)); got != "1" {
		t.Errorf("more than %d spans", maxSpans)
	}
}
