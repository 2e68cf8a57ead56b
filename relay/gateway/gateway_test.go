package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
)

func TestDeliver(t *testing.T) {
	g := start(t, Options{})
	all, some := g.open(""), g.open("?topics=metrics,log/level")
	if !strings.HasPrefix(all.first, ": stream start id=") {
		t.Fatalf("first line %q", all.first)
	}
	start, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(all.first, ": stream start id=")), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	id := g.post("log/level", `{"previous":"info", "current":"debug"}`)
	if id != start {
		t.Errorf("first id %d, announced %d", id, start)
	}
	g.post("c", `1`)
	g.post("metrics", `"x\ny"`)
	all.want("log/level", `{"previous":"info","current":"debug"}`, "c", "1", "metrics", `"x\ny"`)
	some.want("log/level", `{"previous":"info","current":"debug"}`, "metrics", `"x\ny"`)
	if all.read.LastEventID() != fmt.Sprint(id+2) {
		t.Errorf("last id %s, want %d", all.read.LastEventID(), id+2)
	}
	status, _, body := g.request("GET", MetricsPath, "")
	if status != http.StatusOK {
		t.Fatal(status)
	}
	for _, want := range []string{"mcp_sse_clients 2", "mcp_sse_total_connections 2", "mcp_sse_events_ingested 3", "mcp_sse_events_delivered 5", "mcp_sse_events_dropped 0"} {
		if !strings.Contains(body, "\n"+want+"\n") {
			t.Errorf("metrics lack %q:\n%s", want, body)
		}
	}
	_ = all.conn.Close()
	eventually(t, "one client left", func() bool { return g.Stats().Subscribers == 1 })
}

func TestResume(t *testing.T) {
	g := start(t, Options{Ring: 10})
	var ids []uint64
	for i := range 14 {
		ids = append(ids, g.post([]string{"a", "b"}[i%2], strconv.Itoa(i)))
	}
	s := g.open("", "Last-Event-ID", fmt.Sprint(ids[10]))
	s.want("b", "11", "a", "12", "b", "13")
	g.post("a", "14")
	s.want("a", "14")
	s = g.open("?topics=b&lastEventId=" + fmt.Sprint(ids[8]))
	s.want("b", "9", "b", "11", "b", "13")
	// Older than the ring, of another life, of the future, none of ours: a reset, then the
	// ring.
	for _, asked := range []string{"0", fmt.Sprint(ids[2]), fmt.Sprint(ids[13] + 100), "18446744073709551615", "abc"} {
		s = g.open("?topics=a", "Last-Event-ID", asked)
		requested := asked
		if asked == "abc" || len(asked) > 19 {
			requested = "null"
		}
		s.want("gateway/reset", fmt.Sprintf(`{"requested":%s,"oldest":%d}`, requested, ids[5]), "a", "6", "a", "8", "a", "10", "a", "12", "a", "14")
	}
	// Right below the oldest nothing is missing.
	g.open("", "Last-Event-ID", fmt.Sprint(ids[4])).want("b", "5", "a", "6")
}

// TestDefaultRing: of 600 events the newest 500 can be resumed.
func TestDefaultRing(t *testing.T) {
	g := start(t, Options{})
	for i := range 600 {
		g.Emit("", "n", i)
	}
	s := g.open("?lastEventId=0")
	s.want("gateway/reset", fmt.Sprintf(`{"requested":0,"oldest":%d}`, g.Stats().LastID-499))
	for i := 100; i < 600; i++ {
		s.want("n", strconv.Itoa(i))
	}
	g.Emit("", "live", 1)
	s.want("live", "1")
}

// TestHandler: the endpoints on a server of the caller's.
func TestHandler(t *testing.T) {
	g, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	readyz := func() int {
		w := httptest.NewRecorder()
		g.Handler().ServeHTTP(w, httptest.NewRequest("GET", "http://127.0.0.1/readyz", nil))
		return w.Code
	}
	if code := readyz(); code != http.StatusServiceUnavailable {
		t.Errorf("ready before it runs: %d", code)
	}
	srv := httptest.NewServer(g.Handler())
	defer srv.Close()
	r := &testGateway{Gateway: g, t: t, url: srv.URL}
	for _, path := range []string{StreamPath, IngestPath} {
		method := "GET"
		if path == IngestPath {
			method = "POST"
		}
		if status, h, body := r.request(method, path, `{"topic":"a","data":1}`); status != http.StatusServiceUnavailable || h.Get("Retry-After") == "" {
			t.Errorf("%s before it runs: %d %s", path, status, body)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- g.Serve(ctx, nil) }()
	eventually(t, "it is ready", func() bool { return readyz() == http.StatusOK })
	if err := g.Serve(ctx, nil); err == nil {
		t.Error("it runs twice")
	}
	s := r.open("")
	r.post("a", "1")
	s.want("a", "1")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := s.read.Next(); err == nil {
		t.Error("the stream goes on")
	}
	if code := readyz(); code != http.StatusServiceUnavailable {
		t.Errorf("ready after its end: %d", code)
	}
}

// TestMaxSubscribers: more subscribers than there may be are refused before their stream
// begins.
func TestMaxSubscribers(t *testing.T) {
	g := start(t, Options{MaxSubscribers: 2})
	a := g.open("")
	g.open("")
	if status, h, body := g.request("GET", StreamPath, ""); status != http.StatusTooManyRequests || h.Get("Retry-After") == "" {
		t.Errorf("the third: %d %s", status, body)
	}
	_ = a.conn.Close()
	eventually(t, "a stream has ended", func() bool { return g.Stats().Subscribers == 1 })
	g.open("")
}
