package link

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/clock"
)

// Handler answers a device's commands. It announces exactly what it answers.
type Handler interface {
	// Capabilities is called for each announce: one per link, and one after Client.Announce.
	// Kinds that came with v2.1 are left out of an announce on v2.
	Capabilities() []manifest.Capability
	// Call checks and answers one command within ctx, which also ends when the relay
	// cancels the command. For a subscription stream is not nil: it runs after the result
	// was sent, calls send for each frame and returns when ctx ends or send fails. It may
	// be dropped without being run, so it must not rely on that for cleaning up. The error
	// is a *manifest.Error.
	Call(ctx context.Context, tool manifest.ToolName, args []byte) (result []byte, stream StreamFunc, err error)
}

// StreamFunc produces the frames of one stream; send copies them.
type StreamFunc = func(ctx context.Context, send func(sample []byte) error) error

// State of a device's link, as `status` shows it.
type State string

// States of a link.
const (
	StateConnecting   State = "connecting"
	StateReady        State = "ready"
	StateWaiting      State = "waiting"       // until the next dial
	StateRefused      State = "refused"       // token or manifest not accepted
	StateTLSUntrusted State = "tls_untrusted" // the relay's certificate is not trusted
	StateDisabled     State = "disabled"      // no relay configured
)

// Status describes a client's link.
type Status struct {
	State     State
	Since     time.Time
	NodeID    string
	Tenant    string
	LastErr   string // for the operator of the board
	LastCode  int    // close code, 0 if none
	LastErrAt time.Time
	NextTry   time.Time // of the next dial; zero unless the client waits for it
	// CloneSuspected: in the last two hours another installation took this node's link over.
	CloneSuspected bool
	Drops          uint64 // metric frames and events dropped because a queue was full
	Reconnects     uint64 // links that ended, and dials that failed
	Resumed        uint64 // links that continued the session before
	Expired        uint64 // commands that arrived too late to be started
}

// ClientOptions configure the device's end.
type ClientOptions struct {
	Dial       func(ctx context.Context) (Conn, error)
	Token      func() (string, error) // read again before each auth
	Version    string
	InstanceID string // 32 hex digits
	Name       string // wanted name, may be empty
	Handler    Handler
	Clock      *clock.Clock // set to the relay's time; nil: a private one
	// OnReady is called after each announce_ack, before the state is StateReady: who waits for that
	// state finds what OnReady has stored.
	OnReady func(ok AuthOK)
	// Sign proves that this board holds the key of its token: it signs
	// enrollment.LinkMessage of the relay's nonce, the node id and the token. It returns ""
	// for a token that is not bound to a key. It is called for each auth on v2.1; nil: no proof.
	Sign func(nonce, token string) (proof string, err error)
	// OnCall is called after each command was answered, in the command's goroutine.
	// traceID is the caller's, "" when it sent none; err is what the relay was answered.
	OnCall func(tool, traceID string, took time.Duration, err error)
	// OnState is called after each change, in the client's goroutine.
	OnState func(Status)
	// IsUntrusted reports whether a dial error means that the certificate is not trusted.
	IsUntrusted func(error) bool
}

// Client keeps one device linked to its relay. Make one with NewClient. It outlives its
// links: what must survive a reconnect is here, the rest in clientLink.
type Client struct {
	opt    ClientOptions
	bootID string
	token  string // of the last auth; owned by Run's goroutine

	wg       sync.WaitGroup // commands, handlers and streams, those of earlier links included
	handlers chan struct{}  // a slot for each handler that has not returned, abandoned ones included
	newEvent chan struct{}  // buffers one: events is not empty
	announce chan struct{}  // buffers one: the capabilities may have changed
	wakes    chan struct{}  // holds one element after Wake

	mu          sync.Mutex // protects the fields below
	events      [][]byte   // frames that wait for a ready link, oldest first
	dedup       dedupTable
	cancels     map[string]context.CancelCauseFunc // running commands and open streams, by msg_id
	sessionID   string                             // of the last session
	session     int                                // counts sessions; a resumed link keeps it
	isResumable bool                               // the last session was on v2.1
	sessionCtx  context.Context                    // ends with the session: commands run in it
	endSession  context.CancelCauseFunc
	ready       *clientLink // on which answers are sent; nil: none is ready
	status      Status
	takenOverAt time.Time // last close with 4409; zero: none
}

// NewClient makes a client; Run does the work.
func NewClient(opt ClientOptions) *Client {
	if opt.Clock == nil {
		opt.Clock = clock.New(time.Time{}, nil)
	}
	return &Client{opt: opt, bootID: NewID(), handlers: make(chan struct{}, MaxInflight), newEvent: make(chan struct{}, 1), announce: make(chan struct{}, 1), cancels: make(map[string]context.CancelCauseFunc),
		wakes: make(chan struct{}, 1), endSession: func(error) {}, status: Status{State: StateConnecting, Since: time.Now()}}
}

// Continue makes c, which does not run yet, the successor of a client of this process: it has the
// same boot_id, since the device was not restarted, and takes the events that wait.
func (c *Client) Continue(from *Client) {
	c.bootID = from.bootID
	c.TakeEvents(from)
}

