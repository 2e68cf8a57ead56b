package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/manifest"
	"agentctl/term"
)

// ticket is what the tools tickets.* answer with; docs/tickets.md.
type ticket struct {
	ID           string          `json:"id"`
	Title        string          `json:"title"`
	Body         string          `json:"body,omitempty"`
	Status       string          `json:"status"`
	Priority     string          `json:"priority"`
	NodeID       string          `json:"node_id,omitempty"`
	AgentID      string          `json:"agent_id,omitempty"`
	CreatedBy    string          `json:"created_by"`
	CreatedAt    int64           `json:"created_at"`
	UpdatedAt    int64           `json:"updated_at"`
	Version      int64           `json:"version"`
	CommentCount int             `json:"comment_count"`
	Comments     []ticketComment `json:"comments,omitempty"`
	Approval     *ticketApproval `json:"approval,omitempty"`
	Allowed      []string        `json:"allowed"`
}

type ticketComment struct {
	N    int    `json:"n"`
	By   string `json:"by"`
	At   int64  `json:"at"`
	Text string `json:"text"`
}

type ticketApproval struct {
	Action    string `json:"action"`
	ExpiresAt int64  `json:"expires_at"`
	DecidedBy string `json:"decided_by,omitempty"`
	DecidedAt int64  `json:"decided_at,omitempty"`
}

// ticketCmd is what the subcommands share.
type ticketCmd struct {
	rf     relayFlags
	out    output
	dryRun bool
}

func newTickets() *cobra.Command {
	c := &cobra.Command{
		Use:   "tickets",
		Short: "The fleet's queue of incidents and approvals",
		Long: `The fleet's queue: incidents and tasks that agents and people work on, and approvals
that a person gives. ID is a ticket's id, or a part of its beginning or end that no other
ticket has. Changes need a token with the scope tickets:write.`,
	}
	c.AddCommand(newTicketsLs(), newTicketsShow(), newTicketsCreate(), newTicketsComment(), newTicketsAssign(), newTicketsMove(),
		newTicketsDecide("approve", "approved", "Approve what a ticket asks for"), newTicketsDecide("reject", "rejected", "Reject what a ticket asks for"))
	return c
}

// flags adds the common flags; changes are those of commands that change something.
func (t *ticketCmd) flags(c *cobra.Command, changes bool) *cobra.Command {
	t.rf.flags(c)
	t.out.flags(c)
	if changes {
		c.Flags().BoolVar(&t.dryRun, "dry-run", false, "say what would be done, and do nothing")
	}
	return c
}

func newTicketsLs() *cobra.Command {
	var t ticketCmd
	var status string
	var limit int
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List tickets, newest first",
		Example: "  agentctl tickets ls\n  agentctl tickets ls --status pending -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 {
				return exit(exitUsage, "--limit must be at least 1")
			}
			rc, err := t.rf.client()
			if err != nil {
				return err
			}
			list, err := rc.tickets(cmd.Context(), status, limit)
			if err != nil {
				return err
			}
			if t.out.format == "ndjson" {
				for _, k := range list {
					if err := t.out.print(cmd, k, nil); err != nil {
						return err
					}
				}
				return nil
			}
			return t.out.print(cmd, list, func() error { return printTickets(cmd, list) })
		},
	}
	c.Flags().StringVar(&status, "status", "", "only tickets of this `STATUS`")
	c.Flags().IntVar(&limit, "limit", 50, "at most `N` tickets")
	return t.flags(c, false)
}

func newTicketsShow() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "show ID",
		Short:   "One ticket with its comments",
		Example: "  agentctl tickets show 01JD8Z3K",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, k, err := t.find(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return t.out.print(cmd, k, func() error { return printTicket(cmd.OutOrStdout(), k) })
		},
	}
	return t.flags(c, false)
}

