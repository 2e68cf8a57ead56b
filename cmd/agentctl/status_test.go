package main

import (
	"bytes"
	"strings"
	"testing"

	"agentctl/control"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

func TestStatusText(t *testing.T) {
	sampling := func(running bool) samplingStatus {
		return samplingStatus{Sampling: control.Sampling{Running: running, IntervalMS: 1000, Modules: []string{"cpu", "mem"}}}
	}
	for _, tt := range []struct {
		name string
		s    status
		want []string
	}{
		{"alone", status{Link: linkStatus{State: link.StateDisabled}, Clock: clockStatus{State: clock.Local}, Sampling: sampling(true), Sample: &statusSample{}},
			[]string{"Clock     this machine's own", "Sampling  every 1s; pushed to local clients: cpu, mem", "config set relay URL"}},
		{"stopped", status{Link: linkStatus{State: link.StateDisabled}, Clock: clockStatus{State: clock.Local}, Sampling: sampling(false), Sample: &statusSample{}},
			[]string{"stopped", "agentctl start"}},
		{"linked", status{Link: linkStatus{State: link.StateReady}, Clock: clockStatus{State: clock.Relay, OffsetMS: 70}, Sampling: sampling(true), Sample: &statusSample{}},
			[]string{"Clock     relay, 70 ms off the relay's"}},
		{"1970", status{Link: linkStatus{State: link.StateDisabled}, Clock: clockStatus{State: clock.Unsynced}, Sampling: sampling(true), Sample: &statusSample{}},
			[]string{"Clock     not set yet"}},
		{"begun", status{Link: linkStatus{State: link.StateDisabled}, Storage: storageStatus{State: "ok", Unsaved: 7}, Sampling: sampling(true), Sample: &statusSample{}},
			[]string{"History   7 samples in memory, the first write is to come"}},
		{"no token", status{Link: linkStatus{State: link.StateWaiting, LastError: &linkError{Message: "read the token: open t: no such file or directory"}}},
			[]string{"last error: read the token: open t", "put the board's token there"}},
		{"TLS there", status{Link: linkStatus{State: link.StateWaiting, LastError: &linkError{Message: "the relay at ws://127.0.0.1:1/v1/device/ws answered HTTP 400 to the device link"}}},
			[]string{"wss:// or ws://"}},
		{"dead mount", status{Link: linkStatus{State: link.StateDisabled}, Sample: &statusSample{},
			Sampling: samplingStatus{Sampling: control.Sampling{Running: true, IntervalMS: 1000}, DiskError: "statfs /mnt: no answer"}},
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
