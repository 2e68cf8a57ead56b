package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"agentctl/manifest"
)

// clientLink is one link of a client, from the dial to its end. Client.Run's goroutine
// reads it; a second one writes; a third one closes the connection when ctx ends.
//
// A command passes these steps (RFC-0002 §7.3, at most once):
//
//	cmd -> dedupTable: known        send the stored answer again, or nothing while it runs
//	    -> too many handlers        answer E_RATE_LIMITED
//	    -> runCommand -> expired    answer E_DEADLINE_EXCEEDED, on v2.1
//	                  -> Handler.Call within its deadline -> cmd_ack
//	                                for a subscription: frames until it ends -> stream_end
//
// On v2.1 a command goes on when its link is lost, and is answered on the next one if that
// resumes the session. A stream ends with its link.
type clientLink struct {
	c         *Client
	conn      Conn
	v21       bool // the link speaks Subprotocol21
	node      string
	session   int             // Client.session, from auth_ok on
	resume    *Resume         // as sent in auth; nil: none
	resumed   bool            // the relay has accepted it
	runCtx    context.Context // of Client.Run
	ctx       context.Context // ends with the link
	cancel    context.CancelCauseFunc
	sendQueue chan []byte
	streams   chan struct{}  // a slot for each open stream
	wg        sync.WaitGroup // the writer and the closer

	mu           sync.Mutex            // protects the fields below
	caps         []manifest.Capability // as announced last; replaced as a whole
	clock        timeEstimate
	lastPing     time.Time // when the relay last pinged
	keepDeadline bool      // onPing leaves the read deadline: in the handshake and after a failed write
}

// newClientLink starts the closer, which lets the end of ctx interrupt a blocked read.
func newClientLink(ctx context.Context, c *Client, conn Conn) *clientLink {
	l := &clientLink{c: c, conn: conn, v21: conn.Subprotocol() == Subprotocol21, sendQueue: make(chan []byte, clientQueueSize), streams: make(chan struct{}, MaxStreams), keepDeadline: true}
	l.runCtx = ctx
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.wg.Go(func() {
		<-l.ctx.Done()
		if l.v21 && ctx.Err() == nil { // failWrite
			_ = conn.Close(CloseTimeout, "timeout")
		}
		_ = conn.Close(CloseNormal, "normal")
	})
	conn.OnPing(l.onPing)
	return l
}

// close closes the link that err ended, with a close code that shows the relay why. It
// returns err, worded for the operator of the board. Handlers are not waited for: one that
// hangs must not keep the device from linking again.
//
// Nothing reads the connection afterwards, and the next one is dialed after that. A 4409 that
// the relay sends to this link because the next one replaced it is therefore not seen.
func (l *clientLink) close(err error) error {
	l.c.linkEnded()
	code, reason := CloseNormal, "normal"
	var own *codedError
	var ne net.Error
	switch {
	case errors.As(err, &own):
		code, reason = own.code, own.reason
	case errors.As(err, &ne) && ne.Timeout():
		err = fmt.Errorf("the relay sent nothing for too long: %w", err)
		if l.v21 { // 1000 would end the session, which the next link is to resume
			code, reason = CloseTimeout, "timeout"
		}
	}
	_ = l.conn.Close(code, reason)
	l.cancel(err)
	return err
}

// onPing handles each ping and pong, in the reading goroutine; serve calls it for messages
// as well.
func (l *clientLink) onPing(ping bool, payload []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if ping {
		l.lastPing = now
		if sessionMS, ok := parsePing(payload); ok {
			l.clock.observe(sessionMS, now)
		}
	}
	if !l.keepDeadline {
		_ = l.conn.SetReadDeadline(now.Add(IdleTimeout))
	}
}

// handshake is the device's half of the message flow in protocol.go. The token is read
// again for each link, since it may have been replaced.
func (l *clientLink) handshake() (*AuthOK, error) {
	timeout := 2 * AuthTimeout
	if l.v21 {
		timeout += AdmitTimeout // the relay may ping an older link of this node first
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(timeout))
	var hello Hello
	if err := l.read(TypeHello, &hello); err != nil {
		return nil, err
	}
	if hello.Protocol != Protocol && !(l.v21 && hello.Protocol == "v2.1") { // a relay may name the minor version
		return nil, &CloseError{Code: CloseUpgradeRequired, Reason: "upgrade_required", Err: errors.New("the relay speaks protocol " + printableASCII(hello.Protocol))}
	}
	token, err := l.c.opt.Token()
	if err != nil {
		return nil, err
	}
	l.c.token = token
	auth := Auth{Token: token, AgentVersion: l.c.opt.Version, BootID: l.c.bootID, InstanceID: l.c.opt.InstanceID, Name: l.c.opt.Name}
	if l.v21 {
		if l.c.opt.Sign != nil {
			if auth.Proof, err = l.c.opt.Sign(hello.Nonce, token); err != nil {
				return nil, err
			}
		}
		l.resume = l.c.resume()
		auth.Resume = l.resume
	}
	if err := l.write(TypeAuth, auth); err != nil {
		return nil, err
	}
	var ok AuthOK
	if err := l.read(TypeAuthOK, &ok); err != nil {
		return nil, err
	}
	if !manifest.ValidNodeID(ok.NodeID) || !manifest.ValidTenant(ok.TenantID) {
		return nil, badFrame("payload of auth_ok")
	}
	l.node = ok.NodeID
	l.mu.Lock()
	l.clock.observe(ok.ServerTimeMS, time.Now())
	l.mu.Unlock()
	if l.v21 {
		l.c.startSession(l.runCtx, l, &ok)
	} else { // the session ends with the link
		l.c.startSession(l.ctx, l, &ok)
	}
	l.c.opt.Clock.Sync(ok.ServerTimeMS)
	select {
	case <-l.c.announce: // this one has the change
	default:
	}
	if err := l.write(TypeAnnounce, l.newAnnounce()); err != nil {
		return nil, err
	}
	var ack AnnounceAck
	return &ok, l.read(TypeAnnounceAck, &ack)
}

