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

// subscriberQueueSize is how many frames may wait for one reader's goroutine before it is behind.
// It is not the 3 frames of RFC-0009 §6, which are judged where they are written
// (transport/sse): a device whose link stood still sends what it has all at once, up to a
// frame a second for link.IdleTimeout, and that is no fault of a reader.
const subscriberQueueSize = 64

// maxSubscribers bounds the readers of one device stream.
const maxSubscribers = 10000

type streamKey struct {
	tool       string
	intervalMS int64
}

// stream is one device stream and its readers.
type stream struct {
	node   *Node
	key    streamKey
	topic  *fanout.Topic[*manifest.Frame]
	opened chan struct{} // closed when the device answered; err and cmdID are set then
	err    error
	cmdID  string

	refs       int   // readers and joiners; protected by node.mu
	lastSeq    int64 // of the last frame; session's goroutine only
	badSamples int   // samples that broke the schema; likewise
	streamID   string
}

func (s *stream) end(cause error) { s.topic.Close(cause) }

// Subscriber is one subscriber of a stream.
type Subscriber struct {
	*fanout.Subscriber[*manifest.Frame]
	stream *stream
	closed bool // Close is called by one goroutine
}

// Err is why the stream ended for this reader: ErrOffline or ErrTooSlow; nil while it
// lives.
func (r *Subscriber) Err() error {
	err := r.Subscriber.Err()
	if errors.Is(err, fanout.ErrOverflow) {
		return ErrTooSlow
	}
	return err
}

// Close leaves the stream; the last reader's leaving ends it on the device.
func (r *Subscriber) Close() {
	if !r.closed {
		r.closed = true
		r.Subscriber.Close()
		r.stream.release()
	}
}

// Subscribe joins the node's stream of that tool and interval, and opens it on the
// device when nobody reads it yet. Only the opening runs acquire, which charges the
// capability's rate and concurrency and returns how to give it back. The joiner of a
// running stream gets the last frame at once if it is younger than the interval.
func (n *Node) Subscribe(ctx context.Context, t *manifest.Tool, args []byte, intervalMS int64,
	acquire func() (release func(), err error), opt CallOptions) (*Subscriber, error) {
	key := streamKey{t.Canonical, intervalMS}
	for ctx.Err() == nil {
		n.mu.Lock()
		if n.closed {
			n.mu.Unlock()
			return nil, offline()
		}
		s, opener := n.streams[key], false
		if s == nil {
			if len(n.streams) >= link.MaxStreams {
				n.mu.Unlock()
				return nil, &manifest.Error{Code: manifest.RateLimited, Message: "this device serves no more streams of other intervals; use an interval that is open", RetryAfterMS: 1000, Reason: "streams"}
			}
			s = &stream{node: n, key: key, topic: fanout.New[*manifest.Frame](fanout.Options{MaxSubscribers: maxSubscribers}), opened: make(chan struct{})}
			if n.streams == nil {
				n.streams, n.streamsByID = make(map[streamKey]*stream), make(map[string]*stream)
			}
			n.streams[key], opener = s, true
		}
		s.refs++
		n.mu.Unlock()
		if opener {
			n.openStream(ctx, s, t, args, acquire, opt)
		}
		select {
		case <-s.opened:
		case <-ctx.Done():
			s.release()
			return nil, context.Cause(ctx)
		}
		if s.err == nil {
			sub := s.topic.Subscribe(fanout.SubscribeOptions[*manifest.Frame]{Buffer: subscriberQueueSize, Overflow: fanout.CloseSubscriber,
				LastMaxAge: time.Duration(intervalMS) * time.Millisecond})
			if err := sub.Err(); errors.Is(err, fanout.ErrFull) {
				s.release()
				return nil, &manifest.Error{Code: manifest.RateLimited, Message: "too many readers of this stream", RetryAfterMS: 1000, Reason: "readers"}
			}
			return &Subscriber{Subscriber: sub, stream: s}, nil
		}
		s.release()
		if !errors.Is(s.err, errOpenerCanceled) {
			return nil, s.err
		}
		// The one who was opening gave up; try ourselves, if it was another one.
	}
	return nil, context.Cause(ctx)
}

// errOpenerCanceled: the caller that opened the stream went away before the device
// answered, which is no reason for those who joined it.
var errOpenerCanceled = errors.New("hub: the opening caller left")

