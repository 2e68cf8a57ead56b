package edge

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// connServer serves requests on a counted listener. A request to /known marks its connection, and
// one to /as/NAME authenticates as NAME.
func connServer(t *testing.T, conns *Conns) (addr string) {
	t.Helper()
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, conns.Listener(ln, true))
}

// serveOn is connServer on a listener.
func serveOn(t *testing.T, ln net.Listener) (addr string) {
	t.Helper()
	srv := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, ok := strings.CutPrefix(r.URL.Path, "/as/"); ok {
			if err := ConnOf(r).Authenticate(Identity{"t", name}); err != nil {
				w.WriteHeader(http.StatusTooManyRequests)
			}
		}
		if r.URL.Path == "/known" {
			ConnOf(r).MarkKnown()
		}
		if ConnOf(r).IsLastRequest() {
			w.Header().Set("Connection", "close")
		}
	}), nil)
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close(); <-done })
	return ln.Addr().String()
}

// from dials from a loopback address and sends a request, if path is given.
func from(t *testing.T, addr, local, path string) (*bufio.Reader, net.Conn) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}, Timeout: 5 * time.Second}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if path != "" {
		_, _ = io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	return bufio.NewReader(c), c
}

func statusOf(t *testing.T, in *bufio.Reader) (int, http.Header) {
	t.Helper()
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	if resp.Close {
		resp.Header.Set("Connection", "close") // ReadResponse has removed it
	}
	return resp.StatusCode, resp.Header
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so: " + what)
		}
	}
}

// TestConnsStrangers: an address holds a bounded number of connections without a token, idle
// ones included; others are not affected, and a token frees the place.
func TestConnsStrangers(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 48}) // 12 strangers: an address gets a quarter of what is free
	addr := connServer(t, conns)
	in, first := from(t, addr, "127.0.0.2", "/")
	if status, _ := statusOf(t, in); status != 200 {
		t.Fatalf("the first connection: %d", status)
	}
	from(t, addr, "127.0.0.2", "")
	waitFor(t, "two strangers", func() bool { return conns.Strangers().InUse == 2 })
	in, _ = from(t, addr, "127.0.0.2", "/")
	if status, h := statusOf(t, in); status != http.StatusTooManyRequests || h.Get("Retry-After") != "1" || h.Get("Connection") != "close" {
		t.Errorf("the third: %d %v", status, h)
	}
	in, _ = from(t, addr, "127.0.0.3", "/as/a")
	if status, _ := statusOf(t, in); status != 200 || conns.Strangers().InUse != 2 || conns.Agents().InUse != 1 {
		t.Errorf("another address: %d, %+v, %+v", status, conns.Strangers(), conns.Agents())
	}
	_, _ = io.WriteString(first, "GET /known HTTP/1.1\r\nHost: x\r\n\r\n")
	waitFor(t, "a stranger is known", func() bool { return conns.Strangers().InUse == 1 })
	in, _ = from(t, addr, "127.0.0.2", "/")
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("the place of a connection that showed a token: %d", status)
	}
	if st := conns.Strangers(); st.Limit != 15 || st.Refused != 1 {
		t.Errorf("stats %+v", st)
	}
}

// TestConnsReplaceOldest: when silent connections of many addresses have taken all places, a new
// one takes that of the oldest.
func TestConnsReplaceOldest(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 32}) // 8 strangers
	addr := connServer(t, conns)
	silent := make([]net.Conn, 8)
	for i := range silent {
		_, silent[i] = from(t, addr, fmt.Sprintf("127.0.0.%d", 10+i), "")
	}
	waitFor(t, "all places are taken", func() bool { return conns.Strangers().InUse == 8 })
	in, _ := from(t, addr, "127.0.0.2", "/known")
	if status, _ := statusOf(t, in); status != http.StatusTooManyRequests {
		t.Errorf("while all are new: %d", status)
	}
	conns.mu.Lock()
	for e := conns.order.Front(); e != nil; e = e.Next() {
		e.Value.(*Conn).stranger.since = time.Now().Add(-2 * minStrangerAge)
	}
	conns.mu.Unlock()
	in, _ = from(t, addr, "127.0.0.2", "/known")
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("when they are old: %d", status)
	}
	if _, err := silent[0].Read(make([]byte, 1)); err == nil {
		t.Error("the oldest is still open")
	}
	conns.mu.Lock()
	strangers, inOrder := conns.strangers, conns.order.Len()
	conns.mu.Unlock()
	if strangers != 7 || inOrder != 7 {
		t.Errorf("%d strangers, %d in order", strangers, inOrder)
	}
}

