//go:build !linux

package main

import (
	"context"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/relaycmd"
	"agentctl/relay/mcp/stdio"
)

// addRelayCommands adds the commands that call a relay, and hidden ones in place of those of a board and
// of a relay's machine.
func addRelayCommands(root *cobra.Command) {
	for _, name := range []string{"run", "join", "leave", "status", "snapshot", "watch", "burst", "start", "stop", "doctor", "config"} {
		root.AddCommand(onlyOnLinux(name, "type it on the board, as over ssh; through the board's relay, these work here: agentctl ls, describe, call and history --board"))
	}
	const onServer = "type it on the relay's machine"
	for _, name := range []string{"relay", "keys", "plugin"} {
		root.AddCommand(onlyOnLinux(name, onServer))
	}
	root.AddCommand(onlyOnLinux("demo", "type it on a Linux machine; a container or a virtual machine will do"))
	events := &cobra.Command{Use: "events", Short: "Subscribe to and publish topic events", Long: "Subscribe to and publish topic events of a gateway (docs/events.md)."}
	events.AddCommand(newEventsTail(), newEventsEmit(), onlyOnLinux("serve", onServer), onlyOnLinux("replay", onServer))
	root.AddCommand(relaycmd.NewToken(), relaycmd.NewInvite(), relaycmd.NewNode(), newMCP(), newVerify(), events)
}

// onlyOnLinux is a command that this system does not have.
func onlyOnLinux(name, next string) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              "Not on this system: only on Linux",
		DisableFlagParsing: true,
		Hidden:             true,
		Args:               cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.Errorf(cli.ExitUsage, "%q works on Linux only, not on %s; %s", cmd.CommandPath(), cli.SystemName(), next)
		},
	}
}

// serveLocal would serve the daemon of this machine.
func serveLocal(context.Context, string, *zap.Logger, *stdio.Options) (func(), error) {
	return nil, errLocalNeedsLinux()
}
