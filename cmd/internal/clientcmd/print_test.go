package clientcmd

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/manifest"
)

// hostile is a text that would act on a terminal if it were printed as it is: it renames the window,
// changes the color, clears the screen and reverses what a person reads. Its last words are harmless.
const hostile = "\x1b]0;x\x07\x1b[31m \u009b2J \u202e\u2066 café"

// Whatever a relay, a board or an agent wrote into a node or a ticket, it is shown and does not act on the
// terminal of the person who reads it.
func TestPrintedTextIsHarmless(t *testing.T) {
	t.Parallel()
	node := client.Node{NodeID: hostile, NodeAttributes: client.NodeAttributes{Name: hostile, Tags: []string{hostile}, Description: hostile},
		Capabilities: []manifest.Capability{{CapID: hostile, Verbs: []string{hostile}}}}
	ticket := client.Ticket{ID: hostile, Title: hostile, Body: hostile, Status: hostile, Priority: hostile, NodeID: hostile, AgentID: hostile,
		CreatedBy: hostile, Allowed: []string{hostile}, Comments: []client.TicketComment{{By: hostile, Text: hostile}}}
	for name, show := range map[string]func(cmd *cobra.Command, w io.Writer) error{
		"ls":           func(cmd *cobra.Command, _ io.Writer) error { return printNodes(cmd, []client.Node{node}, nil) },
		"describe":     func(cmd *cobra.Command, _ io.Writer) error { return describeNode(cmd, &node) },
		"tickets ls":   func(cmd *cobra.Command, _ io.Writer) error { return printTickets(cmd, []client.Ticket{ticket}) },
		"tickets show": func(_ *cobra.Command, w io.Writer) error { return printTicket(w, &ticket) },
	} {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		if err := show(cmd, &out); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := out.String(); strings.ContainsAny(got, "\x1b\x07\u009b\u202e\u2066") || !strings.Contains(got, "café") {
			t.Errorf("%s: printed %q", name, got)
		}
	}
}
