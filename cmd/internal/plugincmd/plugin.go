//go:build linux

// Package plugincmd has the commands for a relay's plugins: it makes a plugin of an MCP server, checks
// a manifest, and loads, replaces and unloads plugins of a relay that runs.
//
// 'plugin adopt', 'validate' and 'serve' work on the files of this machine; all others call the
// relay's control plane over HTTP.
//
// # Who runs them, and what they need
//
//	adopt              on the relay's machine, as root or as the relay's user: it writes into the plugin
//	                   directory; with a token of an operator it loads the plugin as well
//	validate           anywhere, without a relay: in the build of a plugin
//	serve              systemd, for a plugin that is a service
//	ls load reload     anywhere, with a token that has kernel:admin, which the class operator has
//	unload show
//	allow disallow
//
// # Output and exit codes
//
// What a command found or did goes to stdout, progress and errors to stderr. Commands that read have -o;
// those that change something have --dry-run, with which the relay is asked for nothing or only read. A
// change prints the command that undoes it, or one that shows it.
//
// The exit code is 2 for a wrong argument, 3 if no relay answers, 4 if the token may not do this, 7 if the
// relay does not answer in time, else 1: for an invalid plugin.json, for instance, with a line for each
// problem. Ctrl-C ends the request to the relay, or the server that is being adopted, with exit code 1.
//
// # Files
//
//	plugin.go          the commands that call the control plane, but for those in allow.go; validate
//	allow.go           show, allow, disallow: what a plugin may do beyond answering calls
//	adopt.go           adopt: its flags and its steps
//	adopt_install.go   adopt: the command that is written, the installation of a package, writing, loading
//	adopt_report.go    adopt: what it prints
//	serve.go           the main process of agentctl-relay-plugin@.service
package plugincmd

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay"
	"agentctl/term"
)

// New returns the command plugin with its subcommands.
func New() *cobra.Command {
	c := &cobra.Command{
		Use:   "plugin",
		Short: "Check, list, load, reload and unload the relay's plugins",
		Long: `Manage the relay's plugins. Your own plugin is a folder in the relay's plugin directory with
a manifest, plugin.json, and an executable, run, that speaks MCP over stdin and stdout;
docs/kernel.md shows one.

ls, load, reload and unload need a token with the scope kernel:admin:
  agentctl token create --class operator`,
	}
	c.AddCommand(newPluginAdopt(), newPluginValidate(), newPluginLs(), newPluginLoad(), newPluginReload(), newPluginUnload(), newPluginShow(), newPluginAllow(), newPluginDisallow(), newPluginServe())
	return c
}

// newPluginValidate returns the command plugin validate. It needs no relay, for use in a build. It makes the
// checks of the file that a relay makes when it loads the plugin, schemas included. Owners, the executable
// and the sandbox are not checked: they depend on the relay's machine.
func newPluginValidate() *cobra.Command {
	return &cobra.Command{ // without --json: the exit code is the answer
		Use:     "validate FILE",
		Short:   "Check a plugin.json",
		Example: "  agentctl plugin validate plugins/notes/plugin.json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := relay.ReadPluginManifest(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is good: plugin %s %s, %d tools, %d resources\n", args[0], m.Name, m.Version, len(m.Tools), len(m.Resources))
			return err
		},
	}
}

// newPluginLs returns the command plugin ls. Connected boards are in the list: each is a plugin of the kernel.
// With -o json it prints the list as the relay answered it, with counters that the table leaves out.
func newPluginLs() *cobra.Command {
	var rf cli.RelayFlags
	var out cli.Output
	c := &cobra.Command{
		Use:   "ls",
		Short: "List the loaded plugins",
		Long: `List the loaded plugins. STATE is

  loaded      it serves calls
  down        its program has ended or was killed because it did not answer, and is started again
  open        calls are refused for a while after repeated failures
  half_open   one call is let through as a test

FAILURES counts how often the program ended or did not start, LAST ERROR says why it did the last time.
Lines below the table say which tools of an adopted server are withdrawn, and why.`,
		Example: "  agentctl plugin ls --token-file admin.token",
		RunE: func(cmd *cobra.Command, _ []string) error {
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			plugins, err := rc.Plugins(cmd.Context())
			if err != nil {
				return err
			}
			return out.Print(cmd, plugins, func() error {
				// LAST ERROR and the notes may quote a plugin; the table makes its cells safe.
				t := term.NewTable(cmd.OutOrStdout(), "PLUGIN", "VERSION", "STATE", "TOOLS", "RESOURCES", "CALLS", "ERRORS", "SANDBOX", "FAILURES", "LAST ERROR")
				for _, p := range plugins {
					t.Row(p.Name, p.Version, p.State, p.Tools, p.Resources, p.Calls, p.Errors, cmp.Or(p.Sandbox, "-"), p.Failures, cmp.Or(p.LastError, "-"))
				}
				if err := t.Flush(); err != nil {
					return err
				}
				for _, p := range plugins {
					for _, note := range p.Notes {
						if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", p.Name, term.SafeLine(note)); err != nil {
							return err
						}
					}
				}
				return nil
			})
		},
	}
	rf.AddFlags(c)
	out.AddFlags(c)
	return c
}

