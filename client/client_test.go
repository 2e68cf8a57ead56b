package client_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/client"
	"agentctl/manifest"
	"agentctl/transport/pin"
	"agentctl/transport/sse"
)

// serve returns a client of a server with this handler.
func serve(t *testing.T, h http.HandlerFunc) *client.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return newClient(t, client.Options{URL: srv.URL})
}

func newClient(t *testing.T, o client.Options) *client.Client {
	t.Helper()
	c, err := client.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// answer is a handler that gives one answer.
func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func TestNew(t *testing.T) {
	tests := []struct {
		url, token string
		want       error
	}{
		{"https://relay.example:8460/", "t", nil},
		{"http://relay.example", "", nil},
		{"http://127.0.0.1:8460", "t", nil},
		{"http://[::1]:8460", "t", nil},
		{"http://localhost", "t", nil},
		{"http://relay.example", "t", client.ErrCleartext},
		{"relay.example", "", client.ErrURL},
		{"ftp://relay.example", "", client.ErrURL},
		{"https://", "", client.ErrURL},
	}
	for _, tt := range tests {
		c, err := client.New(client.Options{URL: tt.url, Token: tt.token})
		if !errors.Is(err, tt.want) || (tt.want == nil && err != nil) {
			t.Errorf("%s: got %v, want %v", tt.url, err, tt.want)
		}
		if c != nil && c.URL() != strings.TrimSuffix(tt.url, "/") {
			t.Errorf("%s: URL is %s", tt.url, c.URL())
		}
	}
}

func TestErrorAnswers(t *testing.T) {
	tests := []struct {
		name   string
		status int
		header string // Retry-After
		body   string
		want   client.Error
	}{
		{"envelope", 403, "", `{"error":{"code":"E_SAFETY_DENIED","message":"no","trace_id":"ab"}}`,
			client.Error{Status: 403, Code: manifest.SafetyDenied, Message: "no", TraceID: "ab", HadToken: true}},
		{"retry after, header", 429, "7", `{"error":{"code":"E_RATE_LIMITED","message":"slow"}}`,
			client.Error{Status: 429, Code: "E_RATE_LIMITED", Message: "slow", RetryAfter: 7 * time.Second, HadToken: true}},
		{"retry after, body", 429, "", `{"error":{"code":"E_RATE_LIMITED","message":"slow","retry_after_ms":250}}`,
			client.Error{Status: 429, Code: "E_RATE_LIMITED", Message: "slow", RetryAfter: 250 * time.Millisecond, HadToken: true}},
		{"no envelope", 502, "99999999", "<html>", client.Error{Status: 502, RetryAfter: time.Hour, HadToken: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if got := r.Header.Get("Authorization"); got != "Bearer s3cret" {
					t.Errorf("Authorization is %q", got)
				}
				w.Header().Set("Retry-After", tt.header)
				answer(tt.status, tt.body)(w, r)
			}))
			defer srv.Close()
			_, err := newClient(t, client.Options{URL: srv.URL, Token: "s3cret"}).Call(t.Context(), "x.echo", nil)
			var got *client.Error
			if !errors.As(err, &got) || *got != tt.want {
				t.Errorf("got %#v, want %#v", err, tt.want)
			}
		})
	}
}

// A tool of the relay itself may refuse in a result.
func TestRefusalInResult(t *testing.T) {
	c := serve(t, answer(200, `{"error":{"code":"E_BAD_REQUEST","reason":"transition","message":"it is closed"}}`))
	_, err := c.ChangeTicket(t.Context(), "transition", nil)
	var refusal *client.Error
	if !errors.As(err, &refusal) || refusal.Reason != "transition" {
		t.Errorf("got %v", err)
	}
}

