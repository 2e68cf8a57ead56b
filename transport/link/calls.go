package link

import (
	"errors"
	"time"
)

// CallState is where a command stands on the relay (RFC-0002 §7.3):
//
//	Queued -> Sent -> done            a valid cmd_ack
//	               -> expired         the caller's deadline passed
//	               -> InDoubt         the link was lost
//	InDoubt -> Sent                   resumed; the device knows the command
//	        -> Sent, written again    resumed; the device does not know it
//	        -> failed                 not resumable
type CallState uint8

// The states of a live command.
const (
	Queued CallState = iota
	Sent
	InDoubt
)

// Verdict says what a cmd_ack was.
type Verdict uint8

// Verdicts of Ack.
const (
	AckAccepted Verdict = iota
	AckLate             // its command had expired
	AckDuplicate
	AckForeign // no command of this node
)

// ErrQueueFull is returned by Add when MaxInflight commands are alive.
var ErrQueueFull = errors.New("link: command queue full")

// Calls is the relay's table of one node's commands: a pure state machine without
// clock, lock or I/O. Its owner holds a lock and does what the methods say. V is what
// the owner keeps for a command. The zero value is ready.
type Calls[V any] struct {
	live   []call[V] // at most MaxInflight: a scan beats a map, and an idle node holds nothing
	recent []ended   // ring of the last maxRecent ended commands, for late and double acks
	next   int
}

type call[V any] struct {
	id       string
	state    CallState
	deadline time.Time
	value    V
}

type ended struct {
	id      string
	expired bool
}

const maxRecent = 128

// Add takes a new command in state Queued.
func (c *Calls[V]) Add(id string, deadline time.Time, v V) error {
	if len(c.live) >= MaxInflight {
		return ErrQueueFull
	}
	c.live = append(c.live, call[V]{id: id, deadline: deadline, value: v})
	return nil
}

// Sent notes that the command was handed to the socket.
func (c *Calls[V]) Sent(id string) {
	if i := c.find(id); i >= 0 {
		c.live[i].state = Sent
	}
}

// Ack ends the command that a cmd_ack answers. v is its value when the verdict is
// AckAccepted; otherwise the ack is to be dropped and audited.
func (c *Calls[V]) Ack(id string) (v V, verdict Verdict) {
	if i := c.find(id); i >= 0 {
		v = c.live[i].value
		c.end(i, false)
		return v, AckAccepted
	}
	for _, e := range c.recent {
		if e.id == id {
			if e.expired {
				return v, AckLate
			}
			return v, AckDuplicate
		}
	}
	return v, AckForeign
}

// Expire ends a command whose caller no longer waits. cancel tells whether the device
// has it and should be told.
func (c *Calls[V]) Expire(id string) (cancel bool) {
	i := c.find(id)
	if i < 0 {
		return false
	}
	cancel = c.live[i].state == Sent
	c.end(i, true)
	return cancel
}

// Lost moves every sent command to InDoubt: the link broke.
func (c *Calls[V]) Lost() {
	for i := range c.live {
		if c.live[i].state == Sent {
			c.live[i].state = InDoubt
		}
	}
}

// Resume settles the commands in doubt on a resumed link: the device told which it has
// seen. The ids to write again come back; commands past their deadline are ended.
func (c *Calls[V]) Resume(seen map[string]bool, now time.Time) (resend []string) {
	for i := 0; i < len(c.live); i++ {
		e := &c.live[i]
		switch {
		case e.state != InDoubt:
		case seen[e.id]:
			e.state = Sent
		case !now.Before(e.deadline):
			c.end(i, true)
			i--
		default:
			e.state = Sent
			resend = append(resend, e.id)
		}
	}
	return resend
}

// Fail ends every command: the link is gone for good. The values come back so that each
// caller can be told once.
func (c *Calls[V]) Fail() []V {
	values := make([]V, 0, len(c.live))
	for len(c.live) > 0 {
		values = append(values, c.live[0].value)
		c.end(0, true)
	}
	return values
}

// Len is the number of live commands.
func (c *Calls[V]) Len() int { return len(c.live) }

// State tells where a live command stands.
func (c *Calls[V]) State(id string) (CallState, bool) {
	if i := c.find(id); i >= 0 {
		return c.live[i].state, true
	}
	return 0, false
}

func (c *Calls[V]) find(id string) int {
	for i := range c.live {
		if c.live[i].id == id {
			return i
		}
	}
	return -1
}

func (c *Calls[V]) end(i int, expired bool) {
	e := ended{c.live[i].id, expired}
	last := len(c.live) - 1
	c.live[i] = c.live[last]
	c.live[last] = call[V]{}
	c.live = c.live[:last]
	if len(c.recent) < maxRecent {
		c.recent = append(c.recent, e)
		return
	}
	c.recent[c.next] = e
	c.next = (c.next + 1) % maxRecent
}

// Seen is the device's table of commands: it makes a command run at most once, whatever
// the relay sends again. The zero value is ready; it belongs to one goroutine or lock.
type Seen struct {
	byID  map[string]*seenCmd
	order []string // oldest first
}

type seenCmd struct {
	done bool
	ack  []byte
	at   time.Time
}

// Bounds of Seen: SeenMax commands, and up to four times as many while they are younger
// than SeenFor.
const (
	SeenMax = 256
	SeenFor = time.Minute
)

// Start notes a command. fresh means: run it. Otherwise ack is the stored answer to
// send again, or nil while the command still runs. ok is false when the table is full
// of commands younger than SeenFor: the command must be refused, unrun.
func (s *Seen) Start(id string, now time.Time) (fresh bool, ack []byte, ok bool) {
	if c, known := s.byID[id]; known {
		return false, c.ack, true
	}
	for len(s.order) > 0 && len(s.order) >= SeenMax {
		c := s.byID[s.order[0]]
		if !c.done || now.Sub(c.at) < SeenFor {
			if len(s.order) < 4*SeenMax {
				break
			}
			return false, nil, false
		}
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	if s.byID == nil {
		s.byID = make(map[string]*seenCmd)
	}
	s.byID[id] = &seenCmd{at: now}
	s.order = append(s.order, id)
	return true, nil, true
}

// Done keeps the answer of a command.
func (s *Seen) Done(id string, ack []byte, now time.Time) {
	if c, ok := s.byID[id]; ok {
		c.done, c.ack, c.at = true, ack, now
	}
}
