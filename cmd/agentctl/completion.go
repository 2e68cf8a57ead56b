package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentctl/client"
	"agentctl/monitor"
)

// completionTimeout bounds what completion asks a relay: nobody waits for a Tab.
const completionTimeout = time.Second

// completing reports whether a shell asks for completions. Other starts skip addCompletion,
// which takes a tenth of a millisecond.
func completing(args []string) bool {
	return len(args) > 1 && strings.HasPrefix(args[1], cobra.ShellCompRequestCmd)
}

// addCompletion says what flags and arguments may be, in c and below. What cannot be found
// out is left out without an error: the shell would print it into the command line.
func addCompletion(c *cobra.Command) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if fn := completeFlag(f); fn != nil {
			_ = c.RegisterFlagCompletionFunc(f.Name, fn) // fails where a command has its own
		}
	})
	if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 && c.Name() != "help" {
		switch {
		case c.Name() == "call":
			c.ValidArgsFunction = completeTools
		case c.Name() == "start":
			c.ValidArgsFunction = completeModuleArgs
		case strings.Contains(c.Use, " NODE TAG"):
			c.ValidArgsFunction = completeNodeTags
		case strings.Contains(c.Use, " NODE"):
			c.ValidArgsFunction = completeNodes
		default:
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
	for _, sub := range c.Commands() {
		addCompletion(sub)
	}
}

// completeFlag completes the value of a flag; nil leaves it to the shell, which knows files.
func completeFlag(f *pflag.Flag) cobra.CompletionFunc {
	words := func(w ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(w, cobra.ShellCompDirectiveNoFileComp)
	}
	switch name := f.Name; {
	case name == "output":
		return words(outputFormats(f.Usage)...)
	case name == "modules":
		return completeModules
	case name == "node", name == "board":
		return func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
			return completeNodes(cmd, nil, word)
		}
	case name == "tag":
		return func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
			return completeTags(cmd, nil, word)
		}
	case name == "context":
		return completeContexts
	case name == "tls":
		return words("own", "files", "off")
	case name == "log-level":
		return words("debug", "info", "warn", "error")
	case name == "class":
		return words("agent", "device", "enroll", "tenant-admin", "operator", "admin")
	case strings.HasSuffix(name, "-dir"):
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	case strings.HasSuffix(name, "-file"), slices.Contains([]string{"socket", "config", "tls-cert", "tls-key"}, name):
		return nil
	}
	return cobra.NoFileCompletions
}

// outputFormats are the formats a flag's text names, in its order.
func outputFormats(usage string) []string {
	var out []string
	for _, word := range strings.FieldsFunc(usage, func(r rune) bool { return r < 'a' || r > 'z' }) {
		if slices.Contains([]string{"csv", "json", "ndjson", "yaml"}, word) {
			out = append(out, word)
		}
	}
	return out
}

// completeModules completes the last name of a list with commas.
func completeModules(_ *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	before := word[:strings.LastIndexByte(word, ',')+1]
	var out []string
	for _, m := range monitor.ModuleNames() {
		if !slices.Contains(strings.Split(before, ","), m) && strings.HasPrefix(before+m, word) {
			out = append(out, before+m)
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func completeModuleArgs(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	left := slices.DeleteFunc(monitor.ModuleNames(), func(m string) bool { return slices.Contains(args, m) })
	return withPrefix(left, word), cobra.ShellCompDirectiveNoFileComp
}

// withPrefix keeps the words that begin with prefix.
func withPrefix(words []string, prefix string) []string {
	return slices.DeleteFunc(words, func(w string) bool { return !strings.HasPrefix(w, prefix) })
}

// completionNodes asks the relay of the command's flags and environment for its boards, or for
// the one that name means unless it is empty. completionTimeout bounds that, and it prints nothing:
// a relay that does not answer means no candidates.
func completionNodes(cmd *cobra.Command, name string) []client.Node {
	rc, err := completionClient(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	if name != "" {
		if n, err := rc.Node(ctx, name); err == nil {
			return []client.Node{*n}
		}
		return nil
	}
	nodes, _ := rc.Nodes(ctx) // none on an error
	return nodes
}

// completionClient is a client of the relay of the command's flags and environment.
func completionClient(cmd *cobra.Command) (*client.Client, error) {
	flag := func(name string) string {
		if f := cmd.Flags().Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	rf := relayFlags{relay: flag("relay"), tokenFile: flag("token-file"), caFile: flag("ca-file"), caSHA256: flag("ca-sha256"), set: cmd.Flags()}
	return rf.client()
}

func completeNodes(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if len(args) == 0 {
		for _, n := range completionNodes(cmd, "") {
			out = append(out, n.Label()+"\t"+n.State())
		}
	}
	return withPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
}

// completeNodeTags completes NODE and then tags.
func completeNodeTags(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return completeNodes(cmd, args, word)
	}
	return completeTags(cmd, args[1:], word)
}

// completeTags completes a tag that some board has, except those given already.
func completeTags(cmd *cobra.Command, given []string, word string) ([]string, cobra.ShellCompDirective) {
	var out []string
	for _, n := range completionNodes(cmd, "") {
		for _, t := range n.Tags {
			if !slices.Contains(out, t) && !slices.Contains(given, t) {
				out = append(out, t)
			}
		}
	}
	slices.Sort(out)
	return withPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
}

// completeTools completes NODE: and then its verbs.
func completeTools(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	if name, _, ok := strings.Cut(word, ":"); ok {
		for _, n := range completionNodes(cmd, name) {
			for _, verb := range n.CallVerbs() {
				out = append(out, name+":"+verb)
			}
		}
		return withPrefix(out, word), cobra.ShellCompDirectiveNoFileComp
	}
	for _, n := range completionNodes(cmd, "") {
		out = append(out, n.Label()+":\t"+n.State())
	}
	return withPrefix(out, word), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
