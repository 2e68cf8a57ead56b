package history

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// TestBootInThePast checks that a board without a battery-backed clock records from the first
// second, and that what it recorded gets its time once that is known.
func TestBootInThePast(t *testing.T) {
	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprint("flushed before ", flushed), func(t *testing.T) {
			s, c := open(t, Options{})
			c.set(3_000) // 1970
			for i := range 5 {
				c.step(time.Second)
				x := c.sample(i)
				s.Add(x)
				c.mono += 3 * time.Millisecond // the reading comes a little later
				c.wall += 3
				addReading(s, x, "temperature.hottest_c", float64(40+i))
				c.mono -= 3 * time.Millisecond
				c.wall -= 3
			}
			if rows := query(t, s, Query{}); len(rows) != 1 || rows[0].TSMS != 0 {
				t.Errorf("without a time: %v, want the newest sample as it is", rows)
			}
			if flushed {
				flush(t, s)
			}
			if st := s.Stats(); st.State != "ok" || st.LastFlushMS != 0 {
				t.Errorf("stats %+v, want ok and no time of a flush", st)
			}
			c.set(epoch)
			record(s, c, 2)
			rows := query(t, s, Query{FromMS: epoch - 60_000})
			want := []int64{epoch - 4000, epoch - 3000, epoch - 2000, epoch - 1000, epoch, epoch + 1000, epoch + 2000}
			if !slices.Equal(times(rows), want) {
				t.Fatalf("rows at %v, want %v", times(rows), want)
			}
			if r := rows[3]; r.Sample.CPUPct != sampleAt(0, 3).CPUPct || fmt.Sprint(r.Modules) != "[{temperature.hottest_c 43}]" {
				t.Errorf("row %v has not kept what belongs to it", r)
			}
			flush(t, s)
			checkIntegrity(t, s.path)
			if got := sqlite3Shell(t, s.path, "SELECT count(*), (SELECT count(*) FROM boots) FROM metrics"); got != "7|0" {
				t.Errorf("in the file: %s, want 7 rows and no boots", got)
			}
		})
	}
}

// TestReadingsAloneWithoutATime checks that undated readings get their time without a sample.
func TestReadingsAloneWithoutATime(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	addReading(s, c.sample(0), "wear.used_pct", 1)
	flush(t, s)
	c.step(time.Second)
	addReading(s, c.sample(0), "wear.used_pct", 2)
	c.set(epoch)
	flush(t, s)
	rows := query(t, s, Query{FromMS: epoch - 5000})
	if len(rows) != 2 || rows[0].TSMS != epoch-1000 || rows[1].TSMS != epoch {
		t.Errorf("rows %+v, want two a second apart", rows)
	}
}

// TestRestartBeforeTheTimeIsKnown checks that undated samples survive a restart of the
// process and get their time afterwards: the clock of the boot continues.
func TestRestartBeforeTheTimeIsKnown(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	record(s, c, 3)
	s = reopen(t, s, c, "boot-1")
	record(s, c, 2)
	c.set(epoch)
	got := times(query(t, s, Query{}))
	if want := []int64{epoch - 4000, epoch - 3000, epoch - 2000, epoch - 1000, epoch}; !slices.Equal(got, want) {
		t.Errorf("rows at %v, want %v", got, want)
	}
}

// TestFlushWhenTimeBecomesKnown checks that the first dated sample requests a flush, which gives
// undated ones in the file their time, also after a restart.
func TestFlushWhenTimeBecomesKnown(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	record(s, c, 3)
	s = reopen(t, s, c, "boot-1")
	flush(t, s)
	if s.takeFlushRequest() {
		t.Error("in a hurry while the time is unknown")
	}
	c.set(epoch)
	record(s, c, 1)
	if !s.takeFlushRequest() {
		t.Error("in no hurry when the time is known")
	}
	flush(t, s)
	record(s, c, 1)
	if s.takeFlushRequest() {
		t.Error("in a hurry with nothing that waits")
	}
}

