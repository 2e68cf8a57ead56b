package storage

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"agentctl/manifest"
)

// Reason is manifest.Error.Reason of an answer that a fault of the disk caused. Clients may rely on it.
const Reason = "storage"

// Error is a fault of a store. Wrap makes one of an error of the disk.
type Error struct {
	Store string // "events.db" or the like
	Kind  Kind
	Err   error // the cause; may be nil
}

// Wrap returns err as an *Error if it is a fault of the disk, so that every caller up to the
// endpoints can recognize it. Other errors and nil are returned as they are. dir is the store's
// directory: SQLite reports a filesystem that became read-only as an I/O error, so Wrap tries to
// write there.
func Wrap(dir, store string, err error) error {
	kind := Classify(err)
	if kind == "" {
		return err
	}
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	if kind == Failing && dir != "" && readOnly.check(dir) {
		kind = ReadOnly
	}
	return &Error{store, kind, err}
}

// readOnlyCache remembers whether a directory could be written: the check is a write itself. It knows
// the last directory only, since the stores of a relay share one.
type readOnlyCache struct {
	mu     sync.Mutex // held across the write, so that many callers that fail at once cause one
	dir    string
	at     time.Time
	result bool
}

var readOnly readOnlyCache

// readOnlyInterval is how long a result is used. It bounds the writes to two a second, however many
// callers fail.
const readOnlyInterval = 500 * time.Millisecond

// check reports whether the filesystem of a directory is read-only (EROFS), by making a file there. If
// that fails for another reason, such as no space, the caller keeps the kind that Classify found.
func (c *readOnlyCache) check(dir string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dir == dir && time.Since(c.at) < readOnlyInterval {
		return c.result
	}
	f, err := os.CreateTemp(dir, ".storage-*")
	if err == nil {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}
	c.dir, c.at, c.result = dir, time.Now(), errors.Is(err, syscall.EROFS)
	return c.result
}

// TimedOut wraps the end of a request's context while it waited for a store, so that its
// caller learns what it waited for. Other errors and nil are returned as they are. It is for calls that
// wait for nothing but the store.
func TimedOut(store string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return &Error{store, Hung, err}
	}
	return err
}

// Error is the text of the cause, which has the path and the next step.
func (e *Error) Error() string {
	if e.Err != nil {
		return e.Err.Error()
	}
	return e.Store + " is " + string(e.Kind)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// As turns the fault into the answer of its caller, for manifest.AsError.
func (e *Error) As(target any) bool {
	t, ok := target.(**manifest.Error)
	if ok {
		*t = answer(e.Kind)
	}
	return ok
}

// retryAfterMS is what an answer suggests: about as long as Monitor needs to see that a fault
// has ended.
const retryAfterMS = 5000

// answer is the error that a client gets. Its code is that of an internal error, since the codes are a
// closed set; Reason and the text say that the disk was the cause.
func answer(kind Kind) *manifest.Error {
	e := &manifest.Error{Code: manifest.Internal, Reason: Reason, ShowReason: true, Message: messages[kind]}
	if e.Message == "" {
		e.Message = messages[Failing]
	}
	if kind.Retryable() {
		e.RetryAfterMS = retryAfterMS
	} else {
		e.NoRetry = true
	}
	return e
}

// messages are for callers, who cannot repair the disk; operators have the log and
// `agentctl relay status`.
var messages = map[Kind]string{
	Slow:     "the relay's disk is slow; try again in some seconds",
	Hung:     "the relay's disk does not answer; try again in some seconds",
	Full:     "the relay's disk is full, nothing was changed; try again later, and tell the relay's operator",
	ReadOnly: "the relay cannot write to its disk, nothing was changed; tell the relay's operator",
	Failing:  "the relay's disk reports errors; try again in some seconds, and tell the relay's operator",
	Locked:   "the relay's database is in use by another program; try again in some seconds",
	Damaged:  "the relay's stored data is damaged; tell the relay's operator (agentctl relay check)",
	Missing:  "the relay runs without its event log; tell the relay's operator (agentctl relay status)",
	Lost:     "the relay lost data; tell the relay's operator (agentctl relay status)",
}
