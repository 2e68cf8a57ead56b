package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"agentctl/term"
)

func printTickets(cmd *cobra.Command, list []ticket) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no tickets; open one with: agentctl tickets create TITLE")
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSTATUS\tPRIORITY\tASSIGNED TO\tCHANGED\tTITLE")
	for _, k := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", term.SafeLine(k.ID), term.SafeLine(k.Status), term.SafeLine(k.Priority), orNobody(k.AgentID), term.Ago(k.UpdatedAt), term.SafeLine(k.Title))
	}
	return w.Flush()
}

func printTicket(w io.Writer, k *ticket) error {
	row := func(name, value string) { fmt.Fprintf(w, "%-10s %s\n", name, term.SafeLine(value)) }
	row("Ticket", k.ID)
	row("Title", k.Title)
	row("Status", k.Status+" (can become: "+orNothing(k.Allowed)+")")
	row("Priority", k.Priority)
	if k.NodeID != "" {
		row("Node", k.NodeID)
	}
	row("Assigned", orNobody(k.AgentID))
	row("Created", term.Ago(k.CreatedAt)+" by "+k.CreatedBy)
	row("Changed", term.Ago(k.UpdatedAt))
	if a := k.Approval; a != nil {
		row("Approval", a.Action)
		switch {
		case a.DecidedBy != "":
			row("Decided", k.Status+" by "+a.DecidedBy+", "+term.Ago(a.DecidedAt))
		case a.DecidedAt != 0:
			row("Decided", "by nobody, it expired "+term.Ago(a.DecidedAt))
		default:
			row("Expires", time.UnixMilli(a.ExpiresAt).Format(time.DateTime))
		}
	}
	if k.Body != "" {
		fmt.Fprintf(w, "\n%s\n", term.Indent(k.Body))
	}
	for _, c := range k.Comments {
		fmt.Fprintf(w, "\n%s, %s:\n%s\n", term.SafeLine(c.By), term.Ago(c.At), term.Indent(c.Text))
	}
	return nil
}

func orNobody(s string) string {
	if s == "" {
		return "-"
	}
	return term.SafeLine(s)
}

func orNothing(list []string) string {
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, ", ")
}
