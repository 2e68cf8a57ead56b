// Command agentctl exposes Linux boards to AI agents as MCP tools: it is the device daemon, the relay
// that the boards connect to, and the commands that a person types on either.
//
// This package makes the tree of commands and runs it. The commands are in packages below
// cmd/internal, one for each group; here are those that compose a whole process (relay, demo), version,
// and the completion of flags and arguments.
//
// There are three builds. Each has a function relayCommands:
//
//	relay.go                    the full build, on Linux
//	commands_board_build.go     Linux with -tags agentctl_omit_relay: the daemon and the clients, without
//	                            the relay and what it links
//	commands_other.go           other systems: the clients, and the commands that call a relay
//
// In place of a command that a build lacks it has a hidden one, which fails and says where the real one is:
// a line that was copied from the documents gets that answer and not "unknown command".
//
// newRoot makes the command that the line begins with, and all of them if it begins with something else: a
// flag, help, a completion, a word that is no command. A command returns a typed error. cli.Explain turns it
// into an exit code and a text, and run prints the text on stderr after "agentctl: ", with a hint at --help
// for a usage error.
package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentctl/cmd/internal/boardcmd"
	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/clientcmd"
	"agentctl/suggest"
	"agentctl/term"
)

func main() { os.Exit(run()) }

// run runs the command line and returns the exit code. SIGINT and SIGTERM end the context of the
// command, so that it can stop what it has started. A command that ignored its context could only be
// killed: a second signal does nothing more. SIGHUP ends the process, unless the command handles it.
//
// Signals are caught when the line was parsed, and not at all for version: the threads that wait for them
// take a twentieth of the CPU time of a start. Until then a signal ends the process.
func run() int {
	root := newRoot(os.Args[1:]...)
	stop := func() {}
	root.PersistentPreRun = func(cmd *cobra.Command, _ []string) {
		var ctx context.Context
		ctx, stop = signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		cmd.SetContext(ctx)
	}
	defer func() { stop() }()
	cmd, err := root.ExecuteC()
	e := cli.Explain(cmd, err)
	if e == nil {
		return cli.ExitOK
	}
	fmt.Fprintf(os.Stderr, "agentctl: %s\n", term.SafeText(e.Error())) // perhaps a server's words
	if e.Code == cli.ExitUsage {
		fmt.Fprintf(os.Stderr, "Try '%s --help'.\n", cmd.CommandPath())
	}
	return e.Code
}

// newRoot makes the tree of commands for the line args, which does not begin with the name of the program.
// A tree is used for one run: flags keep their values. The board build has the same tree, with hidden
// commands in place of those of the relay.
//
// If args begins with the name of a command, the tree has that one alone: to make all of them, with more
// than 500 flags, takes a tenth of the CPU time of a short command, and the daemon would keep them in memory
// as long as it runs. With any other line, and without one, the tree has all commands.
//
// The order matters: usageArgs wraps the check of arguments of all commands in the tree, so it comes last.
// It misses the command completion, which cobra adds when it executes the tree.
func newRoot(args ...string) *cobra.Command {
	root := &cobra.Command{
		Use:   "agentctl",
		Short: "Expose Linux boards to AI agents as MCP tools",
		Long: `agentctl lets AI agents and people watch small Linux boards, one or thousands. All tools of a board
are read-only.

On a board     agentctl run          the daemon: samples, records, dials out to a relay if there is one
               agentctl join         makes this board a node of a relay, with one pasted line
               agentctl status       how the board does; then watch, history, doctor
On a server    agentctl relay        boards in, MCP tools and metric streams out
               agentctl invite       prints the line that a board or an agent joins with
Anywhere       agentctl demo         the whole loop on this machine, in one process`,
		Version:           cli.Version, // --version, as most programs have it
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
	}
	root.SetFlagErrorFunc(wrongFlag)
	all := commands()
	if len(args) > 0 && all[args[0]] != nil {
		root.AddCommand(all[args[0]]())
	} else {
		for _, newCommand := range all {
			root.AddCommand(newCommand())
		}
	}
	addHelp(root)
	if completing(args) {
		addCompletion(root)
	}
	usageArgs(root)
	return root
}

// commands returns the constructors of all commands of this build, by their names.
func commands() map[string]func() *cobra.Command {
	all := map[string]func() *cobra.Command{
		"ls": clientcmd.NewLs, "describe": clientcmd.NewDescribe, "call": clientcmd.NewCall, "tickets": clientcmd.NewTickets,
		"login": clientcmd.NewLogin, "context": clientcmd.NewContext, "version": newVersion,
	}
	maps.Copy(all, boardcmd.Commands())
	maps.Copy(all, relayCommands())
	return all
}

// usageArgs makes wrong arguments a usage error, with its own exit code, in c and below. A command that
// declares no check takes no arguments; cobra would accept any and ignore them. A group prints its help for
// no arguments, and refuses a word that is no subcommand, for which cobra would print the help and exit 0.
func usageArgs(c *cobra.Command) {
	check := c.Args
	if check == nil {
		check = cobra.NoArgs
	}
	if c.HasSubCommands() {
		check = unknownSubcommand
	}
	if c.HasSubCommands() && c.RunE == nil { // only a group: cobra would print help and exit 0
		c.DisableFlagsInUseLine = true
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	c.Args = func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &cli.ExitError{Code: cli.ExitUsage, Err: err}
		}
		return nil
	}
	for _, sub := range c.Commands() {
		usageArgs(sub)
	}
}

// unknownSubcommand refuses the name of a subcommand that does not exist. Of cobra's candidates, which cobra
// would list, it suggests the nearest one, by the distance that all suggestions of agentctl use.
func unknownSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	near, at := "", 0
	cmd.SuggestionsMinimumDistance = 2
	for _, s := range cmd.SuggestionsFor(args[0]) {
		if d := suggest.Distance(args[0], s); near == "" || d < at {
			near, at = fmt.Sprintf("; did you mean %q?", s), d
		}
	}
	return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), near)
}

// wrongFlag makes a wrong flag a usage error that names the nearest flag of the command. It does not use
// suggest.Nearest: a prefix of a flag counts as near too, since many programs accept those.
//
// A flag is near with at most three edits, of at most half of the word, so that a short word does not
// match everything. -json, which cobra reads as -j -s -o -n, is looked up as the word json.
func wrongFlag(cmd *cobra.Command, err error) error {
	var none *pflag.NotExistError
	if !errors.As(err, &none) {
		return &cli.ExitError{Code: cli.ExitUsage, Err: err}
	}
	word := none.GetSpecifiedName()
	if s := none.GetSpecifiedShortnames(); s != "" { // -json
		word = s
	}
	near, at := "", min(4, len(word)/2+1)
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		d := suggest.Distance(word, f.Name)
		if len(word) > 1 && strings.HasPrefix(f.Name, word) {
			d = min(d, 1)
		}
		if d < at && d < len(f.Name) {
			near, at = fmt.Sprintf("; did you mean --%s?", f.Name), d
		}
	})
	return cli.Errorf(cli.ExitUsage, "%w%s", err, near)
}

// addHelp makes 'agentctl help' of an unknown command a usage error. cobra would add the command help when it
// executes the tree, which is too late to change it.
func addHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.Args = helpTopic
		}
	}
}

// helpTopic checks the arguments of 'agentctl help': each names a subcommand of the one before. For any other
// word cobra would print the usage, or the help of the command above it, with exit code 0.
func helpTopic(cmd *cobra.Command, args []string) error {
	at, rest, err := cmd.Root().Find(args)
	if err != nil {
		return err
	}
	return unknownSubcommand(at, rest)
}
