package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

const (
	nodeA = "01j8zz3f0v4q7k2m9x5c1b6ad8"
	nodeB = "01j8zz3f0v4q7k2m9x5c1b6ad9"
)

// env is a kernel behind a handler behind a real HTTP server on loopback.
type env struct {
	t      testing.TB
	kernel *kernel.Kernel
	h      *Handler
	srv    *httptest.Server
	url    string

	stop context.CancelFunc // ends Run

	deaf bool // clients open no GET stream
	conn func(context.Context, net.Conn) context.Context

	mu    sync.Mutex
	audit []kernel.Record
	gone  map[string]bool // tokens that have ended
}

type scopes []string

func (s scopes) Has(v string) bool {
	for _, x := range s {
		if x == v {
			return true
		}
	}
	return false
}

// newEnv starts the whole. A token is "tenant/subject" or "tenant/subject/scope,scope";
// without scopes it may list and call.
func newEnv(t testing.TB, opt Options, more ...func(*env)) *env {
	t.Helper()
	e := &env{t: t, gone: make(map[string]bool)}
	for _, m := range more {
		m(e)
	}
	missing := func(*kernel.Caller, string) error { return kernel.NodeDenied() }
	e.kernel = kernel.New(kernel.Options{ExplainMissing: missing, Audit: func(r kernel.Record) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.audit = append(e.audit, r)
	}})
	opt.Kernel = e.kernel
	if opt.Authenticate == nil {
		opt.Authenticate = e.authenticate
	}
	if opt.Version == "" {
		opt.Version = "1.2.3"
	}
	e.h = New(opt)
	ctx, cancel := context.WithCancel(context.Background())
	runCtx, stop := context.WithCancel(ctx)
	e.stop = stop
	var wg sync.WaitGroup
	wg.Go(func() { _ = e.kernel.Run(ctx) })
	wg.Go(func() { _ = e.h.Run(runCtx) })
	e.serve()
	t.Cleanup(func() {
		cancel()
		e.srv.CloseClientConnections()
		e.srv.Close()
		wg.Wait()
	})
	<-e.h.Started()
	return e
}

func (e *env) serve() {
	e.srv = httptest.NewUnstartedServer(e.h)
	if e.conn != nil {
		e.srv.Config.ConnContext = e.conn
	}
	e.srv.Start()
	e.url = e.srv.URL + "/mcp"
}

func (e *env) authenticate(r *http.Request) (*kernel.Caller, error) {
	tok, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		tok = "default/anybody"
	}
	if err := e.active(tok); err != nil {
		return nil, err
	}
	part := strings.Split(tok, "/")
	sc := scopes{manifest.ScopeCallReadOnly, manifest.ScopeToolsList}
	if len(part) == 3 {
		sc = strings.Split(part[2], ",")
	}
	return &kernel.Caller{Tenant: part[0], Actor: part[1], Transport: "mcp", Scopes: sc, Active: func() error { return e.active(tok) }}, nil
}

func (e *env) active(tok string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone[tok] {
		return manifest.E(manifest.SafetyDenied, "the token was revoked")
	}
	return nil
}

func (e *env) revoke(tok string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone[tok] = true
}

func (e *env) records() []kernel.Record {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]kernel.Record(nil), e.audit...)
}

// bearer adds a token to every request of a client.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.next.RoundTrip(r)
}

// client connects the SDK's own client. version picks the era; empty means the newest.
func (e *env) client(token, version string, opt *sdk.ClientOptions) *sdk.ClientSession {
	e.t.Helper()
	return e.clientAt(e.url, token, version, opt)
}

func (e *env) clientAt(url, token, version string, opt *sdk.ClientOptions) *sdk.ClientSession {
	e.t.Helper()
	c := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, opt)
	tr := &sdk.StreamableClientTransport{Endpoint: url, MaxRetries: -1, DisableStandaloneSSE: e.deaf,
		HTTPClient: &http.Client{Transport: bearer{token, e.srv.Client().Transport}}}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cs, err := c.Connect(ctx, tr, &sdk.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		e.t.Fatalf("connect as %s: %v", version, err)
	}
	e.t.Cleanup(func() { _ = cs.Close() })
	return cs
}

const (
	legacyEra = "2025-11-25"
	modernEra = "2026-07-28"
)

// eras runs a test with a client of each era.
func eras(t *testing.T, f func(t *testing.T, version string)) {
	for _, v := range []string{legacyEra, modernEra} {
		t.Run(v, func(t *testing.T) {
			t.Parallel()
			f(t, v)
		})
	}
}

