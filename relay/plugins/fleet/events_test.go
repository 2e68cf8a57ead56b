package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// recordedEvents are events in memory, the oldest first.
type recordedEvents struct {
	list []kernel.Event
	rows int // that one search looks at; 0: all
}

func (r *recordedEvents) add(at time.Time, typ, aggregate, payload string) {
	r.list = append(r.list, kernel.Event{Seq: uint64(100 + len(r.list)), Tenant: "acme", Type: typ, Aggregate: aggregate, Payload: json.RawMessage(payload), CreatedMS: at.UnixMilli()})
}

func (r *recordedEvents) Newest(_ context.Context, q EventQuery, fn func(kernel.Event) bool) (uint64, error) {
	looked := 0
	for _, e := range slices.Backward(r.list) {
		if q.Before > 0 && e.Seq > q.Before {
			continue
		}
		if looked++; r.rows > 0 && looked > r.rows {
			return e.Seq, nil
		}
		if q.Tenant != e.Tenant || !slices.Contains(q.Types, e.Type) || e.CreatedMS < q.SinceMS || len(q.Aggregates) > 0 && !slices.Contains(q.Aggregates, e.Aggregate) {
			continue
		}
		if !fn(e) {
			return e.Seq - 1, nil
		}
	}
	return 0, nil
}

func (r *recordedEvents) TicketBoard(_, id string) string {
	return map[string]string{testTicket: nodeID(1)}[id]
}

func (r *recordedEvents) TicketsAbout(_, node string, _ int) []string {
	if node == nodeID(1) {
		return []string{testTicket}
	}
	return nil
}

// eventsPage is an answer of fleet.events.
type eventsPage struct {
	Events     []eventRow
	SearchedTo string `json:"searched_to"`
	Next       string `json:"next_cursor"`
	size       int
}

func newEventsTest(t *testing.T) (*recordedEvents, func(args string) (eventsPage, error)) {
	log := &recordedEvents{}
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	p := New(Options{Boards: newFleet(3), Events: log, Now: func() time.Time { return now }})
	k := kernel.New(kernel.Options{})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	return log, func(args string) (page eventsPage, err error) {
		t.Helper()
		c := &kernel.Caller{Tenant: "acme", Scopes: onlyScope(manifest.ScopeEventsSubscribe)}
		res, err := k.Call(t.Context(), &kernel.Request{Caller: c, Tool: "fleet.events", Arguments: json.RawMessage(args)})
		if err != nil {
			return page, err
		}
		page.size = len(res.Structured)
		return page, json.Unmarshal(res.Structured, &page)
	}
}

// onlyScope is a set of one scope.
type onlyScope string

func (s onlyScope) Has(scope string) bool { return scope == string(s) }

// limitedScopes is a token that is limited to one topic.
type limitedScopes string

func (limitedScopes) Has(scope string) bool        { return scope == manifest.ScopeEventsSubscribe }
func (s limitedScopes) HasTopic(topic string) bool { return topic == string(s) }

// A token that is limited to topics gets the events of no other.
func TestEventsOfLimitedToken(t *testing.T) {
	log := &recordedEvents{}
	at := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	log.add(at, "join.agent", "ann", `{"agent_id":"ann"}`)
	log.add(at, "alert.raised", nodeID(2), `{"level":"error","metric":"cpu_pct","value":99,"message":"x"}`)
	p := New(Options{Boards: newFleet(3), Events: log, Now: func() time.Time { return at.Add(time.Hour) }})
	k := kernel.New(kernel.Options{})
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ topic, args, want string }{
		{"alert", `{}`, "alert"},
		{"alert", `{"topics":["alert"]}`, "alert"},
		{"join", `{}`, "join"},
		{"alert", `{"topics":["join"]}`, ""},
		{"alert", `{"topics":["alert","join"]}`, ""},
		{"build", `{}`, ""},
	} {
		res, err := k.Call(t.Context(), &kernel.Request{Caller: &kernel.Caller{Tenant: "acme", Scopes: limitedScopes(tt.topic)}, Tool: "fleet.events", Arguments: json.RawMessage(tt.args)})
		if tt.want == "" {
			if e := manifest.AsError(err); e == nil || e.Code != manifest.SafetyDenied || e.Reason != "topic" {
				t.Errorf("%s %s: %v", tt.topic, tt.args, err)
			}
			continue
		}
		var page eventsPage
		if err != nil || json.Unmarshal(res.Structured, &page) != nil || len(page.Events) != 1 || page.Events[0].Topic != tt.want {
			t.Errorf("%s %s: %+v, %v", tt.topic, tt.args, page, err)
		}
	}
}

