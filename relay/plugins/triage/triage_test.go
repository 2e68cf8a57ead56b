package triage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/creachadair/jrpc2"
	"github.com/creachadair/jrpc2/channel"
)

// fakeRelay is the relay's side of the protocol, with a queue of tickets and a log of events.
type fakeRelay struct {
	t *testing.T

	mu       sync.Mutex // protects the fields below
	cli      *jrpc2.Client
	tickets  []*fakeTicket // in the order of creation
	log      []map[string]any
	calls    []string
	refusals int // of the next requests, with E_RATE_LIMITED
	isFull   bool
	subs     int
}

type fakeTicket struct {
	row
	Priority string `json:"priority"`
	keys     string
	comments []string
}

// start runs the plugin on a connection until the returned function is called.
func (r *fakeRelay) start(cfg Config) (stop func()) {
	ours, theirs := net.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = Serve(ctx, theirs, cfg)
	}()
	cli := jrpc2.NewClient(channel.Line(ours, ours), &jrpc2.ClientOptions{OnCallback: r.answer})
	r.mu.Lock()
	r.cli = cli
	r.mu.Unlock()
	if _, err := cli.Call(r.t.Context(), "initialize", map[string]any{"protocolVersion": "2025-11-25"}); err != nil {
		r.t.Fatal(err)
	}
	r.notify("agentctl/consent", map[string]any{"tenants": []string{"*"}})
	synctest.Wait()
	return func() {
		cancel()
		<-done
		_ = cli.Close()
	}
}

func (r *fakeRelay) notify(method string, params any) {
	r.mu.Lock()
	cli := r.cli
	r.mu.Unlock()
	if err := cli.Notify(r.t.Context(), method, params); err != nil {
		r.t.Error(err)
	}
}

// append adds an event to the log and sends it to the subscription.
func (r *fakeRelay) append(typ, aggregate string, payload any) {
	r.mu.Lock()
	e := map[string]any{"subscription": fmt.Sprint(r.subs), "tenant": "default", "seq": len(r.log) + 1, "type": typ, "aggregate_id": aggregate,
		"created_at": time.Now().UnixMilli(), "payload": payload}
	r.log = append(r.log, e)
	r.mu.Unlock()
	r.notify("agentctl/event", e)
	synctest.Wait()
	time.Sleep(time.Millisecond)
	synctest.Wait()
}

func (r *fakeRelay) alert(typ, node, rule string) {
	r.append("alert."+typ, node, map[string]any{"node_id": node, "level": "warn", "metric": "disk", "value": 93.5, "threshold": 90, "rule_id": rule, "message": "disk is full", "ts": 1})
}

// answer answers a request of the plugin.
func (r *fakeRelay) answer(_ context.Context, req *jrpc2.Request) (any, error) {
	var p struct {
		Name      string
		Type      string
		After     *int
		Arguments struct{ Title, Priority, ID, To, Text, NodeID, IdempotencyKey, Cursor string }
	}
	raw := strings.NewReplacer(`"node_id"`, `"NodeID"`, `"idempotency_key"`, `"IdempotencyKey"`).Replace(req.ParamString())
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refusals > 0 {
		r.refusals--
		return nil, &jrpc2.Error{Code: -32000, Data: json.RawMessage(`{"code":"E_RATE_LIMITED","reason":"rate"}`)}
	}
	a := p.Arguments
	r.calls = append(r.calls, strings.TrimPrefix(req.Method(), "agentctl/")+" "+p.Name+p.Type)
	answer := func(v any) (any, error) { return map[string]any{"content": []any{}, "structuredContent": v}, nil }
	switch req.Method() + " " + p.Name {
	case "agentctl/subscribe ":
		r.subs++
		from := 0
		if p.After != nil {
			from = *p.After
		}
		for _, e := range r.log[from:] {
			again := map[string]any{}
			for k, v := range e {
				again[k] = v
			}
			again["subscription"] = fmt.Sprint(r.subs)
			_ = r.cli.Notify(context.Background(), "agentctl/event", again)
		}
		return map[string]any{"subscription": fmt.Sprint(r.subs), "seq": len(r.log)}, nil
	case "agentctl/call tickets.list":
		list := []row{{ID: "T0", Title: "Alert full", Status: "open", NodeID: "n1", CreatedBy: "ann"}}
		for _, t := range slices.Backward(r.tickets) {
			list = append(list, t.row)
		}
		return answer(map[string]any{"tickets": list})
	case "agentctl/call tickets.create":
		if r.isFull {
			return nil, &jrpc2.Error{Code: -32000, Data: json.RawMessage(`{"code":"E_RATE_LIMITED","reason":"full"}`)}
		}
		for _, t := range r.tickets {
			if t.keys == a.IdempotencyKey {
				return answer(map[string]any{"ticket": t.row})
			}
		}
		t := &fakeTicket{row: row{ID: fmt.Sprintf("T%d", len(r.tickets)+1), Title: a.Title, Status: "open", NodeID: a.NodeID, CreatedBy: "plugin:triage", UpdatedAt: time.Now().UnixMilli()},
			Priority: a.Priority, keys: a.IdempotencyKey}
		r.tickets = append(r.tickets, t)
		return answer(map[string]any{"ticket": t.row})
	}
	for _, t := range r.tickets {
		if t.ID != a.ID {
			continue
		}
		t.UpdatedAt = time.Now().UnixMilli()
		switch p.Name {
		case "tickets.comment":
			t.comments = append(t.comments, a.Text)
		case "tickets.transition":
			if t.Status == "closed" {
				return map[string]any{"isError": true, "structuredContent": map[string]any{"error": map[string]any{"code": "E_BAD_REQUEST", "status": t.Status}}}, nil
			}
			t.Status = a.To
		}
		return answer(map[string]any{"ticket": t.row})
	}
	return map[string]any{"seq": 1}, nil
}

