package link

import (
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"agentctl/manifest"
)

// CallState is the state of a command on the relay (RFC-0002 §7.3):
//
//	Queued -> Sent                    MarkSent: it was handed to the socket
//	       -> expired, failed         as below; the device has not received it
//	Sent   -> done                    Ack: a valid cmd_ack
//	       -> expired                 Expire: the caller's deadline passed
//	       -> InDoubt                 Lost: the link broke
//	InDoubt -> Sent                   Resume: the device has received the command
//	        -> Queued                 Resume: the device has not
//	        -> expired                as above
//	        -> failed                 Fail: the session cannot be resumed
//
// A command ends exactly once, by Ack, Expire or Fail. Ended commands are remembered for a
// while, to distinguish a late or duplicate cmd_ack from a foreign one. The table may outlive its
// session: after Fail it serves the node's next one, and knows that an ack for the earlier
// session is late.
type CallState uint8

// The states of a live command. A command that ends in Queued cannot have run.
const (
	Queued CallState = iota
	Sent
	InDoubt
)

// AckVerdict classifies a cmd_ack.
type AckVerdict uint8

// Verdicts of Ack.
const (
	AckAccepted  AckVerdict = iota
	AckLate                 // the first one for a command that had expired or failed
	AckDuplicate            // a further one
	AckRepeated             // a further one, which a resumed device sends without knowing of the first
	AckForeign              // no command of this node, or one that ended long ago
)

// CallInfo describes a command in the audit log.
type CallInfo struct {
	Tool    string
	TraceID string        // 32 hex digits, or ""
	Code    manifest.Code // with which Expire or Fail ended it; set by Ended
}

// ErrQueueFull is returned by Add when MaxInflight commands are live.
var ErrQueueFull = errors.New("link: command queue full")

// Calls is the relay's table of one node's commands: a state machine without clock, lock
// or I/O. Its owner holds a lock around each call and carries out what the methods return.
// V is the owner's value for a command. The zero value is ready.
type Calls[V any] struct {
	live   []call[V]   // at most MaxInflight: a scan beats a map, and an idle node holds nothing
	recent []endedCall // ring of the last maxRecent ended commands
	next   int         // in recent, when it is full
	ages   uint8       // calls of Age since the last command ended
}

type call[V any] struct {
	id       string
	state    CallState
	deadline time.Time
	info     CallInfo
	value    V
}

// endedCall is what is remembered of a command. The ids are arrays, so that the ring of a
// node is one small block. The tool is a string of the manifest.
type endedCall struct {
	tool        string
	trace       [16]byte // zero: none
	id          [manifest.ULIDLen]byte
	awaitingAck bool // no ack has come yet
	mayRepeat   bool // the device has reported it as done in Resume
	expired     bool // ended by Expire, unless it was in doubt
	hasFailed   bool // ended by Fail, or by Expire in doubt
}

// maxRecent bounds Calls.recent. It is more than a device reports in Resume.
const maxRecent = 2 * MaxInflight

// Add adds a command in state Queued.
func (c *Calls[V]) Add(id string, deadline time.Time, info CallInfo, v V) error {
	if len(c.live) >= MaxInflight {
		return ErrQueueFull
	}
	c.live = append(c.live, call[V]{id: id, deadline: deadline, info: info, value: v})
	return nil
}

// MarkSent records that the command was handed to the socket.
func (c *Calls[V]) MarkSent(id string) {
	if i := c.find(id); i >= 0 {
		c.live[i].state = Sent
	}
}

// Ack ends the command that a cmd_ack answers. v is its value when the verdict is
// AckAccepted; otherwise the ack is to be dropped and, unless it is AckRepeated, audited, see
// Ended.
func (c *Calls[V]) Ack(id string) (v V, verdict AckVerdict) {
	if i := c.find(id); i >= 0 {
		v = c.live[i].value
		c.finish(i)
		return v, AckAccepted
	}
	if e := c.findEnded(id); e != nil {
		switch {
		case e.awaitingAck:
			verdict = AckLate
		case e.mayRepeat:
			verdict = AckRepeated
		default:
			verdict = AckDuplicate
		}
		e.awaitingAck, e.mayRepeat = false, false
		return v, verdict
	}
	return v, AckForeign
}

// Ended describes a command that has ended, if it is still remembered.
func (c *Calls[V]) Ended(id string) (info CallInfo, ok bool) {
	e := c.findEnded(id)
	if e == nil {
		return info, false
	}
	info.Tool = e.tool
	switch {
	case e.hasFailed:
		info.Code = manifest.NodeOffline
	case e.expired:
		info.Code = manifest.DeadlineExceeded
	}
	if e.trace != [16]byte{} {
		info.TraceID = hex.EncodeToString(e.trace[:])
	}
	return info, true
}

