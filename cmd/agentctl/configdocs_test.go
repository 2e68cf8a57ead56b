package main

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"agentctl/prober/alert"
)

// TestConfigPage: docs/config.md lists exactly the keys there are, with what the daemon
// makes of them, and docs/config.schema.json is the schema.
func TestConfigPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	for line := range strings.SplitSeq(section(string(page), "## Keys"), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) == 7 && strings.HasPrefix(cells[1], " `") {
			name := strings.Trim(cells[1], " `")
			if rows[name] != nil {
				t.Errorf("%s is listed twice", name)
			}
			rows[name] = cells
		}
	}
	for i := range configKeys {
		k := &configKeys[i]
		cells := rows[k.name]
		delete(rows, k.name)
		if cells == nil {
			t.Errorf("docs/config.md lacks %s", k.name)
			continue
		}
		wants := map[int][]string{5: {k.apply}}
		for _, w := range k.words {
			wants[3] = append(wants[3], "`"+w+"`")
		}
		switch k.kind {
		case kindInt:
			wants[3] = append(wants[3], k.unit, strings.Fields(k.right())[4], strings.Fields(k.right())[6])
		case kindDuration:
			wants[2] = append(wants[2], valueLine(fileValue(k.def()), k.name))
			for _, bound := range strings.Fields(strings.ReplaceAll(k.right(), ",", "")) {
				if regexp.MustCompile(`^[0-9]+[a-z]+$`).MatchString(bound) {
					wants[3] = append(wants[3], bound)
				}
			}
		case kindBool:
			wants[2] = append(wants[2], valueLine(k.def(), k.name))
		}
		if v, ok := k.def().(int64); ok && v > 0 {
			wants[2] = append(wants[2], valueLine(v, k.name))
		}
		if k.env() != "" {
			wants[4] = append(wants[4], "`"+k.env()+"`")
		}
		if k.flag != "" {
			wants[4] = append(wants[4], "`--"+k.flag+"`")
		}
		for cell, words := range wants {
			for _, w := range words {
				if !strings.Contains(cells[cell], w) {
					t.Errorf("%s: column %d, %q, does not say %q", k.name, cell, cells[cell], w)
				}
			}
		}
	}
	for name := range rows {
		t.Errorf("docs/config.md lists %s, which there is not", name)
	}

	rules := section(string(page), "## Alert rules")
	var words []string
	for _, m := range alert.Metrics() {
		words = append(words, m.Name)
	}
	for _, w := range slices.Concat(words, ruleKeys) {
		if !strings.Contains(rules, "`"+w+"`") {
			t.Errorf("the rules of docs/config.md lack %s", w)
		}
	}

	published, err := os.ReadFile("../../docs/config.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	if now, err := configSchemaJSON(); err != nil || !bytes.Equal(now, published) {
		t.Errorf("docs/config.schema.json is out of date (%v); write it with: agentctl config schema > docs/config.schema.json", err)
	}
}

// TestConfigExamples: the example of the page, and the file that the package installs,
// with and without its comments, are good.
func TestConfigExamples(t *testing.T) {
	page, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(page), "```yaml\n")
	example, _, ok := strings.Cut(example, "```")
	if got, errs := parseConfig("docs/config.md", []byte(example)); !ok || errs != nil || len(got) != 3 {
		t.Errorf("the example: %d settings, %v", len(got), errs)
	}
	installed, err := os.ReadFile("../../systemd/deb/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got, errs := parseConfig("config.yaml", installed); errs != nil || len(got) != 0 {
		t.Errorf("as installed: %d settings, %v", len(got), errs)
	}
	prose := regexp.MustCompile(`(?m)^#( [^ ].*)?$`)
	plain := bytes.ReplaceAll(append([]byte("\n"), prose.ReplaceAll(installed, nil)...), []byte("\n#"), []byte("\n"))
	got, errs := parseConfig("config.yaml", plain)
	if errs != nil {
		t.Errorf("without its comments: %v\n%s", errs, plain)
	}
	for i := range configKeys {
		if k := configKeys[i]; got[k.name].origin == "" && !strings.HasPrefix(k.name, "module_intervals.") && k.name != "state_dir" && k.name != "socket" {
			t.Errorf("the installed file does not mention %s", k.name)
		}
	}
}

// section is a part of a page, from its heading to the next.
func section(page, heading string) string {
	_, rest, _ := strings.Cut(page, heading+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	return rest
}
