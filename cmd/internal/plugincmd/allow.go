//go:build linux

package plugincmd

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// A plugin that only answers calls needs no consent. One that asks for more (bus in plugin.json) may do
// none of it until an operator allows that, for one plugin.json, which its digest names:
//
//	show       prints what is asked for, and the digest
//	allow      consents, for some tenants; with --digest only to what was shown
//	disallow   takes it back
//
// The relay stores the consent, and applies it at once to a plugin that runs, which is not restarted. It is
// an administrative change in the audit log, with the operator's identity.

// newPluginShow returns the command plugin show, by which an operator decides before plugin allow. The
// digest that it prints pins the decision to this plugin.json.
func newPluginShow() *cobra.Command {
	var rf cli.RelayFlags
	var out cli.Output
	c := &cobra.Command{
		Use:   "show NAME",
		Short: "Show what a plugin asks for and may do",
		Long: `Show what a plugin asks for beyond answering calls (bus in its plugin.json): tools to call, resources
to read, topics to subscribe to, events to append; and whether an operator allows it.`,
		Example: "  agentctl plugin show notes --token-file operator.token",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			b, err := rc.PluginBus(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return out.Print(cmd, b, func() error { return printPluginBus(cmd, b) })
		},
	}
	rf.AddFlags(c)
	out.AddFlags(c)
	return c
}

// printPluginBus prints what a plugin asks for and whether it is allowed.
func printPluginBus(cmd *cobra.Command, b *client.PluginBus) error {
	// The table has no line of column names: the first row takes its place.
	t := term.NewTable(cmd.OutOrStdout(), "PLUGIN", b.Name)
	t.Row("VERSION", b.Version)
	t.Row("DIGEST", b.Digest)
	for _, row := range []struct {
		key  string
		list []string
	}{{"CALL", b.Call}, {"READ", b.Read}, {"SUBSCRIBE", b.Subscribe}, {"APPEND", b.Append}} {
		if len(row.list) > 0 {
			t.Row(row.key, strings.Join(row.list, " "))
		}
	}
	t.Row("ALLOWED", allowedText(b, cli.RelayHint(cmd)))
	return t.Flush()
}

// asksForNothing reports whether a plugin only answers calls, for which it needs no consent.
func asksForNothing(b *client.PluginBus) bool {
	return len(b.Call)+len(b.Read)+len(b.Subscribe)+len(b.Append) == 0
}

// allowedText describes where a plugin may act, and who decided it. relayFlags are those of the command
// that is printed as the next step. Times are in this machine's time zone. By is empty for a plugin of
// the binary, which is allowed until an operator decides.
func allowedText(b *client.PluginBus, relayFlags string) string {
	switch {
	case asksForNothing(b):
		return "it asks for nothing"
	case !b.Allowed:
		return "no; allow it with: agentctl plugin allow " + b.Name + relayFlags
	}
	s := "in tenant " + strings.Join(b.Tenants, ", ")
	if len(b.Tenants) == 1 && b.Tenants[0] == "*" {
		s = "in every tenant"
	}
	if b.By != "" {
		s += fmt.Sprintf(" by %s, %s", b.By, time.UnixMilli(b.AtMS).Format(time.DateTime))
	}
	return s
}

// newPluginAllow returns the command plugin allow. With --digest the consent is for the manifest that
// the operator has read: a plugin.json that was changed in between is refused.
func newPluginAllow() *cobra.Command {
	var rf cli.RelayFlags
	var tenants []string
	var digest string
	var dryRun bool
	c := &cobra.Command{
		Use:   "allow NAME",
		Short: "Allow a plugin what its manifest asks for",
		Long: `Allow a plugin to call tools, read resources, subscribe to topics and append events, as its plugin.json
asks for (bus). The consent is for this manifest: after a change of plugin.json the plugin may do none of
it until you allow it again. 'agentctl plugin show NAME' shows what it asks for.

For itself the plugin acts in the tenants that you name. While it serves a call in one of them, it has no
scope that the caller lacks.`,
		Example: `  agentctl plugin allow notes --token-file operator.token
  agentctl plugin allow notes --tenant acme --tenant lab --token-file operator.token`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			if dryRun {
				b, err := rc.PluginBus(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if digest != "" && digest != b.Digest { // as the relay refuses it
					return cli.Errorf(cli.ExitFailure, "plugin.json has changed since: look at it again with: agentctl plugin show %s%s", cli.ShellQuote(args[0]), cli.RelayHint(cmd))
				}
				if asksForNothing(b) { // as the relay refuses it
					return cli.Errorf(cli.ExitFailure, "plugin.json asks for nothing: it has no key bus")
				}
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "would allow plugin %s:\n", b.Name)
				return printPluginBus(cmd, b)
			}
			// Without --tenant the consent is for the tenant of the token; "*" is not a default.
			b, err := rc.AllowPlugin(cmd.Context(), args[0], digest, tenants)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "allowed plugin %s %s; undo it with: agentctl plugin disallow %s%s\n", b.Name, allowedText(b, ""), b.Name, cli.RelayHint(cmd))
			return err
		},
	}
	rf.AddFlags(c)
	c.Flags().StringArrayVar(&tenants, "tenant", nil, "let it act in `TENANT` (repeatable), * for every one; default: the tenant of your token")
	c.Flags().StringVar(&digest, "digest", "", "refuse if plugin.json has another digest than `HEX`, as plugin show printed it")
	cli.AddDryRunFlag(c, &dryRun)
	return c
}

// newPluginDisallow returns the command plugin disallow. The plugin stays loaded, and answers calls.
func newPluginDisallow() *cobra.Command {
	var rf cli.RelayFlags
	var dryRun bool
	c := &cobra.Command{
		Use:   "disallow NAME",
		Short: "Take back what plugin allow gave",
		Long: `Take back what 'agentctl plugin allow' gave. The plugin's requests in flight and its subscriptions end;
it goes on answering calls.`,
		Example: "  agentctl plugin disallow notes --token-file operator.token",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dryRun {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "would disallow plugin %s\n", args[0])
				return err
			}
			rc, err := rf.Client()
			if err != nil {
				return err
			}
			if err := rc.DisallowPlugin(cmd.Context(), args[0]); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "disallowed plugin %s; undo it with: agentctl plugin allow %s%s\n", args[0], args[0], cli.RelayHint(cmd))
			return err
		},
	}
	rf.AddFlags(c)
	cli.AddDryRunFlag(c, &dryRun)
	return c
}
