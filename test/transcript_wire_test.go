package test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
	"agentctl/relay/mcp/stdio"
	"agentctl/transport/sse"
)

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

func (w *wire) initialize() {
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
	if !ok { // which MCP reports as a protocol error
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
	// Notifications sent before the session's stream is open are lost: wait for one first.
	for deadline := time.Now().Add(patience); ; {
		w.k.NotifyChange("default", kernel.Change{Tools: true})
		select {
		case n := <-w.notes:
			if n["method"] == "notifications/tools/list_changed" {
				return
			}
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			w.t.Fatal("the session's stream delivers nothing")
		}
	}
}

func (w *wire) updated() string {
	deadline := time.After(patience)
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
	w.initialize()
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
	w.initialize()
	return w
}
