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
func (r *rig) startBoard(node, instance string) *boardSim {
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

// TestBreakAfterCommand: thousands of echoes whose link breaks while they are under way all end with
// their own result, and no echo runs twice. With AGENTCTL_SLOW=1 they are 10,000.
func TestBreakAfterCommand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t)
		b := r.startBoard(nodeA, instance1)
		rng := rand.New(rand.NewPCG(1, 2))
		b.set(func() { b.delay = func() time.Duration { return time.Duration(rng.IntN(100)) * time.Millisecond } })
		n := r.node(nodeA)
		session := n.session.Load().ID
		tool := r.tool(n, "echo.invoke")
		const parallel = 50
		calls := 2000
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
		r := newRig(t)
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
			r := newRig(t)
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

// TestResumeByHand: what may be resumed, frame by frame.
func TestResumeByHand(t *testing.T) {
	boot := link.NewID()
	tests := []struct {
		name    string
		change  func(a *link.Auth)
		seen    string // state in resume.seen; "" is not seen
		after   time.Duration
		code    int // with which the device closed
		resumed bool
	}{
		{name: "running", seen: link.SeenRunning, code: 1006, resumed: true},
		{name: "not received", code: 1006, resumed: true},
		{name: "half-open", code: 0, seen: link.SeenRunning, resumed: true},
		{name: "just in time", code: 1006, after: 29 * time.Second, resumed: true},
		{name: "too late", code: 1006, after: 31 * time.Second},
		{name: "other boot", code: 1006, change: func(a *link.Auth) { a.BootID = link.NewID() }},
		{name: "other instance", code: 1006, change: func(a *link.Auth) { a.InstanceID = instance2 }},
		{name: "other session", code: 1006, change: func(a *link.Auth) { a.Resume.SessionID = link.NewID() }},
		{name: "other node", code: 1006, change: func(a *link.Auth) { a.Token = nodeB }},
		{name: "a proxy goes away", code: link.CloseGoingAway, resumed: true},
		{name: "a proxy restarts", code: link.CloseServiceRestart, resumed: true},
		{name: "closed without a code", code: 1005, resumed: true},
		{name: "said goodbye", code: link.CloseNormal},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t)
				b := r.attachOn(link.Subprotocol21, nodeA, instance1, link.Auth{BootID: boot})
				n := r.node(nodeA)
				call := r.call(n, "ping")
				id, c := b.cmd()
				session := n.session.Load().ID
				if tt.code != 0 {
					_ = b.conn.Close(tt.code, "")
					synctest.Wait() // the relay has noticed
				}
				time.Sleep(tt.after)
				auth := link.Auth{BootID: boot, Resume: &link.Resume{SessionID: session}}
				if tt.seen != "" {
					auth.Resume.Seen = []link.ResumedCommand{{MsgID: id, State: tt.seen}}
				}
				auth.Token, auth.InstanceID = nodeA, instance1
				if tt.change != nil {
					tt.change(&auth)
				}
				again := r.dialOn(link.Subprotocol21)
				ok := again.authenticateWith(auth)
				if ok.Resumed != tt.resumed || tt.resumed != (ok.SessionID == session) {
					t.Fatalf("auth_ok %+v, want resumed %v", ok, tt.resumed)
				}
				again.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
				again.next(link.TypeAnnounceAck)
				synctest.Wait()
				if !tt.resumed || tt.after > 0 {
					a := <-call
					if a.err == nil || a.took > 5*time.Second {
						t.Errorf("got %+v", a)
					}
					r.end()
					return
				}
				if tt.seen == "" { // written again, under the same id
					if id2, c2 := again.cmd(); id2 != id || c2.Tool != c.Tool || c2.IssuedAtMS == 0 {
						t.Errorf("resent %s %+v, want %s", id2, c2, id)
					}
				} else {
					again.expectNothing()
				}
				again.echo(nodeA, id, c)
				if a := <-call; a.err != nil || !strings.Contains(a.result, "ping") {
					t.Errorf("got %+v", a)
				}
				if tt.code == 0 && b.waitClosed() != link.CloseSuperseded {
					t.Errorf("the half-open link got %d", b.code)
				}
				r.end()
			})
		})
	}
}

// TestResumeFails: a handshake that resumes and breaks before announce leaves the session for
// the next one, and two at a time do not both get it.
func TestResumeFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t)
		boot := link.NewID()
		b := r.attachOn(link.Subprotocol21, nodeA, instance1, link.Auth{BootID: boot})
		n := r.node(nodeA)
		call := r.call(n, "ping")
		id, c := b.cmd()
		_ = b.conn.Close(1006, "")
		auth := link.Auth{Token: nodeA, InstanceID: instance1, BootID: boot, Resume: &link.Resume{SessionID: n.session.Load().ID}}
		broken := r.dialOn(link.Subprotocol21)
		if !broken.authenticateWith(auth).Resumed {
			t.Error("not resumed")
		}
		_ = broken.conn.Close(1006, "")
		time.Sleep(time.Second)
		first := r.dialOn(link.Subprotocol21)
		if !first.authenticateWith(auth).Resumed {
			t.Error("not resumed after a handshake that broke")
		}
		second := r.dialOn(link.Subprotocol21)
		if !second.authenticateWith(auth).Resumed {
			t.Error("the newest handshake is not resumed")
		}
		if code := first.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("the older handshake got %d", code)
		}
		second.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
		second.next(link.TypeAnnounceAck)
		if again, _ := second.cmd(); again != id {
			t.Errorf("resent %s, want %s", again, id)
		}
		second.echo(nodeA, id, c)
		if a := <-call; a.err != nil {
			t.Errorf("got %+v", a)
		}
		r.end()
	})
}

// TestStreamsEndWithTheirLink: streams, and subscriptions that wait for their answer, are not
// resumed.
func TestStreamsEndWithTheirLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t)
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
		r := newRig(t)
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
		r := newRig(t)
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
		r := newRig(t)
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
