package tickets

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// tool is a tool with the function that runs it.
type tool struct {
	tool *kernel.Tool
	run  runFunc
}

// runFunc runs a tool with arguments that its CheckArguments accepted.
type runFunc = func(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error)

// Patterns of arguments. A title begins with a visible character and is one line. Ids of
// tickets are ULIDs in upper case. An agent id may be empty.
// Controls are written as escapes, since tools/list shows the patterns.
var (
	ulidPattern  = lazyregexp.New(`^[0-7][0-9A-HJKMNP-TV-Z]{25}$`)
	boardPattern = lazyregexp.New(`^[a-z0-9][a-z0-9-]*$`)
	agentPattern = lazyregexp.New(`^([A-Za-z0-9][A-Za-z0-9._:@-]*)?$`)
	linePattern  = lazyregexp.New(`^[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$`)
	keyPattern   = lazyregexp.New(`^[\x21-\x7e]+$`)
)

// textField is an argument that is a string of 1 to maxLength characters.
func textField(name string, maxLength int64, pattern *lazyregexp.Regexp, description string) arguments.Field {
	return arguments.Field{Name: name, Description: description, Type: arguments.String, Min: 1, Max: maxLength, Pattern: pattern, Form: forms[pattern]}
}

// forms are the patterns in words, for errors.
var forms = map[*lazyregexp.Regexp]string{
	linePattern:  "one line that begins with a visible character",
	agentPattern: "letters, digits and . _ : @ -, beginning with a letter or digit; empty for nobody",
	keyPattern:   "printable ASCII without spaces",
}

// ticketField is an argument that is the id of a ticket.
func ticketField(name, description string) arguments.Field {
	f := textField(name, manifest.ULIDLen, ulidPattern, description)
	f.Min, f.Form, f.Example = manifest.ULIDLen, "the id of a ticket, as tickets.list shows it", "01JD8Z3KQ5E6R7T8V9W0X1Y2Z3"
	return f
}

// boardField is an argument that names a board: its id, its name, or a start of its id that no other
// board has.
func boardField(name, description string) arguments.Field {
	f := textField(name, manifest.MaxNameLen, boardPattern, description)
	f.Form, f.Example = "the name or id of a board", "attic"
	return f
}

// enumField is an argument that is one of a closed set.
func enumField[T ~string](name string, set []T, description string) arguments.Field {
	return arguments.Field{Name: name, Description: description, Type: arguments.String, Enum: words(set)}
}

// optionalText is a textField that may be empty: assigning a ticket to "" removes its agent.
func optionalText(name string, maxLength int64, pattern *lazyregexp.Regexp, description string) arguments.Field {
	f := textField(name, maxLength, pattern, description)
	f.Min = 0
	return f
}

// required returns a copy of a field that a call must have.
func required(f arguments.Field) arguments.Field { f.Required = true; return f }

// withDefault returns a copy of a field with a default, which the schema shows to clients. The
// tool itself applies it.
func withDefault(f arguments.Field, value any) arguments.Field { f.Default = value; return f }

// Arguments of the tools. The kernel checks every call against them before Call runs, so the
// tools rely on types, lengths and closed sets.
var (
	idField = required(ticketField("id", "the ticket's id"))

	createFields = arguments.Object{
		required(textField("title", MaxTitle, linePattern, "what it is about, in one line")),
		optionalText("body", MaxBody, nil, "everything that somebody needs to work on it"),
		boardField("node_id", "the board that it is about: its name, its id or the start of its id"),
		withDefault(enumField("priority", Priorities, "how urgent it is"), "normal"),
		{Name: "approval", Type: arguments.Map,
			Description: "asks for an approval: the ticket is pending until somebody else than its creator approves or rejects it, or it expires",
			Members: arguments.Object{
				required(textField("action", MaxAction, linePattern, "what will be done once it is approved, in one line")),
				{Name: "expires_in_s", Description: "seconds until nobody can approve it any more", Type: arguments.Integer,
					Min: minExpiry, Max: maxExpiry, Default: defaultExpiry},
			}},
		textField("idempotency_key", MaxKey, keyPattern, "a word that you choose: the same call with the same key creates one ticket, however often it is repeated"),
	}
	listFields = arguments.Object{
		enumField("status", Statuses, "only tickets of this status"),
		boardField("node_id", "only tickets about this board"),
		{Name: "limit", Description: "tickets in one answer", Type: arguments.Integer, Min: 1, Max: 100, Default: 50},
		ticketField("cursor", "next_cursor of the answer before"),
	}
	commentFields = arguments.Object{idField, textField("text", MaxComment, nil, "the comment")}
	assignFields  = arguments.Object{idField,
		required(optionalText("agent_id", MaxAgentID, agentPattern, "whom to assign it to, an agent or a person; empty for nobody"))}
	moveFields = arguments.Object{idField, required(enumField("to", Statuses, "the new status; the error of an illegal one names those that are allowed"))}
)

