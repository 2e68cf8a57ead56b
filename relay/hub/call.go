package hub

import (
	"context"
	"errors"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// pendingCall is one command that a caller waits for. Whoever takes it out of Node.calls
// ends it: with finish, or the caller itself on a timeout.
type pendingCall struct {
	id       string
	tool     *manifest.Tool
	args     []byte // the caller's, until the command has ended
	opt      CallOptions
	deadline time.Time
	done     chan struct{} // of capacity 1; receives one value when outcome is set
	outcome  callOutcome
	// onResult, for a subscription, runs in the session's goroutine, before it can read a
	// frame of the stream.
	onResult func(result []byte) error
}

type callOutcome struct {
	result []byte
	err    error
}

func newCall(t *manifest.Tool) *pendingCall {
	return &pendingCall{tool: t, done: make(chan struct{}, 1)}
}

// finish hands the outcome to the caller, who may reuse p from then on.
func (p *pendingCall) finish(o callOutcome) {
	p.outcome = o
	p.done <- struct{}{}
}

// CallOptions are options of one command.
type CallOptions struct {
	TraceID string // of the call, for the audit log; 32 hex digits, or ""
	Traced  bool   // the device gets it too: the caller has sent one
}

// Call sends one command and waits for its end: the device's result, checked against the
// verb's schema and this node's id, a *manifest.Error, or ctx's cause if the caller has
// canceled it. ctx carries the caller's deadline. The command runs at most once. On v2.1 it
// survives a short break of the link: it is written again, under the same id, if the device
// resumes the session and has not received it.
func (n *Node) Call(ctx context.Context, t *manifest.Tool, args []byte, opt CallOptions) ([]byte, error) {
	p := n.hub.callPool.Get().(*pendingCall)
	p.tool = t
	result, err := n.roundTrip(ctx, p, args, opt)
	*p = pendingCall{done: p.done}
	n.hub.callPool.Put(p)
	return result, err
}

// defaultBudget is the gateway's budget (RFC-0005 §7), for a ctx without a deadline.
const defaultBudget = 5 * time.Second

// roundTrip sends p and waits. Nothing refers to p when it returns.
func (n *Node) roundTrip(ctx context.Context, p *pendingCall, args []byte, opt CallOptions) (result []byte, err error) {
	if ctx.Err() != nil {
		return nil, endOfWait(ctx, link.Queued)
	}
	// p keeps what is needed to write the command again, after a break of the link.
	p.id, p.args, p.opt = link.NewID(), args, opt
	var ok bool
	if p.deadline, ok = ctx.Deadline(); !ok {
		p.deadline = time.Now().Add(defaultBudget)
	}
	if err := n.start(p); err != nil {
		return nil, err
	}
	select {
	case <-p.done:
		return p.outcome.result, p.outcome.err
	case <-ctx.Done():
	}
	// The table decides who ends the call: this goroutine, or one that has taken p out.
	n.mu.Lock()
	was, ended := n.calls.Expire(p.id)
	if ended && was == link.Sent {
		n.sendCancel(p.id)
	}
	// Without a link the board was simply not there, whatever the deadline was.
	linked := n.state == stateLinked
	n.mu.Unlock()
	switch {
	case ended && was == link.Queued && !linked && isDeadline(ctx):
		return nil, offlineError()
	case ended:
		return nil, endOfWait(ctx, was)
	}
	<-p.done // another goroutine was first and is about to call finish
	return p.outcome.result, p.outcome.err
}

// start adds a command to the table and writes it, or lets it wait for a resumed link. It queues
// the frame under the same lock, so that the device gets commands and their cancellation in the
// table's order.
func (n *Node) start(p *pendingCall) error {
	n.mu.Lock()
	unflushed, err := n.startLocked(p)
	n.mu.Unlock()
	if unflushed != nil {
		unflushed.Flush()
	}
	return err
}

// startLocked is start without the writing: the caller flushes the session that it returns, unless
// that is nil.
func (n *Node) startLocked(p *pendingCall) (unflushed *link.Session, err error) {
	switch {
	case n.state == stateEnded, n.state == stateLost && time.Since(n.lostAt) >= queueTime:
		return nil, offlineError()
	case n.state == stateLinked && n.isSuspect():
		return nil, suspectError()
	case !n.announces(p.tool.Canonical):
		return nil, withdrawnError()
	}
	if n.calls.Add(p.id, p.deadline, link.CallInfo{Tool: p.tool.Canonical, TraceID: p.opt.TraceID}, p) != nil {
		return nil, rateLimited("too many commands wait for this device; retry later", "queue")
	}
	if n.state != stateLinked {
		return nil, nil
	}
	if unflushed, err = n.enqueueLocked(p); err != nil {
		n.calls.Expire(p.id)
	}
	return unflushed, err
}

// enqueueLocked queues a command of the table on the link. An error is the caller's: the command
// will not be written. unflushed is as in startLocked.
func (n *Node) enqueueLocked(p *pendingCall) (unflushed *link.Session, err error) {
	s := n.session.Load()
	expiry, err := s.Stamp(p.deadline)
	if err != nil {
		return nil, expiredError()
	}
	traceID := ""
	if p.opt.Traced {
		traceID = p.opt.TraceID
	}
	frame := link.AppendCmd(make([]byte, 0, len(p.args)+256), p.id, p.tool.Canonical, p.args, 0, traceID, expiry)
	first, err := s.Enqueue(frame)
	if err != nil { // the link is ending
		if s.V21 {
			return nil, nil // it stays queued; OnClosed decides what becomes of it
		}
		return nil, offlineError()
	}
	n.calls.MarkSent(p.id)
	n.hub.commands.Add(1)
	n.expectAnswer()
	if first {
		unflushed = s
	}
	return unflushed, nil
}

// sendCancel asks the device to end a command, or the stream that it opened.
func (n *Node) sendCancel(cmdID string) {
	_ = n.session.Load().Send(link.Encode(link.TypeCmdCancel, link.NewID(), cmdID, nil))
}

// offlineError is the answer to a call that was not written to the link.
func offlineError() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", Reason: "offline", Outcome: manifest.NotSent}
}

