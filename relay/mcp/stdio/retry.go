package stdio

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"time"
)

// A relay that restarts does not answer for a second or two, and its boards a little longer: an outage.
// The bridge hides it where that is safe:
//
//	the request cannot have run    sent again until retryWindow is over
//	it may have run, and reads     sent again once
//	it may have run, and writes    its client gets the error, with the outcome
//
// A request is not sent again when its client has got a message of the first attempt.
const (
	retryWindow   = 15 * time.Second // from the beginning of an outage
	minRetryDelay = 200 * time.Millisecond
	maxRetryDelay = time.Second
	maxReadOnly   = 16384 // tools that are known to be read-only
)

// Words of the relay's error envelope (docs/protocol.md, "Errors").
const (
	outcomeNotSent  = "not_sent"
	reasonStopping  = "stopping"
	codeNodeOffline = "E_NODE_OFFLINE"
)

// outageError reports that the relay stopped, or the connection to it broke, before a request was answered.
type outageError struct {
	err       error
	answer    []byte // of the relay, which was stopping; nil for a broken connection
	notSent   bool   // the request cannot have run
	retryable bool   // the relay says that the request may be sent again although it may have run
}

func (e *outageError) Error() string {
	if e.err == nil {
		return "the relay is restarting"
	}
	return e.err.Error()
}

func (e *outageError) Unwrap() error { return e.err }

// connectionLost describes an error of the HTTP client: a request whose connection was not opened
// was not sent.
func connectionLost(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.As(err, new(*rpcError)) || errors.Is(err, errSessionLost) || errors.Is(err, errAnswerTooLarge) {
		return err
	}
	if _, ok := errors.AsType[net.Error](err); !ok && !errors.Is(err, errNoAnswer) && !isBrokenStream(err) {
		return err // of the token, say
	}
	op, ok := errors.AsType[*net.OpError](err)
	return &outageError{err: err, notSent: ok && op.Op == "dial"}
}

// callError is the part of the relay's error envelope that decides about a retry.
type callError struct {
	Code      string `json:"code"`
	Outcome   string `json:"outcome"`
	Reason    string `json:"reason"`
	Retryable bool   `json:"retryable"`
}

var hasOutcome = []byte(`"outcome":"`)

// parseOutage returns an outageError for an answer that says that the relay was stopping or, soon after
// a restart, that a board has not connected yet; nil for every other answer. Most answers are not even
// decoded: only errors have an outcome.
func parseOutage(answer []byte, restarted bool) *outageError {
	if !bytes.Contains(answer, hasOutcome) {
		return nil
	}
	type envelope struct {
		Error callError `json:"error"`
	}
	var a struct {
		Result struct {
			IsError           bool     `json:"isError"`
			StructuredContent envelope `json:"structuredContent"`
		} `json:"result"`
		Error struct {
			Data envelope `json:"data"`
		} `json:"error"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return nil
	}
	e := a.Error.Data.Error
	if a.Result.IsError {
		e = a.Result.StructuredContent.Error
	}
	return e.outage(answer, restarted)
}

// outage is parseOutage for the envelope in an answer.
func (e *callError) outage(answer []byte, restarted bool) *outageError {
	notSent := e.Outcome == outcomeNotSent
	if e.Reason != reasonStopping && !(restarted && notSent && e.Code == codeNodeOffline) {
		return nil
	}
	return &outageError{answer: answer, notSent: notSent, retryable: e.Retryable}
}

// hasRecentOutage reports whether an outage began less than retryWindow ago.
func (b *bridge) hasRecentOutage() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.outageAt.IsZero() && time.Since(b.outageAt) < retryWindow
}

// noteOutage records the beginning of an outage. Later errors of the same one do not prolong the time for
// retries, and a relay that has never answered has no outage: nobody waits for it.
func (b *bridge) noteOutage() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hasAnswered && (b.outageAt.IsZero() || time.Since(b.outageAt) >= retryWindow) {
		b.outageAt = time.Now()
	}
}

// noteAnswer records that the relay has answered once.
func (b *bridge) noteAnswer() {
	b.mu.Lock()
	b.hasAnswered = true
	b.mu.Unlock()
}

// retries is the state of the attempts of one request.
type retries struct {
	resent bool // although it may have run
	delay  time.Duration
}

// wait reports whether m may be sent again after err, and if so waits for the delay between two attempts.
func (r *retries) wait(ctx context.Context, b *bridge, m *message, err error) bool {
	outage, ok := errors.AsType[*outageError](err)
	if !ok || !m.isRequest() || m.Method == "subscriptions/listen" {
		return false
	}
	b.noteOutage()
	// A request that may have run is repeated once at most, and only if it reads or the relay allows it.
	if !b.hasRecentOutage() || !outage.notSent && (r.resent || !outage.retryable && !b.isReadOnly(m)) {
		return false
	}
	r.resent = r.resent || !outage.notSent
	r.delay = min(max(2*r.delay, minRetryDelay), maxRetryDelay)
	select {
	case <-time.After(r.delay):
		return true
	case <-ctx.Done():
		return false
	}
}

// readMethods change nothing, whatever their params.
var readMethods = map[string]bool{
	"ping": true, "tools/list": true, "resources/list": true, "resources/templates/list": true, "resources/read": true,
	"prompts/list": true, "prompts/get": true, "completion/complete": true, "server/discover": true,
	"resources/subscribe": true, "resources/unsubscribe": true, "logging/setLevel": true, // a second one changes nothing
}

// isReadOnly reports whether a request may run twice: it reads, or calls a tool of which tools/list
// has said so.
func (b *bridge) isReadOnly(m *message) bool {
	if m.Method != "tools/call" {
		return readMethods[m.Method]
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.readOnly[m.name]
}

// trackTools records which tools of a tools/list only read.
func (b *bridge) trackTools(answer []byte) {
	var a struct {
		Result struct {
			Tools []struct {
				Name        string `json:"name"`
				Annotations struct {
					ReadOnly bool `json:"readOnlyHint"`
				} `json:"annotations"`
			} `json:"tools"`
		} `json:"result"`
	}
	if json.Unmarshal(answer, &a) != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range a.Result.Tools {
		switch {
		case !t.Annotations.ReadOnly:
			delete(b.readOnly, t.Name)
		case len(b.readOnly) < maxReadOnly:
			b.readOnly[t.Name] = true
		}
	}
}
