package hub

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

const v21 = link.Subprotocol21

// freeze makes the board answer nothing, pings included, and not notice that its link is gone.
func (b *board) freeze() { b.wire.cut.Store(true) }

// newcomer dials with an auth and returns the close code, or 0 when it is admitted.
func (r *testHub) newcomer(subprotocol string, a link.Auth) (*board, int) {
	b := r.dialOn(subprotocol)
	b.next(link.TypeHello)
	b.sendAs(link.TypeAuth, "", a)
	e, ok := <-b.in
	if !ok {
		return b, b.code
	}
	if e.Type != link.TypeAuthOK {
		r.t.Fatalf("the newcomer got %s", e.Type)
	}
	b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo(), manifest.Metrics()))
	if e, ok = <-b.in; !ok { // another newcomer was faster
		return b, b.code
	}
	if e.Type != link.TypeAnnounceAck {
		r.t.Fatalf("the newcomer got %s", e.Type)
	}
	return b, 0
}

func authOf(instance string) link.Auth {
	return link.Auth{Token: nodeA, BootID: link.NewID(), InstanceID: instance}
}

// TestHalfOpenLink: a board that restarts while its old link is half-open is ready within 5 s,
// and no clone is suspected. Several newcomers of one boot share the ping.
func TestHalfOpenLink(t *testing.T) {
	for _, versions := range [][2]string{{v21, v21}, {v21, link.Subprotocol}, {link.Subprotocol, v21}} {
		bubble(t, func(t *testing.T) {
			r := newTestHub(t)
			old := r.attachOn(versions[0], nodeA, instance1, link.Auth{})
			waiting := r.call(r.node(nodeA), "ping")
			old.freeze()
			start := time.Now()
			_, code := r.newcomer(versions[1], authOf(instance1))
			if took := time.Since(start); code != 0 || took > probeTimeout {
				t.Errorf("%v: closed with %d after %v", versions, code, took)
			}
			if code := old.waitClosed(); code != link.CloseSuperseded {
				t.Errorf("the old link got %d", code)
			}
			a := <-waiting
			if a.err == nil {
				t.Errorf("got %+v", a)
			}
			if r.hub.CloneSuspected(nodeA) || strings.Contains(r.takeLines(&r.events), "clone") {
				t.Error("a clone is suspected")
			}
			r.end()
		})
	}
}

// TestSameBootTakesOver: the same process takes its node over at once.
func TestSameBootTakesOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		a := authOf(instance1)
		old := r.attachOn(v21, nodeA, instance1, a)
		old.freeze()
		start := time.Now()
		if _, code := r.newcomer(v21, a); code != 0 || time.Since(start) != 0 {
			t.Errorf("closed with %d after %v", code, time.Since(start))
		}
		if r.hub.CloneSuspected(nodeA) {
			t.Error("a clone is suspected")
		}
		r.end()
	})
}

