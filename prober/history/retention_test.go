package history

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// TestAge checks a retention of one minute.
func TestAge(t *testing.T) {
	s, c := open(t, Options{MaxAge: time.Minute})
	record(s, c, 100)
	addReading(s, c.sample(0), "wear.used_pct", 1)
	flush(t, s)
	now, _ := c.now()
	got := query(t, s, Query{FromMS: 1})
	if len(got) != 61 || got[0].TSMS != now-60_000 {
		t.Errorf("%d rows from %d, want 61 from %d", len(got), got[0].TSMS, now-60_000)
	}
	// The next flush removes them, one that saves nothing as well.
	flush(t, s)
	if n := sqlite3Shell(t, s.path, "SELECT count(*), min(ts) FROM samples"); n != fmt.Sprint("61|", now-60_000) {
		t.Errorf("rows in the file and the first: %s, want 61 from %d", n, now-60_000)
	}
	c.step(2 * time.Minute)
	if got := query(t, s, Query{}); len(got) != 1 || got[0].TSMS != now {
		t.Errorf("all too old: %v, want the newest sample", got)
	}
	if err := s.SetRetention(time.Second, 0); err == nil {
		t.Error("a retention of a second was taken")
	}
}

// TestRetentionByHand checks that SetRetention removes everything beyond a lowered bound at
// once, and that the file shrinks.
func TestRetentionByHand(t *testing.T) {
	s, c := open(t, Options{Path: quickDir(t) + "/history.db"})
	n := often(25, 7)
	for range n {
		fillFile(t, s, c, 3600)
		for i := range 400 {
			c.step(time.Second)
			s.Add(c.sample(i), reading("network.bytes_in_per_s", 1), reading("power.throttled", 0))
		}
		flush(t, s)
	}
	if st := s.Stats(); st.Rows != int64(4000*n) || st.Bytes < 1_100_000 {
		t.Fatalf("stats %+v, want %d rows in more than 1.1 MB", st, 4000*n)
	}
	if err := s.SetRetention(0, MinMaxBytes); err != nil {
		t.Fatal(err)
	}
	flush(t, s)
	if st := s.Stats(); st.Rows < 15_000 || st.Rows > 40_000 {
		t.Errorf("%d rows in 1 MB, want about 25000", st.Rows)
	}
	if info, err := os.Stat(s.path); err != nil || info.Size() > MinMaxBytes-walReserve {
		t.Errorf("the file has %d bytes (%v), want at most %d", info.Size(), err, MinMaxBytes-walReserve)
	}
	now, _ := c.now()
	if got := query(t, s, Query{FromMS: now - 1000_000}); len(got) != 1001 {
		t.Errorf("%d of the newest 1001 rows are left", len(got))
	}
	if err := s.SetRetention(time.Minute, 0); err != nil {
		t.Fatal(err)
	}
	flush(t, s)
	if st := s.Stats(); st.Rows != 61 {
		t.Errorf("%d rows of a minute, want 61", st.Rows)
	}
	checkIntegrity(t, s.path)
}

// TestSizeIsBounded checks that the file grows to its bound and stays there, and that it has
// the newest samples.
func TestSizeIsBounded(t *testing.T) {
	s, c := open(t, Options{Path: quickDir(t) + "/history.db", MaxBytes: MinMaxBytes})
	fillFile(t, s, c, 20_000)
	most := int64(0)
	for range often(60, 6) {
		record(s, c, 1000)
		flush(t, s)
		most = max(most, s.Stats().Bytes)
	}
	if most > MinMaxBytes {
		t.Errorf("up to %d bytes with the WAL, want at most %d", most, MinMaxBytes)
	}
	st := s.Stats()
	if st.Rows < 15_000 {
		t.Errorf("%d rows are left, want most of what fits", st.Rows)
	}
	now, _ := c.now()
	if got := query(t, s, Query{FromMS: now - 14_999_000}); len(got) != 15_000 {
		t.Errorf("%d of the last 15000 rows", len(got))
	}
	checkIntegrity(t, s.path)
}
