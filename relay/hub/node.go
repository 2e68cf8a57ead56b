package hub

import (
	"context"
	"errors"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/fanout"
	"agentctl/transport/link"
)

// Node is one linked device, from ready to gone.
type Node struct {
	hub       *Hub
	session   *link.Session
	revoked   bool // of the hub's sweep only
	wheelSlot int  // of the hub's wheel; by hub.mu
	isReady   bool // by hub.mu: Ready has put its tools, or those of the link before it, in place

	mu          sync.Mutex // protects the fields below
	tools       []manifest.Tool
	manifest    []byte
	calls       link.Calls[*pendingCall]
	streams     map[streamKey]*stream
	streamsByID map[string]*stream // streams by the device's stream_id
	closed      bool
}

// pendingCall is one command that a caller waits for.
type pendingCall struct {
	id      string
	tool    *manifest.Tool
	done    chan struct{} // takes one, when answer is set
	outcome callOutcome
	// onResult, for a subscription, runs in the session's goroutine, before any frame
	// of the stream can be read.
	onResult func(result []byte) error
}

type callOutcome struct {
	result []byte
	err    error
}

// finish tells the caller. It is called at most once, by whoever took p out of the table,
// and is the last that happens to p from that side.
func (p *pendingCall) finish(a callOutcome) {
	p.outcome = a
	p.done <- struct{}{}
}

func newPendingCall() any { return &pendingCall{done: make(chan struct{}, 1)} }

// ID is the node id.
func (n *Node) ID() string { return n.session.NodeID }

// Name is the node's name among its tenant's, "" if it has none.
func (n *Node) Name() string { return n.session.Name }

// Tenant is whose device it is.
func (n *Node) Tenant() string { return n.session.Tenant }

// Tools are what the device announced last; the slice is read-only.
func (n *Node) Tools() []manifest.Tool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.tools
}

// Manifest is the raw JSON of the capabilities announced last.
func (n *Node) Manifest() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.manifest
}

// CallOptions of one command.
type CallOptions struct {
	TraceID string // goes on to the device; "" if the caller sent none
}

// Call sends one command and waits for its end: the device's result, checked against
// the verb's schema and this node's id, a *manifest.Error, or ctx's cause. ctx carries
// the gateway's budget. The command runs at most once and is never sent again.
func (n *Node) Call(ctx context.Context, t *manifest.Tool, args []byte, opt CallOptions) ([]byte, error) {
	p := n.hub.callPool.Get().(*pendingCall)
	p.tool = t
	result, err := n.roundTrip(ctx, p, args, opt)
	*p = pendingCall{done: p.done} // nobody else knows it any more
	n.hub.callPool.Put(p)
	return result, err
}

func (n *Node) roundTrip(ctx context.Context, p *pendingCall, args []byte, opt CallOptions) (result []byte, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p.id = link.NewID()
	frame := link.AppendCmd(make([]byte, 0, len(args)+192), p.id, p.tool.Canonical, args, 0, opt.TraceID)
	if err := n.sendCommand(ctx, p, frame); err != nil {
		return nil, err
	}
	select {
	case <-p.done:
		return p.outcome.result, p.outcome.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	ended, tell := n.calls.Expire(p.id)
	if tell {
		n.sendCancel(p.id)
	}
	n.mu.Unlock()
	if ended {
		return nil, context.Cause(ctx)
	}
	<-p.done // its end came first: the session's goroutine is about to tell it
	return p.outcome.result, p.outcome.err
}

// sendCommand notes a command and hands its frame to the link, in one step: what is in the
// table and what the device gets are never in another order.
func (n *Node) sendCommand(ctx context.Context, p *pendingCall, frame []byte) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultBudget)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return offline()
	}
	if n.calls.Add(p.id, deadline, p) != nil {
		return &manifest.Error{Code: manifest.RateLimited, Message: "too many commands wait for this device; retry later", RetryAfterMS: 1000, Reason: "queue"}
	}
	if n.session.Send(frame) != nil { // the link is ending
		n.calls.Expire(p.id)
		return offline()
	}
	n.calls.MarkSent(p.id)
	n.hub.commands.Add(1)
	return nil
}

// defaultBudget is the gateway's (RFC-0005 §7), for a ctx that does not tell it.
const defaultBudget = 5 * time.Second

// sendCancel tells the device to end a command or the stream that it opened.
func (n *Node) sendCancel(cmdID string) {
	_ = n.session.Send(link.Encode(link.TypeCmdCancel, link.NewID(), cmdID, nil))
}

