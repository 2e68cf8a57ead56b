package daemon

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// timerSlack is how late the kernel may wake a thread that sleeps, nanoseconds. The runtime's
	// monitor thread sleeps 20 µs at a time while a goroutine runs: with the kernel's default it
	// wakes three to six times for each sample of a daemon, with this once. In a busy relay it takes
	// 7 % of the CPU with the default. Timers of Go are in milliseconds.
	timerSlack = 1_000_000
	// defaultTimerSlack is the kernel's, prctl(2). Another value was chosen by somebody, such as
	// systemd (TimerSlackNSec=).
	defaultTimerSlack = 50_000
)

// RelaxTimers executes this program again with timerSlack. The kernel keeps the slack by thread, and
// the monitor thread starts before any code of ours, so that only a slack from before the start
// reaches it. The process id, the arguments and inherited sockets stay, and children inherit the slack.
// Where that is not possible the program goes on as it is. It is called first thing.
func RelaxTimers() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	slack, _, errno := unix.Syscall(unix.SYS_PRCTL, unix.PR_GET_TIMERSLACK, 0, 0)
	if errno != 0 || slack != defaultTimerSlack {
		return
	}
	exe, err := os.Executable()
	if err == nil && unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0) == nil {
		_ = syscall.Exec(exe, os.Args, os.Environ())       // returns if it failed
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) // the default
	}
}

// unmapProgram removes the pages of the program's code and constants from this process's memory,
// most of which only the start or a query needed. They stay in the page cache, where the kernel can
// drop them; what runs each second is mapped again with a few faults.
func unmapProgram() {
	exe, err := os.Executable()
	if err != nil {
		return
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	var begin, end uintptr // of a mapping of the program that nobody can write; 0: of another one
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Bytes()
		if i := bytes.IndexByte(line, ' '); i > 0 && line[i-1] != ':' { // the first line of a mapping
			var perms string
			if _, err := fmt.Sscanf(string(line), "%x-%x %s", &begin, &end, &perms); err != nil ||
				strings.Contains(perms, "w") || !bytes.HasSuffix(line, []byte(" "+exe)) {
				begin = 0
			}
			continue
		}
		// A page that a debugger or a relocation has changed would be lost.
		if begin != 0 && string(bytes.Join(bytes.Fields(line), []byte(" "))) == "Anonymous: 0 kB" {
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, begin, end-begin, unix.MADV_DONTNEED)
		}
	}
}