// TestTwoLiveInstallations: the incumbent is served without interruption; the newcomer gets
// 4409, and the clone is reported once. While the mark lasts another boot is admitted only
// after the incumbent has had no link for a minute; after a quiet day the mark is gone.
func TestTwoLiveInstallations(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		first := authOf(instance1)
		b := r.attachOn(v21, nodeA, instance1, first)
		n := r.node(nodeA)
		r.takeLines(&r.events)
		copied := func(want int) {
			t.Helper()
			if _, code := r.newcomer(v21, authOf(instance1)); code != want {
				t.Errorf("the copy was closed with %d, want %d", code, want)
			}
		}
		copied(link.CloseSuperseded)
		copied(link.CloseSuperseded)
		if got := r.takeLines(&r.events); got != "clone_suspected y, device_refused acme y 4409, device_refused acme y 4409" {
			t.Errorf("events %s", got)
		}
		if got := r.takeLines(&r.lifecycle); !strings.HasSuffix(got, "clone true") || strings.Contains(got, "gone") {
			t.Errorf("surface: %s", got)
		}
		call := r.call(n, "ping")
		id, c := b.cmd()
		b.echo(nodeA, id, c)
		if a := <-call; a.err != nil {
			t.Errorf("the incumbent: %+v", a)
		}

		_ = b.conn.Close(1006, "")
		synctest.Wait()
		copied(link.CloseSuperseded)
		time.Sleep(30 * time.Second)
		if _, code := r.newcomer(v21, first); code != 0 { // the incumbent is back
			t.Errorf("the incumbent was closed with %d", code)
		}
		time.Sleep(2 * time.Minute)
		copied(link.CloseSuperseded)

		r.dropAll()
		time.Sleep(cloneQuiet)
		if _, code := r.newcomer(v21, authOf(instance1)); code != 0 {
			t.Errorf("after a minute without the incumbent: closed with %d", code)
		}
		if !r.hub.CloneSuspected(nodeA) {
			t.Error("the mark is gone")
		}
		time.Sleep(cloneMemory + time.Minute)
		if r.hub.CloneSuspected(nodeA) || !strings.Contains(r.takeLines(&r.lifecycle), "clone false") {
			t.Error("the mark is left after a quiet day")
		}
		if r.cloneMS != 0 {
			t.Errorf("the registry has %d", r.cloneMS)
		}
		r.end()
	})
}

// TestHalfOpenLinkWithMark: while a clone is suspected, a board that restarts while its old link is
// half-open is refused once. It is admitted when it comes back cloneQuiet later, although closing
// the old link took time.
func TestHalfOpenLinkWithMark(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		old := r.attachOn(v21, nodeA, instance1, link.Auth{})
		r.hub.SuspectClone(nodeA)
		old.freeze()
		restarted := authOf(instance1)
		if _, code := r.newcomer(v21, restarted); code != link.CloseSuperseded {
			t.Errorf("first: closed with %d", code)
		}
		time.Sleep(cloneQuiet)
		if _, code := r.newcomer(v21, restarted); code != 0 {
			t.Errorf("after cloneQuiet: closed with %d", code)
		}
		r.end()
	})
}

// TestCloneMarkSurvivesRestart: after a restart of the relay the copy does not get in before
// the incumbent.
func TestCloneMarkSurvivesRestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		first := authOf(instance1)
		r.attachOn(v21, nodeA, instance1, first)
		r.newcomer(v21, authOf(instance1))
		r.end()
		time.Sleep(time.Hour)

		again := newTestHub(t)
		again.boots = r.boots
		again.loadCloneMark(r.cloneMS)
		if _, code := again.newcomer(v21, authOf(instance1)); code != link.CloseSuperseded {
			t.Errorf("the copy was closed with %d", code)
		}
		if _, code := again.newcomer(v21, first); code != 0 {
			t.Errorf("the incumbent was closed with %d", code)
		}
		again.end()

		late := newTestHub(t)
		late.loadCloneMark(time.Now().Add(-23 * time.Hour).UnixMilli())
		time.Sleep(2 * time.Hour)
		if late.hub.CloneSuspected(nodeA) {
			t.Error("the mark outlives a day with a restart")
		}
		late.end()
	})
}

func (r *testHub) loadCloneMark(ms int64) {
	r.hub.mu.Lock()
	defer r.hub.mu.Unlock()
	r.hub.loadCloneMarks(map[string]int64{nodeA: ms})
}

// TestNewcomersShareOnePing: many newcomers wait for one pong and are bounded.
func TestNewcomersShareOnePing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		old := r.attachOn(v21, nodeA, instance1, link.Auth{})
		old.freeze()
		before := old.wire.pings.Load()
		codes := make(chan int, 10)
		for range 10 {
			go func() {
				_, code := r.newcomer(v21, authOf(instance1))
				codes <- code
			}()
		}
		count := map[int]int{}
		for range 10 {
			count[<-codes]++
		}
		// Four were admitted; the first one took over and the others found it alive.
		if count[0] != 1 || count[link.CloseSuperseded] != maxAdmitted-1 || count[link.CloseRateLimited] != 10-maxAdmitted {
			t.Errorf("close codes %v", count)
		}
		if pings := old.wire.pings.Load() - before; pings != 1 {
			t.Errorf("%d pings", pings)
		}
		synctest.Wait()
		if len(r.hub.admitted) != 0 {
			t.Errorf("still admitted: %v", r.hub.admitted)
		}
		r.end()
	})
}

