package process

import (
	"errors"
	"slices"
	"testing"
)

func TestManifestBus(t *testing.T) {
	pm, err := ParseManifest([]byte(`{"name": "notes", "version": "1.0.0", "bus": {
		"call": ["tickets.create", "fleet.*"], "read": ["mcp://tickets/*"],
		"subscribe": ["alert", "build/*", "mcp://agents/directory.json"], "append": ["notes.added", "notes.*"]}}`))
	if err != nil {
		t.Fatal(err)
	}
	if b := pm.Bus; b.isEmpty() || len(b.Call) != 2 || len(b.Read) != 1 || len(b.Subscribe) != 3 || len(b.Append) != 2 {
		t.Errorf("got %+v", b)
	}
	_, err = ParseManifest([]byte(`{"name": "notes", "version": "1.0.0", "bus": {
		"call": ["*", "kernel.plugin.allow", "tickets.get", "tickets.get"], "read": ["file:///etc/passwd", "mcp://kernel/metrics.json"],
		"subscribe": ["a b"], "append": ["tickets.created", "notes", "notes."], "publish": []}}`))
	var e *ManifestError
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	var got []string
	for _, p := range e.Problems {
		got = append(got, p.Where)
	}
	want := []string{"bus", "bus.append[0]", "bus.append[1]", "bus.append[2]", "bus.call[0]", "bus.call[1]", "bus.call[3]", "bus.read[0]", "bus.read[1]", "bus.subscribe[0]"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q\n%v", got, want, err)
	}
}
