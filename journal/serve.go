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

// killDelay is how long a killed journalctl may keep its pipes open.
const killDelay = 200 * time.Millisecond

// Serve answers the one request of a connection from the program journalctl, and closes the
// connection. The error is for the helper's log: the peer gets an Error instead.
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

// answer reads the page that a request selects.
func answer(ctx context.Context, request []byte, journalctl string) (*Page, error) {
	r := new(Request)
	if strictjson.Unmarshal(request, r) != nil {
		return nil, &Error{CodeRequest, fmt.Sprintf("the request is not one JSON object of at most %d bytes", maxRequest)}
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return read(ctx, r, journalctl)
}

// read runs journalctl and makes a page of what it writes, until the page is full, the request's time
// is up or ctx ends.
func read(ctx context.Context, r *Request, journalctl string) (*Page, error) {
	timed, cancel := context.WithTimeout(ctx, time.Duration(r.TimeoutMS)*time.Millisecond)
	defer cancel()
	out, in, err := os.Pipe()
	if err != nil {
		return nil, &Error{CodeFailed, "no pipe"}
	}
	defer func() { _ = out.Close() }()
	complaints := &tail{}
	cmd := exec.CommandContext(timed, journalctl, r.arguments()...)
	cmd.Env = []string{"LC_ALL=C", "SYSTEMD_COLORS=0", "PATH="}
	cmd.Stdout, cmd.Stderr = in, complaints
	// What it may start goes with it.
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
	cancel() // journalctl may have more to say
	err = cmd.Wait()
	switch {
	case timeUp:
		page.Unfinished = []string{"lines"}
	case more:
	case readErr != nil && !errors.Is(readErr, io.EOF):
		return nil, errors.Join(&Error{CodeFailed, "what journalctl writes cannot be read"}, readErr)
	case strings.Contains(complaints.text(), "seek to cursor"):
		return nil, &Error{CodeCursor, "the journal does not have this cursor"}
	case cmd.ProcessState.ExitCode() > 0: // and not killed: it had ended before
		return nil, errors.Join(&Error{CodeFailed, "journalctl failed"}, err, errors.New(complaints.text()))
	default:
		page.NextCursor = ""
	}
	return page, nil
}

// fill reads entries into a page. more: it is full, and there is at least one more entry. NextCursor
// is that of the last entry that was looked at. The error is that of the reader.
func fill(lines *lineReader, r *Request) (p *Page, more bool, err error) {
	p = &Page{Lines: []Line{}}
	filter := newTextFilter(r.Text)
	size := 0
	for {
		raw, cut, err := lines.next()
		if err != nil {
			return p, false, err
		}
		e := parseEntry(raw)
		if e.cursor == "" || len(e.cursor) > 256 {
			continue // not an entry
		}
		if len(p.Lines) == r.Limit {
			return p, true, nil
		}
		e.Cut = e.Cut || cut
		secrets, ok := e.clean(filter)
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

// clean redacts and cuts the message; false: it does not pass the filter.
func (e *entry) clean(f textFilter) (secrets int, ok bool) {
	if !f.mayPass(e.Message) {
		return 0, false
	}
	// A secret beyond the cut can make no difference, but one across it has to be recognized.
	message, cutBefore := cutText(e.Message, 2*maxMessage)
	message, secrets = redact(message)
	message, cutAfter := cutMessage(message)
	e.Message, e.Cut = message, e.Cut || cutBefore || cutAfter
	return secrets, f.passes(message)
}

// textFilter selects messages by a text in either case.
type textFilter struct{ text string }

func newTextFilter(text string) textFilter { return textFilter{strings.ToLower(text)} }

// mayPass is a first check, of a message that is not redacted yet: redaction is slow.
func (f textFilter) mayPass(message string) bool {
	return f.text == "" || strings.Contains(redacted, f.text) || strings.Contains(f.text, redacted) || f.passes(message)
}

func (f textFilter) passes(message string) bool {
	return f.text == "" || strings.Contains(strings.ToLower(message), f.text)
}

// tail keeps the last part of what is written to it.
type tail struct{ buf []byte }

// maxTail is how much a tail keeps, bytes.
const maxTail = 512

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p[max(len(p)-maxTail, 0):]...)
	t.buf = t.buf[max(len(t.buf)-maxTail, 0):]
	return len(p), nil
}

func (t *tail) text() string { return string(t.buf) }
