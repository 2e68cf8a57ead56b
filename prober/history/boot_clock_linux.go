package history

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// kernelBootID identifies the time since the machine was started.
func kernelBootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || len(b) < 32 {
		return processBootID()
	}
	return strings.TrimSpace(string(b))
}

// kernelClock counts since the machine was started, sleep included: undated samples get their time by
// the difference to the wall clock, which goes on during sleep.
func kernelClock() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // fails only for a clock that does not exist
	return time.Duration(ts.Nano())
}

// threadWrites is how many bytes this thread sent to the disk: dirty pages count when they
// become dirty. It is 0 where the kernel does not count.
func threadWrites() int64 {
	b, err := os.ReadFile("/proc/thread-self/io")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "write_bytes: "); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}