// Expire ends a command whose caller no longer waits, and returns the state that it was in.
// In Queued it cannot have run; in Sent the device has it, and should cancel it.
// ended is false when it has ended already: Ack or Fail returned its value.
func (c *Calls[V]) Expire(id string) (was CallState, ended bool) {
	i := c.find(id)
	if i < 0 {
		return 0, false
	}
	was = c.live[i].state
	e := c.finish(i)
	e.awaitingAck = true
	e.expired, e.hasFailed = was != InDoubt, was == InDoubt // as its caller sees it
	return was, true
}

// Lost moves the sent commands to InDoubt: the link broke.
func (c *Calls[V]) Lost() {
	for i := range c.live {
		if c.live[i].state == Sent {
			c.live[i].state = InDoubt
		}
	}
}

// Resume settles the commands in doubt on a resumed link; seen are those that the device
// reports. It returns the ids to write, in the order of Add, queued commands included; the
// owner calls MarkSent for each that it has written. A command past its deadline is not
// written: its caller is about to Expire it.
//
// A command that is not in seen has not been received, so it is Queued again. When seen is
// full the device may have left some out; those stay InDoubt, since they may have run. The
// device recognizes the id when such a command is written again.
func (c *Calls[V]) Resume(seen []ResumedCommand, now time.Time) (write []string) {
	for _, r := range seen {
		if e := c.findEnded(r.MsgID); e != nil {
			e.mayRepeat = r.State == SeenDone
		}
	}
	for i := range c.live {
		e := &c.live[i]
		if e.state == InDoubt {
			switch {
			case slices.ContainsFunc(seen, func(r ResumedCommand) bool { return r.MsgID == e.id }):
				e.state = Sent
			case len(seen) < MaxInflight:
				e.state = Queued
			}
		}
		if e.state != Sent && now.Before(e.deadline) {
			write = append(write, e.id)
		}
	}
	return write
}

// FailedCall is a command that Fail has ended.
type FailedCall[V any] struct {
	Value V
	State CallState // the one that it was in, as for Expire
}

// Fail ends all commands: the session is over. It returns them, so that each caller gets one
// error.
func (c *Calls[V]) Fail() []FailedCall[V] {
	return c.FailIf(func(V) bool { return true })
}

// FailIf ends the commands whose value matches, such as those that cannot be resumed.
func (c *Calls[V]) FailIf(match func(v V) bool) []FailedCall[V] {
	var failed []FailedCall[V]
	for i := 0; i < len(c.live); {
		if !match(c.live[i].value) {
			i++
			continue
		}
		failed = append(failed, FailedCall[V]{c.live[i].value, c.live[i].state})
		e := c.finish(i)
		e.awaitingAck, e.hasFailed = true, true
	}
	return failed
}

// Value is the value of a live command.
func (c *Calls[V]) Value(id string) (v V, ok bool) {
	i := c.find(id)
	if i < 0 {
		return v, false
	}
	return c.live[i].value, true
}

// maxAges is how many times Age is called before ended commands are forgotten.
const maxAges = 3

// Age forgets the ended commands when it has been called maxAges times since the last of them
// ended. The owner calls it about once in PingInterval, so that an idle node holds nothing.
func (c *Calls[V]) Age() {
	if c.recent == nil {
		return
	}
	if c.ages++; c.ages >= maxAges {
		c.recent, c.next, c.ages = nil, 0, 0
		if len(c.live) == 0 {
			c.live = nil
		}
	}
}

// Len is the number of live commands.
func (c *Calls[V]) Len() int { return len(c.live) }

func (c *Calls[V]) find(id string) int {
	for i := range c.live { // slices.IndexFunc copies each element
		if c.live[i].id == id {
			return i
		}
	}
	return -1
}

func (c *Calls[V]) findEnded(id string) *endedCall {
	for i := range c.recent {
		if e := &c.recent[i]; string(e.id[:]) == id {
			return e
		}
	}
	return nil
}

// finish moves the command at index i from live to recent, and returns it for the caller to
// say how it ended.
func (c *Calls[V]) finish(i int) *endedCall {
	e := endedCall{tool: c.live[i].info.Tool}
	copy(e.id[:], c.live[i].id)
	if trace := c.live[i].info.TraceID; len(trace) == 2*len(e.trace) {
		_, _ = hex.Decode(e.trace[:], []byte(trace))
	}
	c.live = slices.Delete(c.live, i, i+1) // keeps the order of Add
	if len(c.live) == 0 && cap(c.live) > 4 {
		c.live = nil // a burst is over: an idle node holds little
	}
	c.ages = 0
	if len(c.recent) < maxRecent {
		c.recent = append(c.recent, e)
		return &c.recent[len(c.recent)-1]
	}
	ended := &c.recent[c.next]
	*ended = e
	c.next = (c.next + 1) % maxRecent
	return ended
}
