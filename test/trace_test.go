package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/diff"
	"golang.org/x/tools/txtar"

	"agentctl/handlers"
	"agentctl/prober"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/transport/clock"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

// The golden traces in testdata/trace are the wire as it is; `go test ./test -update`
// rewrites them. A change in one of them is a change of the protocol.

// traceEntry is one piece of a trace.
type traceEntry struct{ name, data string }

// compareGolden compares a trace with its file.
func compareGolden(t *testing.T, name string, parts []traceEntry) {
	t.Helper()
	n := newNames()
	path := filepath.Join("testdata", "trace", name+".txtar")
	old, err := txtar.ParseFile(path)
	if err != nil && !*update {
		t.Fatal(err)
	}
	if old == nil {
		old = new(txtar.Archive)
	}
	a := &txtar.Archive{Comment: old.Comment}
	for _, p := range parts {
		a.Files = append(a.Files, txtar.File{Name: p.name, Data: []byte(n.normal(p.data) + "\n")})
	}
	got := txtar.Format(a)
	if *update {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want := txtar.Format(old); !bytes.Equal(got, want) {
		t.Errorf("the wire changed; go test ./test -update rewrites %s\n%s", path, diff.Diff("golden", want, "now", got))
	}
}

// idNames gives what differs from run to run a name: ids in the order of their appearance,
// times, tokens, addresses.
type idNames struct{ ids map[string]string }

func newNames() *idNames { return &idNames{make(map[string]string)} }

var (
	tokenRE = regexp.MustCompile(`[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}`)
	nonceRE = regexp.MustCompile(`"nonce":"[A-Za-z0-9_-]{43}"`)
	hexRE   = regexp.MustCompile(`\b[0-9a-f]{64}\b`)
	traceRE = regexp.MustCompile(`\b[0-9a-f]{32}\b`)
	idRE    = regexp.MustCompile(`\b[0-7][0-9a-hjkmnp-tv-z]{25}\b|\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b`)
	timeRE  = regexp.MustCompile(`\b1[0-9]{12}\b`)
	dateRE  = regexp.MustCompile(`Date: [^\r\n]*`)
	padRE   = regexp.MustCompile(` {100,}`)
	hostRE  = regexp.MustCompile(`127\.0\.0\.1:[0-9]+`)
	proofRE = regexp.MustCompile(`"proof":"[A-Za-z0-9_-]{86}"`)
	leftRE  = regexp.MustCompile(`"expires_in_ms":[1-9][0-9]{0,3}\b`)
)

func (n *idNames) normal(s string) string {
	s = tokenRE.ReplaceAllString(s, "TOKEN")
	s = proofRE.ReplaceAllString(s, `"proof":"PROOF"`)
	s = leftRE.ReplaceAllString(s, `"expires_in_ms":MS`)
	s = nonceRE.ReplaceAllString(s, `"nonce":"NONCE"`)
	s = hexRE.ReplaceAllString(s, "SHA256")
	s = traceRE.ReplaceAllString(s, "HEX32")
	s = idRE.ReplaceAllStringFunc(s, func(id string) string {
		if n.ids[id] == "" {
			kind := "MSG"
			if id == strings.ToLower(id) {
				kind = "node"
			}
			n.ids[id] = fmt.Sprint(kind, len(n.ids)+1)
		}
		return n.ids[id]
	})
	s = timeRE.ReplaceAllString(s, "TIME")
	s = dateRE.ReplaceAllString(s, "Date: DATE")
	s = padRE.ReplaceAllString(s, " PADDING ")
	s = hostRE.ReplaceAllString(s, "HOST")
	return strings.TrimRight(strings.ReplaceAll(s, "\r\n", "\n"), "\n")
}

// recorder is a device's link.Conn that keeps every frame, in their order.
type recorder struct {
	link.Conn
	mu    *sync.Mutex
	parts *[]traceEntry
}

func (r recorder) keep(side string, b []byte) {
	_, typ, _ := strings.Cut(string(b), `"type":"`)
	typ, _, _ = strings.Cut(typ, `"`)
	r.add(side+" "+typ, string(b))
}

func (r recorder) add(name, data string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.parts = append(*r.parts, traceEntry{name, data})
}

func (r recorder) Read(fn func([]byte) error) error {
	return r.Conn.Read(func(b []byte) error {
		r.keep("relay", b)
		return fn(b)
	})
}

func (r recorder) Write(b []byte) error {
	r.keep("device", b)
	return r.Conn.Write(b)
}

// recorded connects the real device code to the test relay and returns the messages on the
// link. subprotocols are those that the device offers.
func (r *testRelay) recorded(subprotocols ...string) (node string, client *link.Client, frames func() []traceEntry) {
	r.t.Helper()
	return r.recordedWith(nil, subprotocols...)
}

// recordedWith is recorded for a device with a history.
func (r *testRelay) recordedWith(history handlers.Recorded, subprotocols ...string) (node string, client *link.Client, frames func() []traceEntry) {
	r.t.Helper()
	var mu sync.Mutex
	var parts []traceEntry
	minted := r.mint(auth.MintRequest{Class: "device"})
	c := clock.New(time.Time{}, nil)
	p := prober.New(prober.Options{Source: fixedSource{}, Interval: time.Second, Now: func() int64 { ms, _ := c.NowMS(); return ms }})
	served := []handlers.Handler{handlers.NewEcho(c.NowMS), handlers.NewMetrics(p, c.NowMS)}
	if history != nil {
		served = append(served, handlers.NewHistory(history, c.NowMS))
	}
	mux, err := handlers.New(handlers.Options{}, served...)
	if err != nil {
		r.t.Fatal(err)
	}
	ready := make(chan struct{})
	client = link.NewClient(link.ClientOptions{
		Dial: func(ctx context.Context) (link.Conn, error) {
			conn, err := link.Dial(ctx, r.url, link.DialOptions{Subprotocols: subprotocols})
			if err != nil {
				return nil, err
			}
			return recorder{conn, &mu, &parts}, nil
		},
		Token: func() (string, error) { return minted.Token, nil }, Version: "v1.2.3", InstanceID: strings.Repeat("0a", 16),
		Name: "attic", Handler: mux, Clock: c, OnReady: func(link.AuthOK) { close(ready) },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = p.Run(ctx) })
	wg.Go(func() { _ = client.Run(ctx) })
	r.t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	<-ready
	eventually(r.t, "the node is online", func() bool {
		return r.call("sys."+minted.NodeID+".metrics.snapshot", `{"x":1}`).status == http.StatusUnprocessableEntity
	})
	return minted.NodeID, client, func() []traceEntry {
		mu.Lock()
		defer mu.Unlock()
		list := parts
		parts = nil
		return list
	}
}

// exchange makes a request by hand and gives both sides of it as text.
func (r *testRelay) exchange(tool, args, accept string) (request, response string, s *stream) {
	r.t.Helper()
	body := `{"tool":"` + tool + `","arguments":` + args + `}`
	request = "POST /mcp/tools/call HTTP/1.1\nHost: " + r.addr + "\nAuthorization: Bearer " + r.agent +
		"\nContent-Type: application/json\nAccept: " + accept + "\n\n" + body
	s = r.post(body, streamOptions{header: map[string]string{"Accept": accept}})
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s\n", s.resp.Proto, s.resp.Status)
	_ = s.resp.Header.Write(&b)
	return request, b.String(), s
}

// RFC-0005 §11, byte for byte but for ids and times: the request, the command, its answer
// and the response, between the real relay and the real device.
func TestTraceEcho(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	node, _, frames := r.recorded(link.Subprotocol)
	compareGolden(t, "handshake", frames())
	request, response, s := r.exchange("sysecho."+node+".echo.invoke", `{"message":"ping"}`, "application/json")
	body, err := io.ReadAll(io.LimitReader(s.resp.Body, s.resp.ContentLength))
	if err != nil {
		t.Fatal(err)
	}
	parts := append([]traceEntry{{"agent request", request}}, frames()...)
	compareGolden(t, "echo", append(parts, traceEntry{"relay response", response + "\n" + string(body)}))
}

// An alert of a board, from its link into the event log.
func TestTraceAlert(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	node, client, frames := r.recorded(link.Subprotocol)
	frames()
	client.SendEvent(link.TopicAlert, []byte(`{"level":"warn","metric":"disk_pct","value":93.5,"threshold":90,"rule_id":"disk-full","message":"disk use is 93.5 %, above 90 %; free some","ts":1795000000000}`))
	client.SendEvent(link.TopicAlert, []byte(`{"level":"info","metric":"disk_pct","value":80,"threshold":90,"rule_id":"disk-full","message":"cleared: 80 °","cleared":true,"ts":1795000060000}`))
	client.SendEvent(link.TopicAlert, []byte(`{"level":"info","metric":"x","value":1,"message":"\u001b[31mred","ts":1}`))
	eventually(t, "all events arrived", func() bool { return strings.Contains(r.logs.String(), "bad_event") })
	sent := frames()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	log, err := eventlog.OpenReader(filepath.Join(r.dir, eventlog.FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	err = log.Select(t.Context(), eventlog.Query{Types: []string{"alert.*"}}, func(e kernel.Event) error {
		if e.Tenant != "default" || e.Aggregate != node {
			t.Errorf("%+v", e)
		}
		sent = append(sent, traceEntry{"log " + e.Type, string(e.Payload)})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	compareGolden(t, "alert", sent)
}

// A metric stream from its opening to the reader's end, on both wires.
func TestTraceStream(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	node, _, frames := r.recorded(link.Subprotocol)
	frames()
	request, response, s := r.exchange("sys."+node+".metrics.subscribe", `{"interval_ms":60000}`, "text/event-stream")
	s.read()
	s.metric(time.Second)
	s.halfClose()
	s.waitEnd(sse.Normal, 2*time.Second)
	parts := append([]traceEntry{{"agent request", request}}, collectUntil(t, frames, "device stream_end")...)
	compareGolden(t, "stream", append(parts, traceEntry{"relay response", response + "\n" + s.raw.String()}))
}

// collectUntil collects frames up to the one of that name.
func collectUntil(t *testing.T, frames func() []traceEntry, name string) (all []traceEntry) {
	t.Helper()
	eventually(t, name, func() bool {
		all = append(all, frames()...)
		return len(all) > 0 && all[len(all)-1].name == name
	})
	return all
}

// timedEvents is a stream's events with the second at which each came. A ping and a frame of the
// same moment may come in either order.
func timedEvents(s *stream, start time.Time, until time.Duration) (parts []traceEntry) {
	defer func() {
		for i := 1; i < len(parts); i++ {
			if parts[i].name == parts[i-1].name && strings.HasPrefix(parts[i].data, "event: ping") {
				parts[i-1], parts[i] = parts[i], parts[i-1]
			}
		}
	}()
	over := time.After(time.Until(start.Add(until)))
	for {
		select {
		case ev, ok := <-s.events:
			if !ok {
				return parts
			}
			name := fmt.Sprintf("%.0f s", time.Since(start).Seconds())
			parts = append(parts, traceEntry{name, "event: " + ev.Type + "\ndata: " + string(ev.Data)})
		case <-over:
			return parts
		}
	}
}

// RFC-0009 §9 fixture 1: 5000 ms, a prompt reader for 30 s, then it closes its side.
func TestRFC0009Fixture1(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{cadence: true})
		start := time.Now()
		s := m.subscribe(`{"interval_ms":5000}`)
		parts := timedEvents(s, start, 30*time.Second+time.Millisecond)
		s.halfClose()
		compareGolden(t, "fixture1", append(parts, timedEvents(s, start, 40*time.Second)...))
		s.checkEnd(sse.Event{}, sse.Normal)
		eventually(t, "cmd_cancel", func() bool { return m.count(link.TypeCmdCancel) == 1 })
		r.waitAudited("decision=close", "reason=close=1000")
	})
}

// RFC-0009 §9 fixture 3: the device dies in the middle.
func TestRFC0009Fixture3(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{cadence: true})
		start := time.Now()
		s := m.subscribe(`{"interval_ms":5000}`)
		parts := timedEvents(s, start, 12*time.Second)
		m.kill()
		compareGolden(t, "fixture3", append(parts, timedEvents(s, start, 20*time.Second)...))
		s.checkEnd(sse.Event{}, sse.DeviceOffline)
	})
}