func newTicketsCreate() *cobra.Command {
	var t ticketCmd
	var body, bodyFile, node, priority, approval, key string
	var expires time.Duration
	c := &cobra.Command{
		Use:   "create TITLE",
		Short: "Open a ticket, or ask for an approval",
		Example: `  agentctl tickets create "Disk almost full" --node attic --priority high
  journalctl -u foo | tail -50 | agentctl tickets create "foo crashes" --body-file -
  agentctl tickets create "Reboot attic" --approval "reboot attic now" --expires 15m`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, argv []string) error {
			args := map[string]any{"title": argv[0]}
			if body != "" && bodyFile != "" {
				return exit(exitUsage, "give --body or --body-file, not both")
			}
			if bodyFile != "" {
				var err error
				if body, err = readBody(cmd.InOrStdin(), bodyFile); err != nil {
					return err
				}
			}
			if expires != 0 && approval == "" {
				return exit(exitUsage, "--expires goes with --approval")
			}
			if approval != "" {
				ask := map[string]any{"action": approval}
				if expires != 0 {
					ask["expires_in_s"] = int64(expires.Seconds())
				}
				args["approval"] = ask
			}
			for name, v := range map[string]string{"body": body, "priority": priority, "idempotency_key": key} {
				if v != "" {
					args[name] = v
				}
			}
			rc, err := t.rf.client()
			if err != nil {
				return err
			}
			if node != "" {
				nodes, err := rc.nodes(cmd.Context())
				if err != nil {
					return err
				}
				n, err := findNode(nodes, node)
				if err != nil {
					return err
				}
				args["node_id"] = n.NodeID
			}
			return t.change(cmd, rc, "create", args, func(k *ticket) (did, undo string) {
				undo = "close it with: agentctl tickets move " + k.ID + " closed"
				if k.Approval != nil {
					undo = "withdraw it with: agentctl tickets reject " + k.ID
				}
				return "created " + k.ID, undo
			})
		},
	}
	f := c.Flags()
	f.StringVar(&body, "body", "", "`TEXT` with everything that one needs to work on it")
	f.StringVar(&bodyFile, "body-file", "", "read the body from `FILE`; - is stdin")
	f.StringVar(&node, "node", "", "the `NODE` that it is about: id, prefix of it, or name")
	f.StringVar(&priority, "priority", "", "`PRIORITY`: low, normal, high or urgent (default normal)")
	f.StringVar(&approval, "approval", "", "ask for an approval of this `ACTION`")
	f.DurationVar(&expires, "expires", 0, "nobody can approve it after this `DURATION` (default 1h)")
	f.StringVar(&key, "idempotency-key", "", "a `WORD`: repeated with the same one, the command creates one ticket")
	return t.flags(c, true)
}

func newTicketsComment() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "comment ID TEXT",
		Short:   "Comment on a ticket",
		Example: `  agentctl tickets comment 01JD8Z3K "the fan was replaced"`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, argv []string) error {
			rc, k, err := t.find(cmd.Context(), argv[0])
			if err != nil {
				return err
			}
			return t.change(cmd, rc, "comment", map[string]any{"id": k.ID, "text": argv[1]}, func(k *ticket) (did, undo string) {
				return "commented on " + k.ID, "a comment stays; correct it with another one"
			})
		},
	}
	return t.flags(c, true)
}

func newTicketsAssign() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "assign ID AGENT",
		Short:   "Assign a ticket to an agent or a person; - is nobody",
		Example: "  agentctl tickets assign 01JD8Z3K claude\n  agentctl tickets assign 01JD8Z3K -",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, argv []string) error {
			rc, old, err := t.find(cmd.Context(), argv[0])
			if err != nil {
				return err
			}
			agent, before := argv[1], old.AgentID
			if agent == "-" {
				agent = ""
			}
			if before == "" {
				before = "-"
			}
			return t.change(cmd, rc, "assign", map[string]any{"id": old.ID, "agent_id": agent}, func(k *ticket) (did, undo string) {
				return fmt.Sprintf("assigned %s to %s", k.ID, orNobody(k.AgentID)), fmt.Sprintf("undo with: agentctl tickets assign %s %s", k.ID, before)
			})
		},
	}
	return t.flags(c, true)
}

