//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"agentctl/cmd/internal/cli"
	"agentctl/cmd/internal/cli/clitest"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
)

var updateEvents = flag.Bool("update-events", false, "write testdata/events.golden.ndjson anew")

// goldenEvents is a transcript: what a relay logged, as `events replay -o ndjson` prints it.
const goldenEvents = "testdata/events.golden.ndjson"

// goldenTime is when the transcript's relay started; its first seq comes from it.
var goldenTime = time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)

// A transcript that is logged anew is replayed byte for byte, each time, and with the log
// open or closed.
func TestEventsReplay(t *testing.T) {
	golden, err := os.ReadFile(goldenEvents)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName), Now: func() time.Time { return goldenTime }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- log.Run(ctx) }()
	var seqs []uint64
	for dec := json.NewDecoder(bytes.NewReader(golden)); dec.More(); {
		var e kernel.Event
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err)
		}
		var seq uint64
		for seq == 0 { // until Run runs
			if seq, err = log.Append(ctx, e); err != nil && err != eventlog.ErrNotRunning {
				t.Fatal(err)
			}
		}
		seqs = append(seqs, seq)
	}
	first := replay(t, dir, "-o", "ndjson")
	if *updateEvents {
		if err := os.WriteFile(goldenEvents, []byte(first), 0o644); err != nil {
			t.Fatal(err)
		}
		golden = []byte(first)
	}
	if first != string(golden) {
		t.Errorf("replay printed\n%s\nwant\n%s", first, golden)
	}
	cancel()
	<-done
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	if second := replay(t, dir, "-o", "ndjson"); second != first {
		t.Errorf("the second replay printed\n%s", second)
	}

	lines := strings.SplitAfter(string(golden), "\n")
	if got := replay(t, dir, "-o", "ndjson", "--from", "7352863948800002"); got != strings.Join(lines[2:], "") {
		t.Errorf("--from printed\n%s", got)
	}
	if got := replay(t, dir, "-o", "ndjson", "--type", "ticket.*", "--tenant", "greenhouse"); strings.Count(got, "\n") != 2 || strings.Count(got, `"ticket.`) != 2 {
		t.Errorf("--type and --tenant printed\n%s", got)
	}
	var parsed []kernel.Event
	if err := json.Unmarshal([]byte(replay(t, dir, "--json")), &parsed); err != nil || len(parsed) != len(seqs) {
		t.Errorf("--json: %d events, %v", len(parsed), err)
	}
	table := replay(t, dir)
	if !strings.Contains(table, "7352863948800000  2026-11-20T00:00:00Z  default") || strings.Count(table, "\n") != len(seqs)+1 {
		t.Errorf("the table is\n%s", table)
	}
	if got := replay(t, dir, "--type", "none") + replay(t, dir, "--json", "--type", "none"); got != "[]\n" {
		t.Errorf("nothing is printed as %q", got)
	}
	if code, _, errs := runReplay(t, t.TempDir()); code != cli.ExitFailure || !strings.Contains(errs, "--state-dir") {
		t.Errorf("no log: exit %d, %s", code, errs)
	}
}

func replay(t *testing.T, dir string, args ...string) string {
	t.Helper()
	code, out, errs := runReplay(t, dir, args...)
	if code != cli.ExitOK {
		t.Fatal(errs)
	}
	return out
}

func runReplay(t *testing.T, dir string, args ...string) (code int, out, errs string) {
	t.Helper()
	return clitest.Run(t, New(), "", append([]string{"replay", "--state-dir", dir}, args...)...)
}

// A row never ends in half of a character.
func TestShortPayload(t *testing.T) {
	for before := range len("€") { // the cut falls on each of its bytes
		payload := []byte(strings.Repeat("x", before) + strings.Repeat("€", 60))
		if got := shortPayload(payload); !utf8.ValidString(got) || len(got) > maxPayload || !strings.HasSuffix(got, "€...") {
			t.Errorf("got %q", got)
		}
	}
	if got := shortPayload([]byte(`{"a":1}`)); got != `{"a":1}` {
		t.Errorf("got %q", got)
	}
}
