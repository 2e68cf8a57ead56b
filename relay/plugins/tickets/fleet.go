package tickets

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/arguments"
)

// The tools of the toolset fleet do what tickets.* do, with the same functions, checks, scopes and
// events. They are three instead of six because a model reads each of them in every conversation:
//
//	fleet.tickets   get, list
//	fleet.ticket    create, comment, assign, transition
//	fleet.decide    transition to approved or rejected
//
// A decision is a separate tool: a person who lets an agent write tickets without asking has not
// let it approve anything.

// Statuses of fleet.ticket and fleet.decide. Together they are those that a caller can set.
var (
	workStatuses = []Status{Open, InProgress, Waiting, Resolved, Closed}
	decisions    = []Status{Approved, Rejected}
)

// Arguments of the tools.
var (
	readFields = arguments.Object{
		ticketField("id", "one ticket in full; not with the others"),
		enumField("status", Statuses, ""),
		boardField("board", "name, id or its start"),
		{Name: "limit", Type: arguments.Integer, Min: 1, Max: 100},
		ticketField("cursor", ""),
	}
	writeFields = arguments.Object{
		ticketField("id", "the ticket to change"),
		textField("title", MaxTitle, linePattern, ""),
		optionalText("body", MaxBody, nil, ""),
		boardField("board", ""),
		enumField("priority", Priorities, ""),
		textField("action", MaxAction, linePattern, "asks a person to approve this"),
		{Name: "expires_in_s", Type: arguments.Integer, Min: minExpiry, Max: maxExpiry, Example: defaultExpiry},
		textField("idempotency_key", MaxKey, keyPattern, "repeat safely"),
		textField("comment", MaxComment, nil, ""),
		optionalText("agent_id", MaxAgentID, agentPattern, "assignee"),
		enumField("status", workStatuses, ""),
	}
	decideFields = arguments.Object{required(ticketField("id", "")), required(enumField("decision", decisions, ""))}
)

// fleetTools are the tools of the plugin that belong to the toolset fleet.
func fleetTools() []tool {
	list := []tool{
		newTool("", "Read tickets", "One ticket by id, or a page of tickets, newest first.", manifest.ScopeTicketsRead, readFields, "", readTickets),
		newTool("", "Write a ticket", "Without id: creates a ticket (title). With id: one of comment, agent_id, status.", manifest.ScopeTicketsWrite, writeFields, "", writeTicket),
		newTool("", "Decide an approval", "Approves or rejects a pending ticket, for good; not your own.", manifest.ScopeTicketsWrite, decideFields, "", decide),
	}
	inputs := []arguments.Object{readFields, writeFields, decideFields}
	for i, name := range []string{"fleet.tickets", "fleet.ticket", "fleet.decide"} {
		list[i].tool.Name, list[i].tool.Group, list[i].tool.OutputSchema = name, kernel.GroupFleet, nil
		list[i].tool.InputSchema = inputs[i].BriefSchema()
	}
	return list
}

// withArguments returns a copy of a request with other arguments, for the function of another tool.
func withArguments(r *kernel.Request, args any) (*kernel.Request, error) {
	data, err := json.Marshal(args)
	c := *r
	c.Arguments = data
	return &c, err
}

// argMap is the JSON of arguments.
type argMap map[string]any

// readTickets answers fleet.tickets: get with an id, else list. Without a limit a page has what fits
// into maxPage bytes.
func readTickets(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct {
		ID, Status, Board, Cursor string
		Limit                     int
	}](r)
	if a.ID != "" {
		if a.Status != "" || a.Board != "" || a.Cursor != "" || a.Limit != 0 {
			return nil, arguments.Invalid(`argument id: without others; for example {"id":"01JD8Z3KQ5E6R7T8V9W0X1Y2Z3"}`)
		}
		c, err := withArguments(r, argMap{"id": a.ID})
		if err != nil {
			return nil, err
		}
		return get(ctx, p, c)
	}
	nodeID, err := p.findBoard(r.Caller.Tenant, a.Board)
	if err != nil {
		return nil, err
	}
	page, more := p.tenant(r.Caller.Tenant, false).list(Status(a.Status), nodeID, a.Cursor, cmp.Or(a.Limit, 50))
	rows, size := p.summaries(r.Caller.Tenant, page), 0
	if a.Limit == 0 {
		n := slices.IndexFunc(rows, func(s summary) bool {
			data, err := json.Marshal(s)
			size += len(data) + 1
			return err != nil || size > maxPage
		})
		if n == 0 {
			n = 1 // a large one by itself, so that the pages go on
		}
		if n > 0 && n < len(rows) {
			rows, more = rows[:n], true
		}
	}
	return answerList(rows, more)
}

