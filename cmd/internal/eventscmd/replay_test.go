//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

// The log of the transcript's relay gives the transcript byte for byte, while a relay writes to it and
// afterwards; the flags select events and formats.
func TestReplay(t *testing.T) {
	b, err := os.ReadFile(goldenEvents)
	if err != nil {
		t.Fatal(err)
	}
	golden := string(b)
	dir := t.TempDir()
	count, closeLog := logTranscript(t, dir, b)
	whileOpen := replay(t, dir, "-o", "ndjson")
	closeLog()
	if *updateEvents {
		if err := os.WriteFile(goldenEvents, []byte(whileOpen), 0o644); err != nil {
			t.Fatal(err)
		}
		golden = whileOpen
	}
	if whileOpen != golden {
		t.Errorf("while the log is open: printed\n%s\nwant\n%s", whileOpen, golden)
	}
	lines := strings.SplitAfter(golden, "\n")
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"all", nil, golden},
		{"from the third on", []string{"--from", "7352863948800002"}, strings.Join(lines[2:], "")},
		{"types of a tenant", []string{"--type", "ticket.*", "--tenant", "greenhouse"}, lines[2] + lines[3]},
		{"no such type", []string{"--type", "none"}, ""},
	} {
		if got := replay(t, dir, append([]string{"-o", "ndjson"}, tt.args...)...); got != tt.want {
			t.Errorf("%s: printed\n%s\nwant\n%s", tt.name, got, tt.want)
		}
	}
	t.Run("JSON", func(t *testing.T) {
		var list []kernel.Event
		if err := json.Unmarshal([]byte(replay(t, dir, "--json")), &list); err != nil || len(list) != count {
			t.Errorf("%d events, %v; want %d", len(list), err, count)
		}
		if got := replay(t, dir, "--json", "--type", "none"); got != "[]\n" {
			t.Errorf("without events: printed %q, want []", got)
		}
	})
	t.Run("table", func(t *testing.T) {
		table := replay(t, dir)
		if !strings.Contains(table, "7352863948800000  2026-11-20T00:00:00Z  default") || strings.Count(table, "\n") != count+1 {
			t.Errorf("printed\n%s\nwant a title and %d rows", table, count)
		}
		if got := replay(t, dir, "--type", "none"); got != "" {
			t.Errorf("without events: printed %q on stdout", got)
		}
	})
}

// A directory without a log is an error that names the flag for another one.
func TestReplayWithoutLog(t *testing.T) {
	if code, _, errs := runReplay(t, t.TempDir()); code != cli.ExitFailure || !strings.Contains(errs, "--state-dir") {
		t.Errorf("exit %d, %s; want %d with --state-dir", code, errs, cli.ExitFailure)
	}
}

// logTranscript logs the events of a transcript in dir, as a relay does that started at goldenTime, and
// returns how many there are. The log stays open until closeLog.
func logTranscript(t *testing.T, dir string, transcript []byte) (count int, closeLog func()) {
	t.Helper()
	log, err := eventlog.Open(eventlog.Options{Path: filepath.Join(dir, eventlog.FileName), Now: func() time.Time { return goldenTime }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- log.Run(ctx) }()
	for dec := json.NewDecoder(bytes.NewReader(transcript)); dec.More(); count++ {
		var e kernel.Event
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err)
		}
		err := eventlog.ErrNotRunning
		for errors.Is(err, eventlog.ErrNotRunning) { // until Run runs
			_, err = log.Append(ctx, e)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return count, func() {
		cancel()
		<-done
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// replay prints the log in dir, which must succeed.
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

// A row of the table never ends in half of a character.
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
