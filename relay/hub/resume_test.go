package hub

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// boardSim is a real link.Client of v2.1 over an in-memory network that the test breaks.
type boardSim struct {
	*link.Client
	stop context.CancelFunc
	done chan error

	mu    sync.Mutex
	hub   *Hub
	down  bool                  // dials fail
	drop  func(msg []byte) bool // messages of the device that get lost; nil: none
	conns []link.Conn           // both ends of the newest link
	runs  map[string]int        // echoes by message
	delay func() time.Duration
	dials int
}

// simHandler echoes after a while and counts.
type simHandler struct{ b *boardSim }

func (h simHandler) Capabilities() []manifest.Capability {
	return []manifest.Capability{manifest.Echo(), manifest.Metrics()}
}

func (h simHandler) Call(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, link.StreamFunc, error) {
	if tool.Verb != manifest.VerbInvoke {
		return handler{}.Call(ctx, tool, args)
	}
	h.b.mu.Lock()
	h.b.runs[string(args)]++
	wait := h.b.delay()
	h.b.mu.Unlock()
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	message := strings.TrimSuffix(strings.TrimPrefix(string(args), `{"message":"`), `"}`)
	return []byte(echoed(tool.NodeID, message)), nil, nil
}

// dropConn loses messages of the device.
type dropConn struct {
	link.Conn
	b *boardSim
}

func (c dropConn) Write(msg []byte) error {
	c.b.mu.Lock()
	lost := c.b.drop != nil && c.b.drop(msg)
	c.b.mu.Unlock()
	if lost {
		return nil
	}
	return c.Conn.Write(msg)
}

// startBoard starts a board whose link is ready when it returns.
func (r *testHub) startBoard(node, instance string) *boardSim {
	b := &boardSim{hub: r.hub, done: make(chan error, 1), runs: make(map[string]int), delay: func() time.Duration { return 0 }}
	b.Client = link.NewClient(link.ClientOptions{
		Dial: func(context.Context) (link.Conn, error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.dials++
			if b.down || b.hub == nil {
				return nil, errors.New("connection refused")
			}
			dev, rel := link.Pipe21()
			b.conns = []link.Conn{dev, rel}
			b.hub.Attach(rel, netip.Addr{})
			return dropConn{dev, b}, nil
		},
		Token: func() (string, error) { return node, nil }, InstanceID: instance, Handler: simHandler{b},
	})
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = cancel
	go func() { b.done <- b.Run(ctx) }()
	synctest.Wait()
	return b
}

// cut breaks the link without a close frame.
func (b *boardSim) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.conns[0].Close(1006, "")
}

func (b *boardSim) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func (b *boardSim) end() { b.stop(); <-b.done }

// TestBreakAfterCommand: a thousand echoes whose link breaks while they are under way all end with
// their own result, and no echo runs twice. With AGENTCTL_SLOW=1 they are 10,000.
func TestBreakAfterCommand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.startBoard(nodeA, instance1)
		rng := rand.New(rand.NewPCG(1, 2))
		b.set(func() { b.delay = func() time.Duration { return time.Duration(rng.IntN(100)) * time.Millisecond } })
		n := r.node(nodeA)
		session := n.session.Load().ID
		tool := r.tool(n, "echo.invoke")
		const parallel = 50
		calls := 1000
		if os.Getenv("AGENTCTL_SLOW") != "" {
			calls = 10_000
		}
		for i := 0; i < calls; i += parallel {
			var wg sync.WaitGroup
			for j := range parallel {
				wg.Go(func() {
					time.Sleep(time.Duration(j) * time.Millisecond)
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					defer cancel()
					message := fmt.Sprint("message ", i+j)
					result, err := n.Call(ctx, tool, []byte(`{"message":"`+message+`"}`), CallOptions{})
					if err != nil || !strings.Contains(string(result), `"`+message+`"`) {
						t.Errorf("%s: %s, %v", message, result, err)
					}
				})
			}
			time.Sleep(time.Duration(20+i%40) * time.Millisecond)
			b.cut()
			wg.Wait()
			time.Sleep(time.Minute) // a link that was stable, for the board's back-off
		}
		if r.node(nodeA) != n || n.session.Load().ID != session {
			t.Error("the session was not resumed")
		}
		for message, runs := range b.runs {
			if runs != 1 {
				t.Errorf("%s ran %d times", message, runs)
			}
		}
		if s := r.hub.Stats(); len(b.runs) != calls || s.Resumed != uint64(calls/parallel) || s.LateAcks+s.UnsolicitedAcks != 0 {
			t.Errorf("%d ran, stats %+v", len(b.runs), s)
		}
		b.end()
		r.end()
	})
}

