package link

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/clock"
)

// Handler is what a device answers. It announces exactly what it answers.
type Handler interface {
	// Capabilities is asked once a link, at its announce.
	Capabilities() []manifest.Capability
	// Call checks and answers one command within ctx, which also ends when the relay
	// cancels the command. For a subscription stream is not nil: it runs after the result
	// was sent, calls send for each frame and returns when ctx ends or send fails. It may
	// be dropped without being run, so that it has to begin what it needs. The error is a
	// *manifest.Error.
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

// Status is what a client tells about its link.
type Status struct {
	State     State
	Since     time.Time
	NodeID    string
	Tenant    string
	LastErr   string // what happened last, for the box's owner
	LastCode  int    // close code, 0 if none
	LastErrAt time.Time
	// CloneSuspected: in the last two hours another install took this node's link over.
	CloneSuspected bool
	Drops          uint64 // frames that found the send queue full
	Reconnects     uint64
}

// ClientOptions configure the device's end.
type ClientOptions struct {
	Dial       func(ctx context.Context) (Conn, error)
	Token      func() (string, error) // read again before every auth
	Version    string
	InstanceID string // 32 hex digits
	Name       string // wanted name, may be empty
	Handler    Handler
	Clock      *clock.Clock
	// OnReady is called after each announce_ack.
	OnReady func(ok AuthOK)
	// OnCall is called after each command was answered, from the command's goroutine.
	// traceID is the caller's, "" when it sent none; err is what the relay was told.
	OnCall func(tool, traceID string, took time.Duration, err error)
	// OnState is called after each change, from the client's goroutine.
	OnState func(Status)
	// IsUntrusted tells whether a dial error means that the certificate is not trusted.
	IsUntrusted func(error) bool
}

// Client keeps one device linked to its relay, for ever. Make one with NewClient.
type Client struct {
	opt    ClientOptions
	bootID string
	token  string // of the last auth; Run's goroutine only

	wg sync.WaitGroup // commands and streams, those of earlier links included

	mu             sync.Mutex // protects the fields below
	dedup          dedupTable
	activeHandlers int // handlers that have not come back, those left behind included
	status         Status
	pendingEvents  [][]byte    // events that no link has taken yet, encoded
	link           *clientLink // the one that is ready, or nil
	takenOverAt    time.Time   // when 4409 came last; zero: never
}

// NewClient makes a client; Run does the work.
func NewClient(opt ClientOptions) *Client {
	if opt.Clock == nil {
		opt.Clock = clock.New(time.Time{})
	}
	return &Client{opt: opt, bootID: NewID(), status: Status{State: StateConnecting, Since: time.Now()}}
}

// Status is a snapshot.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statusLocked()
}

func (c *Client) statusLocked() Status {
	s := c.status
	s.CloneSuspected = !c.takenOverAt.IsZero() && time.Since(c.takenOverAt) < takeoverMemory
	return s
}

// SendEvent sends an event to the relay, now or once there is a link again. Of those that wait
// the newest 32 are kept. data is a JSON object; false: it is none, or larger than
// MaxEvent.
func (c *Client) SendEvent(topic string, data []byte) bool {
	var line bytes.Buffer
	if json.Compact(&line, data) != nil || line.Len() > MaxEvent || line.Bytes()[0] != '{' {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pendingEvents) == maxPendingEvents {
		c.pendingEvents = slices.Delete(c.pendingEvents, 0, 1)
		c.status.Drops++
	}
	c.pendingEvents = append(c.pendingEvents, Encode(TypeEvent, NewID(), "", Event{Topic: topic, Data: line.Bytes()}))
	c.flushLocked()
	return true
}

// flushLocked hands what waits to the link, as far as its queue has room.
func (c *Client) flushLocked() {
	for c.link != nil && len(c.pendingEvents) > 0 {
		select {
		case c.link.sendQueue <- c.pendingEvents[0]:
			c.pendingEvents = slices.Delete(c.pendingEvents, 0, 1)
		default:
			return // with the next event, or the next link
		}
	}
}

// setLink has events go to l; nil: there is no link.
func (c *Client) setLink(l *clientLink) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
	c.flushLocked()
}

// Run dials, serves and dials again until ctx ends; it returns ctx's cause after every
// goroutine it started has ended, handlers included.
func (c *Client) Run(ctx context.Context) error {
	defer c.wg.Wait()
	var back Backoff
	start := time.Now()
	for {
		c.updateStatus(func(s *Status) { s.State = StateConnecting })
		ready, err := c.runLink(ctx, &back)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		code := CloseCode(err)
		wait := back.Next(code, ready, time.Since(start))
		c.updateStatus(func(s *Status) {
			s.State = c.stateFor(code, err)
			s.LastErr, s.LastCode, s.LastErrAt = err.Error(), code, time.Now()
			if code == CloseSuperseded {
				c.takenOverAt = time.Now()
			}
			s.Reconnects++
		})
		if code == CloseAuthFailed || code == CloseForbidden {
			c.waitForNewToken(ctx, wait)
		} else {
			sleep(ctx, wait)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// tokenPollInterval is how often a client whose token was refused looks for another one.
const tokenPollInterval = 5 * time.Second

// waitForNewToken waits before the refused token is tried again; another token ends the wait.
func (c *Client) waitForNewToken(ctx context.Context, d time.Duration) {
	for end := time.Now().Add(d); ctx.Err() == nil && time.Now().Before(end); {
		sleep(ctx, min(tokenPollInterval, time.Until(end)))
		if t, err := c.opt.Token(); err == nil && t != c.token {
			return
		}
	}
}

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

// runLink is one link from dial to end.
func (c *Client) runLink(ctx context.Context, back *Backoff) (ready time.Duration, err error) {
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	conn, err := c.opt.Dial(dialCtx)
	cancel()
	if err != nil {
		return 0, err
	}
	l := newClientLink(ctx, c, conn)
	defer l.wait()
	ok, err := l.handshake()
	if err != nil {
		return 0, l.close(err)
	}
	back.SetSpread(time.Duration(ok.ReconnectSpreadMS) * time.Millisecond)
	began := time.Now()
	c.updateStatus(func(s *Status) { s.State, s.NodeID, s.Tenant = StateReady, ok.NodeID, ok.TenantID })
	if c.opt.OnReady != nil {
		c.opt.OnReady(*ok)
	}
	c.setLink(l)
	defer c.setLink(nil)
	err = l.close(l.serve())
	return time.Since(began), err
}