// suspectError is the answer to a call to a device that has not answered for suspectTime.
func suspectError() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is connected but does not answer", Reason: "suspect", Outcome: manifest.NotSent}
}

// withdrawnError is the answer to a call whose tool the device has just taken out of its manifest:
// neither the caller nor the device is at fault, but no such tool exists any more.
func withdrawnError() *manifest.Error {
	return &manifest.Error{Code: manifest.BadRequest, Message: "the node is yours but has no such tool any more; tools/list shows its tools", Reason: "tool"}
}

// inDoubtError is the answer to a call that was written to a link that then ended.
func inDoubtError() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the link was lost before the device answered", Reason: "in_doubt", Outcome: manifest.OutcomeUnknown}
}

// expiredError is the answer to a call whose deadline came before it was written.
func expiredError() *manifest.Error {
	return &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the device could not be reached before the deadline", Reason: "expired", Outcome: manifest.NotSent}
}

// endOfWait is the error of a call whose ctx has ended while the command was in a state: a
// *manifest.Error for a deadline, and ctx's cause for a caller that left.
func endOfWait(ctx context.Context, was link.CallState) error {
	switch {
	case !isDeadline(ctx):
		return context.Cause(ctx)
	case was == link.Queued:
		return expiredError()
	case was == link.InDoubt: // the board did not come back in time
		return inDoubtError()
	}
	return &manifest.Error{Code: manifest.DeadlineExceeded, Message: "the device did not answer within 5 s", Reason: "gateway_deadline", Outcome: manifest.OutcomeUnknown}
}

// isDeadline reports whether ctx has ended because its time was over.
func isDeadline(ctx context.Context) bool {
	return errors.Is(context.Cause(ctx), context.DeadlineExceeded)
}

func rateLimited(message, reason string) *manifest.Error {
	return &manifest.Error{Code: manifest.RateLimited, Message: message, RetryAfterMS: 1000, Reason: reason}
}

