package link

import (
	"errors"
	"slices"
	"time"

	"agentctl/manifest"
)

// CallState is the state of a command on the relay (RFC-0002 §7.3):
//
//	Queued -> Sent -> done            Ack: a valid cmd_ack
//	               -> expired         Expire: the caller's deadline passed
//	               -> InDoubt         Lost: the link broke
//	InDoubt -> Sent                   Resume: the device has received the command
//	        -> Sent, written again    Resume: the device has not
//	        -> expired                as above
//	        -> failed                 Fail: the session cannot be resumed
//
// A command ends exactly once, by Ack, Expire or Fail. The ids of ended commands are
// remembered for a while, to tell a late or duplicate cmd_ack from a foreign one.
type CallState uint8

// The states of a live command.
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
	AckForeign              // no command of this node, or one that ended long ago
)

// ErrQueueFull is returned by Add when MaxInflight commands are live.
var ErrQueueFull = errors.New("link: command queue full")

// Calls is the relay's table of one node's commands: a state machine without clock, lock
// or I/O. Its owner holds a lock around each call and carries out what the methods return.
// V is the owner's value for a command. The zero value is ready.
type Calls[V any] struct {
	live   []call[V]   // at most MaxInflight: a scan beats a map, and an idle node holds nothing
	recent []endedCall // ring of the last maxRecent ended commands
	next   int         // in recent, when it is full
}

type call[V any] struct {
	id       string
	state    CallState
	deadline time.Time
	value    V
}

// endedCall is what is remembered of a command. The id is an array, so that the ring of a
// node is one small block that keeps no strings alive.
type endedCall struct {
	id          [manifest.ULIDLen]byte
	awaitingAck bool // no ack has come yet
}

// maxRecent bounds Calls.recent.
const maxRecent = MaxInflight

// Add adds a command in state Queued.
func (c *Calls[V]) Add(id string, deadline time.Time, v V) error {
	if len(c.live) >= MaxInflight {
		return ErrQueueFull
	}
	c.live = append(c.live, call[V]{id: id, deadline: deadline, value: v})
	return nil
}

// MarkSent records that the command was handed to the socket.
func (c *Calls[V]) MarkSent(id string) {
	if i := c.find(id); i >= 0 {
		c.live[i].state = Sent
	}
}

// Ack ends the command that a cmd_ack answers. v is its value when the verdict is
// AckAccepted; otherwise the ack is to be dropped and audited.
func (c *Calls[V]) Ack(id string) (v V, verdict AckVerdict) {
	if i := c.find(id); i >= 0 {
		v = c.live[i].value
		c.finish(i, false)
		return v, AckAccepted
	}
	for i := range c.recent {
		if e := &c.recent[i]; string(e.id[:]) == id {
			if e.awaitingAck {
				e.awaitingAck = false
				return v, AckLate
			}
			return v, AckDuplicate
		}
	}
	return v, AckForeign
}

// Expire ends a command whose caller no longer waits. ended is false when it has ended
// already: Ack or Fail returned its value. cancel reports whether the device has the
// command and should be told to cancel it.
func (c *Calls[V]) Expire(id string) (ended, cancel bool) {
	i := c.find(id)
	if i < 0 {
		return false, false
	}
	cancel = c.live[i].state == Sent
	c.finish(i, true)
	return true, cancel
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
// has received. It returns the ids to write again, in the order of Add. A command past its
// deadline is not written again: its caller is about to Expire it.
func (c *Calls[V]) Resume(seen map[string]bool, now time.Time) (resend []string) {
	for i := range c.live {
		e := &c.live[i]
		switch {
		case e.state != InDoubt:
		case seen[e.id]:
			e.state = Sent
		case now.Before(e.deadline):
			e.state = Sent
			resend = append(resend, e.id)
		}
	}
	return resend
}

// Fail ends all commands: the session is over. It returns their values, so that each
// caller gets one error.
func (c *Calls[V]) Fail() []V {
	values := make([]V, 0, len(c.live))
	for len(c.live) > 0 {
		values = append(values, c.live[0].value)
		c.finish(0, true)
	}
	return values
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

// finish moves the command at index i from live to recent.
func (c *Calls[V]) finish(i int, awaitingAck bool) {
	e := endedCall{awaitingAck: awaitingAck}
	copy(e.id[:], c.live[i].id)
	c.live = slices.Delete(c.live, i, i+1) // keeps the order of Add
	if len(c.live) == 0 && cap(c.live) > 4 {
		c.live = nil // a burst is over: an idle node holds little
	}
	if len(c.recent) < maxRecent {
		c.recent = append(c.recent, e)
		return
	}
	c.recent[c.next] = e
	c.next = (c.next + 1) % maxRecent
}
