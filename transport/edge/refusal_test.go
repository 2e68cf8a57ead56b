package edge

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// refuseN counts n refusals of an identity, and returns how long the last one waited.
func refuseN(t *testing.T, f *Refusals, id Identity, n int) (delay time.Duration) {
	t.Helper()
	for range n {
		start := time.Now()
		if !f.Delay(t.Context(), nil, id) {
			t.Fatal("not worth an answer")
		}
		delay = time.Since(start)
	}
	return delay
}

// TestRefusals: a burst of refusals is free, those of a flood wait, and those of nobody else.
func TestRefusals(t *testing.T) {
	ann, bob := Identity{"t", "ann"}, Identity{"t", "bob"}
	synctest.Test(t, func(t *testing.T) {
		f := NewRefusals()
		if d := refuseN(t, f, ann, refusalBurst); d != 0 {
			t.Errorf("a burst waited %s", d)
		}
		if d := refuseN(t, f, ann, 10); d != time.Second/refusalRate {
			t.Errorf("one client above the rate waited %s", d)
		}
		if d := refuseN(t, f, bob, refusalBurst); d != 0 {
			t.Errorf("another identity waited %s", d)
		}
		time.Sleep(10 * time.Second / refusalRate)
		if d := refuseN(t, f, ann, 10); d != 0 {
			t.Errorf("after a pause: %s", d)
		}
	})
	synctest.Test(t, func(t *testing.T) { // 300 clients that ask again at once
		f := NewRefusals()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		answered, most := make([]int, 300), time.Duration(0)
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range answered {
			wg.Go(func() {
				for ctx.Err() == nil {
					start := time.Now()
					if f.Delay(ctx, nil, ann) {
						answered[i]++
						mu.Lock()
						most = max(most, time.Since(start))
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		total := 0
		for _, n := range answered {
			total += n
		}
		if bound := refusalBurst + 60*(refusalRate+len(answered)/2); total > bound || most > maxRefusalDelay {
			t.Errorf("%d refusals in a minute, want at most %d; the longest wait was %s", total, bound, most)
		}
		if f.Stats().InUse != 0 {
			t.Errorf("%d wait forever", f.Stats().InUse)
		}
		// The last ones owe at most maxRefusalDelay, and a few that were canceled at the same moment more.
		time.Sleep(maxRefusalDelay + 2*time.Second)
		if d := refuseN(t, f, ann, refusalRate); d != 0 {
			t.Errorf("after the flood: %s", d)
		}
	})
}

// TestRefusalsOfStrangers: a flood from many addresses waits as well, and costs no identity anything.
func TestRefusalsOfStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewRefusals()
		last := time.Duration(0)
		for i := range strangersRefusalBurst + 10 {
			last = refuseN(t, f, OfAddress(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})), 1)
		}
		if last != time.Second/strangersRefusalRate {
			t.Errorf("an address among many waited %s", last)
		}
		if d := refuseN(t, f, Identity{"t", "ann"}, refusalBurst); d != 0 {
			t.Errorf("an identity waited %s", d)
		}
	})
	a, b := OfAddress(netip.MustParseAddr("2001:db8::1")), OfAddress(netip.MustParseAddr("2001:db8::2"))
	if a != b || a == OfAddress(netip.MustParseAddr("2001:db8:0:1::1")) {
		t.Errorf("not one identity for each /64: %v, %v", a, b)
	}
}

// TestRefusalsEnd: a wait ends with the client and with the server, and few may wait at a time.
func TestRefusalsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ann := NewRefusals(), Identity{"t", "ann"}
		for range 4 * refusalBurst {
			go f.Delay(t.Context(), nil, ann)
		}
		synctest.Wait()
		start := time.Now()
		left, cancel := context.WithCancel(t.Context())
		cancel()
		if f.Delay(left, nil, ann) || time.Since(start) != 0 {
			t.Error("a client that has left gets an answer")
		}
		stop := make(chan struct{})
		close(stop)
		if !f.Delay(t.Context(), stop, ann) || time.Since(start) != 0 {
			t.Error("a server that stops does not answer at once")
		}
		for range maxDelayedRefusals {
			go f.Delay(t.Context(), nil, ann)
		}
		synctest.Wait()
		if f.Delay(t.Context(), nil, ann) || time.Since(start) != 0 || f.Stats().InUse != maxDelayedRefusals/2 || f.Stats().Refused == 0 {
			t.Errorf("one more waits: %+v", f.Stats())
		}
	})
}

