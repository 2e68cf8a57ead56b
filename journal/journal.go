// Package journal reads pages of the systemd journal through a helper process, so that the daemon
// needs no right to read it. Query asks, in the daemon; Serve answers, in the helper:
//
//	daemon ── Unix socket ──► agentctl-journal@.service ── pipe ──► journalctl -o json
//	Query                     Serve
//
// systemd starts one helper per connection (agentctl-journal.socket); only the daemon may connect.
// The helper trusts neither side: it checks the request, runs journalctl without a shell, bounds
// what it reads, redacts what looks like a secret, and kills journalctl when the time is up or
// the daemon closes the connection. A compromised daemon therefore gets no more than pages of
// redacted lines.
//
// A connection carries one request and one answer (package unixrpc). journal.go has both messages,
// query.go the daemon's side, serve.go the helper's; entry.go parses what journalctl writes, and
// redact.go finds secrets.
package journal

import (
	"fmt"
	"slices"
	"time"

	"agentctl/lazyregexp"
)

// Bounds of a page.
const (
	MaxLines   = 200
	MaxPage    = 32 << 10 // of Page.Lines as JSON, bytes
	maxMessage = 8192     // of a message, characters
)

// Bounds of the helper.
const (
	maxRequest = 4 << 10   // of a request, bytes
	maxAnswer  = 48 << 10  // of an answer, bytes: a page and its other members
	maxLine    = 256 << 10 // of a line that journalctl writes, bytes; the rest of it is dropped
	// MaxTime bounds the work of a helper for one request.
	MaxTime = 5 * time.Second
)

// Request selects lines of the journal. The zero value of a field selects everything.
type Request struct {
	Unit     string `json:"unit,omitempty"`
	Priority string `json:"priority,omitempty"` // one of priorities: lines of it and more urgent ones
	FromMS   int64  `json:"from_ms,omitempty"`  // milliseconds since 1970
	ToMS     int64  `json:"to_ms,omitempty"`    // not included
	Text     string `json:"text,omitempty"`     // part of the redacted message, in either case
	Limit    int    `json:"limit"`              // lines, up to MaxLines
	Cursor   string `json:"cursor,omitempty"`   // Page.NextCursor of the page before
	// TimeoutMS is how long the helper may read; it then answers with what it has. Required.
	TimeoutMS int64 `json:"timeout_ms"`
}

// Page is an answer, newest line first.
type Page struct {
	Lines      []Line   `json:"lines"`
	Redacted   int      `json:"redacted,omitempty"`    // secrets that were replaced
	NextCursor string   `json:"next_cursor,omitempty"` // of the next page; "": there are no more lines
	Unfinished []string `json:"unfinished,omitempty"`  // "lines": the time was up
}

// Line is an entry of the journal, redacted.
type Line struct {
	TSMS     int64  `json:"ts_ms"` // when the journal received it, milliseconds since 1970
	Unit     string `json:"unit,omitempty"`
	Source   string `json:"source,omitempty"` // SYSLOG_IDENTIFIER, or the name of the program
	PID      int    `json:"pid,omitempty"`
	Priority string `json:"priority,omitempty"`
	Message  string `json:"message"`
	Cut      bool   `json:"cut,omitempty"` // the message was longer
}

// Error is a refusal or failure of the helper.
type Error struct {
	Code string `json:"code"` // one of the constants below
	Text string `json:"text"` // quotes nothing of the journal or of the request
}

// Codes of an Error.
const (
	CodeRequest = "request" // the request is not valid
	CodeCursor  = "cursor"  // its cursor is not one of the journal's
	CodeFailed  = "failed"  // journalctl cannot be run, or failed
)

// Error describes e.
func (e *Error) Error() string { return "journal helper: " + e.Text }

// priorities are the names of the priorities of syslog(3), by number.
var priorities = []string{"emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"}

// The forms of two arguments of journalctl: a unit without wildcards, and a cursor as systemd writes it.
var (
	unitForm   = lazyregexp.New(`^[A-Za-z0-9:_.@\\-]{1,256}$`)
	cursorForm = lazyregexp.New(`^s=[0-9a-f]{32};i=[0-9a-f]{1,16};b=[0-9a-f]{32};m=[0-9a-f]{1,16};t=[0-9a-f]{1,16};x=[0-9a-f]{1,16}$`)
)

// maxTime is the latest time that a request may name, the end of the year 9999.
const maxTime = 253402300799999

// check reports what is wrong with a request.
func (r *Request) check() error {
	wrong := func(what string) error { return &Error{CodeRequest, what + " is not valid"} }
	switch {
	case r.Unit != "" && !unitForm.MatchString(r.Unit):
		return wrong("unit")
	case r.Priority != "" && !slices.Contains(priorities, r.Priority):
		return wrong("priority")
	case r.FromMS < 0 || r.FromMS > maxTime || r.ToMS < 0 || r.ToMS > maxTime:
		return wrong("from_ms or to_ms")
	case len(r.Text) > 1024:
		return wrong("text")
	case r.Limit < 1 || r.Limit > MaxLines:
		return wrong("limit")
	case r.TimeoutMS < 1 || r.TimeoutMS > MaxTime.Milliseconds():
		return wrong("timeout_ms")
	case r.Cursor != "" && !cursorForm.MatchString(r.Cursor):
		return &Error{CodeCursor, "the cursor is not one of a page"}
	}
	return nil
}

// arguments returns the arguments of journalctl. Text is not among them: it is compared after
// redaction, so that nobody can find a secret by searching for it.
func (r *Request) arguments() []string {
	args := []string{"--quiet", "--no-pager", "--all", "--reverse", "--output=json",
		"--output-fields=MESSAGE,PRIORITY,SYSLOG_IDENTIFIER,UNIT,_COMM,_PID,_SYSTEMD_UNIT"}
	if r.Unit != "" {
		args = append(args, "--unit="+r.Unit)
	}
	if r.Priority != "" && r.Priority != "debug" {
		args = append(args, "--priority="+r.Priority)
	}
	if r.FromMS > 0 {
		args = append(args, "--since="+timestamp(r.FromMS*1000))
	}
	if r.ToMS > 0 {
		args = append(args, "--until="+timestamp(r.ToMS*1000-1))
	}
	if r.Cursor != "" {
		args = append(args, "--after-cursor="+r.Cursor) // with --reverse: the older entries
	}
	return args
}

// timestamp writes a time in microseconds since 1970 in the form of systemd.time(7).
func timestamp(us int64) string { return fmt.Sprintf("@%d.%06d", us/1e6, us%1e6) }
