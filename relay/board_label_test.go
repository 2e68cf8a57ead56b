package relay

import (
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// TestExplainOffline: an error about a board that is away names it in the operator's words and says
// since when; nothing but the message changes, and other errors stay.
func TestExplainOffline(t *testing.T) {
	r := newAdminTest(t).r
	named, proposed := manifest.NewNodeID(), manifest.NewNodeID()
	for id, name := range map[string]string{named: "", proposed: "ignore-all-rules"} {
		if _, err := r.store.UpsertNode(t.Context(), "default", id, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.store.SetNodeAttributes(t.Context(), "default", named, auth.Attributes{Name: new("attic")}, false); err != nil {
		t.Fatal(err)
	}
	r.store.MarkSeen(named, proposed)
	if got := r.explainOffline(manifest.NewNodeID(), errOffline()); !strings.Contains(got.Message, "never connected") {
		t.Error(got.Message)
	}
	offline := errOffline()
	for id, want := range map[string]string{named: "attic is not connected; last seen 20", proposed: manifest.ShortID(proposed) + " is not connected; last seen 20"} {
		got := r.explainOffline(id, offline)
		if !strings.HasPrefix(got.Message, want) || !strings.Contains(got.Message, "fleet.events") {
			t.Errorf("got %q, want %q", got.Message, want)
		}
		c := *got
		if c.Message = offline.Message; c != *offline {
			t.Errorf("more than the message is different: %+v", got)
		}
		// The same for a call by name, which no plugin has.
		_, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: &kernel.Caller{Tenant: "default", Scopes: allScopes{}}, Tool: "sys." + id + ".metrics.snapshot"})
		if e := manifest.AsError(err); e.Code != manifest.NodeOffline || !strings.HasPrefix(e.Message, want) {
			t.Errorf("a call: %v", err)
		}
	}
	doubt := &manifest.Error{Code: manifest.NodeOffline, Message: "x", Reason: "in_doubt", Outcome: manifest.OutcomeUnknown}
	if got := r.explainOffline(named, doubt); got != doubt {
		t.Errorf("an error of a call that may have run: %+v", got)
	}
}

// TestUnknownBoard: another tenant's board gets the answer of one that does not exist.
func TestUnknownBoard(t *testing.T) {
	r := newAdminTest(t).r
	own, foreign := manifest.NewNodeID(), manifest.NewNodeID()
	for id, tenant := range map[string]string{own: "default", foreign: "other"} {
		if _, err := r.store.UpsertNode(t.Context(), tenant, id, "", nil); err != nil {
			t.Fatal(err)
		}
	}
	call := func(id string) string {
		_, err := r.kernel.Call(t.Context(), &kernel.Request{Caller: &kernel.Caller{Tenant: "default", Scopes: allScopes{}}, Tool: "sys." + id + ".metrics.snapshot"})
		return manifest.AsError(err).Error()
	}
	if a, b := call(foreign), call("0"+strings.Repeat("z", 25)); a != b || strings.Contains(a, foreign[:12]) {
		t.Errorf("%q for another tenant's board, %q for none", a, b)
	}
	typo := own[:25] + map[bool]string{true: "1", false: "0"}[own[25] == '0']
	if got := call(typo); !strings.Contains(got, manifest.ShortID(own)) || !strings.Contains(got, "fleet.find") {
		t.Error(got)
	}
}
