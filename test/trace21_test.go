package test

import (
	"context"
	"crypto/ed25519"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/enrollment"
	"agentctl/handlers"
	"agentctl/relay/auth"
	"agentctl/transport/clock"
	"agentctl/transport/link"
)

// joinedBoard is a board with a key, whose token is bound to it.
type joinedBoard struct {
	key   ed25519.PrivateKey
	node  string
	token string
}

const traceInstance = "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"

// join makes a board with an invite of the relay.
func (r *testRelay) join() *joinedBoard {
	r.t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		r.t.Fatal(err)
	}
	store := r.relay.Store()
	_, code, err := store.CreateInvite(context.Background(), auth.InviteRequest{Class: "board"})
	if err != nil {
		r.t.Fatal(err)
	}
	nonce := store.Nonce()
	e, err := store.Enroll(context.Background(), &enrollment.EnrollRequest{Nonce: nonce, Code: code, InstanceID: traceInstance, AgentVersion: "v1.2.3",
		PublicKey: enrollment.EncodeKey(key.Public().(ed25519.PublicKey)), Proof: enrollment.Sign(key, enrollment.EnrollMessage(nonce, code, traceInstance))})
	if err != nil {
		r.t.Fatal(err)
	}
	return &joinedBoard{key, e.Subject, e.Token}
}

func (b *joinedBoard) sign(nonce, token string) (string, error) {
	return enrollment.Sign(b.key, enrollment.LinkMessage(nonce, b.node, token)), nil
}

// pingRecorder is a recorder that keeps the relay's pings as well.
type pingRecorder struct{ recorder }

func (r pingRecorder) OnPing(fn func(ping bool, payload []byte)) {
	r.Conn.OnPing(func(ping bool, payload []byte) {
		if ping {
			r.add("relay ping", string(payload))
		}
		fn(ping, payload)
	})
}

