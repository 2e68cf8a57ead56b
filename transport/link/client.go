package link

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/clock"
	"agentctl/transport/strictjson"
)

// Handler is what a device answers. It announces exactly what it answers.
type Handler interface {
	Capabilities() []manifest.Capability
	// Call checks and answers one command within ctx. For a subscription stream is not
	// nil: it runs after the result was sent, calls send for each frame and returns when
	// ctx ends or send fails. The error is a *manifest.Error.
	Call(ctx context.Context, tool manifest.ToolName, args []byte) (result []byte, stream StreamFunc, err error)
}

// StreamFunc produces the frames of one stream.
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
	State          State
	Since          time.Time
	NodeID         string
	Tenant         string
	LastErr        string // what happened last, for the box's owner
	LastCode       int    // close code, 0 if none
	LastErrAt      time.Time
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
	// OnState is called after each change, from the client's goroutine.
	OnState func(Status)
	// Untrusted tells whether a dial error means that the certificate is not trusted.
	Untrusted func(error) bool
}

// Client keeps one device linked to its relay, for ever. Make one with NewClient.
type Client struct {
	opt    ClientOptions
	bootID string
	seen   Seen // belongs to mu

	mu     sync.Mutex // protects seen and status
	status Status
}

// NewClient makes a client; Run does the work.
func NewClient(opt ClientOptions) *Client {
	if opt.Clock == nil {
		opt.Clock = clock.New(time.Time{})
	}
	return &Client{opt: opt, bootID: manifest.NewULID(), status: Status{State: StateConnecting, Since: time.Now()}}
}

// Status is a snapshot.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

// Run dials, serves and dials again until ctx ends; it returns ctx's cause after every
// goroutine it started has ended.
func (c *Client) Run(ctx context.Context) error {
	var back Backoff
	start := time.Now()
	for {
		c.set(func(s *Status) { s.State = StateConnecting })
		ready, err := c.once(ctx, &back)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		code := CloseCode(err)
		wait := back.Next(code, ready, time.Since(start))
		c.set(func(s *Status) {
			s.State = c.stateAfter(code, err)
			s.LastErr, s.LastCode, s.LastErrAt = err.Error(), code, time.Now()
			s.CloneSuspected = code == CloseSuperseded
			s.Reconnects++
		})
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

func (c *Client) stateAfter(code int, err error) State {
	switch code {
	case CloseAuthFailed, CloseForbidden, CloseManifestInvalid, CloseUpgradeRequired:
		return StateRefused
	}
	if c.opt.Untrusted != nil && c.opt.Untrusted(err) {
		return StateTLSUntrusted
	}
	return StateWaiting
}

func (c *Client) set(change func(*Status)) {
	c.mu.Lock()
	before := c.status.State
	change(&c.status)
	if c.status.State != before {
		c.status.Since = time.Now()
	}
	s := c.status
	c.mu.Unlock()
	if c.opt.OnState != nil {
		c.opt.OnState(s)
	}
}

// once is one link from dial to end; it waits for its goroutines.
func (c *Client) once(ctx context.Context, back *Backoff) (ready time.Duration, err error) {
	dialCtx, cancel := context.WithTimeout(ctx, 30*time.Second)
	conn, err := c.opt.Dial(dialCtx)
	cancel()
	if err != nil {
		return 0, err
	}
	l := &clientLink{c: c, conn: conn, out: make(chan []byte, maxQueue), streams: make(map[string]context.CancelFunc), running: make(map[string]context.CancelFunc)}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	defer l.cancel(nil)
	stop := context.AfterFunc(l.ctx, func() { _ = conn.Close(CloseNormal, "normal") })
	defer stop()
	conn.OnPing(func(ping bool) { l.heard(ping) })
	ok, err := l.handshake()
	if err != nil {
		_ = conn.Close(CloseNormal, "normal")
		return 0, err
	}
	back.SetSpread(time.Duration(ok.ReconnectSpreadMS) * time.Millisecond)
	began := time.Now()
	c.set(func(s *Status) {
		s.State, s.NodeID, s.Tenant, s.CloneSuspected = StateReady, ok.NodeID, ok.TenantID, false
	})
	if c.opt.OnReady != nil {
		c.opt.OnReady(*ok)
	}
	err = l.serve()
	return time.Since(began), err
}

// clientLink is one READY link of a client.
type clientLink struct {
	c      *Client
	conn   Conn
	node   string
	ctx    context.Context
	cancel context.CancelCauseFunc
	out    chan []byte
	wg     sync.WaitGroup

	mu       sync.Mutex // protects the fields below
	streams  map[string]context.CancelFunc
	running  map[string]context.CancelFunc
	lastPing time.Time // when the relay last pinged
}

func (l *clientLink) heard(ping bool) {
	_ = l.conn.SetReadDeadline(time.Now().Add(DeadAfter))
	if ping {
		l.mu.Lock()
		l.lastPing = time.Now()
		l.mu.Unlock()
	}
}

func (l *clientLink) handshake() (*AuthOK, error) {
	_ = l.conn.SetReadDeadline(time.Now().Add(2 * AuthTimeout))
	var hello Hello
	if _, err := l.expect(TypeHello, &hello); err != nil {
		return nil, err
	}
	token, err := l.c.opt.Token()
	if err != nil {
		return nil, err
	}
	auth := Auth{Token: token, AgentVersion: l.c.opt.Version, BootID: l.c.bootID, InstanceID: l.c.opt.InstanceID, Name: l.c.opt.Name}
	if err := l.conn.Write(Encode(TypeAuth, manifest.NewULID(), "", auth)); err != nil {
		return nil, readClose(l.conn, err)
	}
	var ok AuthOK
	if _, err := l.expect(TypeAuthOK, &ok); err != nil {
		return nil, err
	}
	if !manifest.ValidNodeID(ok.NodeID) {
		return nil, ErrBadFrame
	}
	l.node = ok.NodeID
	l.c.opt.Clock.Sync(ok.ServerTimeMS)
	if err := l.conn.Write(l.announce()); err != nil {
		return nil, readClose(l.conn, err)
	}
	var ack AnnounceAck
	if _, err := l.expect(TypeAnnounceAck, &ack); err != nil {
		return nil, err
	}
	return &ok, nil
}

// readClose prefers the close frame that the relay sent over the write error that its
// closing caused.
func readClose(conn Conn, err error) error {
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	for i := 0; i < 4; i++ {
		if e := conn.Read(func([]byte) error { return nil }); e != nil {
			if CloseCode(e) != 0 {
				return e
			}
			break
		}
	}
	return err
}

func (l *clientLink) announce() []byte {
	raw := encodeJSON(l.c.opt.Handler.Capabilities())
	return Encode(TypeAnnounce, manifest.NewULID(), "", Announce{ManifestVersion: manifest.Version,
		ManifestSHA256: manifest.Hash(raw), Capabilities: raw})
}

func (l *clientLink) expect(typ string, v any) (id string, err error) {
	err = l.conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		if err != nil {
			return err
		}
		if e.Type != typ {
			return ErrBadFrame
		}
		id = e.MsgID
		return e.Decode(v)
	})
	return id, err
}

