package link

import "time"

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
