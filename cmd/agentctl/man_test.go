package main

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"agentctl/cmd/internal/cli/clitest"
)

// Man pages are written by TestMan, not by the program: cobra/doc and its Markdown parser
// stay out of the binary. systemd/deb.sh runs it for each build's own commands:
//
//	go test ./cmd/agentctl -run '^TestMan$' -args -man-dir "$PWD/man" -man-version v1.2.3
//
// SOURCE_DATE_EPOCH is the date of the pages. The same commands give the same bytes.
var (
	manDir     = flag.String("man-dir", "", "write the man pages into this directory")
	manVersion = flag.String("man-version", "devel", "version that the man pages name")
)

// docsRoot is the command tree without the settings of whoever runs the test: some are defaults of flags.
func docsRoot(t *testing.T) *cobra.Command {
	t.Helper()
	clitest.HideEnvironment(t)
	root := newRoot()
	root.InitDefaultCompletionCmd("x")
	return root
}

// walkCommands calls fn with c and the commands below it that help shows.
func walkCommands(c *cobra.Command, fn func(*cobra.Command)) {
	fn(c)
	for _, s := range visibleCommands(c) {
		walkCommands(s, fn)
	}
}

// visibleCommands are the subcommands that help shows.
func visibleCommands(c *cobra.Command) []*cobra.Command {
	var out []*cobra.Command
	for _, s := range c.Commands() {
		if s.IsAvailableCommand() {
			out = append(out, s)
		}
	}
	return out
}

// dependsOnUser reports whether a flag's default is a path, or comes from the environment.
func dependsOnUser(f *pflag.Flag) bool {
	return strings.HasPrefix(f.DefValue, "/") || strings.Contains(f.Usage, "[AGENTCTL_")
}

const exitStatus = `

# EXIT STATUS
0 ok, 1 failure, 2 usage, 3 daemon or relay not running, 4 unauthorized, 5 node offline, 6 reserved, 7 timed out.`

// writeMan writes the man pages of all commands into dir.
func writeMan(t *testing.T, dir string) {
	t.Helper()
	root := docsRoot(t)
	walkCommands(root, func(c *cobra.Command) {
		c.DisableAutoGenTag = true
		about := c.Long
		if about == "" {
			about = c.Short + "."
		}
		c.Long = markdown(about) + exitStatus
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			f.Usage = strings.ReplaceAll(f.Usage, "*", `\*`)
			if dependsOnUser(f) {
				f.DefValue = ""
			}
		})
	})
	seconds, _ := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	date := time.Unix(seconds, 0).UTC()
	header := doc.GenManHeader{Section: "1", Date: &date, Source: "agentctl " + *manVersion, Manual: "agentctl"}
	if err := doc.GenManTree(root, &header, dir); err != nil {
		t.Fatal(err)
	}
}

// markdown is the help text of a command as Markdown: a paragraph with an indented line
// keeps its line breaks.
func markdown(text string) string {
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, p := range paragraphs {
		if strings.HasPrefix(p, " ") || strings.Contains(p, "   ") {
			paragraphs[i] = "    " + strings.ReplaceAll(p, "\n", "\n    ")
		} else {
			paragraphs[i] = strings.NewReplacer("*", `\*`, "<", `\<`, "`", "\\`").Replace(p)
		}
	}
	return strings.Join(paragraphs, "\n\n")
}

// A man page for every command, with every flag; the same bytes each time.
func TestMan(t *testing.T) {
	dir, again := t.TempDir(), t.TempDir()
	if *manDir != "" {
		dir = *manDir
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeMan(t, dir)
	writeMan(t, again)
	request := regexp.MustCompile(`^\.(nh|TH|SH|SS|PP|RS|RE|EX|EE|nf|fi|in|TP)\b`)
	walkCommands(docsRoot(t), func(c *cobra.Command) {
		page := strings.ReplaceAll(c.CommandPath(), " ", "-")
		a, err := os.ReadFile(filepath.Join(dir, page+".1"))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := os.ReadFile(filepath.Join(again, page+".1"))
		if string(a) != string(b) {
			t.Errorf("%s differs from one time to the next", page)
		}
		plain := strings.ReplaceAll(string(a), `\`, "")
		if !strings.Contains(plain, "\n.SH NAME\n"+page+" - ") {
			t.Errorf("%s has no line that apropos can read:\n%s", page, a)
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && f.Name != "help" && !strings.Contains(plain, "--"+f.Name) {
				t.Errorf("%s does not name --%s", page, f.Name)
			}
		})
		for i, line := range strings.Split(string(a), "\n") {
			if strings.HasPrefix(line, "'") && !strings.HasPrefix(line, `'\"`) || (strings.HasPrefix(line, ".") && !request.MatchString(line)) {
				t.Errorf("%s:%d: roff would take this for a request: %s", page, i+1, line)
			}
		}
	})
}
