//go:build linux

package boardcmd

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"agentctl/control"
	"agentctl/daemon"
	"agentctl/prober/alert"
	"agentctl/statedir"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// aloneStatus is the status of a board that works alone, and that nothing is wrong with.
func aloneStatus() *daemon.Status {
	return &daemon.Status{
		Link:     daemon.LinkStatus{State: link.StateDisabled},
		Clock:    daemon.ClockStatus{State: clock.Local},
		StateDir: daemon.StateDirStatus{Path: "/s", State: statedir.OK},
		Sampling: daemon.SamplingStatus{Sampling: control.Sampling{Running: true, IntervalMS: 1000, Modules: []string{"cpu", "mem"}}},
		Sample:   &daemon.StatusSample{},
	}
}

// Each state of a board has its row, and what is wrong has its next step.
func TestPrintStatus(t *testing.T) {
	t.Parallel()
	const now = 1_795_000_000_000 // by the board's clock, milliseconds since 1970
	tests := []struct {
		name string
		edit func(s *daemon.Status)
		want []string
	}{
		{"a board that works alone", func(*daemon.Status) {},
			[]string{"Clock     this machine's own", "Sampling  every 1s; pushed to local clients: cpu, mem", "agentctl invite"}},
		{"sampling is stopped", func(s *daemon.Status) { s.Sampling.Running = false },
			[]string{"Sampling  every 1s; push and recording are stopped", "agentctl start"}},
		{"a board at a relay", func(s *daemon.Status) {
			s.Link.State, s.Clock = link.StateReady, daemon.ClockStatus{State: clock.Relay, OffsetMS: 70}
		}, []string{"Clock     relay, 70 ms off the relay's"}},
		{"a clock that is not set", func(s *daemon.Status) { s.Clock.State = clock.Unsynced },
			[]string{"Clock     not set yet"}},
		{"a history before its first write", func(s *daemon.Status) { s.Storage = daemon.StorageStatus{State: "ok", Unsaved: 7} },
			[]string{"History   7 samples in memory, not written yet"}},
		{"a history of a newer version", func(s *daemon.Status) {
			s.Storage = daemon.StorageStatus{State: "degraded:history", Detail: "newer", Path: "/s/history.db"}
		}, []string{"History   degraded:history, in memory only: newer", "the disk is not at fault, and the file stays as it is"}},
		{"no token", func(s *daemon.Status) {
			s.Link = daemon.LinkStatus{State: link.StateWaiting, LastError: &daemon.LinkError{Message: "read the token: open t: no such file or directory"}}
		}, []string{"last error: read the token: open t", "put the board's token there"}},
		{"ws:// to a relay with TLS", func(s *daemon.Status) {
			s.Link = daemon.LinkStatus{State: link.StateWaiting, LastError: &daemon.LinkError{Message: "the relay at ws://127.0.0.1:1/v1/device/ws answered HTTP 400 to the device link"}}
		}, []string{"wss:// or ws://"}},
		{"alerts, one from before the clock was set", func(s *daemon.Status) {
			s.Clock = daemon.ClockStatus{State: clock.Relay, NowMS: now}
			s.Alerts = []alert.Event{{Level: "warn", Message: "early"}, {Level: "warn", Message: "late", TS: now - 60_000}}
		}, []string{"Alert     warn: early\n", "Alert     warn: late (60 s ago)\n"}},
		{"a disk that fails", func(s *daemon.Status) {
			s.StateDir.State, s.StateDir.Detail, s.StateDir.SinceMS = statedir.Failing, "read: input/output error", time.Now().UnixMilli()-60_500
		}, []string{"State     the disk of /s: failing since 60 s ago: read: input/output error", "see dmesg"}},
		{"a file that was set aside", func(s *daemon.Status) {
			s.StateDir.SetAside = []daemon.SetAsideFile{{File: "history.db", Aside: "history.db.corrupt-1"}}
		}, []string{"State     history.db was damaged, and set aside as history.db.corrupt-1", "sudo rm /s/history.db.corrupt-1"}},
		{"a file of root", func(s *daemon.Status) {
			s.StateDir.SetAside = []daemon.SetAsideFile{{File: "identity.json", Problem: "permission denied"}}
		}, []string{"State     identity.json is not used, and stays as it is: permission denied", "sudo chown --reference=/s /s/identity.json"}},
		{"a mount that does not answer", func(s *daemon.Status) { s.Sampling.DiskError = "statfs /mnt: no answer" },
			[]string{"Disk      statfs /mnt: no answer", "CPU "}},
		{"a relay that writes to the terminal", func(s *daemon.Status) {
			s.NodeID, s.Name = "n1", "a\x1b[2J"
			s.Join = &daemon.JoinStatus{State: "refused", Error: "no\x1b]0;x\a\nClock     fine", Hint: "see it"}
		}, []string{"Node      a?[2J (n1)\n", "Join      refused: no?]0;x??Clock     fine\n"}},
	}
	for _, tt := range tests {
		s := aloneStatus()
		tt.edit(s)
		var out bytes.Buffer
		if err := printStatus(&out, s); err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: no %q in\n%s", tt.name, want, out.String())
			}
		}
	}
}
