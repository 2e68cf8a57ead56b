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

func TestStatusText(t *testing.T) {
	sampling := func(running bool) daemon.SamplingStatus {
		return daemon.SamplingStatus{Sampling: control.Sampling{Running: running, IntervalMS: 1000, Modules: []string{"cpu", "mem"}}}
	}
	for _, tt := range []struct {
		name string
		s    daemon.Status
		want []string
	}{
		{"alone", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Clock: daemon.ClockStatus{State: clock.Local}, Sampling: sampling(true), Sample: &daemon.StatusSample{}},
			[]string{"Clock     this machine's own", "Sampling  every 1s; pushed to local clients: cpu, mem", "agentctl invite"}},
		{"stopped", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Clock: daemon.ClockStatus{State: clock.Local}, Sampling: sampling(false), Sample: &daemon.StatusSample{}},
			[]string{"stopped", "agentctl start"}},
		{"linked", daemon.Status{Link: daemon.LinkStatus{State: link.StateReady}, Clock: daemon.ClockStatus{State: clock.Relay, OffsetMS: 70}, Sampling: sampling(true), Sample: &daemon.StatusSample{}},
			[]string{"Clock     relay, 70 ms off the relay's"}},
		{"1970", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Clock: daemon.ClockStatus{State: clock.Unsynced}, Sampling: sampling(true), Sample: &daemon.StatusSample{}},
			[]string{"Clock     not set yet"}},
		{"begun", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Storage: daemon.StorageStatus{State: "ok", Unsaved: 7}, Sampling: sampling(true), Sample: &daemon.StatusSample{}},
			[]string{"History   7 samples in memory, not written yet"}},
		{"no token", daemon.Status{Link: daemon.LinkStatus{State: link.StateWaiting, LastError: &daemon.LinkError{Message: "read the token: open t: no such file or directory"}}},
			[]string{"last error: read the token: open t", "put the board's token there"}},
		{"TLS there", daemon.Status{Link: daemon.LinkStatus{State: link.StateWaiting, LastError: &daemon.LinkError{Message: "the relay at ws://127.0.0.1:1/v1/device/ws answered HTTP 400 to the device link"}}},
			[]string{"wss:// or ws://"}},
		{"alert of a board without a clock", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Sampling: sampling(true), Sample: &daemon.StatusSample{},
			Clock: daemon.ClockStatus{State: clock.Relay, NowMS: 1_795_000_000_000}, Alerts: []alert.Event{{Level: "warn", Message: "early"}, {Level: "warn", Message: "late", TS: 1_794_999_940_000}}},
			[]string{"Alert     warn: early\n", "Alert     warn: late (60 s ago)\n"}},
		{"a disk that fails", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, StateDir: daemon.StateDirStatus{Path: "/s", State: statedir.Failing, Detail: "read: input/output error", SinceMS: time.Now().UnixMilli() - 60_500}},
			[]string{"State     the disk of /s: failing since 60 s ago: read: input/output error", "see dmesg"}},
		{"files set aside", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, StateDir: daemon.StateDirStatus{Path: "/s", State: statedir.OK,
			SetAside: []daemon.SetAsideFile{{File: "history.db", Aside: "history.db.corrupt-1"}}}},
			[]string{"State     history.db was damaged, and set aside as history.db.corrupt-1", "sudo rm /s/history.db.corrupt-1"}},
		{"a file of root", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, StateDir: daemon.StateDirStatus{Path: "/s", State: statedir.OK,
			SetAside: []daemon.SetAsideFile{{File: "identity.json", Problem: "permission denied"}}}},
			[]string{"State     identity.json is not used, and stays as it is: permission denied", "sudo chown --reference=/s /s/identity.json"}},
		{"a newer history", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Storage: daemon.StorageStatus{State: "degraded:history", Detail: "newer", Path: "/s/history.db"}},
			[]string{"History   degraded:history, in memory only: newer", "the disk is not at fault, and the file stays as it is"}},
		{"dead mount", daemon.Status{Link: daemon.LinkStatus{State: link.StateDisabled}, Sample: &daemon.StatusSample{},
			Sampling: daemon.SamplingStatus{Sampling: control.Sampling{Running: true, IntervalMS: 1000}, DiskError: "statfs /mnt: no answer"}},
			[]string{"Disk      statfs /mnt: no answer", "CPU "}},
	} {
		var b bytes.Buffer
		if err := printStatus(&b, &tt.s); err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(b.String(), want) {
				t.Errorf("%s: no %q in\n%s", tt.name, want, b.String())
			}
		}
	}
}
