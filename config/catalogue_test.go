package config

import (
	"strings"
	"testing"

	"agentctl/prober"
)

// TestKeysCoverCatalogue: every module has an interval, every optional module can be chosen,
// and the published schema lists every metric.
func TestKeysCoverCatalogue(t *testing.T) {
	for m := range prober.NumModules {
		for _, name := range []string{m.String(), m.Member()} {
			if FindKey("module_intervals."+name) == nil {
				t.Errorf("there is no key module_intervals.%s", name)
			}
		}
	}
	schema, err := SchemaJSON()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range prober.OptionalModuleNames() {
		if !strings.Contains(strings.Join(FindKey("modules").Words, " "), name) {
			t.Errorf("modules does not know %s", name)
		}
	}
	for _, s := range prober.Sensors() {
		if s.Metric.Name != "" && !strings.Contains(string(schema), `"`+s.Metric.Name+`"`) {
			t.Errorf("the schema lacks the metric %s", s.Metric.Name)
		}
	}
}
