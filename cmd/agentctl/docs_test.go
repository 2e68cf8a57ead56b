//go:build !agentctl_omit_relay

package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
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

// docsRoot is the command tree as it is without an environment.
func docsRoot(t *testing.T) *cobra.Command {
	t.Helper()
	for _, kv := range os.Environ() {
		if k, _, _ := strings.Cut(kv, "="); strings.HasPrefix(k, "AGENTCTL_") || strings.HasPrefix(k, "MCP_") {
			t.Setenv(k, "")
		}
	}
	root := newRoot()
	root.InitDefaultCompletionCmd("x")
	return root
}

func walk(c *cobra.Command, fn func(*cobra.Command)) {
	fn(c)
	for _, s := range visible(c) {
		walk(s, fn)
	}
}

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
	walk(docsRoot(t), func(c *cobra.Command) {
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
	if subs := visible(c); len(subs) > 0 && c.Name() == "completion" {
		names := []string{}
		for _, s := range subs {
			names = append(names, "`"+s.Name()+"`")
		}
		fmt.Fprintf(w, "\nShells: %s. Each page tells how to load it: `agentctl completion bash --help`.\n", strings.Join(names, ", "))
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
	walk(docsRoot(t), func(c *cobra.Command) {
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
			for _, name := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(m, -1) {
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

// A man page for every command, with every flag; the same bytes each time.
func TestMan(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	for _, d := range dirs {
		root := docsRoot(t)
		root.SetArgs([]string{"man", d})
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	walk(docsRoot(t), func(c *cobra.Command) {
		name := manName(c) + ".1"
		a, err := os.ReadFile(filepath.Join(dirs[0], name))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := os.ReadFile(filepath.Join(dirs[1], name))
		if string(a) != string(b) {
			t.Errorf("%s differs from one time to the next", name)
		}
		if !strings.Contains(string(a), "\n.SH NAME\n"+roff(manName(c))+` \- `) {
			t.Errorf("%s has no line that apropos can read:\n%s", name, a)
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && f.Name != "help" && !strings.Contains(string(a), roff("--"+f.Name)) {
				t.Errorf("%s does not name --%s", name, f.Name)
			}
		})
		for i, line := range strings.Split(string(a), "\n") {
			if strings.HasPrefix(line, "'") || (strings.HasPrefix(line, ".") && !regexp.MustCompile(`^\.(TH|SH|PP|TP|B|BR|nf|fi)\b`).MatchString(line)) {
				t.Errorf("%s:%d: roff would take this for a request: %s", name, i+1, line)
			}
		}
	})
}
