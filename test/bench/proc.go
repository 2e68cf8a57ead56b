//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a child whose CPU and memory are read from outside.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended

	mu    sync.Mutex // protects the fields below
	tail  []string   // its last lines, for errors
	lines chan string
}

// start runs a program until it prints a line that ready accepts; that line is returned.
func start(wait time.Duration, ready func(line string) bool, name string, args ...string) (*process, string, error) {
	p := &process{cmd: exec.Command(name, args...), done: make(chan struct{}), lines: make(chan string, 64)}
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "AGENTCTL_") { // the caller's defaults are not the bench's
			p.cmd.Env = append(p.cmd.Env, e)
		}
	}
	// Nothing survives this process.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, "", err
	}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	if err := p.cmd.Start(); err != nil {
		return nil, "", errors.Join(err, r.Close(), w.Close())
	}
	_ = w.Close()
	go p.read(r)
	timeout := time.After(wait)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				return nil, "", fmt.Errorf("%s ended: %s", name, p.last())
			}
			if ready(line) {
				return p, line, nil
			}
		case <-timeout:
			p.kill()
			return nil, "", fmt.Errorf("%s is not ready after %s: %s", name, wait, p.last())
		}
	}
}

// read takes what the child prints until it has ended, and waits for it.
func (p *process) read(r io.ReadCloser) {
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		p.mu.Lock()
		p.tail = append(p.tail, sc.Text())
		if len(p.tail) > 20 {
			p.tail = p.tail[1:]
		}
		p.mu.Unlock()
		select {
		case p.lines <- sc.Text():
		default: // nobody waits for lines any more
		}
	}
	_ = r.Close()
	_ = p.cmd.Wait()
	close(p.lines)
	close(p.done)
}

func (p *process) last() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.tail, " | ")
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// stop asks the child to end, and insists after ten seconds.
func (p *process) stop() {
	if p == nil {
		return
	}
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.kill()
	}
}

// cpu is the time that all threads of the child, ended ones included, have run, in user
// mode and in the kernel. The kernel's clock of another process is exact to the
// nanosecond, unlike the ticks of /proc/PID/stat.
func (p *process) cpu() time.Duration {
	var t unix.Timespec
	const sched = 2 // CPUCLOCK_SCHED, see clock_getcpuclockid(3)
	if unix.ClockGettime(int32(^p.pid())<<3|sched, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// waited is how long the child's threads have waited for a core that something else used.
func (p *process) waited() (d time.Duration) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.pid()))
	for _, t := range threads {
		if data, err := os.ReadFile(t); err == nil {
			var ran, waited time.Duration
			_, _ = fmt.Sscan(string(data), &ran, &waited)
			d += waited
		}
	}
	return d
}

// wakeups is how often the child's threads have given their core up to wait for something.
func (p *process) wakeups() (n int) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.pid()))
	for _, t := range threads {
		if data, err := os.ReadFile(t); err == nil {
			_, after, _ := strings.Cut(string(data), "\nvoluntary_ctxt_switches:")
			var switches int
			_, _ = fmt.Sscan(after, &switches)
			n += switches
		}
	}
	return n
}

// memory reads a field of /proc/PID/status, such as VmRSS, KiB.
func (p *process) memory(field string) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid()))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(data), "\n"+field+":")
	var kib float64
	_, _ = fmt.Sscan(after, &kib)
	return kib
}

// files counts the child's open descriptors.
func (p *process) files() int {
	d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid()))
	if err != nil {
		return 0
	}
	return len(d)
}

// output runs a command to its end.
func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, errs.String())
	}
	return string(out), nil
}

func loadavg() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(data), " ")
	return one
}

// kernelVersion is the first two numbers of the kernel's release.
func kernelVersion() string {
	data, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "Linux"
	}
	v := strings.SplitN(string(data), ".", 3)
	if len(v) < 2 {
		return "Linux"
	}
	if _, err := strconv.Atoi(v[1]); err != nil {
		return "Linux"
	}
	return "Linux " + v[0] + "." + v[1]
}
