//go:build !agentctl_omit_relay

package mcpcmd

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/clientconfig"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// newConnect returns the command connect. It checks the relay and the token before it reads the client's
// file: the client would hide what is wrong with them.
//
// It may be repeated. The same flags change nothing, and others replace the keys that agentctl sets
// (clientconfig.Client.Connect). The diff and the result go to stdout, hints to stderr.
func newConnect() *cobra.Command {
	var entry entryFlags
	var edit fileEdit
	c := &cobra.Command{
		Use:   "connect CLIENT",
		Short: "Add agentctl to an MCP client's configuration",
		Long: `Add agentctl to the configuration file of an MCP client: ` + strings.Join(clientconfig.Names(true), ", ") + `.
The change is shown before it is written; the file's comments and order stay, and what it held
before is kept beside it.

The client then starts 'agentctl mcp', which uses the current context of 'agentctl login', or the
relay that the flags name. No secret is written. --http makes the client call the relay itself; it
then needs a long-lived token in its environment.`,
		Example: `  agentctl mcp connect claude-code
  agentctl mcp connect codex --context lab --yes
  agentctl mcp connect cursor --relay https://relay.example:8460 --token-file ~/agent.token
  agentctl mcp connect gemini --http --relay https://relay.example:8460
  agentctl mcp connect vscode --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := findClient(args[0])
			if err != nil {
				return err
			}
			server, hint, err := entry.server(cmd)
			if err != nil {
				return err
			}
			done, err := edit.apply(cmd, cl, "nothing to change: %s has this entry already\n", func(data []byte) ([]byte, error) {
				return cl.Connect(data, server)
			})
			if err != nil || !done {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "connected %s; to use it, %s; undo with: agentctl mcp disconnect %s%s\n", cl.Title, cl.Restart, cl.Name, cli.GivenFlags(cmd, "file"))
			if hint != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), hint)
			}
			return nil
		},
	}
	entry.addFlags(c)
	edit.addFlags(c)
	return withClient(c, true)
}

// newDisconnect returns the command disconnect. It needs neither a relay nor a context, since the relay may
// be gone. The printed undo makes an entry with default flags; the entry as it was is in the backup.
func newDisconnect() *cobra.Command {
	var edit fileEdit
	c := &cobra.Command{
		Use:     "disconnect CLIENT",
		Short:   "Remove agentctl from an MCP client's configuration",
		Long:    "Undo 'agentctl mcp connect': remove the entry from the client's file and leave the rest as it is.",
		Example: "  agentctl mcp disconnect claude-code",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := findClient(args[0])
			if err != nil {
				return err
			}
			done, err := edit.apply(cmd, cl, "nothing to change: %s has no entry of agentctl\n", cl.Disconnect)
			if err == nil && done {
				fmt.Fprintf(cmd.OutOrStdout(), "disconnected %s; undo with: agentctl mcp connect %s%s\n", cl.Title, cl.Name, cli.GivenFlags(cmd, "file"))
			}
			return err
		},
	}
	edit.addFlags(c)
	return withClient(c, true)
}

// newConfig returns the command config, also for clients whose files agentctl does not edit. It does not
// read the client's file, which may be damaged or on another machine.
func newConfig() *cobra.Command {
	var entry entryFlags
	c := &cobra.Command{
		Use:   "config CLIENT",
		Short: "Print the entry of agentctl for an MCP client's configuration",
		Long: `Print what 'agentctl mcp connect' writes, to be added to a client's file by hand. CLIENT is one of
` + strings.Join(clientconfig.Names(false), ", ") + `.`,
		Example: `  agentctl mcp config zed
  agentctl mcp config goose --context lab
  agentctl mcp config windsurf --http --relay https://relay.example:8460`,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := clientconfig.Find(args[0])
			if err != nil {
				return cli.Errorf(cli.ExitUsage, "%w", err)
			}
			server, hint, err := entry.server(cmd)
			if err != nil {
				return err
			}
			text, err := cl.Snippet(server)
			if err != nil {
				return explainClientFile(cl, err)
			}
			if path, err := cl.Path(clientconfig.ThisSystem()); err == nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "for %s\n", term.SafeLine(path)) // stdout has the entry only
			}
			if hint != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), hint)
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	entry.addFlags(c)
	return withClient(c, false)
}

// withClient makes c a command whose only argument is the name of a client, and completes it. writable
// selects the clients whose files agentctl edits.
func withClient(c *cobra.Command, writable bool) *cobra.Command {
	c.Args = cobra.ExactArgs(1)
	c.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return clientconfig.Names(writable), cobra.ShellCompDirectiveNoFileComp
	}
	return c
}