// tools are the tools of the plugin. Those that read have the safety class read_only; the
// others have none and are allowed by the scope alone. Their schemas are made when a relay needs them
// first, and not at the start of every command.
var tools = sync.OnceValue(func() []tool {
	return []tool{
		newTool("create", "Create a ticket", "Opens a ticket in the fleet's queue: an incident, a task, or with approval a request that a person decides.",
			manifest.ScopeTicketsWrite, createFields, `"ticket":`+summarySchema, create),
		newTool("get", "Get a ticket", "One ticket with its body, its comments and the statuses that it may change to.",
			manifest.ScopeTicketsRead, arguments.Object{idField}, `"ticket":`+fullSchema, get),
		newTool("list", "List tickets", "Tickets, newest first, without bodies and comments.",
			manifest.ScopeTicketsRead, listFields, `"tickets":{"type":"array","maxItems":100,"items":`+summarySchema+`},"next_cursor":{"type":"string"}`, list),
		newTool("comment", "Comment on a ticket", "Adds a comment to a ticket.",
			manifest.ScopeTicketsWrite, commentFields, `"ticket":`+summarySchema, comment),
		newTool("assign", "Assign a ticket", "Assigns a ticket to an agent or a person, or to nobody.",
			manifest.ScopeTicketsWrite, assignFields, `"ticket":`+summarySchema, assign),
		newTool("transition", "Change a ticket's status", "Moves a ticket to another status; approves or rejects an approval, which its creator cannot approve.",
			manifest.ScopeTicketsWrite, moveFields, `"ticket":`+summarySchema, transition),
	}
})

// allTools are tools and fleetTools.
var allTools = sync.OnceValue(func() []tool { return append(slices.Clone(tools()), fleetTools()...) })

// words converts a closed set to the strings of a schema.
func words[T ~string](set []T) (list []string) {
	for _, s := range set {
		list = append(list, string(s))
	}
	return list
}

// newTool makes a tool. output are the properties of its output schema besides error.
func newTool(verb, title, about, scope string, args arguments.Object, output string, run runFunc) tool {
	t := &kernel.Tool{Name: "tickets." + verb, ToolInfo: &kernel.ToolInfo{Title: title, Description: about, Scope: scope, InputSchema: args.Schema(),
		OutputSchema:   json.RawMessage(`{"type":"object","properties":{` + output + `,"error":` + errorSchema + `},"additionalProperties":false}`),
		CheckArguments: args.Check}}
	switch {
	case scope == manifest.ScopeTicketsRead:
		t.SafetyClass = manifest.ReadOnly
	case verb == "assign" || verb == "transition":
		t.Hints = kernel.HintSafe | kernel.HintLocal | kernel.HintIdempotent
	default:
		t.Hints = kernel.HintSafe | kernel.HintLocal
	}
	return tool{t, run}
}

// Output schemas. An answer has either the requested members or an error.
const (
	errorSchema = `{"type":"object","properties":{"code":{"type":"string"},"message":{"type":"string"},"reason":{"type":"string"},` +
		`"status":{"type":"string"},"allowed":{"type":"array","items":{"type":"string"}},` +
		`"retry_after_ms":{"type":"integer"},"trace_id":{"type":"string"}},"required":["code","message"]}`

	summaryProps = `"id":{"type":"string"},"title":{"type":"string"},"status":{"type":"string"},"priority":{"type":"string"},` +
		`"node_id":{"type":"string"},"node_name":{"type":"string","description":"the board's name, if it has one"},"agent_id":{"type":"string"},"created_by":{"type":"string"},` +
		`"created_at":{"type":"integer","description":"milliseconds since 1970"},"updated_at":{"type":"integer"},` +
		`"version":{"type":"integer"},"comment_count":{"type":"integer"},` +
		`"approval":{"type":"object","properties":{"action":{"type":"string"},"expires_at":{"type":"integer"},` +
		`"decided_by":{"type":"string"},"decided_at":{"type":"integer"}},"required":["action","expires_at"],"additionalProperties":false},` +
		`"allowed":{"type":"array","items":{"type":"string"},"description":"statuses that it may change to"}`
	requiredProps = `"required":["id","title","status","priority","created_by","created_at","updated_at","version","comment_count","allowed"]`

	summarySchema = `{"type":"object","properties":{` + summaryProps + `},` + requiredProps + `,"additionalProperties":false}`
	fullSchema    = `{"type":"object","properties":{` + summaryProps + `,"body":{"type":"string"},` +
		`"comments":{"type":"array","items":{"type":"object","properties":{"n":{"type":"integer"},"by":{"type":"string"},` +
		`"at":{"type":"integer"},"text":{"type":"string"}},"required":["n","by","at","text"],"additionalProperties":false}}},` +
		requiredProps + `,"additionalProperties":false}`
)

