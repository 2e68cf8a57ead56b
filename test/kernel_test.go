package test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
)

// loggedEvents reads a relay's event log from the disk.
func loggedEvents(t testing.TB, dir string, types ...string) (list []kernel.Event) {
	t.Helper()
	log, err := eventlog.OpenReader(filepath.Join(dir, eventlog.FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	if err := log.Select(context.Background(), eventlog.Query{Types: types}, func(e kernel.Event) error {
		list = append(list, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

// A call that was served leaves an event with caller and trace id, over whichever transport it
// came; a refused call leaves none, and no text of a caller or device is stored.
func TestEvents(t *testing.T) {
	t.Parallel()
	const canary = "CANARY-51e0"
	r := newTestRelay(t, withBuiltins)
	m := r.device(mockOptions{})
	admin := r.mint(auth.MintRequest{Class: "admin", Subject: "ann"})
	trace := func(n int) string { return fmt.Sprintf("00-%032x-00f067aa0ba902b7-01", n) }
	r.call(m.echoTool(), text(canary), "Traceparent", trace(1))
	res := r.mcp(r.agent, "2026-07-28", "").call(m.echoTool(), map[string]any{"message": canary}, mcp.Meta{"traceparent": trace(2)})
	if res.IsError {
		t.Fatal(mustMarshal(t, res))
	}
	r.call(m.echoTool(), `{"message":1,"`+canary+`":2}`, "Traceparent", trace(3))
	r.call("kernel.middleware.enable", `{"name":"redact"}`, "Authorization", "Bearer "+admin.Token, "Traceparent", trace(4))
	r.call("kernel.middleware.enable", `{"name":"nosuch"}`, "Authorization", "Bearer "+admin.Token, "Traceparent", trace(5))
	r.call("kernel.middleware.enable", `{"name":"acl"}`, "Traceparent", trace(6))
	r.call("tickets.create", `{"title":"disk"}`, "Authorization", "Bearer "+admin.Token, "Traceparent", trace(7))
	r.call("tickets.create", `{}`, "Authorization", "Bearer "+admin.Token, "Traceparent", trace(8))
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	subject := r.subject()
	var got []string
	for _, e := range loggedEvents(t, r.dir, "call", "kernel.*", "ticket.*") {
		var p struct {
			Actor, By string
			Trace     string `json:"trace_id"`
		}
		if err := json.Unmarshal(e.Payload, &p); err != nil || e.Tenant != auth.DefaultTenant || e.CreatedMS == 0 {
			t.Errorf("%+v, %v", e, err)
		}
		got = append(got, fmt.Sprint(e.Type, " ", p.Actor+p.By, " ", strings.TrimLeft(p.Trace, "0")))
	}
	want := []string{"call " + subject + " 1", "call " + subject + " 2", "kernel.middleware ann 4", "ticket.created ann 7"}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	for name, content := range hashFiles(t, r.dir) {
		if strings.Contains(content, canary) {
			t.Errorf("%s is in %s", canary, name)
		}
	}
	if ticket := loggedEvents(t, r.dir, "ticket.created")[0].Aggregate; !strings.Contains(r.logs.String(), `"ticket_id":"`+ticket+`"`) {
		t.Error("the log does not name the ticket that was created")
	}
	if strings.Contains(r.logs.String(), canary) {
		t.Errorf("%s is in the log", canary)
	}
}

// One trace id leads from the MCP request through the relay's log, the audit log and the
// event to the board's log.
func TestOneTrace(t *testing.T) {
	t.Parallel()
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	r := newTestRelay(t)
	board, node, _, _ := r.run("attic")
	res := r.mcp(r.agent, "2025-11-25", "").call("sysecho."+node+".echo.invoke", map[string]any{"message": "x"}, mcp.Meta{"traceparent": "00-" + trace + "-00f067aa0ba902b7-01"})
	if res.IsError {
		t.Fatal(mustMarshal(t, res))
	}
	board.waitOutput(`"trace_id":"` + trace + `"`)
	board.stop()
	r.waitAudited("trace_id="+trace, "decision=allow", "node_id="+node)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.logs.String(), `"msg":"call","trace_id":"`+trace+`"`) {
		t.Error("the relay's log has no such call")
	}
	if list := loggedEvents(t, r.dir, "call"); len(list) != 1 || !strings.Contains(string(list[0].Payload), trace) {
		t.Errorf("events %v", list)
	}
}

// A link that reconnects soon changes nothing: the tools stay listed. One that
// stays away leaves the list within a second, and its calls fail from the first moment.
func TestShortReconnect(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		token := r.mint(auth.MintRequest{Class: "device"}).Token
		m := r.device(mockOptions{token: token})
		c := r.mcp(r.agent, "2025-11-25", "")
		time.Sleep(2 * time.Second)
		drain(c.tools)
		m.kill()
		for i := range 20 {
			if i == 10 {
				m = r.device(mockOptions{token: token})
			}
			if n := len(c.list()); n != 3 {
				t.Fatalf("%d tools, %d ms after the link was lost", n, i*50)
			}
			time.Sleep(50 * time.Millisecond)
		}
		if a := r.call(m.echoTool(), text("x")); a.status != http.StatusOK {
			t.Errorf("after the reconnect: %d %s", a.status, a.body)
		}
		time.Sleep(3 * time.Second)
		if len(c.tools) != 0 {
			t.Error("a short reconnect was reported as a change")
		}
		m.kill()
		time.Sleep(10 * time.Millisecond)
		r.wantRefusal(r.call(m.echoTool(), text("x")), http.StatusServiceUnavailable, manifest.NodeOffline)
		r.wantRefusal(r.call(m.echoTool(), `{"nonsense":1}`), http.StatusServiceUnavailable, manifest.NodeOffline)
		time.Sleep(time.Second)
		if n := len(c.list()); n != 0 {
			t.Errorf("%d tools a second after the device went", n)
		}
		r.waitNotified(c.tools)
	})
}

// An agent without activity is offline after the timeout; the directory shows it and notifies
// its watchers.
func TestPresence(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		const uri = "mcp://agents/directory.json"
		m := r.device(mockOptions{name: "attic"})
		agent := func(name string) string { return r.mint(auth.MintRequest{Class: "agent", Subject: name}).Token }
		r.call(m.echoTool(), text("x"), "Authorization", "Bearer "+agent("silent"))
		watcher := r.mcp(agent("watcher"), "2025-11-25", "")
		if err := watcher.cs.Subscribe(t.Context(), &mcp.SubscribeParams{URI: uri}); err != nil {
			t.Fatal(err)
		}
		status := func(id string) (status string, ping int64) {
			res, err := watcher.cs.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri})
			var list struct {
				Agents []struct {
					ID, Status string
					Ping       int64 `json:"last_ping_at"`
				}
			}
			if err != nil || json.Unmarshal([]byte(res.Contents[0].Text), &list) != nil {
				t.Fatalf("%v, %v", res, err)
			}
			for _, a := range list.Agents {
				if a.ID == id {
					return a.Status, a.Ping
				}
			}
			return "absent", 0
		}
		want := func(id, want string) {
			t.Helper()
			if got, ping := status(id); got != want || time.Since(time.UnixMilli(ping)) > 3*time.Minute {
				t.Errorf("%s is %s, last there %s ago", id, got, time.Since(time.UnixMilli(ping)))
			}
		}
		want("silent", kernel.Online)
		want(m.node, kernel.Online)
		time.Sleep(80 * time.Second)
		want("silent", kernel.Online)
		for len(watcher.updated) > 0 {
			<-watcher.updated
		}
		time.Sleep(15 * time.Second)
		if len(watcher.updated) == 0 {
			t.Error("no subscriber was notified")
		}
		want("silent", kernel.Offline)
		want("watcher", kernel.Online)
		want(m.node, kernel.Online) // by its link's pings
		m.kill()
		time.Sleep(2 * time.Second)
		want(m.node, kernel.Offline)
	}, withBuiltins)
}

