package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// clientLink is one link of a client, from dial to end.
type clientLink struct {
	c         *Client
	conn      Conn
	node      string
	caps      []manifest.Capability // as announced
	ctx       context.Context       // ends with the link
	cancel    context.CancelCauseFunc
	sendQueue chan []byte
	wg        sync.WaitGroup // the writer
	closed    chan struct{}  // closed when conn was closed because ctx ended
	stop      func() bool    // keeps that from happening

	mu           sync.Mutex                         // protects the fields below
	cancels      map[string]context.CancelCauseFunc // running commands and open streams, by msg_id
	streams      int
	lastPing     time.Time // when the relay last pinged
	keepDeadline bool      // the read deadline stays: during the handshake and after a failed write
}

func newClientLink(ctx context.Context, c *Client, conn Conn) *clientLink {
	l := &clientLink{c: c, conn: conn, sendQueue: make(chan []byte, clientQueueSize), closed: make(chan struct{}),
		cancels: make(map[string]context.CancelCauseFunc), keepDeadline: true}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.stop = context.AfterFunc(l.ctx, func() {
		_ = conn.Close(CloseNormal, "normal")
		close(l.closed)
	})
	conn.OnPing(l.onPing)
	return l
}

// close closes the link that err ended, with the code that tells the relay why. What it
// returns is for the box's owner.
func (l *clientLink) close(err error) error {
	code, reason := CloseNormal, "normal"
	var ne net.Error
	switch {
	case errors.Is(err, ErrBadFrame):
		code, reason = CloseBadFrame, "bad_frame"
	case errors.Is(err, ErrTooLarge):
		code, reason = CloseTooLarge, "too_large"
	case errors.As(err, &ne) && ne.Timeout():
		err = fmt.Errorf("the relay sent nothing for too long: %w", err)
	}
	_ = l.conn.Close(code, reason)
	l.cancel(err)
	return err
}

// wait waits for the link's own goroutines. Handlers are not among them: one that hangs
// must not keep the device from linking again.
func (l *clientLink) wait() {
	l.wg.Wait()
	if !l.stop() {
		<-l.closed
	}
}

