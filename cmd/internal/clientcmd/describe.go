package clientcmd

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// NewDescribe returns the command describe, which prints one board: what 'ls -o json' has of it, as rows.
func NewDescribe() *cobra.Command {
	var rf cli.RelayFlags
	var out cli.Output
	c := &cobra.Command{
		Use:     "describe NODE",
		Short:   "Print what the relay knows about a board",
		Long:    "Print what the relay knows about a board. NODE is its id, its name or a unique prefix of its id.\nTo set a description: agentctl node describe.",
		Example: "  agentctl describe attic\n  agentctl describe 01hzx9 -o json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			n, err := rc.Node(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return out.Print(cmd, n, func() error { return describeNode(cmd, n) })
		},
	}
	rf.AddFlags(c)
	out.AddFlags(c)
	return c
}

// describeNode prints a board, a line for each attribute that is set. A name that the board proposed is
// marked: no operator has confirmed it (docs/glossary.md, proposed name).
func describeNode(cmd *cobra.Command, n *client.Node) error {
	name := n.Name
	if !n.NameSet {
		name += " (proposed by the board; set one with: agentctl node rename)"
	}
	for _, row := range [][2]string{
		{"Name", name}, {"Node", n.NodeID}, {"State", n.State()}, {"Last seen", lastSeen(n)}, {"Tags", strings.Join(n.Tags, " ")},
		{"Description", n.Description}, {"Tools", strings.Join(n.Verbs(), " ")},
	} {
		if row[1] != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "%-12s %s\n", row[0], term.SafeLine(row[1]))
		}
	}
	return nil
}
