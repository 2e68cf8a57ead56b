package test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentctl/relay/gateway"
)

// chromium is where Debian's package puts the browser.
const chromium = "/usr/bin/chromium"

// browserPage subscribes to the gateway in one of two ways and reports each event to its own server.
var browserPage = template.Must(template.New("").Parse(`<!doctype html><meta charset="utf-8"><title>events</title><script>
let sent = Promise.resolve();
const report = (what) => sent = sent.then(() => fetch('/seen', {method: 'POST', body: JSON.stringify(what)})); // in order
const gateway = {{.Gateway}};
{{if .Follow}}
{{.Follow}}
const ticket = async () => (await (await fetch('/ticket', {method: 'POST'})).json()).ticket;
follow(gateway, ['log/level', 'build'], ticket, (topic, data, id) => report({topic, data, id}));
fetch(gateway + {{.Ingest}}, {method: 'POST', headers: {'Authorization': 'Bearer wrong', 'Content-Type': 'application/json'}, body: '{}'})
  .then(async (r) => report({topic: 'status', data: r.status, id: ''}), (e) => report({topic: 'status', data: String(e), id: ''}));
{{else}}
const source = new EventSource(gateway + {{.Stream}} + '?topics=build');
source.onerror = () => source.readyState === EventSource.CLOSED && report({topic: 'closed', data: null, id: ''});
source.onopen = () => report({topic: 'open', data: null, id: ''});
for (const topic of ['build', 'gateway/reset', 'log/level'])
  source.addEventListener(topic, (e) => report({topic, data: JSON.parse(e.data), id: e.lastEventId}));
{{end}}
</script>`))

// browserEvent is one event that the page reported.
type browserEvent struct {
	Topic string          `json:"topic"`
	Data  json.RawMessage `json:"data"`
	ID    string          `json:"id"`
}

// eventsGateway is `agentctl events serve` on an address that it may be started on again.
type eventsGateway struct {
	t       *testing.T
	addr    string
	env     []string
	args    []string
	process *exec.Cmd
}

// freeAddr is an address below the ports that clients are given, so that it stays free.
func freeAddr(t *testing.T) string {
	for port := 21000 + os.Getpid()%5000; port < 32000; port++ {
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = ln.Close()
			return ln.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

func (g *eventsGateway) start(ctx context.Context) {
	g.t.Helper()
	g.process = exec.CommandContext(ctx, binary(g.t, "agentctl", ""), append([]string{"events", "serve", "--listen", g.addr, "--log-level", "error"}, g.args...)...)
	g.process.Env = append([]string{"PATH=" + os.Getenv("PATH"), "MCP_SSE_HEARTBEAT_MS=1000"}, g.env...)
	g.process.Stderr = os.Stderr
	out, err := g.process.StdoutPipe()
	if err != nil {
		g.t.Fatal(err)
	}
	if err := g.process.Start(); err != nil {
		g.t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, `"ready":true`) {
		g.t.Fatalf("the gateway says %q, %v", line, err)
	}
}

func (g *eventsGateway) stop() {
	g.t.Helper()
	_ = g.process.Process.Signal(syscall.SIGTERM)
	if err := g.process.Wait(); err != nil {
		g.t.Errorf("the gateway ended with %v", err)
	}
}

func (g *eventsGateway) post(path, body string) (status int, answer map[string]any) {
	req, _ := http.NewRequest(http.MethodPost, "http://"+g.addr+path, strings.NewReader(body))
	req.Header.Set("Authorization", "Bearer sub")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil
	}
	defer func() { _ = resp.Body.Close() }()
	_ = json.NewDecoder(resp.Body).Decode(&answer)
	return resp.StatusCode, answer
}

func (g *eventsGateway) emit(topic, data string) {
	g.t.Helper()
	if status, answer := g.post(gateway.IngestPath, `{"topic":"`+topic+`","data":`+data+`}`); status != http.StatusAccepted {
		g.t.Fatalf("emit: %d %v", status, answer)
	}
}

// browserFrames is a page with other pages.
var browserFrames = template.Must(template.New("").Parse(`<!doctype html><meta charset="utf-8"><title>frames</title>{{range .}}<iframe src="{{.}}"></iframe>{{end}}`))

// browserCase is a page that follows a gateway, and what the page must see of it.
type browserCase struct {
	name    string
	gateway *eventsGateway
	values  map[string]any // of browserPage
	check   func(t *testing.T, g *eventsGateway, next func(topic string) browserEvent)

	url      string // of the page
	reported chan browserEvent
}

// serve starts the gateway, which allows the page's origin unless its variables say otherwise, and
// serves the page, each on an origin that no other page has.
func (c *browserCase) serve(ctx context.Context, t *testing.T) {
	t.Helper()
	g := c.gateway
	c.reported = make(chan browserEvent, 100)
	c.values["Gateway"], c.values["Stream"], c.values["Ingest"] = "http://"+g.addr, gateway.StreamPath, gateway.IngestPath
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_ = browserPage.Execute(w, c.values)
	})
	mux.HandleFunc("POST /ticket", func(w http.ResponseWriter, _ *http.Request) {
		status, answer := g.post(gateway.TicketPath, "")
		if status != http.StatusOK {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_ = json.NewEncoder(w).Encode(answer)
	})
	mux.HandleFunc("POST /seen", func(_ http.ResponseWriter, r *http.Request) {
		var s browserEvent
		if b, err := io.ReadAll(r.Body); err != nil || json.Unmarshal(b, &s) != nil {
			t.Errorf("the page says %q, %v", b, err)
		}
		c.reported <- s
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	c.url = srv.URL
	g.env = append([]string{"MCP_SSE_ALLOW_ORIGINS=" + srv.URL}, g.env...)
	g.start(ctx)
}

// browse opens pages in one Chromium, whose start takes longer than all of the test.
func browse(ctx context.Context, t *testing.T, urls []string) {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_ = browserFrames.Execute(w, urls)
	}))
	t.Cleanup(srv.Close)
	profile, err := os.MkdirTemp("", "agentctl-chromium-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(profile) }) // a last helper of the browser may still write
	cmd := exec.CommandContext(ctx, chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
		"--log-level=3", "--remote-debugging-port=0", "--user-data-dir="+profile, srv.URL+"/")
	cmd.Env = append(os.Environ(), "TMPDIR="+profile)
	var errs buffer
	cmd.Stdout, cmd.Stderr = &errs, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	end := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Cancel = func() error { end(); return nil }
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		end()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("chromium said\n%s", errs.String())
		}
	})
}

