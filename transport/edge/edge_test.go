package edge

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

func TestIsLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "LocalHost": true, "127.0.0.1": true, "127.9.9.9": true, "::1": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "::": false, "10.0.0.1": false, "localhost.example": false, "127.0.0.1.example": false, "127.1": false,
	} {
		if got := IsLoopback(host); got != want {
			t.Errorf("IsLoopback(%q) = %v, want %v", host, got, want)
		}
	}
}

func TestGuard(t *testing.T) {
	g := NewGuard(GuardOptions{CheckHost: true, Hosts: []string{"Relay.Example"}, Origins: []string{"https://App.example", "https://slash.example/"}})
	tests := []struct {
		name    string
		host    string
		origins []string
		want    error
	}{
		{"a program", "127.0.0.1:8460", nil, nil},
		{"localhost in capitals", "LOCALHOST", nil, nil},
		{"IPv6 loopback", "[::1]:8460", nil, nil},
		{"IPv6 loopback without port", "[::1]", nil, nil},
		{"the public name", "relay.EXAMPLE:443", nil, nil},
		{"a rebound name", "evil.example:8460", nil, ErrHost},
		{"a rebound name, same origin", "evil.example", []string{"http://evil.example"}, ErrHost},
		{"a name that starts like loopback", "127.0.0.1.evil.example", nil, ErrHost},
		{"no host", "", nil, ErrHost},
		{"the page of this server", "127.0.0.1:8460", []string{"http://127.0.0.1:8460"}, nil},
		{"the page of this server in capitals", "localhost:1", []string{"HTTP://LOCALHOST:1"}, nil},
		{"an allowed origin", "localhost", []string{"https://app.example"}, nil},
		{"an allowed origin in capitals", "localhost", []string{"HTTPS://APP.EXAMPLE"}, nil},
		{"an origin allowed with a slash", "localhost", []string{"https://slash.example"}, nil},
		{"an allowed host by another scheme", "localhost", []string{"http://app.example"}, ErrOrigin},
		{"another port", "127.0.0.1:8460", []string{"http://127.0.0.1:1"}, ErrOrigin},
		{"an opaque origin", "localhost", []string{"null"}, ErrOrigin},
		{"an empty origin", "localhost", []string{""}, ErrOrigin},
		{"two origins", "localhost", []string{"https://app.example", "https://app.example"}, ErrOrigin},
	}
	for _, tt := range tests {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host, r.Header["Origin"] = tt.host, tt.origins
		if err := g.Check(r); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
	r := httptest.NewRequest("GET", "http://any.example/", nil)
	if err := NewGuard(GuardOptions{}).Check(r); err != nil {
		t.Errorf("without CheckHost: %v", err)
	}
}

func TestCORS(t *testing.T) {
	c := CORS{Methods: "GET", Headers: "Authorization", Expose: "Retry-After"}
	h := make(http.Header)
	r := httptest.NewRequest("GET", "/", nil)
	if c.SetHeaders(h, r); len(h) != 0 {
		t.Errorf("without Origin: %v", h)
	}
	r.Header.Set("Origin", "https://App.example")
	c.SetHeaders(h, r)
	if h.Get("Access-Control-Allow-Origin") != "https://App.example" || h.Get("Vary") != "Origin" ||
		h.Get("Access-Control-Expose-Headers") != "Retry-After" || h.Get("Access-Control-Allow-Methods") != "" {
		t.Errorf("with Origin: %v", h)
	}
	r.Method = http.MethodOptions
	r.Header.Set("Access-Control-Request-Method", "GET")
	c.SetHeaders(h, r)
	if h.Get("Access-Control-Allow-Methods") != "GET" || h.Get("Access-Control-Allow-Headers") != "Authorization" || h.Get("Access-Control-Max-Age") != "600" {
		t.Errorf("preflight: %v", h)
	}
}

func TestBearer(t *testing.T) {
	tests := []struct {
		header []string
		token  string
		given  bool
	}{
		{nil, "", false},
		{[]string{"Bearer a.b.c"}, "a.b.c", true},
		{[]string{"bearer  a.b.c"}, "a.b.c", true},
		{[]string{"Basic a.b.c"}, "", true},
		{[]string{"Bearer"}, "", true},
		{[]string{""}, "", true},
		{[]string{"Bearer a", "Bearer b"}, "", true},
	}
	for _, tt := range tests {
		r := httptest.NewRequest("GET", "/", nil)
		if tt.header != nil {
			r.Header["Authorization"] = tt.header
		}
		if token, given := Bearer(r); token != tt.token || given != tt.given {
			t.Errorf("%q: got %q, %v", tt.header, token, given)
		}
	}
}

func TestParseTraceparent(t *testing.T) {
	const id, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	tests := []struct {
		in   string
		want bool
	}{
		{"00-" + id + "-" + span + "-01", true},
		{"01-" + id + "-" + span + "-01", true},
		{"01-" + id + "-" + span + "-01-more", true},
		{"00-" + id + "-" + span + "-01-more", false},
		{"01-" + id + "-" + span + "-01more", false},
		{"ff-" + id + "-" + span + "-01", false},
		{"00-" + strings.ToUpper(id) + "-" + span + "-01", false},
		{"00-" + strings.Repeat("0", 32) + "-" + span + "-01", false},
		{"00-" + id + "-0000000000000000-01", false},
		{"00-" + id + "-not a parent id-01", false},
		{"00-" + id + "-" + span + "-0g", false},
		{"00-" + id + "-" + span, false},
		{"00-" + id, false},
		{"00_" + id + "-" + span + "-01", false},
		{"", false},
	}
	for _, tt := range tests {
		got, ok := ParseTraceparent(tt.in)
		if ok != tt.want || (ok && got != id) || (!ok && got != "") {
			t.Errorf("ParseTraceparent(%q) = %q, %v", tt.in, got, ok)
		}
		r := httptest.NewRequest("GET", "/", nil)
		r.Header["Traceparent"] = []string{tt.in}
		if got, fromCaller := TraceID(r); fromCaller != tt.want || len(got) != 32 || (got == id) != tt.want {
			t.Errorf("TraceID of %q = %q, %v", tt.in, got, fromCaller)
		}
		r.Header.Add("Traceparent", tt.in)
		if got := CallerTraceID(r); got != "" {
			t.Errorf("CallerTraceID of %q, twice = %q", tt.in, got)
		}
	}
}

func TestIsJSON(t *testing.T) {
	for contentType, want := range map[string]bool{
		"application/json": true, "Application/JSON": true, "application/json; charset=UTF-8": true, "application/json;x=y": true,
		"": false, "text/plain": false, "application/json; charset=utf-16": false, "application/x-www-form-urlencoded": false, "application/jsonp": false,
	} {
		if got := IsJSON(contentType); got != want {
			t.Errorf("IsJSON(%q) = %v, want %v", contentType, got, want)
		}
	}
}

func TestBodiesRead(t *testing.T) {
	const limit = 64 << 10
	tests := []struct {
		name     string
		body     io.Reader
		length   int64 // as the header says; -1: unknown
		want     int
		tooLarge bool
	}{
		{"small", strings.NewReader("12345"), 5, 5, false},
		{"empty", strings.NewReader(""), 0, 0, false},
		{"of unknown length", strings.NewReader(strings.Repeat("x", 100)), -1, 100, false},
		{"at the limit", strings.NewReader(strings.Repeat("x", limit)), limit, limit, false},
		{"above the limit", strings.NewReader(strings.Repeat("x", limit+1)), -1, -1, true},
		{"shorter than it said", strings.NewReader("123"), 5, -1, false},
		{"broken", io.MultiReader(strings.NewReader("123"), broken{}), -1, -1, false},
	}
	for _, tt := range tests {
		w, r := httptest.NewRecorder(), httptest.NewRequest("POST", "/", tt.body)
		r.ContentLength = tt.length
		body, _, err := NewBodies().Read(w, r, Identity{"acme", "x"}, limit)
		if (err == nil) != (tt.want >= 0) || (err == nil && len(body) != tt.want) {
			t.Errorf("%s: %d bytes, %v", tt.name, len(body), err)
		}
		var large *http.MaxBytesError
		if errors.As(err, &large) != tt.tooLarge || (err != nil) != (w.Header().Get("Connection") == "close") {
			t.Errorf("%s: %v, %v", tt.name, err, w.Header())
		}
	}
}

// TestBodiesPace: a tenant that sends more than its rate waits, and is refused in the end; another
// tenant and small bodies are not delayed.
func TestBodiesPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 1 << 20
		bodies := NewBodies()
		read := func(id Identity, size int) (time.Duration, error) {
			start := time.Now()
			r := httptest.NewRequest("POST", "/", strings.NewReader(strings.Repeat("x", size)))
			_, held, err := bodies.Read(httptest.NewRecorder(), r, id, 1<<20)
			bodies.Release(id, held)
			return time.Since(start), err
		}
		flood, other := Identity{"flood", "x"}, Identity{"other", "x"}
		for sent := 0; sent < bodyBurst; sent += size {
			if took, err := read(flood, size); took != 0 || err != nil {
				t.Fatalf("within the burst: %v, %v", took, err)
			}
		}
		if took, err := read(flood, size); took != time.Second*size/bodyRate || err != nil {
			t.Errorf("above the rate: %v, %v", took, err)
		}
		if took, err := read(other, size); took != 0 || err != nil {
			t.Errorf("another tenant: %v, %v", took, err)
		}
		if took, err := read(flood, uncountedBody); took != 0 || err != nil {
			t.Errorf("a small body: %v, %v", took, err)
		}
		var wg sync.WaitGroup
		var refused atomic.Int32
		const at = 2 * int(bodyWait/time.Second) * bodyRate / size // twice what the rate admits in time
		for range at {
			wg.Go(func() {
				took, err := read(flood, size)
				var e *manifest.Error
				switch {
				case err == nil:
				case !errors.As(err, &e) || e.Code != manifest.RateLimited || took != bodyWait:
					t.Errorf("beyond the wait: %v, %v", took, err)
				default:
					refused.Add(1)
				}
			})
		}
		wg.Wait()
		if n := int(refused.Load()); n != at/2 && n != at/2+1 { // the rate admits one just when its wait ends
			t.Errorf("%d of %d were refused", n, at)
		}
	})
}