// TestServerDelaysRefusals: of the responses of a server, those with 4xx count: for the identity that
// was shown, or else for the client's address.
func TestServerDelaysRefusals(t *testing.T) {
	proxies, _ := ParseTrustedProxies([]string{"127.0.0.2"})
	for _, direct := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			conn := &Conn{conns: NewConns(ConnOptions{MaxOpen: 100, Proxies: proxies})}
			status, subject := 0, ""
			srv := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if subject != "" {
					_ = ConnOf(r).Authenticate(Identity{"t", subject})
				}
				w.WriteHeader(status)
			}), nil)
			send := func(as, client string, code, n int) time.Duration {
				start := time.Now()
				status, subject = code, as
				for range n {
					r := httptest.NewRequest("POST", "/", nil).WithContext(context.WithValue(t.Context(), connKey{}, conn))
					r.RemoteAddr = "127.0.0.2:1000"
					r.Header.Set("X-Forwarded-For", client)
					var w http.ResponseWriter = httptest.NewRecorder()
					if direct {
						w = newDirectWriter(nil)
					}
					srv.Handler.ServeHTTP(w, r)
				}
				return time.Since(start)
			}
			for _, code := range []int{200, 302, 500, 503} {
				if d := send("ann", "192.0.2.1", code, 2*refusalBurst); d != 0 {
					t.Errorf("%d waited %s", code, d)
				}
			}
			for _, code := range []int{400, 401, 403, 429} {
				who := fmt.Sprint("agent", code)
				if d := send(who, "192.0.2.1", code, refusalBurst); d != 0 {
					t.Errorf("a burst of %d waited %s", code, d)
				}
				if d := send(who, "192.0.2.1", code, refusalRate); d != time.Second {
					t.Errorf("%d above the rate waited %s", code, d)
				}
				if d := send(who, "192.0.2.1", 200, 10); d != 0 {
					t.Errorf("a good request after %d waited %s", code, d)
				}
			}
			send("", "192.0.2.7", 401, refusalBurst)
			if d := send("", "192.0.2.8", 401, 1); d != 0 {
				t.Errorf("another client of the proxy waited %s", d)
			}
			if d := send("", "192.0.2.7", 401, 1); d == 0 {
				t.Error("a client of the proxy did not wait")
			}
		})
	}
}

// TestServerDelaysOpenRequests: requests that need no identity wait above a rate of their address, unless
// their connection has shown one, or was taken over.
func TestServerDelaysOpenRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conns := NewConns(ConnOptions{MaxOpen: 100})
		srv := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/hijack" {
				w.(*statusWriter).isHijacked = true
			}
		}), nil)
		send := func(conn *Conn, path, client string, n int) time.Duration {
			start := time.Now()
			for range n {
				r := httptest.NewRequest("GET", path, nil).WithContext(context.WithValue(t.Context(), connKey{}, conn))
				r.RemoteAddr = client + ":1000"
				srv.Handler.ServeHTTP(httptest.NewRecorder(), r)
			}
			return time.Since(start)
		}
		open, known, agent := &Conn{conns: conns, stranger: &stranger{}}, &Conn{conns: conns}, &Conn{conns: conns, stranger: &stranger{}}
		agent.agent.Store(&Identity{"t", "ann"})
		if d := send(open, "/", "192.0.2.1", openRequestBurst); d != 0 {
			t.Errorf("a burst waited %s", d)
		}
		if d := send(open, "/", "192.0.2.1", openRequestRate); d != time.Second {
			t.Errorf("above the rate: %s", d)
		}
		for name, d := range map[string]time.Duration{
			"another address": send(open, "/", "192.0.2.2", openRequestBurst), "a known client": send(known, "/", "192.0.2.1", 1000),
			"an agent": send(agent, "/", "192.0.2.1", 1000), "a link": send(open, "/hijack", "192.0.2.1", 1000),
		} {
			if d != 0 {
				t.Errorf("%s waited %s", name, d)
			}
		}
	})
}

// TestServerDelaysNoUncounted: a server without Conns delays nothing.
func TestServerDelaysNoUncounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, start := NewServer(http.NotFoundHandler(), nil), time.Now()
		for range 2 * refusalBurst {
			srv.Handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
		}
		if time.Since(start) != 0 {
			t.Error("it waited")
		}
	})
}

// TestAuthenticateAllocates: a further request of an identity allocates nothing.
func TestAuthenticateAllocates(t *testing.T) {
	conn := &Conn{conns: NewConns(ConnOptions{MaxOpen: 100})}
	id := Identity{"t", "ann"}
	if n := testing.AllocsPerRun(100, func() {
		if conn.Authenticate(id) != nil || conn.current == nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
