package link

import (
	"context"
	"errors"
	"slices"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// cmdV2 is a Cmd as v2 has it: there the keys of Expiry are unknown ones.
type cmdV2 struct {
	Tool       string         `json:"tool"`
	Arguments  strictjson.Raw `json:"arguments"`
	DeadlineMS int64          `json:"deadline_ms,omitempty"`
	TraceID    string         `json:"trace_id,omitempty"`
}

func (l *clientLink) decodeCmd(e *Envelope) (*Cmd, error) {
	if l.v21 {
		cmd := new(Cmd)
		return cmd, e.Decode(cmd)
	}
	var old cmdV2
	err := e.Decode(&old)
	return &Cmd{Tool: old.Tool, Arguments: old.Arguments, DeadlineMS: old.DeadlineMS, TraceID: old.TraceID}, err
}

// errCanceled is the cause of a command's ctx after cmd_cancel.
var errCanceled = errors.New("link: canceled by the relay")

// startCommand starts a command unless it is a repeat.
func (l *clientLink) startCommand(id string, cmd *Cmd) error {
	l.c.mu.Lock()
	isNew, ack, ok := l.c.dedup.begin(id, l.session, time.Now())
	parent := l.c.sessionCtx
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
		l.c.answer(id, errorAck(id, manifest.E(manifest.RateLimited, "too many commands in flight")))
		return nil
	}
	ctx, cancel := context.WithCancelCause(parent)
	l.c.mu.Lock()
	l.c.cancels[id] = cancel
	l.c.mu.Unlock()
	l.c.wg.Go(func() {
		l.runCommand(ctx, cancel, id, cmd)
		cancel(nil)
		l.c.mu.Lock()
		delete(l.c.cancels, id)
		l.c.mu.Unlock()
	})
	return nil
}

// runCommand runs one command and the stream that it may open. cancel is that of ctx.
func (l *clientLink) runCommand(ctx context.Context, cancel context.CancelCauseFunc, id string, cmd *Cmd) {
	start := time.Now()
	a := l.callHandler(ctx, cmd)
	if l.c.opt.OnCall != nil {
		l.c.opt.OnCall(cmd.Tool, cmd.TraceID, time.Since(start), a.err)
	}
	if a.err == nil && a.stream != nil {
		stop := context.AfterFunc(l.ctx, func() { cancel(context.Cause(l.ctx)) })
		defer stop()
		select {
		case l.streams <- struct{}{}:
			defer func() { <-l.streams }()
		default:
			a.err = manifest.E(manifest.RateLimited, "too many streams")
		}
	}
	switch {
	case a.err != nil && errors.Is(context.Cause(ctx), errCanceled):
		l.c.finish(id, errorAck(id, a.err), false) // the relay no longer waits
	case a.err != nil:
		l.c.answer(id, errorAck(id, a.err))
	case a.stream == nil:
		l.c.answer(id, resultAck(id, a.result))
	default:
		l.runStream(ctx, id, a.result, a.stream)
	}
}

// isExpired reports whether a command may no longer be started, see Expiry.
func (l *clientLink) isExpired(cmd *Cmd) bool {
	l.mu.Lock()
	expired := l.clock.isExpired(cmd.Expiry, time.Now())
	l.mu.Unlock()
	if expired {
		l.c.mu.Lock()
		l.c.status.Expired++
		l.c.mu.Unlock()
	}
	return expired
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
		switch {
		case l.isExpired(cmd):
			a.err = manifest.E(manifest.DeadlineExceeded, "the command arrived too late")
			return
		case ctx.Err() != nil: // a cmd_cancel arrived with it
			a.err = manifest.E(manifest.DeadlineExceeded, "the command was canceled before it began")
			return
		}
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
	l.mu.Lock()
	caps := l.caps
	l.mu.Unlock()
	name, ok = manifest.ParseToolName(cmd.Tool)
	i := slices.IndexFunc(caps, func(c manifest.Capability) bool { return c.CapID == name.CapID })
	if !ok || i < 0 || name.NodeID != l.node || len(cmd.Arguments) == 0 || cmd.Arguments[0] != '{' || cmd.DeadlineMS < 0 {
		return name, 0, false
	}
	deadline = caps[i].Constraints.Deadline()
	if ms := cmd.DeadlineMS; ms > 0 && ms < deadline.Milliseconds() {
		deadline = time.Duration(ms) * time.Millisecond
	}
	return name, deadline, true
}

// runStream answers a subscription and sends the frames of fn until it or ctx ends. A
// frame that finds the queue full is dropped, because the link is slower than the
// cadence; seq then has a gap.
func (l *clientLink) runStream(ctx context.Context, cmdID string, result []byte, fn StreamFunc) {
	id := NewID()
	ack := resultAck(cmdID, addStreamID(result, id))
	if l.c.finish(cmdID, ack, true) != l {
		l.c.answer(cmdID, errorAck(cmdID, errLinkEnded)) // on a later link, if there is one
		return
	}
	if l.send(ack) != nil {
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
