package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"
)

func printTickets(cmd *cobra.Command, list []ticket) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no tickets; open one with: agentctl tickets create TITLE")
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSTATUS\tPRIORITY\tASSIGNED TO\tCHANGED\tTITLE")
	for _, k := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", plain(k.ID), plain(k.Status), plain(k.Priority), orNobody(k.AgentID), ago(k.UpdatedAt), plain(k.Title))
	}
	return w.Flush()
}

func printTicket(w io.Writer, k *ticket) error {
	row := func(name, value string) { fmt.Fprintf(w, "%-10s %s\n", name, plain(value)) }
	row("Ticket", k.ID)
	row("Title", k.Title)
	row("Status", k.Status+" (can become: "+orNothing(k.Allowed)+")")
	row("Priority", k.Priority)
	if k.NodeID != "" {
		row("Node", k.NodeID)
	}
	row("Assigned", orNobody(k.AgentID))
	row("Created", ago(k.CreatedAt)+" by "+k.CreatedBy)
	row("Changed", ago(k.UpdatedAt))
	if a := k.Approval; a != nil {
		row("Approval", a.Action)
		switch {
		case a.DecidedBy != "":
			row("Decided", k.Status+" by "+a.DecidedBy+", "+ago(a.DecidedAt))
		case a.DecidedAt != 0:
			row("Decided", "by nobody, it expired "+ago(a.DecidedAt))
		default:
			row("Expires", time.UnixMilli(a.ExpiresAt).Format(time.DateTime))
		}
	}
	if k.Body != "" {
		fmt.Fprintf(w, "\n%s\n", indent(k.Body))
	}
	for _, c := range k.Comments {
		fmt.Fprintf(w, "\n%s, %s:\n%s\n", plain(c.By), ago(c.At), indent(c.Text))
	}
	return nil
}

// plain is a text of somebody else in one line, without what would steer a terminal.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) { // no control characters, and none that turn the writing round
			return r
		}
		return '?'
	}, s)
}

// plainLines is plain for a text of several lines.
func plainLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = plain(strings.ReplaceAll(lines[i], "\t", "    "))
	}
	return strings.Join(lines, "\n")
}

// indent is plainLines for a text of several lines.
func indent(s string) string {
	s = strings.ReplaceAll(strings.TrimRight(s, "\r\n"), "\r\n", "\n")
	return "  " + strings.ReplaceAll(plainLines(s), "\n", "\n  ")
}

func orNobody(s string) string {
	if s == "" {
		return "-"
	}
	return plain(s)
}

func orNothing(list []string) string {
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, ", ")
}
