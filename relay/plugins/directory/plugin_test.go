package directory

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

type scope string

func (s scope) Has(v string) bool { return string(s) == v }

func caller(tenant string) *kernel.Caller {
	return &kernel.Caller{Tenant: tenant, Actor: "x", Scopes: scope(manifest.ScopeToolsList)}
}

const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// TestDirectory: who comes and goes is listed for the tenant concerned and notified to it.
func TestDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{PresenceTimeout: 30 * time.Second})
		p := New(Options{Kernel: k})
		if err := k.Load(p, false); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = k.Run(ctx) })
		wg.Go(func() { _ = p.Run(ctx) })
		defer func() { stop(); wg.Wait() }()
		subs := map[string]*kernel.Subscription{}
		for _, tenant := range []string{"a", "b"} {
			release, err := k.Watch(caller(tenant), URI)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			if subs[tenant], err = k.Subscribe(tenant); err != nil {
				t.Fatal(err)
			}
		}
		notified := func(tenant string) bool {
			synctest.Wait()
			return slices.Equal(subs[tenant].Next().Updated, []string{URI})
		}
		if got := read(t, k, "a"); len(got) != 0 || got == nil {
			t.Errorf("nobody is there: %v", got)
		}
		synctest.Wait()

		start := time.Now().UnixMilli()
		k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: node, Name: "attic", Transport: "link"})
		k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceAgent, ID: "claude"})
		if !notified("a") || notified("b") {
			t.Error("two came: a is to be notified and b not")
		}
		got := read(t, k, "a")
		want := []kernel.Presence{{ID: "claude", Kind: "agent", Status: "online", LastPingMS: start},
			{ID: node, Kind: "device", Name: "attic", Transport: "link", Status: "online", LastPingMS: start}}
		if !slices.Equal(got, want) || len(read(t, k, "b")) != 0 {
			t.Errorf("got %+v, want %+v", got, want)
		}
		k.MarkOffline("a", kernel.PresenceDevice, node)
		if !notified("a") || notified("b") || read(t, k, "a")[1].Status != "offline" {
			t.Errorf("the device went: %+v", read(t, k, "a"))
		}
		time.Sleep(32 * time.Second) // the agent falls silent
		if !notified("a") || read(t, k, "a")[0].Status != "offline" || read(t, k, "a")[0].LastPingMS != start {
			t.Errorf("the agent fell silent: %+v", read(t, k, "a"))
		}

		// Unloaded: the resource and the tool are gone, and subscribers are notified.
		if !k.Unload(p) {
			t.Fatal("not unloaded")
		}
		synctest.Wait()
		if c := subs["b"].Next(); !c.Resources || !c.Tools {
			t.Errorf("notified of %+v", c)
		}
		if _, _, err := k.Read(ctx, caller("a"), URI); !errors.Is(err, kernel.ErrNoResource) {
			t.Errorf("read of an unloaded plugin: %v", err)
		}
		if list, _ := k.ListResources(caller("a"), "", "", 10); len(list) != 0 {
			t.Errorf("listed: %v", list)
		}
	})
}

// read returns the presences of the directory.
func read(t *testing.T, k *kernel.Kernel, tenant string) []kernel.Presence {
	t.Helper()
	list := []kernel.Presence{}
	for _, e := range entries(t, k, tenant) {
		list = append(list, e.Presence)
	}
	return list
}

// Devices have the attributes of the registry, and its name; a removed one is not listed.
func TestAttributes(t *testing.T) {
	const removed = "01hzx9k3m4p7q8r9s0t1v2w3xz"
	k := kernel.New(kernel.Options{})
	p := New(Options{Kernel: k, Lookup: func(id string) (Node, bool) {
		return Node{Name: "attic", NameSet: true, Tags: []string{"north", "roof"}, Description: "under the ridge"}, id == node
	}})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: node, Name: "proposed"})
	k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: removed, Name: "removed"})
	k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceAgent, ID: node, Name: "same id"})
	got := entries(t, k, "a")
	if len(got) != 2 || got[0].NameSet != nil || got[0].Name != "same id" || got[0].Tags != nil {
		t.Fatalf("got %+v", got)
	}
	if e := got[1]; e.Name != "attic" || e.NameSet == nil || !*e.NameSet || !slices.Equal(e.Tags, []string{"north", "roof"}) || e.Description != "under the ridge" {
		t.Errorf("the device is %+v", e)
	}
}

// entries reads the directory by the resource, and compares the tool's answer with it and
// with its schema.
func entries(t *testing.T, k *kernel.Kernel, tenant string) []Entry {
	t.Helper()
	_, data, err := k.Read(context.Background(), caller(tenant), URI)
	if err != nil {
		t.Fatal(err)
	}
	res, err := k.Call(context.Background(), &kernel.Request{Caller: caller(tenant), Tool: Tool})
	if err != nil {
		t.Fatal(err)
	}
	var all, page struct{ Agents json.RawMessage }
	if json.Unmarshal(data, &all) != nil || json.Unmarshal(res.Structured, &page) != nil || !bytes.Equal(page.Agents, all.Agents) {
		t.Fatalf("the tool says %s; the resource %s", res.Structured, data)
	}
	data = res.Structured
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(output)))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("mem:x", doc); err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.MustCompile("mem:x").Validate(value); err != nil {
		t.Errorf("%s: %v", data, err)
	}
	var d Directory
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	return d.Agents
}

