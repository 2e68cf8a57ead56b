package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/sandbox"
)

// TestPluginThatNeverAnswers: one that stops reading holds up neither its unloading nor the end of
// the relay, which is what the harness's cleanup waits for.
func TestPluginThatNeverAnswers(t *testing.T) {
	t.Parallel()
	r := newHarness(t)
	r.folder("odd", odd, shellServer(`sleep 60`))
	if err := r.load("odd"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for range 4 { // more than a pipe takes
		wg.Go(func() {
			_, _ = r.k.Call(ctx, &kernel.Request{Caller: all, Tool: "odd.do", Arguments: []byte(`{"x":"` + strings.Repeat("y", 60<<10) + `"}`)})
		})
	}
	wg.Wait()
	ended := make(chan error, 1)
	go func() { ended <- r.h.Unload(t.Context(), "odd") }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(8 * time.Second):
		t.Fatal("it cannot be unloaded")
	}
}

// TestPluginThatDoesNotRead: a message that is not taken in time ends the connection, and what
// the plugin says meanwhile is not read without end.
func TestPluginThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in, _ := net.Pipe() // nobody reads it
		out, plugin := net.Pipe()
		aborted := make(chan struct{})
		l := newLineChannel(out, in, func() { close(aborted); _ = out.Close() }, func() error { return nil })
		began := time.Now()
		sent := make(chan error)
		go func() { sent <- l.Send([]byte("{}")) }()
		synctest.Wait()
		go func() {
			for {
				if _, err := plugin.Write([]byte("{}\n")); err != nil {
					return
				}
			}
		}()
		var read atomic.Int64
		go func() {
			for {
				if _, err := l.Recv(); err != nil {
					return
				}
				read.Add(1)
			}
		}()
		synctest.Wait()
		if n := read.Load(); n < 1000 || n > maxReadAhead/messageOverhead {
			t.Errorf("%d messages read while one waits", n)
		}
		if err := <-sent; err == nil || time.Since(began) != sendTimeout {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		<-aborted
		if err := l.Send([]byte("{}")); err == nil || time.Since(began) != sendTimeout {
			t.Errorf("another one: %v after %s", err, time.Since(began))
		}
		synctest.Wait()
	})
}

// TestStderrFlood: a flood on stderr does not flood the log.
func TestStderrFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		l := newLineLogger(zap.New(core))
		for range 10_000 {
			_, _ = l.Write([]byte("again\n"))
		}
		if n := logs.Len(); n != maxLogLines {
			t.Errorf("%d lines", n)
		}
		time.Sleep(time.Second)
		_, _ = l.Write([]byte("last\n"))
		if n := logs.FilterMessage("plugin wrote too much to stderr").FilterField(zap.Int("lines_left_out", 10_000-maxLogLines)).Len(); n != 1 {
			t.Error(logs.All()[logs.Len()-2:])
		}
		if n := logs.FilterField(zap.String("line", "last")).Len(); n != 1 {
			t.Error("the next second's line is missing")
		}
		_, _ = l.Write([]byte("\x1b[2J a \u009b2J b \u202e c \x9b d\te \u00e9\n"))
		if line, _ := logs.All()[logs.Len()-1].ContextMap()["line"].(string); line != "?[2J a ?2J b ? c \ufffd d?e \u00e9" {
			t.Errorf("line %q", line)
		}
	})
}

// TestLargeManifest: a file without end is not read to its end.
func TestLargeManifest(t *testing.T) {
	r := newHarness(t)
	dir := r.folder("odd", odd, shellServer(""))
	if err := os.Truncate(filepath.Join(dir, "plugin.json"), 1<<31-1); err != nil { // sparse
		t.Fatal(err)
	}
	if err := r.h.Check("odd"); err == nil || !strings.Contains(err.Error(), "larger than 1 MiB") {
		t.Error(err)
	}
}

// TestFolderOwnership: who owns a folder, or may write the directory, decides what runs.
func TestFolderOwnership(t *testing.T) {
	r := newHarness(t)
	dir := r.folder("odd", odd, shellServer(""))
	if err := os.Chmod(r.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := r.h.Check("odd"); err == nil || !strings.Contains(err.Error(), "chmod go-w "+r.dir) {
		t.Errorf("a directory that all may write: %v", err)
	}
	if err := os.Chmod(r.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.h.Check("odd"); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	for _, path := range []string{dir, filepath.Join(dir, "run"), filepath.Join(dir, "plugin.json")} {
		if err := os.Chown(path, 12345, -1); err != nil {
			t.Fatal(err)
		}
		if err := r.h.Check("odd"); err == nil || !strings.Contains(err.Error(), "belongs to uid 12345") {
			t.Errorf("%s: %v", path, err)
		}
		if err := os.Chown(path, 0, -1); err != nil {
			t.Fatal(err)
		}
	}
}

// TestKilledRelay: a plugin that cares for nothing does not outlive a relay that was killed.
func TestKilledRelay(t *testing.T) {
	if dir := os.Getenv("TEST_KILLED_RELAY"); dir != "" { // the relay
		c := &child{name: "odd", dir: dir, program: program{path: filepath.Join(dir, "run")}, data: dir + "-data", sandbox: sandbox.Available() == nil}
		c.policy = sandbox.Policy{Folder: dir, Data: c.data}
		if _, err := c.dial(zap.NewNop())(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
	}
	dir := newHarness(t).folder("odd", odd, "#!/bin/sh\ncd; echo $$ >pid.tmp; mv pid.tmp pid\nexec sleep 60\n")
	relay := exec.Command(os.Args[0], "-test.run=^TestKilledRelay$")
	relay.Env = append(os.Environ(), "TEST_KILLED_RELAY="+dir)
	if err := relay.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = relay.Process.Kill(); _ = relay.Wait() }()
	pid := 0
	until(t, "start of the plugin", func() bool {
		if b, err := os.ReadFile(filepath.Join(dir+"-data", "pid")); err == nil {
			_, _ = fmt.Sscan(string(b), &pid)
		}
		return pid != 0
	})
	defer func() {
		if t.Failed() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}()
	_ = relay.Process.Kill()
	_ = relay.Wait()
	until(t, "end of the plugin after the relay was killed", func() bool { return hasExited(pid) })
}

// hasExited: there is no such process, or nobody has asked for its status yet.
func hasExited(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || strings.Contains(string(b), ") Z ")
}
