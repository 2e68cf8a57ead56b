package relaycmd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/relay/auth"
)

// grantFlags adds the flags for what a token or an agent's invite gives. when is put before their texts,
// and defaults is what --scope replaces. The relay or the store checks the values: a command knows neither
// the scopes of plugins nor what the creator may give. Completion proposes the relay's topics; others are
// accepted too.
func grantFlags(c *cobra.Command, when, defaults string, scopes, add, topics *[]string) {
	set := c.Flags()
	set.StringArrayVar(scopes, "scope", nil, when+"`SCOPE` in place of "+defaults+" (repeatable)")
	set.StringArrayVar(add, "add-scope", nil, when+"`SCOPE` besides them, such as one of a plugin: notes:read (repeatable)")
	set.StringArrayVar(topics, "topic", nil, when+"limit the scopes for events to `TOPIC`, such as alert or build/* (repeatable; default: all topics)")
	_ = c.RegisterFlagCompletionFunc("scope", completeScopes) // an error says that the flag is not there
	_ = c.RegisterFlagCompletionFunc("add-scope", completeScopes)
	_ = c.RegisterFlagCompletionFunc("topic", cobra.FixedCompletions([]string{"alert", "audit", "join", "kernel", "log/*", "presence", "ticket"}, cobra.ShellCompDirectiveNoFileComp))
}

// pluginScopes are the scopes that the manifests in a relay's plugin directory declare. They are read from
// files because the relay may not run. Over HTTP the scopes of loaded plugins are accepted.
type pluginScopes struct {
	scopes   []string
	dir      string
	problems error // manifests that could not be read
}

// explain adds to the error of an unknown scope where those of plugins come from, and which manifests could
// not be read: these do not end a command that needs none of their scopes.
func (p *pluginScopes) explain(err error) error {
	if scope := new(auth.ScopeError); !errors.As(err, &scope) || p.dir == "" {
		return err
	}
	err = fmt.Errorf("%w\nThe scopes of plugins are those in the manifests in %s", err, p.dir)
	if p.problems != nil {
		err = fmt.Errorf("%w, of which these are left out:\n%w", err, p.problems)
	}
	return err
}

// topicLimit describes the topics of a token, as the end of a sentence; "" if it has all.
func topicLimit(topics []string) string {
	if len(topics) == 0 {
		return ""
	}
	return ", limited to the topics " + strings.Join(topics, " ")
}

// completeScopes completes the value of --scope and --add-scope: those of the relay that an agent may
// hold and those of plugins in a state directory, or those that the token holds where a relay is asked.
// Scopes of devices are left out: a token of class agent cannot hold them, and one of class device needs
// no flag for them.
func completeScopes(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	if cmd.Flags().Changed("relay") || cmd.Flags().Changed("token-file") {
		return cli.WithPrefix(remoteScopes(cmd), word), cobra.ShellCompDirectiveNoFileComp
	}
	scopes := slices.DeleteFunc(slices.Clone(manifest.Scopes), func(s string) bool { return strings.HasPrefix(s, "device:") })
	if f := cmd.Flags().Lookup("state-dir"); f != nil {
		scopes = append(scopes, localPluginScopes(f.Value.String())...)
	}
	return cli.WithPrefix(scopes, word), cobra.ShellCompDirectiveNoFileComp
}

// remoteScopes returns the scopes of the token of the command's flags: it can grant no others. It is
// called while somebody waits for a Tab, so cli.CompletionTimeout bounds it and errors give no candidates.
func remoteScopes(cmd *cobra.Command) []string {
	rc, err := cli.CompletionClient(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), cli.CompletionTimeout)
	defer cancel()
	self, err := rc.Self(ctx)
	if err != nil {
		return nil
	}
	return self.Scopes
}
