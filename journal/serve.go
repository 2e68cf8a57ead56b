//go:build unix

package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"agentctl/strictjson"
	"agentctl/unixrpc"
)

// killDelay is how long to wait for the stderr of a journalctl that was killed to close: a process that
// it started could have left its process group, and keep it open.
const killDelay = 200 * time.Millisecond

// Serve answers the one request of a connection, with the output of the program journalctl, and closes
// the connection. The error is for the helper's log: the peer gets an Error instead.
func Serve(ctx context.Context, conn net.Conn, journalctl string) error {
	return unixrpc.Serve(ctx, conn, maxRequest, func(ctx context.Context, request []byte) (any, error) {
		page, err := answer(ctx, request, journalctl)
		switch e := new(Error); {
		case err == nil:
			return page, nil
		case errors.As(err, &e):
			return struct {
				Error *Error `json:"error"`
			}{e}, err
		}
		return nil, err
	})
}

// answer returns the page that a request asks for.
func answer(ctx context.Context, request []byte, journalctl string) (*Page, error) {
	r := new(Request)
	if strictjson.Unmarshal(request, r) != nil {
		return nil, &Error{CodeRequest, fmt.Sprintf("the request is not one JSON object of at most %d bytes", maxRequest)}
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return readPage(ctx, r, journalctl)
}

// readPage runs journalctl and fills a page from its output, until the page is full, the request's
// time is up or ctx ends. journalctl writes newest entries first and does not end by itself when the
// page is full: it is killed.
func readPage(ctx context.Context, r *Request, journalctl string) (*Page, error) {
	timed, cancel := context.WithTimeout(ctx, time.Duration(r.TimeoutMS)*time.Millisecond)
	defer cancel()
	out, in, err := os.Pipe()
	if err != nil {
		return nil, &Error{CodeFailed, "no pipe"}
	}
	defer func() { _ = out.Close() }()
	stderr := &tail{}
	cmd := exec.CommandContext(timed, journalctl, r.arguments()...)
	cmd.Env = []string{"LC_ALL=C", "SYSTEMD_COLORS=0", "PATH="}
	cmd.Stdout, cmd.Stderr = in, stderr
	// A process group: killing it also kills processes that journalctl started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killDelay
	err = cmd.Start()
	_ = in.Close()
	if err != nil {
		return nil, errors.Join(&Error{CodeFailed, "journalctl cannot be run"}, err)
	}
	stop := context.AfterFunc(timed, func() { _ = out.SetReadDeadline(time.Now()) })
	defer stop()
	page, more, readErr := fill(newLineReader(out), r)
	timeUp := timed.Err() != nil
	cancel() // kills journalctl, which may have more entries
	err = cmd.Wait()
	switch {
	case timeUp:
		page.Unfinished = []string{"lines"}
	case more:
	case readErr != nil && !errors.Is(readErr, io.EOF):
		return nil, errors.Join(&Error{CodeFailed, "the output of journalctl cannot be read"}, readErr)
	case strings.Contains(stderr.text(), "seek to cursor"):
		return nil, &Error{CodeCursor, "the journal does not have this cursor"}
	case cmd.ProcessState.ExitCode() > 0: // -1 if it was killed
		return nil, errors.Join(&Error{CodeFailed, "journalctl failed"}, err, errors.New(stderr.text()))
	default:
		page.NextCursor = ""
	}
	return page, nil
}

// fill reads entries into a page. more reports that the page is full and there is at least one more
// entry. Page.NextCursor is that of the last entry read, whether the filter let it pass or not, so that
// the next page continues after it. The error is the reader's.
func fill(lines *lineReader, r *Request) (p *Page, more bool, err error) {
	p = &Page{Lines: []Line{}}
	filter := newTextFilter(r.Text)
	size := 0
	for {
		raw, isCut, err := lines.next()
		if err != nil {
			return p, false, err
		}
		e := parseEntry(raw)
		if e.cursor == "" || len(e.cursor) > 256 {
			continue // a line that is not an entry
		}
		if len(p.Lines) == r.Limit {
			return p, true, nil
		}
		e.Cut = e.Cut || isCut
		secrets, ok := e.redact(filter)
		if !ok {
			p.NextCursor = e.cursor
			continue
		}
		var encoded bytes.Buffer
		_ = unixrpc.Encode(&encoded, e.Line)
		if size += encoded.Len(); size > MaxPage {
			return p, true, nil
		}
		p.Lines = append(p.Lines, e.Line)
		p.Redacted += secrets
		p.NextCursor = e.cursor
	}
}

// redact redacts and shortens the message, and returns how many secrets it replaced; ok is false if the
// message does not pass the filter.
func (e *entry) redact(f textFilter) (secrets int, ok bool) {
	if !f.mayPass(e.Message) {
		return 0, false
	}
	// Twice the length that is kept: a secret that the final cut divides must still be recognized.
	message, cutBefore := cutText(e.Message, 2*maxMessage)
	message, secrets = redact(message)
	message, cutAfter := cutMessage(message)
	e.Message, e.Cut = message, e.Cut || cutBefore || cutAfter
	return secrets, f.passes(message)
}

// textFilter selects messages that contain a text, in either case.
type textFilter struct{ text string }

func newTextFilter(text string) textFilter { return textFilter{strings.ToLower(text)} }

// mayPass is a first check of a message that is not redacted yet, because redaction is slow. A text
// that may match the mask, or a part of it and what is beside it, always passes. A message that has the
// text only inside a secret passes here and fails the second check, so that a search cannot find secrets.
func (f textFilter) mayPass(message string) bool {
	if f.passes(message) || strings.Contains(redacted, f.text) || strings.Contains(f.text, redacted) {
		return true
	}
	for i := 1; i < len(redacted); i++ {
		if strings.HasSuffix(f.text, redacted[:i]) || strings.HasPrefix(f.text, redacted[i:]) {
			return true
		}
	}
	return false
}

// passes checks a redacted message.
func (f textFilter) passes(message string) bool {
	return f.text == "" || strings.Contains(strings.ToLower(message), f.text)
}

// tail keeps the last maxTail bytes that are written to it: the end of journalctl's stderr says why it
// failed.
type tail struct{ buf []byte }

const maxTail = 512

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p[max(len(p)-maxTail, 0):]...)
	t.buf = t.buf[max(len(t.buf)-maxTail, 0):]
	return len(p), nil
}

func (t *tail) text() string { return string(t.buf) }
