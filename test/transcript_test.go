package test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/mcp/stdio"
	plugproc "agentctl/relay/plugins/process"
	"agentctl/transport/sse"
)

// TestTranscript plays one script to one plugin in every way a caller can reach the
// kernel and in every way a plugin can be attached to it. What comes back must be the
// same, word for word: testdata/transcript.golden.
func TestTranscript(t *testing.T) {
	golden, err := os.ReadFile("testdata/transcript.golden")
	if err != nil && !*update {
		t.Fatal(err)
	}
	bin := filepath.Join(t.TempDir(), "notes")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", bin, "agentctl/docs/examples/notes").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for plugin, attach := range map[string]func(*testing.T, *kernel.Kernel, string) (watched func() bool){
		"inproc": attachNotes, "process": attachProcess, "socket": attachSocket,
	} {
		for transport, dial := range map[string]func(*testing.T, *kernel.Kernel) speaker{
			"inproc": speakBus, "http": speakHTTP, "sse": speakSSE, "stdio": speakStdio,
		} {
			t.Run(plugin+"/"+transport, func(t *testing.T) {
				k := kernel.New(kernel.Options{})
				ctx, cancel := context.WithCancel(context.Background())
				var wg sync.WaitGroup
				wg.Go(func() { _ = k.Run(ctx) })
				t.Cleanup(func() { cancel(); wg.Wait() })
				watched := attach(t, k, bin)
				got := play(t, dial(t, k), watched)
				if *update {
					if err := os.WriteFile("testdata/transcript.golden", []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
					golden = []byte(got)
				}
				if got != string(golden) {
					t.Errorf("got\n%swant\n%s", got, golden)
				}
			})
		}
	}
}

// speaker is a client of the kernel. What it returns is free of what only its transport
// has.
type speaker interface {
	tools() string
	call(tool, args string) string
	read(uri string) string
	subscribe(uri string)
	updated() string // waits for the next update of a resource
}

// play waits for watched before it changes what is subscribed to: MCP tells a client that
// its subscription stands, but not when it has reached the plugin.
func play(t *testing.T, s speaker, watched func() bool) string {
	t.Helper()
	const uri = "mcp://notes/all.json"
	var b strings.Builder
	line := func(did, got string) { fmt.Fprintf(&b, "%s\n  %s\n", did, got) }
	call := func(tool, args string) { line("tools/call "+tool+" "+args, s.call(tool, args)) }
	line("tools/list", s.tools())
	call("notes.add", `{"text":"water the beans"}`)
	call("notes.add", `{"text":"turn the compost"}`)
	call("notes.search", `{"word":"beans"}`)
	call("notes.search", `{"word":""}`)
	call("notes.search", `{"word":"x","more":1}`)
	call("notes.burn", `{}`)
	line("resources/read "+uri, s.read(uri))
	line("resources/read mcp://notes/none.json", s.read("mcp://notes/none.json"))
	s.subscribe(uri)
	eventually(t, "the plugin knows of the subscription", watched)
	call("notes.add", `{"text":"third"}`)
	line("updated", s.updated())
	line("resources/read "+uri, s.read(uri))
	return b.String()
}

type allScopes struct{}

func (allScopes) Has(string) bool { return true }

func notesCaller(transport string) *kernel.Caller {
	return &kernel.Caller{Tenant: "default", Actor: "script", Transport: transport, Scopes: allScopes{}}
}

// --- the ways to attach the plugin

// inprocNotes is the example plugin as a part of this program.
type inprocNotes struct {
	m *kernel.Manifest

	mu    sync.Mutex // protects the fields below
	notes []string
	told  func()
}

func attachNotes(t *testing.T, k *kernel.Kernel, _ string) func() bool {
	t.Helper()
	m, err := plugproc.Manifest("notes", notesManifest(t))
	if err != nil {
		t.Fatal(err)
	}
	p := &inprocNotes{m: m, notes: []string{}}
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.told != nil
	}
}

