// Package hub holds the devices that are connected to the relay: their sessions, the
// commands in flight, the shared metric streams, and what happens when two links use one
// identity.
//
//	h := hub.New(hub.Options{...})
//	go h.Run(ctx)        // liveness and revocation; waits for the sessions
//	h.Attach(conn, addr) // one device link; Options.OnReady hands out its Node
//	node.Call(...)       // one command, ended exactly once
//	node.Subscribe(...)  // one device stream per interval, shared by its subscribers
//
// # States of a node
//
//	Attach -> handshake -> refused                      device_refused
//	                    -> registered -> ready -> gone  OnAnnounce, OnReady, OnGone
//	                                  -> superseded     by a newer link of the same node id
//	                                  -> lost           OnLost; resumed or gone, see lost.go
//
// # Goroutines
//
// Each handshake has one goroutine, which ends when the session has started. An idle session
// has none after that (see transport/link). Run is the sweep, one goroutine for all nodes; another
// one runs the poller, and two start handshakes that wait, one for each queue (waitingLinks). Callers
// of Call and Subscribe wait in their own goroutines. Run waits for the handshakes and sessions, at
// most DrainTimeout.
//
// # Lock order
//
// callbackMu, then Node.mu or Hub.mu, then watchMu or link.Session's lock. Node.mu and Hub.mu are
// never held together, nor two Node.mu. Of the callbacks, OnReady, OnLost, OnGone, OnSuspect and
// OnCloneSuspected run under callbackMu, so that they come in the order of what they report.
// GrantRevision runs under Hub.mu, and so does CheckActive of a grant when its node is
// registered. The others run under no lock.
package hub

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// Bounds of a hub.
const (
	// MaxNodes is how many devices may be linked at a time.
	MaxNodes = 20000
	// maxHandshakes is how many links may be in their handshake at a time, and
	// maxHandshakesPerAddress how many of one address: it ends with a valid auth.
	maxHandshakes           = 2048
	maxHandshakesPerAddress = 128
	// DrainTimeout bounds the wait for sessions at the end of Run.
	DrainTimeout = 5 * time.Second
)

// Options connect the hub with the packages around it. Callbacks may be nil unless their
// comment says otherwise.
type Options struct {
	// Authenticate checks a device's token, see link.AcceptOptions. Required.
	Authenticate func(ctx context.Context, a *link.Auth) (*link.Grant, error)
	// DelayRefusal is called when Authenticate has refused a link of a client, which may be invalid,
	// and may block for some seconds, until ctx ends at the latest. The link is closed after that.
	DelayRefusal func(ctx context.Context, client netip.Addr)
	// Now is the wall clock that devices get, see link.AcceptOptions; nil: time.Now.
	Now func() time.Time
	// ValidateCapability checks one announced capability against its schema.
	ValidateCapability func(raw []byte) error
	// CheckResult checks a cmd_ack's result against the command: the tool with its node, and
	// the arguments. Required.
	CheckResult func(t *manifest.Tool, args, result []byte) error
	// CheckSample checks a metric sample in the same way. Required.
	CheckSample func(raw []byte, nodeID string) error
	// EncodeSSE makes the SSE event of a checked sample, once for all its subscribers.
	EncodeSSE func(sample []byte) []byte
	// OnAnnounce is called with each checked announce; it may write to disk.
	OnAnnounce func(n *Node)
	// OnReady is called when a node is ready or has announced again, OnGone when a node
	// that was ready has ended; one call at a time. A superseded node is not made ready
	// again. They must be quick.
	OnReady func(n *Node)
	OnGone  func(n *Node)
	// OnLost is called, like OnReady and OnGone, when the link of a ready node was lost but
	// its session may be resumed. OnReady follows, or OnGone after some seconds.
	OnLost func(n *Node)
	// OnSuspect is called when a linked node has not answered for 5 s, and when it has
	// answered after that. It must be quick.
	OnSuspect func(n *Node, suspect bool)
	// RecentNodes counts the nodes that were linked within RecentWindow, by this run or an
	// earlier one. It is called once a minute; nil: only those that are linked count.
	RecentNodes func() int
	// SaveLastSeen is called every five minutes with the nodes that are linked.
	SaveLastSeen func(nodeIDs []string)
	// OnPing is called with a node that has just been pinged and is not silent, more often
	// than each link.PingInterval. It must be quick.
	OnPing func(n *Node)
	// GrantRevision changes whenever a grant may have been revoked; nil: it may have been at
	// any time. It must be quick.
	GrantRevision func() int64
	// OnDeviceEvent is called with each event message of a device, in its session's
	// goroutine. data, a JSON object of at most link.MaxEvent bytes, is the callee's only
	// until it returns. It must not block.
	OnDeviceEvent func(n *Node, topic string, data []byte)
	// SaveBoot saves the boot_id of a node's link that is served now, LastBoot returns it. It
	// survives a restart of the relay. SaveBoot may write to disk; LastBoot must be quick.
	SaveBoot func(nodeID, bootID string)
	LastBoot func(nodeID string) string
	// SaveCloneTime saves when a second installation last claimed a node, Unix ms; 0: it is not
	// suspected to have a clone any more. It may write to disk. CloneTimes are the times that
	// an earlier run has saved.
	SaveCloneTime func(nodeID string, ms int64)
	CloneTimes    map[string]int64
	// OnCloneSuspected is called when a node is suspected to have a clone, and when it no
	// longer is. It must not block.
	OnCloneSuspected func(nodeID string, suspected bool)
	// Audit is called with each entry for the audit log. It must not block.
	Audit func(e AuditEvent)
}