func (l *clientLink) serve() error {
	l.wg.Go(l.write)
	var err error
	for err == nil {
		l.heard(false)
		err = l.conn.Read(l.handle)
	}
	if errors.Is(err, ErrBadFrame) {
		_ = l.conn.Close(CloseBadFrame, "bad_frame")
	}
	l.cancel(err)
	_ = l.conn.Close(CloseNormal, "normal")
	l.wg.Wait()
	return err
}

// write is the one writer; it also pings, unless the relay did so lately.
func (l *clientLink) write() {
	ping := time.NewTimer(l.pingIn())
	defer ping.Stop()
	for {
		var err error
		select {
		case <-l.ctx.Done():
			return
		case b := <-l.out:
			err = l.conn.Write(b)
		case <-ping.C:
			l.mu.Lock()
			lately := time.Since(l.lastPing) < PingEvery
			l.mu.Unlock()
			if !lately {
				err = l.conn.Ping()
			}
			ping.Reset(l.pingIn())
		}
		if err != nil {
			// Give the reader a moment to find the close frame that explains it.
			_ = l.conn.SetReadDeadline(time.Now().Add(time.Second))
			return
		}
	}
}

// pingIn is PingEvery +-20 %.
func (l *clientLink) pingIn() time.Duration { return PingEvery*4/5 + jitter(PingEvery*2/5) }

// send queues an answer; it waits for room as long as the link lives.
func (l *clientLink) send(b []byte) error {
	select {
	case l.out <- b:
		return nil
	case <-l.ctx.Done():
		return net.ErrClosed
	}
}

func (l *clientLink) handle(msg []byte) error {
	e, err := Decode(msg)
	if err != nil {
		return err
	}
	switch e.Type {
	case TypeCmd:
		var cmd Cmd
		if err := e.Decode(&cmd); err != nil {
			return err
		}
		cmd.Arguments = append(strictjson.Raw(nil), cmd.Arguments...)
		return l.command(e.MsgID, cmd)
	case TypeCmdCancel:
		l.mu.Lock()
		if stop := l.running[e.InReplyTo]; stop != nil {
			stop()
		}
		if stop := l.streams[e.InReplyTo]; stop != nil {
			stop()
		}
		l.mu.Unlock()
	case TypeError:
		var p ErrorPayload
		return e.Decode(&p)
	case TypeAnnounceAck: // of a later announce
		var a AnnounceAck
		return e.Decode(&a)
	default:
		return ErrBadFrame
	}
	return nil
}

