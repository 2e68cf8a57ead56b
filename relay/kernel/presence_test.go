package kernel_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

func agent(tenant, id string) kernel.Presence {
	return kernel.Presence{Tenant: tenant, ID: id, Kind: kernel.PresenceAgent, Name: "n-" + id, Transport: "http"}
}

func directory(k *kernel.Kernel, tenant string) string {
	var b []string
	for _, p := range k.ListPresence(tenant) {
		b = append(b, p.Kind+" "+p.ID+" "+p.Status)
	}
	return strings.Join(b, ", ")
}

// Who is silent for the timeout is offline, at most a second late; who comes back is
// online; each change is notified once, in order, to the hooks and to the log.
func TestPresence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log kernel.MemoryLog
		k := kernel.New(kernel.Options{Log: &log})
		run(t, k)
		var notified []string
		remove := k.OnPresence(func(p kernel.Presence) {
			notified = append(notified, fmt.Sprint(p.Tenant, " ", p.ID, " ", p.Status, " ", len(k.ListPresence(p.Tenant))))
		})
		start := time.Now()
		k.Heartbeat(agent("a", "two"))
		k.Heartbeat(agent("a", "one"))
		k.Heartbeat(kernel.Presence{Tenant: "a", ID: nodeA, Kind: kernel.PresenceDevice})
		k.Heartbeat(agent("b", "one"))
		if got := directory(k, "a"); got != "agent one online, agent two online, device "+nodeA+" online" {
			t.Errorf("directory: %s", got)
		}
		if got := directory(k, "c"); got != "" {
			t.Errorf("a caller without scopes sees %s", got)
		}
		for range 100 { // one goes on
			time.Sleep(time.Second)
			k.Heartbeat(agent("a", "one"))
		}
		synctest.Wait()
		if got := directory(k, "a"); got != "agent one online, agent two offline, device "+nodeA+" offline" {
			t.Errorf("after 100 s: %s", got)
		}
		if p := k.ListPresence("a")[0]; p.LastPingMS != time.Now().UnixMilli() || p.Name != "n-one" || p.Transport != "http" {
			t.Errorf("the one that goes on: %+v", p)
		}
		if p := k.ListPresence("a")[1]; p.LastPingMS != start.UnixMilli() {
			t.Errorf("the silent one: %+v", p)
		}
		k.Heartbeat(agent("a", "two"))
		k.MarkOffline("a", kernel.PresenceAgent, "one")
		k.MarkOffline("a", kernel.PresenceAgent, "one")
		k.MarkOffline("a", kernel.PresenceAgent, "nobody")
		want := []string{"a two online 1", "a one online 2", "a " + nodeA + " online 3", "b one online 1",
			"a two offline 3", "a " + nodeA + " offline 3", "b one offline 1", "a two online 3", "a one offline 3"}
		if !slices.Equal(notified, want) {
			t.Errorf("notified %q,\nwant %q", notified, want)
		}
		var logged []string
		_ = log.Replay(t.Context(), 0, func(e kernel.Event) error {
			logged = append(logged, fmt.Sprint(e.Tenant, " ", e.Aggregate, " ", strings.TrimPrefix(e.Type, "presence.")))
			return nil
		})
		for i := range want {
			want[i] = want[i][:strings.LastIndexByte(want[i], ' ')]
		}
		if !slices.Equal(logged, want) {
			t.Errorf("logged %q,\nwant %q", logged, want)
		}
		remove()
		remove()
		before := len(notified)
		k.Heartbeat(agent("a", "three"))
		if len(notified) != before {
			t.Error("notified after remove")
		}
	})
}

