package main

import (
	"fmt"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"agentctl/manifest"
	"agentctl/term"
)

func newLs() *cobra.Command {
	var rf relayFlags
	var out output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the boards of your tenant, offline ones included",
		Example: "  agentctl ls --token-file agent.token\n  agentctl ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			rc, err := rf.client()
			if err != nil {
				return err
			}
			nodes, err := rc.nodes(cmd.Context())
			if err != nil {
				return err
			}
			// Not slices.SortFunc: one more instance of it is 20 KB of a board's binary.
			sort.Slice(nodes, func(i, j int) bool { return nodes[i].Name < nodes[j].Name })
			if out.format == "ndjson" {
				for _, n := range nodes {
					if err := out.print(cmd, n, nil); err != nil {
						return err
					}
				}
				return nil
			}
			return out.print(cmd, nodes, func() error { return printNodes(cmd, nodes) })
		},
	}
	rf.flags(c)
	out.flags(c)
	return c
}

func printNodes(cmd *cobra.Command, nodes []node) error {
	if len(nodes) == 0 {
		_, err := fmt.Fprintln(cmd.ErrOrStderr(), "no boards yet; mint a token for one with: agentctl token create --class device")
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tNODE\tSTATE\tLAST SEEN\tTOOLS")
	for _, n := range nodes {
		state, seen := "offline", term.Ago(n.LastSeenMS)
		if n.Online {
			state, seen = "online", "now"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", term.SafeLine(n.Name), term.SafeLine(n.NodeID), state, seen, term.SafeLine(strings.Join(verbs(n.Capabilities), " ")))
	}
	return w.Flush()
}

func verbs(caps []manifest.Capability) []string {
	var v []string
	for _, c := range caps {
		for _, verb := range c.Verbs {
			v = append(v, c.CapID+"."+verb)
		}
	}
	return v
}
