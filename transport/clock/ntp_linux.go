package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// NTPSynchronized reports whether NTP, PTP or the like keeps the system clock right to about a
// second (adjtimex(2)). It costs one system call and needs no privilege; where a sandbox forbids
// it, the answer is no.
//
// A client of NTP clears STA_UNSYNC, and the kernel sets it when nobody has disciplined the clock
// for hours, or somebody else has set it.
func NTPSynchronized() bool {
	var t unix.Timex
	before := time.Now()
	state, err := unix.Adjtimex(&t)
	if err != nil || state == unix.TIME_ERROR {
		return false
	}
	nanos := int64(t.Time.Usec)
	if t.Status&unix.STA_NANO == 0 {
		nanos *= 1000
	}
	return ntpState{
		unsynced: t.Status&unix.STA_UNSYNC != 0,
		estError: time.Duration(t.Esterror) * time.Microsecond,
		maxError: time.Duration(t.Maxerror) * time.Microsecond,
		distance: time.Unix(int64(t.Time.Sec), nanos).Sub(before.Round(0)),
	}.isSynchronized()
}
