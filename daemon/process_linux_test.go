package daemon

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// tuneEnv makes the test binary tune itself and print the result.
const tuneEnv = "DAEMON_TEST_TUNE"

func TestMain(m *testing.M) {
	if os.Getenv(tuneEnv) != "" {
		TuneProcess()
		slacks := map[string]bool{}
		runtime.LockOSThread()
		threads, err := os.ReadDir("/proc/self/task")
		for _, thread := range threads {
			slack, readErr := os.ReadFile("/proc/" + thread.Name() + "/timerslack_ns")
			if errors.Is(readErr, fs.ErrPermission) {
				continue // only root may read that of another thread
			}
			slacks[strings.TrimSpace(string(slack))] = true
			err = errors.Join(err, readErr)
		}
		fmt.Println(os.Getpid(), runtime.GOMAXPROCS(0), slacks, err, os.Args[1:])
		return
	}
	os.Exit(m.Run())
}

// The program runs on with the same process id and arguments, and all its threads have the slack.
func TestTuneProcess(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for env, procs := range map[string]string{"": "1", "GOMAXPROCS=3": "3"} {
		cmd := exec.Command(exe, "run", "--x=a b")
		cmd.Env = []string{tuneEnv + "=1", "GORACE=atexit_sleep_ms=0", cmp.Or(env, "X=")}
		out, err := cmd.Output()
		want := fmt.Sprint(cmd.Process.Pid, " ", procs, " map[", timerSlack, ":true] <nil> [run --x=a b]\n")
		if err != nil || string(out) != want {
			t.Errorf("with %q: %q, want %q: %v", env, out, want, err)
		}
	}
}

// residentFile is how much of files, most of all of the program, is in this process's memory, KiB.
func residentFile(t *testing.T) (kib int) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := bytes.Cut(status, []byte("RssFile:"))
	if _, err := fmt.Sscan(string(line), &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}

func TestMemoryReturner(t *testing.T) {
	var m memoryReturner
	released := 0
	poll := func() { m.poll(func() { released++ }) }
	before := residentFile(t)
	poll()
	if after := residentFile(t); released != 1 || after > before*3/4 {
		t.Errorf("after the start %d releases, %d KiB of files in memory, before %d", released, after, before)
	}
	poll()
	if released != 1 {
		t.Error("memory was returned though nothing was allocated")
	}
	garbage := make([][]byte, 0, 100)
	for range cap(garbage) {
		garbage = append(garbage, make([]byte, 2*returnAfter/cap(garbage)))
	}
	poll()
	if released != 2 {
		t.Errorf("%d releases after %d bytes", released, len(garbage)*len(garbage[0]))
	}
}
