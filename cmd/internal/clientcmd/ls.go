package clientcmd

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/term"
)

// NewLs returns the command ls, which lists boards: those of the token's tenant that the relay remembers,
// with what each announced last. The relay filters by tag; the client reads all pages before it prints, so
// that the list can be sorted by name (the relay's order is that of ids).
func NewLs() *cobra.Command {
	var rf cli.RelayFlags
	var out cli.Output
	var tags []string
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the boards of your tenant, including offline ones",
		Long:    "List the boards of your tenant, including offline ones. STATE is online, suspect (linked, but\nsilent for 5 s or more; calls to it fail at once) or offline. \"clone suspected\" means that two\ninstallations use the identity of this board, such as a copied SD card: run agentctl leave on\nthe copy, then agentctl join.",
		Example: "  agentctl ls --token-file agent.token\n  agentctl ls --tag roof --tag north\n  agentctl ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, t := range tags {
				if !manifest.ValidNodeName(t) { // which has the form of a tag
					return cli.Errorf(cli.ExitUsage, "--tag: not a tag: %q (1 to 32 of a-z, 0-9 and -, not starting with -)", t)
				}
			}
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			nodes, err := rc.Nodes(cmd.Context(), tags...)
			if err != nil {
				return err
			}
			// Not slices.SortFunc: one more instance of it is 20 KB of a board's binary.
			sort.Slice(nodes, func(i, j int) bool { return nodes[i].Name < nodes[j].Name })
			return cli.PrintList(&out, cmd, nodes, func() error { return printNodes(cmd, nodes, tags) })
		},
	}
	rf.AddFlags(c)
	out.AddFlags(c)
	c.Flags().StringArrayVar(&tags, "tag", nil, "only boards with this `TAG` (repeatable: with all of them)")
	return c
}

// printNodes prints a table of boards. It has the column TAGS only if a board has one, which keeps it
// narrow for a fleet without tags. As text, an empty list is a sentence on stderr and nothing on stdout,
// with exit code 0: no boards is an answer.
func printNodes(cmd *cobra.Command, nodes []client.Node, tags []string) error {
	switch {
	case len(nodes) == 0 && len(tags) > 0:
		_, err := fmt.Fprintf(cmd.ErrOrStderr(), "no board has the tags %s; see all with: agentctl ls\n", strings.Join(tags, " "))
		return err
	case len(nodes) == 0:
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no boards yet; on the relay's machine type: agentctl invite, and paste its line on the board")
		return err
	}
	tagged := slices.ContainsFunc(nodes, func(n client.Node) bool { return len(n.Tags) > 0 })
	columns := []any{"NAME", "NODE", "STATE", "LAST SEEN"}
	if tagged {
		columns = append(columns, "TAGS")
	}
	t := term.NewTable(cmd.OutOrStdout(), append(columns, "TOOLS")...)
	for _, n := range nodes {
		cells := []any{n.Name, n.NodeID, n.State(), lastSeen(&n)}
		if tagged {
			cells = append(cells, strings.Join(n.Tags, " "))
		}
		t.Row(append(cells, strings.Join(n.Verbs(), " "))...)
	}
	return t.Flush()
}

// lastSeen is "now" for a board that answers. A suspect board is linked but silent, so that for it too
// the age of its last message counts.
func lastSeen(n *client.Node) string {
	if n.Online && !n.Suspect {
		return "now"
	}
	return term.Ago(n.LastSeenMS)
}
