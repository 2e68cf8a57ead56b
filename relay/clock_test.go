package relay

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestClockGuard(t *testing.T) {
	right := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	build := right.AddDate(0, -1, 0)
	for _, tt := range []struct {
		name        string
		now         time.Time
		build       time.Time
		newest      time.Time
		ntp, accept bool
		problem     string // a part of it; "": none
	}{
		{name: "right", now: right, build: build, newest: right.Add(-time.Second)},
		{name: "a new relay", now: right, build: build},
		{name: "1970", now: time.Unix(60, 0), build: build, newest: right, problem: "built"},
		{name: "1970, and NTP is mistaken", now: time.Unix(60, 0), build: build, ntp: true, problem: "built"},
		{name: "1970, a build without its time", now: time.Unix(60, 0), problem: "built"},
		{name: "1970, accepted", now: time.Unix(60, 0), build: build, newest: right, accept: true},
		{name: "an hour behind the newest event", now: right.Add(-time.Hour), build: build, newest: right, problem: "event log"},
		{name: "an hour behind, accepted", now: right.Add(-time.Hour), build: build, newest: right, accept: true},
		{name: "behind, but NTP sets the clock: it was ahead before", now: right, build: build, newest: right.AddDate(0, 0, 40), ntp: true},
		{name: "stepped by some seconds", now: right, build: build, newest: right.Add(30 * time.Second)},
		{name: "ahead", now: right.AddDate(0, 0, 40), build: build, newest: right},
	} {
		g := &clockGuard{accept: tt.accept, build: tt.build, now: func() time.Time { return tt.now }, synchronized: func() bool { return tt.ntp },
			newestEvent: func() time.Time { return tt.newest }, log: zap.NewNop()}
		if tt.build.IsZero() {
			g.build = time.UnixMilli(1_700_000_000_000)
		}
		if got := g.check(); (got == "") != (tt.problem == "") || !strings.Contains(got, tt.problem) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.problem)
		}
	}
}

// A board that retries for hours leaves one line, and another one when it is served.
func TestClockGuardLogsChanges(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	now := time.Unix(0, 0)
	g := &clockGuard{build: time.Unix(1_790_000_000, 0), now: func() time.Time { return now }, synchronized: func() bool { return false },
		newestEvent: func() time.Time { return time.Time{} }, log: zap.New(core)}
	for range 5 {
		g.check()
		now = now.Add(time.Second)
	}
	now = time.Unix(1_795_000_000, 0)
	for range 5 {
		g.check()
	}
	if got := logs.All(); len(got) != 2 || got[0].Level != zap.ErrorLevel || got[1].Level != zap.InfoLevel {
		t.Errorf("logged %v", got)
	}
}
