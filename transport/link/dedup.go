package link

import "time"

// dedupTable is the device's table of commands: it makes a command run at most once, whatever
// the relay sends again. The zero value is ready; it belongs to one goroutine or lock.
type dedupTable struct {
	byID  map[string]*dedupEntry
	order []string // oldest first
}

type dedupEntry struct {
	done bool
	ack  []byte
	at   time.Time
}

// Bounds of Seen: dedupSize commands, and up to four times as many while they are younger
// than dedupTTL.
const (
	dedupSize = 256
	dedupTTL  = time.Minute
)

// begin notes a command. fresh means: run it. Otherwise ack is the stored answer to
// send again, or nil while the command still runs. ok is false when the table is full
// of commands younger than dedupTTL: the command must be refused, unrun.
func (s *dedupTable) begin(id string, now time.Time) (fresh bool, ack []byte, ok bool) {
	if c, known := s.byID[id]; known {
		return false, c.ack, true
	}
	for len(s.order) > 0 && len(s.order) >= dedupSize {
		c := s.byID[s.order[0]]
		if !c.done || now.Sub(c.at) < dedupTTL {
			if len(s.order) < 4*dedupSize {
				break
			}
			return false, nil, false
		}
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	if s.byID == nil {
		s.byID = make(map[string]*dedupEntry)
	}
	s.byID[id] = &dedupEntry{at: now}
	s.order = append(s.order, id)
	return true, nil, true
}

// finish keeps the answer of a command.
func (s *dedupTable) finish(id string, ack []byte, now time.Time) {
	if c, ok := s.byID[id]; ok {
		c.done, c.ack, c.at = true, ack, now
	}
}