// onPing notes that the relay is alive. It is called in the reading goroutine.
func (l *clientLink) onPing(ping bool) {
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

func (l *clientLink) handshake() (*AuthOK, error) {
	_ = l.conn.SetReadDeadline(time.Now().Add(2 * AuthTimeout))
	var hello Hello
	if err := l.readMessage(TypeHello, &hello); err != nil {
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
	if err := l.write(Encode(TypeAuth, NewID(), "", auth)); err != nil {
		return nil, err
	}
	var ok AuthOK
	if err := l.readMessage(TypeAuthOK, &ok); err != nil {
		return nil, err
	}
	if !manifest.ValidNodeID(ok.NodeID) || !manifest.ValidTenant(ok.TenantID) {
		return nil, badFrame("payload of auth_ok")
	}
	l.node = ok.NodeID
	l.c.opt.Clock.Sync(ok.ServerTimeMS)
	if err := l.write(l.announce()); err != nil {
		return nil, err
	}
	var ack AnnounceAck
	if err := l.readMessage(TypeAnnounceAck, &ack); err != nil {
		return nil, err
	}
	return &ok, nil
}

// write writes a frame of the handshake. It prefers the close frame that the relay sent
// over the write error that its closing caused.
func (l *clientLink) write(frame []byte) error {
	err := l.conn.Write(frame)
	if err == nil {
		return nil
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(time.Second))
	for range 4 {
		if e := l.conn.Read(func([]byte) error { return nil }); e != nil {
			if CloseCode(e) != 0 {
				return e
			}
			break
		}
	}
	return err
}

func (l *clientLink) announce() []byte {
	l.caps = l.c.opt.Handler.Capabilities()
	raw := encodeJSON(l.caps)
	return Encode(TypeAnnounce, NewID(), "", Announce{ManifestVersion: manifest.Version,
		ManifestSHA256: manifest.Hash(raw), Capabilities: raw})
}

func (l *clientLink) readMessage(typ string, v any) error {
	return l.conn.Read(func(msg []byte) error {
		e, err := Decode(msg)
		if err != nil {
			return err
		}
		if e.Type != typ {
			return badFrame(e.Type + " before its state")
		}
		return e.Decode(v)
	})
}

// serve reads the link until it ends.
func (l *clientLink) serve() (err error) {
	l.mu.Lock()
	l.keepDeadline = false
	l.mu.Unlock()
	l.wg.Go(l.writer)
	for err == nil {
		l.onPing(false)
		err = l.conn.Read(l.handle)
	}
	return err
}

// writer is the one writer of a ready link; it also pings, unless the relay did lately.
func (l *clientLink) writer() {
	ping := time.NewTimer(l.nextPingDelay())
	defer ping.Stop()
	for {
		var err error
		select {
		case <-l.ctx.Done():
			return
		case b := <-l.sendQueue:
			err = l.conn.Write(b)
		case <-ping.C:
			l.mu.Lock()
			lately := time.Since(l.lastPing) < PingInterval
			l.mu.Unlock()
			if !lately {
				err = l.conn.Ping()
			}
			ping.Reset(l.nextPingDelay())
		}
		if err != nil {
			l.failWrite(err)
			return
		}
	}
}

// failWrite ends a link that cannot be written to any more. The reader gets a moment to find
// the close frame that explains it.
func (l *clientLink) failWrite(err error) {
	l.mu.Lock()
	l.keepDeadline = true
	_ = l.conn.SetReadDeadline(time.Now().Add(time.Second))
	l.mu.Unlock()
	sleep(l.ctx, time.Second)
	l.cancel(err) // the reader may be waiting for room in out
}

// nextPingDelay is PingInterval +-20 %.
func (l *clientLink) nextPingDelay() time.Duration {
	return PingInterval*4/5 + jitter(PingInterval*2/5)
}

// send queues an answer; it waits for room as long as the link lives.
func (l *clientLink) send(b []byte) error {
	select {
	case l.sendQueue <- b:
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
		return l.startCommand(e.MsgID, &cmd)
	case TypeCmdCancel:
		var none struct{}
		if err := e.Decode(&none); err != nil {
			return err
		}
		l.mu.Lock()
		if stop := l.cancels[e.InReplyTo]; stop != nil {
			stop(errCanceled)
		}
		l.mu.Unlock()
	case TypeError:
		var p ErrorPayload
		return e.Decode(&p)
	case TypeAnnounceAck: // of a later announce
		var a AnnounceAck
		return e.Decode(&a)
	default:
		return badFrame(e.Type + " from a relay")
	}
	return nil
}

var errCanceled = errors.New("link: cancelled by the relay")

// startCommand starts a command unless it is a repeat (RFC-0002 §7.3: at most once).
func (l *clientLink) startCommand(id string, cmd *Cmd) error {
	l.c.mu.Lock()
	fresh, ack, ok := l.c.dedup.begin(id, time.Now())
	busy := l.c.activeHandlers >= MaxInflight
	if fresh && ok && !busy {
		l.c.activeHandlers++
	}
	l.c.mu.Unlock()
	switch {
	case !ok:
		return l.send(errorAck(id, manifest.E(manifest.RateLimited, "too many commands")))
	case !fresh && ack == nil:
		return nil // still running
	case !fresh:
		return l.send(ack)
	case busy:
		return l.sendAnswer(id, errorAck(id, manifest.E(manifest.RateLimited, "too many commands in flight")))
	}
	ctx, stop := context.WithCancelCause(l.ctx)
	l.mu.Lock()
	l.cancels[id] = stop
	l.mu.Unlock()
	l.c.wg.Go(func() {
		l.runCommand(ctx, id, cmd)
		stop(nil)
	})
	return nil
}

// sendAnswer keeps a command's answer, in case the command comes again, and sends it.
func (l *clientLink) sendAnswer(id string, ack []byte) error {
	l.storeAnswer(id, ack)
	return l.send(ack)
}

func (l *clientLink) storeAnswer(id string, ack []byte) {
	l.c.mu.Lock()
	l.c.dedup.finish(id, ack, time.Now())
	l.c.mu.Unlock()
}

// runCommand runs one command and the stream that it may open.
func (l *clientLink) runCommand(ctx context.Context, id string, cmd *Cmd) {
	start := time.Now()
	result, stream, err := l.callHandler(ctx, cmd)
	if l.c.opt.OnCall != nil {
		l.c.opt.OnCall(cmd.Tool, cmd.TraceID, time.Since(start), err)
	}
	l.mu.Lock()
	if err == nil && stream != nil {
		if l.streams >= MaxStreams {
			err = manifest.E(manifest.RateLimited, "too many streams")
		} else {
			l.streams++
		}
	}
	if err != nil || stream == nil {
		delete(l.cancels, id)
	}
	l.mu.Unlock()
	switch {
	case err != nil && errors.Is(context.Cause(ctx), errCanceled):
		l.storeAnswer(id, errorAck(id, err)) // nobody waits for it
	case err != nil:
		_ = l.sendAnswer(id, errorAck(id, err))
	case stream == nil:
		_ = l.sendAnswer(id, resultAck(id, result))
	default:
		l.runStream(ctx, id, result, stream)
		l.mu.Lock()
		delete(l.cancels, id)
		l.streams--
		l.mu.Unlock()
	}
}

// callHandler bounds the handler: min(deadline_ms, the capability's default). A handler that
// does not come back in time is left behind; its late answer is dropped.
func (l *clientLink) callHandler(ctx context.Context, cmd *Cmd) (result []byte, stream StreamFunc, err error) {
	type answer struct {
		result []byte
		stream StreamFunc
		err    error
	}
	back := func() {
		l.c.mu.Lock()
		l.c.activeHandlers--
		l.c.mu.Unlock()
	}
	name, budget, ok := l.resolve(cmd)
	if !ok {
		back()
		return nil, nil, manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest, or the arguments are no object")
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	done := make(chan answer, 1)
	l.c.wg.Go(func() {
		defer back()
		a := answer{err: manifest.E(manifest.Internal, "the handler failed")}
		defer func() {
			_ = recover() // one bad handler does not take the daemon down
			done <- a
		}()
		r, s, err := l.c.opt.Handler.Call(ctx, name, cmd.Arguments)
		a = answer{r, s, err}
	})
	select {
	case a := <-done:
		return a.result, a.stream, a.err
	case <-ctx.Done():
		return nil, nil, manifest.E(manifest.DeadlineExceeded, "the handler did not answer in time")
	}
}

// resolve checks a command against what was announced and gives its budget.
func (l *clientLink) resolve(cmd *Cmd) (name manifest.ToolName, budget time.Duration, ok bool) {
	name, ok = manifest.ParseToolName(cmd.Tool)
	if !ok || name.NodeID != l.node || len(cmd.Arguments) == 0 || cmd.Arguments[0] != '{' || cmd.DeadlineMS < 0 {
		return name, 0, false
	}
	for i := range l.caps {
		c := &l.caps[i]
		if c.CapID != name.CapID {
			continue
		}
		budget = c.Constraints.Deadline()
		if ms := cmd.DeadlineMS; ms > 0 && ms < budget.Milliseconds() {
			budget = time.Duration(ms) * time.Millisecond
		}
		return name, budget, true
	}
	return name, 0, false
}

// runStream answers a subscription and sends the frames of fn until it or ctx ends.
func (l *clientLink) runStream(ctx context.Context, cmdID string, result []byte, fn StreamFunc) {
	id := NewID()
	if l.sendAnswer(cmdID, resultAck(cmdID, addStreamID(result, id))) != nil {
		return
	}
	var seq int64
	err := guarded(ctx, fn, func(sample []byte) error {
		seq++
		frame := AppendMetric(make([]byte, 0, len(sample)+128), NewID(), id, seq, sample)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(frame) <= MaxFrame {
			select {
			case l.sendQueue <- frame:
				return nil
			default: // the link is slower than the cadence
			}
		}
		l.c.mu.Lock()
		l.c.status.Drops++ // and seq gets a gap
		l.c.mu.Unlock()
		return nil
	})
	reason := EndHandlerError
	switch {
	case l.ctx.Err() != nil:
		return // the link is gone; nobody to tell
	case ctx.Err() != nil:
		reason = EndCanceled
	case err == nil:
		reason = EndShutdown
	}
	_ = l.send(Encode(TypeStreamEnd, NewID(), "", StreamEnd{StreamID: id, Reason: reason}))
}

// guarded runs a stream; a panic becomes an error.
func guarded(ctx context.Context, fn StreamFunc, send func([]byte) error) (err error) {
	err = errors.New("link: the stream's handler panicked")
	defer func() { _ = recover() }()
	return fn(ctx, send)
}

// resultAck makes the cmd_ack of a result that fits into a frame.
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

func errorAck(id string, err error) []byte {
	e := manifest.AsError(err)
	return Encode(TypeCmdAck, NewID(), id, CmdAck{Code: e.Code, Detail: printableASCII(e.Message)})
}

// addStreamID puts the stream id into the handler's result object {"interval_ms":N}.
func addStreamID(result []byte, streamID string) []byte {
	var s Subscribed
	_ = strictjson.Unmarshal(result, &s)
	s.StreamID = streamID
	return encodeJSON(s)
}
