package relay

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// replayTest is a running relay whose event log is verified.
type replayTest struct {
	t    *testing.T
	r    *Relay
	dir  string
	stop func()
}

func newReplayTest(t *testing.T, disabled ...string) *replayTest {
	t.Helper()
	dir, err := os.MkdirTemp("", "ac") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := Open(Options{StateDir: dir, Listen: "127.0.0.1:0", DisabledPlugins: disabled})
	if err != nil {
		t.Fatal(err)
	}
	g := &replayTest{t: t, r: r, dir: dir, stop: run(t, r)}
	awaitStatus(t, dir)
	return g
}

// change changes the ten agents of one writer until it is stopped, and makes tickets at first: a check
// takes longer with each of them.
func (g *replayTest) change(writer int, stopped *atomic.Bool) {
	const tickets = 50
	tenant := fmt.Sprint("tenant-", writer)
	for i := 0; !stopped.Load(); i++ {
		if i < tickets {
			id := g.call(tenant, "tickets.create", `{"title":"x"}`)
			g.call(tenant, "tickets.comment", `{"id":"`+id+`","text":"c"}`)
			g.call(tenant, "tickets.transition", `{"id":"`+id+`","to":"closed"}`)
		}
		a := g.agent(10*writer + i%10)
		g.r.kernel.Heartbeat(a)
		if i%3 > 0 {
			g.r.kernel.MarkOffline(a.Tenant, a.Kind, a.ID)
		}
		g.r.kernel.FlagPresence(a.Tenant, a.Kind, a.ID, kernel.FlagCloneSuspected, i%2 == 0)
		if err := g.r.queue.Wait(g.t.Context(), g.r.queue.Mark()); err != nil { // as fast as they are stored
			g.t.Error(err)
			return
		}
	}
}

// call calls a tool of tickets and returns the id of the ticket.
func (g *replayTest) call(tenant, tool, args string) string {
	g.t.Helper()
	scopes, err := auth.ParseScopes(manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite)
	if err != nil {
		g.t.Fatal(err)
	}
	res, err := g.r.kernel.Call(g.t.Context(), &kernel.Request{Tool: tool, Arguments: json.RawMessage(args), Caller: &kernel.Caller{Tenant: tenant, Actor: "ann", Scopes: scopes}})
	if err != nil {
		g.t.Error(err)
		return ""
	}
	var out struct{ Ticket struct{ ID string } }
	_ = json.Unmarshal(res.Structured, &out)
	return out.Ticket.ID
}

func (g *replayTest) agent(i int) kernel.Presence {
	return kernel.Presence{Tenant: "default", Kind: kernel.PresenceAgent, ID: fmt.Sprint("agent-", i), Transport: "mcp"}
}

func (g *replayTest) verify() *Replayed {
	g.t.Helper()
	res, err := VerifyReplay(g.t.Context(), g.dir)
	if err != nil {
		g.t.Fatal(err)
	}
	return res
}

// The state of the log is that of the relay, while it changes as fast as it can and afterwards, and
// without the relay.
func TestVerifyReplay(t *testing.T) {
	g := newReplayTest(t)
	if res := g.verify(); res.Total != 0 || !res.Live || res.Tickets != 0 || res.PID != os.Getpid() {
		t.Errorf("an empty relay: %+v", res)
	}
	var writers sync.WaitGroup
	var stopped atomic.Bool
	for w := range 2 {
		writers.Go(func() { g.change(w, &stopped) })
	}
	for i := range 10 {
		// One attempt: VerifyReplay reports only what differs in each of three.
		res, found, err := verifyReplay(t.Context(), g.dir)
		if err != nil || len(found) > 0 || !res.Live {
			t.Errorf("check %d, while tickets and presence change: %v, %+v, want no differences", i, err, found)
		}
	}
	stopped.Store(true)
	writers.Wait()
	atRest := g.verify()
	if atRest.Total != 0 || atRest.Tickets == 0 || atRest.Presences < 2 {
		t.Errorf("at rest: %+v, want no differences, and tickets and presences", atRest)
	}
	g.stop()
	if res := g.verify(); res.Total != 0 || res.Live || res.Tickets != atRest.Tickets {
		t.Errorf("without the relay: %+v, want the %d tickets that it had", res, atRest.Tickets)
	}
}

