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

// The life of a plugin's process:
//
// 	start  dir/run in a new process group, with a minimal environment
// 	run    JSON-RPC over stdin and stdout, log lines over stderr
// 	stop   close stdin; after stopGrace kill the process group
// 	end    wait for the process, then kill the rest of its group
//
// A process that does not read is ended by the kill of Send (see lineChannel).

// stopGrace is how long a plugin's process may run after its stdin was closed. Then it is
// killed, with its process group.
const stopGrace = 2 * time.Second

// socketDialer connects to a server that the relay does not start. The end of the connection
// does not end that server.
func socketDialer(path string) func(context.Context) (*lineChannel, error) {
	return func(ctx context.Context) (*lineChannel, error) {
		var d net.Dialer
		nc, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return newLineChannel(nc, nc, func() { _ = nc.Close() }, nc.Close), nil
	}
}

// processDialer starts the executable dir/run and connects to its stdio. The process gets
// none of the relay's environment, which may hold secrets, except PATH. It leads a new process
// group, so that a kill also reaches its children.
//
// The process does not end with the context of the dial, which bounds the handshake only. The
// returned channel's Close stops it and waits for it.
func processDialer(dir, name string, log *zap.Logger) func(context.Context) (*lineChannel, error) {
	return func(context.Context) (*lineChannel, error) {
		cmd := exec.Command(filepath.Join(dir, runFile))
		cmd.Dir = dir
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LANG=C.UTF-8", "MCP_AGENT_ID=plugin:" + name}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		killWithParent(cmd.SysProcAttr)
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		cmd.Stderr = &lineLogger{log: log}
		cmd.WaitDelay = stopGrace // a child of the plugin may hold stderr open
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
		}
		log.Debug("plugin started", zap.Int("pid", cmd.Process.Pid))
		killAll := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		return newLineChannel(out, in.(deadlineWriter), killAll, func() error { // an *os.File
			_ = in.Close() // the end of its input asks it to stop
			kill := time.AfterFunc(stopGrace, killAll)
			err := cmd.Wait()
			kill.Stop()
			killAll() // processes that it left behind
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				log.Info("plugin ended", zap.String("status", exit.String()))
			}
			return nil
		}), nil
	}
}

// Bounds of the log lines from a plugin's stderr.
const (
	maxLogLine  = 512 // bytes of a line
	maxLogLines = 100 // a second
)

// lineLogger logs a plugin's stderr, line by line. It counts the lines beyond maxLogLines
// and cuts the ones beyond maxLogLine. A last line without a line break is not logged.
//
// It needs no lock: os/exec copies stderr from one goroutine.
type lineLogger struct {
	log    *zap.Logger
	line   []byte
	second time.Time // when counting began
	lines  int
}

// Write implements io.Writer. It never fails: a plugin must not end because of its log.
func (l *lineLogger) Write(b []byte) (int, error) {
	for _, c := range b {
		switch {
		case c == '\n':
			l.logLine()
			l.line = l.line[:0]
		case len(l.line) >= maxLogLine: // the rest of a long line is not kept
		default:
			l.line = append(l.line, c)
		}
	}
	return len(b), nil
}

// logLine logs the current line, unless there were too many in this second. The first line of
// the next second reports how many were left out.
func (l *lineLogger) logLine() {
	if now := time.Now(); now.Sub(l.second) >= time.Second {
		if l.lines > maxLogLines {
			l.log.Warn("plugin wrote too much to stderr", zap.Int("lines_left_out", l.lines-maxLogLines))
		}
		l.second, l.lines = now, 0
	}
	if l.lines++; l.lines <= maxLogLines {
		l.log.Info("plugin stderr", zap.String("line", printable(string(l.line))))
	}
}

// printable replaces characters that could control a terminal: control characters, and those
// that change the direction of writing.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return '?'
	}, s)
}
