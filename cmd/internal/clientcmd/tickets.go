package clientcmd

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/duration"
)

// The queue belongs to the relay's plugin tickets (docs/tickets.md). These commands are its client for
// people: they add flags, partial ids, --dry-run and an undo. The rules are the plugin's: who may approve,
// which status can follow which, how long a text may be.
//
// A ticket can change between the read and the change of a command. The plugin checks the state when the
// change arrives, and refuses one that no longer fits (exit code 1).

// ticketCmd has the flags that the subcommands share. Each subcommand has one, because each has a separate
// flag set.
type ticketCmd struct {
	relay  cli.RelayFlags
	out    cli.Output
	dryRun bool // of those that change something
}

// NewTickets returns the command tickets with its subcommands. They call the tools tickets.* of the relay,
// which agents use too: the rules of the queue are the relay's, and its refusals say what to do.
func NewTickets() *cobra.Command {
	c := &cobra.Command{
		Use:   "tickets",
		Short: "Manage the fleet's queue of incidents and approvals",
		Long: `The fleet's queue of incidents, tasks and approval requests, for agents and people. ID is a ticket's
id, or a unique beginning or end of it. Changes need a token with the scope tickets:write.`,
	}
	c.AddCommand(newTicketsLs(), newTicketsShow(), newTicketsCreate(), newTicketsComment(), newTicketsAssign(), newTicketsMove(),
		newTicketsDecide("approve", "approved", "Approve the action that a ticket requests"), newTicketsDecide("reject", "rejected", "Reject the action that a ticket requests"))
	return c
}

// addFlags adds the common flags to c and returns it; changes says whether c changes something.
func (t *ticketCmd) addFlags(c *cobra.Command, changes bool) *cobra.Command {
	t.relay.AddFlags(c)
	t.out.AddFlags(c)
	if changes {
		cli.AddDryRunFlag(c, &t.dryRun)
	}
	return c
}

// newTicketsLs returns the command tickets ls.
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
				return cli.Errorf(cli.ExitUsage, "--limit must be at least 1")
			}
			// Without --status all statuses are listed.
			if err := checkWord("--status", "status", status, client.TicketStatuses); status != "" && err != nil {
				return err
			}
			rc, err := t.relay.Client()
			if err != nil {
				return err
			}
			list, err := rc.Tickets(cmd.Context(), status, limit)
			if err != nil {
				return err
			}
			return cli.PrintList(&t.out, cmd, list, func() error { return printTickets(cmd, list) })
		},
	}
	c.Flags().StringVar(&status, "status", "", "only tickets of this `STATUS`: "+orList(client.TicketStatuses))
	c.Flags().IntVar(&limit, "limit", 50, "at most `N` tickets")
	return t.addFlags(c, false)
}

// newTicketsShow returns the command tickets show. Only a single ticket comes with its body and comments.
func newTicketsShow() *cobra.Command {
	var t ticketCmd
	c := &cobra.Command{
		Use:     "show ID",
		Short:   "Show one ticket with its comments",
		Example: "  agentctl tickets show 01JD8Z3K",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, k, err := t.find(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return t.out.Print(cmd, k, func() error { return printTicket(cmd.OutOrStdout(), k) })
		},
	}
	return t.addFlags(c, false)
}