// TakeEvents moves the events that wait in another client to c. They are older than those of c.
// Like SendEvent it drops the oldest beyond maxPendingEvents.
func (c *Client) TakeEvents(from *Client) {
	from.mu.Lock()
	events := from.events
	from.events = nil
	from.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = slices.Concat(events, c.events)
	if over := len(c.events) - maxPendingEvents; over > 0 {
		c.events = slices.Delete(c.events, 0, over)
		c.status.Drops += uint64(over)
	}
	c.signalEventLocked()
}

// Announce announces the capabilities of the handler again, now or with the next link: they have
// changed. Commands and streams go on.
func (c *Client) Announce() {
	select {
	case c.announce <- struct{}{}:
	default: // the announce that waits will have this change, too
	}
}

// Pending is how many events wait for a link.
func (c *Client) Pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.events)
}

// Status is a snapshot.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statusLocked()
}

// statusLocked adds what depends on the time.
func (c *Client) statusLocked() Status {
	s := c.status
	s.CloneSuspected = !c.takenOverAt.IsZero() && time.Since(c.takenOverAt) < takeoverMemory
	return s
}

// SessionID is the id of the current session, or of the last one while there is no link; ""
// before the first.
func (c *Client) SessionID() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sessionID
}

// SendEvent sends an event to the relay, now or when there is a link again. At most
// maxPendingEvents wait; the oldest is dropped for a new one. data is a JSON object; false:
// it is not, or it is larger than MaxEvent.
func (c *Client) SendEvent(topic string, data []byte) bool {
	var line bytes.Buffer
	if json.Compact(&line, data) != nil || line.Len() > MaxEvent || line.Bytes()[0] != '{' {
		return false
	}
	frame := Encode(TypeEvent, NewID(), "", Event{Topic: topic, Data: line.Bytes()})
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) == maxPendingEvents {
		c.events = slices.Delete(c.events, 0, 1)
		c.status.Drops++
	}
	c.events = append(c.events, frame)
	c.signalEventLocked()
	return true
}

// signalEventLocked wakes the writer of a ready link if an event waits.
func (c *Client) signalEventLocked() {
	if len(c.events) == 0 {
		return
	}
	select {
	case c.newEvent <- struct{}{}:
	default:
	}
}

// takeEvent removes the oldest event, nil if none waits.
func (c *Client) takeEvent() (frame []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) == 0 {
		return nil
	}
	frame = c.events[0]
	if c.events = slices.Delete(c.events, 0, 1); len(c.events) == 0 {
		c.events = nil // an outage may have made it long
	}
	c.signalEventLocked()
	return frame
}

// returnEvent puts an event that could not be written back for the next link, unless the
// queue is full.
func (c *Client) returnEvent(frame []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) == maxPendingEvents {
		c.status.Drops++
		return
	}
	c.events = slices.Insert(c.events, 0, frame)
	c.signalEventLocked()
}

// Run dials, serves and dials again until ctx ends. It returns ctx's cause when the
// goroutines that it started have ended, handlers included.
func (c *Client) Run(ctx context.Context) error {
	defer c.wg.Wait()
	defer c.finishSession()
	var backoff Backoff
	start := time.Now()
	for ctx.Err() == nil {
		c.updateStatus(func(s *Status) { s.State, s.NextTry = StateConnecting, time.Time{} })
		ready, err := c.runLink(ctx, &backoff)
		if ctx.Err() != nil {
			break
		}
		if ready > 0 {
			select {
			case <-c.wakes: // of the dial that led to this link
			default:
			}
		}
		code := CloseCode(err)
		wait := backoff.Next(code, ready, time.Since(start))
		c.updateStatus(func(s *Status) {
			s.State = c.stateFor(code, err)
			s.LastErr, s.LastCode, s.LastErrAt = err.Error(), code, time.Now()
			s.NextTry = time.Now().Add(wait)
			if code == CloseSuperseded {
				c.takenOverAt = time.Now()
			}
			s.Reconnects++
		})
		if c.wait(ctx, code, wait) {
			c.updateStatus(func(s *Status) {
				wait = backoff.Wake(time.Until(s.NextTry), time.Since(start))
				s.NextTry = time.Now().Add(wait)
			})
			sleep(ctx, wait)
		}
	}
	return context.Cause(ctx)
}

// Wake ends the present wait for the next dial, or that after a dial in progress: the network or
// the configuration changed, or an operator asks for it. It does nothing while the link is ready,
// so that no board skips the spread after the relay's next restart. A wait after the relay refused
// this device ends only if the token changed.
//
// It may be called at any time and any number of times (see Backoff.Wake).
func (c *Client) Wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.status.State == StateReady {
		return
	}
	select {
	case c.wakes <- struct{}{}:
	default: // it has not seen the last one
	}
}

// tokenPollInterval is how often a client whose token was refused checks for a new one.
const tokenPollInterval = 5 * time.Second