// summary is a ticket without body and comments. Its own fields hide those of the ticket,
// as encoding/json prefers the less nested one of two equal names; get fills them in.
type summary struct {
	*Ticket
	Body         string    `json:"body,omitempty"`
	Comments     []Comment `json:"comments,omitempty"`
	NodeName     string    `json:"node_name,omitempty"` // of NodeID, by now; the board may have proposed it
	CommentCount int       `json:"comment_count"`
	Allowed      []Status  `json:"allowed"` // statuses that it may change to
}

// summarize returns a ticket as lists and changes show it.
func (p *Plugin) summarize(tenant string, k *Ticket) summary {
	return summary{Ticket: k, NodeName: p.boardName(tenant, k.NodeID), CommentCount: len(k.Comments), Allowed: k.Status.Next()}
}

// summaries returns an empty list for none, and not nil, which would be null in JSON.
func (p *Plugin) summaries(tenant string, list []*Ticket) []summary {
	s := make([]summary, len(list))
	for i, k := range list {
		s[i] = p.summarize(tenant, k)
	}
	return s
}

// answer is a result with structured content.
func answer(v any) (*kernel.Result, error) {
	data, err := json.Marshal(v)
	return &kernel.Result{Structured: data}, err
}

// answerTicket answers with {"ticket": ...}, as every tool but list does.
func answerTicket(s summary) (*kernel.Result, error) { return answer(map[string]summary{"ticket": s}) }

// answer answers with a ticket as it is now.
func (p *Plugin) answer(t *tenant, id string) (*kernel.Result, error) {
	k, err := t.get(id)
	if err != nil {
		return nil, err
	}
	return answerTicket(p.summarize(t.name, k))
}

// refusal is an error with the ticket's status and the statuses that are allowed instead, which
// an error of the kernel cannot have.
type refusal struct {
	Code    manifest.Code `json:"code"`
	Reason  string        `json:"reason"`
	Message string        `json:"message"`
	Status  Status        `json:"status"`
	Allowed []Status      `json:"allowed"`
	TraceID string        `json:"trace_id"`
}

// answerRefusal is a result that reports an error of the tool, with more fields than an error
// of the kernel has.
func answerRefusal(e refusal) (*kernel.Result, error) {
	res, err := answer(map[string]refusal{"error": e})
	res.IsError = true
	return res, err
}

// decodeArgs reads arguments that CheckArguments accepted.
func decodeArgs[T any](r *kernel.Request) (v T) {
	_ = json.Unmarshal(r.Arguments, &v) // cannot fail
	return v
}

// errFull is the error of a change that would exceed a bound.
func errFull(format string, a ...any) error {
	return &manifest.Error{Code: manifest.RateLimited, Message: fmt.Sprintf(format, a...), Reason: "full"}
}

// createArgs are the arguments of tickets.create. Their bounds are in createFields, which
// the kernel has checked before.
type createArgs struct {
	Title    string `json:"title"`
	Body     string `json:"body"`
	NodeID   string `json:"node_id"`
	Priority string `json:"priority"`
	Approval *struct {
		Action string `json:"action"`
		Expiry int64  `json:"expires_in_s"`
	} `json:"approval"`
	Key string `json:"idempotency_key"`
}

// payload returns the payload of the event that creates the ticket.
func (a *createArgs) payload(r *kernel.Request) payload {
	p := payload{V: 1, By: r.Caller.Actor, Trace: r.TraceID, Title: a.Title, Body: a.Body, NodeID: a.NodeID, Priority: cmp.Or(a.Priority, "normal")}
	if a.Approval != nil {
		p.Action = a.Approval.Action
		p.Expires = time.Now().UnixMilli() + 1000*cmp.Or(a.Approval.Expiry, defaultExpiry)
	}
	if a.Key != "" { // keys of different actors are different
		p.Key = r.Caller.Actor + " " + a.Key
	}
	return p
}

