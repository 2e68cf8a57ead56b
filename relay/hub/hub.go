// Package hub holds the relay's live devices: their sessions, the commands in flight,
// the shared metric streams, and what happens when one identity connects twice.
//
//	h := hub.New(hub.Options{...})
//	go h.Run(ctx)        // liveness, revocation; waits for every session
//	h.Attach(conn)       // one device link; Options.Ready hands out its Node
//	node.Call(...)       // one command, ended exactly once
//	node.Subscribe(...)  // one device stream an interval, shared by all its readers
package hub

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// Bounds of a hub.
const (
	// MaxNodes is how many devices may be linked at a time.
	MaxNodes = 20000
	// maxHandshakes is how many links may be in their handshake at a time.
	maxHandshakes = 2048
	// DrainTimeout bounds the wait for sessions at the end of Run.
	DrainTimeout = 5 * time.Second
)

// Options join the hub with the rooms around it.
type Options struct {
	// Authenticate checks a device's token: link.AcceptOptions.
	Authenticate func(ctx context.Context, a *link.Auth) (*link.Grant, error)
	// ValidateCapability checks one announced capability against its schema.
	ValidateCapability func(raw []byte) error
	// CheckResult checks a cmd_ack's result against the verb's schema and the node id.
	CheckResult func(schemaRef string, raw []byte, nodeID string) error
	// CheckSample checks a metric sample likewise, and that it is one line.
	CheckSample func(raw []byte, nodeID string) error
	// EncodeSSE makes the SSE event of a checked sample, once for all its readers.
	EncodeSSE func(sample []byte) []byte
	// OnAnnounce is called with each checked announce; it may write to disk.
	OnAnnounce func(n *Node)
	// OnReady is called when a node is ready or has announced again, Gone when a node that
	// was ready has ended; one at a time. A node that was superseded is not made ready
	// again. They must be quick.
	OnReady func(n *Node)
	OnGone  func(n *Node)
	// SaveLastSeen is called now and then with the nodes that are alive.
	SaveLastSeen func(nodeIDs []string)
	// OnPing is called with a node that has just been pinged and is not silent, so more
	// often than each link.PingInterval. It must be quick.
	OnPing func(n *Node)
	// GrantRevision changes whenever a grant may have been taken back before its Until; nil: it
	// may at any time. It must be quick.
	GrantRevision func() int64
	// OnDeviceEvent is called with each event that a device sends of itself, in its session's
	// goroutine. data, a JSON object of at most link.MaxEvent bytes, is the callee's only
	// until it returns. It must not block.
	OnDeviceEvent func(n *Node, topic string, data []byte)
	// Audit reports what the audit log should know: late_ack, dup_ack, foreign_ack,
	// bad_result, bad_sample, clone_suspected, revoked, device_connect,
	// device_disconnect, device_refused. It must not block.
	Audit func(e AuditEvent)
}

// AuditEvent is one remarkable thing about a device.
type AuditEvent struct {
	Kind   string
	Tenant string
	NodeID string
	Tool   string
	Code   manifest.Code
	Close  int // close code, for device_disconnect and device_refused
}

// Stats are counters since the start, and gauges.
type Stats struct {
	Nodes           int
	Handshaking     int
	Accepted        uint64
	Refused         uint64
	Commands        uint64
	LateAcks        uint64
	UnsolicitedAcks uint64 // duplicate or foreign
	BadResults      uint64
	Frames          uint64
	BadFrames       uint64
	Takeovers       uint64
	Streams         int // open device streams
}

// Hub is the set of live devices. Make one with New.
type Hub struct {
	opt            Options
	nodeLimit      int // MaxNodes and maxHandshakes; tests lower them
	handshakeLimit int64
	handshaking    atomic.Int64
	wg             sync.WaitGroup
	ctx            context.Context // ends the handshakes
	cancel         context.CancelFunc
	poller         *link.Poller // nil where there is none

	callbackMu sync.Mutex // one Ready or Gone at a time
	callPool   sync.Pool  // of *pending, to be used again

	mu                sync.Mutex // protects the fields below
	nodes             map[string]*Node
	wheel             [wheelSize]map[*Node]struct{} // the same nodes, by the second of the next look at them
	second            int                           // of the sweep
	takeoverHistories map[string]*takeoverHistory
	sharedManifests   map[string]*link.Manifest // by raw bytes, at most maxSharedManifests; see share
	closing           bool

	grantRevision int64 // Options.Revision, as the sweep last saw it

	accepted, refused, commands, lateAcks, unsolicitedAcks atomic.Uint64
	badResults, frames, badFrames, takeovers               atomic.Uint64
	streams                                                atomic.Int64
}

