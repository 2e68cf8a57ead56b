package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/duration"
	"agentctl/term"
)

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
			list, err := rc.Tickets(cmd.Context(), status, limit)
			if err != nil {
				return err
			}
			return printList(&t.out, cmd, list, func() error { return printTickets(cmd, list) })
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
				n, err := rc.Node(cmd.Context(), node)
				if err != nil {
					return err
				}
				args["node_id"] = n.NodeID
			}
			return t.change(cmd, rc, "create", args, func(k *client.Ticket) (did, undo string) {
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
	f.Var(duration.NewValue(&expires, 0), "expires", "nobody can approve it after this `DURATION` (default 1h)")
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
			return t.change(cmd, rc, "comment", map[string]any{"id": k.ID, "text": argv[1]}, func(k *client.Ticket) (did, undo string) {
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
			agent, before := argv[1], assignee(old)
			if agent == "-" {
				agent = ""
			}
			return t.change(cmd, rc, "assign", map[string]any{"id": old.ID, "agent_id": agent}, func(k *client.Ticket) (did, undo string) {
				return fmt.Sprintf("assigned %s to %s", k.ID, assignee(k)), fmt.Sprintf("undo with: agentctl tickets assign %s %s", k.ID, before)
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
		if slices.Contains(old.Allowed, to) {
			return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, nil)
		}
		return exit(exitFailure, "%s is %s and cannot become %s; it can become: %s", old.ID, old.Status, term.SafeLine(to), allowedStatuses(old))
	}
	return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, func(k *client.Ticket) (did, undo string) {
		undo = "a decision is final; ask again with: agentctl tickets create --approval"
		switch {
		case slices.Contains(k.Allowed, old.Status):
			undo = fmt.Sprintf("undo with: agentctl tickets move %s %s", k.ID, old.Status)
		case len(k.Allowed) > 0:
			undo = fmt.Sprintf("take it up again with: agentctl tickets move %s open", k.ID)
		}
		return fmt.Sprintf("%s: %s -> %s", k.ID, old.Status, k.Status), undo
	})
}

// change calls a tool that changes a ticket, and says what it did and how to undo it.
func (t *ticketCmd) change(cmd *cobra.Command, rc *client.Client, verb string, args map[string]any, said func(*client.Ticket) (did, undo string)) error {
	if t.dryRun {
		line, err := json.Marshal(args)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.ErrOrStderr(), "would call tickets.%s %s; nothing was done\n", verb, line)
		return err
	}
	k, err := rc.ChangeTicket(cmd.Context(), verb, args)
	if err != nil {
		return err
	}
	did, undo := said(k)
	if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "%s; %s\n", term.SafeLine(did), term.SafeLine(undo)); err != nil {
		return err
	}
	return t.out.print(cmd, k, func() error {
		if verb != "create" {
			return nil
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(k.ID)) // for scripts
		return err
	})
}

// find gets a ticket by its id or a part of it.
func (t *ticketCmd) find(ctx context.Context, ref string) (*client.Client, *client.Ticket, error) {
	rc, err := t.rf.client()
	if err != nil {
		return nil, nil, err
	}
	k, err := rc.Ticket(ctx, ref)
	return rc, k, err
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
