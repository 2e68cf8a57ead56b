package clock

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBoardThatBootsInThePast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the bubble starts in 2000, like a Pi without RTC
		c := New(time.Time{})
		if _, ok := c.NowMS(); ok {
			t.Fatal("a clock in 2000 is trusted")
		}
		if got := c.TLSTime().UnixMilli(); got != MinMS {
			t.Errorf("TLSTime %d, want the floor %d", got, int64(MinMS))
		}
		c.Sync(1) // a relay that is lost as well
		if _, ok := c.NowMS(); ok {
			t.Fatal("a relay in 1970 is trusted")
		}
		const server int64 = 1_795_000_000_000
		c.Sync(server)
		time.Sleep(90 * time.Second)
		ms, ok := c.NowMS()
		if !ok || ms != server+90_000 {
			t.Errorf("NowMS %d %v, want %d", ms, ok, server+90_000)
		}
		if s, off := c.State(); s != Relay || off < 1e11 {
			t.Errorf("State %s %d, want relay and a large offset", s, off)
		}
	})
}

func TestClockWithinSkew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)))
		c := New(time.Time{})
		local := time.Now().UnixMilli()
		if ms, ok := c.NowMS(); !ok || ms != local {
			t.Errorf("NowMS %d %v, want the local clock %d", ms, ok, local)
		}
		c.Sync(local + 60_000) // within MaxSkew: the local clock stays
		if ms, _ := c.NowMS(); ms != local {
			t.Errorf("NowMS %d, want the local clock %d", ms, local)
		}
		if s, off := c.State(); s != Local || off != 60_000 {
			t.Errorf("State %s %d, want local 60000", s, off)
		}
		c.Sync(local + 600_000) // beyond: the relay's time
		if ms, _ := c.NowMS(); ms != local+600_000 {
			t.Errorf("NowMS %d, want the relay's %d", ms, local+600_000)
		}
	})
}
