package prober

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// netDev writes /proc/net/dev with one counter, the bytes in, for each interface.
func netDev(t *testing.T, root string, bytesIn map[string]uint64) {
	t.Helper()
	text := "Inter-|   Receive\n face |bytes\n"
	for name, n := range bytesIn {
		text += fmt.Sprintf("%6s: %d 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n", name, n)
	}
	write(t, root+"proc/net/dev", text)
}

// What interfaces do to their counters must not become traffic.
func TestInterfacesComeAndGo(t *testing.T) {
	root := t.TempDir() + "/"
	if err := os.MkdirAll(root+"proc/net", 0o700); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newNetworkReader(root)
		defer r.Close()
		steps := []struct {
			name string
			dev  map[string]uint64
			want int64 // bytes in; -1: no network
		}{
			{"first", map[string]uint64{"lo": 0, "eth0": 1e9}, -1},
			{"traffic", map[string]uint64{"lo": 5e9, "eth0": 1e9 + 50}, 50},
			{"another comes with a history", map[string]uint64{"eth0": 1e9 + 60, "usb0": 7e9}, 10},
			{"and counts from then on", map[string]uint64{"eth0": 1e9 + 60, "usb0": 7e9 + 5}, 5},
			{"one goes away", map[string]uint64{"usb0": 7e9 + 6}, 1},
			{"and comes back", map[string]uint64{"eth0": 1e9 + 900, "usb0": 7e9 + 6}, 0},
			{"one begins anew", map[string]uint64{"eth0": 3, "usb0": 7e9 + 8}, 2},
			{"and goes on", map[string]uint64{"eth0": 10, "usb0": 7e9 + 8}, 7},
			{"a counter of 64 bits wraps", map[string]uint64{"eth0": 10, "usb0": 1<<64 - 1}, 1<<53 + 1},
		}
		for _, s := range steps {
			netDev(t, root, s.dev)
			var m ModuleReadings
			if err := r.Read(&m); err != nil {
				t.Fatal(err)
			}
			switch {
			case s.want < 0:
				if m.Network != nil {
					t.Errorf("%s: %+v", s.name, m.Network)
				}
			case s.want > 1<<53:
				if moduleTable[ModuleNetwork].check(&m) == nil {
					t.Errorf("%s: %d bytes may leave", s.name, m.Network.BytesIn)
				}
			case m.Network == nil || m.Network.BytesIn != uint64(s.want) || m.Network.WindowMS != 2000 ||
				m.Network.BytesInPerS != float64(s.want)/2:
				t.Errorf("%s: %+v, want %d bytes in 2 s", s.name, m.Network, s.want)
			}
			time.Sleep(2 * time.Second)
		}
		// More interfaces than are counted: those that are known are counted still.
		many := map[string]uint64{"eth0": 10, "usb0": 1<<64 - 1}
		for i := range 3 * maxIfaces {
			many[fmt.Sprintf("veth%d", i)] = uint64(i)
		}
		netDev(t, root, many)
		var m ModuleReadings
		if err := r.Read(&m); err != nil || len(r.ifaces) != maxIfaces {
			t.Errorf("%d interfaces are kept, %v", len(r.ifaces), err)
		}
		write(t, root+"proc/net/dev", "")
		if err := r.Read(&m); !errors.Is(err, errEmpty) {
			t.Errorf("an empty file: %v", err)
		}
	})
}

// When one counter went back, the others of that interface are not believed either.
func TestInterfaceBeginsAnew(t *testing.T) {
	r := newNetworkReader(t.TempDir() + "/")
	for _, c := range []netCounters{{bytesIn: 1e9, bytesOut: 100}, {bytesIn: 3, bytesOut: 500}, {bytesIn: 4, bytesOut: 502}} {
		r.count([]byte("eth0"), c)
	}
	if want := (netCounters{bytesIn: 1, bytesOut: 2}); r.all != want {
		t.Errorf("got %+v, want %+v", r.all, want)
	}
}

// The kernel gives a page of /proc/net/dev a read; a file longer than the buffer loses
// its last interfaces, and never half a number.
func TestLongNetDev(t *testing.T) {
	root := t.TempDir() + "/"
	if err := os.MkdirAll(root+"proc/net", 0o700); err != nil {
		t.Fatal(err)
	}
	dev := map[string]uint64{}
	for i := range 2000 {
		dev[fmt.Sprintf("if%d", i)] = 1 << 40
	}
	netDev(t, root, dev)
	r := newNetworkReader(root)
	defer r.Close()
	var m ModuleReadings
	if err := r.Read(&m); err != nil {
		t.Fatal(err)
	}
	for name, i := range r.ifaces {
		if i.last[bytesIn] != 1<<40 {
			t.Errorf("%s has %d bytes", name, i.last[bytesIn])
		}
	}
	if len(r.ifaces) != maxIfaces {
		t.Errorf("%d interfaces", len(r.ifaces))
	}
}

// On this machine, beside what the kernel says before and after.
func TestNetworkHere(t *testing.T) {
	total := func() (sum netCounters) {
		b, err := os.ReadFile("/proc/net/dev")
		if err != nil {
			t.Skipf("this machine hides something: %v", err)
		}
		if err := parseNetDev(b, func(name []byte, c netCounters) {
			if string(name) != "lo" {
				sum = sum.add(c)
			}
		}); err != nil {
			t.Fatal(err)
		}
		return sum
	}
	r := newNetworkReader("/")
	defer r.Close()
	var m ModuleReadings
	before := total()
	if err := r.Read(&m); err != nil {
		t.Fatal(err)
	}
	for m.Network == nil {
		if err := r.Read(&m); err != nil {
			t.Fatal(err)
		}
	}
	most := total().sub(before)
	if err := moduleTable[ModuleNetwork].check(&m); err != nil {
		t.Error(err)
	}
	if m.Network.BytesIn > most[bytesIn] || m.Network.PacketsOut > most[packetsOut] {
		t.Errorf("%+v, the kernel has at most %+v", m.Network, most)
	}
}

// Whatever counters do, a wide window is the sum of the narrow ones in it.
func TestNetworkWindowsAddUp(t *testing.T) {
	root := t.TempDir() + "/"
	if err := os.MkdirAll(root+"proc/net", 0o700); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(3, 4))
		r := newNetworkReader(root)
		defer r.Close()
		dev := map[string]uint64{"eth0": 0, "wlan0": 0, "usb0": 0}
		var wide netWindow
		var sum, ms uint64
		for i := range 500 {
			for name := range dev {
				if dev[name] += rng.Uint64N(1000); rng.IntN(50) == 0 {
					dev[name] = 0
				}
			}
			netDev(t, root, dev)
			var m ModuleReadings
			if err := r.Read(&m); err != nil {
				t.Fatal(err)
			}
			if n := m.Network; n != nil {
				sum += n.BytesIn
				ms += uint64(n.WindowMS)
				if i == 1 {
					wide.rebase(&m)
					sum, ms = 0, 0
				} else if i%10 == 0 {
					got := wide.rebase(&m).Network
					if got.BytesIn != sum || got.WindowMS != int64(ms) {
						t.Fatalf("a window of ten has %d bytes in %d ms, its parts %d in %d", got.BytesIn, got.WindowMS, sum, ms)
					}
					if again := wide.rebase(&m).Network; again != got {
						t.Fatalf("the same reading again is another pointer")
					}
					sum, ms = 0, 0
				}
			}
			time.Sleep(time.Duration(1+rng.IntN(900)) * time.Millisecond)
		}
	})
}
