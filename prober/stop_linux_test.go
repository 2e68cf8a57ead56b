package prober

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

const stopChild = "AGENTCTL_TEST_STOP_CHILD"

// TestStopChild is the child process of TestNoBurstAfterStop, and no test by itself. It
// watches each 100 ms and says so on stdout until it is killed.
func TestStopChild(t *testing.T) {
	if os.Getenv(stopChild) == "" {
		t.Skip("it is the child that TestNoBurstAfterStop starts and stops")
	}
	src := newFakeModules()
	src.fake.read = func(n int, s *Sample) error { fmt.Println("read", time.Since(src.begin).Milliseconds(), 0); return nil }
	src.read["temperature"] = func(n int, m *ModuleReadings) error {
		fmt.Println("module", time.Since(src.begin).Milliseconds(), 0)
		return warm(n, m)
	}
	p := New(Options{Source: src, Interval: MaxInterval, Modules: []string{"temperature"}})
	if err := p.SetModuleInterval("temperature", MinInterval); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	go p.Run(ctx)
	p.Watch(ctx, MinInterval, func(s Sample) error {
		_, err := fmt.Println("sample", time.Since(src.begin).Milliseconds(), p.Stats().Slips)
		return err
	})
}

// TestNoBurstAfterStop stops a process for a while, as a debugger, a frozen cgroup or a laptop's lid
// does. It must take one late sample and then keep its cadence, without a burst.
func TestNoBurstAfterStop(t *testing.T) {
	const stopped = 600 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestStopChild$", "-test.v=false")
	cmd.Env = append(os.Environ(), stopChild+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()

	at := map[string][]int64{} // ms of each kind of line
	var slips uint64
	lines := bufio.NewScanner(out)
	samples := func(n int) {
		t.Helper()
		for want := len(at["sample"]) + n; len(at["sample"]) < want && lines.Scan(); {
			var kind string
			var ms int64
			if _, err := fmt.Sscan(lines.Text(), &kind, &ms, &slips); err != nil {
				t.Fatalf("the child says %q: %v", lines.Text(), err)
			}
			at[kind] = append(at[kind], ms)
		}
	}
	samples(3)
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	awaitStopped(t, cmd.Process.Pid)
	time.Sleep(stopped)
	if err := cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	samples(5)

	for kind, ms := range at {
		var gap int64
		for i := range ms {
			if i > 0 {
				gap = max(gap, ms[i]-ms[i-1])
			}
			// A late one and its successor may be close together, but no three are. The
			// time is taken a little after the instant, so the bound has some slack.
			if i > 1 && ms[i]-ms[i-2] < 75 {
				t.Errorf("%s at %v ms: a burst", kind, ms)
				break
			}
		}
		if gap < stopped.Milliseconds() {
			t.Errorf("%s at %v ms: no gap of %v", kind, ms, stopped)
		}
	}
	if len(at["read"]) == 0 || len(at["module"]) == 0 {
		t.Errorf("lines of the child: %v", at)
	}
	if want := uint64(stopped/MinInterval) - 2; slips < want {
		t.Errorf("%d instants were skipped, want at least %d", slips, want)
	}
}

// awaitStopped waits until the kernel has stopped the process.
func awaitStopped(t *testing.T, pid int) {
	t.Helper()
	for range 500 {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if _, rest, ok := strings.Cut(string(b), ") "); ok && rest[0] == 'T' {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	t.Fatal("the child does not stop")
}

// Suspend stops the monotonic clock and moves the wall clock on; the same happens when
// NTP sets it. Neither moves an instant.
func TestWallClockJumps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		jump := int64(0)
		n := 0
		src := &fake{read: func(k int, s *Sample) error {
			if n = k; k == 4 {
				jump = 8 * time.Hour.Milliseconds()
			} else if k == 8 {
				jump = -time.Hour.Milliseconds()
			}
			return nil
		}}
		begin := time.Now()
		p, stop := start(t, Options{Source: src, Interval: time.Second, Now: func() int64 {
			return MinTSMS + time.Since(begin).Milliseconds() + jump
		}})
		settle(10*time.Second + time.Millisecond)
		s, err := p.Latest()
		if st := p.Stats(); err != nil || n != 11 || st.Samples != 11 || st.Slips != 0 {
			t.Errorf("%d readings, %+v, %v, want 11 and no slips", n, st, err)
		}
		if want := MinTSMS + 10_000 - time.Hour.Milliseconds(); s.TSMS != want || s.Mono != 10*time.Second {
			t.Errorf("ts_ms %d at %v, want %d", s.TSMS, s.Mono, want)
		}
		if err := s.Check(); !errors.Is(err, ErrClock) {
			t.Errorf("a clock that was set back: %v, want ErrClock", err)
		}
		stop()
	})
}
