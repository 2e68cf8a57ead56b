package handlers

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"agentctl/prober"
)

// TestFrameCoversCatalogue: a frame, and its schema, have the fields of the catalogue beside
// ts_ms and node_id.
func TestFrameCoversCatalogue(t *testing.T) {
	want := []string{"node_id", "ts_ms"}
	for _, s := range prober.Sensors() {
		if s.Frame != "" {
			want = append(want, s.Frame)
		}
	}
	slices.Sort(want)

	var frame map[string]any
	if err := json.Unmarshal(appendFrame(nil, strings.Repeat("0", 26), &prober.Sample{}), &frame); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"subscribe.frame", "snapshot.output"} {
		b, err := os.ReadFile("../manifest/schemas/system.metrics." + name + "@1.0.0.json")
		if err != nil {
			t.Fatal(err)
		}
		var schema struct {
			Properties map[string]any `json:"properties"`
			Required   []string       `json:"required"`
		}
		if err := json.Unmarshal(b, &schema); err != nil {
			t.Fatal(err)
		}
		slices.Sort(schema.Required)
		if !slices.Equal(keys(schema.Properties), want) || !slices.Equal(schema.Required, want) {
			t.Errorf("schema %s has %v, requires %v, want %v", name, keys(schema.Properties), schema.Required, want)
		}
	}
	if !slices.Equal(keys(frame), want) {
		t.Errorf("a frame has %v, want %v", keys(frame), want)
	}
}

func keys(m map[string]any) []string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
