package stdio

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
)

// testPlugin is a plugin with one tool: it returns its argument, after a delay if asked to.
type testPlugin struct{ version string }

func (p *testPlugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "toy", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "toy.say", ToolInfo: &kernel.ToolInfo{
		Description: p.version, InputSchema: json.RawMessage(`{"type":"object"}`), Scope: manifest.ScopeCallReadOnly}}},
		Resources: []*kernel.Resource{{URI: "mcp://toy/a.json", Name: "a", Scope: manifest.ScopeCallReadOnly, Watchable: true}}}
}

func (p *testPlugin) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	var a struct {
		Wait int    `json:"wait_ms"`
		Text string `json:"text"`
	}
	_ = json.Unmarshal(r.Arguments, &a)
	if r.Session != nil {
		_ = r.Session.Notify(ctx, "notifications/progress", json.RawMessage(`{"progress":1}`))
	}
	select {
	case <-time.After(time.Duration(a.Wait) * time.Millisecond):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	text, _ := json.Marshal(a.Text)
	return &kernel.Result{Content: []json.RawMessage{json.RawMessage(`{"type":"text","text":` + string(text) + `}`)}}, nil
}

func (p *testPlugin) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return []byte(`{}`), nil
}

func (p *testPlugin) Watch(ctx context.Context, _ string, changed func()) error {
	tick := time.NewTicker(10 * time.Millisecond) // a session that does not listen yet misses some
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			changed()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

type allScopes struct{}

func (allScopes) Has(string) bool { return true }

// server is /mcp behind one URL over restarts.
type server struct {
	t    *testing.T
	keys func() [][]byte // of sessions; nil: a restart loses them
	http *httptest.Server
	now  atomic.Pointer[mcp.Handler]
	k    atomic.Pointer[kernel.Kernel]
	stop func()
}

func newServer(t *testing.T) *server {
	s := &server{t: t}
	s.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := s.now.Load(); h != nil {
			h.ServeHTTP(w, r)
		}
	}))
	s.start()
	t.Cleanup(func() { s.stop(); s.http.Close() })
	return s
}

func (s *server) start() { s.startWith(&testPlugin{}) }

func (s *server) startWith(plugins ...kernel.Plugin) {
	k := kernel.New(kernel.Options{})
	for _, p := range plugins {
		if err := k.Load(p, false); err != nil {
			s.t.Fatal(err)
		}
	}
	h := mcp.New(mcp.Options{Kernel: k, SessionKeys: s.keys, Authenticate: func(r *http.Request) (*kernel.Caller, error) {
		if r.Header.Get("Authorization") != "Bearer good" {
			return nil, manifest.E(manifest.SafetyDenied, "the token is not good")
		}
		return &kernel.Caller{Tenant: "default", Actor: "a", Transport: "mcp", Scopes: allScopes{}}, nil
	}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = k.Run(ctx) })
	wg.Go(func() { _ = h.Run(ctx) })
	for {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodDelete, "http://localhost/mcp", nil)
		r.Header.Set("Authorization", "Bearer good")
		if h.ServeHTTP(w, r); w.Code == http.StatusBadRequest { // it runs: what it misses is the session id
			break
		}
	}
	s.k.Store(k)
	s.now.Store(h)
	s.stop = func() { s.now.Store(nil); cancel(); wg.Wait() }
}

// client is a program on the other end of the pipes.
type client struct {
	t     *testing.T
	in    *io.PipeWriter
	lines chan string
	ended chan error
}

func newClient(t *testing.T, o Options) *client {
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	c := &client{t: t, in: inW, lines: make(chan string, 1024), ended: make(chan error, 1)}
	if o.Token == nil {
		o.Token = func(context.Context, string) (string, error) { return "good", nil }
	}
	o.Client = &http.Client{Transport: &http.Transport{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		c.ended <- Serve(context.Background(), inR, outW, o)
		outW.Close()
	})
	wg.Go(func() {
		sc := bufio.NewScanner(outR)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			c.lines <- sc.Text()
		}
		close(c.lines)
	})
	t.Cleanup(func() { inW.Close(); wg.Wait(); o.Client.CloseIdleConnections() })
	return c
}

