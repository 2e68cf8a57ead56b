package config

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
	page, err := os.ReadFile("../docs/config.md")
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
	for i := range keys {
		k := &keys[i]
		cells := rows[k.Name]
		delete(rows, k.Name)
		if cells == nil {
			t.Errorf("docs/config.md lacks %s", k.Name)
			continue
		}
		wants := map[int][]string{5: {k.Applied}}
		for _, w := range k.Words {
			wants[3] = append(wants[3], "`"+w+"`")
		}
		switch k.Kind {
		case KindInt:
			wants[3] = append(wants[3], k.unit, strings.Fields(k.expected())[4], strings.Fields(k.expected())[6])
		case KindDuration:
			wants[2] = append(wants[2], settingText(k.def()))
			for _, bound := range strings.Fields(strings.ReplaceAll(k.expected(), ",", "")) {
				if regexp.MustCompile(`^[0-9]+[a-z]+$`).MatchString(bound) {
					wants[3] = append(wants[3], bound)
				}
			}
		case KindBool:
			wants[2] = append(wants[2], settingText(k.def()))
		}
		if v, ok := k.def().(int64); ok && v > 0 {
			wants[2] = append(wants[2], settingText(v))
		}
		if k.Env() != "" {
			wants[4] = append(wants[4], "`"+k.Env()+"`")
		}
		for cell, words := range wants {
			for _, w := range words {
				if !strings.Contains(cells[cell], w) {
					t.Errorf("%s: column %d, %q, does not say %q", k.Name, cell, cells[cell], w)
				}
			}
		}
	}
	for name := range rows {
		t.Errorf("docs/config.md lists %s, which there is not", name)
	}

	rules := section(string(page), "## Alert rules")
	for _, w := range slices.Concat(alert.MetricNames(), ruleKeys) {
		if !strings.Contains(rules, "`"+w+"`") {
			t.Errorf("the rules of docs/config.md lack %s", w)
		}
	}

	published, err := os.ReadFile("../docs/config.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	if now, err := SchemaJSON(); err != nil || !bytes.Equal(now, published) {
		t.Errorf("docs/config.schema.json is out of date (%v); write it with: agentctl config schema > docs/config.schema.json", err)
	}
}

// TestConfigExamples: the example of the page, and the file that the package installs,
// with and without its comments, are good.
func TestConfigExamples(t *testing.T) {
	page, err := os.ReadFile("../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(page), "```yaml\n")
	example, _, ok := strings.Cut(example, "```")
	if got, errs := parseFile("docs/config.md", []byte(example)); !ok || errs != nil || len(got) != 3 {
		t.Errorf("the example: %d settings, %v", len(got), errs)
	}
	installed, err := os.ReadFile("../systemd/deb/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got, errs := parseFile("config.yaml", installed); errs != nil || len(got) != 0 {
		t.Errorf("as installed: %d settings, %v", len(got), errs)
	}
	prose := regexp.MustCompile(`(?m)^#( [^ ].*)?$`)
	plain := bytes.ReplaceAll(append([]byte("\n"), prose.ReplaceAll(installed, nil)...), []byte("\n#"), []byte("\n"))
	got, errs := parseFile("config.yaml", plain)
	if errs != nil {
		t.Errorf("without its comments: %v\n%s", errs, plain)
	}
	for i := range keys {
		if k := keys[i]; got[k.Name].Origin == "" && !strings.HasPrefix(k.Name, "module_intervals.") && k.Name != "state_dir" && k.Name != "socket" {
			t.Errorf("the installed file does not mention %s", k.Name)
		}
	}
}

// section is a part of a page, from its heading to the next.
func section(page, heading string) string {
	_, rest, _ := strings.Cut(page, heading+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	return rest
}