// maxPage bounds the tickets of an answer without a limit, bytes: with the cursor some 500 tokens.
const maxPage = 1900

// Arguments of fleet.ticket by what they do: make a ticket, or change one.
var (
	createKeys = []string{"title", "body", "board", "priority", "action", "expires_in_s", "idempotency_key"}
	changeKeys = []string{"comment", "agent_id", "status"}
)

// given returns which of some arguments a call has.
func (a argMap) given(keys []string) (list []string) {
	for _, k := range keys {
		if _, ok := a[k]; ok {
			list = append(list, k)
		}
	}
	return list
}

// writeTicket answers fleet.ticket. A call makes one change, so that it succeeds or fails as a whole.
func writeTicket(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[argMap](r)
	run, args, err := a.plan()
	if err != nil {
		return nil, err
	}
	c, err := withArguments(r, args)
	if err != nil {
		return nil, err
	}
	return run(ctx, p, c)
}

// plan returns the function of the tickets.* tool that a call of fleet.ticket stands for, with that one's
// arguments. Errors quote names
// of arguments, which the kernel has checked, and no values.
func (a argMap) plan() (run runFunc, args argMap, err error) {
	creates, changes := a.given(createKeys), a.given(changeKeys)
	if _, ok := a["id"]; !ok {
		switch {
		case len(changes) > 0:
			return nil, nil, arguments.Invalid(`argument %s: needs id, the ticket to change; for example {"id":"01JD8Z3KQ5E6R7T8V9W0X1Y2Z3","status":"resolved"}`, changes[0])
		case a["title"] == nil:
			return nil, nil, arguments.Invalid(`argument title: missing; for example {"title":"Disk almost full","board":"attic"}`)
		case a["action"] == nil && a["expires_in_s"] != nil:
			return nil, nil, arguments.Invalid("argument expires_in_s: needs action, what is to be approved")
		}
		return create, a.createArgs(), nil
	}
	if len(creates) > 0 || len(changes) != 1 {
		return nil, nil, arguments.Invalid(`arguments: with id, give one of %s; for example {"id":"01JD8Z3KQ5E6R7T8V9W0X1Y2Z3","status":"resolved"}`, strings.Join(changeKeys, ", "))
	}
	switch args = (argMap{"id": a["id"]}); changes[0] {
	case "comment":
		args["text"], run = a["comment"], comment
	case "agent_id":
		args["agent_id"], run = a["agent_id"], assign
	default:
		args["to"], run = a["status"], transition
	}
	return run, args, nil
}

// createArgs are the arguments of tickets.create for those of fleet.ticket.
func (a argMap) createArgs() argMap {
	args := argMap{}
	for _, key := range a.given([]string{"title", "body", "priority", "idempotency_key"}) {
		args[key] = a[key]
	}
	if board, ok := a["board"]; ok {
		args["node_id"] = board
	}
	if action, ok := a["action"]; ok {
		approval := argMap{"action": action}
		if s, ok := a["expires_in_s"]; ok {
			approval["expires_in_s"] = s
		}
		args["approval"] = approval
	}
	return args
}

// decide answers fleet.decide. Only a ticket that asks for an approval can take either status.
func decide(ctx context.Context, p *Plugin, r *kernel.Request) (*kernel.Result, error) {
	a := decodeArgs[struct{ ID, Decision string }](r)
	c, err := withArguments(r, argMap{"id": a.ID, "to": a.Decision})
	if err != nil {
		return nil, err
	}
	return transition(ctx, p, c)
}
