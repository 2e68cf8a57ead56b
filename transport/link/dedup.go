package link

import (
	"time"

	"agentctl/manifest"
)

// dedupTable is the device's table of received commands. It makes a command run at most
// once, although the relay may send it again (RFC-0002 §7.3). The zero value is ready;
// the owner's lock protects it.
//
//	unknown -> running -> done -> forgotten    after dedupTTL, when there are dedupSize
type dedupTable struct {
	byID  map[string]*dedupEntry
	order []string // oldest first
	bytes int      // of the answers
}

type dedupEntry struct {
	done     bool
	isStream bool      // the answer opened a stream, which ends with its link
	session  int       // Client.session when it began
	ack      []byte    // the answer, when done
	at       time.Time // when it began, or was done
}

// Bounds of dedupTable: dedupSize commands, and up to maxDedup while they are running or
// younger than dedupTTL. maxDedup is more than a board that is called at the rates that it
// announces, 25 a second, receives in that time: it would refuse what it has promised.
const (
	dedupSize = 256
	maxDedup  = 2048
	dedupTTL  = time.Minute
	// maxDedupBytes bounds the stored answers: a page of history has 60 KiB. Beyond it the
	// oldest large answers are given up; such a command is still not run again.
	maxDedupBytes = 1 << 20
	largeAnswer   = 1 << 10
)

// begin adds a command of a session. isNew: run it. Otherwise ack is the stored answer to send again,
// or nil while the command runs. ok is false when the table is full; the command must be
// refused then and not run.
func (t *dedupTable) begin(id string, session int, now time.Time) (isNew bool, ack []byte, ok bool) {
	if c, known := t.byID[id]; known {
		return false, c.ack, true
	}
	for len(t.order) >= dedupSize {
		oldest := t.byID[t.order[0]]
		if !oldest.done || now.Sub(oldest.at) < dedupTTL {
			if len(t.order) < maxDedup {
				break
			}
			return false, nil, false
		}
		t.bytes -= len(oldest.ack)
		delete(t.byID, t.order[0])
		t.order = t.order[1:]
	}
	if t.byID == nil {
		t.byID = make(map[string]*dedupEntry)
	}
	t.byID[id] = &dedupEntry{session: session, at: now}
	t.order = append(t.order, id)
	return true, nil, true
}

// finish stores the answer of a command and returns its session; isStream is whether the
// answer opens a stream.
func (t *dedupTable) finish(id string, ack []byte, isStream bool, now time.Time) (session int) {
	c, ok := t.byID[id]
	if !ok { // a running command is not forgotten
		return 0
	}
	c.done, c.isStream, c.at = true, isStream, now
	t.setAnswer(c, ack)
	for i := 0; t.bytes > maxDedupBytes && i < len(t.order); i++ {
		if old := t.byID[t.order[i]]; old != c && len(old.ack) > largeAnswer {
			t.setAnswer(old, errorAck(t.order[i], errForgotten))
		}
	}
	return c.session
}

func (t *dedupTable) setAnswer(c *dedupEntry, ack []byte) {
	t.bytes += len(ack) - len(c.ack)
	c.ack = ack
}

// seenWindow is how long a command that is done is reported in Resume. Callers wait 5 s at
// most (RFC-0005 §7), so for an older one nobody does.
const seenWindow = 10 * time.Second

// seen lists the commands of a session for Resume: those that run, and the newest of those
// that are done.
func (t *dedupTable) seen(session int, now time.Time) []ResumedCommand {
	list := []ResumedCommand{}
	for _, state := range []string{SeenRunning, SeenDone} {
		for i := len(t.order) - 1; i >= 0 && len(list) < MaxInflight; i-- {
			c := t.byID[t.order[i]]
			if c.session == session && c.done == (state == SeenDone) && (!c.done || now.Sub(c.at) < seenWindow) {
				list = append(list, ResumedCommand{MsgID: t.order[i], State: state})
			}
		}
	}
	return list
}

// answers returns the stored answers to those of the commands that are done. It replaces the
// answers that opened a stream, because the stream has ended with its link.
func (t *dedupTable) answers(commands []ResumedCommand) (acks [][]byte) {
	for id, c := range t.byID {
		if c.isStream {
			c.isStream = false
			t.setAnswer(c, errorAck(id, errLinkEnded))
		}
	}
	for _, r := range commands {
		if c := t.byID[r.MsgID]; c != nil && c.done {
			acks = append(acks, c.ack)
		}
	}
	return acks
}

// errForgotten answers a repeated command whose answer was given up.
var errForgotten = manifest.E(manifest.Internal, "the answer is no longer kept")

// errLinkEnded answers a subscription whose link has ended: streams are not resumed.
var errLinkEnded = manifest.E(manifest.Internal, "the link ended")