// TestTwoBoots checks that undated samples of another boot do not get the time of this one.
func TestTwoBoots(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	record(s, c, 3)
	s = reopen(t, s, c, "boot-2")
	c.mono = 10 * time.Second
	record(s, c, 4)
	flush(t, s)
	if got := sqlite3Shell(t, s.path, "SELECT group_concat(boot) FROM (SELECT boot FROM boots ORDER BY id)"); got != "boot-1,boot-2" {
		t.Errorf("boots %q, want both", got)
	}
	c.set(epoch)
	flush(t, s)
	got := times(query(t, s, Query{}))
	if want := []int64{epoch - 3000, epoch - 2000, epoch - 1000, epoch}; !slices.Equal(got, want) {
		t.Errorf("rows at %v, want those of this boot, %v", got, want)
	}
	if st := s.Stats(); st.Rows != 7 {
		t.Errorf("%d rows, want those of the other boot kept", st.Rows)
	}
	checkIntegrity(t, s.path)
}

// TestManyBootsWithoutATime checks that the number of boots in the file is bounded.
func TestManyBootsWithoutATime(t *testing.T) {
	s, c := open(t, Options{})
	c.set(0)
	record(s, c, 3)
	flush(t, s)
	if err := s.withDB(func(d *db) error {
		return d.run("UPDATE boots SET id = 4095; UPDATE samples SET ts = ts + 4094 * (1 << 42)")
	}); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, c, "boot-2")
	record(s, c, 2)
	flush(t, s)
	c.set(epoch)
	if got := times(query(t, s, Query{})); !slices.Equal(got, []int64{epoch - 1000, epoch}) {
		t.Errorf("rows at %v, want two", got)
	}
	flush(t, s)
	if got := sqlite3Shell(t, s.path, "SELECT count(*) FROM samples"); got != "2" {
		t.Errorf("%s rows, want those of the other boot gone", got)
	}
}

// TestClockBack: an hour that comes twice is recorded twice, and read in order.
func TestClockBack(t *testing.T) {
	s, c := open(t, Options{})
	record(s, c, 600)
	flush(t, s)
	c.set(epoch + 300_500) // half a second off, so that no millisecond is taken
	record(s, c, 600)
	for range 2 {
		got := times(query(t, s, Query{FromMS: epoch}))
		if len(got) != 1200 || !slices.IsSorted(got) {
			t.Errorf("%d rows, sorted %v; want 1200 in order", len(got), slices.IsSorted(got))
		}
		flush(t, s)
	}
}

// TestClockAhead: a clock that is years ahead for an hour does not empty the history.
func TestClockAhead(t *testing.T) {
	s, c := open(t, Options{})
	n := often(8192, 2048)
	for range n / 1024 {
		record(s, c, 1024)
		flush(t, s)
	}
	right, _ := c.now()
	c.set(right + 10*365*msPerDay)
	record(s, c, 5)
	flush(t, s)
	if got := query(t, s, Query{}); len(got) != n+5 {
		t.Errorf("%d rows by the wrong clock, want %d: the others are not old", len(got), n+5)
	}
	c.set(right)
	if got := query(t, s, Query{FromMS: epoch}); len(got) != n {
		t.Errorf("%d rows of %d are left", len(got), n)
	}
	if got := query(t, s, Query{FromMS: epoch, ToMS: right + 11*365*msPerDay}); got[len(got)-1].TSMS < right+9*365*msPerDay {
		t.Error("what the wrong clock recorded is gone")
	}
	checkIntegrity(t, s.path)
}

// TestMuchWithoutATime checks that a board which does not learn the time keeps its newest
// samples.
func TestMuchWithoutATime(t *testing.T) {
	if raceDetector && !slow() {
		t.Skip("adds 100,000 rows, which takes minutes under the race detector; `make test-slow` runs it without")
	}
	s, c := open(t, Options{Path: quickDir(t) + "/history.db"})
	c.set(0)
	record(s, c, 1)
	addReading(s, c.sample(0), "wear.used_pct", 1)
	flush(t, s)
	err := s.withDB(func(d *db) error {
		return d.tx(func() error {
			d.rows += maxUndated + 1
			return d.run(fmt.Sprintf("WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n <= %d) "+
				"INSERT INTO samples SELECT ts + n, cpu, mem, mem_total, disk, load_1m, load_5m, load_15m FROM i, samples", maxUndated))
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		flush(t, s)
		if st := s.Stats(); st.Rows != maxUndated {
			t.Errorf("%d rows, want %d", st.Rows, maxUndated)
		}
	}
	if got := ask(t, s, "SELECT count(*) FROM readings"); got != "0\n" {
		t.Errorf("%s readings are left of a sample that is gone", got)
	}
	checkIntegrity(t, s.path)
}
