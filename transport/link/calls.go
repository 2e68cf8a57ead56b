package link

import (
	"errors"
	"slices"

	"agentctl/manifest"
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

// Calls is the relay's table of one node's commands (RFC-0002 §7.3): a state machine
// without clock, lock or I/O. Its owner holds a lock around each call and carries out what
// the methods return. V is the owner's value for a command. The zero value is ready.
//
//	Add -> MarkSent -> Ack       a valid cmd_ack
//	                -> Expire    the caller's deadline passed
//	                -> Fail      the link ended; the relay never sends a command again
//
// A command ends exactly once. The ids of ended commands are remembered for a while, to
// tell a late or duplicate cmd_ack from a foreign one.
type Calls[V any] struct {
	live   []call[V]   // at most MaxInflight: a scan beats a map, and an idle node holds nothing
	recent []endedCall // ring of the last maxRecent ended commands
	next   int         // in recent, when it is full
}

type call[V any] struct {
	id    string
	sent  bool // handed to the socket
	value V
}

// endedCall is what is remembered of a command. The id is an array, so that the ring of a
// node is one small block that keeps no strings alive.
type endedCall struct {
	id          [manifest.ULIDLen]byte
	awaitingAck bool // no ack has come yet
}

// maxRecent bounds Calls.recent.
const maxRecent = MaxInflight

// Add adds a command that is not sent yet.
func (c *Calls[V]) Add(id string, v V) error {
	if len(c.live) >= MaxInflight {
		return ErrQueueFull
	}
	c.live = append(c.live, call[V]{id: id, value: v})
	return nil
}

// MarkSent records that the command was handed to the socket.
func (c *Calls[V]) MarkSent(id string) {
	if i := c.find(id); i >= 0 {
		c.live[i].sent = true
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
	cancel = c.live[i].sent
	c.finish(i, true)
	return true, cancel
}

// Fail ends all commands: the link is over. It returns their values, so that each
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
