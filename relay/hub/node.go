package hub

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/transport/fanout"
	"agentctl/transport/link"
)

// Node is one linked device, from the end of its handshake until the link has ended. As
// link.SessionOwner it handles the device's messages, in the goroutine that reads them.
type Node struct {
	hub       *Hub
	session   *link.Session
	revoked   bool                          // checkGrant has closed the link; owned by the sweep
	wheelSlot int                           // in Hub.wheel; protected by Hub.mu
	isReady   atomic.Bool                   // OnReady has returned, or had for the superseded link
	announced atomic.Pointer[link.Manifest] // stored under mu, together with the streams that it ends

	mu          sync.Mutex // protects the fields below
	calls       link.Calls[*pendingCall]
	streams     map[streamKey]*stream
	streamsByID map[string]*stream // by the device's stream_id
	closed      bool
}

var _ link.SessionOwner = (*Node)(nil)

// pendingCall is one command that a caller waits for. Whoever takes it out of Node.calls
// ends it: the session's goroutine with finish, or the caller itself on a timeout.
type pendingCall struct {
	id      string
	tool    *manifest.Tool
	done    chan struct{} // of capacity 1; receives one value when outcome is set
	outcome callOutcome
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

// ID is the node id.
func (n *Node) ID() string { return n.session.NodeID }

// Name is the node's name within its tenant, "" if it has none.
func (n *Node) Name() string { return n.session.Name }

// Tenant is the tenant that owns the device.
func (n *Node) Tenant() string { return n.session.Tenant }

// Proved reports whether the device has proved the key that its token is bound to.
func (n *Node) Proved() bool { return n.session.Proved }

// Tools are the tools of the last announce; the slice is read-only.
func (n *Node) Tools() []manifest.Tool { return n.announced.Load().Tools }

// Manifest is the JSON array of the capabilities of the last announce.
func (n *Node) Manifest() []byte { return n.announced.Load().Raw }

// CallOptions are options of one command.
type CallOptions struct {
	TraceID string // passed to the device; "" if the caller sent none
}

// Call sends one command and waits for its end: the device's result, checked against the
// verb's schema and this node's id, a *manifest.Error, or ctx's cause. ctx carries the
// caller's deadline. The command runs at most once and is never sent again.
func (n *Node) Call(ctx context.Context, t *manifest.Tool, args []byte, opt CallOptions) ([]byte, error) {
	p := n.hub.callPool.Get().(*pendingCall)
	p.tool = t
	result, err := n.roundTrip(ctx, p, args, opt)
	*p = pendingCall{done: p.done}
	n.hub.callPool.Put(p)
	return result, err
}

// roundTrip sends p and waits. Nothing refers to p when it returns.
func (n *Node) roundTrip(ctx context.Context, p *pendingCall, args []byte, opt CallOptions) (result []byte, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p.id = link.NewID()
	frame := link.AppendCmd(make([]byte, 0, len(args)+192), p.id, p.tool.Canonical, args, 0, opt.TraceID, link.Expiry{})
	if err := n.sendCommand(ctx, p, frame, opt); err != nil {
		return nil, err
	}
	select {
	case <-p.done:
		return p.outcome.result, p.outcome.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	was, ended := n.calls.Expire(p.id)
	if ended && was == link.Sent {
		n.sendCancel(p.id)
	}
	n.mu.Unlock()
	if ended {
		return nil, context.Cause(ctx)
	}
	<-p.done // the session's goroutine was first and is about to call finish
	return p.outcome.result, p.outcome.err
}

// sendCommand adds a command to the table and sends its frame under one lock, so that the
// device gets commands and their cancellation in the table's order.
func (n *Node) sendCommand(ctx context.Context, p *pendingCall, frame []byte, opt CallOptions) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultBudget)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return offlineError()
	}
	if n.calls.Add(p.id, deadline, link.CallInfo{Tool: p.tool.Canonical, TraceID: opt.TraceID}, p) != nil {
		return rateLimited("too many commands wait for this device; retry later", "queue")
	}
	if n.session.Send(frame) != nil { // the link is ending
		n.calls.Expire(p.id)
		return offlineError()
	}
	n.calls.MarkSent(p.id)
	n.hub.commands.Add(1)
	return nil
}

// defaultBudget is the gateway's budget (RFC-0005 §7), for a ctx without a deadline.
const defaultBudget = 5 * time.Second