// openStream asks the device for the stream and settles s.err.
func (n *Node) openStream(ctx context.Context, s *stream, t *manifest.Tool, args []byte, acquire func() (func(), error), opt CallOptions) {
	defer close(s.opened)
	release, err := acquire()
	if err != nil {
		s.fail(err)
		return
	}
	defer release()
	p := &pendingCall{tool: t, done: make(chan struct{}, 1), onResult: s.onOpened}
	_, err = n.roundTrip(ctx, p, args, opt)
	s.cmdID = p.id
	switch {
	case err == nil:
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		s.fail(errOpenerCanceled)
	default:
		s.fail(err)
	}
}

// onOpened takes the device's answer to the opening. It runs in the session's goroutine,
// so that the stream is known before its first frame is read.
func (s *stream) onOpened(result []byte) error {
	n := s.node
	var sub struct {
		StreamID   string  `json:"stream_id"`
		IntervalMS float64 `json:"interval_ms"` // 5000.0 is a whole number to JSON Schema
	}
	if err := strictjson.Unmarshal(result, &sub); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if sub.IntervalMS != float64(s.key.intervalMS) || n.streamsByID == nil || n.streamsByID[sub.StreamID] != nil || !n.hasToolLocked(s.key.tool) {
		return errors.New("hub: another stream than the one asked for, a stream id twice, or a tool withdrawn")
	}
	s.streamID = sub.StreamID
	n.streamsByID[sub.StreamID] = s
	n.hub.streams.Add(1)
	return nil
}

// removeWithdrawnLocked takes the streams of tools that are not announced any more out of the
// table, so that nobody joins them. The last reader's leaving ends them on the device.
func (n *Node) removeWithdrawnLocked() (list []*stream) {
	for key, s := range n.streams {
		if s.streamID != "" && !n.hasToolLocked(key.tool) {
			delete(n.streams, key)
			list = append(list, s)
		}
	}
	return list
}

func (n *Node) hasToolLocked(tool string) bool {
	return slices.ContainsFunc(n.tools, func(t manifest.Tool) bool { return t.Canonical == tool })
}

// fail takes a stream that could not be opened out of the tables.
func (s *stream) fail(err error) {
	s.err = err
	s.node.mu.Lock()
	s.removeLocked()
	s.node.mu.Unlock()
}

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

// release gives one reference back; without readers the device's stream ends.
func (s *stream) release() {
	n := s.node
	n.mu.Lock()
	s.refs--
	if s.refs == 0 {
		if s.streamID != "" && n.streamsByID[s.streamID] == s {
			n.sendCancel(s.cmdID) // under the lock: before the command of whoever opens it again
		}
		s.removeLocked()
	}
	n.mu.Unlock()
}

// OnMetric takes one frame from the device. A sample that breaks the frame's schema is
// dropped and audited; one that is not numbered above the last ends the link.
func (n *Node) OnMetric(m link.Metric) error {
	n.mu.Lock()
	s := n.streamsByID[m.StreamID]
	n.mu.Unlock()
	if s == nil {
		return nil // still on its way when the stream was cancelled
	}
	if m.Seq <= s.lastSeq {
		return link.ErrBadFrame
	}
	s.lastSeq = m.Seq
	if err := n.hub.opt.CheckSample(m.Sample, n.ID()); err != nil {
		n.hub.badFrames.Add(1)
		if s.badSamples++; s.badSamples%100 == 1 {
			n.audit("bad_sample", s.key.tool, manifest.Internal)
		}
		return nil
	}
	n.hub.frames.Add(1)
	data := append([]byte(nil), m.Sample...)
	f := &manifest.Frame{Data: data}
	if n.hub.opt.EncodeSSE != nil {
		f.Event = n.hub.opt.EncodeSSE(data)
	}
	s.topic.Publish(f)
	return nil
}

// OnStreamEnd takes the device's own end of a stream.
func (n *Node) OnStreamEnd(e *link.StreamEnd) {
	n.mu.Lock()
	s := n.streamsByID[e.StreamID]
	if s != nil {
		s.removeLocked()
	}
	n.mu.Unlock()
	if s != nil {
		s.end(ErrOffline)
	}
}

// OnDeviceEvent takes an event of the device.
func (n *Node) OnEvent(e *link.Event) {
	if n.hub.opt.OnDeviceEvent != nil {
		n.hub.opt.OnDeviceEvent(n, e.Topic, e.Data)
	}
}

// IntervalArgs are the arguments of a subscribe command.
func IntervalArgs(intervalMS int64) []byte {
	return append(strconv.AppendInt([]byte(`{"interval_ms":`), intervalMS, 10), '}')
}
