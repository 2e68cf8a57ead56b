package hub

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// TestSameInstallationReconnects: a device that links again takes over its own node without
// an audit event, and its tools stay available.
func TestSameInstallationReconnects(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		old := r.attach(nodeA, instance1)
		first := r.node(nodeA)
		waiting := r.call(first, "ping")
		reading := r.startSubscribe(t.Context(), first, 1000, new(acquireCounter))
		old.next(link.TypeCmd)
		old.open()
		reader := (<-reading).reader
		fresh := r.attach(nodeA, instance1)
		if code := old.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("the old link got %d", code)
		}
		a := <-waiting
		r.wantError(a.err, manifest.NodeOffline)
		if reader.Err() != ErrOffline {
			t.Errorf("the reader ended with %v", reader.Err())
		}
		reader.Close()
		n := r.node(nodeA)
		if n == first || !r.hub.IsOnline(nodeA) {
			t.Error("the new link is not the node")
		}
		done := r.call(n, "ping")
		id, c := fresh.cmd()
		fresh.echo(nodeA, id, c)
		if a := <-done; a.err != nil {
			t.Errorf("got %+v", a)
		}
		if got := r.takeLines(&r.lifecycle); got != "known 3, ready 1, known 3, ready 1, gone 1" {
			t.Errorf("surface: %s", got)
		}
		r.wantEvents("device_connect acme y, device_connect acme y, device_disconnect acme y 4409")
		if s := r.hub.Stats(); s.Takeovers != 1 || s.Nodes != 1 {
			t.Errorf("stats %+v", s)
		}
		r.end()
	})
}

// TestAnnounceAckAfterReady: a device that reads announce_ack can be called, and no cmd comes
// before it.
func TestAnnounceAckAfterReady(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		release := make(chan bool)
		r.onAnnounce = func(*Node) { <-release } // a slow disk
		b := r.dial()
		b.authenticate(nodeA, instance1)
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
		time.Sleep(time.Second)
		if len(b.in) > 0 {
			t.Errorf("announce_ack came before OnReady: %+v", <-b.in)
		}
		ready := make(chan bool)
		r.hub.opt.OnReady = func(n *Node) {
			go func() {
				defer close(ready)
				_, _ = n.Call(t.Context(), &n.Tools()[0], nil, CallOptions{})
			}()
			synctest.Wait() // the cmd was sent
		}
		close(release)
		b.next(link.TypeAnnounceAck)
		cmd := b.next(link.TypeCmd)
		b.sendAs(link.TypeCmdAck, cmd.MsgID, link.CmdAck{Code: manifest.Internal})
		<-ready
		r.end()
	})
}

// TestIsReady: a node is ready when OnReady has returned for it, and stays ready while a
// newer link takes it over.
func TestIsReady(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		release := make(chan bool)
		r.onAnnounce = func(*Node) { <-release } // a slow disk
		check := func(when string, want bool) {
			t.Helper()
			if !r.hub.IsOnline(nodeA) || r.hub.Status(nodeA).Ready != want {
				t.Errorf("%s: online %v, ready %v, want true, %v", when, r.hub.IsOnline(nodeA), r.hub.Status(nodeA).Ready, want)
			}
		}
		r.join(nodeA, instance1)
		check("announced", false)
		release <- true
		synctest.Wait()
		check("ready", true)
		r.join(nodeA, instance1)
		check("a newer link", true)
		close(release)
		synctest.Wait()
		r.end()
	})
}

// TestSupersededBeforeReady: a link that is superseded before it is ready does not become
// ready.
func TestSupersededBeforeReady(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		release := make(chan bool)
		r.onAnnounce = func(n *Node) {
			if n.session.Load().InstanceID == instance1 {
				<-release // a slow disk
			}
		}
		slow := r.join(nodeA, instance1)
		r.attach(nodeA, instance2)
		close(release)
		if code := slow.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("the slow link got %d", code)
		}
		if got := r.takeLines(&r.lifecycle); got != "known 3, known 3, ready 2, gone 1" {
			t.Errorf("surface: %s", got)
		}
		r.end()
	})
}