func newTicketsMove() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "move ID STATUS",
		Short:   "Change a ticket's status",
		Long:    "Change a ticket's status. 'agentctl tickets show ID' tells which ones are allowed.",
		Example: "  agentctl tickets move 01JD8Z3K in_progress\n  agentctl tickets move 01JD8Z3K resolved",
		Args:    cobra.ExactArgs(2),
		RunE:    func(cmd *cobra.Command, argv []string) error { return t.move(cmd, argv[0], argv[1]) },
	}
	return t.flags(c, true)
}

func newTicketsDecide(verb, status, about string) *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     verb + " ID",
		Short:   about,
		Long:    about + ". Who asked for an approval can withdraw it with reject, but cannot give it.",
		Example: "  agentctl tickets ls --status pending\n  agentctl tickets " + verb + " 01JD8Z3K",
		Args:    cobra.ExactArgs(1),
		RunE:    func(cmd *cobra.Command, argv []string) error { return t.move(cmd, argv[0], status) },
	}
	return t.flags(c, true)
}

func (t *ticketCmd) move(cmd *cobra.Command, ref, to string) error {
	rc, old, err := t.find(cmd.Context(), ref)
	if err != nil {
		return err
	}
	if t.dryRun {
		for _, s := range old.Allowed {
			if s == to {
				return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, nil)
			}
		}
		return exit(exitFailure, "%s is %s and cannot become %s; it can become: %s", old.ID, old.Status, term.SafeLine(to), orNothing(old.Allowed))
	}
	return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, func(k *ticket) (did, undo string) {
		undo = "a decision is final; ask again with: agentctl tickets create --approval"
		for _, s := range k.Allowed {
			if s == old.Status {
				undo = fmt.Sprintf("undo with: agentctl tickets move %s %s", k.ID, s)
				break
			}
			undo = fmt.Sprintf("take it up again with: agentctl tickets move %s open", k.ID)
		}
		return fmt.Sprintf("%s: %s -> %s", k.ID, old.Status, k.Status), undo
	})
}

// change calls a tool that changes a ticket, and says what it did and how to undo it.
func (t *ticketCmd) change(cmd *cobra.Command, rc *relayClient, verb string, args map[string]any, said func(*ticket) (did, undo string)) error {
	if t.dryRun {
		line, err := json.Marshal(args)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.ErrOrStderr(), "would call tickets.%s %s; nothing was done\n", verb, line)
		return err
	}
	var res struct{ Ticket ticket }
	if err := rc.ticketTool(cmd.Context(), verb, args, &res); err != nil {
		return err
	}
	did, undo := said(&res.Ticket)
	if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "%s; %s\n", term.SafeLine(did), term.SafeLine(undo)); err != nil {
		return err
	}
	return t.out.print(cmd, &res.Ticket, func() error {
		if verb != "create" {
			return nil
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(res.Ticket.ID)) // for scripts
		return err
	})
}

// find gets a ticket by its id or a part of it.
func (t *ticketCmd) find(ctx context.Context, ref string) (*relayClient, *ticket, error) {
	rc, err := t.rf.client()
	if err != nil {
		return nil, nil, err
	}
	id, ok := manifest.ParseULID(ref)
	if !ok {
		if id, err = rc.ticketID(ctx, ref); err != nil {
			return nil, nil, err
		}
	}
	var res struct{ Ticket ticket }
	err = rc.ticketTool(ctx, "get", map[string]any{"id": id}, &res)
	return rc, &res.Ticket, err
}