// nextEvent waits for the page's next event, which must have this topic.
func nextEvent(ctx context.Context, t *testing.T, reported <-chan browserEvent, topic string) browserEvent {
	t.Helper()
	for {
		select {
		case s := <-reported:
			if s.Topic == topic {
				return s
			}
			t.Fatalf("the page reported %s %s, want %s", s.Topic, s.Data, topic)
		case <-ctx.Done():
			t.Fatalf("the page did not report %s in time", topic)
		}
	}
}

// A page on another origin follows the gateway with a browser's own EventSource: by a
// ticket and the code of docs/events.md, and open, with the browser's own reconnection. In
// both the gateway is stopped and started again, and nothing is missing or repeated.
func TestBrowser(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat(chromium); err != nil {
		t.Skipf("no browser: %v; Debian's package is chromium", err)
	}
	binary(t, "agentctl", "")
	docs, err := os.ReadFile("../docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	follow := regexp.MustCompile("(?ms)^```js\n(// follow\\.js.*?)^```$").FindSubmatch(docs)
	if follow == nil {
		t.Fatal("docs/events.md has no block follow.js")
	}
	cases := []*browserCase{
		{name: "ticket", values: map[string]any{"Follow": template.JS(follow[1])},
			gateway: &eventsGateway{env: []string{"MCP_SSE_AUTH_TOKEN=sub", "MCP_SSE_HMAC_SECRET=s"}, args: []string{"--state-dir", t.TempDir()}},
			check: func(t *testing.T, g *eventsGateway, next func(topic string) browserEvent) {
				if s := next("status"); string(s.Data) != "401" { // after a preflight with Authorization
					t.Errorf("a page with a bad token gets %s", s.Data)
				}
				g.clients(1)
				g.emit("log/level", `{"current":"debug"}`)
				g.emit("other", `0`)
				g.emit("build", `1`)
				if s := next("log/level"); string(s.Data) != `{"current":"debug"}` || s.ID == "" {
					t.Errorf("the page saw %s %s", s.ID, s.Data)
				}
				first := next("build")
				g.stop()
				g.start(t.Context())
				g.emit("build", `2`) // before the page is back
				g.clients(1)
				g.emit("build", `3`)
				for i, want := range []string{"2", "3"} {
					if s := next("build"); string(s.Data) != want || s.ID <= first.ID {
						t.Errorf("event %d after the restart is %s %s", i, s.ID, s.Data)
					}
				}
			}},
		{name: "open", values: map[string]any{},
			gateway: &eventsGateway{args: []string{"--state-dir", t.TempDir()}},
			check: func(t *testing.T, g *eventsGateway, next func(topic string) browserEvent) {
				next("open")
				g.emit("build", `"a"`)
				first := next("build")
				g.stop()
				g.start(t.Context())
				g.emit("build", `"b"`)
				next("open")
				if s := next("build"); string(s.Data) != `"b"` || s.ID <= first.ID {
					t.Errorf("after the restart the page saw %s %s", s.ID, s.Data)
				}
			}},
		{name: "foreign", values: map[string]any{},
			gateway: &eventsGateway{env: []string{"MCP_SSE_ALLOW_ORIGINS=https://elsewhere.example"}},
			check: func(_ *testing.T, g *eventsGateway, next func(topic string) browserEvent) {
				next("closed")
				g.clients(0)
			}},
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel) // when the subtests have ended
	var urls []string
	for _, c := range cases {
		c.gateway.t, c.gateway.addr = t, freeAddr(t)
		c.serve(ctx, t)
		urls = append(urls, c.url)
	}
	browse(ctx, t, urls)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.gateway.t = t
			c.check(t, c.gateway, func(topic string) browserEvent { t.Helper(); return nextEvent(ctx, t, c.reported, topic) })
			c.gateway.stop()
		})
	}
}

// clients waits until the gateway has n subscribers.
func (g *eventsGateway) clients(n int) {
	g.t.Helper()
	want := fmt.Sprintf("\nmcp_sse_clients %d\n", n)
	eventually(g.t, fmt.Sprintf("%d subscribers of the gateway", n), func() bool {
		resp, err := http.Get("http://" + g.addr + gateway.MetricsPath)
		if err != nil {
			return false
		}
		defer func() { _ = resp.Body.Close() }()
		b, _ := io.ReadAll(resp.Body)
		return strings.Contains(string(b), want)
	})
}
