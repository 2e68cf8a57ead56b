package hub

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/strictjson"
	"agentctl/transport/fanout"
	"agentctl/transport/link"
)

// subscriberQueueSize is how many frames may wait for one subscriber before it is too
// slow. It is larger than the 3 frames of RFC-0009 §6, which apply where frames are written
// (transport/sse): a device whose link was stalled sends what it has all at once, up to a
// frame a second for link.IdleTimeout, and no subscriber can help that.
const subscriberQueueSize = 64

// maxSubscribers bounds the subscribers of one device stream.
const maxSubscribers = 10000

// streamKey identifies a stream of a node: subscribers with the same tool and interval
// share it.
type streamKey struct {
	tool       string
	intervalMS int64
}

// stream is one device stream and its subscribers.
//
//	opening -> open      the device accepted the subscribe command (onOpened)
//	        -> failed    it did not, or the opener gave up; err says why
//	open    -> ended     the last subscriber left: cmd_cancel to the device
//	                     the device ended it, went offline or withdrew the tool
//
// The subscriber that finds no stream of its key opens it; those that come meanwhile join
// and wait for opened.
type stream struct {
	node   *Node
	key    streamKey
	topic  *fanout.Topic[*manifest.Frame]
	opened chan struct{} // closed when opening is over; err and cmdID are set before
	err    error
	cmdID  string

	refs     int    // subscribers, joining ones included; protected by node.mu
	streamID string // "" before onOpened; protected by node.mu

	lastSeq    int64 // of the last frame; owned by the session's goroutine
	badSamples int   // samples that failed CheckSample; owned likewise
}

// Subscriber is one subscriber of a stream.
type Subscriber struct {
	*fanout.Subscriber[*manifest.Frame]
	stream *stream
	closed bool // Close is called by one goroutine
}

// Err is why the stream ended for this subscriber: ErrOffline or ErrTooSlow; nil before.
func (r *Subscriber) Err() error {
	err := r.Subscriber.Err()
	if errors.Is(err, fanout.ErrOverflow) {
		return ErrTooSlow
	}
	return err
}

// Close leaves the stream; when the last subscriber leaves, the device ends it.
func (r *Subscriber) Close() {
	if !r.closed {
		r.closed = true
		r.Subscriber.Close()
		r.stream.release()
	}
}

// Subscribe joins the node's stream of that tool and interval, and opens it on the device
// when there is none. Only opening runs acquire, which charges the capability's rate and
// concurrency; release ends that charge. Whoever joins a running stream gets the last frame
// at once if it is younger than the interval.
func (n *Node) Subscribe(ctx context.Context, t *manifest.Tool, args []byte, intervalMS int64,
	acquire func() (release func(), err error), opt CallOptions) (*Subscriber, error) {
	for ctx.Err() == nil {
		s, isOpener, err := n.join(streamKey{t.Canonical, intervalMS})
		if err != nil {
			return nil, err
		}
		if isOpener {
			n.openStream(ctx, s, t, args, acquire, opt)
		} else {
			select {
			case <-s.opened:
			case <-ctx.Done():
				s.release()
				return nil, endOfWait(ctx, link.Sent)
			}
		}
		if s.err == nil {
			return s.subscribe()
		}
		s.release()
		if !errors.Is(s.err, errOpenerCanceled) {
			return nil, s.err
		}
		// Another caller gave up opening the stream: try again.
	}
	return nil, context.Cause(ctx)
}

// join takes a reference to the stream of a key; isOpener: it is new and the caller must
// open it.
func (n *Node) join(key streamKey) (s *stream, isOpener bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.state == stateEnded {
		return nil, false, offlineError()
	}
	s = n.streams[key]
	if s == nil {
		if len(n.streams) >= link.MaxStreams {
			return nil, false, rateLimited("this device serves no more streams of other intervals; use an interval that is open", "streams")
		}
		s = &stream{node: n, key: key, topic: fanout.New[*manifest.Frame](fanout.Options{MaxSubscribers: maxSubscribers}), opened: make(chan struct{})}
		if n.streams == nil {
			n.streams, n.streamsByID = make(map[streamKey]*stream), make(map[string]*stream)
		}
		n.streams[key], isOpener = s, true
	}
	s.refs++
	return s, isOpener, nil
}

// subscribe turns the caller's reference to an open stream into a Subscriber.
func (s *stream) subscribe() (*Subscriber, error) {
	sub := s.topic.Subscribe(fanout.SubscribeOptions[*manifest.Frame]{Buffer: subscriberQueueSize, Overflow: fanout.CloseSubscriber,
		LastMaxAge: time.Duration(s.key.intervalMS) * time.Millisecond})
	if errors.Is(sub.Err(), fanout.ErrFull) {
		s.release()
		return nil, rateLimited("too many readers of this stream", "readers")
	}
	return &Subscriber{Subscriber: sub, stream: s}, nil
}

// errOpenerCanceled: the caller that opened the stream went away before the device
// answered. That is no reason to fail those who joined.
var errOpenerCanceled = errors.New("hub: the opening caller left")