// create answers tickets.create. A repeated call with the same idempotency key returns the
// first ticket; one with other arguments is refused.
func create(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[createArgs](r)
	t := p.tenant(r.Caller.Tenant, true)
	if t == nil {
		return nil, errFull("this relay keeps tickets of as many tenants as it can")
	}
	var err error
	if a.NodeID, err = p.findBoard(r.Caller.Tenant, a.NodeID); err != nil {
		return nil, err
	}
	pl := a.payload(r)
	if err := p.acquire(ctx, t); err != nil {
		return nil, err
	}
	defer t.release()
	if k := t.byKey(pl.Key); k != nil {
		if !k.isResultOf(&pl) {
			return nil, &manifest.Error{Code: manifest.BadRequest, Message: "another ticket was created with this idempotency_key; use a new one", Reason: "key_reused"}
		}
		return answerTicket(p.summarize(t.name, k))
	}
	if t.unfinished() >= MaxUnfinished {
		return nil, errFull("there are %d unfinished tickets; close some", MaxUnfinished)
	}
	if p.tickets.Load() >= MaxAllTickets {
		return nil, errFull("this relay keeps as many tickets as it can")
	}
	drop, err := p.dropsForText(t, ticketSize+jsonSize(pl.Title)+jsonSize(pl.Body)+jsonSize(pl.Action), "")
	if err != nil {
		return nil, err
	}
	id := p.ids.next()
	if err := p.commitWithDrops(ctx, t, drop, change{eventCreated, id, pl}); err != nil {
		return nil, err
	}
	if pl.Action != "" {
		p.wakeRun()
	}
	return p.answer(t, id)
}

// dropsForText selects the finished tickets to drop for `text` more bytes. It never selects
// keep.
func (p *Plugin) dropsForText(t *tenant, text int, keep string) (drop []string, err error) {
	drop, ok := t.dropsFor(text, 0, keep)
	switch {
	case !ok:
		return nil, errFull("the unfinished tickets hold as much text as they may; close some")
	case p.text.Load()+int64(text) > int64(p.maxAllText):
		return nil, errFull("this relay keeps as much text of tickets as it can")
	}
	return drop, nil
}

// byKey returns the ticket that was created with an idempotency key, or nil. A key is valid as
// long as its ticket is kept.
func (t *tenant) byKey(key string) *Ticket {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if e := t.tickets[t.keys[key]]; e != nil && key != "" {
		return e.clone()
	}
	return nil
}

// isResultOf reports whether a create call with these arguments would make the same ticket. It
// ignores the expiry of an approval, which depends on the time of the call.
func (t *Ticket) isResultOf(p *payload) bool {
	action := ""
	if t.Approval != nil {
		action = t.Approval.Action
	}
	return t.Title == p.Title && t.Body == p.Body && t.NodeID == p.NodeID && t.Priority == p.Priority && action == p.Action
}

// get answers tickets.get.
func get(_ context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct{ ID string }](r)
	k, err := p.tenant(r.Caller.Tenant, false).get(a.ID)
	if err != nil {
		return nil, err
	}
	s := p.summarize(r.Caller.Tenant, k)
	s.Body, s.Comments = k.Body, k.Comments
	return answerTicket(s)
}

// list answers tickets.list. The cursor is the id of the last ticket of the page before.
func list(_ context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct {
		Status Status
		NodeID string `json:"node_id"`
		Limit  int
		Cursor string
	}](r)
	nodeID, err := p.findBoard(r.Caller.Tenant, a.NodeID)
	if err != nil {
		return nil, err
	}
	page, more := p.tenant(r.Caller.Tenant, false).list(a.Status, nodeID, a.Cursor, cmp.Or(a.Limit, 50))
	return answerList(p.summaries(r.Caller.Tenant, page), more)
}

// answerList answers with a page of tickets.
func answerList(page []summary, more bool) (*kernel.Result, error) {
	body := struct {
		Tickets []summary `json:"tickets"`
		Next    string    `json:"next_cursor,omitempty"`
	}{Tickets: page}
	if more {
		body.Next = page[len(page)-1].ID
	}
	return answer(body)
}