func (p *inprocNotes) Manifest() *kernel.Manifest { return p.m }

func (p *inprocNotes) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	var a struct{ Text, Word string }
	if err := json.Unmarshal(r.Arguments, &a); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var v any
	if r.Target().Name == "notes.add" {
		p.notes = append(p.notes, a.Text)
		if p.told != nil {
			p.told()
		}
		v = map[string]any{"number": len(p.notes)}
	} else {
		found := []string{}
		for _, n := range p.notes {
			if strings.Contains(n, a.Word) {
				found = append(found, n)
			}
		}
		v = map[string]any{"notes": found}
	}
	b, err := json.Marshal(v)
	return &kernel.Result{Structured: b}, err
}

func (p *inprocNotes) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return json.Marshal(p.notes)
}

func (p *inprocNotes) Watch(ctx context.Context, _ string, changed func()) error {
	p.mu.Lock()
	p.told = changed
	p.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func notesManifest(t *testing.T) []byte {
	t.Helper()
	m, err := os.ReadFile("../docs/examples/notes/plugin.json")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func attachFolder(t *testing.T, k *kernel.Kernel, lay func(folder string)) func() bool {
	t.Helper()
	dir := t.TempDir()
	folder := filepath.Join(dir, "notes")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "plugin.json"), notesManifest(t), 0o644); err != nil {
		t.Fatal(err)
	}
	lay(folder)
	core, logs := observer.New(zap.DebugLevel)
	h := plugproc.New(plugproc.Options{Dir: dir, Kernel: k, Version: "test", Logger: zap.New(core)})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	for {
		_, err := h.Load(ctx, "notes")
		if err == nil {
			return func() bool { return logs.FilterMessage("plugin took a subscription").Len() > 0 }
		}
		if !errors.Is(err, plugproc.ErrNotRunning) {
			t.Fatal(err)
		}
	}
}

func attachProcess(t *testing.T, k *kernel.Kernel, bin string) func() bool {
	return attachFolder(t, k, func(folder string) {
		b, err := os.ReadFile(bin)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "run"), b, 0o755); err != nil {
			t.Fatal(err)
		}
	})
}

func attachSocket(t *testing.T, k *kernel.Kernel, bin string) func() bool {
	return attachFolder(t, k, func(folder string) {
		ln, err := net.Listen("unix", filepath.Join(folder, "run.sock"))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					defer nc.Close()
					cmd := exec.Command(bin)
					cmd.Stdin, cmd.Stdout = nc, nc
					_ = cmd.Run()
				})
			}
		})
		t.Cleanup(func() { ln.Close(); wg.Wait() })
	})
}

// --- the ways to speak to the kernel

// bus speaks to the kernel in its own process.
type bus struct {
	t   *testing.T
	k   *kernel.Kernel
	c   *kernel.Caller
	sub *kernel.Subscription
}

func speakBus(t *testing.T, k *kernel.Kernel) speaker {
	sub, err := k.Subscribe("default")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sub.Close)
	return &bus{t, k, notesCaller("inproc"), sub}
}

func (b *bus) tools() string {
	var names []string
	list, _ := b.k.ListTools(b.c, "", 100)
	for _, t := range list {
		names = append(names, t.Name)
	}
	return strings.Join(names, " ")
}

func (b *bus) call(tool, args string) string {
	res, err := b.k.Call(b.t.Context(), &kernel.Request{Caller: b.c, Tool: tool, Arguments: json.RawMessage(args)})
	if err != nil {
		if e := manifest.AsError(err); e.Code != manifest.BadRequest {
			return string(e.Code)
		}
		return "no such tool"
	}
	return compact(res.Structured)
}

func (b *bus) read(uri string) string {
	_, content, err := b.k.Read(b.t.Context(), b.c, uri)
	if err != nil {
		return "no such resource"
	}
	return compact(content)
}