// do sends one raw request and reads its answer.
func (e *env) do(method string, header map[string]string, body string) *http.Response {
	e.t.Helper()
	req, err := http.NewRequest(method, e.url, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	if body == "" {
		req.Body = nil
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	for k, v := range header {
		if k == "Host" {
			req.Host = v
			continue
		}
		if v == "" {
			req.Header.Del(k)
			continue
		}
		req.Header.Set(k, v)
	}
	res, err := e.srv.Client().Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	got, err := io.ReadAll(res.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	_ = res.Body.Close()
	res.Body = io.NopCloser(bytes.NewReader(got))
	return res
}

func readAll(t testing.TB, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

const modernMeta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}`

// modern sends a raw request of the modern era; params are the members beside _meta.
func (e *env) modern(method, name, params string, header map[string]string) (*http.Response, map[string]any) {
	e.t.Helper()
	h := map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": method}
	if name != "" {
		h["Mcp-Name"] = name
	}
	for k, v := range header {
		h[k] = v
	}
	if params != "" {
		params = "," + params
	}
	res := e.do("POST", h, fmt.Sprintf(`{"jsonrpc":"2.0","id":7,"method":%q,"params":{%s%s}}`, method, modernMeta, params))
	var m map[string]any
	body := readAll(e.t, res)
	if i := strings.LastIndex(body, "data: "); i >= 0 {
		body = body[i+6:]
	}
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		e.t.Fatalf("%s: status %d, body %q: %v", method, res.StatusCode, body, err)
	}
	return res, m
}

// initialize opens a raw legacy session and returns its id.
func (e *env) initialize(token string) string {
	e.t.Helper()
	h := map[string]string{}
	if token != "" {
		h["Authorization"] = "Bearer " + token
	}
	res := e.do("POST", h, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}`)
	if body := readAll(e.t, res); res.StatusCode != 200 {
		e.t.Fatalf("initialize: %d %s", res.StatusCode, body)
	}
	id := res.Header.Get("Mcp-Session-Id")
	if id == "" {
		e.t.Fatal("initialize gave no session id")
	}
	h["Mcp-Session-Id"] = id
	h["Mcp-Protocol-Version"] = legacyEra
	if res := e.do("POST", h, `{"jsonrpc":"2.0","method":"notifications/initialized"}`); res.StatusCode != 202 {
		e.t.Fatalf("initialized: %d", res.StatusCode)
	}
	return id
}

// board is a device plugin in memory: echo, snapshot and a stream.
type board struct {
	m        *kernel.Manifest
	node     string
	online   func() error
	streams  chan *frames  // each opened stream
	changed  chan struct{} // its resource changes; taken by a watch
	watching atomic.Int32  // watches of its resource
}

func newBoard(tenant, node string) *board {
	b := &board{node: node, streams: make(chan *frames, 8), changed: make(chan struct{}, 16)}
	object := json.RawMessage(`{"type":"object"}`)
	tool := func(name, title string, streams bool) *kernel.Tool {
		return &kernel.Tool{Name: strings.Replace(name, "NODE", node, 1), NodeID: node, ToolInfo: &kernel.ToolInfo{
			Title: title, Description: title + ".", InputSchema: object, OutputSchema: object,
			SafetyClass: manifest.ReadOnly, Scope: manifest.ScopeCallReadOnly, Streams: streams,
			CheckArguments: func(args []byte) ([]byte, error) {
				if bytes.Contains(args, []byte("bad")) {
					return nil, manifest.E(manifest.ManifestInvalid, "the arguments do not fit the tool's schema")
				}
				return args, nil
			},
		}}
	}
	b.m = &kernel.Manifest{
		Name: "device:" + node, Version: "1.0.0", Tenant: tenant,
		Tools: []*kernel.Tool{
			tool("sysecho.NODE.echo.invoke", "Echo", false),
			tool("sys.NODE.metrics.snapshot", "Snapshot", false),
			tool("sys.NODE.metrics.subscribe", "Stream", true),
		},
		Resources: []*kernel.Resource{{
			URI: "mcp://devices/" + node + "/metrics.json", Name: "metrics", MIME: "application/json",
			Scope: manifest.ScopeCallReadOnly, NodeID: node, Watchable: true,
		}},
	}
	return b
}

func (b *board) Manifest() *kernel.Manifest { return b.m }

func (b *board) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	if b.online != nil {
		if err := b.online(); err != nil {
			return nil, err
		}
	}
	if r.Target().Streams {
		f := &frames{notify: func() {}, closed: make(chan struct{}), read: make(chan struct{}, 1)}
		b.streams <- f
		return &kernel.Result{Stream: f}, nil
	}
	return &kernel.Result{Structured: json.RawMessage(fmt.Sprintf(`{"node_id":%q,"arguments":%s,"trace":%q,"traced":%t}`, b.node, r.Arguments, r.TraceID, r.Traced))}, nil
}

func (b *board) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	if b.online != nil {
		if err := b.online(); err != nil {
			return nil, err
		}
	}
	return []byte(`{"cpu_pct":1.5}`), nil
}

func (b *board) Watch(ctx context.Context, _ string, changed func()) error {
	b.watching.Add(1)
	defer b.watching.Add(-1)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-b.changed:
			changed()
		}
	}
}

// frames is a kernel stream that a test fills by hand.
type frames struct {
	closed chan struct{}
	once   sync.Once
	read   chan struct{} // unless nil, holds one value when there is a reader

	mu     sync.Mutex
	notify func()
	list   []string
	err    error
}

func (f *frames) send(data ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, data...)
	f.notify()
}

func (f *frames) end(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	f.notify()
}

func (f *frames) Notify(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notify = fn
	fn()
	select {
	case f.read <- struct{}{}:
	default:
	}
}

func (f *frames) Next() (*manifest.Frame, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) == 0 {
		return nil, false
	}
	data := f.list[0]
	f.list = f.list[1:]
	return &manifest.Frame{Data: []byte(data)}, true
}

func (f *frames) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *frames) Close() { f.once.Do(func() { close(f.closed) }) }

func (e *env) load(p kernel.Plugin) {
	e.t.Helper()
	if err := e.kernel.Load(p, true); err != nil {
		e.t.Fatal(err)
	}
}

// wait takes a value from a channel or fails.
func wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(5 * time.Second):
		t.Fatalf("no %s within 5 s", what)
		panic("unreachable")
	}
}

// until polls a condition that another goroutine makes true.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

var errTest = errors.New("test")
