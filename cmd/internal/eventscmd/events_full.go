//go:build linux && !agentctl_omit_relay

package eventscmd

import "github.com/spf13/cobra"

// New returns the commands of a build with a relay. NewClient has those of the others.
func New() *cobra.Command {
	c := &cobra.Command{
		Use:   "events",
		Short: "Subscribe to, publish and serve topic events; read the event log",
		Long: `Subscribe to, publish and serve topic events (docs/events.md), and read the relay's event log: the
history of boards, agents and tickets.`,
	}
	c.AddCommand(newTail(), newEmit(), newServe(), newReplay())
	return c
}
