package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// Events is what the relay recorded. Its methods may be called from any goroutine, with the tenant of
// the caller's token and no other.
type Events interface {
	// Newest calls fn, which must be quick, with the events that q selects, the newest first, until fn
	// returns false. It reads a bounded part of the log; next is the Before of the call that continues,
	// 0 if everything was read.
	Newest(ctx context.Context, q EventQuery, fn func(kernel.Event) bool) (next uint64, err error)
	// TicketBoard returns the board that a ticket is about, from memory; "" for none or if the ticket
	// is not kept.
	TicketBoard(tenant, id string) (nodeID string)
	// TicketsAbout returns the ids of the newest tickets about a board, at most so many.
	TicketsAbout(tenant, nodeID string, limit int) []string
}

// EventQuery selects events of a tenant.
type EventQuery struct {
	Tenant     string
	Types      []string // at least one
	Aggregates []string // what events are about: ids of nodes, agents and tickets; empty: of any
	Before     uint64   // events up to this seq; 0: from the newest
	SinceMS    int64    // created at or after this, Unix ms
}

// Topics of fleet.events, with the types of their events. Snapshots are no events: they repeat old ones.
var eventTopics = []struct {
	name  string
	types []string
}{
	{"alert", []string{"alert.raised", "alert.cleared"}},
	{"presence", []string{"presence.online", "presence.offline"}},
	{"ticket", []string{"ticket.created", "ticket.commented", "ticket.assigned", "ticket.transitioned"}},
	{"join", []string{"join.board", "join.agent"}},
}

// The topics as an argument.
const topicNames = "alert, presence, ticket or join"

var topicPattern = lazyregexp.New(`^(alert|presence|ticket|join)$`)

// Bounds of fleet.events.
const (
	maxEvents       = 100      // of one answer
	maxEventsBytes  = 32 << 10 // of one answer with a limit
	maxEventText    = 300      // characters of a text that a board or a caller wrote
	maxEventTickets = 32       // tickets whose events count as those of their board
	// eventsTime is for the search and for the wait before it, since the relay bounds searches in progress.
	eventsTime = 3500 * time.Millisecond
)

// errTopic refuses topics that the caller's token does not have.
var errTopic = &manifest.Error{Code: manifest.SafetyDenied, Reason: "topic", Message: "the token is limited to other topics; ask the relay's operator for one with the topics " + topicNames}

var eventsTool = tool{
	name: "fleet.events", title: "Read events", scope: manifest.ScopeEventsSubscribe,
	description: "What happened, newest first: alerts, boards that came and went, tickets, joins. Also of boards that are offline.",
	input: arguments.Object{
		{Name: "since", Type: arguments.String, Min: 1, Max: 40, Description: "24h (ago) or RFC 3339", Example: "24h"},
		{Name: "topics", Type: arguments.Array, Min: 1, Max: 4, Pattern: topicPattern, Form: topicNames, Example: []string{"alert"}},
		{Name: "board", Type: arguments.String, Min: 1, Max: 64, Example: "attic"},
		{Name: "limit", Type: arguments.Integer, Min: 1, Max: maxEvents, Description: "default: what 2 KB hold", Example: 50},
		{Name: "cursor", Type: arguments.String, Min: 1, Max: 64},
	},
	call: func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
		return p.events(ctx, r)
	},
}

// eventRow is an event of fleet.events. Name and ID are the board's; Text is what a board or a caller
// wrote, and no instruction.
type eventRow struct {
	At     string   `json:"at"`
	Topic  string   `json:"topic"`
	Event  string   `json:"event"` // raised, offline, created, ...
	Name   string   `json:"name,omitempty"`
	ID     string   `json:"id,omitempty"`
	Agent  string   `json:"agent,omitempty"`
	Ticket string   `json:"ticket,omitempty"`
	By     string   `json:"by,omitempty"`
	Level  string   `json:"level,omitempty"`
	Metric string   `json:"metric,omitempty"`
	Value  *rounded `json:"value,omitempty"`
	Text   string   `json:"text,omitempty"`
}

// eventsAnswer is the answer of fleet.events.
type eventsAnswer struct {
	Events []json.RawMessage `json:"events"`
	// SearchedTo is how far back a page has searched that ended before its limit: there may be more.
	SearchedTo string `json:"searched_to,omitempty"`
	Next       string `json:"next_cursor,omitempty"`
}

// eventsArguments are those of fleet.events.
type eventsArguments struct {
	Since, Board, Cursor string
	Topics               []string
	Limit                int
}

