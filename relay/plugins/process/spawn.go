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
	"syscall"
	"time"
	"unicode"

	"go.uber.org/zap"
)

// A plugin's process gets stopGrace after its stdin closed before it is killed with
// everything it started.
const stopGrace = 2 * time.Second

// socketDialer connects to a server that somebody else runs.
func socketDialer(path string) func(context.Context) (*lines, error) {
	return func(ctx context.Context) (*lines, error) {
		var d net.Dialer
		nc, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return newLines(nc, nc, func() { _ = nc.Close() }, nc.Close), nil
	}
}

// processDialer starts the executable dir/run and speaks to its stdio. Its environment
// is its own: nothing of the relay's, where secrets may be.
func processDialer(dir, name string, log *zap.Logger) func(context.Context) (*lines, error) {
	return func(context.Context) (*lines, error) {
		cmd := exec.Command(filepath.Join(dir, runFile))
		cmd.Dir = dir
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LANG=C.UTF-8", "MCP_AGENT_ID=plugin:" + name}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		endWithUs(cmd.SysProcAttr)
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		cmd.Stderr = &lineLogger{log: log}
		cmd.WaitDelay = stopGrace // for a pipe that something it started holds open
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
		}
		log.Debug("plugin started", zap.Int("pid", cmd.Process.Pid))
		killAll := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		return newLines(out, in.(writer), killAll, func() error { // an *os.File
			_ = in.Close() // the end of its input is its order to stop
			kill := time.AfterFunc(stopGrace, killAll)
			err := cmd.Wait()
			kill.Stop()
			killAll() // what it left behind
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				log.Info("plugin ended", zap.String("status", exit.String()))
			}
			return nil
		}), nil
	}
}

// Bounds of what a plugin's stderr puts into our log.
const (
	maxLogLine  = 512 // bytes of a line
	maxLogLines = 100 // a second
)

// lineLogger passes a plugin's stderr on, line by line; what is too much is counted.
type lineLogger struct {
	log    *zap.Logger
	line   []byte
	second time.Time // when the lines in n began to be counted
	n      int
}

func (l *lineLogger) Write(b []byte) (int, error) {
	for _, c := range b {
		switch {
		case c == '\n':
			l.say()
			l.line = l.line[:0]
		case len(l.line) >= maxLogLine: // the rest of a long line is not kept
		default:
			l.line = append(l.line, c)
		}
	}
	return len(b), nil
}

func (l *lineLogger) say() {
	if now := time.Now(); now.Sub(l.second) >= time.Second {
		if l.n > maxLogLines {
			l.log.Warn("plugin says too much", zap.Int("lines_left_out", l.n-maxLogLines))
		}
		l.second, l.n = now, 0
	}
	if l.n++; l.n <= maxLogLines {
		l.log.Info("plugin says", zap.String("line", graphic(string(l.line))))
	}
}

// graphic is a plugin's text without what would steer a terminal: control characters, and
// those that turn the writing round.
func graphic(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return '?'
	}, s)
}