// ticketID finds the one ticket whose id begins or ends with ref.
func (c *relayClient) ticketID(ctx context.Context, ref string) (id string, err error) {
	part := strings.ToUpper(ref)
	if len(part) < 4 || len(part) > manifest.ULIDLen {
		return "", exit(exitUsage, "%q is no ticket id; give at least 4 characters of its beginning or end, see: agentctl tickets ls", term.SafeLine(ref))
	}
	list, err := c.tickets(ctx, "", maxTickets)
	if err != nil {
		return "", err
	}
	for _, k := range list {
		if !strings.HasPrefix(k.ID, part) && !strings.HasSuffix(k.ID, part) {
			continue
		}
		if id != "" {
			return "", exit(exitUsage, "%q is a part of more than one ticket id; give more of it, see: agentctl tickets ls", term.SafeLine(ref))
		}
		id = k.ID
	}
	if id == "" {
		return "", exit(exitFailure, "no ticket has an id that begins or ends with %q; see: agentctl tickets ls", term.SafeLine(ref))
	}
	return id, nil
}

// maxTickets is more than a tenant can have.
const maxTickets = 10_000

// tickets lists up to limit tickets, page by page.
func (c *relayClient) tickets(ctx context.Context, status string, limit int) ([]ticket, error) {
	all := []ticket{}
	args := map[string]any{}
	if status != "" {
		args["status"] = status
	}
	for len(all) < limit {
		args["limit"] = min(limit-len(all), 100)
		var page struct {
			Tickets []ticket
			Next    string `json:"next_cursor"`
		}
		if err := c.ticketTool(ctx, "list", args, &page); err != nil {
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

// ticketTool calls tickets.VERB. A refusal, whatever the status it comes with, is an
// exitError.
func (c *relayClient) ticketTool(ctx context.Context, verb string, args map[string]any, into any) error {
	resp, err := c.send(ctx, http.MethodPost, "/mcp/tools/call", "application/json", map[string]any{"tool": "tickets." + verb, "arguments": args})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return exit(exitFailure, "read the answer: %w", err)
	}
	var fail struct {
		Error *ticketError `json:"error"`
	}
	if err := json.Unmarshal(b, &fail); err == nil && fail.Error != nil {
		return fail.Error.exit(resp.StatusCode)
	}
	if err := json.Unmarshal(b, into); err != nil || resp.StatusCode != http.StatusOK {
		return exit(exitFailure, "the server's answer to tickets.%s (HTTP %d) is not an agentctl relay's", verb, resp.StatusCode)
	}
	return nil
}

// ticketError is a refusal, of the relay or of the tool itself.
type ticketError struct {
	Code    manifest.Code `json:"code"`
	Reason  string        `json:"reason"` // of the tool
	Message string        `json:"message"`
	TraceID string        `json:"trace_id"`
}

// exit says what to do next.
func (e *ticketError) exit(status int) error {
	code, next := exitFailure, ""
	switch {
	case status == http.StatusUnauthorized:
		code, next = exitUnauthorized, "; mint a token with: agentctl token create, and pass it with --token-file"
	case e.Reason != "": // the message has it all
		if e.Code == manifest.SafetyDenied {
			code = exitUnauthorized
		}
	case e.Code == manifest.SafetyDenied:
		code, next = exitUnauthorized, "; mint one with: agentctl token create --scope tickets:read --scope tickets:write"
	case e.Code == manifest.DeadlineExceeded:
		code, next = exitTimeout, "; see whether it was done with: agentctl tickets ls"
	case e.Code == manifest.BadRequest && strings.HasPrefix(e.Message, "no tool"):
		next = "; this relay has no tickets: it runs with --without tickets, or the plugin was unloaded"
	case e.Code == manifest.BadRequest:
		next = "; see: agentctl tickets ls"
	}
	return exit(code, "%s: %s%s (trace %s)", e.Code, e.Message, next, e.TraceID)
}

// readBody reads a ticket's body from a file or, for -, from stdin.
func readBody(stdin io.Reader, path string) (string, error) {
	r := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", exit(exitFailure, "read --body-file: %w", err)
		}
		defer func() { _ = f.Close() }()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, 1<<20))
	if err != nil {
		return "", exit(exitFailure, "read --body-file: %w", err)
	}
	return strings.ToValidUTF8(string(b), "?"), nil
}
