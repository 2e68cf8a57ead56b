package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentctl/cmd/internal/cli"
	"agentctl/monitor"
)

// completing reports whether a shell asks for completions. Other starts skip addCompletion,
// which takes a tenth of a millisecond. cobra has two commands for it, __complete and __completeNoDesc.
func completing(args []string) bool {
	return len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd)
}

// addCompletion adds functions that complete flags and arguments, to c and below. A function that cannot
// find out its candidates returns none and no error: the shell would print it into the command line.
//
// Except for call and start it goes by the names of flags and the words in Use, so that a new command
// with NODE in its Use needs no line here. Functions that a command has set itself stay. Arguments of other
// commands complete to nothing, where cobra's default would be file names.
func addCompletion(c *cobra.Command) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if fn := completeFlag(f); fn != nil {
			_ = c.RegisterFlagCompletionFunc(f.Name, fn) // fails where a command has its own
		}
	})
	if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 && c.Name() != "help" {
		switch {
		case c.Name() == "call":
			c.ValidArgsFunction = cli.CompleteTools
		case c.Name() == "start":
			c.ValidArgsFunction = completeModuleArgs
		case strings.Contains(c.Use, " NODE TAG"):
			c.ValidArgsFunction = cli.CompleteNodeTags
		case strings.Contains(c.Use, " NODE"):
			c.ValidArgsFunction = cli.CompleteNodes
		case strings.HasSuffix(c.Use, " FILE"), strings.HasSuffix(c.Use, " [FILE]"):
			c.ValidArgsFunction = firstOnly(cobra.ShellCompDirectiveDefault)
		case strings.HasSuffix(c.Use, " DIR"), strings.HasSuffix(c.Use, " BACKUP"):
			c.ValidArgsFunction = firstOnly(cobra.ShellCompDirectiveFilterDirs)
		default:
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
	for _, sub := range c.Commands() {
		addCompletion(sub)
	}
}

// firstOnly completes the first argument of a command as directive says, and the others to nothing.
func firstOnly(directive cobra.ShellCompDirective) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return nil, directive
	}
}

// completeFlag completes the value of a flag; nil leaves it to the shell, which knows files. The name of the
// flag is enough: those that are listed here take the same kind of value in all commands that have them.
// A fixed set of values is repeated here, since completion only proposes and the command checks. Files and
// directories are found by the name of the value in the usage text.
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
			return cli.CompleteNodes(cmd, nil, word)
		}
	case name == "tag":
		return func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
			return cli.CompleteTags(cmd, nil, word)
		}
	case name == "context":
		return cli.CompleteContexts
	case name == "tls":
		return words("own", "files", "off")
	case name == "log-level":
		return words("debug", "info", "warn", "error")
	case name == "class":
		return words("agent", "device", "enroll", "tenant-admin", "operator", "admin")
	}
	switch value, _ := pflag.UnquoteUsage(f); value {
	case "DIR":
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	case "FILE", "PATH":
		return nil
	}
	return cobra.NoFileCompletions
}

// outputFormats returns the formats that the usage text of a flag -o names, in its order. Commands differ in
// the formats they have, and the text is where all of them name theirs.
func outputFormats(usage string) []string {
	var out []string
	for _, word := range strings.FieldsFunc(usage, func(r rune) bool { return r < 'a' || r > 'z' }) {
		if slices.Contains([]string{"csv", "json", "ndjson", "yaml"}, word) {
			out = append(out, word)
		}
	}
	return out
}

// completeModules completes the last name of a list with commas. A candidate is the whole word, since a shell
// replaces that, and is not followed by a space, because a comma may come next.
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

// completeModuleArgs completes a further MODULE of start: one that is not given yet.
func completeModuleArgs(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	left := slices.DeleteFunc(monitor.ModuleNames(), func(m string) bool { return slices.Contains(args, m) })
	return cli.WithPrefix(left, word), cobra.ShellCompDirectiveNoFileComp
}
