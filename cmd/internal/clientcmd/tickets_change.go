package clientcmd

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// newTicketsComment returns the command tickets comment. It reads the ticket first, as every change of
// one does, because ID may be a part of an id.
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
	return t.addFlags(c, true)
}

// newTicketsAssign returns the command tickets assign. "-" stands for nobody, so that a command can undo the
// first assignment too.
func newTicketsAssign() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "assign ID AGENT",
		Short:   "Assign a ticket to an agent or a person; - assigns it to nobody",
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
				return fmt.Sprintf("assigned %s to %s", k.ID, assignee(k)), "undo with: " + nextCommand(cmd, "assign", k.ID, before)
			})
		},
	}
	return t.addFlags(c, true)
}

// newTicketsMove returns the command tickets move. A word that is no status is a usage error; a status that
// this ticket cannot change to is the relay's refusal, exit code 1.
func newTicketsMove() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "move ID STATUS",
		Short:   "Change a ticket's status",
		Long:    "Change a ticket's status to " + orList(client.TicketStatuses) + ".\n'agentctl tickets show ID' lists those that it can change to.",
		Example: "  agentctl tickets move 01JD8Z3K in_progress\n  agentctl tickets move 01JD8Z3K resolved",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, argv []string) error {
			if err := checkWord("STATUS", "status", argv[1], client.TicketStatuses); err != nil {
				return err
			}
			return t.move(cmd, argv[0], argv[1])
		},
	}
	return t.addFlags(c, true)
}

// newTicketsDecide returns the command tickets approve or reject, which moves a ticket to a status. They
// are separate commands beside move, so that a decision is not made by a typing error in STATUS.
func newTicketsDecide(verb, status, about string) *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     verb + " ID",
		Short:   about,
		Long:    about + ". The person who asked for an approval cannot give it, but can withdraw it with reject.",
		Example: "  agentctl tickets ls --status pending\n  agentctl tickets " + verb + " 01JD8Z3K",
		Args:    cobra.ExactArgs(1),
		RunE:    func(cmd *cobra.Command, argv []string) error { return t.move(cmd, argv[0], status) },
	}
	return t.addFlags(c, true)
}

// move changes a ticket's status. It reads the ticket first: --dry-run can then show whether the change is
// allowed, and the text of undo needs the status before.
//
// A dry run refuses what the relay would refuse for the status alone. What depends on the caller, such as
// an approval by the one who asked, it does not know.
func (t *ticketCmd) move(cmd *cobra.Command, ref, to string) error {
	rc, old, err := t.find(cmd.Context(), ref)
	if err != nil {
		return err
	}
	if t.dryRun {
		if slices.Contains(old.Allowed, to) {
			return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, nil)
		}
		return cli.Errorf(cli.ExitFailure, "%s is %s and cannot become %s; it can become: %s", old.ID, old.Status, term.SafeLine(to), allowedStatuses(old))
	}
	return t.change(cmd, rc, "transition", map[string]any{"id": old.ID, "to": to}, func(k *client.Ticket) (did, undo string) {
		// Allowed is what can follow now: nothing after a decision; else the status before, or a way back
		// that begins with open.
		undo = "a decision is final; ask again with: " + nextCommand(cmd, "create", "TITLE", "--approval", "ACTION")
		switch {
		case slices.Contains(k.Allowed, old.Status):
			undo = "undo with: " + nextCommand(cmd, "move", k.ID, old.Status)
		case len(k.Allowed) > 0:
			undo = "take it up again with: " + nextCommand(cmd, "move", k.ID, "open")
		}
		return fmt.Sprintf("%s: %s -> %s", k.ID, old.Status, k.Status), undo
	})
}

// nextCommand is a command of this group for the same relay, to print as the next step. Its words come
// from the relay too, and are quoted for the shell that they are pasted into; control characters are
// replaced when it is printed.
func nextCommand(cmd *cobra.Command, words ...string) string {
	line := "agentctl tickets"
	for _, w := range words {
		line += " " + cli.ShellQuote(w)
	}
	return line + cli.RelayHint(cmd)
}

// change calls the tool tickets.<verb> and prints what it did and how to undo it, as describe says.
// That goes to stderr, and the ticket with -o to stdout. Without -o stdout has only the id of a new
// ticket: id=$(agentctl tickets create TITLE).
//
// With --dry-run it prints the call, and does not use describe. Else describe gets the ticket as it is after
// the change.
func (t *ticketCmd) change(cmd *cobra.Command, rc *client.Client, verb string, args any, describe func(*client.Ticket) (did, undo string)) error {
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
	did, undo := describe(k)
	if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "%s; %s\n", term.SafeLine(did), term.SafeLine(undo)); err != nil {
		return err
	}
	return t.out.Print(cmd, k, func() error {
		if verb != "create" {
			return nil
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(k.ID))
		return err
	})
}