// command starts a command unless it is a repeat (RFC-0002 §7.3: at most once).
func (l *clientLink) command(id string, cmd Cmd) error {
	l.c.mu.Lock()
	fresh, ack, ok := l.c.seen.Start(id, time.Now())
	l.c.mu.Unlock()
	switch {
	case !ok:
		return l.send(refusal(id, manifest.E(manifest.RateLimited, "too many commands")))
	case !fresh && ack == nil:
		return nil // still running
	case !fresh:
		return l.send(ack)
	}
	l.mu.Lock()
	full := len(l.running) >= MaxInflight
	var ctx context.Context
	if !full {
		var stop context.CancelFunc
		ctx, stop = context.WithCancel(l.ctx)
		l.running[id] = stop
	}
	l.mu.Unlock()
	if full {
		return l.finish(id, refusal(id, manifest.E(manifest.RateLimited, "too many commands in flight")))
	}
	l.wg.Go(func() { l.run(ctx, id, cmd) })
	return nil
}

func (l *clientLink) finish(id string, ack []byte) error {
	l.c.mu.Lock()
	l.c.seen.Done(id, ack, time.Now())
	l.c.mu.Unlock()
	return l.send(ack)
}

func (l *clientLink) run(ctx context.Context, id string, cmd Cmd) {
	result, stream, err := l.call(ctx, cmd)
	l.mu.Lock()
	stop := l.running[id]
	delete(l.running, id)
	streamID := ""
	if err == nil && stream != nil {
		if len(l.streams) >= MaxStreams {
			stream, err = nil, manifest.E(manifest.RateLimited, "too many streams")
		} else {
			streamID = manifest.NewULID()
			l.streams[id] = stop
		}
	}
	l.mu.Unlock()
	if stream == nil {
		defer stop()
	}
	switch {
	case err != nil:
		_ = l.finish(id, refusal(id, err))
	case stream == nil:
		_ = l.finish(id, AppendAck(nil, manifest.NewULID(), id, result))
	default:
		_ = l.finish(id, AppendAck(nil, manifest.NewULID(), id, withStream(result, streamID)))
		l.stream(ctx, id, streamID, stream)
		stop()
	}
}

// call bounds the handler: min(deadline_ms, the capability's default). A handler that
// does not come back in time is left behind; its late answer is dropped.
func (l *clientLink) call(ctx context.Context, cmd Cmd) (result []byte, stream StreamFunc, err error) {
	name, ok := manifest.ParseToolName(cmd.Tool)
	if !ok || name.NodeID != l.node {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest")
	}
	budget := l.deadline(name)
	if d := time.Duration(cmd.DeadlineMS) * time.Millisecond; d > 0 && d < budget {
		budget = d
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	type answer struct {
		result []byte
		stream StreamFunc
		err    error
	}
	done := make(chan answer, 1)
	l.wg.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				done <- answer{err: manifest.E(manifest.Internal, "the handler failed")}
			}
		}()
		r, s, err := l.c.opt.Handler.Call(ctx, name, cmd.Arguments)
		done <- answer{r, s, err}
	})
	select {
	case a := <-done:
		return a.result, a.stream, a.err
	case <-ctx.Done():
		return nil, nil, manifest.E(manifest.DeadlineExceeded, "the handler did not answer in time")
	}
}

func (l *clientLink) deadline(name manifest.ToolName) time.Duration {
	for _, c := range l.c.opt.Handler.Capabilities() {
		if c.CapID == name.CapID {
			return c.Constraints.Deadline()
		}
	}
	return manifest.DefaultConstraints.Deadline()
}

func (l *clientLink) stream(ctx context.Context, cmdID, streamID string, fn StreamFunc) {
	var seq int64
	err := fn(ctx, func(sample []byte) error {
		seq++
		select {
		case l.out <- AppendMetric(nil, manifest.NewULID(), streamID, seq, sample):
		default: // the link is slower than the cadence: drop, and leave a gap in seq
			l.c.mu.Lock()
			l.c.status.Drops++
			l.c.mu.Unlock()
		}
		return nil
	})
	l.mu.Lock()
	delete(l.streams, cmdID)
	l.mu.Unlock()
	reason := EndHandlerError
	switch {
	case l.ctx.Err() != nil:
		return // the link is gone; nobody to tell
	case ctx.Err() != nil:
		reason = EndCancelled
	case err == nil:
		reason = EndShutdown
	}
	_ = l.send(Encode(TypeStreamEnd, manifest.NewULID(), "", StreamEnd{StreamID: streamID, Reason: reason}))
}

func refusal(id string, err error) []byte {
	e := manifest.AsError(err)
	return Encode(TypeCmdAck, manifest.NewULID(), id, CmdAck{Code: e.Code, Detail: ascii(e.Message)})
}

// ascii keeps at most 200 printable ASCII characters.
func ascii(s string) string {
	b := make([]byte, 0, min(len(s), 200))
	for i := 0; i < len(s) && len(b) < 200; i++ {
		if s[i] >= 0x20 && s[i] <= 0x7e {
			b = append(b, s[i])
		}
	}
	return string(b)
}

// withStream puts the stream id into the handler's result object {"interval_ms":N}.
func withStream(result []byte, streamID string) []byte {
	var s Subscribed
	_ = strictjson.Unmarshal(result, &s)
	s.StreamID = streamID
	return encodeJSON(s)
}