// TestSuspectClone: a refresh with a used generation marks a node that has a link, and one
// that has none.
func TestSuspectClone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		a := authOf(instance1)
		r.attachOn(v21, nodeA, instance1, a)
		r.hub.SuspectClone(nodeA)
		r.hub.SuspectClone(nodeB)
		if got := r.takeLines(&r.lifecycle); strings.Count(got, "clone true") != 2 {
			t.Errorf("surface: %s", got)
		}
		if _, code := r.newcomer(v21, a); code != 0 { // the same boot
			t.Errorf("the board was closed with %d", code)
		}
		time.Sleep(time.Second)
		session, age, alive := r.hub.LiveSession(t.Context(), nodeA)
		if !alive || age != time.Second || session != r.node(nodeA).session.Load().ID {
			t.Errorf("session %s, age %v, alive %v", session, age, alive)
		}
		if session, _, alive := r.hub.LiveSession(t.Context(), nodeB); alive || session != "" {
			t.Errorf("node B: session %s, alive %v", session, alive)
		}
		r.end()
	})
}

// TestExtendGrant: a link outlives the token with which it began when the grant is extended,
// and only by the session that the refresh names.
func TestExtendGrant(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.until = time.Now().Add(time.Minute)
		r.attachOn(v21, nodeA, instance1, link.Auth{})
		b := r.attachOn(v21, nodeB, instance2, link.Auth{})
		r.until = time.Time{}
		r.hub.ExtendGrant(nodeA, r.node(nodeA).session.Load().ID, time.Now().Add(time.Hour))
		r.hub.ExtendGrant(nodeB, link.NewID(), time.Now().Add(time.Hour))
		time.Sleep(2 * time.Minute)
		if !r.hub.IsOnline(nodeA) || r.hub.IsOnline(nodeB) || b.waitClosed() != link.CloseAuthFailed {
			t.Errorf("online: %v, %v", r.hub.IsOnline(nodeA), r.hub.IsOnline(nodeB))
		}
		r.end()
	})
}

// attachFrozen links a board, and freezes it after it was idle for a while: it answers nothing then.
func (r *testHub) attachFrozen() (*board, *Node) {
	b := r.attachOn(v21, nodeA, instance1, link.Auth{})
	time.Sleep(10 * time.Minute)
	if r.hub.Status(nodeA).Suspect || strings.Contains(r.takeLines(&r.lifecycle), "suspect") {
		r.t.Error("an idle board is suspect")
	}
	b.freeze()
	return b, r.node(nodeA)
}

// TestSuspect: a board that has not answered a command for 5 s is suspect, and calls to it fail at once,
// until something is received from it.
func TestSuspect(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		b, n := r.attachFrozen()
		a := <-r.call(n, "no answer")
		r.wantOutcome(a.err, manifest.DeadlineExceeded, manifest.OutcomeUnknown)
		a = <-r.call(n, "refused")
		r.wantOutcome(a.err, manifest.NodeOffline, manifest.NotSent)
		if e := manifest.AsError(a.err); e.Reason != "suspect" || a.took != 0 {
			t.Errorf("a call to a suspect board: reason %q after %v, want suspect at once", e.Reason, a.took)
		}
		time.Sleep(2 * time.Second) // a sweep comes each second
		if got := r.takeLines(&r.lifecycle); got != "suspect true" || !r.hub.Status(nodeA).Suspect {
			t.Errorf("after 5 s without an answer: reported %q, want suspect true", got)
		}

		_ = b.conn.Ping(nil)
		synctest.Wait()
		if r.hub.Status(nodeA).Suspect {
			t.Error("suspect after a ping of the board")
		}
		b.wire.cut.Store(false)
		time.Sleep(2 * time.Second)
		if got := r.takeLines(&r.lifecycle); got != "suspect false" {
			t.Errorf("after a ping of the board: reported %q, want suspect false", got)
		}
		if len(r.hub.watched) != 0 {
			t.Errorf("%d nodes are still watched, want none", len(r.hub.watched))
		}
		r.end()
	})
}

