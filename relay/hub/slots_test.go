package hub

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/transport/link"
)

func address(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// TestSlots: an address has a bounded number of unfinished handshakes. More wait, and are refused
// after slotWait; another address is not affected.
func TestSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Options{})
		defer h.cancel()
		a, b := address("192.0.2.1/32"), address("2001:db8::/64")
		var slots []*Slot
		for range maxHandshakesPerAddress {
			s := h.Reserve(t.Context(), netip.Addr{}, a, nil)
			if s == nil {
				t.Fatal("no slot")
			}
			slots = append(slots, s)
		}
		start := time.Now()
		if s := h.Reserve(t.Context(), netip.Addr{}, a, nil); s != nil || time.Since(start) != slotWait {
			t.Errorf("one more: %v after %s", s, time.Since(start))
		}
		time.AfterFunc(time.Second, slots[0].Release)
		start = time.Now()
		s := h.Reserve(t.Context(), netip.Addr{}, a, nil)
		if s == nil || time.Since(start) != time.Second {
			t.Fatalf("one that waits: %v after %s", s, time.Since(start))
		}
		slots[0].Release() // a second time: nothing
		other := h.Reserve(t.Context(), netip.Addr{}, b, nil)
		if other == nil {
			t.Fatal("no slot for another address")
		}
		if st := h.Stats(); st.Handshaking != maxHandshakesPerAddress+1 || st.RefusedSlots != 1 {
			t.Errorf("stats %+v", st)
		}
		for _, s := range append(slots, s, other) {
			s.Release()
		}
		if st := h.Stats(); st.Handshaking != 0 || len(h.slots) != 0 {
			t.Errorf("stats %+v, %d addresses are kept", st, len(h.slots))
		}
	})
}

// TestSlotsOfManyAddresses: addresses that always take what they may come to leave slots for
// another one, however many they are.
func TestSlotsOfManyAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Options{})
		defer h.cancel()
		var slots []*Slot
		mayTake := func(a netip.Prefix) bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			of, free := h.slots[a], int(h.handshakeLimit-h.handshaking.Load()-h.handshakeLimit/4)
			return free > 0 && (of == nil || of.held < min(maxHandshakesPerAddress, max(1, free/4)))
		}
		for range 10 { // each ends a third of the handshakes, as those that time out
			for i := range 200 {
				a := netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32)
				for mayTake(a) {
					s := h.Reserve(t.Context(), netip.Addr{}, a, nil)
					if s == nil {
						t.Fatal("no slot")
					}
					slots = append(slots, s)
				}
			}
			rand.Shuffle(len(slots), func(i, j int) { slots[i], slots[j] = slots[j], slots[i] })
			for _, s := range slots[:len(slots)/3] {
				s.Release()
			}
			slots = slots[len(slots)/3:]
		}
		if s := h.Reserve(t.Context(), netip.Addr{}, address("198.51.100.1/32"), nil); s == nil || len(slots) < maxHandshakes/4 {
			t.Errorf("a new address beside %d slots: %v", len(slots), s)
		}
	})
}

// TestKnownAddress: strangers that take all they may leave places for addresses from which a board
// has authenticated.
func TestKnownAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Options{})
		defer h.cancel()
		h.handshakeLimit = 16
		home, proved := address("192.0.2.1/32"), 0
		h.Reserve(t.Context(), netip.Addr{}, home, func() { proved++ }).authenticated()
		if h.handshaking.Load() != 0 || proved != 1 {
			t.Errorf("%d handshakes, %d boards have proved who they are", h.handshaking.Load(), proved)
		}
		taken := 0
		for i := range 255 {
			if h.Reserve(t.Context(), netip.Addr{}, netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32), nil) != nil {
				taken++
			}
		}
		if taken != 12 {
			t.Errorf("strangers took %d of 16", taken)
		}
		if s := h.Reserve(t.Context(), netip.Addr{}, home, nil); s == nil || !s.isKnown {
			t.Error("the known address has no place")
		}
	})
}

// TestWaitingRoundRobin: addresses are served round-robin, and links of one keep their order.
func TestWaitingRoundRobin(t *testing.T) {
	var q addressQueue
	var conns []link.Conn
	for _, from := range []string{"192.0.2.1/32", "192.0.2.1/32", "192.0.2.1/32", "192.0.2.2/32", "192.0.2.2/32", "192.0.2.3/32"} {
		_, c := link.Pipe()
		conns = append(conns, c)
		q.push(c, &Slot{address: address(from)})
	}
	for i, want := range []int{0, 3, 5, 1, 4, 2} {
		if q.len != len(conns)-i {
			t.Errorf("%d wait, want %d", q.len, len(conns)-i)
		}
		if got := q.pop(); got.conn != conns[want] {
			t.Errorf("number %d is another link", i)
		}
	}
	if q.len != 0 || q.queues != nil {
		t.Errorf("what is left: %+v", q)
	}
}

// TestKnownDoNotWait: links of strangers that wait for their handshake do not delay one of a known
// address.
func TestKnownDoNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestHub(t)
		defer r.end()
		dial := func(address string, isKnown bool) link.Conn {
			dev, rel := link.Pipe()
			slot := r.hub.Reserve(t.Context(), netip.MustParseAddr(address), netip.MustParsePrefix(address+"/32"), nil)
			if slot == nil {
				t.Fatal("no slot")
			}
			slot.isKnown = isKnown
			r.hub.AttachReserved(rel, slot)
			return dev
		}
		greeted := func(c link.Conn) bool {
			_ = c.SetReadDeadline(time.Now().Add(time.Nanosecond))
			return c.Read(func([]byte) error { return nil }) == nil
		}
		for range 2 * handshakeBurst {
			dial("192.0.2.1", false)
		}
		synctest.Wait()
		if last := dial("192.0.2.1", false); greeted(last) {
			t.Error("a stranger does not wait")
		}
		for range handshakeBurst {
			if known := dial("192.0.2.2", true); !greeted(known) {
				t.Fatal("a board of a known address waits")
			}
		}
	})
}

// TestDelayRefusal: a link that is refused is closed when DelayRefusal returns. Until then it takes no
// handshake from other boards of its address.
func TestDelayRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestHub(t)
		defer r.end()
		const delay = 2 * time.Second
		var from netip.Addr
		r.hub.opt.DelayRefusal = func(_ context.Context, a netip.Addr) {
			from = a
			time.Sleep(delay)
		}
		b := r.dial()
		b.next(link.TypeHello)
		b.sendAs(link.TypeAuth, "", link.Auth{Token: "not a token", BootID: link.NewID(), InstanceID: "0123456789abcdef0123456789abcdef"})
		start := time.Now()
		synctest.Wait()
		if n := r.hub.Stats().Handshaking; n != 0 {
			t.Errorf("%d handshakes", n)
		}
		if _, open := <-b.in; open || b.code != link.CloseAuthFailed || time.Since(start) != delay || from != netip.MustParseAddr("192.0.2.1") {
			t.Errorf("closed with %d after %s, of %s", b.code, time.Since(start), from)
		}
	})
}