// newTicketsCreate returns the command tickets create. An approval request is a ticket with an action: it
// waits as pending until another person decides, or it expires.
func newTicketsCreate() *cobra.Command {
	var t ticketCmd
	var req client.TicketRequest
	var bodyFile, node, approval string
	var expires time.Duration
	c := &cobra.Command{
		Use:   "create TITLE",
		Short: "Open a ticket, or ask for an approval",
		Example: `  agentctl tickets create "Disk almost full" --node attic --priority high
  journalctl -u foo | tail -50 | agentctl tickets create "foo crashes" --body-file -
  agentctl tickets create "Reboot attic" --approval "reboot attic now" --expires 15m`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, argv []string) (err error) {
			req.Title = argv[0]
			switch {
			case req.Body != "" && bodyFile != "":
				return cli.Errorf(cli.ExitUsage, "give --body or --body-file, not both")
			case expires != 0 && approval == "":
				return cli.Errorf(cli.ExitUsage, "--expires goes with --approval")
			case approval != "":
				// A part of a second counts as one: rounded down, 500ms would be 0, for which the relay takes an hour.
				req.Approval = &client.ApprovalRequest{Action: approval, ExpiresInS: int64((expires + time.Second - 1) / time.Second)}
			}
			if err := checkWord("--priority", "priority", req.Priority, client.TicketPriorities); req.Priority != "" && err != nil {
				return err
			}
			if bodyFile != "" {
				if req.Body, err = readBody(cmd, bodyFile); err != nil {
					return err
				}
			}
			rc, err := t.relay.Client()
			if err != nil {
				return err
			}
			// The tool takes ids only: a name may be given to another board later.
			if node != "" {
				n, err := rc.Node(cmd.Context(), node)
				if err != nil {
					return err
				}
				req.NodeID = n.NodeID
			}
			return t.change(cmd, rc, "create", req, func(k *client.Ticket) (did, undo string) {
				// A ticket cannot be deleted. An approval request is withdrawn by its author with reject;
				// it cannot be closed before it is decided.
				undo = "close it with: " + nextCommand(cmd, "move", k.ID, "closed")
				if k.Approval != nil {
					undo = "withdraw it with: " + nextCommand(cmd, "reject", k.ID)
				}
				return "created " + k.ID, undo
			})
		},
	}
	f := c.Flags()
	f.StringVar(&req.Body, "body", "", "`TEXT` with all the details")
	f.StringVar(&bodyFile, "body-file", "", "read the body from `FILE`; - is stdin")
	f.StringVar(&node, "node", "", "the `NODE` in question: id, prefix of it, or name")
	f.StringVar(&req.Priority, "priority", "", "`PRIORITY`: "+orList(client.TicketPriorities)+" (default normal)")
	f.StringVar(&approval, "approval", "", "request an approval of this `ACTION`")
	f.Var(duration.NewValue(&expires, 0), "expires", "the approval request expires after `DURATION` (default 1h)")
	f.StringVar(&req.Key, "idempotency-key", "", "a `WORD`; commands with the same one create one ticket")
	return t.addFlags(c, true)
}

// checkWord refuses a word that is not one of words. The relay would too, but as a failed call and not
// as a mistake in the command (exit code 2).
//
// The words are those that this version knows. The command call can pass those of a newer relay.
func checkWord(where, noun, word string, words []string) error {
	if slices.Contains(words, word) {
		return nil
	}
	return cli.Errorf(cli.ExitUsage, "%s: not a %s: %.40q (use %s)", where, noun, word, orList(words))
}

// orList joins words: "a, b or c".
func orList(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// find gets a ticket by its id or a part of it, and the client for what is to be done with it. For a part
// it reads the ids of the whole queue: fewer than 4 characters are refused, and a part of two ids is
// ambiguous (client.RefError).
func (t *ticketCmd) find(ctx context.Context, ref string) (*client.Client, *client.Ticket, error) {
	rc, err := t.relay.Client()
	if err != nil {
		return nil, nil, err
	}
	k, err := rc.Ticket(ctx, ref)
	return rc, k, err
}

// maxBodyFile is how much of a body is read, bytes: far more than a relay takes, so that the relay's
// refusal names its bound, and little enough for memory when the file is a mistake.
const maxBodyFile = 1 << 20

// readBody reads a ticket's body from a file or, for -, from stdin. A log may have bytes that are not
// UTF-8, which JSON cannot carry: they become question marks.
func readBody(cmd *cobra.Command, path string) (string, error) {
	r, err := openInput(cmd, path)
	if err != nil {
		return "", cli.Errorf(cli.ExitFailure, "read --body-file: %w", err)
	}
	defer func() { _ = r.Close() }()
	b, err := io.ReadAll(io.LimitReader(r, maxBodyFile))
	if err != nil {
		return "", cli.Errorf(cli.ExitFailure, "read --body-file: %w", err)
	}
	return strings.ToValidUTF8(string(b), "?"), nil
}