func TestTransportErrors(t *testing.T) {
	secure := httptest.NewUnstartedServer(answer(200, "{}"))
	secure.Config.ErrorLog = log.New(io.Discard, "", 0) // it reports the failed handshakes
	secure.StartTLS()
	t.Cleanup(secure.Close)
	plain := httptest.NewServer(answer(200, "{}"))
	t.Cleanup(plain.Close)
	roots := x509.NewCertPool()
	roots.AddCert(secure.Certificate())
	tests := []struct {
		name string
		o    client.Options
		want client.Kind
	}{
		{"nobody listens", client.Options{URL: "http://127.0.0.1:1"}, client.Unreachable},
		{"unknown authority", client.Options{URL: secure.URL}, client.UntrustedCertificate},
		{"another name", client.Options{URL: secure.URL, TLS: &tls.Config{RootCAs: roots, ServerName: "relay.other"}}, client.WrongCertificateName},
		{"http to TLS", client.Options{URL: "http" + strings.TrimPrefix(secure.URL, "https")}, client.NeedsTLS},
		{"https to plain", client.Options{URL: "https" + strings.TrimPrefix(plain.URL, "http")}, client.NotTLS},
	}
	for _, tt := range tests {
		_, err := newClient(t, tt.o).Nodes(t.Context())
		var got *client.TransportError
		if !errors.As(err, &got) || got.Kind != tt.want || got.URL != tt.o.URL {
			t.Errorf("%s: got %#v, want kind %d", tt.name, err, tt.want)
		}
	}
}

func TestContextEnds(t *testing.T) {
	release := make(chan struct{})
	c := serve(t, func(http.ResponseWriter, *http.Request) { <-release })
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); err != context.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
}

func TestReady(t *testing.T) {
	if err := serve(t, answer(200, "ok\n")).Ready(t.Context()); err != nil {
		t.Error(err)
	}
	var e *client.Error
	if err := serve(t, answer(503, "starting\n")).Ready(t.Context()); !errors.As(err, &e) || e.Status != 503 {
		t.Errorf("got %v", err)
	}
}

const (
	attic = `{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","name":"attic","capabilities":[{"cap_id":"echo","kind":"system.echo",
		"schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0","verbs":["invoke"],"safety_class":"read_only",
		"constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}}]}`
	cellar = `{"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xz","name":"cellar"}`
)

// pages serves the two nodes on two pages.
func pages(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("after") == "" {
		_, _ = io.WriteString(w, `{"nodes":[`+attic+`],"next":"1"}`)
		return
	}
	_, _ = io.WriteString(w, `{"nodes":[`+cellar+`]}`)
}

func TestNode(t *testing.T) {
	c := serve(t, pages)
	tests := []struct {
		ref, name string
		reason    error
	}{
		{"attic", "attic", nil},
		{"01hzx9k3m4p7q8r9s0t1v2w3xz", "cellar", nil},
		{"01hzx9k3m4p7q8r9s0t1v2w3x", "", client.ErrAmbiguous},
		{"att", "", client.ErrNotFound},
	}
	for _, tt := range tests {
		n, err := c.Node(t.Context(), tt.ref)
		var ref *client.RefError
		switch {
		case tt.reason == nil && (err != nil || n.Name != tt.name):
			t.Errorf("%s: got %v, %v", tt.ref, n, err)
		case tt.reason != nil && (!errors.As(err, &ref) || ref.Thing != "node" || !errors.Is(err, tt.reason)):
			t.Errorf("%s: got %v, want %v", tt.ref, err, tt.reason)
		}
	}
}

func TestResolveTool(t *testing.T) {
	c := serve(t, pages)
	const echo = "sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke"
	for _, s := range []string{"attic:echo", "attic:invoke", echo} {
		if got, err := c.ResolveTool(t.Context(), s); err != nil || got != echo {
			t.Errorf("%s: got %s, %v", s, got, err)
		}
	}
	// Kinds that show the machine go by their names, so that query stays the history's.
	const id = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	caps, err := json.Marshal([]manifest.Capability{manifest.Inspection(manifest.KindJournal), manifest.Inspection(manifest.KindServices), manifest.Inspection(manifest.KindDisks), manifest.History()})
	if err != nil {
		t.Fatal(err)
	}
	inspected := serve(t, answer(200, `{"nodes":[{"node_id":"`+id+`","name":"attic","capabilities":`+string(caps)+`}]}`))
	for word, want := range map[string]string{"journal": "sysjrnl." + id + ".journal.query", "journal.query": "sysjrnl." + id + ".journal.query",
		"services": "syssvc." + id + ".services.list", "query": "syshist." + id + ".history.query", "history": "syshist." + id + ".history.query"} {
		if got, err := inspected.ResolveTool(t.Context(), "attic:"+word); err != nil || got != want {
			t.Errorf("%s: got %s, %v, want %s", word, got, err, want)
		}
	}
	if _, err := inspected.ResolveTool(t.Context(), "attic:list"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("attic:list: %v", err)
	}
	if _, err := c.ResolveTool(t.Context(), "cellar:echo"); !errors.Is(err, client.ErrNeverLinked) {
		t.Errorf("got %v", err)
	}
	if _, err := c.ResolveTool(t.Context(), "attic:subscribe"); !errors.Is(err, client.ErrNotFound) || !strings.Contains(err.Error(), "echo.invoke") {
		t.Errorf("got %v", err)
	}
}

