package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

type authFunc func(*http.Request) (Identity, error)

func (f authFunc) Authenticate(r *http.Request) (Identity, error) { return f(r) }

type scopes []string

func (s scopes) Has(scope string) bool { return slices.Contains(s, scope) }

// testIdentities are the relay identities of the tests, by token.
var testIdentities = authFunc(func(r *http.Request) (Identity, error) {
	switch strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ") {
	case "alice":
		return Identity{Tenant: "a", Subject: "alice", Scopes: scopes{ScopeSubscribe, ScopeIngest}}, nil
	case "admin":
		return Identity{Tenant: "a", Subject: "admin", Scopes: scopes{ScopeSubscribe, ScopeIngest, ScopeAdmin}}, nil
	case "bob":
		return Identity{Tenant: "b", Subject: "bob", Scopes: scopes{ScopeSubscribe}}, nil
	case "narrow":
		return Identity{Tenant: "a", Subject: "narrow", Scopes: scopes{ScopeSubscribe, ScopeIngest}, Topics: []string{"log/*", "x"}}, nil
	case "device":
		return Identity{}, fmt.Errorf("%w: a device's token", ErrForbidden)
	}
	return Identity{}, errors.New("unknown token")
})

// TestTokens checks who may subscribe and publish.
func TestTokens(t *testing.T) {
	tests := []struct {
		name           string
		o              Options
		token          string
		subscribe, put int
	}{
		{"open", Options{}, "", 200, 202},
		{"one token, none shown", Options{SubscribeToken: "s"}, "", 401, 401},
		{"one token, wrong", Options{SubscribeToken: "s"}, "S", 401, 401},
		{"one token, longer", Options{SubscribeToken: "s"}, "ss", 401, 401},
		{"one token", Options{SubscribeToken: "s"}, "s", 200, 202},
		{"two tokens, the first", Options{SubscribeToken: "s", IngestToken: "i"}, "s", 200, 401},
		{"two tokens, the second", Options{SubscribeToken: "s", IngestToken: "i"}, "i", 401, 202},
		{"ingest only, none", Options{IngestToken: "i"}, "", 200, 401},
		{"identities, none", Options{Identities: testIdentities}, "", 401, 401},
		{"identities, wrong", Options{Identities: testIdentities}, "mallory", 401, 401},
		{"identities", Options{Identities: testIdentities}, "alice", 200, 202},
		{"identities, no ingest", Options{Identities: testIdentities}, "bob", 200, 403},
		{"identities, a device", Options{Identities: testIdentities}, "device", 403, 403},
		{"both, environment", Options{Identities: testIdentities, SubscribeToken: "s"}, "s", 200, 202},
		{"both, identity", Options{Identities: testIdentities, SubscribeToken: "s"}, "alice", 200, 202},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := start(t, tt.o)
			var header []string
			if tt.token != "" {
				header = []string{"Authorization", "Bearer " + tt.token}
			}
			status, h, body := g.request("HEAD", StreamPath, "", header...)
			if status != tt.subscribe {
				t.Errorf("subscribe: %d %s", status, body)
			}
			if c := h.Get("WWW-Authenticate"); (status == 401) != strings.HasPrefix(c, "Bearer ") || strings.Contains(c, "invalid_token") != (status == 401 && tt.token != "") {
				t.Errorf("challenge %q with %d", c, status)
			}
			status, h, body = g.request("POST", IngestPath, `{"topic":"x","data":1}`, header...)
			if status != tt.put || (status == 401) != (h.Get("WWW-Authenticate") != "") {
				t.Errorf("ingest: %d %s", status, body)
			}
			if n := g.Stats().Ingested; (n == 1) != (tt.put == 202) {
				t.Errorf("%d ingested", n)
			}
			if status, _, _ := g.request("GET", MetricsPath, ""); status != 200 {
				t.Errorf("metrics: %d", status)
			}
		})
	}
}

