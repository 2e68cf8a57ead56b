//go:build linux && !agentctl_omit_relay

package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const (
	docsPath   = "../../docs/cli.md"
	docsMarker = "<!-- What follows is made of the commands: go test ./cmd/agentctl -run TestDocs -update -->\n"
)

var update = flag.Bool("update", false, "rewrite docs/cli.md")

// docs/cli.md has every command with its flags and examples, as the commands have them.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile(docsPath)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(b), docsMarker)
	if !ok {
		t.Fatalf("%s has no line %s", docsPath, docsMarker)
	}
	var out strings.Builder
	out.WriteString(head + docsMarker)
	walkCommands(docsRoot(t), func(c *cobra.Command) {
		if c.HasParent() && c.Parent().Name() != "completion" {
			docsSection(&out, c)
		}
	})
	if *update {
		if err := os.WriteFile(docsPath, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if out.String() != string(b) {
		t.Errorf("%s is not what the commands say; renew it: go test ./cmd/agentctl -run TestDocs -update", docsPath)
	}
}

func docsSection(w *strings.Builder, c *cobra.Command) {
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	fmt.Fprintf(w, "\n## %s\n\n%s\n", c.CommandPath(), strings.TrimSpace(about))
	if use := c.UseLine(); !c.HasSubCommands() {
		fmt.Fprintf(w, "\n    %s\n", use)
	}
	if c.Example != "" {
		fmt.Fprintf(w, "\n```sh\n%s\n```\n", strings.TrimRight(c.Example, "\n"))
	}
	if subs := visibleCommands(c); len(subs) > 0 && c.Name() == "completion" {
		names := []string{}
		for _, s := range subs {
			names = append(names, "`"+s.Name()+"`")
		}
		fmt.Fprintf(w, "\nShells: %s. Each page explains how to load it: `agentctl completion bash --help`.\n", strings.Join(names, ", "))
	}
	if !c.HasAvailableLocalFlags() {
		return
	}
	w.WriteString("\n| flag | does |\n|---|---|\n")
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && f.Name != "help" {
			name, usage := flagText(f)
			fmt.Fprintf(w, "| `%s` | %s |\n", name, strings.ReplaceAll(usage, "|", `\|`))
		}
	})
}

// Each command is fit to be shown: a sentence, an example, and each flag says what it is.
func TestCommands(t *testing.T) {
	walkCommands(docsRoot(t), func(c *cobra.Command) {
		if !c.HasParent() || c.Name() == "completion" || c.Parent().Name() == "completion" {
			return
		}
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: Short is %q", c.CommandPath(), c.Short)
		}
		if c.Example == "" && !c.HasSubCommands() {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for _, m := range regexp.MustCompile(`(?m)^\s*(?:sudo )?`+c.CommandPath()+` .*$`).FindAllString(c.Example, -1) {
			m, _, _ = strings.Cut(m, "|")
			for _, name := range regexp.MustCompile(`--([a-z0-9-]+)`).FindAllStringSubmatch(m, -1) {
				if c.Flags().Lookup(name[1]) == nil && !c.HasSubCommands() {
					t.Errorf("%s: the example %q has a flag that does not exist", c.CommandPath(), m)
				}
			}
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s: --%s says nothing", c.CommandPath(), f.Name)
			}
		})
	})
}

// flagText is a flag as the page shows it: "-o, --output FORMAT" and what it does. A default
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
	case dependsOnUser(f), strings.Contains(usage, "(default"):
	default:
		usage += " (default " + strings.Trim(d, "[]") + ")"
	}
	return name, usage
}
