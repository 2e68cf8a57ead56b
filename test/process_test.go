package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/auth"
)

// process is a program that a test runs, usually agentctl, with what it has printed.
type process struct {
	cmd      *exec.Cmd
	out, err *buffer       // stdout and stderr
	ended    chan struct{} // closed when the program has ended and all of its output is in out and err

	t testing.TB // nil in a script, which reports failures in its own way
}

// startProcess runs a program until it ends, at the latest when the test does. It has no settings but
// those of its arguments: the environment has PATH and an empty HOME only. wrap is put before path and may
// be nil.
func startProcess(t testing.TB, wrap []string, path string, args ...string) *process {
	t.Helper()
	argv := append(append(slices.Clone(wrap), path), args...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}
	p, err := startCommand(cmd)
	if err != nil {
		t.Fatal(err)
	}
	p.t = t
	t.Cleanup(p.kill)
	return p
}

// startCommand starts a command. The caller ends it, with kill or exit.
func startCommand(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, out: new(buffer), err: new(buffer), ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.out, p.err
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// kill ends the program at once, and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// exit ends the program as a service manager does, and returns its exit code. One that does not end in
// time is killed, which is an error.
func (p *process) exit() (code int, err error) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.kill()
		return 0, fmt.Errorf("%v did not end after SIGTERM\n%s%s", p.cmd.Args, p.out, p.err)
	}
	return p.cmd.ProcessState.ExitCode(), nil
}

// stop ends the program as a service manager does, and wants exit code 0.
func (p *process) stop() {
	p.t.Helper()
	code, err := p.exit()
	if err != nil {
		p.t.Fatal(err)
	}
	if code != 0 {
		p.t.Errorf("%v ended with %d\n%s", p.cmd.Args, code, p.err)
	}
}

// waitLine waits until the program has printed a line that matches, on stdout or stderr, and returns it.
// It is an error if the program ends without one.
func (p *process) waitLine(match func(line string) bool) (string, error) {
	timeout := time.After(patience)
	for hasEnded := false; ; {
		out, moreOut := p.out.watch()
		errs, moreErr := p.err.watch()
		for line := range strings.Lines(out + errs) {
			// A program may have written only the beginning of its newest line.
			if (strings.HasSuffix(line, "\n") || hasEnded) && match(line) {
				return line, nil
			}
		}
		if hasEnded {
			return "", fmt.Errorf("%v ended with %d before that\n%s%s", p.cmd.Args, p.cmd.ProcessState.ExitCode(), out, errs)
		}
		select {
		case <-moreOut:
		case <-moreErr:
		case <-p.ended:
			hasEnded = true
		case <-timeout:
			return "", fmt.Errorf("%v did not do that in %s\n%s%s", p.cmd.Args, patience, out, errs)
		}
	}
}

// waitOutput waits until the program has printed a text within a line.
func (p *process) waitOutput(text string) {
	p.t.Helper()
	if _, err := p.waitLine(func(line string) bool { return strings.Contains(line, text) }); err != nil {
		p.t.Fatalf("wait for the output %s: %v", text, err)
	}
}

// buffer is a bytes.Buffer for several goroutines, whose readers can wait for more.
type buffer struct {
	mu   sync.Mutex // protects the fields below
	b    bytes.Buffer
	more chan struct{} // closed by the next write; nil while nobody waits
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.more != nil {
		close(b.more)
		b.more = nil
	}
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// watch returns what was written so far, and a channel that is closed when more is.
func (b *buffer) watch() (content string, more <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.more == nil {
		b.more = make(chan struct{})
	}
	return b.b.String(), b.more
}

// relayProcess is an 'agentctl relay', which a test can kill.
type relayProcess struct {
	*process
	url        string
	metricsURL string // "" without --metrics-listen
}

// startRelay starts a relay on a state directory, and waits until it is ready. args come after the flags
// for a free port of 127.0.0.1 without metrics, and take precedence.
func startRelay(t testing.TB, dir string, args ...string) *relayProcess {
	t.Helper()
	args = append([]string{"relay", "--state-dir", dir, "--listen", "127.0.0.1:0", "--metrics-listen", ""}, args...)
	r := &relayProcess{process: startProcess(t, nil, binary(t, "agentctl", ""), args...)}
	line, err := r.waitLine(func(line string) bool { return strings.Contains(line, `"ready":true`) })
	if err != nil {
		t.Fatal(err)
	}
	var ready struct {
		URL        string `json:"url"`
		MetricsURL string `json:"metrics_url"`
	}
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		t.Fatal(err)
	}
	r.url, r.metricsURL = ready.URL, ready.MetricsURL
	return r
}

// createToken creates a token in a state directory, which becomes that of a new relay if it is empty.
func createToken(t testing.TB, dir string, req auth.MintRequest) auth.Minted {
	t.Helper()
	store, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	created, err := store.Mint(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return created[0]
}