// TestClones: two installations with one identity are audited as clone_suspected. From the
// third takeover in a minute on, both are refused for a minute, then for two.
func TestClones(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		fight := func() (last *board) {
			t.Helper()
			prev := r.attach(nodeA, instance1)
			r.takeLines(&r.events)
			for i, instance := range []string{instance2, instance1, instance2} {
				last = r.join(nodeA, instance)
				if code := prev.waitClosed(); code != link.CloseSuperseded {
					t.Errorf("takeover %d: the old link got %d", i, code)
				}
				if got := r.takeLines(&r.events); strings.Count(got, "clone_suspected acme y") != 1 {
					t.Errorf("takeover %d: events %s", i, got)
				}
				prev = last
				time.Sleep(10 * time.Second)
			}
			return last
		}
		refused := func() int {
			b := r.dial()
			b.next(link.TypeHello)
			b.sendAs(link.TypeAuth, "", link.Auth{Token: nodeA, BootID: link.NewID(), InstanceID: instance1})
			return b.waitClosed()
		}
		for _, penalty := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute} {
			if code := fight().waitClosed(); code != link.CloseSuperseded {
				t.Errorf("the last one got %d", code)
			}
			r.takeLines(&r.events)
			if r.hub.IsOnline(nodeA) {
				t.Error("one of the two clones was accepted")
			}
			time.Sleep(penalty - 11*time.Second) // 10 s of it have passed
			if code := refused(); code != link.CloseSuperseded {
				t.Errorf("within %v: closed with %d", penalty, code)
			}
			r.wantEvents("device_refused acme y 4409")
			other := r.attach(nodeB, instance1) // other nodes are accepted
			other.close()
			synctest.Wait()
			r.takeLines(&r.events)
			time.Sleep(time.Second)
		}
		r.attach(nodeA, instance1)
		time.Sleep(3 * time.Hour)
		if len(r.hub.takeoverHistories) != 0 {
			t.Errorf("%d takeover histories are left", len(r.hub.takeoverHistories))
		}
		r.end()
	})
}

// TestRareClonesAreServed: two takeovers in a minute have no penalty.
func TestRareClonesAreServed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		for i := range 10 {
			r.attach(nodeA, []string{instance1, instance2}[i%2])
			time.Sleep(31 * time.Second)
		}
		if !r.hub.IsOnline(nodeA) {
			t.Error("the node is refused")
		}
		if got := r.takeLines(&r.events); strings.Count(got, "clone_suspected") != 9 {
			t.Errorf("events %s", got)
		}
		r.end()
	})
}

// TestAnnounceAgain: a second announce replaces the first.
func TestAnnounceAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
		b.next(link.TypeAnnounceAck)
		if got := r.takeLines(&r.lifecycle); got != "known 3, ready 1, known 1, ready 1" {
			t.Errorf("surface: %s", got)
		}
		if !strings.HasPrefix(string(n.Manifest()), `[{"cap_id":"echo"`) || strings.Contains(string(n.Manifest()), "metrics") || n.Tenant() != "acme" {
			t.Errorf("manifest %s of %s", n.Manifest(), n.Tenant())
		}
		b.sendAs(link.TypeAnnounce, "", link.Announce{})
		if code := b.waitClosed(); code != link.CloseManifestInvalid {
			t.Errorf("closed with %d", code)
		}
		if got := r.takeLines(&r.lifecycle); got != "gone 1" {
			t.Errorf("surface: %s", got)
		}
		r.end()
	})
}

// TestWithdrawnTool: a call of a tool that the device has just withdrawn is not a fault of the
// device, whichever of the two the other side sees first.
func TestWithdrawnTool(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		n := r.node(nodeA)
		tool := r.tool(n, "echo.invoke")
		done := r.call(n, "ping")
		id, _ := b.cmd()
		b.sendAs(link.TypeAnnounce, "", announce(manifest.Metrics()))
		b.next(link.TypeAnnounceAck)
		b.sendAs(link.TypeCmdAck, id, link.CmdAck{Code: manifest.ManifestInvalid})
		r.wantError((<-done).err, manifest.BadRequest)
		_, err := n.Call(context.Background(), tool, []byte(`{"message":"ping"}`), CallOptions{})
		r.wantError(err, manifest.BadRequest)
		b.expectNothing()
		r.end()
	})
}

