package relay

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
)

// A subscription that begins some time ago has all events since then, also those that a search would not
// read. With AGENTCTL_SLOW=1 these are as many as in a relay.
func TestSeqAtOfManyEvents(t *testing.T) {
	if os.Getenv("AGENTCTL_SLOW") == "" {
		defer func(n int) { maxSearchRows = n }(maxSearchRows)
		maxSearchRows = 2_000
	}
	r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	run(t, r)
	ago := func(age time.Duration) int64 { return time.Now().Add(-age).UnixMilli() }
	events := make([]kernel.Event, eventlog.MaxAppend)
	for i := range events {
		events[i] = kernel.Event{Tenant: "a", Type: "alert.raised", Payload: json.RawMessage("{}"), CreatedMS: ago(time.Minute)}
	}
	before, err := r.events.Append(t.Context(), kernel.Event{Tenant: "a", Type: "alert.raised", CreatedMS: ago(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; n <= maxSearchRows+2_000; n += len(events) {
		if _, err := r.events.Append(t.Context(), events...); err != nil {
			t.Fatal(err)
		}
	}
	after, err := busEvents{r, make(chan struct{}, 1)}.SeqAt(t.Context(), 10*time.Minute)
	if err != nil || after < before {
		t.Fatalf("it begins after %d: %v; want %d or more", after, err, before)
	}
	missed := 0
	err = r.events.Select(t.Context(), eventlog.Query{After: before, To: after, Types: []string{"alert.raised"}}, func(kernel.Event) error { missed++; return nil })
	if err != nil || missed > 0 {
		t.Errorf("%d events of the last ten minutes are missed: %v", missed, err)
	}
}

// No folder of the plugin directory can have the name of a built-in plugin. Triage speaks the protocol of external
// plugins: with it disabled, its name is free.
func TestBuiltinNamesAreReserved(t *testing.T) {
	r, err := Open(Options{StateDir: t.TempDir(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	names := append(slices.Collect(maps.Keys(r.builtins)), control.Name, PluginConformance)
	if len(names) < 5 {
		t.Errorf("got only the built-in plugins %v", names)
	}
	for _, name := range names {
		if process.CheckName(name) == nil {
			t.Errorf("a plugin of the plugin directory can be named %s", name)
		}
	}
}