// newPluginLoad returns the command plugin load. It lasts until the relay stops. The relay answers when
// the program serves what its manifest declares, or with the reason why it does not; after a failure nothing
// of the plugin runs. The folder is on the relay's machine, not on this one.
func newPluginLoad() *cobra.Command {
	return newPluginChange(pluginChange{
		verb: "load",
		cmd: cobra.Command{
			Use:   "load NAME",
			Short: "Start a plugin from the relay's plugin directory",
			Long: `Start a plugin from the relay's plugin directory and offer its tools until it is unloaded or the
relay stops. 'agentctl relay --plugin NAME' loads it whenever the relay starts.

The plugin cannot reach the relay's files: it runs in a sandbox, or as a separate service if it has
a socket (systemctl enable --now agentctl-relay-plugin@NAME.socket). 'agentctl plugin ls' shows which.`,
			Example: "  agentctl plugin load notes --token-file admin.token",
		},
		call: (*client.Client).LoadPlugin,
		next: func(name string) string { return "undo it with: agentctl plugin unload " + name },
	})
}

// newPluginReload returns the command plugin reload. It has no undo: the folder has the new version only.
// A failure leaves the old version as it is, so the command may be repeated after each correction.
func newPluginReload() *cobra.Command {
	return newPluginChange(pluginChange{
		verb: "reload",
		cmd: cobra.Command{
			Use:   "reload NAME",
			Short: "Replace a plugin by the version in its folder, without a call that fails",
			Long: `Start the version of a plugin that its folder has now, beside the one that runs. When it has answered
the handshake and serves what plugin.json declares, it takes over in one step: no call fails, and
subscriptions go on. The old one ends after its calls in flight, 6 s later at the latest.

If the new version fails a check, the old one stays, and the error says why.

To reload all plugins whose manifest or program has changed, send SIGHUP to the relay
(systemctl reload agentctl-relay).`,
			Example: "  agentctl plugin reload notes --token-file admin.token",
		},
		call: (*client.Client).ReloadPlugin,
		next: func(string) string { return "see it with: agentctl plugin ls" },
	})
}

// newPluginUnload returns the command plugin unload, which waits for the calls in flight. When the relay
// answers, the tools are gone; the process ends soon after. With @VERSION it does nothing to another version,
// such as one that has just replaced the named one.
func newPluginUnload() *cobra.Command {
	return newPluginChange(pluginChange{
		verb: "unload",
		cmd: cobra.Command{
			Use:     "unload NAME[@VERSION]",
			Short:   "Remove a plugin's tools and stop its process after its calls in flight",
			Example: "  agentctl plugin unload notes@1.0.0 --token-file admin.token",
		},
		call: (*client.Client).UnloadPlugin,
		next: func(name string) string {
			name, _, _ = strings.Cut(name, "@") // load takes the version that the folder has
			return "load it again with: agentctl plugin load " + name
		},
	})
}

// pluginChange is a command that loads, reloads or unloads a plugin. They differ in the request and in the
// next step that is printed; the text of next ends with a command, to which the flags of the relay are added.
// verb must be regular: "would load" and "loaded" are made of it.
type pluginChange struct {
	verb string
	cmd  cobra.Command
	call func(c *client.Client, ctx context.Context, name string) error
	next func(name string) string
}

// newPluginChange returns the command of p. --dry-run does not ask the relay, so it succeeds for a name that
// no plugin has.
func newPluginChange(p pluginChange) *cobra.Command {
	var rf cli.RelayFlags
	var dryRun bool
	p.cmd.Args = cobra.ExactArgs(1)
	p.cmd.RunE = func(cmd *cobra.Command, args []string) error {
		name := args[0]
		if dryRun {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "would %s plugin %s\n", p.verb, name)
			return err
		}
		rc, err := rf.Client()
		if err != nil {
			return err
		}
		if err := p.call(rc, cmd.Context(), name); err != nil {
			return err
		}
		// The next step needs the flags that name the relay and the token; it gets those of the environment
		// or the context by itself.
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%sed plugin %s; %s%s\n", p.verb, name, p.next(name), cli.RelayHint(cmd))
		return err
	}
	rf.AddFlags(&p.cmd)
	cli.AddDryRunFlag(&p.cmd, &dryRun)
	return &p.cmd
}