// TestTenants: events stay in their tenant; audit and kernel are for kernel:admin.
func TestTenants(t *testing.T) {
	g := start(t, Options{Identities: testIdentities, SubscribeToken: "s"})
	bearer := func(who string) []string { return []string{"Authorization", "Bearer " + who} }
	alice, admin, bob, env := g.open("", bearer("alice")...), g.open("", bearer("admin")...), g.open("", bearer("bob")...), g.open("", bearer("s")...)
	narrow, kernel := g.open("", bearer("narrow")...), g.open("?topics=kernel/*,audit", bearer("admin")...)
	g.Emit("a", "x", 1)
	g.Emit("b", "x", 2)
	g.Emit("a", "audit", 3)
	g.Emit("", "kernel/stage", 4)
	g.Emit("", "log/level", 5)
	g.post("y", "6", bearer("alice")...)
	g.post("log/a", "7", bearer("narrow")...)
	g.post("y", "8", bearer("s")...)
	g.post("audit", "9", bearer("admin")...)
	g.Emit("a", "x", "end")
	g.Emit("b", "x", "end")
	g.Emit(DefaultTenant, "x", "end")
	alice.want("x", "1", "y", "6", "log/a", "7", "x", `"end"`)
	admin.want("x", "1", "audit", "3", "kernel/stage", "4", "log/level", "5", "y", "6", "log/a", "7", "audit", "9", "x", `"end"`)
	bob.want("x", "2", "x", `"end"`)
	env.want("log/level", "5", "y", "8", "x", `"end"`)
	narrow.want("x", "1", "log/a", "7", "x", `"end"`)
	kernel.want("audit", "3", "kernel/stage", "4", "audit", "9")
	// Replay obeys the same.
	g.open("?lastEventId=0", bearer("bob")...).want("gateway/reset", fmt.Sprintf(`{"requested":0,"oldest":%d}`, g.Stats().LastID-11), "x", "2", "x", `"end"`)
	for _, tt := range []struct {
		who, topics string
		want        int
	}{
		{"alice", "audit", 403}, {"alice", "kernel/*", 403}, {"alice", "kernel.x", 403}, {"s", "audit", 403}, {"admin", "audit", 200},
		{"narrow", "y", 403}, {"narrow", "log/level", 200}, {"alice", "*", 200}, {"alice", "auditor", 200},
		{"alice", "a b", 400}, {"alice", "*/x", 400}, {"alice", "lo*", 400}, {"alice", strings.Repeat("t,", 1) + strings.Repeat("x", 129), 400},
	} {
		if status, _, body := g.request("HEAD", StreamPath+"?topics="+url.QueryEscape(tt.topics), "", bearer(tt.who)...); status != tt.want {
			t.Errorf("%s asks for %.20s: %d %s, want %d", tt.who, tt.topics, status, body, tt.want)
		}
	}
	for _, tt := range []struct{ who, topic string }{{"alice", "audit"}, {"alice", "kernel/x"}, {"s", "kernel"}, {"narrow", "y"}, {"bob", "x"}} {
		if status, _, body := g.request("POST", IngestPath, `{"topic":"`+tt.topic+`","data":1}`, bearer(tt.who)...); status != 403 {
			t.Errorf("%s posts %s: %d %s", tt.who, tt.topic, status, body)
		}
	}
}

// TestLimitedTopics: a token that is limited to topics gets no event of another topic: live, resumed
// from the ring, replayed from the log, or by a ticket.
func TestLimitedTopics(t *testing.T) {
	log, _ := openLog(t, t.TempDir())
	g := start(t, Options{Identities: testIdentities, Log: log, Ring: 4})
	narrow := []string{"Authorization", "Bearer narrow"}
	first := g.post("y", "0", "Authorization", "Bearer alice")
	live := g.open("", narrow...)
	want := []string{}
	for i := range 6 { // more than the ring holds
		for _, topic := range []string{"log/a", "y", "log", "x", "xy"} {
			g.post(topic, fmt.Sprint(i), "Authorization", "Bearer alice")
		}
		want = append(want, "log/a", fmt.Sprint(i), "x", fmt.Sprint(i))
	}
	live.want(want...)
	status, _, body := g.request("POST", TicketPath, "", narrow...)
	var out struct{ Ticket string }
	if err := json.Unmarshal([]byte(body), &out); status != 200 || err != nil {
		t.Fatalf("%d %s, %v", status, body, err)
	}
	resume := fmt.Sprintf("?lastEventId=%d", first)
	g.open(resume, narrow...).want(want...) // from the log and the ring
	g.open(resume + "&ticket=" + out.Ticket).want(want...)
	g.open(fmt.Sprintf("?lastEventId=%d&ticket=%s", g.Stats().LastID-3, out.Ticket)).want("x", "5") // from the ring
	var onlyLog []string
	for i := range 6 {
		onlyLog = append(onlyLog, "log/a", fmt.Sprint(i))
	}
	g.open(resume + "&topics=log/*&ticket=" + out.Ticket).want(onlyLog...)
	for topics, want := range map[string]int{"y": 403, "log": 403, "xy": 403, "x/*": 403, "y/*": 403, "x,y": 403, "x": 200, "log/*": 200, "log/a/*": 200, "log/a,x": 200} {
		for _, by := range []struct {
			query  string
			header []string
		}{{"", narrow}, {"&ticket=" + out.Ticket, nil}} {
			status, _, body := g.request("HEAD", StreamPath+"?topics="+url.QueryEscape(topics)+by.query, "", by.header...)
			if status != want {
				t.Errorf("topics %s%s: %d %s, want %d", topics, by.query, status, body, want)
			}
		}
	}
	if status, _, body := g.request("GET", StreamPath+"?topics=y", "", narrow...); status != 403 || !strings.Contains(body, "E_SAFETY_DENIED") || !strings.Contains(body, "the token is limited to other topics: log/*,x") {
		t.Errorf("%d %s", status, body)
	}
	if status, _, body := g.request("POST", IngestPath, `{"topic":"log","data":1}`, narrow...); status != 403 || !strings.Contains(body, "the token is limited to other topics: log/*,x") {
		t.Errorf("%d %s", status, body)
	}
}

