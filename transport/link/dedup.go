package link

import "time"

// dedupTable is the device's table of received commands. It makes a command run at most
// once, although the relay may send it again (RFC-0002 §7.3). The zero value is ready;
// the owner's lock protects it.
//
//	unknown -> running -> done -> forgotten    after dedupTTL, when there are dedupSize
type dedupTable struct {
	byID  map[string]*dedupEntry
	order []string // oldest first
}

type dedupEntry struct {
	done bool
	ack  []byte    // the answer, when done
	at   time.Time // when it began, or was done
}

// Bounds of dedupTable: dedupSize commands, and up to four times as many while they are
// running or younger than dedupTTL.
const (
	dedupSize = 256
	dedupTTL  = time.Minute
)

// begin adds a command. isNew: run it. Otherwise ack is the stored answer to send again,
// or nil while the command runs. ok is false when the table is full; the command must be
// refused then and not run.
func (t *dedupTable) begin(id string, now time.Time) (isNew bool, ack []byte, ok bool) {
	if c, known := t.byID[id]; known {
		return false, c.ack, true
	}
	for len(t.order) >= dedupSize {
		oldest := t.byID[t.order[0]]
		if !oldest.done || now.Sub(oldest.at) < dedupTTL {
			if len(t.order) < 4*dedupSize {
				break
			}
			return false, nil, false
		}
		delete(t.byID, t.order[0])
		t.order = t.order[1:]
	}
	if t.byID == nil {
		t.byID = make(map[string]*dedupEntry)
	}
	t.byID[id] = &dedupEntry{at: now}
	t.order = append(t.order, id)
	return true, nil, true
}

// finish stores the answer of a command.
func (t *dedupTable) finish(id string, ack []byte, now time.Time) {
	if c, ok := t.byID[id]; ok {
		c.done, c.ack, c.at = true, ack, now
	}
}