// traceClient is a board with the echo tool on v2.1, whose frames are recorded.
func traceClient(t testing.TB, opt link.ClientOptions, dial func(ctx context.Context) (link.Conn, error)) (frames func() []traceEntry) {
	t.Helper()
	var mu sync.Mutex
	var parts []traceEntry
	opt.Clock = clock.New(time.Time{}, nil)
	mux, err := handlers.New(handlers.Options{}, handlers.NewEcho(opt.Clock.NowMS))
	if err != nil {
		t.Fatal(err)
	}
	opt.Version, opt.InstanceID, opt.Handler = "v1.2.3", traceInstance, mux
	opt.Dial = func(ctx context.Context) (link.Conn, error) {
		conn, err := dial(ctx)
		if err != nil {
			return nil, err
		}
		return pingRecorder{recorder{conn, &mu, &parts}}, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	client, done := link.NewClient(opt), make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() []traceEntry {
		mu.Lock()
		defer mu.Unlock()
		list := parts
		parts = nil
		return list
	}
}

// collect waits until n frames of that name have come, and returns all that came.
func collect(t *testing.T, frames func() []traceEntry, name string, n int) (all []traceEntry) {
	t.Helper()
	eventually(t, name, func() bool {
		all = append(all, frames()...)
		count := 0
		for _, e := range all {
			if e.name == name {
				count++
			}
		}
		return count >= n
	})
	return all
}

// blackhole is a TCP proxy in front of a relay that can lose what it is given.
type blackhole struct {
	ln           net.Listener
	wg           sync.WaitGroup
	loseToRelay  atomic.Bool
	loseToDevice atomic.Bool
	lostToDevice atomic.Int64 // bytes
	mu           sync.Mutex
	conns        []net.Conn
}

func newBlackhole(t *testing.T, target string) *blackhole {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &blackhole{ln: ln}
	b.wg.Go(func() {
		for {
			device, err := ln.Accept()
			if err != nil {
				return
			}
			relay, err := net.Dial("tcp", target)
			if err != nil {
				_ = device.Close()
				continue
			}
			b.mu.Lock()
			b.conns = append(b.conns, device, relay)
			b.mu.Unlock()
			b.wg.Go(func() { b.pump(relay, device, &b.loseToRelay, new(atomic.Int64)) })
			b.wg.Go(func() { b.pump(device, relay, &b.loseToDevice, &b.lostToDevice) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		b.cut()
		b.wg.Wait()
	})
	return b
}

func (b *blackhole) pump(to, from net.Conn, lose *atomic.Bool, lost *atomic.Int64) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if lose.Load() {
			lost.Add(int64(n))
		} else if n > 0 {
			_, _ = to.Write(buf[:n])
		}
		if err != nil {
			_ = to.Close()
			_ = from.Close()
			return
		}
	}
}

// cut ends all connections, and nothing is lost afterwards.
func (b *blackhole) cut() {
	b.mu.Lock()
	for _, c := range b.conns {
		_ = c.Close()
	}
	b.conns = nil
	b.mu.Unlock()
	b.loseToRelay.Store(false)
	b.loseToDevice.Store(false)
}

// The device link of v2.1 between the real relay and the real device: the handshake of a board
// whose token is bound to its key, a command with its expiry, and a session that is resumed on
// a second link, with one command whose answer was lost and one that was lost itself.
func TestTraceV21(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	proxy := newBlackhole(t, r.addr)
	b := r.join()
	ready := make(chan bool, 2)
	frames := traceClient(t, link.ClientOptions{Token: func() (string, error) { return b.token, nil }, Sign: b.sign, OnReady: func(link.AuthOK) { ready <- true }},
		func(ctx context.Context) (link.Conn, error) {
			return link.Dial(ctx, "http://"+proxy.ln.Addr().String(), link.DialOptions{})
		})
	<-ready
	compareGolden(t, "handshake21", collect(t, frames, "relay announce_ack", 1))

	tool := "sysecho." + b.node + ".echo.invoke"
	request, response, s := r.exchange(tool, `{"message":"ping"}`, "application/json")
	body, err := io.ReadAll(io.LimitReader(s.resp.Body, s.resp.ContentLength))
	if err != nil {
		t.Fatal(err)
	}
	parts := append([]traceEntry{{"agent request", request}}, frames()...)
	compareGolden(t, "echo21", append(parts, traceEntry{"relay response", response + "\n" + string(body)}))

	answers := make(chan string, 2)
	call := func(message string) {
		a := r.call(tool, `{"message":"`+message+`"}`)
		answers <- string(a.body)
	}
	proxy.loseToRelay.Store(true)
	go call("its answer is lost")
	parts = collect(t, frames, "device cmd_ack", 1)
	proxy.loseToDevice.Store(true)
	go call("it is lost itself")
	eventually(t, "the second command is lost", func() bool { return proxy.lostToDevice.Load() > 100 })
	proxy.cut()
	<-ready
	resumed := collect(t, frames, "device cmd_ack", 3) // that of the echo before as well
	got := []string{<-answers, <-answers}
	slices.Sort(got)
	if !strings.Contains(got[0], "it is lost itself") || !strings.Contains(got[1], "its answer is lost") {
		t.Errorf("the callers got %q", got)
	}
	// Both ends send at once after announce_ack.
	after := slices.IndexFunc(resumed, func(e traceEntry) bool { return e.name == "relay announce_ack" }) + 1
	slices.SortStableFunc(resumed[after:], func(a, b traceEntry) int { return -strings.Compare(a.name[:6], b.name[:6]) })
	compareGolden(t, "resume21", append(parts, resumed...))
}

// A command that a link has held for longer than its caller waits: the device does not start it.
func TestTraceExpired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)))
		links := make(chan link.Conn, 1)
		frames := traceClient(t, link.ClientOptions{Token: func() (string, error) { return "a.b.c", nil }}, func(context.Context) (link.Conn, error) {
			device, relay := link.Pipe21()
			links <- relay
			return device, nil
		})
		const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"
		s, _, err := link.Accept(t.Context(), <-links, link.AcceptOptions{
			Authenticate: func(context.Context, *link.Auth) (*link.Grant, error) {
				return &link.Grant{NodeID: node, Tenant: "default"}, nil
			},
			ReconnectSpreadMS: func() int64 { return 1000 },
		})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- s.Run(t.Context(), ignoreAll{}) }()
		synctest.Wait()
		frames()
		expiry, err := s.Stamp(time.Now().Add(5 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(17 * time.Second)
		_ = s.Send(link.AppendCmd(nil, link.NewID(), "sysecho."+node+".echo.invoke", []byte(`{"message":"ping"}`), 0, "", expiry))
		synctest.Wait()
		compareGolden(t, "expired21", frames())
		s.Close(link.CloseNormal, "normal")
		<-ended
	})
}

// ignoreAll is a link.SessionHandler.
type ignoreAll struct{}

func (ignoreAll) OnAnnounce(*link.Manifest)      {}
func (ignoreAll) OnAck(string, link.CmdAck) bool { return true }
func (ignoreAll) OnMetric(link.Metric) error     { return nil }
func (ignoreAll) OnStreamEnd(*link.StreamEnd)    {}
func (ignoreAll) OnEvent(*link.Event)            {}
