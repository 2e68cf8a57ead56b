package login

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/enrollment"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

const testCode = "7K3M-9QTR-2HXW-DB5N"

// fakeRelay answers enrollments and refreshes as relay/auth does, without its checks.
type fakeRelay struct {
	*httptest.Server
	mu        sync.Mutex
	keys      map[string]bool // public keys that were enrolled
	gen       int
	requestID string
	refreshes int
	refuse    string // reason of a refusal of /v1/token; "" serves
	board     bool   // answers as to a board
	lose      int    // answers that are lost after they took effect
}

func newFakeRelay(t *testing.T) *fakeRelay {
	f := &fakeRelay{keys: map[string]bool{}}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

// token makes a token that lives for an hour, as the claims say.
func token(gen int) string {
	claims, _ := json.Marshal(map[string]int64{"iat": 1000, "exp": 4600, "gen": int64(gen)})
	return "h." + base64.RawURLEncoding.EncodeToString(claims) + ".s"
}

func (f *fakeRelay) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.Method == http.MethodGet:
		fmt.Fprint(w, `{"nonce":"n"}`)
		return
	case r.URL.Path == enrollment.EnrollPath:
		var q enrollment.EnrollRequest
		_ = json.NewDecoder(r.Body).Decode(&q)
		key, err := enrollment.ParseKey(q.PublicKey)
		if err != nil || !enrollment.Verify(key, enrollment.EnrollMessage("n", testCode, q.InstanceID), q.Proof) {
			f.error(w, 401, enrollment.ReasonProof)
			return
		}
		if len(f.keys) > 0 && !f.keys[q.PublicKey] {
			f.error(w, 410, enrollment.ReasonUsed)
			return
		}
		f.keys[q.PublicKey] = true
		f.gen = 1
		a := enrollment.EnrollAnswer{AgentID: "agent-1", TenantID: "lab", Token: token(1), Gen: 1, ExpiresAtMS: 1}
		if f.board {
			a = enrollment.EnrollAnswer{NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xy", TenantID: "lab", DeviceToken: token(1), Gen: 1}
		}
		f.answer(w, a)
	default:
		var q enrollment.TokenRequest
		_ = json.NewDecoder(r.Body).Decode(&q)
		f.refreshes++
		switch {
		case f.refuse != "":
			f.error(w, 401, f.refuse)
			return
		case q.RequestID == f.requestID && q.Gen == f.gen-1: // the answer was lost
		case q.Gen == f.gen:
			f.gen, f.requestID = f.gen+1, q.RequestID
		default:
			f.error(w, 401, enrollment.ReasonGenerationUsed)
			return
		}
		f.answer(w, enrollment.TokenAnswer{Token: token(f.gen), Gen: f.gen, ExpiresAtMS: 2})
	}
}

// set changes the relay while a request may still be ending.
func (f *fakeRelay) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeRelay) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refreshes
}

func (f *fakeRelay) answer(w http.ResponseWriter, v any) {
	if f.lose > 0 {
		f.lose--
		panic(http.ErrAbortHandler)
	}
	_ = json.NewEncoder(w).Encode(v)
}

