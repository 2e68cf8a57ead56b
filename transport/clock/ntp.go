package clock

import "time"

// ntpState is what the kernel knows about the system clock.
type ntpState struct {
	unsynced bool
	estError time.Duration // the client's estimate of the error
	maxError time.Duration // the bound; it grows by 500 ppm until the client sets it again
	distance time.Duration // from the clock of this process to the kernel's
}

const (
	// maxNTPError is the largest error of a clock that counts as synchronized.
	maxNTPError = time.Second
	// maxErrorGrowth is what the kernel adds to the bound between two polls of systemd-timesyncd,
	// 2,048 s apart. Without it such a board would count as unsynchronized for the last minute.
	maxErrorGrowth = 1100 * time.Millisecond
	// maxDistance distinguishes the kernel's clock from one that a program or a sandbox shifts for
	// this process: NTP says nothing about the latter.
	maxDistance = time.Second
)

func (s ntpState) isSynchronized() bool {
	return !s.unsynced && s.estError <= maxNTPError && s.maxError <= maxNTPError+maxErrorGrowth &&
		max(s.distance, -s.distance) <= maxDistance
}