// testTicket is a ticket about board 1 (recordedEvents.TicketBoard).
const testTicket = "01JD8Z3KQ5E6R7T8V9W0X1Y2Z3"

// addDay adds events of all topics and of others, one a minute from 10:00 on.
func (r *recordedEvents) addDay() {
	for minute, e := range []struct{ typ, aggregate, payload string }{
		{"join.board", nodeID(1), `{"node_id":"x"}`},
		{"join.agent", "ann", `{"agent_id":"ann"}`},
		{"presence.online", nodeID(1), `{"kind":"device","name":"proposed"}`},
		{"presence.online", "ann", `{"kind":"agent"}`}, // not shown: agents come and go with each request
		{"alert.raised", nodeID(1), `{"level":"warn","metric":"disk_pct","value":93.456,"message":"disk use is 93.5 %"}`},
		{"ticket.created", testTicket, `{"by":"ann","title":"Disk full","node_id":"` + nodeID(1) + `"}`},
		{"ticket.transitioned", testTicket, `{"by":"bob","from":"open","to":"closed"}`},
		{"alert.raised", nodeID(2), `{"level":"error","metric":"cpu_pct","value":99,"message":"` + strings.Repeat("é", 500) + `"}`},
		{"presence.online", nodeID(1), `{"kind":"device","suspect":true}`},
		{"presence.offline", nodeID(1), `{"kind":"device"}`},
		{"ticket.snapshot", testTicket, `{}`},          // not shown: it repeats what happened
		{"alert.raised", nodeID(1), `"not an object"`}, // not shown
	} {
		r.add(time.Date(2026, 11, 22, 10, minute, 0, 0, time.UTC), e.typ, e.aggregate, e.payload)
	}
}

// The newest events come first, of the topics, the board and the time that a call asks for.
func TestEventsSelect(t *testing.T) {
	log, ask := newEventsTest(t)
	log.addDay()
	for args, want := range map[string]string{
		`{"limit":50}`:                             "presence.offline presence.online alert.raised ticket.transitioned ticket.created alert.raised presence.online join.agent join.board",
		`{"board":"board-001"}`:                    "presence.offline presence.online ticket.transitioned ticket.created alert.raised presence.online join.board",
		`{"board":"` + nodeID(2) + `"}`:            "alert.raised",
		`{"topics":["alert"]}`:                     "alert.raised alert.raised",
		`{"topics":["ticket","join"]}`:             "ticket.transitioned ticket.created join.agent join.board",
		`{"since":"113m"}`:                         "presence.offline presence.online alert.raised",
		`{"since":"2026-11-22T10:09:00Z"}`:         "presence.offline",
		`{"limit":2}`:                              "presence.offline presence.online",
		`{"board":"board-000","topics":["alert"]}`: "",
	} {
		page, err := ask(args)
		var got []string
		for _, e := range page.Events {
			got = append(got, e.Topic+"."+e.Event)
		}
		if err != nil || strings.Join(got, " ") != want || page.Events == nil {
			t.Errorf("%s: got %v, %v; want %s", args, got, err, want)
		}
	}
}

// A row has what a model needs of its event, with the board's name and id.
func TestEventRows(t *testing.T) {
	log, ask := newEventsTest(t)
	log.addDay()
	page, err := ask(`{"limit":50}`)
	if err != nil || len(page.Events) != 9 {
		t.Fatalf("%d events, %v; want 9", len(page.Events), err)
	}
	disk, cpu := rounded(93.46), rounded(99)
	for i, want := range map[int]eventRow{ // the newest has the index 0
		0: {At: "2026-11-22T10:09:00Z", Topic: "presence", Event: "offline", Name: "board-001", ID: nodeID(1)},
		1: {At: "2026-11-22T10:08:00Z", Topic: "presence", Event: "online", Name: "board-001", ID: nodeID(1), Text: "suspect: it does not answer"},
		2: {At: "2026-11-22T10:07:00Z", Topic: "alert", Event: "raised", Name: "board-002", ID: nodeID(2), Level: "error", Metric: "cpu_pct", Value: &cpu,
			Text: strings.Repeat("é", maxEventText) + "..."},
		3: {At: "2026-11-22T10:06:00Z", Topic: "ticket", Event: "transitioned", Name: "board-001", ID: nodeID(1), Ticket: testTicket, By: "bob", Text: "closed"},
		5: {At: "2026-11-22T10:04:00Z", Topic: "alert", Event: "raised", Name: "board-001", ID: nodeID(1), Level: "warn", Metric: "disk_pct", Value: &disk,
			Text: "disk use is 93.5 %"},
		7: {At: "2026-11-22T10:01:00Z", Topic: "join", Event: "agent", Agent: "ann"},
	} {
		if got := page.Events[i]; !reflect.DeepEqual(got, want) {
			t.Errorf("row %d is %+v, want %+v", i, got, want)
		}
	}
}