// sendCancel tells the device to end a command, or the stream that it opened.
func (n *Node) sendCancel(cmdID string) {
	_ = n.session.Send(link.Encode(link.TypeCmdCancel, link.NewID(), cmdID, nil))
}

// offlineError is the answer to a call that was not written to the link.
func offlineError() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", Reason: "offline", Outcome: manifest.NotSent}
}

// inDoubtError is the answer to a call that was written to a link that then ended.
func inDoubtError() *manifest.Error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the link was lost before the device answered", Reason: "in_doubt", Outcome: manifest.OutcomeUnknown}
}

func rateLimited(message, reason string) *manifest.Error {
	return &manifest.Error{Code: manifest.RateLimited, Message: message, RetryAfterMS: 1000, Reason: reason}
}

// OnAnnounce takes a checked manifest: the first one, or one that replaces it. A superseded
// link changes this node only, not what the callbacks publish under its id.
func (n *Node) OnAnnounce(m *link.Manifest) {
	h := n.hub
	h.shareManifest(m)
	n.mu.Lock()
	n.announced.Store(m)
	withdrawn := n.removeWithdrawnLocked()
	n.mu.Unlock()
	for _, s := range withdrawn {
		s.topic.Close(ErrOffline)
	}
	if h.opt.OnAnnounce != nil && h.isCurrent(n) {
		h.opt.OnAnnounce(n)
	}
	h.callbackMu.Lock()
	defer h.callbackMu.Unlock()
	if h.opt.OnReady != nil && h.isCurrent(n) {
		h.opt.OnReady(n)
	}
	n.isReady.Store(true)
}

// OnAck ends the command that a cmd_ack answers; known is false for an ack that the device
// sent without need.
func (n *Node) OnAck(inReplyTo string, a link.CmdAck) (known bool) {
	n.mu.Lock()
	p, verdict := n.calls.Ack(inReplyTo)
	n.mu.Unlock()
	switch verdict {
	case link.AckRepeated:
		return true
	case link.AckLate:
		n.hub.lateAcks.Add(1)
		n.audit(AuditEvent{Kind: "late_ack"})
		return true
	case link.AckDuplicate, link.AckForeign:
		n.hub.unsolicitedAcks.Add(1)
		kind := "dup_ack"
		if verdict == link.AckForeign {
			kind = "foreign_ack"
		}
		n.audit(AuditEvent{Kind: kind})
		return false
	}
	o := n.checkAck(p, a)
	if o.err != nil && a.OK && p.onResult != nil {
		n.sendCancel(p.id) // the device has opened a stream that nobody reads
	}
	p.finish(o)
	return true
}

// checkAck turns an ack into the caller's outcome. An error contains no text of the device
// (RFC-0005 §8).
func (n *Node) checkAck(p *pendingCall, a link.CmdAck) callOutcome {
	if !a.OK {
		return callOutcome{err: deviceError(a.Code)}
	}
	err := n.hub.opt.CheckResult(p.tool.Verb.Ack, a.Result, n.ID())
	if err == nil && p.onResult != nil {
		err = p.onResult(a.Result)
	}
	if err != nil {
		n.hub.badResults.Add(1)
		n.audit(AuditEvent{Kind: "bad_result", Tool: p.tool.Canonical, Code: manifest.Internal})
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

// failAll ends the commands and streams of this device.
func (n *Node) failAll() {
	n.mu.Lock()
	n.closed = true
	calls, streams := n.calls.Fail(), n.streams
	n.hub.streams.Add(-int64(len(n.streamsByID)))
	n.streams, n.streamsByID = nil, nil
	n.mu.Unlock()
	for _, c := range calls {
		c.Value.finish(callOutcome{err: inDoubtError()})
	}
	for _, s := range streams {
		s.topic.Close(ErrOffline)
	}
}

// audit reports e as an event of this node.
func (n *Node) audit(e AuditEvent) {
	e.Tenant, e.NodeID = n.Tenant(), n.ID()
	n.hub.audit(e)
}

// ErrOffline ends the streams of a device that went away. ErrTooSlow ends a subscriber that
// fell behind. Both wrap the *manifest.Error for the client.
var (
	ErrOffline = errors.Join(errors.New("hub: the device went offline"),
		&manifest.Error{Code: manifest.NodeOffline, Message: "the device went offline during the stream", Reason: "stream_end"})
	ErrTooSlow = errors.Join(fanout.ErrOverflow, rateLimited("this reader was too slow for the stream; use a longer interval_ms", "behind"))
)