// TestQueueDuringBreak: a command that comes while the link is down waits for it, for 5 s
// after the loss; later ones fail at once, as not sent, and so do those of a board that is
// never back.
func TestQueueDuringBreak(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.startBoard(nodeA, instance1)
		n := r.node(nodeA)
		r.takeLines(&r.lifecycle)
		b.set(func() { b.down = true })
		b.cut()
		synctest.Wait()
		if r.hub.IsOnline(nodeA) {
			t.Error("online without a link")
		}
		time.Sleep(time.Second)
		waiting := r.call(n, "waits")
		time.Sleep(time.Second)
		b.set(func() { b.down = false })
		b.Wake() // its back-off is random
		if a := <-waiting; a.err != nil || a.took < time.Second {
			t.Errorf("got %+v", a)
		}
		if got := r.takeLines(&r.lifecycle); got != "lost 1, known 3, ready 1" {
			t.Errorf("surface: %s", got)
		}

		b.set(func() { b.down = true })
		b.cut()
		time.Sleep(4 * time.Second)
		waiting = r.call(n, "waits in vain")
		time.Sleep(2 * time.Second)
		a := <-r.call(n, "too late")
		r.wantOutcome(a.err, manifest.NodeOffline, manifest.NotSent)
		if a.took != 0 {
			t.Errorf("it took %v", a.took)
		}
		a = <-waiting
		r.wantOutcome(a.err, manifest.NodeOffline, manifest.NotSent)
		if got := r.takeLines(&r.lifecycle); got != "lost 1, gone 1" {
			t.Errorf("surface: %s", got)
		}
		b.set(func() { b.down = false })
		time.Sleep(2 * time.Minute)
		if a := <-r.call(r.node(nodeA), "works"); a.err != nil {
			t.Errorf("got %+v", a)
		}
		if s := r.hub.Stats(); s.Lost != 0 {
			t.Errorf("stats %+v", s)
		}
		b.end()
		r.end()
	})
}

// TestRestartInDoubt: a board that restarts cannot resume. The call that was written ends as
// unknown, the one that waited as not sent, once each, and a late ack is audited as such.
func TestRestartInDoubt(t *testing.T) {
	for _, subprotocol := range []string{link.Subprotocol, link.Subprotocol21} {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			b := r.attachOn(subprotocol, nodeA, instance1, link.Auth{})
			n := r.node(nodeA)
			written := r.call(n, "written")
			id, c := b.cmd()
			_ = b.conn.Close(1006, "")
			synctest.Wait()
			var queued chan callReturn
			if subprotocol == link.Subprotocol21 {
				queued = r.call(n, "queued")
			}
			r.takeLines(&r.events)
			again := r.attachOn(subprotocol, nodeA, instance1, link.Auth{})
			a := <-written
			r.wantOutcome(a.err, manifest.NodeOffline, manifest.OutcomeUnknown)
			if queued != nil {
				a := <-queued
				r.wantOutcome(a.err, manifest.NodeOffline, manifest.NotSent)
			}
			again.echo(nodeA, id, c)
			r.wantEvents("device_connect acme y, late_ack acme y E_NODE_OFFLINE echo.invoke 1")
			if r.node(nodeA) == n {
				t.Error("the session goes on")
			}
			r.end()
		})
	}
}

// brokenSession is the session of a board whose link broke while a call was in flight.
type brokenSession struct {
	*testHub
	n     *Node
	board *board // on the link that broke
	call  chan callReturn
	cmdID string
	cmd   link.Cmd
	id    string    // of the session
	auth  link.Auth // asks for it
}

// breakSession links a board, calls it, and closes its link with a code. With code 0 the link stays
// half-open: the relay does not know that it broke.
func breakSession(t *testing.T, code int) *brokenSession {
	t.Helper()
	r := newTestHub(t)
	boot := link.NewID()
	b := r.attachOn(link.Subprotocol21, nodeA, instance1, link.Auth{BootID: boot})
	s := &brokenSession{testHub: r, n: r.node(nodeA), board: b}
	s.id = s.n.session.Load().ID
	s.auth = link.Auth{Token: nodeA, InstanceID: instance1, BootID: boot, Resume: &link.Resume{SessionID: s.id}}
	s.call = r.call(s.n, "ping")
	s.cmdID, s.cmd = b.cmd()
	if code != 0 {
		_ = b.conn.Close(code, "")
		synctest.Wait() // the relay has noticed
	}
	return s
}

