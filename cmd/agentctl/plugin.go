//go:build !agentctl_omit_relay

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"agentctl/relay/kernel"
	"agentctl/relay/plugins/process"
)

func newPlugin() *cobra.Command {
	c := &cobra.Command{
		Use:   "plugin",
		Short: "The relay's plugins: check, list, load, unload",
		Long: `The relay's plugins. A plugin of your own is a folder of the relay's plugin directory
with a manifest plugin.json and an executable run that speaks MCP over stdin and stdout;
docs/kernel.md shows one.

ls, load and unload need a token with the scope kernel:admin:
  agentctl token create --class admin`,
	}
	c.AddCommand(newPluginValidate(), newPluginLs(), newPluginLoad(), newPluginUnload())
	return c
}

func newPluginValidate() *cobra.Command {
	return &cobra.Command{
		Use:     "validate FILE",
		Short:   "Check a plugin.json",
		Example: "  agentctl plugin validate plugins/notes/plugin.json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			raw, err := os.ReadFile(args[0])
			if err != nil {
				return exit(exitFailure, "%w", err)
			}
			m, err := process.Manifest(raw)
			if err != nil {
				return exit(exitFailure, "%s: %w", args[0], err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is good: plugin %s %s, %d tools, %d resources\n", args[0], m.Name, m.Version, len(m.Tools), len(m.Resources))
			return err
		},
	}
}

func newPluginLs() *cobra.Command {
	var rf relayFlags
	var out output
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the loaded plugins",
		Example: "  agentctl plugin ls --token-file admin.token",
		RunE: func(cmd *cobra.Command, _ []string) error {
			rc, err := rf.client()
			if err != nil {
				return err
			}
			plugins, err := loadedPlugins(cmd.Context(), rc)
			if err != nil {
				return err
			}
			return out.print(cmd, plugins, func() error {
				w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				fmt.Fprintln(w, "PLUGIN\tVERSION\tSTATE\tTOOLS\tRESOURCES\tCALLS\tERRORS")
				for _, p := range plugins {
					fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%d\n", p.Name, p.Version, p.State, p.Tools, p.Resources, p.Calls, p.Errors)
				}
				return w.Flush()
			})
		},
	}
	rf.flags(c)
	out.flags(c)
	return c
}

// loadedPlugins reads the list page by page: each connected board is a plugin.
func loadedPlugins(ctx context.Context, rc *relayClient) ([]kernel.PluginInfo, error) {
	all := []kernel.PluginInfo{}
	for after := ""; ; {
		var page struct {
			Plugins []kernel.PluginInfo `json:"plugins"`
			Next    string              `json:"next"`
		}
		args := map[string]any{"limit": 200}
		if after != "" {
			args["after"] = after
		}
		if err := rc.tool(ctx, "kernel.introspection.plugins", args, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Plugins...)
		if page.Next == "" || page.Next <= after {
			return all, nil
		}
		after = page.Next
	}
}

func newPluginLoad() *cobra.Command {
	var rf relayFlags
	var dryRun bool
	c := &cobra.Command{
		Use:   "load NAME",
		Short: "Start a plugin of the relay's plugin directory",
		Long: `Start a plugin of the relay's plugin directory and offer its tools. It lasts until it is
unloaded or the relay stops; 'agentctl relay --plugin NAME' starts it with the relay.`,
		Example: "  agentctl plugin load notes --token-file admin.token",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return changePlugin(cmd, &rf, dryRun, "load", args[0], "undo it with: agentctl plugin unload "+args[0])
		},
	}
	rf.flags(c)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and do nothing")
	return c
}

func newPluginUnload() *cobra.Command {
	var rf relayFlags
	var dryRun bool
	c := &cobra.Command{
		Use:     "unload NAME[@VERSION]",
		Short:   "Take a plugin's tools away and stop its process",
		Example: "  agentctl plugin unload notes@1.0.0 --token-file admin.token",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return changePlugin(cmd, &rf, dryRun, "unload", args[0], "load it again with: agentctl plugin load NAME")
		},
	}
	rf.flags(c)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be done, and do nothing")
	return c
}

func changePlugin(cmd *cobra.Command, rf *relayFlags, dryRun bool, verb, name, undo string) error {
	if dryRun {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "would %s plugin %s\n", verb, name)
		return err
	}
	rc, err := rf.client()
	if err != nil {
		return err
	}
	if err := rc.tool(cmd.Context(), "kernel.plugin."+verb, map[string]any{"name": name}, nil); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%sed plugin %s; %s\n", verb, name, undo)
	return err
}

// tool calls a tool of the relay's own and decodes its result into out, unless that is
// nil.
func (c *relayClient) tool(ctx context.Context, name string, args map[string]any, out any) error {
	if args == nil {
		args = map[string]any{}
	}
	b, err := c.answer(ctx, name, args)
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(b, out); err != nil {
		return exit(exitFailure, "the relay's answer to %s is not what it should be: %w", name, err)
	}
	return nil
}