// Who stays away for a month is forgotten, by a restart as well.
func TestPresenceRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log kernel.MemoryLog
		month := 30 * 24 * time.Hour
		for id, ago := range map[string]time.Duration{"nearly": month - time.Minute, "over": month + time.Minute} {
			payload := fmt.Sprintf(`{"id":%q,"kind":"agent","status":"offline","last_ping_at":%d}`, id, time.Now().Add(-ago).UnixMilli())
			if _, err := log.Append(t.Context(), kernel.Event{Tenant: "a", Type: "presence.offline", Aggregate: id, Payload: []byte(payload)}); err != nil {
				t.Fatal(err)
			}
		}
		k := kernel.New(kernel.Options{})
		if err := k.RestorePresence(t.Context(), &log); err != nil {
			t.Fatal(err)
		}
		if got := directory(k, "a"); got != "agent nearly offline" {
			t.Errorf("restored %s", got)
		}
		run(t, k)
		time.Sleep(2 * time.Minute)
		if got := directory(k, "a"); got != "" {
			t.Errorf("after a month of silence: %s", got)
		}
	})
}

// A restart rebuilds who was there; who was online has a timeout to come back, and no one
// is notified until it is over. The snapshot is enough for the same.
func TestRestorePresence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log kernel.MemoryLog
		k := kernel.New(kernel.Options{Log: &log})
		k.Heartbeat(agent("a", "one"))
		k.Heartbeat(agent("a", "two"))
		k.Heartbeat(agent("b", "one"))
		k.MarkOffline("a", kernel.PresenceAgent, "two")
		time.Sleep(time.Hour) // the log says nothing of those who stay
		var snapshot kernel.MemoryLog
		if _, err := snapshot.Append(t.Context(), k.PresenceSnapshot()...); err != nil {
			t.Fatal(err)
		}
		for name, l := range map[string]kernel.Log{"log": &log, "snapshot": &snapshot} {
			fresh := kernel.New(kernel.Options{})
			var mu sync.Mutex
			var reports []string
			fresh.OnPresence(func(p kernel.Presence) {
				mu.Lock()
				defer mu.Unlock()
				reports = append(reports, p.Tenant+" "+p.ID+" "+p.Status)
			})
			notified := func() []string {
				mu.Lock()
				defer mu.Unlock()
				return slices.Clone(reports)
			}
			if err := fresh.RestorePresence(t.Context(), l); err != nil {
				t.Fatal(err)
			}
			if a, b := fmt.Sprint(fresh.ListPresence("a"), fresh.ListPresence("b")), fmt.Sprint(k.ListPresence("a"), k.ListPresence("b")); a != b {
				t.Errorf("%s: got %s, want %s", name, a, b)
			}
			stop := run(t, fresh)
			time.Sleep(80 * time.Second)
			fresh.Heartbeat(agent("a", "one"))
			synctest.Wait()
			if len(notified()) != 0 {
				t.Errorf("%s: notified %q", name, notified())
			}
			time.Sleep(15 * time.Second)
			synctest.Wait()
			if got := notified(); !slices.Equal(got, []string{"b one offline"}) {
				t.Errorf("%s: notified %q", name, got)
			}
			stop()
		}
	})
}

// The newest event counts, of each kind: a device and an agent may have the same id.
func TestRestorePresenceNewest(t *testing.T) {
	log := kernel.MemoryLog{Max: 1 << 20}
	k := kernel.New(kernel.Options{Log: &log})
	for i := range 5 {
		for _, kind := range []string{kernel.PresenceAgent, kernel.PresenceDevice} {
			p := kernel.Presence{Tenant: "a", ID: "same", Kind: kind, Name: fmt.Sprint(kind, i), Transport: "http"}
			k.Heartbeat(p)
			if kind == kernel.PresenceAgent || i < 4 {
				k.MarkOffline("a", kind, "same")
			}
		}
	}
	const boards = 1000
	for i := range 3 * boards {
		e := kernel.Event{Tenant: "b", Type: "presence.offline", Aggregate: fmt.Sprint(i % boards)}
		e.Payload = fmt.Appendf(nil, `{"status":"offline","kind":"agent","id":%q,"name":"n%d","last_ping_at":%d}`, e.Aggregate, i, time.Now().UnixMilli())
		if !log.Offer(e) {
			t.Fatal("not kept")
		}
	}
	fresh := kernel.New(kernel.Options{})
	if err := fresh.RestorePresence(t.Context(), &log); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(fresh.ListPresence("a")), fmt.Sprint(k.ListPresence("a")); got != want || directory(fresh, "a") != "agent same offline, device same online" {
		t.Errorf("got %s, want %s", got, want)
	}
	list := fresh.ListPresence("b")
	if len(list) != boards {
		t.Fatalf("%d entries", len(list))
	}
	for _, p := range list {
		var i int
		if _, err := fmt.Sscan(p.ID, &i); err != nil || p.Name != fmt.Sprint("n", i+2*boards) {
			t.Errorf("%+v is not the newest", p)
		}
	}
}