// reconnect opens a link with s.auth, and completes its handshake.
func (s *brokenSession) reconnect() (*board, link.AuthOK) {
	s.t.Helper()
	b := s.dialOn(link.Subprotocol21)
	ok := b.authenticateWith(s.auth)
	b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
	b.next(link.TypeAnnounceAck)
	synctest.Wait()
	return b, ok
}

// answer answers the call on a link, and checks that its caller gets that.
func (s *brokenSession) answer(b *board) {
	s.t.Helper()
	b.echo(nodeA, s.cmdID, s.cmd)
	if a := <-s.call; a.err != nil || !strings.Contains(a.result, "ping") {
		s.t.Errorf("the call ended with %+v, want its echo", a)
	}
}

// TestMayResume: a session may be resumed for link.ResumeTTL after its link broke, by the process that
// had it, unless the device ended it.
func TestMayResume(t *testing.T) {
	const broke = 1006 // without a close frame
	tests := []struct {
		name    string
		code    int           // with which the link was closed
		after   time.Duration // that the device is away
		change  func(a *link.Auth)
		resumed bool
	}{
		{name: "the link broke", code: broke, resumed: true},
		{name: "a proxy went away", code: link.CloseGoingAway, resumed: true},
		{name: "a proxy restarted", code: link.CloseServiceRestart, resumed: true},
		{name: "closed without a code", code: 1005, resumed: true},
		{name: "closed by the device", code: link.CloseNormal},
		{name: "just in time", code: broke, after: link.ResumeTTL - time.Second, resumed: true},
		{name: "too late", code: broke, after: link.ResumeTTL + time.Second},
		{name: "another boot", code: broke, change: func(a *link.Auth) { a.BootID = link.NewID() }},
		{name: "another installation", code: broke, change: func(a *link.Auth) { a.InstanceID = instance2 }},
		{name: "another session", code: broke, change: func(a *link.Auth) { a.Resume.SessionID = link.NewID() }},
		{name: "another node", code: broke, change: func(a *link.Auth) { a.Token = nodeB }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := breakSession(t, tt.code)
				time.Sleep(tt.after)
				if tt.change != nil {
					tt.change(&s.auth)
				}
				_, ok := s.reconnect()
				if ok.Resumed != tt.resumed || (ok.SessionID == s.id) != tt.resumed {
					t.Errorf("auth_ok %+v, want resumed %v (session %s)", ok, tt.resumed, s.id)
				}
				if !tt.resumed || tt.after > 0 { // else the device may still answer
					if a := <-s.call; a.err == nil || a.took > 5*time.Second {
						t.Errorf("the call ended with %+v, want an error within 5 s", a)
					}
				}
				s.end()
			})
		})
	}
}

// TestCommandOfResumedSession: the device answers a command on the new link. The relay writes the
// command again, under its id, if the device has not received it.
func TestCommandOfResumedSession(t *testing.T) {
	t.Run("received", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := breakSession(t, 1006)
			s.auth.Resume.Seen = []link.ResumedCommand{{MsgID: s.cmdID, State: link.SeenRunning}}
			b, _ := s.reconnect()
			b.expectNothing()
			s.answer(b)
			s.end()
		})
	})
	t.Run("not received", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := breakSession(t, 1006)
			b, _ := s.reconnect()
			if id, c := b.cmd(); id != s.cmdID || c.Tool != s.cmd.Tool || c.IssuedAtMS == 0 {
				t.Errorf("the relay wrote %s %+v, want %s %+v again", id, c, s.cmdID, s.cmd)
			}
			s.answer(b)
			s.end()
		})
	})
}

// TestResumeOfHalfOpenLink: a device that resumes replaces the link that still looks alive to the
// relay.
func TestResumeOfHalfOpenLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := breakSession(t, 0)
		s.auth.Resume.Seen = []link.ResumedCommand{{MsgID: s.cmdID, State: link.SeenRunning}}
		b, ok := s.reconnect()
		if !ok.Resumed {
			t.Errorf("auth_ok %+v, want resumed", ok)
		}
		if code := s.board.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("the half-open link was closed with %d, want %d", code, link.CloseSuperseded)
		}
		s.answer(b)
		s.end()
	})
}

