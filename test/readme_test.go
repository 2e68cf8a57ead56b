package test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// Every agentctl command that the README and docs show exists, with the flags shown, and
// every make target and document that the README names is there.
func TestReadme(t *testing.T) {
	t.Parallel()
	bin := binary(t, "agentctl", "")
	pages := []string{"../README.md"}
	docs, err := os.ReadDir("../docs")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range docs {
		if strings.HasSuffix(d.Name(), ".md") {
			pages = append(pages, "../docs/"+d.Name())
		}
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	help := make(map[string]string)
	groups := map[string]bool{"relay": true, "token": true, "config": true, "tickets": true, "events": true, "plugin": true, "node": true, "keys": true, "context": true, "mcp": true} // of commands
	commands := 0
	for _, page := range pages {
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			for _, target := range regexp.MustCompile(`\bmake ([a-z-]+)`).FindAllStringSubmatch(line, -1) {
				if (strings.HasPrefix(line, "make ") || strings.Contains(line, "`make "+target[1])) && !strings.Contains(string(makefile), "\n"+target[1]+":") {
					t.Errorf("%s: no make target %s", page, target[1])
				}
			}
			line = strings.TrimPrefix(line, "sudo ")
			if !strings.HasPrefix(line, "agentctl ") {
				continue
			}
			line, _, _ = strings.Cut(line, "#")
			line, _, _ = strings.Cut(line, ">")
			words := strings.Fields(line)
			sub := []string{}
			for _, w := range words[1:] {
				if !regexp.MustCompile(`^[a-z]+$`).MatchString(w) || len(sub) == 2 || (len(sub) == 1 && !groups[sub[0]]) {
					break
				}
				sub = append(sub, w)
			}
			name := strings.Join(sub, " ")
			if help[name] == "" {
				out, err := exec.Command(bin, append(sub, "--help")...).CombinedOutput()
				if err != nil || !strings.Contains(string(out), "agentctl "+name) {
					t.Errorf("%s shows %q: %v", page, strings.TrimSpace(line), err)
					continue
				}
				help[name] = string(out)
			}
			commands++
			for _, flag := range regexp.MustCompile(`--[a-z0-9-]+`).FindAllString(line, -1) {
				if !strings.Contains(help[name], flag+" ") {
					t.Errorf("%s shows %q: there is no %s", page, strings.TrimSpace(line), flag)
				}
			}
		}
		for _, link := range regexp.MustCompile(`\]\(([a-zA-Z0-9_./-]+\.md)\)`).FindAllStringSubmatch(string(b), -1) {
			dir := strings.TrimSuffix(page, page[strings.LastIndex(page, "/"):])
			if _, err := os.Stat(dir + "/" + link[1]); err != nil {
				t.Errorf("%s links to %s: %v", page, link[1], err)
			}
		}
	}
	if commands < 8 {
		t.Errorf("only %d commands found", commands)
	}
}