// AuditEvent is an event for the audit log. Kinds: device_connect, device_disconnect,
// device_refused, revoked, clone_suspected, late_ack, dup_ack, foreign_ack, bad_result,
// bad_sample.
type AuditEvent struct {
	Kind    string
	Tenant  string
	NodeID  string
	Address netip.Addr // of the device; invalid: unknown
	Tool    string
	TraceID string // of a command
	Code    manifest.Code
	Close   int // close code, for device_disconnect and device_refused
}

// Stats are counters since the start, and gauges.
type Stats struct {
	Nodes           int // gauge: nodes with a link
	Lost            int // gauge: nodes whose link has ended within link.ResumeTTL
	Resumed         uint64
	Handshaking     int // gauge: links before auth
	MaxHandshaking  int
	RefusedSlots    uint64 // links whose address had too many handshakes
	Accepted        uint64
	Refused         uint64
	Commands        uint64
	LateAcks        uint64
	UnsolicitedAcks uint64 // duplicate or foreign
	BadResults      uint64
	Frames          uint64
	BadFrames       uint64
	Takeovers       uint64
	Streams         int // gauge: open device streams
}

// Hub is the set of linked devices. Make one with New.
type Hub struct {
	opt            Options
	nodeLimit      int   // MaxNodes; tests lower it
	lostLimit      int   // maxLost; tests lower it
	handshakeLimit int64 // maxHandshakes; tests lower it
	handshaking    atomic.Int64
	wg             sync.WaitGroup  // handshakes and sessions
	ctx            context.Context // ends the handshakes
	cancel         context.CancelFunc
	poller         *link.Poller // nil on systems without epoll: each link has a goroutine then

	callbackMu sync.Mutex // one callback about the state of a node at a time
	callPool   sync.Pool  // of *pendingCall

	mu                sync.Mutex                     // protects the fields below
	nodes             map[string]*Node               // nodes with a link, by id
	lost              map[string]*Node               // nodes that had a link a moment ago, see lost.go
	admitted          map[string]int                 // links between auth and ready, by node id
	slots             map[netip.Prefix]*addressSlots // slots of handshakes, by address
	knownAddresses    map[netip.Prefix]struct{}      // addresses from which a board has authenticated
	recentNodes       int                            // how many nodes were linked in the last hour
	searchedAt        time.Time                      // when findCommand last searched
	wheel             [wheelSize]map[*Node]struct{}  // timer wheel of the nodes, see sweep.go
	sweepTick         int                            // seconds that the sweep has counted; written by it only
	takeoverHistories map[string]*takeoverHistory    // by node id
	clones            map[string]*cloneMark          // by node id
	sharedManifests   map[string]*link.Manifest      // by raw bytes, see shareManifest
	closing           bool

	waitingKnown, waitingStrangers waitingLinks  // links that wait for their handshake, see attach.go
	readyPace                      *rate.Limiter // bounds how many handshakes end in a second

	watchMu sync.Mutex // protects watched and Node.isWatched; a leaf
	watched []*Node    // nodes from which an answer is due, see suspect.go

	revision      atomic.Uint64 // see Revision
	grantRevision int64         // Options.GrantRevision at the last sweep; owned by Run

	accepted, resumed, refused, refusedSlots, commands, lateAcks, unsolicitedAcks atomic.Uint64
	badResults, frames, badFrames, takeovers                                      atomic.Uint64
	streams                                                                       atomic.Int64
}