func offline() error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", Reason: "offline"}
}

// OnAnnounce takes a checked manifest: the first, or one that replaces it.
func (n *Node) OnAnnounce(m *link.Manifest) {
	n.hub.shareManifest(m)
	n.mu.Lock()
	n.tools, n.manifest = m.Tools, m.Raw
	withdrawn := n.removeWithdrawnLocked()
	n.mu.Unlock()
	for _, s := range withdrawn {
		s.end(ErrOffline)
	}
	if n.hub.opt.OnAnnounce != nil && n.hub.isCurrent(n) { // a superseded link's last word is not the node's
		n.hub.opt.OnAnnounce(n)
	}
	n.hub.callbackMu.Lock()
	defer n.hub.callbackMu.Unlock()
	if n.hub.opt.OnReady != nil && n.hub.isCurrent(n) {
		n.hub.opt.OnReady(n)
	}
	n.hub.mu.Lock()
	n.isReady = true
	n.hub.mu.Unlock()
}

// OnAck ends the command that a cmd_ack answers; known is false for an ack of nothing.
func (n *Node) OnAck(inReplyTo string, a link.CmdAck) (known bool) {
	n.mu.Lock()
	p, verdict := n.calls.Ack(inReplyTo)
	n.mu.Unlock()
	switch verdict {
	case link.AckLate:
		n.hub.lateAcks.Add(1)
		n.audit("late_ack", "", "")
		return true
	case link.AckDuplicate:
		n.hub.unsolicitedAcks.Add(1)
		n.audit("dup_ack", "", "")
		return false
	case link.AckForeign:
		n.hub.unsolicitedAcks.Add(1)
		n.audit("foreign_ack", "", "")
		return false
	}
	ans := n.checkAck(p, a)
	if ans.err != nil && a.OK && p.onResult != nil {
		n.sendCancel(p.id) // it opened a stream that nobody will read
	}
	p.finish(ans)
	return true
}

// checkAck turns an ack into the caller's answer. Nothing that the device wrote is in an
// error (RFC-0005 §8).
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
		n.audit("bad_result", p.tool.Canonical, manifest.Internal)
		return callOutcome{err: &manifest.Error{Code: manifest.Internal, Message: "the device gave a result that breaks its contract", Reason: "bad_result"}}
	}
	return callOutcome{result: append([]byte(nil), a.Result...)} // the bytes are the reader's
}

// deviceError is the caller's error for a device that said no.
func deviceError(code manifest.Code) *manifest.Error {
	e := &manifest.Error{Code: code, Reason: "device"}
	switch code {
	case manifest.DeadlineExceeded:
		e.Message = "the device's handler did not answer in time"
	case manifest.RateLimited:
		e.Message, e.RetryAfterMS = "the device is busy; retry later", 1000
	case manifest.ManifestInvalid:
		e.Message = "the device refused the arguments or the tool"
	case manifest.SafetyDenied:
		e.Message = "the device refused the call"
	case manifest.BadRequest:
		e.Message = "the device could not read the call"
	default: // a linked device cannot be offline; everything else is its fault
		e.Code, e.Message = manifest.Internal, "the device failed to answer this call"
	}
	return e
}

// failAll ends everything that waits for this device.
func (n *Node) failAll() {
	n.mu.Lock()
	n.closed = true
	waiting := n.calls.Fail()
	streams := n.streams
	n.hub.streams.Add(-int64(len(n.streamsByID)))
	n.streams, n.streamsByID = nil, nil
	n.mu.Unlock()
	for _, p := range waiting {
		p.finish(callOutcome{err: offline()})
	}
	for _, s := range streams {
		s.end(ErrOffline)
	}
}

func (n *Node) audit(kind, tool string, code manifest.Code) {
	n.hub.audit(AuditEvent{Kind: kind, Tenant: n.Tenant(), NodeID: n.ID(), Tool: tool, Code: code})
}

// ErrOffline ends the streams of a device that went away, ErrTooSlow a reader that did
// not take its frames. Both carry the *manifest.Error that a caller is told.
var (
	ErrOffline = errors.Join(errors.New("hub: the device went offline"), offline())
	ErrTooSlow = errors.Join(fanout.ErrOverflow, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 1000,
		Message: "this reader was too slow for the stream; use a longer interval_ms", Reason: "behind"})
)

var _ link.SessionOwner = (*Node)(nil)
