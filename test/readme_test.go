package test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// readmePages returns the README and the pages of docs, by their path.
func readmePages(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages := make(map[string]string)
	for _, path := range append(paths, "../README.md") {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		pages[path] = string(b)
	}
	return pages
}

// commandFlags returns the flags of each command, by its name without agentctl: "token create". It reads
// them in docs/cli.md, which TestDocs of cmd/agentctl keeps equal to what the commands print.
func commandFlags(t *testing.T) map[string][]string {
	t.Helper()
	b, err := os.ReadFile("../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	flag := regexp.MustCompile("^\\| `(?:-[a-z], )?(--[a-z0-9-]+)")
	commands, command := make(map[string][]string), ""
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "## agentctl "); ok {
			command = strings.TrimSpace(name)
			commands[command] = []string{"--help"}
		} else if m := flag.FindStringSubmatch(line); m != nil {
			commands[command] = append(commands[command], m[1])
		}
	}
	return commands
}

// Every agentctl command that the README and docs show exists, with the flags shown.
func TestReadmeCommands(t *testing.T) {
	t.Parallel()
	commands := commandFlags(t)
	flag := regexp.MustCompile(`--[a-z0-9-]+`)
	shown := 0
	for page, text := range readmePages(t) {
		for line := range strings.Lines(text) {
			line = strings.TrimPrefix(line, "sudo ")
			if !strings.HasPrefix(line, "agentctl ") {
				continue
			}
			shown++
			line, _, _ = strings.Cut(line, "#")
			line, _, _ = strings.Cut(line, ">")
			words := strings.Fields(line)[1:]
			name, ok := longestCommand(commands, words)
			if !ok {
				t.Errorf("%s shows %q: there is no such command", page, strings.TrimSpace(line))
				continue
			}
			for _, f := range flag.FindAllString(line, -1) {
				if !slices.Contains(commands[name], f) {
					t.Errorf("%s shows %q: there is no %s", page, strings.TrimSpace(line), f)
				}
			}
		}
	}
	if shown < 100 {
		t.Errorf("only %d commands found", shown)
	}
}

// longestCommand returns the command that the first words name: of "relay check" it is that one and not
// "relay".
func longestCommand(commands map[string][]string, words []string) (name string, ok bool) {
	for n := min(len(words), 3); n > 0; n-- {
		name = strings.Join(words[:n], " ")
		if _, ok := commands[name]; ok {
			return name, true
		}
	}
	return "", false
}

// Every make target that the README and docs name is in the Makefile.
func TestReadmeTargets(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	target := regexp.MustCompile("(?m)(?:^|`)make ([a-z-]+)")
	for page, text := range readmePages(t) {
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s: there is no make target %s", page, m[1])
			}
		}
	}
}

// Every page that a page links to is there.
func TestReadmeLinks(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([a-zA-Z0-9_./-]+\.md)(?:#[^)]*)?\)`)
	for page, text := range readmePages(t) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
			}
		}
	}
}