// What the relay has and the log has not, and the other way around, is named.
func TestVerifyReplayDiffers(t *testing.T) {
	g := newReplayTest(t)
	id := g.call("default", "tickets.create", `{"title":"x"}`)
	g.r.kernel.Heartbeat(g.agent(1))
	if res := g.verify(); res.Total != 0 {
		t.Fatalf("before: %+v", res)
	}
	payload, err := json.Marshal(kernel.Presence{ID: "ghost", Kind: kernel.PresenceAgent, Status: kernel.Online, LastPingMS: time.Now().UnixMilli()})
	if err != nil {
		t.Fatal(err)
	}
	ghost := &kernel.MemoryLog{}
	ghost.Offer(kernel.Event{Tenant: "default", Type: "presence.online", Aggregate: "ghost", Payload: payload})
	if err := g.r.kernel.RestorePresence(t.Context(), ghost); err != nil { // past the log
		t.Fatal(err)
	}
	assign := kernel.Event{Tenant: "default", Type: "ticket.assigned", Aggregate: id, Payload: json.RawMessage(`{"v":2,"by":"eve","agent_id":"eve"}`)}
	if _, err := g.r.events.Append(t.Context(), assign); err != nil { // past the plugin
		t.Fatal(err)
	}
	res := g.verify()
	var got []string
	for _, d := range res.Differences {
		if (d.Log == "") != (d.Aggregate == "agent default/ghost") {
			t.Errorf("%+v", d)
		}
		got = append(got, d.Between+" "+d.Aggregate)
	}
	if want := "live agent default/ghost, live ticket default/" + id; strings.Join(got, ", ") != want || res.Total != 2 {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A changed event is found by its hash, although both rebuilds are the same, with and without the relay.
func TestVerifyReplayOfChangedLog(t *testing.T) {
	g := newReplayTest(t)
	g.call("default", "tickets.create", `{"title":"x"}`)
	check := func(changed bool) {
		t.Helper()
		if res := g.verify(); (len(res.Faults) > 0) != changed {
			t.Errorf("changed %v: %+v", changed, res)
		}
	}
	check(false)
	db, err := sql.Open("sqlite", sqlitefile.DSN(filepath.Join(g.dir, eventlog.FileName), "_busy_timeout=10000"))
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{"DROP TRIGGER state_update", `UPDATE state SET payload = replace(payload, '"x"', '"y"') WHERE type = 'ticket.created'`} {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Error(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	check(true)
	g.stop()
	check(true)
}

// Tickets that the relay does not serve are not compared with it.
func TestVerifyReplayWithoutTickets(t *testing.T) {
	g := newReplayTest(t, PluginTickets)
	created := kernel.Event{Tenant: "default", Type: "ticket.created", Aggregate: manifest.NewULID(), Payload: json.RawMessage(`{"title":"x"}`)}
	if _, err := g.r.events.Append(t.Context(), created); err != nil {
		t.Fatal(err)
	}
	if res := g.verify(); res.Total != 0 || !res.Live || res.Tickets != 1 {
		t.Errorf("got %+v", res)
	}
}

// An earlier relay answers with its status, and one that is not there is no error of ReadLiveState's
// caller alone.
func TestReadLiveState(t *testing.T) {
	dir, err := os.MkdirTemp("", "ac")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ln, err := net.Listen("unix", filepath.Join(dir, statusSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Write([]byte(`{"version":"1"}`))
			_ = c.Close()
		}
	}()
	if _, err := ReadLiveState(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "older agentctl") {
		t.Errorf("got %v", err)
	}
}
