package enroll

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
)

// fakeRelay answers as the relay's endpoints do: one code, one node.
type fakeRelay struct {
	code string

	mu       sync.Mutex
	nonce    string // that is good; "" none
	nonces   int    // given out
	key      ed25519.PublicKey
	nodeID   string
	gen      int
	request  string // request id of the last refresh
	enrolls  []enrollment.EnrollRequest
	refusals []string // reasons to answer first, in this order
	asAgent  bool     // the code is of an invite for agents
	onEnroll func()   // called before an enroll is answered; may be nil
}

func newFakeRelay(t *testing.T) (*fakeRelay, *httptest.Server) {
	t.Helper()
	f := &fakeRelay{code: enrollment.NewCode(), nodeID: manifest.NewNodeID()}
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	return f, srv
}

func (f *fakeRelay) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	refuse := func(status int, reason string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(`{"error":{"code":"E_SAFETY_DENIED","message":"refused","reason":"` + reason + `"}}`))
	}
	if r.Method == http.MethodGet {
		f.nonces++
		f.nonce = strings.Repeat("n", f.nonces)
		answer(enrollment.Nonce{Nonce: f.nonce})
		return
	}
	if len(f.refusals) > 0 {
		reason := f.refusals[0]
		f.refusals = f.refusals[1:]
		refuse(http.StatusUnauthorized, reason)
		return
	}
	switch r.URL.Path {
	case enrollment.EnrollPath:
		var q enrollment.EnrollRequest
		_ = json.NewDecoder(r.Body).Decode(&q)
		f.enrolls = append(f.enrolls, q)
		key, err := enrollment.ParseKey(q.PublicKey)
		switch {
		case q.Nonce != f.nonce:
			refuse(http.StatusUnauthorized, enrollment.ReasonNonce)
		case err != nil || !enrollment.Verify(key, enrollment.EnrollMessage(q.Nonce, q.Code, q.InstanceID), q.Proof):
			refuse(http.StatusUnauthorized, enrollment.ReasonProof)
		case q.Code != f.code:
			refuse(http.StatusUnauthorized, enrollment.ReasonCodeUnknown)
		case f.key != nil && !f.key.Equal(key):
			refuse(http.StatusUnauthorized, enrollment.ReasonUsed)
		default:
			f.key, f.gen = key, 1
			if f.onEnroll != nil {
				f.onEnroll()
			}
			if f.asAgent {
				answer(enrollment.EnrollAnswer{AgentID: "ann", TenantID: "default", Token: "a.b.c", Gen: 1, ExpiresAtMS: 1})
				return
			}
			answer(enrollment.EnrollAnswer{NodeID: f.nodeID, TenantID: "default", Name: "attic", DeviceToken: "a.b.c", Gen: 1, ExpiresAtMS: 1})
		}
	case enrollment.TokenPath:
		var q enrollment.TokenRequest
		_ = json.NewDecoder(r.Body).Decode(&q)
		switch {
		case !enrollment.Verify(f.key, enrollment.TokenMessage(q.Nonce, q.NodeID, q.Gen, q.RequestID), q.Proof):
			refuse(http.StatusUnauthorized, enrollment.ReasonProof)
		case q.Gen == f.gen:
			f.gen++
			f.request = q.RequestID
			fallthrough
		case q.Gen == f.gen-1 && q.RequestID == f.request:
			answer(enrollment.TokenAnswer{Token: "d.e.f", Gen: f.gen, ExpiresAtMS: 2})
		default:
			refuse(http.StatusUnauthorized, enrollment.ReasonGenerationUsed)
		}
	default:
		http.NotFound(w, r)
	}
}

func newKey() (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(nil)
	return key, err
}

