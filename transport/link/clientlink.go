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
	"agentctl/strictjson"
)

// clientLink is one link of a client, from the dial to its end. Client.Run's goroutine
// reads it; a second one writes; a third one closes the connection when ctx ends.
//
// A command passes these steps (RFC-0002 §7.3, at most once):
//
//	cmd -> dedupTable: known        send the stored answer again, or nothing while it runs
//	    -> too many handlers        answer E_RATE_LIMITED
//	    -> runCommand -> Handler.Call within its deadline -> cmd_ack
//	                                for a subscription: frames until it ends -> stream_end
type clientLink struct {
	c         *Client
	conn      Conn
	node      string
	caps      []manifest.Capability // as announced
	ctx       context.Context       // ends with the link
	cancel    context.CancelCauseFunc
	sendQueue chan []byte
	streams   chan struct{}  // a slot for each open stream
	wg        sync.WaitGroup // the writer and the closer

	mu           sync.Mutex                         // protects the fields below
	cancels      map[string]context.CancelCauseFunc // running commands and open streams, by msg_id
	lastPing     time.Time                          // when the relay last pinged
	keepDeadline bool                               // onPing leaves the read deadline: in the handshake and after a failed write
}

// newClientLink starts the closer, which lets the end of ctx interrupt a blocked read.
func newClientLink(ctx context.Context, c *Client, conn Conn) *clientLink {
	l := &clientLink{c: c, conn: conn, sendQueue: make(chan []byte, clientQueueSize), streams: make(chan struct{}, MaxStreams),
		cancels: make(map[string]context.CancelCauseFunc), keepDeadline: true}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.wg.Go(func() {
		<-l.ctx.Done()
		_ = conn.Close(CloseNormal, "normal")
	})
	conn.OnPing(l.onPing)
	return l
}

// close closes the link that err ended, with a close code that tells the relay why. It
// returns err, worded for the operator of the board. Handlers are not waited for: one that
// hangs must not keep the device from linking again.
func (l *clientLink) close(err error) error {
	code, reason := CloseNormal, "normal"
	var own *codedError
	var ne net.Error
	switch {
	case errors.As(err, &own):
		code, reason = own.code, own.reason
	case errors.As(err, &ne) && ne.Timeout():
		err = fmt.Errorf("the relay sent nothing for too long: %w", err)
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
	}
	if !l.keepDeadline {
		_ = l.conn.SetReadDeadline(now.Add(IdleTimeout))
	}
}

// handshake is the device's half of the message flow in protocol.go. The token is read
// again for each link, since it may have been replaced.
func (l *clientLink) handshake() (*AuthOK, error) {
	_ = l.conn.SetReadDeadline(time.Now().Add(2 * AuthTimeout))
	var hello Hello
	if err := l.read(TypeHello, &hello); err != nil {
		return nil, err
	}
	if hello.Protocol != Protocol {
		return nil, &CloseError{Code: CloseUpgradeRequired, Reason: "upgrade_required", Err: errors.New("the relay speaks protocol " + printableASCII(hello.Protocol))}
	}
	token, err := l.c.opt.Token()
	if err != nil {
		return nil, err
	}
	l.c.token = token
	auth := Auth{Token: token, AgentVersion: l.c.opt.Version, BootID: l.c.bootID, InstanceID: l.c.opt.InstanceID, Name: l.c.opt.Name}
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
	l.c.opt.Clock.Sync(ok.ServerTimeMS)
	l.caps = l.c.opt.Handler.Capabilities()
	raw := encodeJSON(l.caps)
	announce := Announce{ManifestVersion: manifest.Version, ManifestSHA256: manifest.Hash(raw), Capabilities: raw}
	if err := l.write(TypeAnnounce, announce); err != nil {
		return nil, err
	}
	var ack AnnounceAck
	return &ok, l.read(TypeAnnounceAck, &ack)
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
	l.wg.Go(l.writer)
	for err == nil {
		l.onPing(false, nil)
		err = l.conn.Read(l.handle)
	}
	return err
}