func (b *bus) subscribe(uri string) {
	release, err := b.k.Watch(b.c, uri)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(release)
}

func (b *bus) updated() string {
	deadline := time.After(10 * time.Second)
	for {
		select {
		case <-b.sub.Ready():
			if c := b.sub.Next(); len(c.Updated) > 0 {
				return strings.Join(c.Updated, " ")
			}
		case <-deadline:
			return "nothing"
		}
	}
}

func compact(b []byte) string {
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return err.Error()
	}
	out, _ := json.Marshal(v) // it was JSON
	return string(out)
}

// mcpServer serves the kernel over HTTP.
func mcpServer(t *testing.T, k *kernel.Kernel) string {
	h := mcp.New(mcp.Options{Kernel: k, Authenticate: func(*http.Request) (*kernel.Caller, error) { return notesCaller("mcp"), nil }})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	srv := httptest.NewServer(h)
	t.Cleanup(func() { cancel(); wg.Wait(); srv.Close() })
	for {
		resp, err := http.Get(srv.URL + "/mcp")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusBadRequest { // it runs: what it misses is the session id
			return srv.URL + "/mcp"
		}
	}
}

// wire speaks MCP; send carries one message and returns its answer, nil for none.
type wire struct {
	t      *testing.T
	k      *kernel.Kernel
	send   func(msg string, answered bool) map[string]any
	notes  chan map[string]any
	modern string // what every request carries in params
	next   int
}