// changeTicket runs fn on a ticket of the caller's tenant, with the change slot held, and
// answers with the ticket afterwards, unless fn answers. An unknown id is refused before the
// wait for the slot, and looked up again after it: the ticket may have been dropped meanwhile.
func changeTicket(ctx context.Context, p *Plugin, r *kernel.Request, id string, fn func(t *tenant, k *Ticket) (*kernel.Result, error)) (*kernel.Result, error) {
	t := p.tenant(r.Caller.Tenant, false)
	if _, err := t.get(id); err != nil { // before waiting for the slot
		return nil, err
	}
	if err := p.acquire(ctx, t); err != nil {
		return nil, err
	}
	defer t.release()
	k, err := t.get(id)
	if err != nil {
		return nil, err
	}
	res, err := fn(t, k)
	if res != nil || err != nil {
		return res, err
	}
	return p.answer(t, id)
}

// comment answers tickets.comment. Numbers of comments are not reused.
func comment(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct{ ID, Text string }](r)
	return changeTicket(ctx, p, r, a.ID, func(t *tenant, k *Ticket) (*kernel.Result, error) {
		n := len(k.Comments)
		if n >= MaxComments {
			return nil, errFull("a ticket has at most %d comments; open another ticket", MaxComments)
		}
		if n > 0 {
			n = k.Comments[n-1].N
		}
		drop, err := p.dropsForText(t, commentSize+jsonSize(a.Text), k.ID)
		if err != nil {
			return nil, err
		}
		return nil, p.commitWithDrops(ctx, t, drop, change{eventCommented, k.ID,
			payload{V: k.Version + 1, By: r.Caller.Actor, Trace: r.TraceID, N: n + 1, Text: a.Text}})
	})
}

// assign answers tickets.assign. Assigning a ticket to its agent again changes nothing.
func assign(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct {
		ID      string
		AgentID string `json:"agent_id"`
	}](r)
	return changeTicket(ctx, p, r, a.ID, func(t *tenant, k *Ticket) (*kernel.Result, error) {
		if k.AgentID == a.AgentID {
			return nil, nil
		}
		return nil, p.commit(ctx, t, change{eventAssigned, k.ID, payload{V: k.Version + 1, By: r.Caller.Actor, Trace: r.TraceID, AgentID: a.AgentID}})
	})
}

// transition answers tickets.transition: the status machine of Status.Next, with two more
// rules. A caller cannot approve its own request, and reopening a ticket must leave the number
// of unfinished ones within its bound.
//
// A refusal is a result and not an error, so that the answer can name the present status and
// the statuses that are allowed.
func transition(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct {
		ID string
		To Status
	}](r)
	return changeTicket(ctx, p, r, a.ID, func(t *tenant, k *Ticket) (*kernel.Result, error) {
		if k.isDue() { // it expired before this call, although Run has not marked it
			err := p.changeStatus(ctx, t, k, Expired, "", r.TraceID)
			if err == nil {
				k, err = t.get(a.ID)
			}
			if err != nil {
				return nil, err
			}
		}
		if !k.Status.CanBecome(a.To) {
			return answerRefusal(refusal{manifest.BadRequest, "illegal_transition", transitionMessage(k.Status, a.To), k.Status, k.Status.Next(), r.TraceID})
		}
		if a.To == Approved && r.Caller.IsPlugin() { // not even for a caller, who may not know what it does
			return answerRefusal(refusal{manifest.SafetyDenied, "plugin", "plugins cannot approve; a person or an agent has to", k.Status, []Status{Rejected}, r.TraceID})
		}
		if a.To == Approved && k.CreatedBy == r.Caller.Actor {
			return answerRefusal(refusal{manifest.SafetyDenied, "own_request", "who asks for an approval cannot give it; somebody else has to", k.Status, []Status{Rejected}, r.TraceID})
		}
		if k.Status.isFinished() && t.unfinished() >= MaxUnfinished {
			return nil, errFull("there are %d unfinished tickets; close some", MaxUnfinished)
		}
		return nil, p.changeStatus(ctx, t, k, a.To, r.Caller.Actor, r.TraceID)
	})
}

// transitionMessage explains why a transition is not allowed.
func transitionMessage(from, to Status) string {
	if allowed := from.Next(); len(allowed) > 0 {
		return fmt.Sprintf("a ticket that is %s cannot become %s; it can become %s", from, to, strings.Join(words(allowed), ", "))
	}
	return fmt.Sprintf("a ticket that is %s stays so", from)
}