func TestTicket(t *testing.T) {
	g := start(t, Options{Identities: testIdentities})
	status, _, body := g.request("POST", TicketPath, "", "Authorization", "Bearer bob")
	var out struct {
		Ticket    string `json:"ticket"`
		ExpiresAt int64  `json:"expires_at"`
	}
	if err := json.Unmarshal([]byte(body), &out); status != 200 || err != nil || len(out.Ticket) < 32 {
		t.Fatalf("%d %s", status, body)
	}
	if left := time.Until(time.UnixMilli(out.ExpiresAt)); left < 50*time.Second || left > 70*time.Second {
		t.Errorf("good for %s", left)
	}
	for range 2 { // a reconnect shows it again
		s := g.open("?ticket=" + out.Ticket)
		g.Emit("a", "x", 1)
		g.Emit("b", "x", 2)
		s.want("x", "2")
	}
	for path, want := range map[string]int{StreamPath + "?ticket=x": 401, TicketPath: 401, TicketPath + "?ticket=" + out.Ticket: 403, IngestPath + "?ticket=" + out.Ticket: 401} {
		method := "POST"
		if strings.HasPrefix(path, StreamPath) {
			method = "HEAD"
		}
		if status, _, _ := g.request(method, path, ""); status != want {
			t.Errorf("%s: %d, want %d", path, status, want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		tk := newTickets(time.Minute)
		first, _, _ := tk.issue(Identity{Subject: "s"}, time.Now())
		for range maxTickets {
			tk.issue(Identity{}, time.Now())
		}
		if _, _, ok := tk.issue(Identity{}, time.Now()); ok || len(tk.byHash) > maxTickets {
			t.Errorf("%d tickets", len(tk.byHash))
		}
		if id, err := tk.identity(first, time.Now()); err != nil || id.Subject != "s" {
			t.Error("a good ticket is not known")
		}
		time.Sleep(time.Minute)
		if _, err := tk.identity(first, time.Now()); err == nil {
			t.Error("a ticket outlives its time")
		}
		if _, _, ok := tk.issue(Identity{}, time.Now()); !ok || len(tk.byHash) != 1 {
			t.Errorf("%d tickets after all have ended", len(tk.byHash))
		}
	})
}

// TestRate: an identity that publishes too much gets 429 with Retry-After; others do not.
func TestRate(t *testing.T) {
	g := start(t, Options{Identities: testIdentities, IngestRate: 0.5})
	post := func(who string) (int, http.Header, string) {
		return g.request("POST", IngestPath, `{"topic":"x","data":1}`, "Authorization", "Bearer "+who)
	}
	post("alice")
	status, h, body := post("alice")
	if status != 429 || (h.Get("Retry-After") != "2" && h.Get("Retry-After") != "1") || !strings.Contains(body, "E_RATE_LIMITED") || !strings.Contains(body, "retry_after_ms") {
		t.Errorf("%d %v %s", status, h, body)
	}
	if status, _, _ := post("admin"); status != 202 {
		t.Errorf("another identity: %d", status)
	}
	if st := g.Stats(); st.Ingested != 2 || st.RateLimited != 1 {
		t.Errorf("%+v", st)
	}
}

// TestSetAccess: tokens and origins change while the gateway serves. Streams of the old token end,
// those of other identities stay.
func TestSetAccess(t *testing.T) {
	g := start(t, Options{SubscribeToken: "old", Identities: testIdentities})
	g.open("", "Authorization", "Bearer old")
	alice := g.open("", "Authorization", "Bearer alice")
	if err := g.SetAccess(Access{SubscribeToken: "new", AllowOrigins: []string{"https://app.example"}}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		token, origin string
		want          int
	}{{"old", "", 401}, {"new", "", 200}, {"new", "https://app.example", 200}, {"new", "https://evil.example", 403}} {
		header := []string{"Authorization", "Bearer " + tt.token}
		if tt.origin != "" {
			header = append(header, "Origin", tt.origin)
		}
		if status, _, body := g.request("HEAD", StreamPath, "", header...); status != tt.want {
			t.Errorf("%+v: %d %s", tt, status, body)
		}
	}
	if status, _, _ := g.request("POST", IngestPath, `{"topic":"x","data":1}`, "Authorization", "Bearer new"); status != 202 {
		t.Errorf("ingest with the new token: %d", status)
	}
	eventually(t, "the stream of the old token ends", func() bool { return g.Stats().Subscribers == 1 })
	g.Emit("a", "x", "end")
	alice.want("x", `"end"`)
	// What decides where a gateway listens does not change.
	open := start(t, Options{})
	if err := open.SetAccess(Access{SubscribeToken: "s"}); err == nil {
		t.Error("an open gateway took a token")
	}
	if err := start(t, Options{SubscribeToken: "s"}).SetAccess(Access{}); err == nil {
		t.Error("a gateway became open")
	}
}