// openStream asks the device for the stream; it sets s.err and s.cmdID.
func (n *Node) openStream(ctx context.Context, s *stream, t *manifest.Tool, args []byte, acquire func() (func(), error), opt CallOptions) {
	defer close(s.opened)
	release, err := acquire()
	if err == nil {
		defer release()
		p := newCall(t)
		p.onResult = s.onOpened
		_, err = n.roundTrip(ctx, p, args, opt)
		s.cmdID = p.id
		if err != nil && ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			err = errOpenerCanceled
		}
	}
	if s.err = err; err != nil {
		n.mu.Lock()
		s.removeLocked()
		n.mu.Unlock()
	}
}

// onOpened checks the device's answer to the opening. It runs in the session's goroutine,
// so that the stream is known before its first frame is read.
func (s *stream) onOpened(result []byte) error {
	n := s.node
	var sub link.Subscribed
	if err := strictjson.Unmarshal(result, &sub); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if sub.IntervalMS != s.key.intervalMS || n.streamsByID == nil || n.streamsByID[sub.StreamID] != nil || !n.announces(s.key.tool) {
		return errors.New("hub: not the requested interval, a stream id in use, or a tool that was withdrawn")
	}
	s.streamID = sub.StreamID
	n.streamsByID[sub.StreamID] = s
	n.hub.streams.Add(1)
	return nil
}

// NewestFrame returns the newest frame of a node's open streams, and when it arrived.
func (h *Hub) NewestFrame(nodeID string) (frame []byte, at time.Time, ok bool) {
	n := h.node(nodeID)
	if n == nil {
		return nil, at, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.streams {
		if f, t, has := s.topic.Last(); has && t.After(at) {
			frame, at, ok = f.Data, t, true
		}
	}
	return frame, at, ok
}

// removeWithdrawnLocked removes the streams of tools that are no longer announced, so that
// nobody joins them. They stay in streamsByID until the last subscriber leaves, which ends
// them on the device.
func (n *Node) removeWithdrawnLocked() (withdrawn []*stream) {
	for key, s := range n.streams {
		if s.streamID != "" && !n.announces(key.tool) {
			delete(n.streams, key)
			withdrawn = append(withdrawn, s)
		}
	}
	return withdrawn
}

func (n *Node) announces(tool string) bool {
	return slices.ContainsFunc(n.Tools(), func(t manifest.Tool) bool { return t.Canonical == tool })
}

// removeLocked removes s from the node's tables, unless another stream has its place.
func (s *stream) removeLocked() {
	n := s.node
	if n.streams[s.key] == s {
		delete(n.streams, s.key)
	}
	if s.streamID != "" && n.streamsByID[s.streamID] == s {
		delete(n.streamsByID, s.streamID)
		n.hub.streams.Add(-1)
	}
}

// release drops one reference. Without references the device's stream is canceled, under
// the lock: before the command of whoever opens it again.
func (s *stream) release() {
	n := s.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.refs--; s.refs > 0 {
		return
	}
	if s.streamID != "" && n.streamsByID[s.streamID] == s {
		n.sendCancel(s.cmdID)
	}
	s.removeLocked()
}

// OnMetric publishes one frame. A sample that fails CheckSample is dropped, and the first
// of each hundred is audited; a frame whose number is not above the last one ends the link.
func (n *Node) OnMetric(m link.Metric) error {
	n.mu.Lock()
	s := n.streamsByID[m.StreamID]
	n.mu.Unlock()
	if s == nil {
		return nil // sent before the device received the cancel
	}
	if m.Seq <= s.lastSeq {
		return link.ErrBadFrame
	}
	s.lastSeq = m.Seq
	h := n.hub
	if err := h.opt.CheckSample(m.Sample, n.ID()); err != nil {
		h.badFrames.Add(1)
		if s.badSamples++; s.badSamples%100 == 1 {
			n.audit(AuditEvent{Kind: "bad_sample", Tool: s.key.tool, Code: manifest.Internal})
		}
		return nil
	}
	h.frames.Add(1)
	f := &manifest.Frame{Data: append([]byte(nil), m.Sample...)}
	if h.opt.EncodeSSE != nil {
		f.Event = h.opt.EncodeSSE(f.Data)
	}
	s.topic.Publish(f)
	return nil
}

// OnStreamEnd ends a stream that the device has ended.
func (n *Node) OnStreamEnd(e *link.StreamEnd) {
	n.mu.Lock()
	s := n.streamsByID[e.StreamID]
	if s != nil {
		s.removeLocked()
	}
	n.mu.Unlock()
	if s != nil {
		s.topic.Close(ErrOffline)
	}
}

// OnEvent passes an event of the device on.
func (n *Node) OnEvent(e *link.Event) {
	if n.hub.opt.OnDeviceEvent != nil {
		n.hub.opt.OnDeviceEvent(n, e.Topic, e.Data)
	}
}

// IntervalArgs are the arguments of a subscribe command.
func IntervalArgs(intervalMS int64) []byte {
	return append(strconv.AppendInt([]byte(`{"interval_ms":`), intervalMS, 10), '}')
}