// TestSharedManifest: boards with equal manifests share the memory of one, and no other
// state.
func TestSharedManifest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.attach(nodeA, instance1)
		other := r.attach(nodeB, instance2)
		a, b := r.node(nodeA), r.node(nodeB)
		if &a.Manifest()[0] != &b.Manifest()[0] || a.Tools()[0].Capability != b.Tools()[0].Capability {
			t.Error("two nodes hold one manifest twice")
		}
		for i, tool := range b.Tools() {
			if tool.Name().NodeID != nodeB || a.Tools()[i].Name().NodeID != nodeA || tool.Capability.CapID != tool.Name().CapID {
				t.Errorf("tools %s and %s", a.Tools()[i].Canonical, tool.Canonical)
			}
		}
		const announced = maxSharedManifests + 10 // by a device that announces different ones
		for i := range announced {
			c := manifest.Echo()
			c.CapID = fmt.Sprint("echo", i)
			other.sendAs(link.TypeAnnounce, "", announce(c))
			other.next(link.TypeAnnounceAck)
			time.Sleep(time.Second)
		}
		if n := len(r.hub.sharedManifests); n > maxSharedManifests || b.Tools()[0].Name().CapID != fmt.Sprint("echo", announced-1) || len(a.Tools()) != 3 {
			t.Errorf("%d manifests are remembered; tools %v", n, b.Tools())
		}
		r.end()
	})
}

func TestLiveness(t *testing.T) {
	bubble(t, func(t *testing.T) { // pings every 25 s +-20 %, and answers keep the link
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		time.Sleep(10 * time.Minute)
		if n := b.wire.pings.Load(); n < 19 || n > 30 {
			t.Errorf("%d pings in 10 min", n)
		}
		for range 40 { // none while the device pings
			_ = b.conn.Ping(nil)
			time.Sleep(15 * time.Second)
		}
		if n := b.wire.pings.Load(); n > 31 {
			t.Errorf("%d pings, although the device pings", n)
		}
		if !r.hub.IsOnline(nodeA) {
			t.Error("the link was dropped")
		}
		r.end()
	})
	bubble(t, func(t *testing.T) { // 60 s of silence end it
		r := newTestHub(t)
		b := r.attach(nodeA, instance1)
		r.takeLines(&r.events)
		b.wire.cut.Store(true)
		start := time.Now()
		if code := b.waitClosed(); code != link.CloseTimeout {
			t.Errorf("closed with %d", code)
		}
		if took := time.Since(start); took < link.IdleTimeout || took > link.IdleTimeout+time.Second {
			t.Errorf("closed after %v of silence", took)
		}
		r.wantEvents("device_disconnect acme y 4408")
		r.end()
	})
}

// TestRevocation: a revoked token closes its link within 5 s and is audited once.
func TestRevocation(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b, other := r.attach(nodeA, instance1), r.attach(nodeB, instance2)
		waiting := r.call(r.node(nodeA), "ping")
		r.takeLines(&r.events)
		r.revoke(nodeA)
		start := time.Now()
		if code := b.waitClosed(); code != link.CloseAuthFailed || time.Since(start) > 2*time.Second {
			t.Errorf("closed with %d after %v", code, time.Since(start))
		}
		a := <-waiting
		r.wantError(a.err, manifest.NodeOffline)
		time.Sleep(10 * time.Second)
		r.wantEvents("revoked acme y, device_disconnect acme y 4401")
		if !r.hub.IsOnline(nodeB) {
			t.Error("the other node suffered")
		}
		other.close()
		r.end()
	})
}

// TestGrantRevision: with GrantRevision a revocation closes the link as soon, also when it
// comes during the handshake or when the token expires soon after.
func TestGrantRevision(t *testing.T) {
	soon := func(t *testing.T, b *board, since time.Time) {
		t.Helper()
		if code := b.waitClosed(); code != link.CloseAuthFailed || time.Since(since) > 2*time.Second {
			t.Errorf("closed with %d after %v", code, time.Since(since))
		}
	}
	for _, after := range []time.Duration{0, 3 * time.Second} {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			r.useGrantRevision()
			b := r.dial()
			b.authenticate(nodeA, instance1)
			r.revoke(nodeA)
			time.Sleep(after) // the sweep sees the revision before this node is registered
			start := time.Now()
			b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
			soon(t, b, start)
			r.wantEvents("device_refused acme y 4401")
			if r.takeLines(&r.lifecycle) != "" {
				t.Error("its tools were available")
			}
			r.end()
		})
	}
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.useGrantRevision()
		b := r.attach(nodeA, instance1)
		time.Sleep(time.Minute)
		start := time.Now()
		r.revoke(nodeA)
		soon(t, b, start)
		r.end()
	})
	for _, life := range []time.Duration{5 * time.Second, 100 * time.Second} {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			r.useGrantRevision()
			r.until = time.Now().Add(life)
			soon(t, r.attach(nodeA, instance1), r.until)
			if time.Now().Before(r.until) {
				t.Errorf("cut %v too soon", time.Until(r.until))
			}
			r.end()
		})
	}
}