func (w *wire) request(method, params string) map[string]any {
	w.t.Helper()
	w.next++
	if w.modern != "" {
		if params != "" {
			params += ","
		}
		params += w.modern
	}
	return w.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q,"params":{%s}}`, w.next, method, params), true)
}

func (w *wire) hello() {
	w.t.Helper()
	w.request("initialize", `"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}`)
	w.send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`, false)
}

func (w *wire) tools() string {
	res, _ := w.request("tools/list", "")["result"].(map[string]any)
	var names []string
	list, _ := res["tools"].([]any)
	for _, t := range list {
		names = append(names, t.(map[string]any)["name"].(string))
	}
	return strings.Join(names, " ")
}

func (w *wire) call(tool, args string) string {
	res, ok := w.request("tools/call", fmt.Sprintf(`"name":%q,"arguments":%s`, tool, args))["result"].(map[string]any)
	if !ok { // which MCP says by an error of the protocol
		return "no such tool"
	}
	if res["isError"] == true {
		return res["structuredContent"].(map[string]any)["error"].(map[string]any)["code"].(string)
	}
	b, _ := json.Marshal(res["structuredContent"])
	return string(b)
}

func (w *wire) read(uri string) string {
	res, ok := w.request("resources/read", fmt.Sprintf(`"uri":%q`, uri))["result"].(map[string]any)
	if !ok {
		return "no such resource"
	}
	return compact([]byte(res["contents"].([]any)[0].(map[string]any)["text"].(string)))
}

func (w *wire) subscribe(uri string) {
	w.request("resources/subscribe", fmt.Sprintf(`"uri":%q`, uri))
	// What is told before the session's own stream stands is lost: hear something first.
	for deadline := time.Now().Add(20 * time.Second); ; {
		w.k.Changed("default", kernel.Change{Tools: true})
		select {
		case n := <-w.notes:
			if n["method"] == "notifications/tools/list_changed" {
				return
			}
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			w.t.Fatal("the session's stream tells nothing")
		}
	}
}

func (w *wire) updated() string {
	deadline := time.After(10 * time.Second)
	for {
		select {
		case n := <-w.notes:
			if n["method"] == "notifications/resources/updated" {
				return n["params"].(map[string]any)["uri"].(string)
			}
		case <-deadline:
			return "nothing"
		}
	}
}

// post sends a message and returns the messages of the answer, of either form.
func post(t *testing.T, url, session, msg string, header map[string]string) (resp *http.Response, answers []map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(msg))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	if resp, err = http.DefaultClient.Do(req); err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		events(resp.Body, func(m map[string]any) { answers = append(answers, m) })
		return resp, answers
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > 0 {
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatalf("%s: %s", err, b)
		}
		answers = append(answers, m)
	}
	return resp, answers
}

func events(r io.Reader, fn func(map[string]any)) {
	for rd := sse.NewReader(r, sse.ReaderOptions{}); ; {
		e, err := rd.Next()
		if err != nil {
			return
		}
		var m map[string]any
		if json.Unmarshal(e.Data, &m) == nil {
			fn(m)
		}
	}
}

// speakHTTP is a client with a session; its notifications come on the session's stream.
func speakHTTP(t *testing.T, k *kernel.Kernel) speaker {
	url, session := mcpServer(t, k), ""
	w := &wire{t: t, k: k, notes: make(chan map[string]any, 64)}
	w.send = func(msg string, answered bool) map[string]any {
		resp, answers := post(t, url, session, msg, nil)
		if session == "" {
			session = resp.Header.Get("Mcp-Session-Id")
		}
		if !answered {
			return nil
		}
		return answers[len(answers)-1]
	}
	w.hello()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Mcp-Session-Id", session)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		resp, err := http.DefaultClient.Do(req.WithContext(ctx)) // headers come with the first event
		if err != nil {
			return
		}
		defer resp.Body.Close()
		events(resp.Body, func(m map[string]any) { w.notes <- m })
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return w
}

// sessionless speaks the era without sessions; what it listens to comes as the answer
// of a request that does not end.
type sessionless struct {
	*wire
	url string
}

func speakSSE(t *testing.T, k *kernel.Kernel) speaker {
	s := &sessionless{url: mcpServer(t, k), wire: &wire{t: t, notes: make(chan map[string]any, 64),
		modern: `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`}}
	s.send = func(msg string, _ bool) map[string]any {
		_, answers := post(t, s.url, "", msg, modernHeader(msg))
		return answers[len(answers)-1]
	}
	return s
}

func modernHeader(msg string) map[string]string {
	var m struct {
		Method string
		Params struct{ Name, URI string }
	}
	_ = json.Unmarshal([]byte(msg), &m)
	h := map[string]string{"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": m.Method}
	if name := m.Params.Name + m.Params.URI; name != "" {
		h["Mcp-Name"] = name
	}
	return h
}

func (s *sessionless) subscribe(uri string) {
	msg := fmt.Sprintf(`{"jsonrpc":"2.0","id":"listen","method":"subscriptions/listen","params":{"notifications":{"resourceSubscriptions":[%q]},%s}}`, uri, s.modern)
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, strings.NewReader(msg))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	for k, v := range modernHeader(msg) {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { events(resp.Body, func(m map[string]any) { s.notes <- m }) })
	s.t.Cleanup(func() { cancel(); resp.Body.Close(); wg.Wait() })
}

// speakStdio is a client of the bridge that `agentctl mcp` is.
func speakStdio(t *testing.T, k *kernel.Kernel) speaker {
	url := mcpServer(t, k)
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = stdio.Serve(context.Background(), inR, outW, stdio.Options{URL: url})
		outW.Close()
	})
	w := &wire{t: t, k: k, notes: make(chan map[string]any, 64)}
	answers := make(chan map[string]any, 64)
	wg.Go(func() {
		for sc := bufio.NewScanner(outR); sc.Scan(); {
			var m map[string]any
			if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
				t.Errorf("%v: %s", err, sc.Text())
			} else if m["id"] != nil {
				answers <- m
			} else {
				w.notes <- m
			}
		}
	})
	t.Cleanup(func() { inW.Close(); wg.Wait() })
	w.send = func(msg string, answered bool) map[string]any {
		if _, err := io.WriteString(inW, msg+"\n"); err != nil {
			t.Fatal(err)
		}
		if !answered {
			return nil
		}
		return <-answers
	}
	w.hello()
	return w
}