// The relay is killed while tickets are written: whatever was acknowledged is there after
// the restart.
//
// Meanwhile tokens are revoked. relay.json records both stores, and never gets ahead of them: each
// start would otherwise be refused.
func TestTicketsSurviveKill(t *testing.T) {
	t.Parallel()
	rounds := 3
	if os.Getenv("AGENTCTL_SLOW") != "" {
		rounds = 30
	}
	const writers, ticketsOfWriter = 4, 12 // in all rounds less than the 2,000 tickets that a tenant may have
	dir := t.TempDir()
	w := &ticketWriter{token: createToken(t, dir, auth.MintRequest{Class: "admin"}).Token, acknowledged: make(map[string]ticketState)}
	r := startRelay(t, dir)
	var revoked []string // jti
	for round := range rounds {
		had := w.count()
		var wg sync.WaitGroup
		for n := range writers {
			wg.Go(func() { w.write(r.url, fmt.Sprint(round, " ", n), ticketsOfWriter) })
		}
		wg.Go(func() { revoked = append(revoked, mintAndRevoke(t, dir)) }) // as 'agentctl token revoke' beside the relay
		// Kill it amid the writes: after any of them but the last ones.
		kill := had + 1 + rand.IntN(writers*ticketsOfWriter/2)
		eventually(t, "enough tickets of this round", func() bool { return w.count() >= kill })
		r.kill()
		wg.Wait()
		r = startRelay(t, dir)
		if missing := notRevoked(t, dir, revoked); len(missing) > 0 {
			t.Fatalf("round %d: revocations are lost: %v", round, missing)
		}
		if problem := w.check(r.url); problem != "" {
			t.Fatalf("round %d: %s", round, problem)
		}
	}
	for _, part := range []string{"tickets", "presence"} {
		if !strings.Contains(r.err.String(), part+" rebuilt from the event log") {
			t.Errorf("the log does not say that %s was rebuilt: %s", part, r.err)
		}
	}
	r.stop()
	events := loggedEvents(t, dir)
	if !slices.IsSortedFunc(events, func(a, b kernel.Event) int { return cmp.Compare(a.Seq, b.Seq) }) {
		t.Error("the log is out of order")
	}
	t.Logf("%d rounds, %d tickets, %d events", rounds, w.count(), len(events))
}

