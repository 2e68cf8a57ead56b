package kernel_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"agentctl/relay/kernel"
)

// A flag of a device is listed and reported once for each change; suspect ends with the link,
// and a suspected clone survives a restart.
func TestFlagPresence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log kernel.MemoryLog
		k := kernel.New(kernel.Options{Log: &log})
		var reports []string
		k.OnPresence(func(p kernel.Presence) {
			reports = append(reports, fmt.Sprint(p.Status, " ", p.Suspect, " ", p.CloneSuspected))
		})
		device := kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: nodeA}
		flag := func(f kernel.Flag, on bool) { k.FlagPresence("a", kernel.PresenceDevice, nodeA, f, on) }
		flag(kernel.FlagSuspect, true) // not known yet
		k.Heartbeat(device)
		flag(kernel.FlagSuspect, true)
		flag(kernel.FlagSuspect, true)
		flag(kernel.FlagCloneSuspected, true)
		k.MarkOffline("a", kernel.PresenceDevice, nodeA)
		k.Heartbeat(device)
		if got := strings.Join(reports, ", "); got != "online false false, online true false, online true true, offline false true, online false true" {
			t.Errorf("reports: %s", got)
		}
		again := kernel.New(kernel.Options{Log: &log})
		if err := again.RestorePresence(t.Context(), &log); err != nil {
			t.Fatal(err)
		}
		if list := again.ListPresence("a"); len(list) != 1 || !list[0].CloneSuspected || list[0].Suspect {
			t.Errorf("restored: %+v", list)
		}
	})
}

// The tools of an unlisted plugin are in no list, but can be called by name; its replacement
// notifies the clients.
func TestUnlisted(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := board("a", nodeA)
	load(t, k, p)
	sub, err := k.Subscribe("a")
	if err != nil {
		t.Fatal(err)
	}
	hidden := board("a", nodeA)
	hidden.Manifest().Unlisted = true
	if err := k.Load(hidden, true); err != nil {
		t.Fatal(err)
	}
	if tools, _ := k.ListTools(reader("a"), "", 10); len(tools) != 0 {
		t.Errorf("listed: %v", tools)
	}
	if c := sub.Next(); !c.Tools {
		t.Errorf("notified of %+v", c)
	}
	if _, ok := k.Tool(reader("a"), echoTool(nodeA)); !ok {
		t.Error("not found by name")
	}
	if err := k.Load(p, true); err != nil {
		t.Fatal(err)
	}
	if tools, _ := k.ListTools(reader("a"), "", 10); len(tools) == 0 {
		t.Error("not listed again")
	}
}