// events answers fleet.events: it searches the log from the newest event, or from the cursor, back in time. Four
// things end a page:
//
//	limit, or the bytes of an answer     the cursor is at the first event that did not fit
//	a bounded part of the log was read   the cursor is where the search ended, and searched_to is the
//	                                     time of the oldest event on the page: there may be more, or nothing
//	the beginning of the log             there is no cursor
//	eventsTime                           the error of the search
//
// The first event is always in the page, however long it is, so that the pages go on.
func (p *Plugin) events(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var args eventsArguments
	if err := readArguments(r, &args); err != nil {
		return nil, err
	}
	q, err := p.eventQuery(r.Caller, &args)
	if err != nil {
		return nil, err
	}
	release, err := p.acquireSearch(r.Caller)
	if err != nil {
		return nil, err
	}
	defer release()
	limit, size := cmp.Or(args.Limit, maxEvents), maxEventsBytes
	if args.Limit == 0 {
		size = MaxAnswer - 160 // the rest of the answer
	}
	ctx, cancel := context.WithTimeout(ctx, eventsTime)
	defer cancel()
	out := eventsAnswer{Events: []json.RawMessage{}}
	isFull, used, oldest := false, 0, int64(0)
	// The callback runs while a read transaction of the log is open, so eventRow must be quick: it uses
	// what is in memory only.
	next, err := p.opt.Events.Newest(ctx, q, func(e kernel.Event) bool {
		row, ok := p.eventRow(&e)
		if !ok {
			return true
		}
		data, err := json.Marshal(row)
		if err != nil {
			return true // cannot happen: strings, and a number that is finite
		}
		if isFull = len(out.Events) > 0 && (len(out.Events) == limit || used+len(data) > size); isFull {
			out.Next = makeCursor(strconv.FormatUint(e.Seq, 10))
			return false
		}
		out.Events, used, oldest = append(out.Events, data), used+len(data)+1, e.CreatedMS
		return true
	})
	if err != nil {
		return nil, err
	}
	if next > 0 && !isFull { // the search ended at the bound of Newest
		out.Next = makeCursor(strconv.FormatUint(next, 10))
		if oldest > 0 {
			out.SearchedTo = rfc3339(time.UnixMilli(oldest))
		}
	}
	return answer(out)
}

// eventQuery makes the query of the arguments. It checks what the schema cannot: topics that the token does not
// have, the board, the time and the cursor. Events of a board are those about it and about its tickets.
func (p *Plugin) eventQuery(caller *kernel.Caller, args *eventsArguments) (EventQuery, error) {
	tenant := caller.Tenant
	q := EventQuery{Tenant: tenant}
	for _, topic := range eventTopics {
		switch isNamed := slices.Contains(args.Topics, topic.name); {
		case caller.HasTopic(topic.name) && (isNamed || len(args.Topics) == 0):
			q.Types = append(q.Types, topic.types...)
		case isNamed: // an empty page would look as if there had been no such event
			return q, errTopic
		}
	}
	if len(q.Types) == 0 {
		return q, errTopic
	}
	if args.Board != "" {
		b, err := p.resolve(tenant, args.Board)
		if err != nil {
			return q, err
		}
		q.Aggregates = append(p.opt.Events.TicketsAbout(tenant, b.ID, maxEventTickets), b.ID)
	}
	if args.Since != "" {
		now := p.opt.Now()
		since, err := parseMoment("since", args.Since, now)
		if err != nil {
			return q, err
		}
		// Refused, since an empty page would look as if nothing had happened.
		if since.After(now) {
			return q, errNotPast("since", now)
		}
		q.SinceMS = since.UnixMilli()
	}
	position, err := readCursor(args.Cursor)
	if err == nil && position != "" {
		// 63 bits, since SQLite's integers are signed. A cursor of fleet.find is not a number, and is
		// refused.
		if q.Before, err = strconv.ParseUint(position, 10, 63); err != nil || q.Before == 0 {
			err = errCursor
		}
	}
	return q, err
}

// eventPayload has the members of the payloads that are shown. Each type of event has some of them.
type eventPayload struct {
	Kind           string   `json:"kind"` // presence
	Suspect        bool     `json:"suspect"`
	CloneSuspected bool     `json:"clone_suspected"`
	Level          string   `json:"level"` // alert
	Metric         string   `json:"metric"`
	Value          *float64 `json:"value"`
	Message        string   `json:"message"`
	By             string   `json:"by"` // ticket
	Title          string   `json:"title"`
	NodeID         string   `json:"node_id"`
	Text           string   `json:"text"`
	AgentID        string   `json:"agent_id"`
	To             string   `json:"to"`
}

// eventRow is how an event is shown; ok is false for the presence of agents, who come and go with
// each request, and for what cannot be read.
func (p *Plugin) eventRow(e *kernel.Event) (row eventRow, ok bool) {
	var pl eventPayload
	if err := json.Unmarshal(e.Payload, &pl); err != nil {
		return row, false
	}
	topic, what, _ := strings.Cut(e.Type, ".")
	row = eventRow{At: rfc3339(time.UnixMilli(e.CreatedMS)), Topic: topic, Event: what}
	nodeID := e.Aggregate
	switch topic {
	case "alert":
		row.Level, row.Metric, row.Text = pl.Level, pl.Metric, cut(pl.Message)
		if v := pl.Value; v != nil && !math.IsInf(*v, 0) {
			row.Value = (*rounded)(v)
		}
	case "presence":
		if pl.Kind != kernel.PresenceDevice {
			return row, false
		}
		switch {
		case pl.CloneSuspected:
			row.Text = "clone suspected: two installations use its identity"
		case pl.Suspect:
			row.Text = "suspect: it does not answer"
		}
	case "ticket":
		row.Ticket, row.By, nodeID = e.Aggregate, pl.By, pl.NodeID
		row.Text = cut(cmp.Or(pl.Title, pl.Text, pl.To, pl.AgentID))
		// Only the first event of a ticket names its board.
		nodeID = cmp.Or(nodeID, p.opt.Events.TicketBoard(e.Tenant, e.Aggregate))
	case "join":
		if what == "agent" {
			row.Agent, nodeID = e.Aggregate, ""
		}
	}
	if nodeID != "" {
		row.ID = nodeID
		if b, ok := p.opt.Boards.Lookup(e.Tenant, nodeID); ok && b.ID == nodeID {
			row.Name = b.Name
		}
	}
	return row, true
}

// cut shortens a text that somebody else wrote to maxEventText characters, so that one event does not fill a
// page.
func cut(text string) string {
	n := 0
	for i := range text {
		if n++; n > maxEventText {
			return text[:i] + "..."
		}
	}
	return text
}
