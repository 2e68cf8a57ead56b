package edge

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// canDial reports whether a connection from a loopback address is made. It may be reset at once. One
// that should not be made is given up soon; TCP would repeat the attempt after 1 s.
func canDial(t *testing.T, addr, local string, want bool) bool {
	t.Helper()
	timeLimit := 100 * time.Millisecond
	if want {
		timeLimit = 10 * time.Second
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}, Timeout: timeLimit}
	c, err := d.DialContext(context.Background(), "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	timeout := net.Error(nil)
	return !errors.As(err, &timeout) || !timeout.Timeout()
}

// TestBlock: an address with too many refused connections can open none for a while. Its open
// connections and other addresses go on.
func TestBlock(t *testing.T) {
	conns := NewConns(ConnOptions{MaxOpen: 1024})
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	counted := conns.Listener(ln, true).(*connListener)
	addr := serveOn(t, counted)
	in, open := from(t, addr, "127.0.0.9", "/known")
	if status, _ := statusOf(t, in); status != 200 {
		t.Fatal(status)
	}
	key := AddressKey(netip.MustParseAddr("127.0.0.9"))
	conns.rates.Charge(key.String(), 2*strangerBurst, time.Now())
	for range blockBurst { // some refusals are free
		if wait := conns.blocks.Take(key.String(), blockRate, blockBurst, time.Now()); wait > 0 {
			break
		}
	}
	conns.blocks.Charge(key.String(), blockRate, time.Now())
	canDial(t, addr, "127.0.0.9", true) // is refused, one too many
	b := counted.blocked
	waitFor(t, "the address is blocked", func() bool { return b.stats.begun.Load() == 1 })
	setEnd := func(end time.Time) {
		b.mu.Lock()
		b.until[key] = end
		b.applyLocked()
		b.mu.Unlock()
		b.expire()
	}
	setEnd(time.Now().Add(time.Hour)) // the machine may be slow
	if conns.Blocked().InUse != 1 {
		t.Errorf("%+v", conns.Blocked())
	}
	if canDial(t, addr, "127.0.0.9", false) {
		t.Error("the kernel did not drop the attempt")
	}
	if _, err := open.Write([]byte("GET /known HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	in.Reset(open)
	if status, _ := statusOf(t, in); status != 200 {
		t.Errorf("on the open connection: %d", status)
	}
	if !canDial(t, addr, "127.0.0.8", true) {
		t.Error("another address is blocked")
	}
	setEnd(time.Now())
	if !canDial(t, addr, "127.0.0.9", true) {
		t.Error("the address is still blocked")
	}
}

// TestDropAttempts: the filter hits the given addresses only, IPv4 and IPv6, on one listener.
func TestDropAttempts(t *testing.T) {
	ln, err := Listen("[::]:0")
	if err != nil {
		t.Skip("no IPv6 here: ", err)
	}
	defer func() { _ = ln.Close() }()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	dial := map[string]string{"::1": "[::1]:" + port, "127.0.0.5": "127.0.0.1:" + port, "127.0.0.6": "127.0.0.1:" + port, "127.0.0.7": "127.0.0.1:" + port}
	for _, blocked := range []string{"", "127.0.0.5", "::1", "127.0.0.6 ::1 127.0.0.7", "2001:db8::1 192.0.2.1", ""} {
		var keys []netip.Prefix
		for _, s := range strings.Fields(blocked) {
			keys = append(keys, AddressKey(netip.MustParseAddr(s)))
		}
		if err := dropAttempts(ln.(*net.TCPListener), keys); err != nil && (blocked != "" || strings.Contains(err.Error(), "support")) {
			t.Fatal(err)
		}
		for local, addr := range dial {
			if want := !strings.Contains(" "+blocked+" ", " "+local+" "); canDial(t, addr, local, want) != want {
				t.Errorf("blocked %q: %s can dial: %v", blocked, local, !want)
			}
		}
	}
}

// TestBlockBounds: the list is bounded, an address is added once, and a listener without a filter
// blocks nobody.
func TestBlockBounds(t *testing.T) {
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b, now := &blockList{ln: ln.(*net.TCPListener), stats: new(blockStats)}, time.Now()
	for i := range 2 * maxBlocked {
		key := AddressKey(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
		if got := b.add(key, now); got != (i < maxBlocked) || got && !b.add(key, now) {
			t.Fatalf("address %d: %v", i, got)
		}
	}
	if n := b.stats.blocked.Load(); n != maxBlocked || b.add(netip.Prefix{}, now) {
		t.Errorf("%d addresses", n)
	}
	_ = ln.Close()
	b.expire()
	b.mu.Lock()
	left := b.timer
	b.mu.Unlock()
	if b.stats.blocked.Load() != 0 || left != nil || b.add(AddressKey(netip.MustParseAddr("192.0.2.1")), now) {
		t.Error("the list of a closed listener is in use")
	}
}