// line is a ticket as wantTickets compares it.
func (t *fakeTicket) line() string {
	return fmt.Sprintf("%s: %s, %s, %s, %d comments", t.NodeID, t.Title, t.Status, t.Priority, len(t.comments))
}

// wantTickets checks the tickets in the order of their creation.
func (r *fakeRelay) wantTickets(want ...string) {
	r.t.Helper()
	synctest.Wait()
	if got := r.lines(); !slices.Equal(got, want) {
		r.t.Errorf("the tickets are\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func (r *fakeRelay) lines() (list []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.tickets {
		list = append(list, t.line())
	}
	return list
}

// Each rule of each board has a ticket. Its priority is that of the rule, or else of the level.
func TestOneTicketPerBoardAndRule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{Priorities: map[string]string{"warn": "high", "hot": "urgent"}})()
		r.alert("raised", "n1", "full")
		r.alert("raised", "n1", "hot")
		r.alert("raised", "n2", "full")
		r.wantTickets(
			"n1: Alert full, open, high, 0 comments",
			"n1: Alert hot, open, urgent, 0 comments",
			"n2: Alert full, open, high, 0 comments")
	})
}

// Alerts that repeat are one comment in commentInterval, which counts the others.
func TestRepeatedAlertsAreComments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		r.alert("raised", "n1", "full")
		for range 5 {
			r.alert("raised", "n1", "full")
		}
		r.wantTickets("n1: Alert full, open, normal, 0 comments") // the ticket itself is younger than that
		time.Sleep(commentInterval)
		for range 5 {
			r.alert("raised", "n1", "full")
		}
		r.wantTickets("n1: Alert full, open, normal, 1 comments")
		if c := r.tickets[0].comments[0]; !strings.Contains(c, "disk is full") || !strings.Contains(c, "5 more") {
			t.Errorf("the comment is %q, want the alert, and 5 more", c)
		}
	})
}

// An alert that flaps changes its ticket once in changeInterval, and in the end as its last event says.
func TestFlappingAlert(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		r.alert("raised", "n1", "full")
		r.alert("cleared", "n1", "full")
		r.wantTickets("n1: Alert full, resolved, normal, 0 comments")
		for range 20 {
			r.alert("raised", "n1", "full")
			r.alert("cleared", "n1", "full")
		}
		r.alert("raised", "n1", "full")
		r.wantTickets("n1: Alert full, resolved, normal, 0 comments")
		time.Sleep(changeInterval)
		r.wantTickets("n1: Alert full, open, normal, 0 comments")
	})
}

// After a person has closed a ticket the next alert opens another one.
func TestClosedTicketStaysClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		r.alert("raised", "n1", "full")
		r.mu.Lock()
		r.tickets[0].Status = "closed"
		r.mu.Unlock()
		r.append("ticket.transitioned", "T1", map[string]any{"to": "closed"})
		r.alert("raised", "n1", "full")
		r.wantTickets(
			"n1: Alert full, closed, normal, 0 comments",
			"n1: Alert full, open, normal, 0 comments")
	})
}

// The tickets are all the state that there is: a new connection goes on with them, and repeats nothing.
func TestNewConnectionGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		stop := r.start(Config{})
		r.alert("raised", "n1", "full")
		r.alert("raised", "n1", "hot")
		time.Sleep(commentInterval) // an alert that is handled again would be a comment
		stop()
		defer r.start(Config{})()
		r.wantTickets(
			"n1: Alert full, open, normal, 0 comments",
			"n1: Alert hot, open, normal, 0 comments")
		r.alert("cleared", "n1", "hot")
		r.wantTickets(
			"n1: Alert full, open, normal, 0 comments",
			"n1: Alert hot, resolved, normal, 0 comments")
	})
}

