package hub

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/manifest"
	"agentctl/transport/fanout"
	"agentctl/transport/link"
)

// Node is one device, from the end of its first handshake until its session is over. On v2.1
// the session survives its link for a while (lost.go), and a link that resumes it gets the
// same Node; every other link gets a new one.
type Node struct {
	hub     *Hub
	session atomic.Pointer[link.Session] // of the newest link, which may have ended
	isReady atomic.Bool                  // OnReady has returned, or had for the superseded link
	// announced is stored under mu, together with the streams that it ends.
	announced    atomic.Pointer[link.Manifest]
	unansweredAt atomic.Int64 // sinceStart when the oldest unanswered message was sent, see suspect.go; 0: none

	// Written by the sweep only.
	revoked           *link.Session // whose link checkGrant has closed
	isReportedSuspect atomic.Bool   // the last OnSuspect said suspect; read by any goroutine
	probedAt          int64         // the unansweredAt for which a ping was sent

	// Protected by Hub.mu.
	wheelSlot   int           // index in Hub.wheel
	lostSince   time.Time     // when the link ended; valid while the node is in Hub.lost
	isResumable bool          // valid while the node is in Hub.lost
	isGone      bool          // OnGone was called
	resumption  *link.Session // of the handshake that is about to resume the session; nil: none

	isWatched bool // in Hub.watched; protected by Hub.watchMu

	mu          sync.Mutex // protects the fields below
	state       nodeState
	lostAt      time.Time // when state became stateLost
	calls       link.Calls[*pendingCall]
	streams     map[streamKey]*stream
	streamsByID map[string]*stream // by the device's stream_id
}

// nodeState says what becomes of a new command.
type nodeState uint8

const (
	stateLinked   nodeState = iota // it is written
	stateLost                      // it waits for a resumed link, but only for queueTime after lostAt
	stateResuming                  // it waits: the handshake of a resumed link is under way
	stateEnded                     // it fails
)

// nodeLink is one link of a node, and the link.SessionOwner of its messages, which run in the
// goroutine that reads them. Node.session may be of a newer link already; linkSession is not.
type nodeLink struct {
	*Node
	linkSession *link.Session
}

var _ link.SessionOwner = (*nodeLink)(nil)

// ID is the node id.
func (n *Node) ID() string { return n.session.Load().NodeID }

// ProposedName is the name that the device proposed when its link was opened, "" if it did not.
func (n *Node) ProposedName() string { return n.session.Load().ProposedName }

// Tenant is the tenant that owns the device.
func (n *Node) Tenant() string { return n.session.Load().Tenant }

// Proved reports whether the device has proved the key that its token is bound to.
func (n *Node) Proved() bool { return n.session.Load().Proved }

// Tools are the tools of the last announce; the slice is read-only.
func (n *Node) Tools() []manifest.Tool { return n.announced.Load().Tools }

// Manifest is the JSON array of the capabilities of the last announce.
func (n *Node) Manifest() []byte { return n.announced.Load().Raw }

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
	h.revision.Add(1)
}

// endStreamsLocked empties the tables of streams; the caller closes the topics without n.mu.
func (n *Node) endStreamsLocked() (streams map[streamKey]*stream) {
	streams = n.streams
	n.hub.streams.Add(-int64(len(n.streamsByID)))
	n.streams, n.streamsByID = nil, nil
	return streams
}

// end ends the session, with its commands and streams. Each command that was written may have
// run; the others have not.
func (n *Node) end() {
	n.mu.Lock()
	n.state = stateEnded
	calls, streams := n.calls.Fail(), n.endStreamsLocked()
	n.mu.Unlock()
	endAll(calls, streams)
}

// endAll gives failed calls and ended streams their errors.
func endAll(calls []link.FailedCall[*pendingCall], streams map[streamKey]*stream) {
	for _, c := range calls {
		err := inDoubtError()
		if c.State == link.Queued {
			err = offlineError()
		}
		c.Value.finish(callOutcome{err: err})
	}
	for _, s := range streams {
		s.topic.Close(ErrOffline)
	}
}

// inherit takes the table of commands of a node whose session is over, so that an ack of that
// session is recognized as late.
func (n *Node) inherit(old *Node) {
	old.end()
	old.mu.Lock()
	calls := old.calls
	old.calls = link.Calls[*pendingCall]{}
	old.mu.Unlock()
	n.mu.Lock()
	n.calls = calls
	n.mu.Unlock()
}

// audit reports e as an event of this node.
func (n *Node) audit(e AuditEvent) {
	e.Tenant, e.NodeID = n.Tenant(), n.ID()
	if s := n.session.Load(); s != nil {
		e.Address = s.Address
	}
	n.hub.audit(e)
}

// ErrOffline ends the streams of a device that went away. ErrTooSlow ends a subscriber that
// fell behind. Both wrap the *manifest.Error for the client.
var (
	ErrOffline = errors.Join(errors.New("hub: the device went offline"),
		&manifest.Error{Code: manifest.NodeOffline, Message: "the device went offline during the stream", Reason: "stream_end"})
	ErrTooSlow = errors.Join(fanout.ErrOverflow, rateLimited("this reader was too slow for the stream; use a longer interval_ms", "behind"))
)