// writer writes a ready link, and pings unless the relay pinged lately.
func (l *clientLink) writer() {
	ping := time.NewTimer(nextPingDelay())
	defer ping.Stop()
	for {
		var err error
		select {
		case <-l.ctx.Done():
			return
		case frame := <-l.sendQueue:
			err = l.conn.Write(frame)
		case frame := <-l.c.events:
			err = l.conn.Write(frame)
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
	l.cancel(err) // also ends a reader that waits for room in sendQueue
}

// nextPingDelay is PingInterval +-20 %, so that a fleet does not ping in step.
func nextPingDelay() time.Duration { return PingInterval*4/5 + jitter(PingInterval*2/5) }

// send queues an answer. It waits for room while the link lives.
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
		var cmd Cmd
		if err := e.Decode(&cmd); err != nil {
			return err
		}
		return l.startCommand(e.MsgID, &cmd)
	case TypeCmdCancel:
		l.mu.Lock()
		cancel := l.cancels[e.InReplyTo]
		l.mu.Unlock()
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

// errCanceled is the cause of a command's ctx after cmd_cancel.
var errCanceled = errors.New("link: canceled by the relay")

// startCommand starts a command unless it is a repeat.
func (l *clientLink) startCommand(id string, cmd *Cmd) error {
	l.c.mu.Lock()
	isNew, ack, ok := l.c.dedup.begin(id, time.Now())
	l.c.mu.Unlock()
	switch {
	case !ok:
		return l.send(errorAck(id, manifest.E(manifest.RateLimited, "too many commands")))
	case !isNew && ack == nil:
		return nil // still running
	case !isNew:
		return l.send(ack)
	}
	select {
	case l.c.handlers <- struct{}{}:
	default:
		return l.sendAnswer(id, errorAck(id, manifest.E(manifest.RateLimited, "too many commands in flight")))
	}
	ctx, cancel := context.WithCancelCause(l.ctx)
	l.mu.Lock()
	l.cancels[id] = cancel
	l.mu.Unlock()
	l.c.wg.Go(func() {
		l.runCommand(ctx, id, cmd)
		cancel(nil)
		l.mu.Lock()
		delete(l.cancels, id)
		l.mu.Unlock()
	})
	return nil
}

// sendAnswer stores a command's answer, in case the command is repeated, and sends it.
func (l *clientLink) sendAnswer(id string, ack []byte) error {
	l.storeAnswer(id, ack)
	return l.send(ack)
}

// storeAnswer only stores it: the relay canceled the command and ignores an answer.
func (l *clientLink) storeAnswer(id string, ack []byte) {
	l.c.mu.Lock()
	l.c.dedup.finish(id, ack, time.Now())
	l.c.mu.Unlock()
}

// runCommand runs one command and the stream that it may open.
func (l *clientLink) runCommand(ctx context.Context, id string, cmd *Cmd) {
	start := time.Now()
	a := l.callHandler(ctx, cmd)
	if l.c.opt.OnCall != nil {
		l.c.opt.OnCall(cmd.Tool, cmd.TraceID, time.Since(start), a.err)
	}
	if a.err == nil && a.stream != nil {
		select {
		case l.streams <- struct{}{}:
			defer func() { <-l.streams }()
		default:
			a.err = manifest.E(manifest.RateLimited, "too many streams")
		}
	}
	switch {
	case a.err != nil && errors.Is(context.Cause(ctx), errCanceled):
		l.storeAnswer(id, errorAck(id, a.err)) // the relay no longer waits
	case a.err != nil:
		_ = l.sendAnswer(id, errorAck(id, a.err))
	case a.stream == nil:
		_ = l.sendAnswer(id, resultAck(id, a.result))
	default:
		l.runStream(ctx, id, a.result, a.stream)
	}
}

// answer is what Handler.Call returns.
type answer struct {
	result []byte
	stream StreamFunc
	err    error
}

// callHandler calls the handler within its deadline: the smaller of deadline_ms and the
// capability's default. A handler that does not return in time is abandoned: it keeps its
// slot, and its late answer is dropped.
func (l *clientLink) callHandler(ctx context.Context, cmd *Cmd) answer {
	release := func() { <-l.c.handlers }
	name, deadline, ok := l.resolve(cmd)
	if !ok {
		release()
		return answer{err: manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest, or the arguments are no object")}
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	done := make(chan answer, 1)
	l.c.wg.Go(func() {
		defer release()
		a := answer{err: manifest.E(manifest.Internal, "the handler failed")}
		defer func() {
			_ = recover() // a handler that panics must not end the daemon
			done <- a
		}()
		result, stream, err := l.c.opt.Handler.Call(ctx, name, cmd.Arguments)
		a = answer{result, stream, err}
	})
	select {
	case a := <-done:
		return a
	case <-ctx.Done():
		return answer{err: manifest.E(manifest.DeadlineExceeded, "the handler did not answer in time")}
	}
}

// resolve checks a command against the announced manifest and returns its deadline.
func (l *clientLink) resolve(cmd *Cmd) (name manifest.ToolName, deadline time.Duration, ok bool) {
	name, ok = manifest.ParseToolName(cmd.Tool)
	i := slices.IndexFunc(l.caps, func(c manifest.Capability) bool { return c.CapID == name.CapID })
	if !ok || i < 0 || name.NodeID != l.node || len(cmd.Arguments) == 0 || cmd.Arguments[0] != '{' || cmd.DeadlineMS < 0 {
		return name, 0, false
	}
	deadline = l.caps[i].Constraints.Deadline()
	if ms := cmd.DeadlineMS; ms > 0 && ms < deadline.Milliseconds() {
		deadline = time.Duration(ms) * time.Millisecond
	}
	return name, deadline, true
}

// runStream answers a subscription and sends the frames of fn until it or ctx ends. A
// frame for which the queue has no room is dropped, because the link is slower than the
// cadence; seq then has a gap.
func (l *clientLink) runStream(ctx context.Context, cmdID string, result []byte, fn StreamFunc) {
	id := NewID()
	if l.sendAnswer(cmdID, resultAck(cmdID, addStreamID(result, id))) != nil {
		return
	}
	var seq int64
	err := runRecovered(ctx, fn, func(sample []byte) error {
		seq++
		frame := AppendMetric(make([]byte, 0, len(sample)+128), NewID(), id, seq, sample)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(frame) <= MaxFrame {
			select {
			case l.sendQueue <- frame:
				return nil
			default:
			}
		}
		l.c.mu.Lock()
		l.c.status.Drops++
		l.c.mu.Unlock()
		return nil
	})
	reason := EndHandlerError
	switch {
	case l.ctx.Err() != nil:
		return // the link has ended
	case ctx.Err() != nil:
		reason = EndCanceled
	case err == nil:
		reason = EndShutdown
	}
	_ = l.send(Encode(TypeStreamEnd, NewID(), "", StreamEnd{StreamID: id, Reason: reason}))
}

// runRecovered runs a stream; a panic becomes an error.
func runRecovered(ctx context.Context, fn StreamFunc, send func([]byte) error) (err error) {
	err = errors.New("link: the stream's handler panicked")
	defer func() { _ = recover() }()
	return fn(ctx, send)
}

// resultAck makes the cmd_ack of a result, if that fits into a frame.
func resultAck(id string, result []byte) []byte {
	if len(result) == 0 {
		return errorAck(id, manifest.E(manifest.Internal, "the handler gave no result"))
	}
	b := AppendAck(make([]byte, 0, len(result)+160), NewID(), id, result)
	if len(b) > MaxFrame {
		return errorAck(id, manifest.E(manifest.Internal, "the result is too large for a frame"))
	}
	return b
}

// errorAck makes the cmd_ack of an error. Its detail is for the relay's log, callers do not
// see it.
func errorAck(id string, err error) []byte {
	e := manifest.AsError(err)
	return Encode(TypeCmdAck, NewID(), id, CmdAck{Code: e.Code, Detail: printableASCII(e.Message)})
}

// addStreamID adds the stream id to the handler's result {"interval_ms":N}.
func addStreamID(result []byte, streamID string) []byte {
	var s Subscribed
	_ = strictjson.Unmarshal(result, &s)
	s.StreamID = streamID
	return encodeJSON(s)
}
