package tickets

import "slices"

// The life of a ticket. Open, in_progress and waiting are active; a ticket may move between
// them freely. Closed, approved, rejected and expired are finished: such tickets are kept
// for reference and dropped when there are too many.
//
//	open, in_progress, waiting  ->  each other, resolved, closed
//	resolved                    ->  open (not solved after all), closed
//	closed                      ->  open (reopened)
//	pending                     ->  approved, rejected, or expired by the clock
//
// An approval is decided once: approved, rejected and expired are final.

// Status is the status of a ticket. The set is closed.
type Status string

// The statuses. A ticket that asks for an approval begins as pending, every other one as
// open.
const (
	Open       Status = "open"        // no work has started
	InProgress Status = "in_progress" // being worked on
	Waiting    Status = "waiting"     // for something outside
	Resolved   Status = "resolved"    // done, to be confirmed
	Closed     Status = "closed"      // finished
	Pending    Status = "pending"     // an approval without a decision
	Approved   Status = "approved"    // finished
	Rejected   Status = "rejected"    // finished
	Expired    Status = "expired"     // finished: no decision in time
)

// Statuses lists the closed set.
var Statuses = []Status{Open, InProgress, Waiting, Resolved, Closed, Pending, Approved, Rejected, Expired}

// next lists the statuses that a caller may move a ticket to, by its status. The clock
// moves pending tickets to expired.
var next = map[Status][]Status{
	Open:       {InProgress, Waiting, Resolved, Closed},
	InProgress: {Open, Waiting, Resolved, Closed},
	Waiting:    {Open, InProgress, Resolved, Closed},
	Resolved:   {Open, Closed},
	Closed:     {Open},
	Pending:    {Approved, Rejected},
}

// Next lists the statuses that a caller may move a ticket of status s to. It is not nil, so
// that it is never null in JSON.
func (s Status) Next() []Status { return append([]Status{}, next[s]...) }

// CanBecome reports whether a caller may move a ticket from s to to.
func (s Status) CanBecome(to Status) bool { return slices.Contains(next[s], to) }

// isActive reports whether a ticket of status s still needs work, which puts it into the queue
// of open tickets. Resolved and pending tickets wait for a decision instead.
func (s Status) isActive() bool { return s == Open || s == InProgress || s == Waiting }

// isFinished reports whether a ticket of status s may be dropped when there are too many.
func (s Status) isFinished() bool {
	return s == Closed || s == Approved || s == Rejected || s == Expired
}

// Priorities lists the closed set, least urgent first.
var Priorities = []string{"low", "normal", "high", "urgent"}

// Ticket is one entry of the fleet's queue. Times are milliseconds since 1970. The JSON form is
// that of ticket.snapshot events too, so the names of its fields are part of the log's format.
type Ticket struct {
	ID        string    `json:"id"` // ULID, ascending with the time of creation
	Title     string    `json:"title"`
	Body      string    `json:"body,omitempty"`
	Status    Status    `json:"status"`
	Priority  string    `json:"priority"`
	NodeID    string    `json:"node_id,omitempty"`  // the device that it is about
	AgentID   string    `json:"agent_id,omitempty"` // the agent or person that it is assigned to
	CreatedBy string    `json:"created_by"`
	CreatedAt int64     `json:"created_at"`
	UpdatedAt int64     `json:"updated_at"`
	Version   int64     `json:"version"` // number of changes so far
	Comments  []Comment `json:"comments,omitempty"`
	Approval  *Approval `json:"approval,omitempty"`
}

// Approval is the action that a ticket requests approval for, and the decision.
type Approval struct {
	Action    string `json:"action"` // what will be done, in a sentence
	ExpiresAt int64  `json:"expires_at"`
	DecidedBy string `json:"decided_by,omitempty"` // empty: undecided, or expired
	DecidedAt int64  `json:"decided_at,omitempty"`
}

// Comment is a comment on a ticket. N counts from 1 in each ticket.
type Comment struct {
	N    int    `json:"n"`
	By   string `json:"by"`
	At   int64  `json:"at"`
	Text string `json:"text"`
}

// Bounds of one tenant. Lengths are in characters; the longest texts, escaped, still fit
// into one event of the log.
const (
	MaxUnfinished = 2000    // tickets that are not finished
	MaxFinished   = 500     // beyond it, the ticket finished longest ago is dropped
	MaxText       = 8 << 20 // bytes of its tickets in the event log (size); finished tickets are dropped
	MaxComments   = 100     // of one ticket
	MaxTitle      = 200
	MaxBody       = 8000
	MaxComment    = 2000
	MaxAction     = 500
	MaxKey        = 64
	MaxAgentID    = 64

	// Of all tenants together, so that a Snapshot stays small.
	MaxTenants    = 4096 // that have tickets at all
	MaxAllTickets = 20_000
	MaxAllText    = 64 << 20

	minExpiry, maxExpiry, defaultExpiry = 10, 604800, 3600 // seconds
)

// size is the number of bytes that a ticket counts towards MaxText: about what a snapshot of it has in
// the event log, which needs space for those of a tenant before it can remove anything of it.
func (t *Ticket) size() int {
	n := ticketSize + jsonSize(t.Title) + jsonSize(t.Body)
	if t.Approval != nil {
		n += jsonSize(t.Approval.Action)
	}
	for i := range t.Comments {
		n += commentSize + jsonSize(t.Comments[i].Text)
	}
	return n
}

// Sizes in the event log without the texts: ids, actors, times and the chain.
const (
	ticketSize  = 512
	commentSize = 160
)

// jsonSize returns how many bytes a text has in JSON, where a control character takes six.
func jsonSize(s string) int {
	n := len(s)
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"', c == '\\', c == '\n', c == '\t', c == '\r':
			n++
		case c < 0x20, c == '<', c == '>', c == '&':
			n += 5
		}
	}
	return n
}

// clone returns a copy that later changes do not affect. Comments are only appended, and
// an Approval is replaced, not changed in place.
func (t *Ticket) clone() *Ticket {
	c := *t
	c.Comments = slices.Clip(c.Comments)
	return &c
}