// ticketState is what a relay answers about a ticket.
type ticketState struct {
	Ticket struct {
		ID, Title, Status string
		Version           int
	}
}

// ticketWriter writes tickets over HTTP and remembers what the relay has acknowledged.
type ticketWriter struct {
	token string

	mu           sync.Mutex             // protects the field below
	acknowledged map[string]ticketState // the newest answer about each ticket, by its id
}

// call calls a tool of the relay at url. It returns false without an answer: the relay may be gone.
func (w *ticketWriter) call(url, tool, args string) (answer ticketState, ok bool) {
	req, err := http.NewRequest(http.MethodPost, url+"/mcp/tools/call", strings.NewReader(`{"tool":"`+tool+`","arguments":`+args+`}`))
	if err != nil {
		return answer, false
	}
	req.Header = http.Header{"Authorization": {"Bearer " + w.token}, "Content-Type": {"application/json"}}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer, false
	}
	defer func() { _ = resp.Body.Close() }()
	ok = json.NewDecoder(resp.Body).Decode(&answer) == nil && resp.StatusCode == http.StatusOK
	return answer, ok
}

// write opens n tickets and changes each once, until the relay no longer answers.
func (w *ticketWriter) write(url, title string, n int) {
	change := func(tool, args string) (id string, ok bool) {
		answer, ok := w.call(url, tool, args)
		if ok {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.acknowledged[answer.Ticket.ID] = answer
		}
		return answer.Ticket.ID, ok
	}
	for i := range n {
		id, ok := change("tickets.create", fmt.Sprintf(`{"title":"%s %d"}`, title, i))
		if ok {
			_, ok = change("tickets.transition", `{"id":"`+id+`","to":"in_progress"}`)
		}
		if !ok {
			return
		}
	}
}

// count returns how many tickets were acknowledged.
func (w *ticketWriter) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.acknowledged)
}

// check returns what is wrong with the tickets of the relay at url, "" if it has all that were
// acknowledged. One may be newer: its answer was lost.
func (w *ticketWriter) check(url string) (problem string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, want := range w.acknowledged {
		got, ok := w.call(url, "tickets.get", `{"id":"`+id+`"}`)
		if !ok || got.Ticket.Version < want.Ticket.Version || got.Ticket.Title != want.Ticket.Title {
			return fmt.Sprintf("acknowledged %+v, there is %+v", want, got)
		}
	}
	return ""
}

// The board build has no MCP server; its error names the package that has one.
func TestBoardNamesThePackage(t *testing.T) {
	t.Parallel()
	bin := binary(t, "agentctl-board", "agentctl_omit_relay")
	for _, args := range [][]string{{"mcp"}, {"mcp", "--local"}, {"plugin", "ls"}, {"events", "replay"}} {
		p := startProcess(t, nil, bin, args...)
		<-p.ended
		if code := p.cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(p.err.String(), "install the package agentctl-relay") || p.out.String() != "" {
			t.Errorf("%v: %d, %q, %q", args, code, p.out, p.err)
		}
	}
}

// mintAndRevoke makes a token in a state directory that a relay has open, and revokes it.
func mintAndRevoke(t *testing.T, dir string) (jti string) {
	s, err := auth.Open(auth.Options{StateDir: dir, Existing: true})
	if err != nil {
		t.Error(err)
		return ""
	}
	defer func() { _ = s.Close() }()
	list, err := s.Mint(context.Background(), auth.MintRequest{Class: "agent"})
	if err == nil {
		_, err = s.Revoke(context.Background(), auth.RevokeRequest{JTI: list[0].JTI})
	}
	if err != nil {
		t.Error(err)
		return ""
	}
	return list[0].JTI
}

// notRevoked returns those of the tokens that are not revoked in a state directory.
func notRevoked(t *testing.T, dir string, jtis []string) (missing []string) {
	t.Helper()
	s, err := auth.Open(auth.Options{StateDir: dir, Existing: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	list, err := s.Tokens(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	isRevoked := map[string]bool{}
	for _, row := range list {
		isRevoked[row.JTI] = row.Revoked
	}
	for _, jti := range jtis {
		if !isRevoked[jti] {
			missing = append(missing, jti)
		}
	}
	return missing
}