func TestTicketRefs(t *testing.T) {
	c := serve(t, answer(200, `{"tickets":[{"id":"01JD8Z3K000000000000000001"},{"id":"01JD8Z3K000000000000000002"}]}`))
	for ref, want := range map[string]error{"01JD": client.ErrAmbiguous, "9999": client.ErrNotFound, "01": client.ErrMalformed} {
		_, err := c.Ticket(t.Context(), ref)
		var e *client.RefError
		if !errors.As(err, &e) || e.Thing != "ticket" || !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", ref, err, want)
		}
	}
}

func TestPlugins(t *testing.T) {
	calls := 0
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var call struct {
			Tool      string
			Arguments struct{ After string }
		}
		_ = json.NewDecoder(r.Body).Decode(&call)
		if calls++; call.Arguments.After == "" {
			_, _ = io.WriteString(w, `{"plugins":[{"name":"a","version":"1.0.0"}],"next":"a"}`)
			return
		}
		_, _ = io.WriteString(w, `{"plugins":[{"name":"b"}]}`)
	})
	list, err := c.Plugins(t.Context())
	if err != nil || len(list) != 2 || list[1].Name != "b" || calls != 2 {
		t.Errorf("got %v, %v after %d calls", list, err, calls)
	}
	if err := c.LoadPlugin(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// metricsTool is the stream whose frames follow_test.go makes.
const metricsTool = "sys." + node + ".metrics.subscribe"

// frames is a metric stream with a frame for each number, ended by end.
func frames(end string, values ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, v := range values {
			_, _ = io.WriteString(w, "event: ping\ndata: {}\n\nevent: metric\ndata: "+v+"\n\n")
		}
		_, _ = io.WriteString(w, end)
	}
}

func TestMetrics(t *testing.T) {
	const normal = "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n"
	tests := []struct {
		name   string
		h      http.HandlerFunc
		frames int
		check  func(error) bool
	}{
		{"normal close", frames(normal, at(1, 2)...), 2, func(err error) bool { return err == nil }},
		{"offline", frames("event: close\ndata: {\"code\":4503,\"reason\":\"device_offline\"}\n\n", at(1)...), 1, func(err error) bool {
			var e *client.StreamClosedError
			return errors.As(err, &e) && e.Code == sse.DeviceOffline
		}},
		{"broken", frames("", at(1)...), 1, func(err error) bool {
			var e *client.TransportError
			return errors.As(err, &e) && e.Kind == client.Broken
		}},
		{"not JSON", frames(normal, "{"), 0, isProtocolError},
		{"no object", frames(normal, "1"), 0, isProtocolError},
		{"empty object", frames(normal, "{}"), 0, isProtocolError},
		{"extra key", frames(normal, strings.Replace(at(1)[0], "{", `{"x":1,`, 1)), 0, isProtocolError},
		{"impossible figure", frames(normal, strings.Replace(at(1)[0], `"cpu_pct":1`, `"cpu_pct":400`, 1)), 0, isProtocolError},
		{"foreign node", frames(normal, strings.Replace(at(1)[0], node, strings.Repeat("0", 26), 1)), 0, isProtocolError},
		{"two data lines", frames(normal, strings.Replace(at(1)[0], ",", ",\ndata: ", 1)), 0, isProtocolError},
		{"a bad one after a good one", frames(normal, at(1)[0], "{}"), 1, isProtocolError},
		{"ping with data", frames("event: ping\ndata: {\"x\":1}\n\n"+normal, at(1)...), 1, isProtocolError},
		{"close with a third key", frames("event: close\ndata: {\"code\":1000,\"reason\":\"normal\",\"x\":1}\n\n"), 0, isProtocolError},
		{"close with two codes", frames("event: close\ndata: {\"code\":4503,\"code\":1000,\"reason\":\"normal\"}\n\n"), 0, isProtocolError},
		{"close without a code", frames("event: close\ndata: {}\n\n"), 0, isProtocolError},
		{"close with an unknown code", frames("event: close\ndata: {\"code\":4999,\"reason\":\"\\u001b[31m\"}\n\n"), 0, isProtocolError},
		{"close with another code's reason", frames("event: close\ndata: {\"code\":1000,\"reason\":\"device_offline\"}\n\n"), 0, isProtocolError},
		{"unknown event", frames("event: other\ndata: 1\n\n", at(1)...), 1, isProtocolError},
		{"no stream", answer(200, "hello"), 0, isProtocolError},
	}
	for _, tt := range tests {
		n := 0
		err := serve(t, tt.h).Metrics(t.Context(), metricsTool, nil, func([]byte) error { n++; return nil })
		if n != tt.frames || !tt.check(err) {
			t.Errorf("%s: %d frames, %v", tt.name, n, err)
		}
	}
	stop := errors.New("stop")
	for _, want := range []error{client.ErrStop, stop} {
		err := serve(t, frames(normal, at(1, 2)...)).Metrics(t.Context(), metricsTool, nil, func([]byte) error { return want })
		if (want == stop && err != stop) || (want == client.ErrStop && err != nil) {
			t.Errorf("%v became %v", want, err)
		}
	}
}