// fixedHistory has a value for each step but the third.
type fixedHistory struct{}

func (fixedHistory) Oldest(context.Context) int64 { return 1 }

func (fixedHistory) Series(_ context.Context, q handlers.HistoryQuery, fn func(int64, []float64) error) error {
	for start := q.FromMS; start < q.EndMS; start += q.StepMS {
		i := float64((start - q.FromMS) / q.StepMS)
		if i == 2 {
			continue
		}
		if err := fn(start, []float64{12.5 + i, 1 << 30}); err != nil {
			return err
		}
	}
	return nil
}

// A query of a board's history on v2.1: what the board announces, the request, the command, its
// answer and the response. On v2 the same board announces no history.
func TestTraceHistory(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	node, _, frames := r.recordedWith(fixedHistory{}, link.Subprotocol21)
	var parts []traceEntry
	for _, f := range frames() {
		if strings.HasSuffix(f.name, "announce") || strings.HasSuffix(f.name, "announce_ack") {
			parts = append(parts, f)
		}
	}
	request, response, s := r.exchange("syshist."+node+".history.query",
		`{"from_ms":1700000000000,"to_ms":1700000300000,"step_ms":60000,"metrics":["cpu_pct","mem_bytes"],"aggregate":"mean"}`, "application/json")
	body, err := io.ReadAll(io.LimitReader(s.resp.Body, s.resp.ContentLength))
	if err != nil {
		t.Fatal(err)
	}
	parts = append(append(parts, traceEntry{"agent request", request}), frames()...)
	compareGolden(t, "history21", append(parts, traceEntry{"relay response", response + "\n" + string(body)}))

	old := newTestRelay(t)
	_, _, frames = old.recordedWith(fixedHistory{}, link.Subprotocol)
	for _, f := range frames() {
		if strings.Contains(f.data, "system.history") {
			t.Errorf("on v2: %s", f.data)
		}
	}
}