func TestEnrollAndRefresh(t *testing.T) {
	f, srv := newFakeRelay(t)
	c := &Client{URL: srv.URL}
	key, _ := newKey()
	o := EnrollOptions{Code: f.code, InstanceID: NewInstanceID(), Name: "attic", Version: "v1", Key: func() (ed25519.PrivateKey, error) { return key, nil }}
	a, err := c.Enroll(t.Context(), o)
	if err != nil || a.NodeID != f.nodeID || a.Gen != 1 {
		t.Fatalf("Enroll: %+v, %v", a, err)
	}
	if q := f.enrolls[0]; q.Name != "attic" || q.AgentVersion != "v1" || q.InstanceID != o.InstanceID {
		t.Errorf("the request was %+v", q)
	}
	if a, err = c.Enroll(t.Context(), o); err != nil || a.NodeID != f.nodeID {
		t.Errorf("a repeat: %+v, %v", a, err)
	}
	r := RefreshOptions{NodeID: a.NodeID, Gen: 1, RequestID: "r1", Key: key}
	for range 2 { // the second one repeats a lost answer
		if b, err := c.Refresh(t.Context(), r); err != nil || b.Gen != 2 || b.Token != "d.e.f" {
			t.Errorf("Refresh: %+v, %v", b, err)
		}
	}
	// The session is that of the moment in which the request is made: the link may have come back
	// since the refresh began.
	f.mu.Lock()
	nonces := f.nonces
	f.mu.Unlock()
	r.SessionID = func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.nonces == nonces {
			t.Error("the session is asked for before the nonce has come")
		}
		return "s1"
	}
	if _, err := c.Refresh(t.Context(), r); err != nil {
		t.Error(err)
	}
	r.RequestID = "r2"
	var e *Error
	if _, err := c.Refresh(t.Context(), r); !errors.As(err, &e) || e.Kind != Refused || e.Reason != enrollment.ReasonGenerationUsed {
		t.Errorf("an old generation: %v", err)
	}
}

// TestNonceIsReplaced: a relay that was restarted between the two requests does not know the
// nonce. A second refusal is an error.
func TestNonceIsReplaced(t *testing.T) {
	f, srv := newFakeRelay(t)
	keys := 0
	o := EnrollOptions{Code: f.code, InstanceID: NewInstanceID(), Key: func() (ed25519.PrivateKey, error) { keys++; return newKey() }}
	c := &Client{URL: srv.URL}
	f.refusals = []string{enrollment.ReasonNonce}
	if _, err := c.Enroll(t.Context(), o); err != nil || f.nonces != 2 || keys != 1 {
		t.Errorf("%v after %d nonces and %d keys, want success after 2 and 1", err, f.nonces, keys)
	}
	f.refusals = []string{enrollment.ReasonNonce, enrollment.ReasonNonce}
	var e *Error
	if _, err := c.Enroll(t.Context(), o); !errors.As(err, &e) || e.Reason != enrollment.ReasonNonce {
		t.Errorf("two refusals: %v", err)
	}
}

// TestKeyIsMadeLate: no key is made while no relay answers, and what Key returns as an error
// ends the exchange before the code is sent.
func TestKeyIsMadeLate(t *testing.T) {
	f, srv := newFakeRelay(t)
	o := EnrollOptions{Code: f.code, Key: func() (ed25519.PrivateKey, error) { t.Error("a key was made"); return nil, nil }}
	if _, err := (&Client{URL: unusedAddr(t)}).Enroll(t.Context(), o); err == nil {
		t.Error("nobody listens, and there was no error")
	}
	full := errors.New("disk full")
	o.Key = func() (ed25519.PrivateKey, error) { return nil, full }
	if _, err := (&Client{URL: srv.URL}).Enroll(t.Context(), o); !errors.Is(err, full) || len(f.enrolls) > 0 {
		t.Errorf("%v after %d requests, want the error of Key and none", err, len(f.enrolls))
	}
}

func unusedAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return "http://" + l.Addr().String()
}

