//go:build !linux

package main

import (
	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/clientcmd"
	"agentctl/cmd/internal/eventscmd"
	"agentctl/cmd/internal/mcpcmd"
	"agentctl/cmd/internal/relaycmd"
)

// relayCommands returns the commands that call a relay, and hidden ones in place of those of a board and
// of a relay's machine.
func relayCommands() map[string]func() *cobra.Command {
	const onServer = "type it on the relay's machine"
	all := map[string]func() *cobra.Command{
		"token": relaycmd.NewToken, "invite": relaycmd.NewInvite, "node": relaycmd.NewNode, "mcp": mcpcmd.New, "verify": clientcmd.NewVerify,
		"events": func() *cobra.Command {
			return eventscmd.NewClient(func(name string) *cobra.Command { return onlyOnLinux(name, onServer) })
		},
	}
	hide := func(next string, names ...string) {
		for _, name := range names {
			all[name] = func() *cobra.Command { return onlyOnLinux(name, next) }
		}
	}
	hide("type it on the board, as over ssh; through the board's relay, these work here: agentctl ls, describe, call and history --board",
		"run", "join", "leave", "status", "snapshot", "watch", "burst", "start", "stop", "doctor", "config")
	hide(onServer, "relay", "keys", "plugin")
	hide("type it on a Linux machine; a container or a virtual machine will do", "demo")
	return all
}

// onlyOnLinux makes a hidden command that fails; next says on which machine it works. The exit code is that
// of usage, since nothing that is installed on this machine could make the line work.
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
