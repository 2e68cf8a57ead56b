package process

import (
	"strings"
	"time"

	"go.uber.org/zap"
)

// Bounds of the log lines from a plugin's stderr.
const (
	maxLogLine  = 512      // bytes of a line
	maxLogLines = 100      // a second
	maxRawLine  = 16 << 10 // bytes of a line in which secrets are searched: a cut one would not be recognized
)

// lineLogger logs a plugin's stderr, line by line. It counts the lines beyond maxLogLines
// and cuts the ones beyond maxLogLine. A last line without a line break is not logged.
//
// It needs no lock: os/exec copies stderr from one goroutine.
type lineLogger struct {
	log    *zap.Logger
	event  string                                  // the message of a logged line
	filter func(line string, isLogged bool) string // removes secrets; it gets all lines
	line   []byte
	second time.Time // when counting began
	lines  int
}

// lineFilterer is a core of a log that removes secrets from lines. A secret may have several lines, so
// that each stream has a filter, in addition to what the core does with each line.
type lineFilterer interface {
	LineFilter() func(line string, isLogged bool) string
}

func newLineLogger(log *zap.Logger) *lineLogger {
	l := &lineLogger{log: log, event: "plugin stderr", filter: func(line string, _ bool) string { return line }}
	if c, ok := log.Core().(lineFilterer); ok {
		l.filter = c.LineFilter()
	}
	return l
}

// newNoiseLogger returns a function that logs lines that a server prints to stdout between its messages.
func newNoiseLogger(log *zap.Logger) func(line []byte) {
	l := newLineLogger(log)
	l.event = "plugin stdout"
	return func(line []byte) {
		_, _ = l.Write(line)
		_, _ = l.Write([]byte{'\n'})
	}
}

// Write implements io.Writer. It never fails: a plugin must not end because of its log.
func (l *lineLogger) Write(b []byte) (int, error) {
	for _, c := range b {
		switch {
		case c == '\n':
			l.logLine()
			// Release the memory of a long line; the plugin may run for months.
			if l.line = l.line[:0]; cap(l.line) > maxLogLine {
				l.line = nil
			}
		case len(l.line) >= maxRawLine: // the rest of a long line is not kept
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
			l.log.Warn("plugin wrote too much to "+strings.TrimPrefix(l.event, "plugin "), zap.Int("lines_left_out", l.lines-maxLogLines))
		}
		l.second, l.lines = now, 0
	}
	l.lines++
	isLogged := l.lines <= maxLogLines
	// The filter gets lines that are not logged too: a secret of several lines may begin in one.
	line := l.filter(string(l.line), isLogged)
	if isLogged {
		l.log.Info(l.event, zap.String("line", printable(line[:min(len(line), maxLogLine)])))
	}
}