// TestConnsOfKnownAddress: an address from which a token was shown has a place, although silent
// connections of others have taken all.
func TestConnsOfKnownAddress(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 32}) // 8 strangers, and 2 of known addresses
	addr := connServer(t, conns)
	in, _ := from(t, addr, "127.0.0.2", "/as/a")
	statusOf(t, in)
	for i := range 8 {
		from(t, addr, fmt.Sprintf("127.0.0.%d", 10+i), "")
	}
	waitFor(t, "all places are taken", func() bool { return conns.Strangers().InUse == 8 })
	for local, want := range map[string]int{"127.0.0.2": 200, "127.0.0.3": http.StatusTooManyRequests} {
		in, _ := from(t, addr, local, "/")
		if status, _ := statusOf(t, in); status != want {
			t.Errorf("%s: %d, want %d", local, status, want)
		}
	}
	if st := conns.Strangers(); st.InUse != 9 {
		t.Errorf("%+v", st)
	}
}

// TestConnsOfIdentity: an identity holds at most half of the agents' connections, keeps those
// that it has, and a closed one frees its place.
func TestConnsOfIdentity(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 64}) // 32 agents' connections
	addr := connServer(t, conns)
	var open []net.Conn
	for i := range 16 {
		in, c := from(t, addr, "127.0.0.2", "/as/a")
		if status, _ := statusOf(t, in); status != 200 {
			t.Fatalf("connection %d: %d", i, status)
		}
		open = append(open, c)
	}
	in, _ := from(t, addr, "127.0.0.2", "/as/a")
	if status, _ := statusOf(t, in); status != http.StatusTooManyRequests {
		t.Errorf("one more: %d", status)
	}
	in, _ = from(t, addr, "127.0.0.2", "/as/b")
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("another identity: %d", status)
	}
	_ = open[0].Close()
	waitFor(t, "a place is free", func() bool { return conns.Agents().InUse == 16 })
	in, _ = from(t, addr, "127.0.0.2", "/as/a")
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("after one has closed: %d", status)
	}
}

// TestConnsMaxOpen: known connections leave files for the rest of the process.
func TestConnsMaxOpen(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 8})
	addr := connServer(t, conns)
	for range 8 {
		in, _ := from(t, addr, "127.0.0.2", "/known")
		if status, _ := statusOf(t, in); status != 200 {
			t.Fatalf("status %d", status)
		}
	}
	in, _ := from(t, addr, "127.0.0.3", "/known")
	if status, _ := statusOf(t, in); status != http.StatusTooManyRequests {
		t.Errorf("one more than may be open: %d", status)
	}
}

// TestConnsRate: an address whose connections end without a token is refused before it is served when
// there were too many; connections that showed one cost nothing.
func TestConnsRate(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 1024})
	addr := connServer(t, conns)
	for range 10 {
		in, c := from(t, addr, "127.0.0.2", "/known")
		statusOf(t, in)
		_ = c.Close()
	}
	key := AddressKey(parseAddr("127.0.0.2")).String()
	bucket := conns.rates.Bucket(key, strangerRate, strangerBurst, time.Now())
	if n := bucket.Tokens(); n < strangerBurst {
		t.Errorf("known connections cost %v", strangerBurst-n)
	}
	_, c := from(t, addr, "127.0.0.2", "")
	_ = c.Close()
	waitFor(t, "a stranger's connection has cost", func() bool { return conns.Strangers().InUse == 0 })
	conns.rates.Charge(key, strangerBurst+strangerRate, time.Now())
	in, _ := from(t, addr, "127.0.0.2", "/")
	if status, _ := statusOf(t, in); status != http.StatusTooManyRequests {
		t.Errorf("above the rate: %d", status)
	}
	in, _ = from(t, addr, "127.0.0.3", "/")
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("another address: %d", status)
	}
}