func (f *fakeRelay) error(w http.ResponseWriter, status int, reason string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"error":{"code":"E_SAFETY_DENIED","reason":%q,"message":"no"}}`, reason)
}

func login(t *testing.T, s Store, f *fakeRelay, name string) *Info {
	t.Helper()
	i, _, err := s.Login(t.Context(), Options{Context: name, Relay: f.URL, Code: testCode})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// age makes the token of a context as old as if it had been received d ago.
func age(t *testing.T, s Store, name string, d time.Duration) {
	t.Helper()
	c, err := s.load(name)
	if err != nil {
		t.Fatal(err)
	}
	c.ReceivedMS -= d.Milliseconds()
	if err := save(s.path(name), c); err != nil {
		t.Fatal(err)
	}
}

func newStore(t *testing.T) Store { return Store{filepath.Join(t.TempDir(), "agentctl", "contexts")} }

func TestLogin(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	if _, err := s.Open(""); !errors.Is(err, ErrNoContext) {
		t.Errorf("before: %v", err)
	}
	i := login(t, s, f, "")
	if i.Name != DefaultName || i.AgentID != "agent-1" || i.TenantID != "lab" || i.Relay != f.URL {
		t.Errorf("got %+v", i)
	}
	entries, _ := os.ReadDir(s.Dir)
	for _, e := range entries {
		if info, _ := e.Info(); info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v", e.Name(), info.Mode())
		}
	}
	if len(entries) != 2 {
		t.Errorf("files %v", entries)
	}
	c, err := s.Open("")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := c.Token(t.Context(), ""); got != token(1) || err != nil || f.count() != 0 {
		t.Errorf("token %q, %v, %d refreshes", got, err, f.count())
	}
	// A code that another key has used does not replace the context.
	f.set(func() { f.keys = map[string]bool{"another": true} })
	if _, _, err := s.Login(t.Context(), Options{Relay: f.URL, Code: testCode}); err == nil {
		t.Error("a used code was accepted")
	}
	if c, err := s.load(DefaultName); err != nil || c.Gen != 1 {
		t.Errorf("after a refused login: %v, %v", c, err)
	}
}

// TestLostAnswer: a login whose answer is lost gets the same identity when it is repeated.
func TestLostAnswer(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	f.set(func() { f.lose = 10 })
	if _, _, err := s.Login(t.Context(), Options{Relay: f.URL, Code: testCode}); err == nil {
		t.Fatal("no error")
	}
	if names, _ := s.Names(); len(names) > 0 {
		t.Errorf("half written: %v", names)
	}
	f.set(func() { f.lose = 0 })
	login(t, s, f, "")
	f.set(func() {
		if len(f.keys) != 1 {
			t.Errorf("%d keys", len(f.keys))
		}
	})
}

// TestLoginTwice: the same line again gives the same identity, with the newest token.
func TestLoginTwice(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	first := login(t, s, f, "")
	before, err := s.load(first.Name)
	if err != nil {
		t.Fatal(err)
	}
	again := login(t, s, f, "")
	after, err := s.load(first.Name)
	if err != nil || again.AgentID != first.AgentID || after.PrivateKey != before.PrivateKey {
		t.Errorf("another identity: %+v, %v", again, err)
	}
	f.set(func() { f.keys = map[string]bool{"another": true} })
	if _, _, err := s.Login(t.Context(), Options{Context: "other", Relay: f.URL, Code: testCode}); err == nil {
		t.Error("another context took the identity")
	}
	if left, _ := filepath.Glob(filepath.Join(s.Dir, "*"+pendingSuffix)); len(left) > 0 {
		t.Errorf("keys of a refused login are left: %s", left)
	}
}

func TestLoginRefused(t *testing.T) {
	f := newFakeRelay(t)
	s := newStore(t)
	login(t, s, f, "lab")
	tests := []struct {
		name string
		o    Options
		want error
	}{
		{"another relay", Options{Context: "lab", Relay: "https://other.example", Code: testCode}, new(OtherRelayError)},
		{"pin without TLS", Options{Relay: f.URL, Code: testCode, CASHA256: strings.Repeat("ab", 32)}, ErrCleartextPin},
		{"bad code", Options{Relay: f.URL, Code: "x"}, nil},
		{"bad pin", Options{Relay: "https://127.0.0.1:1", Code: testCode, CASHA256: "xy"}, nil},
		{"bad name", Options{Context: "../x", Relay: f.URL, Code: testCode}, nil},
		{"bad URL", Options{Relay: "http://relay.example", Code: testCode}, nil},
	}
	for _, tt := range tests {
		_, _, err := s.Login(t.Context(), tt.o)
		var other *OtherRelayError
		if err == nil || tt.want == ErrCleartextPin && !errors.Is(err, tt.want) || tt.name == "another relay" && !errors.As(err, &other) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	f.set(func() { f.board, f.keys = true, map[string]bool{} })
	if _, _, err := s.Login(t.Context(), Options{Context: "b", Relay: f.URL, Code: testCode}); !errors.Is(err, ErrForBoard) {
		t.Errorf("a board's code: %v", err)
	}
	if names, _ := s.Names(); len(names) != 1 {
		t.Errorf("contexts %v", names)
	}
}

func TestContexts(t *testing.T) {
	s := newStore(t)
	login(t, s, newFakeRelay(t), "a")
	login(t, s, newFakeRelay(t), "b")
	if current, err := s.Current(); current != "b" || err != nil {
		t.Errorf("current %q, %v", current, err)
	}
	if err := s.Use("a"); err != nil {
		t.Error(err)
	}
	if err := s.Use("c"); !errors.Is(err, ErrNoContext) {
		t.Errorf("use: %v", err)
	}
	os.WriteFile(s.path("b"), []byte("{"), 0o600)
	list, err := s.List()
	if err != nil || len(list) != 2 || !list[0].Current || list[1].Error == "" {
		t.Errorf("list %+v, %v", list, err)
	}
	if got := s.Complete("a"); len(got) != 1 {
		t.Errorf("completion %v", got)
	}
	for _, name := range []string{"b", "a"} {
		if err := s.Remove(name); err != nil {
			t.Error(err)
		}
	}
	if current, err := s.Current(); current != "" || err != nil {
		t.Errorf("current %q, %v", current, err)
	}
	if err := s.Remove("a"); !errors.Is(err, ErrNoContext) {
		t.Errorf("remove: %v", err)
	}
}

func TestFiles(t *testing.T) {
	tests := []struct {
		name   string
		change func(path string)
		want   error
	}{
		{"empty", func(p string) { os.Truncate(p, 0) }, ErrDamaged},
		{"torn", func(p string) { os.Truncate(p, 100) }, ErrDamaged},
		{"group may read", func(p string) { os.Chmod(p, 0o640) }, ErrOpen},
		{"a link", func(p string) { os.Rename(p, p+"x"); os.Symlink(p+"x", p) }, ErrDamaged},
		{"no key", func(p string) {
			b, _ := os.ReadFile(p)
			os.WriteFile(p, []byte(strings.Replace(string(b), "private_key", "private_kex", 1)), 0o600)
		}, ErrDamaged},
		{"gone", func(p string) { os.Remove(p) }, ErrNoContext},
	}
	f := newFakeRelay(t)
	for _, tt := range tests {
		s := newStore(t)
		f.set(func() { f.keys = map[string]bool{} })
		login(t, s, f, "lab")
		c, err := s.Open("lab")
		if err != nil {
			t.Fatal(err)
		}
		tt.change(s.path("lab"))
		if _, err := s.Open("lab"); !errors.Is(err, tt.want) {
			t.Errorf("%s: open: %v", tt.name, err)
		}
		// A process that has the context open must not overwrite what it does not understand.
		if _, err := c.Token(t.Context(), token(1)); err == nil {
			t.Errorf("%s: the token was refreshed", tt.name)
		}
	}
}

// TestRefresh shares a context between callers that each have it open, as processes have.
func TestRefresh(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	login(t, s, f, "lab")
	age(t, s, "lab", 50*time.Minute)
	var wg sync.WaitGroup
	var failed atomic.Int32
	for range 8 {
		wg.Go(func() {
			c, err := s.Open("lab")
			if err == nil {
				var got string
				if got, err = c.Token(context.Background(), ""); got != token(2) {
					err = errors.Join(err, fmt.Errorf("token %q", got))
				}
			}
			if err != nil {
				failed.Add(1)
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if f.count() != 1 {
		t.Errorf("%d refreshes", f.count())
	}
	// A refused token is replaced at once, and by one refresh only.
	a, _ := s.Open("lab")
	b, _ := s.Open("lab")
	for _, c := range []*Context{a, b} {
		if got, err := c.Token(t.Context(), token(2)); got != token(3) || err != nil {
			t.Errorf("token %q, %v", got, err)
		}
	}
	if f.count() != 2 {
		t.Errorf("%d refreshes", f.count())
	}
}

// TestReplacedDuringRefresh: a login and a removal wait for a refresh that another process has
// sent, so that its answer cannot put the old identity back.
func TestReplacedDuringRefresh(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	login(t, s, f, "lab")
	for _, tt := range []struct {
		name   string
		change func() error
	}{
		{"login", func() error {
			_, _, err := s.Login(t.Context(), Options{Context: "lab", Relay: f.URL, Code: testCode})
			return err
		}},
		{"remove", func() error { return s.Remove("lab") }},
	} {
		release, err := lockFile(t.Context(), s.path("lab"))
		if err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(s.path("lab"))
		done := make(chan error, 1)
		go func() { done <- tt.change() }()
		select {
		case err := <-done:
			t.Errorf("%s did not wait for the refresh: %v", tt.name, err)
		case <-time.After(2 * lockPoll):
		}
		if during, _ := os.ReadFile(s.path("lab")); !bytes.Equal(before, during) {
			t.Errorf("%s changed the file during the refresh", tt.name)
		}
		release()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if after, _ := os.ReadFile(s.path("lab")); bytes.Equal(before, after) {
			t.Errorf("%s did nothing", tt.name)
		}
	}
}

// TestRefreshLost: a refresh whose answer or whose storing is lost is repeated as it was.
func TestRefreshLost(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	login(t, s, f, "lab")
	age(t, s, "lab", 50*time.Minute)
	f.set(func() { f.lose = 1 })
	c, _ := s.Open("lab")
	if got, err := c.Token(t.Context(), ""); got != token(1) || err != nil {
		t.Errorf("while the relay is away: %q, %v", got, err)
	}
	again, _ := s.Open("lab")
	if got, err := again.Token(t.Context(), ""); got != token(2) || err != nil {
		t.Errorf("token %q, %v", got, err)
	}
	// The first one finds the token on the disk.
	c.nextTry = time.Time{}
	if got, err := c.Token(t.Context(), ""); got != token(2) || err != nil || f.count() != 2 {
		t.Errorf("token %q, %v, %d refreshes", got, err, f.count())
	}
}

func TestRefreshRefused(t *testing.T) {
	s, f := newStore(t), newFakeRelay(t)
	login(t, s, f, "lab")
	age(t, s, "lab", 50*time.Minute)
	for _, reason := range []string{enrollment.ReasonGenerationUsed, enrollment.ReasonRevoked, enrollment.ReasonProof} {
		f.set(func() { f.refuse = reason })
		c, _ := s.Open("lab")
		_, err := c.Token(t.Context(), "")
		var refresh *RefreshError
		var e *enroll.Error
		if !errors.As(err, &refresh) || refresh.Temporary() || !errors.As(err, &e) || e.Reason != reason {
			t.Errorf("%s: %v", reason, err)
		}
	}
}

// TestClock: the age of a token decides, whatever the clock of this machine says.
func TestClock(t *testing.T) {
	c := credential{Token: token(1), ReceivedMS: time.Date(1970, 1, 1, 1, 0, 0, 0, time.UTC).UnixMilli()}
	for after, want := range map[time.Duration]bool{0: false, 30 * time.Minute: false, 40 * time.Minute: true, -time.Minute: true} {
		if got := c.isDue(time.UnixMilli(c.ReceivedMS).Add(after)); got != want {
			t.Errorf("after %s: due %t", after, got)
		}
	}
}

// TestLongLife: a process that runs for hours always has a valid token.
func TestLongLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t)
		if err := os.MkdirAll(s.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
		_, key, _ := ed25519.GenerateKey(nil)
		cred := credential{Relay: "https://127.0.0.1:1", AgentID: "a", PrivateKey: enrollment.EncodePrivateKey(key), Token: token(1), Gen: 1, ReceivedMS: nowMS(), RequestID: link.NewID()}
		if err := save(s.path("lab"), &cred); err != nil {
			t.Fatal(err)
		}
		c, err := s.Open("lab")
		if err != nil {
			t.Fatal(err)
		}
		issued, away := time.Now(), false
		c.refresh = func(_ context.Context, o enroll.RefreshOptions) (*enrollment.TokenAnswer, error) {
			if away {
				return nil, &enroll.Error{Kind: enroll.Unreachable, Err: errors.New("away")}
			}
			issued = time.Now()
			return &enrollment.TokenAnswer{Token: token(o.Gen + 1), Gen: o.Gen + 1}, nil
		}
		for i := range 200 {
			time.Sleep(3 * time.Minute)
			away = i%7 > 4
			if _, err := c.Token(t.Context(), ""); err != nil || time.Since(issued) > time.Hour {
				t.Fatalf("after %d: token of %s ago, %v", i, time.Since(issued), err)
			}
		}
	})
}