// TestBodiesMembers: a body with many members is charged for them, and one with too many is refused,
// before either is decoded.
func TestBodiesMembers(t *testing.T) {
	members := func(n int) string {
		return `{"x":"` + strings.Repeat("{:,", n) + `"` + strings.Repeat(`,"k":0`, n-1) + "}"
	}
	synctest.Test(t, func(t *testing.T) {
		bodies := NewBodies()
		read := func(tenant, body string) (time.Duration, int64, error) {
			start := time.Now()
			_, held, err := bodies.Read(httptest.NewRecorder(), httptest.NewRequest("POST", "/", strings.NewReader(body)), Identity{tenant, "x"}, 1<<20)
			bodies.Release(Identity{tenant, "x"}, held)
			return time.Since(start), held, err
		}
		var e *manifest.Error
		if took, held, err := read("a", members(maxMembers+1)); took != 0 || held != 0 || !errors.As(err, &e) || e.Code != manifest.BadRequest || bodies.Stats().InUse != 0 {
			t.Errorf("one member too many: %s, %d, %v", took, held, err)
		}
		const served = bodyBurst/(maxMembers*(memberBytes+elementBytes)) - 1 // of the largest, whose bytes count as well
		for range served {
			if took, _, err := read("b", members(maxMembers)); took != 0 || err != nil {
				t.Errorf("within the burst: %s, %v", took, err)
			}
		}
		read("b", members(maxMembers))
		if took, _, err := read("b", members(maxMembers)); took < 100*time.Millisecond || err != nil {
			t.Errorf("above the rate: %s, %v", took, err)
		}
		for range 10 { // as dense as ordinary requests are
			if took, _, err := read("c", members(200)+strings.Repeat(" ", 8<<10)); took != 0 || err != nil {
				t.Errorf("an ordinary body: %s, %v", took, err)
			}
		}
		array := "[" + strings.Repeat("0,", 500_000) + "0]"
		read("d", array)
		if took, _, err := read("d", array); took < time.Second || err != nil {
			t.Errorf("a second large array: %s, %v", took, err)
		}
	})
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestWriteError(t *testing.T) {
	e := &manifest.Error{Code: manifest.RateLimited, Message: `too "fast"`, RetryAfterMS: 1001, Reason: "rate", Outcome: manifest.NotSent}
	w := httptest.NewRecorder()
	SetChallenge(w.Header(), "agentctl", true, "https://relay.example/meta")
	WriteError(w, Status(e.Code), e, "0af7651916cd43dd8448eb211c80319c")
	const body = `{"error":{"code":"E_RATE_LIMITED","message":"too \"fast\"","outcome":"not_sent","reason":"rate","retryable":true,"retry_after_ms":1001,"trace_id":"0af7651916cd43dd8448eb211c80319c"}}` + "\n"
	if w.Code != 429 || w.Body.String() != body {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	for key, want := range map[string]string{
		"Retry-After": "2", "Content-Type": "application/json", "Cache-Control": "no-store",
		"WWW-Authenticate": `Bearer realm="agentctl", error="invalid_token", resource_metadata="https://relay.example/meta"`,
	} {
		if got := w.Header().Get(key); got != want {
			t.Errorf("%s: got %q, want %q", key, got, want)
		}
	}
	SetChallenge(w.Header(), "agentctl events", false, "")
	if got := w.Header().Get("WWW-Authenticate"); got != `Bearer realm="agentctl events"` {
		t.Errorf("challenge %q", got)
	}
}

// TestLimiterRefusesWhenFull checks the Limiter of keys that must not be forgotten while
// they owe something.
func TestLimiterRefusesWhenFull(t *testing.T) {
	const maxKeys = 100
	l := NewLimiter(maxKeys, false)
	now := time.Unix(1, 0)
	for i := range maxKeys {
		if wait := l.Take(fmt.Sprint(i), 10, 20, now); wait != 0 {
			t.Fatalf("the first of key %d waits %s", i, wait)
		}
	}
	if l.Take("new", 10, 20, now) == 0 || len(l.keys) > maxKeys {
		t.Errorf("a new key is admitted: %d keys", len(l.keys))
	}
	now = now.Add(time.Minute)
	if l.Take("new", 10, 20, now) > 0 || len(l.keys) != 1 || l.order.Len() != 1 {
		t.Errorf("%d keys a minute later", len(l.keys))
	}
	for range 19 {
		l.Take("new", 10, 20, now)
	}
	if wait := l.Take("new", 10, 20, now); wait != 100*time.Millisecond {
		t.Errorf("wait %s, want 100ms", wait)
	}
	l.Charge("new", 50, now)
	if wait := l.Take("new", 10, 20, now); wait != 5100*time.Millisecond {
		t.Errorf("wait %s after a charge, want 5.1s", wait)
	}
	l.Charge("nobody", 50, now)
	if len(l.keys) != 1 {
		t.Error("a charge made a key")
	}
}

func TestLimiterEvictsOldest(t *testing.T) {
	l := NewLimiter(2, true)
	now := time.Unix(1, 0)
	for _, key := range []string{"a", "b", "a", "c"} { // c drops b
		l.Take(key, 1, 2, now)
	}
	if l.Take("a", 1, 2, now) == 0 {
		t.Error("a, used recently, was dropped")
	}
	if l.Take("b", 1, 2, now) != 0 || len(l.keys) != 2 || l.order.Len() != 2 {
		t.Errorf("b did not start over: %d keys", len(l.keys))
	}
}

// TestStatus checks that the map is total and stays inside the table of docs/protocol.md.
func TestStatus(t *testing.T) {
	want := map[manifest.Code]int{manifest.BadRequest: 400, manifest.ManifestInvalid: 422, manifest.SafetyDenied: 403, manifest.NodeOffline: 503,
		manifest.DeadlineExceeded: 504, manifest.RateLimited: 429, manifest.Internal: 500}
	for _, c := range manifest.Codes {
		if got := Status(c); got != want[c] {
			t.Errorf("%s: %d, want %d", c, got, want[c])
		}
	}
	if got := Status("E_NEW"); got != http.StatusInternalServerError {
		t.Errorf("an unknown code: %d", got)
	}
}