func (c *client) send(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

// until returns the first line that has all of the words.
func (c *client) until(words ...string) string {
	c.t.Helper()
	deadline := time.After(20 * time.Second)
	var seen []string
next:
	for {
		select {
		case line, ok := <-c.lines:
			if !ok {
				c.t.Fatalf("it ended before %q; it wrote %q", words, seen)
			}
			seen = append(seen, line)
			for _, w := range words {
				if !strings.Contains(line, w) {
					continue next
				}
			}
			return line
		case <-deadline:
			c.t.Fatalf("no line with %q; it wrote %q", words, seen)
		}
	}
}

const initialize = `{"jsonrpc":"2.0","id":"i","method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`

func (c *client) hello() {
	c.t.Helper()
	c.send(initialize)
	c.until(`"id":"i"`, `"protocolVersion":"2025-11-25"`)
	c.send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
}

func TestSessionEra(t *testing.T) {
	t.Parallel() // it waits
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	c.send(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	c.until(`"id":1`, `toy.say`)
	c.send(`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"a\nb"},"_meta":{"progressToken":"p"}}}`)
	c.until(`notifications/progress`, `"progressToken":"p"`)
	c.until(`"id":2`, `"text":"a\nb"`)

	// Side by side: the slow one does not hold up the fast one.
	c.send(`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"slow","wait_ms":300}}}`)
	c.send(`{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"fast"}}}`)
	c.until(`"id":4`, "fast")
	c.until(`"id":3`, "slow")

	c.send(`{"jsonrpc":"2.0","id":5,"method":"resources/subscribe","params":{"uri":"mcp://toy/a.json"}}`)
	c.until(`"id":5`, `"result"`)
	c.until("notifications/resources/updated", "mcp://toy/a.json")
}

// TestServerRestarts: the session is renewed, the client is notified that lists changed,
// and its subscription still works.
func TestServerRestarts(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	c.send(`{"jsonrpc":"2.0","id":5,"method":"resources/subscribe","params":{"uri":"mcp://toy/a.json"}}`)
	c.until(`"id":5`, `"result"`)
	s.stop()
	s.start()
	c.send(`{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"again"}}}`)
	c.until(`"id":6`, "again")
	c.send(`{"jsonrpc":"2.0","id":7,"method":"ping"}`)
	c.until(`"id":7`, `"result":{}`)
	deadline := time.After(20 * time.Second)
	for len(s.k.Load().SubscriptionsInfo().Watches) == 0 {
		select {
		case <-deadline:
			t.Fatal("the subscription was not made again")
		case <-time.After(time.Millisecond):
		}
	}
}

// TestServerKeepsSessions: a server that still knows the session after a restart has lost its
// subscriptions, and the bridge makes them again.
func TestServerKeepsSessions(t *testing.T) {
	t.Parallel() // it waits
	s := newServer(t)
	s.stop()
	s.keys = func() [][]byte { return [][]byte{[]byte("one key for both processes")} }
	s.start()
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	c.send(`{"jsonrpc":"2.0","id":5,"method":"resources/subscribe","params":{"uri":"mcp://toy/a.json"}}`)
	c.until(`"id":5`, `"result"`)
	c.until("notifications/resources/updated") // the stream is open
	s.stop()
	s.start()
	c.send(`{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"again"}}}`)
	c.until(`"id":6`, "again")
	c.until("notifications/tools/list_changed")
	c.until("notifications/resources/updated", "mcp://toy/a.json")
}

// TestResubscribeWhenBoardReturns: after a restart the bridge is back before the boards are, and
// watches what they bring again.
func TestResubscribeWhenBoardReturns(t *testing.T) {
	t.Parallel() // it waits
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	c.send(`{"jsonrpc":"2.0","id":5,"method":"resources/subscribe","params":{"uri":"mcp://toy/a.json"}}`)
	c.until(`"id":5`, `"result"`)
	s.stop()
	s.startWith()
	c.send(`{"jsonrpc":"2.0","id":6,"method":"tools/list"}`)
	c.until(`"id":6`, `"tools":[]`)
	if err := s.k.Load().Load(&testPlugin{}, false); err != nil {
		t.Fatal(err)
	}
	c.until("notifications/resources/updated", "mcp://toy/a.json")
}

const modern = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`

func TestSessionlessEra(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.send(`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{` + modern + `}}`)
	c.until(`"id":1`, `toy.say`, `"cacheScope"`)
	c.send(`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"x"},` + modern + `}}`)
	c.until(`"id":2`, `"text":"x"`)
	c.send(`{"jsonrpc":"2.0","id":3,"method":"subscriptions/listen","params":{"notifications":{"toolsListChanged":true},` + modern + `}}`)
	c.until("notifications/subscriptions/acknowledged")
	if err := s.k.Load().Load(&other{}, false); err != nil {
		t.Fatal(err)
	}
	c.until("notifications/tools/list_changed")

	// Hanging up is the way to cancel; no answer follows, and the id is free again.
	c.send(`{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"never","wait_ms":60000},` + modern + `}}`)
	c.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":4}}`)
	c.send(`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"toy.say","arguments":{"text":"y"},` + modern + `}}`)
	if line := c.until(`"id":5`); !strings.Contains(line, `"text":"y"`) {
		t.Error(line)
	}
}

