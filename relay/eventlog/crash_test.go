package eventlog

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/kernel"
)

// childEnv makes the test binary a child that appends to the file it names.
const childEnv = "EVENTLOG_TEST_APPEND"

// atEnv makes the child kill itself when this many groups are durable, before any
// appender of the last is answered.
const atEnv = "EVENTLOG_TEST_KILL_AT"

// Each append of the child is three events, which say whose and which of the three.
const (
	childAppenders = 8
	childEvents    = 3
)

func appendUntilKilled(path string) error {
	at, commits := 0, 0
	fmt.Sscan(os.Getenv(atEnv), &at)
	s, err := Open(Options{Path: path, onCommit: func([]kernel.Event) {
		if commits++; commits == at {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	var out sync.Mutex
	for a := range childAppenders {
		go func() {
			<-s.Started()
			for i := 0; ; i++ {
				var events []kernel.Event
				for part := range childEvents {
					e := event("call", fmt.Sprintf("%d-%d-%d", os.Getpid(), a, i), part)
					events = append(events, e)
				}
				last, err := s.Append(ctx, events...)
				if err != nil {
					return // Run ends with its own error
				}
				out.Lock()
				fmt.Println("kept", last, events[0].Aggregate)
				out.Unlock()
			}
		}()
	}
	err = s.Run(ctx)
	cancel(err)
	return err
}

// killWriter runs a child until it is dead, and returns the events that it acknowledged.
func killWriter(t *testing.T, path string, at int) map[string]uint64 {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+path, fmt.Sprintf("%s=%d", atEnv, at))
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kept := map[string]uint64{}
	var killing atomic.Bool
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var seq uint64
		var about string
		if n, _ := fmt.Sscanf(lines.Text(), "kept %d %s", &seq, &about); n != 2 {
			if !killing.Load() {
				t.Fatalf("the child says %q", lines.Text())
			}
			continue // cut in the middle
		}
		kept[about] = seq
		if at == 0 && !killing.Swap(true) {
			after := time.Duration(rand.IntN(20_000)) * time.Microsecond
			time.AfterFunc(after, func() { cmd.Process.Kill() })
		}
	}
	_ = cmd.Wait()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("the child ended with %v", cmd.ProcessState)
	}
	return kept
}

// checkContents wants every event of kept, appends that are whole, and numbers that rise.
func checkContents(t *testing.T, r selector, kept map[string]uint64) (events int) {
	t.Helper()
	last, parts, lastOf := uint64(0), map[string]int{}, map[string]uint64{}
	for _, e := range all(t, r, Query{}) {
		if e.Seq <= last || string(e.Payload) != fmt.Sprintf(`{"n":%d}`, parts[e.Aggregate]) {
			t.Fatalf("event %+v after %d", e, last)
		}
		last = e.Seq
		parts[e.Aggregate]++
		lastOf[e.Aggregate] = e.Seq
		events++
	}
	for about, n := range parts {
		if n != childEvents {
			t.Errorf("%s: %d of %d events", about, n, childEvents)
		}
	}
	for about, seq := range kept {
		if lastOf[about] != seq {
			t.Errorf("%s was kept as %d, is %d", about, seq, lastOf[about])
		}
	}
	return events
}

// kill -9, at random moments and between the commit and the answers: whatever was
// answered is there, nothing is there in part, and the next Open continues above it.
func TestKilledProcessKeepsCommittedEvents(t *testing.T) {
	rounds := 4
	if slow() {
		rounds = 100
	}
	path, kept := logPath(t), map[string]uint64{}
	unanswered := 0
	for round := range rounds {
		at := 0
		if round%2 == 1 {
			at = 1 + rand.IntN(20)
		}
		for about, seq := range killWriter(t, path, at) {
			kept[about] = seq
		}
		s, err := Open(Options{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		events := checkContents(t, s, kept)
		if st := s.Stats(); !st.Recovered || st.Events != int64(events) {
			t.Errorf("stats %+v, want %d events, recovered", st, events)
		}
		unanswered = events/childEvents - len(kept)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		integrity(t, path)
	}
	if unanswered == 0 {
		t.Error("no child died between a commit and its answers")
	}
	t.Logf("%d lives: %d appends answered, all kept; %d kept and not answered", rounds, len(kept), unanswered)
}

// A power cut may leave the end of the write-ahead log unwritten or torn: the log is then
// whole up to some append.
func TestTruncatedWAL(t *testing.T) {
	path := logPath(t)
	s := open(t, Options{Path: path})
	stop := run(t, s)
	for i := range 40 {
		about := fmt.Sprint(i)
		mustAppend(t, s, event("call", about, 0), event("call", about, 1), event("call", about, 2))
	}
	stop()
	db, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	wal, err := os.ReadFile(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	counts := map[int]bool{}
	for range 10 {
		cut := filepath.Join(t.TempDir(), FileName)
		torn := append([]byte(nil), wal[:rand.IntN(len(wal)+1)]...)
		for i := max(0, len(torn)-rand.IntN(5000)); i < len(torn); i++ {
			torn[i] = byte(rand.IntN(256))
		}
		if err := os.WriteFile(cut, db, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(cut+"-wal", torn, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(Options{Path: cut})
		if err != nil {
			t.Fatal(err)
		}
		counts[checkContents(t, s, nil)] = true
		stop := run(t, s)
		mustAppend(t, s, event("call", "again", 0), event("call", "again", 1), event("call", "again", 2))
		stop()
		checkContents(t, s, nil)
		s.Close()
	}
	if len(counts) < 4 {
		t.Errorf("the cuts left %v events: they cut nothing", counts)
	}
}