// New makes a hub without devices.
func New(opt Options) *Hub {
	h := &Hub{opt: opt, nodeLimit: MaxNodes, handshakeLimit: maxHandshakes, nodes: make(map[string]*Node), takeoverHistories: make(map[string]*takeoverHistory), sharedManifests: make(map[string]*link.Manifest)}
	for i := range h.wheel {
		h.wheel[i] = make(map[*Node]struct{})
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.poller, _ = link.NewPoller() // without one, a goroutine waits at each link
	h.callPool.New = newPendingCall
	return h
}

// Attach takes one upgraded link and serves it until it ends. It returns at once, so
// that the HTTP server's buffers are freed; Run waits for the session. A link too many
// is closed with 4503, here.
func (h *Hub) Attach(conn link.Conn) {
	h.mu.Lock()
	full := h.closing || len(h.nodes) >= h.nodeLimit || h.handshaking.Load() >= h.handshakeLimit
	if !full {
		h.handshaking.Add(1)
		h.wg.Go(func() { h.handshake(conn) })
	}
	h.mu.Unlock()
	if full {
		h.refused.Add(1)
		_ = conn.Close(link.CloseDraining, "overloaded")
	}
}

func (h *Hub) handshake(conn link.Conn) {
	var who link.Grant // for the audit log, when the handshake fails later on
	s, m, err := link.Accept(h.ctx, conn, link.AcceptOptions{
		Authenticate: func(ctx context.Context, a *link.Auth) (*link.Grant, error) {
			g, err := h.opt.Authenticate(ctx, a)
			if err != nil {
				return nil, err
			}
			who = *g
			return g, h.inPenalty(g.NodeID)
		},
		ReconnectSpreadMS: h.reconnectSpreadMS, ValidateCapability: h.opt.ValidateCapability,
	})
	h.handshaking.Add(-1)
	if err != nil {
		h.refused.Add(1)
		h.audit(AuditEvent{Kind: "device_refused", Tenant: who.Tenant, NodeID: who.NodeID, Close: link.CloseCode(err)})
		return
	}
	n := &Node{hub: h, session: s}
	over, refusal := h.register(n)
	if refusal != nil {
		h.refused.Add(1)
		s.Close(refusal.Code, refusal.Reason)
		_ = s.Run(h.ctx, n)
		h.audit(AuditEvent{Kind: "device_refused", Tenant: s.Tenant, NodeID: s.NodeID, Close: refusal.Code})
		return
	}
	h.accepted.Add(1)
	h.audit(AuditEvent{Kind: "device_connect", Tenant: s.Tenant, NodeID: s.NodeID})
	n.OnAnnounce(m)
	h.closeSuperseded(over, n) // only now: the node's tools were there all the time
	h.wg.Add(1)
	s.Start(h.poller, n)
}

// OnClosed ends a node whose link has ended.
func (n *Node) OnClosed(err error) {
	h, s := n.hub, n.session
	defer h.wg.Done()
	h.unregister(n)
	n.failAll()
	if h.opt.OnGone != nil {
		h.callbackMu.Lock()
		h.opt.OnGone(n)
		h.callbackMu.Unlock()
	}
	h.audit(AuditEvent{Kind: "device_disconnect", Tenant: s.Tenant, NodeID: s.NodeID, Close: link.CloseCode(err)})
}

// reconnectSpreadMS is reconnect_spread_ms: 200 devices a second come back after a restart.
func (h *Hub) reconnectSpreadMS() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(1000, int64(len(h.nodes))*1000/200)
}

// takeover is what enter found in n's place.
type takeover struct {
	old        *Node
	isClone    bool // from another install
	rejectBoth bool // too often: neither is served
}

// register makes n the node of its id.
func (h *Hub) register(n *Node) (over takeover, refusal *link.Refusal) {
	h.mu.Lock()
	defer h.mu.Unlock()
	over.old = h.nodes[n.session.NodeID]
	if h.closing || (over.old == nil && len(h.nodes) >= h.nodeLimit) {
		return over, &link.Refusal{Code: link.CloseDraining, Reason: "overloaded"}
	}
	// The sweep may have seen a revocation that came during the handshake: it asks no more.
	if n.session.CheckActive != nil && n.session.CheckActive() != nil {
		return over, &link.Refusal{Code: link.CloseAuthFailed, Reason: "auth_failed"}
	}
	h.nodes[n.session.NodeID] = n
	h.scheduleLocked(n, min(firstPingDelay, n.nextCheck()))
	if over.old != nil {
		n.isReady = over.old.isReady
		delete(h.wheel[over.old.wheelSlot], over.old)
		h.takeovers.Add(1)
		over.isClone = over.old.session.InstanceID != n.session.InstanceID
		over.rejectBoth = over.isClone && h.recordTakeoverLocked(n.session.NodeID)
	}
	return over, nil
}

// closeSuperseded ends the older link of the same id. The same install twice is a half-open
// leftover; two installs are a clone, and the owner hears of it.
func (h *Hub) closeSuperseded(over takeover, n *Node) {
	if over.old != nil {
		over.old.session.Close(link.CloseSuperseded, "superseded")
		over.old.failAll() // nobody waits for what a half-open link will not answer
	}
	if over.isClone {
		h.audit(AuditEvent{Kind: "clone_suspected", Tenant: n.session.Tenant, NodeID: n.session.NodeID})
	}
	if over.rejectBoth {
		n.session.Close(link.CloseSuperseded, "superseded")
	}
}