type other struct{ testPlugin }

func (p *other) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "other", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "other.say", ToolInfo: &kernel.ToolInfo{
		InputSchema: json.RawMessage(`{"type":"object"}`), Scope: manifest.ScopeCallReadOnly}}}}
}

// A line that is no message, or that the server would refuse, is answered with an error, and the bridge goes on.
func TestBadMessages(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	for _, tt := range []struct {
		name, line string
		want       []string
	}{
		{"unfinished JSON", `{"jsonrpc":"2.0",`, []string{`"id":null`, `-32700`}},
		{"a batch", `[]`, []string{`"id":null`, `-32700`, "batches are not supported"}},
		{"too long", `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"x":"` + strings.Repeat("y", maxLine) + `"}}`, []string{`"id":null`, `-32600`, "1 MiB"}},
		{"before initialize", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, []string{`"id":1`, `"error"`, "send initialize first"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.send(tt.line)
			c.until(tt.want...)
		})
	}
	c.hello()
}

// A second request under an id that is in use is refused; the first one is answered.
func TestDuplicateID(t *testing.T) {
	t.Parallel() // it waits
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	c.send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"toy.say","arguments":{"wait_ms":300}}}`)
	c.send(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	c.until(`"id":1`, `-32600`, "in progress")
	c.until(`"id":1`, `"result"`)
}

// A token that the server refuses is an error that says where the token came from.
func TestRefusedToken(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp", Token: func(context.Context, string) (string, error) { return "bad", nil }, TokenHint: "read from --token-file"})
	c.send(initialize)
	c.until(`"id":"i"`, `-31401`, "--token-file")
}

// A request that was refused for its token is sent again with a newer one.
func TestRefreshedToken(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp", Token: func(_ context.Context, refused string) (string, error) {
		if refused == "bad" {
			return "good", nil
		}
		return "bad", nil // each request begins with an expired token
	}})
	c.hello()
}

func TestUnreachableServer(t *testing.T) {
	c := newClient(t, Options{URL: "http://127.0.0.1:1/mcp"})
	c.send(initialize)
	c.until(`"id":"i"`, fmt.Sprint(codeUnreachable), "no relay answers at", "refused")
}

// TestIDFreeAfterAnswer: an id can be used again as soon as its answer has been read.
func TestIDFreeAfterAnswer(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	for range 300 {
		for _, method := range []string{"ping", "no/such"} {
			c.send(`{"jsonrpc":"2.0","id":1,"method":"` + method + `"}`)
			if line := c.until(`"id":1`); strings.Contains(line, "in progress") {
				t.Fatalf("%s: %s", method, line)
			}
		}
	}
}

// TestEndOfInput: a pipe that closes after its last request still gets its answers, and
// the session is ended.
func TestEndOfInput(t *testing.T) {
	s := newServer(t)
	c := newClient(t, Options{URL: s.http.URL + "/mcp"})
	c.hello()
	for i := range 20 {
		c.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"toy.say","arguments":{"wait_ms":50}}}`, i))
	}
	c.in.Close()
	answers := 0
	for line := range c.lines {
		if strings.Contains(line, `"result"`) {
			answers++
		}
	}
	if answers != 20 {
		t.Errorf("%d answers of 20", answers)
	}
	if err := <-c.ended; err != nil && !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if n := s.now.Load().Stats().Sessions; n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}

// TestClientStopsReading: a client that reads nothing does not keep the bridge from its end.
func TestClientStopsReading(t *testing.T) {
	t.Parallel() // it waits
	s := newServer(t)
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	defer outR.Close()
	defer inW.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	web := &http.Client{Transport: &http.Transport{}}
	defer web.CloseIdleConnections()
	go func() {
		ended <- Serve(ctx, inR, outW, Options{URL: s.http.URL + "/mcp", Client: web, Token: func(context.Context, string) (string, error) { return "good", nil }})
	}()
	for range 2 { // the second one waits for the first one's answer to be read
		_, _ = io.WriteString(inW, initialize+"\n")
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(8 * time.Second):
		t.Fatal("it does not end")
	}
}