// TestHangingHandlersAreNotSuspect: a board whose handlers hang is not suspect while its link answers
// pings, also if they hang one after the other.
func TestHangingHandlersAreNotSuspect(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.attachOn(v21, nodeA, instance1, link.Auth{})
		n := r.node(nodeA)
		a := <-r.call(n, "hangs")
		r.wantOutcome(a.err, manifest.DeadlineExceeded, manifest.OutcomeUnknown)
		if r.hub.Status(nodeA).Suspect {
			t.Error("suspect after one command without an answer")
		}
		for range 48 { // 12 s
			time.Sleep(250 * time.Millisecond)
			r.call(n, "hangs")
			if r.hub.Status(nodeA).Suspect {
				t.Fatal("suspect while commands come one after the other")
			}
		}
		time.Sleep(6 * time.Second) // the last calls end
		r.end()
	})
}

// TestDeadIdleBoard: a board to which nobody calls is suspect 5 s after the next ping, and then offline.
func TestDeadIdleBoard(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		r.attachFrozen()
		time.Sleep(link.PingInterval + suspectTime + time.Second)
		if !r.hub.Status(nodeA).Suspect {
			t.Error("not suspect 5 s after a ping without an answer")
		}
		time.Sleep(40 * time.Second)
		if r.hub.Status(nodeA).Suspect || r.hub.IsOnline(nodeA) {
			t.Errorf("after link.IdleTimeout: %+v, online %v; want offline", r.hub.Status(nodeA), r.hub.IsOnline(nodeA))
		}
		r.end()
	})
}

// TestPacing: of boards that come all at once, 250 handshakes begin and end in a second, and none is
// refused. A board that comes alone does not wait.
func TestPacing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		const boards = 500 // two seconds at handshakeRate
		start := time.Now()
		began, ready := make(chan time.Duration, boards), make(chan time.Duration, boards)
		for range boards {
			go func() {
				b := r.dial()
				b.next(link.TypeHello)
				began <- time.Since(start)
				b.sendAs(link.TypeAuth, "", link.Auth{Token: manifest.NewNodeID(), BootID: link.NewID(), InstanceID: instance1})
				b.next(link.TypeAuthOK)
				b.sendAs(link.TypeAnnounce, "", announce(manifest.Echo()))
				b.next(link.TypeAnnounceAck)
				ready <- time.Since(start)
			}()
		}
		var last time.Duration
		for what, times := range map[string]chan time.Duration{"began": began, "became ready": ready} {
			perSecond := make(map[int]int)
			for range boards {
				at := <-times
				perSecond[int(at/time.Second)]++
				last = max(last, at)
			}
			for second, n := range perSecond {
				if n > handshakeRate+handshakeBurst+10 {
					t.Errorf("%d handshakes %s in second %d, want at most %d", n, what, second, handshakeRate+handshakeBurst)
				}
			}
		}
		if last > boards*time.Second/handshakeRate || r.hub.Stats().Refused != 0 {
			t.Errorf("the last one after %v, %d refused", last, r.hub.Stats().Refused)
		}
		waits := r.dial() // alone again
		waits.next(link.TypeHello)
		r.end()
	})
}

// TestReconnectSpread: the spread follows the boards of the last hour.
func TestReconnectSpread(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		recent := 5000
		r.hub.mu.Lock()
		r.hub.opt.RecentNodes = func() int { return recent }
		r.hub.mu.Unlock()
		time.Sleep(time.Minute + time.Second)
		if s := r.hub.reconnectSpreadMS(); s != 25000 {
			t.Errorf("spread %d ms with 5,000 boards in the last hour", s)
		}
		r.end()
	})
}
