package client

import (
	"context"
	"strings"

	"agentctl/manifest"
)

// Ticket is a ticket as the tools tickets.* return it (docs/tickets.md).
type Ticket struct {
	ID           string          `json:"id"`
	Title        string          `json:"title"`
	Body         string          `json:"body,omitempty"`
	Status       string          `json:"status"`
	Priority     string          `json:"priority"`
	NodeID       string          `json:"node_id,omitempty"`
	NodeName     string          `json:"node_name,omitempty"`
	AgentID      string          `json:"agent_id,omitempty"` // the assignee
	CreatedBy    string          `json:"created_by"`
	CreatedAt    int64           `json:"created_at"` // milliseconds since 1970, as all times
	UpdatedAt    int64           `json:"updated_at"`
	Version      int64           `json:"version"`
	CommentCount int             `json:"comment_count"`
	Comments     []TicketComment `json:"comments,omitempty"` // of a single ticket, not of a list
	Approval     *TicketApproval `json:"approval,omitempty"`
	Allowed      []string        `json:"allowed"` // the statuses that it can change to
}

// TicketComment is one comment on a ticket.
type TicketComment struct {
	N    int    `json:"n"`
	By   string `json:"by"`
	At   int64  `json:"at"`
	Text string `json:"text"`
}

// TicketApproval is the action for which a ticket requests approval, and the decision.
type TicketApproval struct {
	Action    string `json:"action"`
	ExpiresAt int64  `json:"expires_at"`
	DecidedBy string `json:"decided_by,omitempty"` // "" with a DecidedAt: it expired
	DecidedAt int64  `json:"decided_at,omitempty"`
}

// TicketStatuses and TicketPriorities list the closed sets, in the order of docs/tickets.md.
var (
	TicketStatuses   = []string{"open", "in_progress", "waiting", "resolved", "closed", "pending", "approved", "rejected", "expired"}
	TicketPriorities = []string{"low", "normal", "high", "urgent"}
)

const (
	ticketPage   = 100    // tickets of one answer
	maxTickets   = 10_000 // more than a tenant can have
	minTicketRef = 4      // characters in a partial id
)

// Tickets lists at most limit tickets, the newest first. status "" is any.
func (c *Client) Tickets(ctx context.Context, status string, limit int) ([]Ticket, error) {
	all := []Ticket{}
	args := map[string]any{}
	if status != "" {
		args["status"] = status
	}
	for len(all) < limit {
		args["limit"] = min(limit-len(all), ticketPage)
		var page struct {
			Tickets []Ticket
			Next    string `json:"next_cursor"`
		}
		if err := c.call(ctx, "tickets.list", args, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Tickets...)
		if page.Next == "" || len(page.Tickets) == 0 {
			break
		}
		args["cursor"] = page.Next
	}
	return all, nil
}

// Ticket gets a ticket, with its comments, by its id or by a part of at least four
// characters that only its id begins or ends with. Its error is a *RefError when there is
// not exactly one such ticket.
func (c *Client) Ticket(ctx context.Context, ref string) (*Ticket, error) {
	id, ok := manifest.ParseULID(ref)
	if !ok {
		var err error
		if id, err = c.ticketID(ctx, ref); err != nil {
			return nil, err
		}
	}
	return c.ChangeTicket(ctx, "get", map[string]any{"id": id})
}

// ticketID finds the one ticket whose id begins or ends with ref.
func (c *Client) ticketID(ctx context.Context, ref string) (id string, err error) {
	part := strings.ToUpper(ref)
	if len(part) < minTicketRef || len(part) > manifest.ULIDLen {
		return "", refError(ErrMalformed, "ticket", "%q is not a ticket id; give at least %d characters of its beginning or end", ref, minTicketRef)
	}
	list, err := c.Tickets(ctx, "", maxTickets)
	if err != nil {
		return "", err
	}
	for _, t := range list {
		if !strings.HasPrefix(t.ID, part) && !strings.HasSuffix(t.ID, part) {
			continue
		}
		if id != "" {
			return "", refError(ErrAmbiguous, "ticket", "%q is a part of more than one ticket id; give more of it", ref)
		}
		id = t.ID
	}
	if id == "" {
		return "", refError(ErrNotFound, "ticket", "no ticket has an id that begins or ends with %q", ref)
	}
	return id, nil
}

// TicketRequest is the arguments of tickets.create. Zero fields get the relay's defaults.
type TicketRequest struct {
	Title    string           `json:"title"`
	Body     string           `json:"body,omitempty"`
	Priority string           `json:"priority,omitempty"`
	NodeID   string           `json:"node_id,omitempty"`
	Key      string           `json:"idempotency_key,omitempty"` // repeated with the same one, it creates one ticket
	Approval *ApprovalRequest `json:"approval,omitempty"`
}

// ApprovalRequest makes a ticket a request for approval.
type ApprovalRequest struct {
	Action     string `json:"action"`
	ExpiresInS int64  `json:"expires_in_s,omitempty"`
}

// ChangeTicket calls tickets.VERB and returns the changed ticket:
//
//	create      a TicketRequest
//	comment     {"id", "text"}
//	assign      {"id", "agent_id"}; agent_id "" is nobody
//	transition  {"id", "to"}; to is one of the ticket's Allowed
//
// A refusal of the plugin is an *Error with a Reason; its message says what to do.
func (c *Client) ChangeTicket(ctx context.Context, verb string, args any) (*Ticket, error) {
	var result struct{ Ticket Ticket }
	if err := c.call(ctx, "tickets."+verb, args, &result); err != nil {
		return nil, err
	}
	return &result.Ticket, nil
}