// Entries are bounded: the one that is offline for longest gives way, one a second; who
// is online stays.
func TestPresenceIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		for i := range kernel.MaxPresences {
			k.Heartbeat(agent("a", fmt.Sprint(i)))
		}
		k.Heartbeat(agent("a", "more"))
		if n := k.Stats().Presences; n != kernel.MaxPresences {
			t.Fatalf("%d entries", n)
		}
		time.Sleep(2 * time.Second)
		k.MarkOffline("a", kernel.PresenceAgent, "7")
		k.Heartbeat(agent("a", "more"))
		k.Heartbeat(agent("a", "most")) // in the same second
		var found []string
		for _, p := range k.ListPresence("a") {
			if p.ID == "7" || p.ID == "more" || p.ID == "most" {
				found = append(found, p.ID)
			}
		}
		if !slices.Equal(found, []string{"more"}) || k.Stats().Presences != kernel.MaxPresences {
			t.Errorf("found %v, %d entries", found, k.Stats().Presences)
		}
	})
}

// A newcomer evicts somebody from the first moment on: a full directory is often one that
// was just restored.
func TestPresenceEvictsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := kernel.New(kernel.Options{})
		for i := range kernel.MaxPresences {
			k.Heartbeat(agent("a", fmt.Sprint(i)))
		}
		k.MarkOffline("a", kernel.PresenceAgent, "7")
		k.Heartbeat(agent("b", "new"))
		if len(k.ListPresence("b")) != 1 {
			t.Error("the newcomer was not recorded")
		}
	})
}

// Status changes from many sides end in what was said last, and the hooks hear every
// change as a change.
func TestPresenceConcurrently(t *testing.T) {
	k := kernel.New(kernel.Options{})
	last, changes := "", 0
	k.OnPresence(func(p kernel.Presence) {
		if p.Status == last {
			t.Errorf("notified %s twice in a row", last)
		}
		last = p.Status
		changes++
	})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				k.Heartbeat(agent("a", "one"))
				k.MarkOffline("a", kernel.PresenceAgent, "one")
			}
		})
	}
	wg.Wait()
	if p := k.ListPresence("a")[0]; p.Status != last || last != kernel.Offline || changes < 2 {
		t.Errorf("notified %s after %d changes, the directory says %s", last, changes, p.Status)
	}
}

// Who has been online for longer than the offline are remembered is restored; who went offline long
// ago is not, whatever older events say.
func TestRestoreOldPresence(t *testing.T) {
	old := time.Now().Add(-2 * kernel.PresenceRetention).UnixMilli()
	log := &kernel.MemoryLog{}
	for _, e := range []struct{ id, status string }{{"long", kernel.Online}, {"gone", kernel.Online}, {"gone", kernel.Offline}, {"back", kernel.Offline}, {"back", kernel.Online}} {
		payload, err := json.Marshal(kernel.Presence{ID: e.id, Kind: kernel.PresenceDevice, Status: e.status, LastPingMS: old})
		if err != nil {
			t.Fatal(err)
		}
		log.Offer(kernel.Event{Tenant: "a", Type: "presence." + e.status, Aggregate: e.id, Payload: payload})
	}
	k := kernel.New(kernel.Options{})
	if err := k.RestorePresence(t.Context(), log); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range k.ListPresence("a") {
		got = append(got, p.ID+" "+p.Status)
	}
	if want := "[back online long online]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}