func TestDrain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		ready, shaking, silent := r.attach(nodeA, instance1), r.dial(), r.dial()
		shaking.authenticate(nodeB, instance2)
		silent.next(link.TypeHello)
		waiting := r.call(r.node(nodeA), "ping")
		synctest.Wait()
		r.takeLines(&r.events)
		start := time.Now()
		r.end()
		if took := time.Since(start); took != 0 {
			t.Errorf("took %v", took)
		}
		for _, b := range []*board{ready, shaking, silent, r.dial()} {
			if code := b.waitClosed(); code != link.CloseDraining {
				t.Errorf("closed with %d", code)
			}
		}
		a := <-waiting
		r.wantError(a.err, manifest.NodeOffline)
		got := r.takeLines(&r.events)
		for _, want := range []string{"device_disconnect acme y 4503", "device_refused acme z 4503", "device_refused 4503"} {
			if !strings.Contains(got, want) {
				t.Errorf("events %q lack %q", got, want)
			}
		}
	})
}

func TestBounds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.hub.nodeLimit, r.hub.handshakeLimit = 2, 2
		one, two := r.dial(), r.dial()
		if code := r.dial().waitClosed(); code != link.CloseDraining {
			t.Errorf("a third handshake: closed with %d", code)
		}
		if s := r.hub.Stats(); s.Handshaking != 2 || s.Refused != 1 {
			t.Errorf("stats %+v", s)
		}
		time.Sleep(6 * time.Second) // they send nothing
		if one.waitClosed() != link.CloseTimeout || two.waitClosed() != link.CloseTimeout || r.hub.Stats().Handshaking != 0 {
			t.Errorf("stats %+v", r.hub.Stats())
		}
		r.wantEvents("device_refused 4408, device_refused 4408")

		r.hub.handshakeLimit = 10
		r.attach(nodeA, instance1)
		late := r.dial() // accepted below the limit
		late.authenticate("01hzx9k3m4p7q8r9s0t1v2w3x0", instance2)
		r.attach(nodeB, instance2)
		late.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
		if code := late.waitClosed(); code != link.CloseDraining {
			t.Errorf("a third node: closed with %d", code)
		}
		if code := r.dial().waitClosed(); code != link.CloseDraining {
			t.Errorf("a full hub: closed with %d", code)
		}
		if s := r.hub.Stats(); s.Nodes != 2 || s.Accepted != 2 || s.Refused != 5 {
			t.Errorf("stats %+v", s)
		}
		r.end()
	})
}

// TestRefused: the audit event of a refused link has the close code, and the node if it is
// known.
func TestRefused(t *testing.T) {
	tests := []struct {
		name string
		do   func(b *board)
		want string
	}{
		{"bad token", func(b *board) {
			b.sendAs(link.TypeAuth, "", link.Auth{Token: "x", BootID: link.NewID(), InstanceID: instance1})
		}, "device_refused 4401"},
		{"bad frame", func(b *board) { _ = b.conn.Write([]byte("hello")) }, "device_refused 4400"},
		{"gave up", func(b *board) { b.close() }, "device_refused 1000"},
		{"bad manifest", func(b *board) {
			b.authenticate(nodeA, instance1)
			b.sendAs(link.TypeAnnounce, "", announce())
		}, "device_refused acme y 4422"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newTestHub(t)
				tt.do(r.dial())
				r.wantEvents(tt.want)
				if s := r.hub.Stats(); s.Refused != 1 || s.Accepted != 0 {
					t.Errorf("stats %+v", s)
				}
				r.end()
			})
		})
	}
}

func TestLastSeenAndReconnectSpread(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.attach(nodeA, instance1)
		r.attach(nodeB, instance2)
		time.Sleep(11 * time.Minute)
		if got := r.takeLines(&r.lastSeen); strings.Count(got, nodeA) != 2 || strings.Count(got, nodeB) != 2 {
			t.Errorf("seen %s", got)
		}
		if s := r.hub.reconnectSpreadMS(); s != 1000 {
			t.Errorf("spread of 2 nodes: %d ms", s)
		}
		r.end()
		for range 10000 {
			r.hub.nodes[link.NewID()] = nil
		}
		if s := r.hub.reconnectSpreadMS(); s != 50000 {
			t.Errorf("spread of 10,000 nodes: %d ms, want 50,000: 200 a second", s)
		}
	})
}
