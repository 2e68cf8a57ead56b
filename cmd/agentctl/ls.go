package main

import (
	"fmt"
	"sort"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/term"
)

func newLs() *cobra.Command {
	var rf relayFlags
	var out output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the boards of your tenant, including offline ones",
		Example: "  agentctl ls --token-file agent.token\n  agentctl ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			rc, err := rf.client()
			if err != nil {
				return err
			}
			nodes, err := rc.Nodes(cmd.Context())
			if err != nil {
				return err
			}
			// Not slices.SortFunc: one more instance of it is 20 KB of a board's binary.
			sort.Slice(nodes, func(i, j int) bool { return nodes[i].Name < nodes[j].Name })
			return printList(&out, cmd, nodes, func() error { return printNodes(cmd, nodes) })
		},
	}
	rf.flags(c)
	out.flags(c)
	return c
}

func printNodes(cmd *cobra.Command, nodes []client.Node) error {
	if len(nodes) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no boards yet; mint a token for one with: agentctl token create --class device")
		return err
	}
	t := term.NewTable(cmd.OutOrStdout(), "NAME", "NODE", "STATE", "LAST SEEN", "TOOLS")
	for _, n := range nodes {
		seen := term.Ago(n.LastSeenMS)
		if n.Online {
			seen = "now"
		}
		t.Row(n.Name, n.NodeID, n.State(), seen, strings.Join(n.Verbs(), " "))
	}
	return t.Flush()
}