// What happened while the plugin had no connection is made up for.
func TestCatchUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		stop := r.start(Config{})
		r.alert("raised", "n1", "full")
		r.alert("raised", "n1", "hot")
		stop()
		time.Sleep(time.Second) // later than the tickets' last change
		for _, e := range []struct{ verb, rule string }{{"cleared", "full"}, {"raised", "cold"}, {"raised", "brief"}, {"cleared", "brief"}} {
			r.log = append(r.log, map[string]any{"tenant": "default", "seq": len(r.log) + 1, "type": "alert." + e.verb, "aggregate_id": "n1", "created_at": time.Now().UnixMilli(),
				"payload": map[string]any{"node_id": "n1", "level": "error", "metric": "x", "rule_id": e.rule, "message": "m"}})
		}
		time.Sleep(time.Second)
		defer r.start(Config{})()
		r.wantTickets(
			"n1: Alert full, resolved, normal, 0 comments",
			"n1: Alert hot, open, normal, 0 comments",
			"n1: Alert cold, open, high, 0 comments",
			"n1: Alert brief, resolved, high, 0 comments")
	})
}

// count returns how many requests of a kind the plugin has made.
func (r *fakeRelay) count(request string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.calls {
		if c == request {
			n++
		}
	}
	return n
}

// A board has maxOpen open tickets. Alerts beyond have none, which one event says; other boards have theirs,
// and resolving one makes another one possible.
func TestBoundOfABoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		for i := range maxOpen + 8 {
			r.alert("raised", "n1", fmt.Sprintf("rule%d", i))
		}
		if n := len(r.tickets); n != maxOpen {
			t.Errorf("%d tickets, want %d", n, maxOpen)
		}
		if n := r.count("append triage.skipped"); n != 1 {
			t.Errorf("%d events about alerts without a ticket, want one", n)
		}
		r.alert("raised", "n2", "rule0")
		if n := len(r.tickets); n != maxOpen+1 {
			t.Errorf("%d tickets after an alert of another board, want %d", n, maxOpen+1)
		}
		r.alert("cleared", "n1", "rule0")
		r.alert("raised", "n1", "late")
		if n := len(r.tickets); n != maxOpen+2 {
			t.Errorf("%d tickets after one was resolved, want %d", n, maxOpen+2)
		}
	})
}

// When a tenant has as many tickets as it may, one event says that alerts have none. Each alert tries again.
func TestFullTenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t, isFull: true}
		defer r.start(Config{})()
		for range 2 {
			r.alert("raised", "n1", "full")
			r.alert("raised", "n2", "full")
		}
		if creates, skipped := r.count("call tickets.create"), r.count("append triage.skipped"); creates != 4 || skipped != 1 {
			t.Errorf("%d attempts and %d events, want 4 and 1", creates, skipped)
		}
		r.isFull = false
		r.alert("raised", "n1", "full")
		r.wantTickets("n1: Alert full, open, normal, 0 comments")
	})
}

// A relay that refuses requests for a while loses no alert, even if more arrive than the plugin can queue.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		r.mu.Lock()
		r.refusals = 4
		r.mu.Unlock()
		r.alert("raised", "n1", "full") // refused at first
		const rules = 8
		for i := range maxQueue + 50 {
			r.alert("raised", "n1", fmt.Sprintf("rule%d", i%rules))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(r.tickets); n != 1+rules {
			t.Errorf("%d tickets, want %d: %q", n, 1+rules, r.lines())
		}
	})
}

// A subscription that the relay ends is made again.
func TestSubscriptionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		defer r.start(Config{})()
		r.notify("agentctl/ended", map[string]any{"subscription": fmt.Sprint(r.subs), "reason": "test"})
		synctest.Wait()
		if r.subs != 2 {
			t.Errorf("%d subscriptions were made, want another one after the first", r.subs)
		}
		r.alert("raised", "n3", "full")
		r.wantTickets("n3: Alert full, open, normal, 0 comments")
	})
}

// lateConn is a connection on which a message arrives when it is closed.
type lateConn struct {
	closed  chan struct{}
	once    sync.Once
	message io.Reader
}

func (c *lateConn) Read(b []byte) (int, error) {
	<-c.closed
	return c.message.Read(b)
}

func (c *lateConn) Write(b []byte) (int, error) { return len(b), nil }

func (c *lateConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// A message that arrives while the plugin ends is no panic.
func TestMessageAtTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := &lateConn{closed: make(chan struct{}), message: strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}` + "\n")}
	if err := Serve(ctx, c, Config{}); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

// A resolved ticket is closed after a day, also if it was resolved before the plugin started. An alert after
// that opens another one.
func TestOldTicketsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRelay{t: t}
		stop := r.start(Config{})
		r.alert("raised", "n1", "full")
		r.alert("raised", "n1", "hot")
		r.alert("cleared", "n1", "full")
		time.Sleep(closeAfter - time.Hour)
		r.wantTickets(
			"n1: Alert full, resolved, normal, 0 comments",
			"n1: Alert hot, open, normal, 0 comments")
		stop()
		defer r.start(Config{})()
		r.alert("raised", "n2", "full") // the plugin reads the tickets of a tenant with its first alert
		time.Sleep(2*time.Hour + time.Minute)
		r.alert("raised", "n1", "full")
		r.wantTickets(
			"n1: Alert full, closed, normal, 0 comments",
			"n1: Alert hot, open, normal, 0 comments",
			"n2: Alert full, open, normal, 0 comments",
			"n1: Alert full, open, normal, 0 comments")
	})
}