func isProtocolError(err error) bool {
	var e *client.ProtocolError
	return errors.As(err, &e)
}

// TestNewToken: a 401 is answered with one newer token, and a stream whose token expired is
// followed with the next one.
func TestNewToken(t *testing.T) {
	var got []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, r.Header.Get("Authorization")+" "+string(body[:min(len(body), 8)]))
		if r.Header.Get("Authorization") != "Bearer t3" {
			answer(401, `{"error":{"code":"E_SAFETY_DENIED","message":"expired"}}`)(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "event: metric\ndata: "+at(1)[0]+"\n\nevent: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n")
	}))
	defer srv.Close()
	tokens, failure := []string{"t1", "t2", "t2", "t3"}, error(nil)
	newToken := func(_ context.Context, refused string) (string, error) {
		next := tokens[0]
		if len(tokens) > 1 {
			tokens = tokens[1:]
		}
		return next, failure
	}
	c := newClient(t, client.Options{URL: srv.URL, NewToken: newToken})
	frames := 0
	frame := func([]byte) error { frames++; return nil }
	var refused *client.Error
	if err := c.Metrics(t.Context(), metricsTool, nil, frame); !errors.As(err, &refused) || refused.Status != 401 || len(got) != 2 {
		t.Errorf("both refused: %v, %q", err, got)
	}
	got = nil
	// The relay closes normally when a token expires: the end is not that of the reader.
	var closed *client.StreamClosedError
	if err := c.Metrics(t.Context(), metricsTool, nil, frame); !errors.As(err, &closed) || closed.Code != sse.Normal || frames != 1 {
		t.Errorf("normal close: %v, %d frames", err, frames)
	}
	if want := []string{`Bearer t2 {"tool":`, `Bearer t3 {"tool":`}; !slices.Equal(got, want) {
		t.Errorf("sent %q, want %q", got, want)
	}
	if err := newClient(t, client.Options{URL: srv.URL, Token: "t3"}).Metrics(t.Context(), metricsTool, nil, frame); err != nil {
		t.Errorf("with one token the normal end is no error: %v", err)
	}
	got, failure = nil, errors.New("no")
	if err := c.Metrics(t.Context(), metricsTool, nil, frame); !errors.Is(err, failure) || len(got) > 0 {
		t.Errorf("without a token: %v, %q", err, got)
	}
	if _, err := client.New(client.Options{URL: "http://relay.example", NewToken: newToken}); !errors.Is(err, client.ErrCleartext) {
		t.Errorf("in the clear: %v", err)
	}
}

// TestPin: a client with a pin sends nothing to another server, and does not connect again and
// again.
func TestPin(t *testing.T) {
	requests := 0
	srv := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests++ }))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer srv.Close()
	cfg, err := pin.ClientConfig(strings.Repeat("ab", 32))
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, client.Options{URL: srv.URL, TLS: cfg, NewToken: func(context.Context, string) (string, error) { return "s3cret", nil }})
	err = c.Ready(t.Context())
	var transport *client.TransportError
	var mismatch *pin.MismatchError
	if !errors.As(err, &transport) || transport.Kind != client.WrongAuthority || !errors.As(err, &mismatch) || requests != 0 {
		t.Errorf("got %v, %d requests", err, requests)
	}
}