// TestKinds: each way to fail has a separate kind, because each has another next step.
func TestKinds(t *testing.T) {
	serve := func(h http.HandlerFunc) string {
		srv := httptest.NewServer(h)
		t.Cleanup(srv.Close)
		return srv.URL
	}
	answer := func(status int, contentType, body string) string {
		return serve(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.Header().Set("Location", "http://portal.example/login")
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		})
	}
	const isJSON, envelope = "application/json", `{"error":{"code":"E_BAD_REQUEST","message":"no","retry_after_ms":1500}}`
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	trusted := secure.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	early, other := trusted.Clone(), trusted.Clone()
	early.Time = func() time.Time { return time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC) }
	other.ServerName = "other.example"
	for name, c := range map[string]struct {
		url  string
		tls  *tls.Config
		kind Kind
	}{
		"nobody listens":       {unusedAddr(t), nil, Unreachable},
		"no such name":         {"https://relay.invalid", nil, NoDNS},
		"redirect":             {answer(302, "text/html", ""), nil, Portal},
		"page":                 {answer(200, "text/html; charset=utf-8", "<html>Welcome"), nil, Portal},
		"511":                  {answer(511, "text/html", ""), nil, Portal},
		"another server":       {answer(404, "text/plain", "not found"), nil, NotRelay},
		"other JSON":           {answer(200, isJSON, `[]`), nil, NotRelay},
		"no nonce":             {answer(200, isJSON, `{}`), nil, NotRelay},
		"old relay":            {answer(404, isJSON, envelope), nil, NoEnrollment},
		"too many":             {answer(429, isJSON, envelope), nil, RateLimited},
		"proxy":                {answer(502, "text/html", "bad gateway"), nil, Unavailable},
		"connection is closed": {serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), nil, Broken},
		"unknown authority":    {secure.URL, nil, Untrusted},
		"empty pool":           {secure.URL, &tls.Config{RootCAs: x509.NewCertPool()}, Untrusted},
		"wrong clock":          {secure.URL, early, CertificateDate},
		"wrong name":           {secure.URL, other, WrongName},
		"TLS to plain HTTP":    {strings.Replace(answer(200, isJSON, ""), "http", "https", 1), nil, NotTLS},
		"plain HTTP to TLS":    {strings.Replace(secure.URL, "https", "http", 1), nil, NeedsTLS},
	} {
		_, err := (&Client{URL: c.url, TLS: c.tls}).Refresh(t.Context(), RefreshOptions{})
		var e *Error
		if !errors.As(err, &e) || e.Kind != c.kind {
			t.Errorf("%s: %v, want kind %d", name, err, c.kind)
		} else if c.kind == RateLimited && e.RetryAfter != 1500*time.Millisecond {
			t.Errorf("%s: retry after %v", name, e.RetryAfter)
		}
	}
}

func TestMalformedAnswers(t *testing.T) {
	for _, body := range []string{`{"node_id":"x","tenant_id":"t","device_token":"a.b.c","gen":1,"nonce":"n"}`,
		`{"node_id":"` + manifest.NewNodeID() + `","tenant_id":"t","device_token":"a b","gen":1,"nonce":"n"}`,
		`{"agent_id":"a","token":"t","gen":1,"nonce":"n"}`, `{"nonce":"n"}`} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(body))
		}))
		_, err := (&Client{URL: srv.URL}).Enroll(t.Context(), EnrollOptions{Key: newKey})
		srv.Close()
		var e *Error
		if !errors.As(err, &e) || e.Kind != Malformed {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, srv := newFakeRelay(t)
	if _, err := (&Client{URL: srv.URL}).Refresh(ctx, RefreshOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
}

func TestBaseURL(t *testing.T) {
	for in, want := range map[string]string{
		"wss://relay.example:8460/v1/device/ws": "https://relay.example:8460",
		"https://relay.example/":                "https://relay.example",
		"https://relay.example/board/":          "https://relay.example/board",
		"ws://127.0.0.1:1":                      "http://127.0.0.1:1",
	} {
		if got, err := BaseURL(in); err != nil || got != want {
			t.Errorf("BaseURL(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	if _, err := BaseURL("http://relay.example"); err == nil {
		t.Error("cleartext beyond loopback is accepted")
	}
}
