package eventlog

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"

	"agentctl/relay/kernel"
)

// bytesRead returns how much this process has read by system calls.
func bytesRead(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Skip("this kernel does not count what a process reads: ", err)
	}
	n, err := strconv.ParseInt(string(regexp.MustCompile(`rchar: (\d+)`).FindSubmatch(b)[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A replay does not read events of other types, and with AGENTCTL_SLOW=1, a start does not read the calls,
// which are most of a log: what is read does not grow with their number.
func TestStartReadsWhatItReplays(t *testing.T) {
	read := func(calls, published int) (open, replay int64) {
		path := logPath(t)
		s := start(t, Options{Path: path, MaxQueued: 1 << 16})
		group := make([]kernel.Event, 0, MaxAppend)
		for i := range calls + published + 200 {
			e := call("default", i)
			if i < 200 {
				e = event("ticket.created", fmt.Sprint(i), i)
			} else if i < 200+published {
				e = event("event", "log/app", i)
			}
			if group = append(group, e); len(group) == MaxAppend {
				mustAppend(t, s, group...)
				group = group[:0]
			}
		}
		mustAppend(t, s, group...)
		copied := logPath(t)
		copyLog(t, path, copied)
		if s, err := Open(Options{Path: copied}); err != nil || s.Close() != nil { // without a write-ahead log
			t.Fatal(err)
		}
		before := bytesRead(t)
		again, err := Open(Options{Path: copied})
		if err != nil {
			t.Fatal(err)
		}
		opened := bytesRead(t)
		if n := len(replayed(t, again, 0, "ticket.*")); n != 200 {
			t.Errorf("%d events were replayed", n)
		}
		done := bytesRead(t)
		if err := again.Close(); err != nil {
			t.Error(err)
		}
		return opened - before, done - opened
	}
	if slow() {
		const few, many = newestWindow + 1000, newestWindow + 6000 // both have more than the rows whose times are read
		openFew, _ := read(few, 0)
		openMany, _ := read(many, 0)
		if openMany > openFew+64<<10 {
			t.Errorf("Open reads %d KiB of a log with %d calls, and %d KiB with %d", openMany>>10, many, openFew>>10, few)
		}
	}
	_, replayFew := read(0, 0)
	const published = 3000
	_, replayMany := read(0, published)
	if replayMany > replayFew+8<<10 {
		t.Errorf("a replay reads %d KiB of a log with %d other events, and %d KiB without", replayMany>>10, published, replayFew>>10)
	}
}
