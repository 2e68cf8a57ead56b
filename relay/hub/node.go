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
	hub     *Hub
	session *link.Session
	revoked bool // of the hub's sweep only
	slot    int  // of the hub's wheel; by hub.mu
	served  bool // by hub.mu: Ready has put its tools, or those of the link before it, in place

	mu      sync.Mutex // protects the fields below
	tools   []manifest.Tool
	raw     []byte
	calls   link.Calls[*pending]
	streams map[streamKey]*stream
	byID    map[string]*stream // streams by the device's stream_id
	gone    bool
}

// pending is one command that a caller waits for.
type pending struct {
	id     string
	tool   *manifest.Tool
	done   chan struct{} // takes one, when answer is set
	answer answer
	// accepted, for a subscription, runs in the session's goroutine, before any frame
	// of the stream can be read.
	accepted func(result []byte) error
}

type answer struct {
	result []byte
	err    error
}

// end tells the caller. It is called at most once, by whoever took p out of the table,
// and is the last that happens to p from that side.
func (p *pending) end(a answer) {
	p.answer = a
	p.done <- struct{}{}
}

func newPending() any { return &pending{done: make(chan struct{}, 1)} }

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
	return n.raw
}

// CallOptions of one command.
type CallOptions struct {
	TraceID string // goes on to the device; "" if the caller sent none
}

// Call sends one command and waits for its end: the device's result, checked against
// the verb's schema and this node's id, a *manifest.Error, or ctx's cause. ctx carries
// the gateway's budget. The command runs at most once and is never sent again.
func (n *Node) Call(ctx context.Context, t *manifest.Tool, args []byte, opt CallOptions) ([]byte, error) {
	p := n.hub.pendings.Get().(*pending)
	p.tool = t
	result, err := n.do(ctx, p, args, opt)
	*p = pending{done: p.done} // nobody else knows it any more
	n.hub.pendings.Put(p)
	return result, err
}

func (n *Node) do(ctx context.Context, p *pending, args []byte, opt CallOptions) (result []byte, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p.id = link.NewID()
	frame := link.AppendCmd(make([]byte, 0, len(args)+192), p.id, p.tool.Canonical, args, 0, opt.TraceID)
	if err := n.dispatch(ctx, p, frame); err != nil {
		return nil, err
	}
	select {
	case <-p.done:
		return p.answer.result, p.answer.err
	case <-ctx.Done():
	}
	n.mu.Lock()
	ended, tell := n.calls.Expire(p.id)
	if tell {
		n.cancel(p.id)
	}
	n.mu.Unlock()
	if ended {
		return nil, context.Cause(ctx)
	}
	<-p.done // its end came first: the session's goroutine is about to tell it
	return p.answer.result, p.answer.err
}

// dispatch notes a command and hands its frame to the link, in one step: what is in the
// table and what the device gets are never in another order.
func (n *Node) dispatch(ctx context.Context, p *pending, frame []byte) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(callBudget)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
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

// callBudget is the gateway's (RFC-0005 §7), for a ctx that does not tell it.
const callBudget = 5 * time.Second

// cancel tells the device to end a command or the stream that it opened.
func (n *Node) cancel(cmdID string) {
	_ = n.session.Send(link.Encode(link.TypeCmdCancel, link.NewID(), cmdID, nil))
}

func offline() error {
	return &manifest.Error{Code: manifest.NodeOffline, Message: "the device is not connected", Reason: "offline"}
}

// OnAnnounce takes a checked manifest: the first, or one that replaces it.
func (n *Node) OnAnnounce(m *link.Manifest) {
	n.hub.share(m)
	n.mu.Lock()
	n.tools, n.raw = m.Tools, m.Raw
	withdrawn := n.withdrawnLocked()
	n.mu.Unlock()
	for _, s := range withdrawn {
		s.end(ErrOffline)
	}
	if n.hub.opt.OnAnnounce != nil && n.hub.current(n) { // a superseded link's last word is not the node's
		n.hub.opt.OnAnnounce(n)
	}
	n.hub.surface.Lock()
	defer n.hub.surface.Unlock()
	if n.hub.opt.OnReady != nil && n.hub.current(n) {
		n.hub.opt.OnReady(n)
	}
	n.hub.mu.Lock()
	n.served = true
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
		n.note("late_ack", "", "")
		return true
	case link.AckDuplicate:
		n.hub.strayAcks.Add(1)
		n.note("dup_ack", "", "")
		return false
	case link.AckForeign:
		n.hub.strayAcks.Add(1)
		n.note("foreign_ack", "", "")
		return false
	}
	ans := n.judge(p, a)
	if ans.err != nil && a.OK && p.accepted != nil {
		n.cancel(p.id) // it opened a stream that nobody will read
	}
	p.end(ans)
	return true
}

// judge turns an ack into the caller's answer. Nothing that the device wrote is in an
// error (RFC-0005 §8).
func (n *Node) judge(p *pending, a link.CmdAck) answer {
	if !a.OK {
		return answer{err: refused(a.Code)}
	}
	err := n.hub.opt.CheckResult(p.tool.Verb.Ack, a.Result, n.ID())
	if err == nil && p.accepted != nil {
		err = p.accepted(a.Result)
	}
	if err != nil {
		n.hub.badResults.Add(1)
		n.note("bad_result", p.tool.Canonical, manifest.Internal)
		return answer{err: &manifest.Error{Code: manifest.Internal, Message: "the device gave a result that breaks its contract", Reason: "bad_result"}}
	}
	return answer{result: append([]byte(nil), a.Result...)} // the bytes are the reader's
}

// refused is the caller's error for a device that said no.
func refused(code manifest.Code) *manifest.Error {
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

// lost ends everything that waits for this device.
func (n *Node) lost() {
	n.mu.Lock()
	n.gone = true
	waiting := n.calls.Fail()
	streams := n.streams
	n.hub.streams.Add(-int64(len(n.byID)))
	n.streams, n.byID = nil, nil
	n.mu.Unlock()
	for _, p := range waiting {
		p.end(answer{err: offline()})
	}
	for _, s := range streams {
		s.end(ErrOffline)
	}
}

func (n *Node) note(kind, tool string, code manifest.Code) {
	n.hub.event(AuditEvent{Kind: kind, Tenant: n.Tenant(), NodeID: n.ID(), Tool: tool, Code: code})
}

// ErrOffline ends the streams of a device that went away, ErrTooSlow a reader that did
// not take its frames. Both carry the *manifest.Error that a caller is told.
var (
	ErrOffline = errors.Join(errors.New("hub: the device went offline"), offline())
	ErrTooSlow = errors.Join(fanout.ErrOverflow, &manifest.Error{Code: manifest.RateLimited, RetryAfterMS: 1000,
		Message: "this reader was too slow for the stream; use a longer interval_ms", Reason: "behind"})
)

var _ link.SessionOwner = (*Node)(nil)