// Bounds of what share remembers: manifests, and the bytes of one.
const (
	maxSharedManifests = 256
	maxSharedBytes     = 4 << 10
)

// shareManifest makes m use the memory of an earlier manifest with the same bytes: boards of one
// make announce the same, and an idle one should hold little.
func (h *Hub) shareManifest(m *link.Manifest) {
	if len(m.Raw) > maxSharedBytes {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	first := h.sharedManifests[string(m.Raw)]
	if first == nil {
		if len(h.sharedManifests) >= maxSharedManifests {
			clear(h.sharedManifests)
		}
		h.sharedManifests[string(m.Raw)] = &link.Manifest{Capabilities: m.Capabilities, Raw: m.Raw}
		return
	}
	for i := range m.Tools {
		if j := slices.Index(m.Capabilities, m.Tools[i].Capability); j >= 0 {
			m.Tools[i].Capability = first.Capabilities[j]
		}
	}
	m.Capabilities, m.Raw = first.Capabilities, first.Raw
}

func (h *Hub) unregister(n *Node) {
	h.mu.Lock()
	if h.nodes[n.session.NodeID] == n {
		delete(h.nodes, n.session.NodeID)
		delete(h.wheel[n.wheelSlot], n)
	}
	h.mu.Unlock()
}

func (h *Hub) isCurrent(n *Node) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes[n.session.NodeID] == n
}

// IsOnline reports whether the node has a ready link.
func (h *Hub) IsOnline(nodeID string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.nodes[nodeID]
	return ok
}

// IsReady reports whether a node's tools can be called: it is online and Ready has
// returned for it.
func (h *Hub) IsReady(nodeID string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, ok := h.nodes[nodeID]
	return ok && n.isReady
}

func (h *Hub) audit(e AuditEvent) {
	if h.opt.Audit != nil {
		h.opt.Audit(e)
	}
}

// takeoverHistory remembers links of one node id that come from different installs.
type takeoverHistory struct {
	times        []time.Time // of the takeovers in the last minute, at most maxTakeovers
	penaltyUntil time.Time   // both installs are refused until then
	penalty      time.Duration
}

const (
	maxTakeovers   = 3
	takeoverWindow = time.Minute
	maxPenalty     = time.Hour
	maxHistories   = 4096
)

// recordTakeoverLocked notes a takeover between installs; true means that both are refused now.
func (h *Hub) recordTakeoverLocked(id string) bool {
	now := time.Now()
	r := h.takeoverHistories[id]
	if r == nil {
		if len(h.takeoverHistories) >= maxHistories {
			return false
		}
		r = &takeoverHistory{}
		h.takeoverHistories[id] = r
	}
	r.times = append(r.times, now)
	for len(r.times) > 0 && now.Sub(r.times[0]) > takeoverWindow {
		r.times = r.times[1:]
	}
	if len(r.times) < maxTakeovers {
		return false
	}
	r.penalty = min(max(2*r.penalty, takeoverWindow), maxPenalty)
	r.penaltyUntil, r.times = now.Add(r.penalty), nil
	return true
}

// inPenalty refuses a node id that two installs fight for.
func (h *Hub) inPenalty(id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.takeoverHistories[id]; r != nil && time.Now().Before(r.penaltyUntil) {
		return &link.Refusal{Code: link.CloseSuperseded, Reason: "superseded"}
	}
	return nil
}

// Run pings, drops silent links, cuts revoked ones and tells Seen, until ctx ends; then
// it closes every link with 4503 and waits for the sessions, at most DrainTimeout.
func (h *Hub) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	broken := make(chan error, 1)
	if h.poller != nil {
		pollCtx, stop := context.WithCancel(context.Background()) // it is the last to end
		var poll sync.WaitGroup
		poll.Go(func() { broken <- h.poller.Run(pollCtx) })
		defer func() { stop(); poll.Wait() }()
	}
	for {
		select {
		case <-ctx.Done():
			h.drain()
			return context.Cause(ctx)
		case err := <-broken: // nobody would read a link again
			h.drain()
			return err
		case <-tick.C:
			h.sweep()
		}
	}
}

func (h *Hub) drain() {
	h.mu.Lock()
	h.closing = true
	for _, n := range h.nodes {
		n.session.Close(link.CloseDraining, "draining")
	}
	h.mu.Unlock()
	h.cancel() // and the handshakes
	done := make(chan struct{})
	go func() { h.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(DrainTimeout):
	}
}

// Stats is a snapshot of the counters.
func (h *Hub) Stats() Stats {
	h.mu.Lock()
	nodes := len(h.nodes)
	h.mu.Unlock()
	return Stats{
		Nodes: nodes, Handshaking: int(h.handshaking.Load()),
		Accepted: h.accepted.Load(), Refused: h.refused.Load(), Commands: h.commands.Load(),
		LateAcks: h.lateAcks.Load(), UnsolicitedAcks: h.unsolicitedAcks.Load(), BadResults: h.badResults.Load(),
		Frames: h.frames.Load(), BadFrames: h.badFrames.Load(), Takeovers: h.takeovers.Load(),
		Streams: int(h.streams.Load()),
	}
}