// TestConnsOfProxy: the connections of a trusted proxy are not counted by address.
func TestConnsOfProxy(t *testing.T) {
	proxies, _ := ParseTrustedProxies([]string{"127.0.0.2"})
	conns := NewConns(ConnOptions{MaxOpen: 32, Proxies: proxies})
	addr := connServer(t, conns)
	for i := range 16 {
		in, _ := from(t, addr, "127.0.0.2", "/")
		if status, _ := statusOf(t, in); status != 200 {
			t.Fatalf("connection %d of the proxy: %d", i, status)
		}
	}
	if st := conns.Strangers(); st.InUse != 0 {
		t.Errorf("%+v", st)
	}
}

// TestUncounted: connections of other kinds pass, and a request on one belongs to nobody.
func TestUncounted(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	r, _ := http.NewRequestWithContext(WithConn(context.Background(), a), "GET", "/", nil)
	c := ConnOf(r)
	c.MarkKnown()
	if err := c.Authenticate(Identity{"t", "a"}); err != nil || c != nil {
		t.Errorf("%v, %v", c, err)
	}
}

// TestPaceTLS: handshakes of unknown addresses wait for their rate, and those of an address from
// which a token was shown do not.
func TestPaceTLS(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 1000})
	conns.tlsPace = rate.NewLimiter(0, 2) // two handshakes, then none
	site := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/known" {
			ConnOf(r).MarkKnown()
		}
	}))
	site.Config.ConnContext = WithConn
	site.Config.ErrorLog = log.New(io.Discard, "", 0)
	site.Listener = conns.Listener(site.Listener, false)
	site.TLS = conns.PaceTLS(&tls.Config{})
	pace := site.TLS.GetConfigForClient
	begun, ended := make(chan *Conn, 4), make(chan error, 4)
	site.TLS.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		begun <- connBelow(hello.Conn)
		c, err := pace(hello)
		ended <- err
		return c, err
	}
	site.StartTLS()
	defer site.Close()
	get := func(local, path string) error {
		roots := x509.NewCertPool()
		roots.AddCert(site.Certificate())
		tr := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots},
			DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}).DialContext}
		resp, err := (&http.Client{Transport: tr, Timeout: 20 * time.Second}).Get(site.URL + path)
		if err == nil {
			_ = resp.Body.Close()
		}
		return err
	}
	served := func(what, local, path string) {
		t.Helper()
		if err := get(local, path); err != nil {
			t.Fatal(what, err)
		}
		<-begun
		if err := <-ended; err != nil {
			t.Error(what, err)
		}
	}
	served("first:", "127.0.0.2", "/")
	served("second:", "127.0.0.3", "/known")
	var client sync.WaitGroup
	defer client.Wait()
	client.Go(func() {
		if err := get("127.0.0.2", "/"); err == nil {
			t.Error("an unknown address was served beyond the rate")
		}
	})
	unknown := <-begun
	waitFor(t, "the unknown address waits", func() bool {
		conns.mu.Lock()
		defer conns.mu.Unlock()
		return unknown.stranger == nil || unknown.stranger.cancel != nil || len(ended) > 0
	})
	_ = unknown.Close() // ends the wait
	if err := <-ended; err == nil {
		t.Error("the handshake of an unknown address did not wait")
	}
	served("a known address:", "127.0.0.3", "/")
}

// TestStrangerRequests: a connection ends after so many requests without a token, and serves any
// number with one.
func TestStrangerRequests(t *testing.T) {
	addr := connServer(t, NewConns(ConnOptions{MaxOpen: 100}))
	for path, want := range map[string]int{"/": maxStrangerRequests, "/as/ann": 5 * maxStrangerRequests, "/known": 5 * maxStrangerRequests} {
		in, c := from(t, addr, "127.0.0.1", path)
		served := 1
		for {
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("%s: %v after %d", path, err, served)
			}
			if resp.Close || served == 5*maxStrangerRequests {
				break
			}
			served++
			_, _ = io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n")
		}
		if served != want {
			t.Errorf("%s: %d requests were served, want %d", path, served, want)
		}
	}
}