// wait waits at most d for the next dial after a link ended with a close code. woken reports that
// Wake ended it, or a new token after the old one was refused.
func (c *Client) wait(ctx context.Context, code int, d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	var poll <-chan time.Time
	if code == CloseAuthFailed || code == CloseForbidden {
		ticker := time.NewTicker(tokenPollInterval)
		defer ticker.Stop()
		poll = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return false
		case <-poll:
			if c.hasNewToken() {
				return true
			}
		case <-c.wakes:
			if !isRefusal(code) || c.hasNewToken() {
				return true
			}
		}
	}
}

// isRefusal reports whether a close code says that this device, as it is, is not wanted now.
func isRefusal(code int) bool {
	switch code {
	case CloseAuthFailed, CloseForbidden, CloseSuperseded, CloseManifestInvalid, CloseUpgradeRequired, CloseRateLimited:
		return true
	}
	return false
}

// hasNewToken reports whether the token is another one than that of the last auth.
func (c *Client) hasNewToken() bool {
	t, err := c.opt.Token()
	return err == nil && t != c.token
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// stateFor is the state of a client whose link ended with err and a close code.
func (c *Client) stateFor(code int, err error) State {
	switch code {
	case CloseAuthFailed, CloseForbidden, CloseManifestInvalid, CloseUpgradeRequired:
		return StateRefused
	}
	if c.opt.IsUntrusted != nil && c.opt.IsUntrusted(err) {
		return StateTLSUntrusted
	}
	return StateWaiting
}

// updateStatus changes the status and reports it. OnState runs without the lock, so that it
// may call Status.
func (c *Client) updateStatus(change func(*Status)) {
	c.mu.Lock()
	before := c.status.State
	change(&c.status)
	if c.status.State != before {
		c.status.Since = time.Now()
	}
	s := c.statusLocked()
	c.mu.Unlock()
	if c.opt.OnState != nil {
		c.opt.OnState(s)
	}
}

// dialTimeout bounds one dial, proxies and TLS included.
const dialTimeout = 30 * time.Second

// runLink runs one link from the dial to its end. ready is how long it was ready.
func (c *Client) runLink(ctx context.Context, backoff *Backoff) (ready time.Duration, err error) {
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	conn, err := c.opt.Dial(dialCtx)
	cancel()
	if err != nil {
		return 0, err
	}
	l := newClientLink(ctx, c, conn)
	defer l.wg.Wait()
	ok, err := l.handshake()
	if err != nil {
		return 0, l.close(err)
	}
	backoff.SetSpread(time.Duration(ok.ReconnectSpreadMS) * time.Millisecond)
	readyAt := time.Now()
	if c.opt.OnReady != nil {
		c.opt.OnReady(*ok)
	}
	c.updateStatus(func(s *Status) {
		s.State, s.NodeID, s.Tenant = StateReady, ok.NodeID, ok.TenantID
		if l.resumed {
			s.Resumed++
		}
	})
	err = l.close(l.serve())
	return time.Since(readyAt), err
}

// resume asks for the last session, if it can be resumed; nil: there is none.
func (c *Client) resume() *Resume {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.isResumable {
		return nil
	}
	return &Resume{SessionID: c.sessionID, Seen: c.dedup.seen(c.session, time.Now())}
}

// errSessionEnded is the cause of a command's ctx when its session was not resumed.
var errSessionEnded = errors.New("link: the session has ended")

// startSession takes the session of an auth_ok. When it is not the one before, the commands
// of that are canceled and their answers not sent: the relay has answered their callers.
func (c *Client) startSession(ctx context.Context, l *clientLink, ok *AuthOK) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.resumed = ok.Resumed && l.resume != nil && ok.SessionID == l.resume.SessionID
	if !l.resumed {
		c.endSession(errSessionEnded)
		c.session++
		c.sessionCtx, c.endSession = context.WithCancelCause(ctx)
	}
	c.sessionID, c.isResumable, l.session = ok.SessionID, l.v21, c.session
}

// finishSession ends the last session.
func (c *Client) finishSession() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endSession(errSessionEnded)
}

// linkReady makes l the link on which answers are sent, and returns those that the commands
// of a resumed session got in the meantime. No answer falls between the two.
func (c *Client) linkReady(l *clientLink) (acks [][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = l
	if l.resumed {
		acks = c.dedup.answers(l.resume.Seen)
	}
	return acks
}

// linkEnded is the opposite of linkReady.
func (c *Client) linkEnded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = nil
}

// finish stores a command's answer, in case the command is repeated or the link is lost. It
// returns the ready link of the command's session. nil: there is none, and the next link sends
// the answer if it resumes the session.
func (c *Client) finish(id string, ack []byte, isStream bool) *clientLink {
	c.mu.Lock()
	defer c.mu.Unlock()
	session := c.dedup.finish(id, ack, isStream, time.Now())
	if c.ready != nil && c.ready.session == session {
		return c.ready
	}
	return nil
}

// answer stores a command's answer and sends it.
func (c *Client) answer(id string, ack []byte) {
	if l := c.finish(id, ack, false); l != nil {
		_ = l.send(ack) // a link that has ended: the next one sends it
	}
}