// TestResumeFails: a handshake that resumes and breaks before announce leaves the session to the
// next one. Of two at a time the newer one gets it.
func TestResumeFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := breakSession(t, 1006)
		// authenticate opens a link that has not announced yet.
		authenticate := func(which string) *board {
			b := s.dialOn(link.Subprotocol21)
			if !b.authenticateWith(s.auth).Resumed {
				t.Errorf("the %s handshake does not resume", which)
			}
			return b
		}
		_ = authenticate("first").conn.Close(1006, "")
		time.Sleep(time.Second)
		older := authenticate("second")
		newer := authenticate("third")
		if code := older.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("the older handshake was closed with %d, want %d", code, link.CloseSuperseded)
		}
		newer.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
		newer.next(link.TypeAnnounceAck)
		if id, _ := newer.cmd(); id != s.cmdID {
			t.Errorf("the relay wrote command %s, want %s again", id, s.cmdID)
		}
		s.answer(newer)
		s.end()
	})
}

// TestStreamsEndWithTheirLink: streams, and subscriptions that wait for their answer, are not
// resumed.
func TestStreamsEndWithTheirLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.startBoard(nodeA, instance1)
		n := r.node(nodeA)
		reader, err := r.subscribe(t.Context(), n, 1000)
		if err != nil {
			t.Fatal(err)
		}
		b.cut()
		synctest.Wait()
		if reader.Err() != ErrOffline {
			t.Errorf("the reader ended with %v", reader.Err())
		}
		reader.Close()
		again, err := r.subscribe(t.Context(), n, 1000) // waits for the link
		if err != nil {
			t.Fatal(err)
		}
		<-again.Ready()
		again.Close()
		synctest.Wait()
		if s := r.hub.Stats(); s.Streams != 0 || s.Resumed != 1 {
			t.Errorf("stats %+v", s)
		}
		b.end()
		r.end()
	})
}

// TestLostIsBounded: with too many lost sessions the next one ends at once.
func TestLostIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.hub.lostLimit = 1
		a, b := r.startBoard(nodeA, instance1), r.startBoard(nodeB, instance2)
		n := r.node(nodeB)
		for _, board := range []*boardSim{a, b} {
			board.set(func() { board.down = true })
			board.cut()
			synctest.Wait()
		}
		if s := r.hub.Stats(); s.Lost != 1 {
			t.Errorf("stats %+v", s)
		}
		got := <-r.call(n, "ping")
		r.wantOutcome(got.err, manifest.NodeOffline, manifest.NotSent)
		a.end()
		b.end()
		r.end()
	})
}

// TestGoneAfterResume: many boards are lost at once, and one resumes its session while others are
// being reported as gone. It is not reported after that.
func TestGoneAfterResume(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		auths, sessions := map[string]link.Auth{}, map[string]string{}
		for _, node := range []string{nodeA, nodeB} {
			auths[node] = authOf(instance1)
			r.attachOn(v21, node, instance1, auths[node])
			sessions[node] = r.node(node).session.Load().ID
		}
		reported, release := make(chan string, 2), make(chan struct{})
		note := r.hub.opt.OnGone
		r.hub.opt.OnGone = func(n *Node) {
			note(n)
			reported <- n.ID()
			<-release
		}
		r.dropAll()
		other := map[string]string{nodeA: nodeB, nodeB: nodeA}[<-reported]
		b, a := r.dialOn(v21), auths[other]
		a.Token, a.InstanceID, a.Resume = other, instance1, &link.Resume{SessionID: sessions[other]}
		if ok := b.authenticateWith(a); !ok.Resumed {
			t.Fatal("not resumed")
		}
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
		for !r.hub.IsOnline(other) {
			time.Sleep(0) // not synctest.Wait: the handshake waits for a mutex
		}
		close(release)
		b.next(link.TypeAnnounceAck)
		synctest.Wait()
		if len(reported) != 0 || r.listed[other] == nil {
			t.Errorf("%d more nodes are gone; listed: %v", len(reported), r.listed[other])
		}
		r.end()
	})
}

// TestLateEndOfLink: the session is resumed before the goroutine that reads the old link has
// handled its end.
func TestLateEndOfLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		a := authOf(instance1)
		r.attachOn(v21, nodeA, instance1, a)
		n := r.node(nodeA)
		old := n.session.Load()
		call := r.call(n, "in doubt")
		r.hub.mu.Lock()
		r.hub.unlinkLocked(n, true)
		r.hub.mu.Unlock()
		a.Resume = &link.Resume{SessionID: old.ID}
		b := r.attachOn(v21, nodeA, instance1, a)
		n.lose(old)
		old.Close(link.CloseGoingAway, "gone")
		for range 2 {
			id, c := b.cmd()
			b.echo(nodeA, id, c)
			if res := <-call; res.err != nil || res.took != 0 {
				t.Errorf("%v after %v", res.err, res.took)
			}
			call = r.call(n, "on the new link")
		}
		r.end()
	})
}