// OnAck ends the command that a cmd_ack answers; known is false for an ack that the device
// sent without need.
func (n *Node) OnAck(inReplyTo string, a link.CmdAck) (known bool) {
	n.mu.Lock()
	p, verdict := n.calls.Ack(inReplyTo)
	var ended link.CallInfo
	if verdict != link.AckAccepted {
		ended, _ = n.calls.Ended(inReplyTo)
	}
	n.mu.Unlock()
	e := AuditEvent{Tool: ended.Tool, TraceID: ended.TraceID, Code: ended.Code}
	switch verdict {
	case link.AckRepeated:
		return true
	case link.AckLate:
		n.hub.lateAcks.Add(1)
		e.Kind = "late_ack"
		n.audit(e)
		return true
	case link.AckDuplicate, link.AckForeign:
		n.hub.unsolicitedAcks.Add(1)
		e.Kind, e.Code = "dup_ack", manifest.BadRequest
		if verdict == link.AckForeign {
			other := n.hub.findCommand(n, inReplyTo)
			e.Kind, e.Tool, e.TraceID = "foreign_ack", other.Tool, other.TraceID
		}
		n.audit(e)
		return false
	}
	o := n.checkAck(p, a)
	if o.err != nil && a.OK && p.onResult != nil {
		n.sendCancel(p.id) // the device has opened a stream that nobody reads
	}
	p.finish(o)
	return true
}

// findCommandEvery is the least time between two searches of findCommand, which look at all
// nodes: a device that sends acks for nothing must not keep the relay busy.
const findCommandEvery = 100 * time.Millisecond

// findCommand returns whose command a foreign ack answers, for the audit log: that of another
// node of the same tenant. It is the zero value when there is none, and when it was called a
// moment ago.
func (h *Hub) findCommand(acker *Node, id string) link.CallInfo {
	tenant, now := acker.Tenant(), time.Now()
	h.mu.Lock()
	if now.Sub(h.searchedAt) < findCommandEvery {
		h.mu.Unlock()
		return link.CallInfo{}
	}
	h.searchedAt = now
	var nodes []*Node
	for _, n := range h.nodes {
		if n != acker && n.Tenant() == tenant {
			nodes = append(nodes, n)
		}
	}
	h.mu.Unlock()
	for _, n := range nodes {
		n.mu.Lock()
		info, found := n.calls.Ended(id)
		if p, ok := n.calls.Value(id); ok {
			info, found = link.CallInfo{Tool: p.tool.Canonical, TraceID: p.opt.TraceID}, true
		}
		n.mu.Unlock()
		if found {
			return info
		}
	}
	return link.CallInfo{}
}

// checkAck turns an ack into the caller's outcome. An error contains no text of the device
// (RFC-0005 §8).
func (n *Node) checkAck(p *pendingCall, a link.CmdAck) callOutcome {
	switch {
	case !a.OK && !n.announces(p.tool.Canonical): // withdrawn while the command was on its way
		return callOutcome{err: withdrawnError()}
	case !a.OK:
		return callOutcome{err: deviceError(a.Code)}
	}
	err := n.hub.opt.CheckResult(p.tool, p.args, a.Result)
	if err == nil && p.onResult != nil {
		err = p.onResult(a.Result)
	}
	if err != nil {
		n.hub.badResults.Add(1)
		n.audit(AuditEvent{Kind: "bad_result", Tool: p.tool.Canonical, TraceID: p.opt.TraceID, Code: manifest.Internal})
		return callOutcome{err: &manifest.Error{Code: manifest.Internal, Message: "the device's result violates its contract", Reason: "bad_result"}}
	}
	return callOutcome{result: append([]byte(nil), a.Result...)} // the bytes belong to the reader's buffer
}

// deviceMessages are the callers' messages for the codes that a device may answer.
var deviceMessages = map[manifest.Code]string{
	manifest.DeadlineExceeded: "the device's handler did not answer in time",
	manifest.RateLimited:      "the device is busy; retry later",
	manifest.ManifestInvalid:  "the device refused the arguments or the tool",
	manifest.SafetyDenied:     "the device refused the call",
	manifest.BadRequest:       "the device could not read the call",
}

// deviceError is the caller's error for an error of the device. Other codes become
// E_INTERNAL: a linked device cannot be offline, for instance.
func deviceError(code manifest.Code) *manifest.Error {
	e := &manifest.Error{Code: code, Message: deviceMessages[code], Reason: "device"}
	if e.Message == "" {
		e.Code, e.Message = manifest.Internal, "the device failed to answer this call"
	}
	switch code {
	case manifest.RateLimited:
		e.RetryAfterMS = 1000
	case manifest.DeadlineExceeded:
		e.Outcome = manifest.OutcomeUnknown // the handler was running
	}
	return e
}