// New makes a hub without devices.
func New(opt Options) *Hub {
	h := &Hub{opt: opt, nodeLimit: MaxNodes, lostLimit: maxLost, handshakeLimit: maxHandshakes,
		nodes: make(map[string]*Node), lost: make(map[string]*Node), admitted: make(map[string]int), slots: make(map[netip.Prefix]*addressSlots), knownAddresses: make(map[netip.Prefix]struct{}),
		waitingKnown: newWaitingLinks(), waitingStrangers: newWaitingLinks(), readyPace: rate.NewLimiter(handshakeRate, handshakeBurst),
		takeoverHistories: make(map[string]*takeoverHistory), clones: make(map[string]*cloneMark), sharedManifests: make(map[string]*link.Manifest)}
	for i := range h.wheel {
		h.wheel[i] = make(map[*Node]struct{})
	}
	h.loadCloneMarks(opt.CloneTimes)
	h.opt.CloneTimes = nil
	h.countRecent()
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.poller, _ = link.NewPoller()
	h.callPool.New = func() any { return newCall(nil) }
	return h
}

// Bounds of sharedManifests: how many, and the bytes of one.
const (
	maxSharedManifests = 256
	maxSharedBytes     = 4 << 10
)

// shareManifest makes m use the memory of an earlier manifest with the same bytes: boards
// of one model announce the same capabilities, and an idle board should hold little.
func (h *Hub) shareManifest(m *link.Manifest) {
	if len(m.Raw) > maxSharedBytes {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	shared := h.sharedManifests[string(m.Raw)]
	if shared == nil {
		if len(h.sharedManifests) >= maxSharedManifests {
			clear(h.sharedManifests)
		}
		h.sharedManifests[string(m.Raw)] = &link.Manifest{Capabilities: m.Capabilities, Raw: m.Raw}
		return
	}
	for i := range m.Tools {
		if j := slices.Index(m.Capabilities, m.Tools[i].Capability); j >= 0 {
			m.Tools[i].Capability = shared.Capabilities[j]
		}
	}
	m.Capabilities, m.Raw = shared.Capabilities, shared.Raw
}

// node is the current node of an id, or nil.
func (h *Hub) node(id string) *Node {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes[id]
}

// isCurrent is false when a newer link of the same id has superseded n.
func (h *Hub) isCurrent(n *Node) bool { return h.node(n.ID()) == n }

// IsOnline reports whether the node has a registered link.
func (h *Hub) IsOnline(nodeID string) bool { return h.node(nodeID) != nil }

// Status is what the relay lists of a node, besides what the registry knows.
type Status struct {
	// Ready: its tools can be called. It is online and OnReady has returned for it, or for the
	// link that it superseded.
	Ready bool
	// Suspect: it has a link on which it has not answered for suspectTime. The sweep finds that
	// out, up to a second later.
	Suspect        bool
	CloneSuspected bool // it has a clone mark
}

// Status returns the status of a node, the zero value for an unknown one.
func (h *Hub) Status(nodeID string) Status {
	h.mu.Lock()
	n, m := h.nodes[nodeID], h.clones[nodeID]
	h.mu.Unlock()
	s := Status{CloneSuspected: m != nil}
	if n != nil {
		s.Ready, s.Suspect = n.isReady.Load(), n.isReportedSuspect.Load() && n.isSuspect()
	}
	return s
}

// Manifest is the JSON array of the capabilities that a linked node announced last, nil for a
// node without a link.
func (h *Hub) Manifest(nodeID string) []byte {
	if n := h.node(nodeID); n != nil {
		if m := n.announced.Load(); m != nil {
			return m.Raw
		}
	}
	return nil
}

// Tools are the tools that a linked node announced last, nil for a node without a link. The slice
// is read-only.
func (h *Hub) Tools(nodeID string) []manifest.Tool {
	if n := h.node(nodeID); n != nil && n.announced.Load() != nil {
		return n.Tools()
	}
	return nil
}

// Protocol is the version of the link of a linked node, v2 or v2.1; "" for a node without a link.
func (h *Hub) Protocol(nodeID string) string {
	n := h.node(nodeID)
	switch {
	case n == nil:
		return ""
	case n.session.Load().V21:
		return "v2.1"
	}
	return "v2"
}

// Revision is a number that grows after the Status of a node has changed. Read it before the
// statuses that it describes.
func (h *Hub) Revision() uint64 { return h.revision.Load() }

func (h *Hub) audit(e AuditEvent) {
	if h.opt.Audit != nil {
		h.opt.Audit(e)
	}
}

// Run pings, drops silent links, closes revoked ones and calls SaveLastSeen, until ctx
// ends; then it closes all links with 4503 and waits for the sessions, at most
// DrainTimeout.
func (h *Hub) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	pollerEnded := make(chan error, 1)
	if h.poller != nil {
		pollCtx, stop := context.WithCancel(context.Background()) // ends last: it reads the sessions that drain
		var wg sync.WaitGroup
		wg.Go(func() { pollerEnded <- h.poller.Run(pollCtx) })
		defer func() { stop(); wg.Wait() }()
	}
	paceCtx, stopPace := context.WithCancel(ctx)
	var pacer sync.WaitGroup
	pacer.Go(func() { h.startWaiting(paceCtx, &h.waitingKnown) })
	pacer.Go(func() { h.startWaiting(paceCtx, &h.waitingStrangers) })
	defer func() { stopPace(); pacer.Wait() }()
	for {
		select {
		case <-ctx.Done():
			h.drain()
			return context.Cause(ctx)
		case err := <-pollerEnded: // no link would be read any more
			h.drain()
			return err
		case <-tick.C:
			h.sweep()
		}
	}
}

// drain closes all links and waits for their sessions.
func (h *Hub) drain() {
	h.mu.Lock()
	h.closing = true
	for _, n := range h.nodes {
		n.session.Load().Close(link.CloseDraining, "draining")
	}
	lost := slices.Collect(maps.Values(h.lost))
	clear(h.lost)
	h.mu.Unlock()
	for _, n := range lost {
		n.end()
		h.gone(n)
	}
	h.cancel() // ends the handshakes
	h.refuseWaiting()
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
	nodes, lost := len(h.nodes), len(h.lost)
	h.mu.Unlock()
	return Stats{
		Nodes: nodes, Lost: lost, Resumed: h.resumed.Load(), Handshaking: int(h.handshaking.Load()), MaxHandshaking: int(h.handshakeLimit), RefusedSlots: h.refusedSlots.Load(), Streams: int(h.streams.Load()),
		Accepted: h.accepted.Load(), Refused: h.refused.Load(), Takeovers: h.takeovers.Load(),
		Commands: h.commands.Load(), LateAcks: h.lateAcks.Load(), UnsolicitedAcks: h.unsolicitedAcks.Load(),
		BadResults: h.badResults.Load(), Frames: h.frames.Load(), BadFrames: h.badFrames.Load(),
	}
}
