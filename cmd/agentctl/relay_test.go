//go:build linux && !agentctl_omit_relay

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each option that package relay may refuse has a flag in optionFlags, without which the error would begin
// with ": ", and each entry is of such an option. The list is that of the sources, because no single
// call of relay.Open has all the errors.
func TestOptionFlags(t *testing.T) {
	refusal := regexp.MustCompile(`(?:badOption\(|\bOptionError\{)([^,)}]+),`) // an error, up to the option's name
	list := regexp.MustCompile(`for name, \w+ := range map\[string\][\w.]+\{(.+)\} \{\n`)
	key := regexp.MustCompile(`"(\w+)": `)
	files, err := filepath.Glob("../../relay/*.go")
	if err != nil {
		t.Fatal(err)
	}
	refused := make(map[string]bool)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range refusal.FindAllStringSubmatch(string(b), -1) {
			switch name := m[1]; {
			case strings.HasPrefix(name, `"`):
				refused[strings.Trim(name, `"`)] = true
			case name == "name": // of the options of such a list
				for _, l := range list.FindAllStringSubmatch(string(b), -1) {
					for _, k := range key.FindAllStringSubmatch(l[1], -1) {
						refused[k[1]] = true
					}
				}
			case !strings.HasPrefix(name, "option"): // badOption itself
				t.Errorf("%s: this test does not know the option of %s", file, m[0])
			}
		}
	}
	for _, want := range []string{"Listen", "SSE", "EventsMaxBytes", "EventsCallsMaxAge"} { // one of each form
		if !refused[want] {
			t.Errorf("the option %s was not found in package relay", want)
		}
	}
	flags := newRelay().Flags()
	for name := range refused {
		if optionFlags[name] == "" {
			t.Errorf("the option %s has no flag in optionFlags", name)
		}
	}
	for name, text := range optionFlags {
		if !refused[name] {
			t.Errorf("optionFlags has %s, which package relay never refuses", name)
		}
		for flag := range strings.SplitSeq(text, ", ") {
			if flags.Lookup(strings.TrimPrefix(flag, "--")) == nil {
				t.Errorf("%s: the command relay has no flag %s", name, flag)
			}
		}
	}
}