// Devices that the registry has seen are listed although the event log does not know them.
func TestSeenDevices(t *testing.T) {
	const gone = "01hzx9k3m4p7q8r9s0t1v2w3xz"
	k := kernel.New(kernel.Options{})
	p := New(Options{Kernel: k, Lookup: func(id string) (Node, bool) { return Node{Name: "n" + id[24:]}, true },
		Seen: func(tenant string, fn func(string, int64)) {
			if tenant == "a" {
				fn(gone, 1234)
				fn(node, 5)
			}
		}})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: node})
	got := entries(t, k, "a")
	if len(got) != 2 || got[0].ID != node || got[0].Status != kernel.Online || got[1].ID != gone || got[1].Status != kernel.Offline || got[1].LastPingMS != 1234 || got[1].Name != "nxz" {
		t.Errorf("listed: %+v", got)
	}
	if got := entries(t, k, "b"); len(got) != 0 {
		t.Errorf("another tenant: %+v", got)
	}
}

func TestRefused(t *testing.T) {
	k := kernel.New(kernel.Options{})
	if err := k.Load(New(Options{Kernel: k}), false); err != nil {
		t.Fatal(err)
	}
	stranger := &kernel.Caller{Tenant: "a", Scopes: scope(manifest.ScopeTicketsRead)}
	if _, _, err := k.Read(t.Context(), stranger, URI); !errors.Is(err, kernel.ErrNoResource) {
		t.Errorf("read without the scope: %v", err)
	}
	for args, want := range map[string]manifest.Code{"{}": manifest.SafetyDenied} {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: stranger, Tool: Tool, Arguments: json.RawMessage(args)}); manifest.AsError(err).Code != want {
			t.Errorf("call without the scope: %v", err)
		}
	}
	for _, args := range []string{`{"x":1}`, `null`, `[]`} {
		if _, err := k.Call(t.Context(), &kernel.Request{Caller: caller("a"), Tool: Tool, Arguments: json.RawMessage(args)}); manifest.AsError(err).Code != manifest.ManifestInvalid {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestPages: the tool filters, an answer has 2 KB unless the caller asks for more, and its pages
// together have each entry once.
func TestPages(t *testing.T) {
	k := kernel.New(kernel.Options{})
	p := New(Options{Kernel: k, Lookup: func(id string) (Node, bool) {
		n := Node{Name: "n" + id[22:], NameSet: true, Description: "Rack of the lab"}
		if id[25] == '7' {
			n.Tags = []string{"roof"}
		}
		return n, true
	}})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	const boards = 100
	for i := range boards {
		id := fmt.Sprintf("01hzx9k3m4p7q8r9s0t1v2%04d", i)
		k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceDevice, ID: id})
		if i%2 == 1 {
			k.MarkOffline("a", kernel.PresenceDevice, id)
		}
	}
	k.Heartbeat(kernel.Presence{Tenant: "a", Kind: kernel.PresenceAgent, ID: "ann@example"})
	k.Heartbeat(kernel.Presence{Tenant: "b", Kind: kernel.PresenceDevice, ID: node})
	type answer struct {
		Agents []Entry
		Total  int
		Next   string `json:"next_cursor"`
	}
	ask := func(args string) (a answer, size int) {
		t.Helper()
		res, err := k.Call(t.Context(), &kernel.Request{Caller: caller("a"), Tool: Tool, Arguments: json.RawMessage(args)})
		if err != nil || json.Unmarshal(res.Structured, &a) != nil {
			t.Fatalf("%s: %v", args, err)
		}
		return a, len(res.Structured)
	}
	var ids []string
	cursor, size := "", 0
	for page := 0; page == 0 || cursor != ""; page++ {
		var a answer
		args := "{}"
		if cursor != "" {
			args = fmt.Sprintf(`{"cursor":%q}`, cursor)
		}
		a, size = ask(args)
		if size > 2048 || len(a.Agents) == 0 || a.Total != boards+1 {
			t.Fatalf("page %d: %d bytes, %d of %d entries", page, size, len(a.Agents), a.Total)
		}
		for _, e := range a.Agents {
			ids = append(ids, e.Kind+e.ID)
		}
		cursor = a.Next
	}
	if len(ids) != boards+1 || !slices.IsSorted(ids) || len(slices.Compact(ids)) != boards+1 {
		t.Errorf("%d entries: %v", len(ids), ids)
	}
	for args, want := range map[string]int{
		`{"limit":1000}`: boards + 1, `{"limit":7}`: 7, `{"kind":"agent"}`: 1, `{"status":"offline","limit":1000}`: boards / 2,
		`{"tag":"roof","limit":1000}`: boards / 10, `{"tag":"cellar"}`: 0, `{"text":"n0042"}`: 1, `{"text":"RACK","limit":1000}`: boards,
		`{"text":"01HZX9K3M4P7Q8R9S0T1V20042"}`: 1, `{"text":"roof"}`: 0, `{"cursor":"device:~"}`: 0,
	} {
		if a, _ := ask(args); len(a.Agents) != want {
			t.Errorf("%s: %d entries, want %d", args, len(a.Agents), want)
		}
	}
}
