//go:build !agentctl_omit_relay

package mcpcmd

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/clientconfig"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// fileEdit has the flags of commands that change an MCP client's file.
type fileEdit struct {
	file        string // "" for where the client has it
	yes, dryRun bool
}

func (e *fileEdit) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&e.file, "file", "", "`PATH` of the client's file (default: where the client has it)")
	f.BoolVar(&e.yes, "yes", false, "write without asking")
	f.BoolVar(&e.dryRun, "dry-run", false, "show the change, and write nothing")
}

// newConnect returns the command connect.
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
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeClients(true),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, f, err := edit.open(args[0])
			if err != nil {
				return err
			}
			server, hint, err := entry.server(cmd)
			if err != nil {
				return err
			}
			after, err := cl.Connect(f.Data, server)
			if err != nil {
				return explainClientFile(cl, &clientconfig.FileError{Path: f.Path, Err: err})
			}
			done, err := edit.write(cmd, cl, f, after, "nothing to change: %s has this entry already\n")
			if err != nil || !done {
				return err
			}
			again := ""
			if edit.file != "" {
				again = " --file " + cli.ShellQuote(edit.file)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "connected %s; to use it, %s; undo with: agentctl mcp disconnect %s%s\n", cl.Title, cl.Restart, cl.Name, again)
			if hint != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), hint)
			}
			return nil
		},
	}
	entry.addFlags(c)
	edit.addFlags(c)
	return c
}

// newDisconnect returns the command disconnect.
func newDisconnect() *cobra.Command {
	var edit fileEdit
	c := &cobra.Command{
		Use:               "disconnect CLIENT",
		Short:             "Remove agentctl from an MCP client's configuration",
		Long:              "Undo 'agentctl mcp connect': remove the entry from the client's file and leave the rest as it is.",
		Example:           "  agentctl mcp disconnect claude-code",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeClients(true),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, f, err := edit.open(args[0])
			if err != nil {
				return err
			}
			after, err := cl.Disconnect(f.Data)
			if err != nil {
				return explainClientFile(cl, &clientconfig.FileError{Path: f.Path, Err: err})
			}
			done, err := edit.write(cmd, cl, f, after, "nothing to change: %s has no entry of agentctl\n")
			if err == nil && done {
				fmt.Fprintf(cmd.OutOrStdout(), "disconnected %s; undo with: agentctl mcp connect %s\n", cl.Title, cl.Name)
			}
			return err
		},
	}
	edit.addFlags(c)
	return c
}

// newConfig returns the command config. It knows also the clients whose files agentctl does not edit.
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
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeClients(false),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := clientconfig.Find(args[0])
			if err != nil {
				return &cli.ExitError{Code: cli.ExitUsage, Err: err}
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
				fmt.Fprintf(cmd.ErrOrStderr(), "for %s\n", term.SafeLine(path))
			}
			if hint != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), hint)
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	entry.addFlags(c)
	return c
}

// open finds the client and reads its file.
func (e *fileEdit) open(name string) (*clientconfig.Client, *clientconfig.File, error) {
	cl, err := clientconfig.Find(name)
	if err != nil {
		return nil, nil, &cli.ExitError{Code: cli.ExitUsage, Err: err}
	}
	if !cl.Writable {
		return nil, nil, cli.Errorf(cli.ExitUsage, "agentctl does not edit the file of %s; print the entry with: agentctl mcp config %s", cl.Title, cl.Name)
	}
	path := e.file
	if path == "" {
		if path, err = cl.Path(clientconfig.ThisSystem()); err != nil {
			return nil, nil, fmt.Errorf("%w; name the file with --file", err)
		}
	}
	f, err := clientconfig.Read(path)
	if err != nil {
		return nil, nil, explainClientFile(cl, err)
	}
	return cl, f, nil
}

// write shows the change, asks and writes the file. same is the format of what to print if there is no
// change, with the path. done is false if nothing was written.
func (e *fileEdit) write(cmd *cobra.Command, cl *clientconfig.Client, f *clientconfig.File, after []byte, same string) (done bool, err error) {
	w := cmd.OutOrStdout()
	if bytes.Equal(after, f.Data) {
		_, err := fmt.Fprintf(w, same, f.Path)
		return false, err
	}
	if _, err := fmt.Fprint(w, term.SafeText(f.Diff(after))); err != nil {
		return false, err
	}
	if e.dryRun {
		_, err := fmt.Fprintf(w, "would write %s\n", f.Path)
		return false, err
	}
	if !e.yes {
		if err := cli.Confirm(cmd, "Write "+f.Path+"?"); err != nil {
			return false, err
		}
	}
	if err := f.Write(after); err != nil {
		return false, explainClientFile(cl, err)
	}
	if f.IsNew {
		_, err = fmt.Fprintf(w, "wrote %s, which is new\n", f.Path)
	} else {
		_, err = fmt.Fprintf(w, "wrote %s; what it held before is in %s\n", f.Path, f.BackupPath())
	}
	return true, err
}

// explainClientFile adds the next step to an error about a client's file. Each text says that the file is
// unchanged: people fear for their configuration first.
func explainClientFile(cl *clientconfig.Client, err error) error {
	path := ""
	if fe := new(clientconfig.FileError); errors.As(err, &fe) {
		path = fe.Path
	}
	switch {
	case errors.Is(err, clientconfig.ErrNoHTTP):
		return cli.Errorf(cli.ExitUsage, "%s cannot take the token from its environment, and agentctl writes no token into a file; leave --http", cl.Title)
	case errors.Is(err, clientconfig.ErrSyntax), errors.Is(err, clientconfig.ErrShape), errors.Is(err, clientconfig.ErrTooLarge), errors.Is(err, clientconfig.ErrNotRegular):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Repair the file, or add by hand what this prints: agentctl mcp config %s", err, cl.Name)
	case errors.Is(err, clientconfig.ErrReadOnly):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Make the file writable: chmod u+w %s", err, cli.ShellQuote(path))
	case errors.Is(err, clientconfig.ErrChanged):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Close %s, and type the command again", err, cl.Title)
	case errors.Is(err, fs.ErrPermission):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Run this as the user of the client, or name another file with --file", err)
	}
	return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed", err)
}

// completeClients completes the name of a client; writable selects those whose files agentctl edits.
func completeClients(writable bool) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return clientconfig.Names(writable), cobra.ShellCompDirectiveNoFileComp
	}
}