// newAnnounce reads the capabilities of the handler, which commands are checked against from now
// on.
func (l *clientLink) newAnnounce() Announce {
	caps := l.c.opt.Handler.Capabilities()
	if !l.v21 {
		caps = slices.DeleteFunc(slices.Clone(caps), func(c manifest.Capability) bool { return !servedOn(false, c.Kind) })
	}
	l.mu.Lock()
	l.caps = caps
	l.mu.Unlock()
	raw := encodeJSON(caps)
	return Announce{ManifestVersion: manifest.Version, ManifestSHA256: manifest.Hash(raw), Capabilities: raw}
}

// read reads one message of the handshake into v.
func (l *clientLink) read(typ string, v any) error {
	return expect(l.conn, typ, func(e *Envelope) error { return e.Decode(v) })
}

// write writes one message of the handshake. When the relay closes the link the write
// fails; the close frame that the relay sent before says why and is returned instead.
func (l *clientLink) write(typ string, payload any) error {
	err := l.conn.Write(Encode(typ, NewID(), "", payload))
	if err == nil {
		return nil
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(time.Second))
	var readErr error
	for n := 0; n < 4 && readErr == nil; n++ { // messages may come before it
		readErr = l.conn.Read(func([]byte) error { return nil })
	}
	if CloseCode(readErr) != 0 {
		return readErr
	}
	return err
}

// serve reads the link until it ends.
func (l *clientLink) serve() (err error) {
	l.mu.Lock()
	l.keepDeadline = false
	l.mu.Unlock()
	acks := l.c.linkReady(l)
	l.wg.Go(l.writer)
	for _, ack := range acks {
		if l.send(ack) != nil {
			break // the reader finds out why the link has ended
		}
	}
	for err == nil {
		l.onPing(false, nil)
		err = l.conn.Read(l.handle)
	}
	return err
}

// writer writes a ready link, and pings unless the relay pinged lately. Events are spaced by
// eventInterval, so that those of an outage do not arrive as a flood.
func (l *clientLink) writer() {
	ping := time.NewTimer(nextPingDelay())
	defer ping.Stop()
	events := l.c.newEvent
	var eventPause <-chan time.Time
	for {
		var err error
		select {
		case <-l.ctx.Done():
			return
		case frame := <-l.sendQueue:
			err = l.conn.Write(frame)
		case <-l.c.announce:
			err = l.conn.Write(Encode(TypeAnnounce, NewID(), "", l.newAnnounce()))
		case <-events:
			if frame := l.c.takeEvent(); frame != nil {
				if err = l.conn.Write(frame); err != nil {
					l.c.returnEvent(frame)
				}
				events, eventPause = nil, time.After(eventInterval)
			}
		case <-eventPause:
			events = l.c.newEvent
		case <-ping.C:
			l.mu.Lock()
			pinged := time.Since(l.lastPing) < PingInterval
			l.mu.Unlock()
			if !pinged {
				err = l.conn.Ping(nil)
			}
			ping.Reset(nextPingDelay())
		}
		if err != nil {
			l.failWrite(err)
			return
		}
	}
}

// failWrite ends a link that cannot be written to. The reader first gets a second to find
// the close frame that explains the failure.
func (l *clientLink) failWrite(err error) {
	l.mu.Lock()
	l.keepDeadline = true
	_ = l.conn.SetReadDeadline(time.Now().Add(time.Second))
	l.mu.Unlock()
	sleep(l.ctx, time.Second)
	l.cancel(err) // also ends a reader that waits for space in sendQueue
}

// nextPingDelay is PingInterval +-20 %, so that a fleet does not ping in step.
func nextPingDelay() time.Duration { return PingInterval*4/5 + jitter(PingInterval*2/5) }

// send queues an answer. It waits for space while the link lives.
func (l *clientLink) send(frame []byte) error {
	select {
	case l.sendQueue <- frame:
		return nil
	case <-l.ctx.Done():
		return net.ErrClosed
	}
}

// handle handles one message of a ready link.
func (l *clientLink) handle(msg []byte) error {
	e, err := Decode(msg)
	if err != nil {
		return err
	}
	switch e.Type {
	case TypeCmd:
		cmd, err := l.decodeCmd(&e)
		if err != nil {
			return err
		}
		return l.startCommand(e.MsgID, cmd)
	case TypeCmdCancel:
		l.c.mu.Lock()
		cancel := l.c.cancels[e.InReplyTo]
		l.c.mu.Unlock()
		if err := e.Decode(new(struct{})); err != nil || cancel == nil {
			return err
		}
		cancel(errCanceled)
		return nil
	case TypeError:
		return e.Decode(new(ErrorPayload))
	case TypeAnnounceAck: // of a later announce
		return e.Decode(new(AnnounceAck))
	}
	return badFrame(e.Type + " from a relay")
}
