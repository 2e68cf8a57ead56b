package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newMan writes man pages; packages run it when they are made.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write the man pages of all commands into DIR",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return exit(exitFailure, "%w", err)
			}
			return writeManPages(cmd.Root(), args[0])
		},
	}
}

func writeManPages(c *cobra.Command, dir string) error {
	if c.Hidden || c.Name() == "help" {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, manName(c)+".1"), []byte(manPage(c)), 0o644); err != nil {
		return exit(exitFailure, "%w", err)
	}
	for _, sub := range c.Commands() {
		if err := writeManPages(sub, dir); err != nil {
			return err
		}
	}
	return nil
}

// manName is the page of a command: agentctl-token-create.
func manName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// manPage is a command's page in man(7). The same source gives the same bytes, whoever
// makes it: defaults that depend on the user are left out.
func manPage(c *cobra.Command) string {
	var b strings.Builder
	date := ""
	if t := build().Time; !t.IsZero() {
		date = t.UTC().Format(time.DateOnly)
	}
	fmt.Fprintf(&b, ".TH %s 1 %q %q %q\n", strings.ToUpper(roff(manName(c))), date, "agentctl "+version, "agentctl")
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n.SH SYNOPSIS\n.B %s\n", roff(manName(c)), roff(c.Short), roff(c.CommandPath()))
	rest := strings.TrimPrefix(c.UseLine(), c.CommandPath())
	if c.HasAvailableSubCommands() {
		rest = " COMMAND"
	}
	fmt.Fprintf(&b, "%s\n.SH DESCRIPTION\n", roff(strings.TrimSpace(rest)))
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	if c.HasParent() {
		b.WriteString(roffText(about))
	} else {
		fmt.Fprintf(&b, ".nf\n%s.fi\n", roffLines(about))
	}
	if subs := visible(c); len(subs) > 0 {
		b.WriteString(".SH COMMANDS\n")
		for _, s := range subs {
			fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roff(manName(s)), roff(s.Short))
		}
	}
	if c.HasAvailableLocalFlags() {
		b.WriteString(".SH OPTIONS\n")
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				name, usage := flagText(f)
				fmt.Fprintf(&b, ".TP\n.B %s\n%s\n", roff(name), roff(usage))
			}
		})
	}
	if c.Example != "" {
		fmt.Fprintf(&b, ".SH EXAMPLES\n.nf\n%s.fi\n", roffLines(c.Example))
	}
	b.WriteString(".SH EXIT STATUS\n" + roffLines("0 good, 1 failure, 2 usage, 3 daemon or relay not running, 4 unauthorized, 5 node offline, 6 approval required, 7 timed out."))
	if c.HasParent() {
		fmt.Fprintf(&b, ".SH SEE ALSO\n.BR %s (1)\n", roff(manName(c.Parent())))
	}
	return b.String()
}

// visible are the subcommands people are told of.
func visible(c *cobra.Command) []*cobra.Command {
	var out []*cobra.Command
	for _, s := range c.Commands() {
		if s.IsAvailableCommand() && s.Name() != "help" {
			out = append(out, s)
		}
	}
	return out
}

// flagText is a flag as a page shows it: "-o, --output FORMAT" and what it does. A default
// is named unless it is empty or depends on who asks.
func flagText(f *pflag.Flag) (name, usage string) {
	value, usage := pflag.UnquoteUsage(f)
	name = "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	if value != "" && f.NoOptDefVal == "" {
		name += " " + value
	}
	if before, rest, ok := strings.Cut(usage, ` (default "/`); ok {
		_, after, _ := strings.Cut(rest, `")`)
		return name, before + after
	}
	switch d := f.DefValue; {
	case d == "", d == "0", d == "0s", d == "false", d == "[]":
	case strings.HasPrefix(d, "/"), strings.Contains(usage, "(default"), strings.Contains(usage, "[AGENTCTL_"):
	default:
		usage += " (default " + strings.Trim(d, "[]") + ")"
	}
	return name, usage
}

// roff escapes a line of text.
func roff(s string) string {
	s = strings.ReplaceAll(s, `\`, `\e`)
	s = strings.ReplaceAll(s, "-", `\-`)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	return s
}

func roffLines(s string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.TrimRight(s, "\n") + "\n") {
		b.WriteString(roff(line))
	}
	return b.String()
}

// roffText is text of several paragraphs; a paragraph that begins with blanks keeps its
// lines.
func roffText(s string) string {
	var b strings.Builder
	for i, p := range strings.Split(strings.TrimSpace(s), "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		if strings.HasPrefix(p, " ") {
			p = ".nf\n" + roffLines(p) + ".fi\n"
		} else {
			p = roffLines(p)
		}
		b.WriteString(p)
	}
	return b.String()
}
