package clientcmd

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/term"
)

// printTickets prints a table of tickets. An empty list is no error, and its sentence goes to stderr.
func printTickets(cmd *cobra.Command, list []client.Ticket) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no tickets; open one with: agentctl tickets create TITLE")
		return err
	}
	t := term.NewTable(cmd.OutOrStdout(), "ID", "STATUS", "PRIORITY", "ASSIGNED TO", "CHANGED", "TITLE")
	for _, k := range list {
		t.Row(k.ID, k.Status, k.Priority, assignee(&k), term.Ago(k.UpdatedAt), k.Title)
	}
	return t.Flush()
}

// printTicket prints all of a ticket. Its texts come from boards, agents and people: what could control
// the terminal is escaped.
//
// Times are ages, by this machine's clock; the end of an approval is a time, since somebody has to decide
// before it.
func printTicket(w io.Writer, k *client.Ticket) error {
	row := func(name, value string) { fmt.Fprintf(w, "%-10s %s\n", name, term.SafeLine(value)) }
	row("Ticket", k.ID)
	row("Title", k.Title)
	row("Status", k.Status+" (can become: "+allowedStatuses(k)+")")
	row("Priority", k.Priority)
	if k.NodeID != "" {
		row("Node", k.NodeID)
	}
	row("Assigned", assignee(k))
	row("Created", term.Ago(k.CreatedAt)+" by "+k.CreatedBy)
	row("Changed", term.Ago(k.UpdatedAt))
	if a := k.Approval; a != nil {
		row("Approval", a.Action)
		// Decided by somebody; expired, which is a decision by nobody; or still open.
		switch {
		case a.DecidedBy != "":
			row("Decided", k.Status+" by "+a.DecidedBy+", "+term.Ago(a.DecidedAt))
		case a.DecidedAt != 0:
			row("Decided", "expired without a decision "+term.Ago(a.DecidedAt))
		default:
			row("Expires", time.UnixMilli(a.ExpiresAt).Format(time.DateTime))
		}
	}
	// Texts of several lines are indented, so that none can pass for a row of ours.
	if k.Body != "" {
		fmt.Fprintf(w, "\n%s\n", term.Indent(k.Body))
	}
	for _, c := range k.Comments {
		fmt.Fprintf(w, "\n%s, %s:\n%s\n", term.SafeLine(c.By), term.Ago(c.At), term.Indent(c.Text))
	}
	return nil
}

// assignee is who works on a ticket, or "-" for nobody, as 'tickets assign' takes it.
func assignee(k *client.Ticket) string { return cmp.Or(k.AgentID, "-") }

// allowedStatuses lists the statuses that a ticket can change to; the relay decides them.
func allowedStatuses(k *client.Ticket) string {
	return cmp.Or(strings.Join(k.Allowed, ", "), "nothing")
}
