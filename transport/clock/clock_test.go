package clock

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBoardThatBootsInThePast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the bubble starts in 2000, like a Pi without RTC
		c := New(time.Time{}, nil)
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
		c := New(time.Time{}, nil)
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

// TestSynchronizedByNTP: a board whose clock NTP keeps right believes neither a relay that is wrong
// nor a floor that a wrong clock left behind, and only as long as NTP does.
func TestSynchronizedByNTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)))
		ntp := true
		c := New(time.Now().Add(24*time.Hour), func() bool { return ntp })
		const hour, day = int64(3_600_000), int64(86_400_000)
		for _, off := range []int64{0, hour, -hour, 40 * day, -40 * day, 1 - time.Now().UnixMilli()} {
			c.Sync(time.Now().UnixMilli() + off)
			local := time.Now().UnixMilli()
			if ms, ok := c.NowMS(); !ok || ms != local {
				t.Errorf("relay at %+d ms: NowMS %d %v, want the local clock %d", off, ms, ok, local)
			}
			if s, got := c.State(); s != Local || off > -40*day && got != off {
				t.Errorf("relay at %+d ms: State %s %d", off, s, got)
			}
		}
		if got := c.TLSTime(); !got.Equal(time.Now()) {
			t.Errorf("TLSTime %v, want the local time", got)
		}
		ntp = false // somebody set the clock, or NTP is gone
		c.Sync(time.Now().UnixMilli() + hour)
		if s, _ := c.State(); s != Relay {
			t.Errorf("without NTP: State %s, want relay", s)
		}
		if !c.TLSTime().After(time.Now()) {
			t.Error("without NTP: TLSTime is below the floor")
		}
		ntp = true
		if s, _ := c.State(); s != Local {
			t.Errorf("with NTP again: State %s", s)
		}
	})
	synctest.Test(t, func(t *testing.T) { // 2000: no frame may carry that time, whatever NTP says
		c := New(time.Time{}, func() bool { return true })
		if _, ok := c.NowMS(); ok {
			t.Error("a clock in 2000 is trusted")
		}
	})
}

func TestNTPState(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name string
		s    ntpState
		want bool
	}{
		{"just set", ntpState{}, true},
		{"good", ntpState{estError: 2 * ms, maxError: 300 * ms, distance: ms}, true},
		{"before timesyncd's next poll", ntpState{maxError: 1024 * ms}, true},
		{"unsynchronized", ntpState{unsynced: true}, false},
		{"the kernel's start values", ntpState{unsynced: true, estError: 16 * time.Second, maxError: 16 * time.Second}, false},
		{"a large error", ntpState{estError: 1001 * ms}, false},
		{"a large bound", ntpState{maxError: 3 * time.Second}, false},
		{"a clock that is shifted for this process", ntpState{distance: -time.Hour}, false},
	} {
		if got := tt.s.isSynchronized(); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	t.Logf("this machine: %v", NTPSynchronized())
}
