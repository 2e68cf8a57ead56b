package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// tokenAsSubject takes the token as the subject.
var tokenAsSubject = authFunc(func(r *http.Request) (Identity, error) {
	return Identity{Tenant: "t", Subject: strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), Scopes: scopes{ScopeSubscribe, ScopeIngest}}, nil
})

// TestStreamsPerIdentity: one identity cannot open all streams.
func TestStreamsPerIdentity(t *testing.T) {
	g := start(t, Options{Identities: tokenAsSubject, MaxSubscribers: 4})
	a := g.open("", "Authorization", "Bearer a")
	g.open("", "Authorization", "Bearer a")
	status, h, body := g.request("GET", StreamPath, "", "Authorization", "Bearer a")
	if status != http.StatusTooManyRequests || h.Get("Retry-After") == "" || !strings.Contains(body, string(manifest.RateLimited)) {
		t.Errorf("the third of one identity: %d %s", status, body)
	}
	g.open("", "Authorization", "Bearer b")
	_ = a.conn.Close()
	eventually(t, "a stream has ended", func() bool { return g.Stats().Subscribers == 2 })
	g.open("", "Authorization", "Bearer a")
	if n := g.Stats().Subscribers; n != 3 {
		t.Errorf("%d clients", n)
	}
}

// TestRelayTopics: a token for ingest cannot publish to the relay's topics.
func TestRelayTopics(t *testing.T) {
	who := authFunc(func(r *http.Request) (Identity, error) {
		id := Identity{Tenant: "t", Subject: "s", Scopes: scopes{ScopeSubscribe, ScopeIngest}}
		if strings.HasSuffix(r.Header.Get("Authorization"), "admin") {
			id.Scopes = scopes{ScopeIngest, ScopeAdmin}
		}
		return id, nil
	})
	g := start(t, Options{Identities: who, RelayTopics: []string{"alert"}})
	status, _, body := g.request("POST", IngestPath, `{"topic":"alert","data":1}`, "Authorization", "Bearer x")
	if status != http.StatusForbidden || !strings.Contains(body, string(manifest.SafetyDenied)) {
		t.Errorf("got %d %s", status, body)
	}
	g.post("alert/mine", "1", "Authorization", "Bearer x")
	g.post("alert", "1", "Authorization", "Bearer admin")
	g.Emit("t", "alert", 1)
	if st := g.Stats(); st.Ingested != 3 {
		t.Errorf("%+v", st)
	}
}

// TestQueuedBytes: the bytes that wait for all slow subscribers are bounded, one identity's
// subscribers cannot take another's share, and everything is released.
func TestQueuedBytes(t *testing.T) {
	const most = 1 << 20
	runSynctest(t, Options{Identities: tokenAsSubject}, func(t *testing.T, g *Gateway, ln *pipeListener) {
		g.quotas = newQuotas(most)
		var streams []*stream
		slow := func(who string, n int) {
			for range n {
				s := subscribe(t, ln.dial(), "", "Authorization", "Bearer "+who)
				_ = s.conn.SetDeadline(time.Now().Add(time.Hour))
				streams = append(streams, s)
			}
		}
		slow("a", 8)
		slow("b", 1)
		data := strings.Repeat("x", 30<<10)
		for range 20 {
			g.Emit("t", "big", data)
			time.Sleep(time.Second)
			if all := g.quotas.total.Used(); all > most {
				t.Fatalf("%d bytes wait", all)
			}
		}
		for who, want := range map[string]int64{"t\na": most / identityShare, "t\nb": 200 << 10} {
			if n := g.quotas.byIdentity[who].budget.Used(); n > most/identityShare || n < want-40<<10 {
				t.Errorf("for %q wait %d bytes, want about %d", who, n, want)
			}
		}
		for _, s := range streams {
			_ = s.conn.Close()
		}
		g.Emit("t", "big", data) // finds out
		time.Sleep(stallTimeout + time.Minute)
		synctest.Wait() // the shards have closed the streams
		if n, own := g.quotas.total.Used(), len(g.quotas.byIdentity); n != 0 || own != 0 || g.Stats().Subscribers != 0 {
			t.Errorf("at the end %d bytes of %d identities, %+v", n, own, g.Stats())
		}
	})
}

// TestResumeBeyondQueue: a ring that is larger than a client's queue is resumed without a
// queue of its size.
func TestResumeBeyondQueue(t *testing.T) {
	runSynctest(t, Options{Identities: tokenAsSubject}, func(t *testing.T, g *Gateway, ln *pipeListener) {
		data := strings.Repeat("x", 30<<10)
		for i := range 100 {
			g.Emit("t", fmt.Sprintf("n%d", i), data)
		}
		first := g.Stats().LastID - 100
		s := subscribe(t, ln.dial(), "", "Authorization", "Bearer a", "Last-Event-ID", fmt.Sprint(first))
		_ = s.conn.SetDeadline(time.Now().Add(time.Hour))
		for i := range 100 {
			ev := s.next()
			if ev.Type != fmt.Sprintf("n%d", i) || ev.LastEventID != fmt.Sprint(first+uint64(i)+1) {
				t.Fatalf("event %d is %s %s", i, ev.LastEventID, ev.Type)
			}
			if n := g.quotas.total.Used(); n > maxQueued+maxPage {
				t.Fatalf("%d bytes wait", n)
			}
		}
		g.Emit("t", "live", 1)
		s.want("live", "1")
		if st := g.Stats(); st.Delivered != 101 {
			t.Errorf("%+v", st)
		}
		_ = s.conn.Close()
	})
}