// TestEventsPages: the pages have each event once, however far one search goes.
func TestEventsPages(t *testing.T) {
	log, ask := newEventsTest(t)
	const events = 200
	for i := range events {
		log.add(time.UnixMilli(1_800_000_000_000+int64(i)), "alert.raised", nodeID(i%3), fmt.Sprintf(`{"level":"warn","metric":"m%d","message":%q}`, i, strings.Repeat("x", i%90)))
		log.add(time.UnixMilli(1_800_000_000_000+int64(i)), "call", "tool", `{}`)
	}
	for _, rows := range []int{0, 7} {
		log.rows = rows
		seen := map[string]bool{}
		cursor := ""
		for calls := 0; ; calls++ {
			args := "{}"
			if cursor != "" {
				args = fmt.Sprintf(`{"cursor":%q}`, cursor)
			}
			page, err := ask(args)
			if err != nil || page.size > MaxAnswer || calls > events {
				t.Fatalf("call %d: %d bytes, %v", calls, page.size, err)
			}
			for _, e := range page.Events {
				if seen[e.Metric] {
					t.Fatalf("%s twice", e.Metric)
				}
				seen[e.Metric] = true
			}
			if rows > 0 && page.Next != "" && len(page.Events) > 0 && page.SearchedTo == "" {
				t.Error("a page that ended early does not say how far it went")
			}
			if cursor = page.Next; cursor == "" {
				break
			}
		}
		if len(seen) != events {
			t.Errorf("%d events, want %d", len(seen), events)
		}
	}
}

func TestEventsRefused(t *testing.T) {
	_, ask := newEventsTest(t)
	for args, want := range map[string]string{
		`{"topics":["kernel"]}`:  "argument topics: must be alert, presence, ticket or join; for example",
		`{"since":"yesterday"}`:  "argument since: not a time",
		`{"since":"2999-01-01"}`: "argument since: not in the past",
		`{"cursor":"!"}`:         "argument cursor: not one of this tool's",
		`{"cursor":"MA"}`:        "argument cursor: not one of this tool's",
		`{"limit":101}`:          "argument limit: out of range 1..100",
		`{"board":"bord-001"}`:   "near it: board-001",
	} {
		if _, err := ask(args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}

// blockedEvents searches until it is released.
type blockedEvents struct {
	recordedEvents
	release chan struct{}
}

func (b *blockedEvents) Newest(context.Context, EventQuery, func(kernel.Event) bool) (uint64, error) {
	<-b.release
	return 0, nil
}

// TestSearchShare: the searches of one identity, running or waiting, are bounded, and another one's
// are not refused for them.
func TestSearchShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &blockedEvents{release: make(chan struct{})}
		p := New(Options{Boards: newFleet(1), Events: log})
		search := func(actor string) error {
			_, err := p.events(t.Context(), &kernel.Request{Caller: &kernel.Caller{Tenant: "acme", Actor: actor}, Arguments: json.RawMessage(`{}`)})
			return err
		}
		var wg sync.WaitGroup
		for range maxSearchCalls {
			wg.Go(func() {
				if err := search("ann"); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if err := search("ann"); manifest.AsError(err).Code != manifest.RateLimited {
			t.Errorf("one more: %v", err)
		}
		wg.Go(func() {
			if err := search("ben"); err != nil {
				t.Errorf("another identity: %v", err)
			}
		})
		synctest.Wait()
		close(log.release)
		wg.Wait()
		if len(p.used) != 0 {
			t.Errorf("%v remain", p.used)
		}
	})
}
