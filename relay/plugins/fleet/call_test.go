package fleet

import (
	"context"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// A tool is called as the caller, under each of its names, with the arguments as they are.
func TestCallOne(t *testing.T) {
	for _, tool := range []string{"snapshot", "metrics.snapshot", "sys." + nodeID(0) + ".metrics.snapshot", "sys_" + nodeID(0) + "_metrics_snapshot"} {
		f := newFleet(1)
		data, err := call(t, f.plugin(), reader, "fleet.call", `{"board":"board-000","tool":"`+tool+`","arguments":{"a":1}}`)
		if err != nil || !strings.HasPrefix(data, `{"cpu_pct":0`) || f.calls() != 1 {
			t.Errorf("%s: %d calls, then %s, %v; want one call and what the board answered", tool, f.calls(), data, err)
			continue
		}
		r := f.requests[0]
		if r.Tool != "sys."+nodeID(0)+".metrics.snapshot" || string(r.Arguments) != `{"a":1}` || !r.Stream || r.Caller != reader || r.MarkUntrusted {
			t.Errorf("%s: the kernel got %+v", tool, r)
		}
	}
}

func TestCallOneRefused(t *testing.T) {
	f := newFleet(3)
	f.tools[nodeID(1)] = []manifest.Tool{}
	f.announce(2, manifest.KindInfo)
	f.tools[nodeID(2)][0].Capability.CapID = "obey" // a word that the board chose
	p := f.plugin()
	for _, tt := range []struct {
		args string
		code manifest.Code
		want string
	}{
		{`{"board":"board-000","tool":"reboot"}`, manifest.BadRequest, "board-000 has no such tool; it has echo, snapshot, subscribe, history, info, modules, journal"},
		{`{"board":"board-000","tool":"sys.` + nodeID(1) + `.metrics.snapshot"}`, manifest.BadRequest, "has no such tool"},
		{`{"board":"board-001","tool":"snapshot"}`, manifest.BadRequest, "never connected"},
		{`{"board":"board-002","tool":"snapshot"}`, manifest.BadRequest, "has no such tool; fleet.describe"},
		{`{"board":"nowhere","tool":"snapshot"}`, manifest.SafetyDenied, "fleet.find"},
		{`{"board":"01j8zz","tool":"snapshot"}`, manifest.ManifestInvalid, "several board ids"},
		{`{"tool":"snapshot"}`, manifest.ManifestInvalid, "board: missing"},
	} {
		refused(t, p, reader, "fleet.call", tt.args, tt.code, tt.want)
	}
}

// The error of the tool is the answer.
func TestCallOneKeepsTheError(t *testing.T) {
	f := newFleet(1)
	own := &manifest.Error{Code: manifest.Internal, Reason: "device"}
	f.answers[nodeID(0)] = func(context.Context, manifest.ToolName, []byte) (string, error) { return "", own }
	if _, err := call(t, f.plugin(), reader, "fleet.call", `{"board":"board-000","tool":"snapshot"}`); err != error(own) {
		t.Errorf("got %v, want the tool's own error", err)
	}
}

// Plain HTTP has no stream of a plugin's tool.
func TestCallOneRefusesStreams(t *testing.T) {
	_, err := newFleet(1).plugin().callOne(t.Context(), &kernel.Request{Caller: reader, Arguments: []byte(`{"board":"board-000","tool":"subscribe"}`)})
	if e := manifest.AsError(err); err == nil || e.Reason != "unary_on_stream" {
		t.Errorf("got %v, want the reason unary_on_stream", err)
	}
}
