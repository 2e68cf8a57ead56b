package inspect

import (
	"slices"
	"testing"
	"time"
)

// Tables of routes as the kernel shows them. Those that are left out: one that rejects, one to this
// machine, and one to a multicast group.
const (
	route4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n" +
		"eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n" +
		"eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n" +
		"*\t0000000A\t00000000\t0200\t0\t0\t0\t000000FF\t0\t0\t0\n"

	route6 = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n" +
		"fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n" +
		"00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000002 00000000 80200001       lo\n" +
		"ff000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000003 00000000 00000001     eth0\n"
)

// routes are those of route4 and route6.
var routes = []Route{
	{Destination: "default", Gateway: "192.168.1.1", Interface: "eth0", Metric: 100},
	{Destination: "192.168.1.0/24", Interface: "eth0", Metric: 100},
	{Destination: "default", Gateway: "fe80::1", Interface: "eth0", Metric: 1024},
	{Destination: "fd00::/64", Interface: "eth0", Metric: 256},
}

// networkTree is a machine with these routes; its interfaces are those of the machine that runs the test.
func networkTree(t *testing.T) *Machine {
	return tree(t, map[string]string{
		"proc/net/route":      route4,
		"proc/net/ipv6_route": route6,
		"etc/resolv.conf":     "# x\nnameserver 192.0.2.53\nsearch example\nnameserver\n",
		"proc/net/dev":        "Inter-| x\n face | y\n    lo:    1000      10    1    2    0     0          0         0     2000      20    3    4    0     0       0          0\n",
	})
}

func TestNetwork(t *testing.T) {
	got := networkTree(t).Network(within(t, 10*time.Second), NetworkQuery{})
	if !slices.Equal(got.Routes, routes) || got.TotalRoutes != len(routes) {
		t.Errorf("got %d routes %+v, want %+v", got.TotalRoutes, got.Routes, routes)
	}
	if want := []string{"192.0.2.53"}; !slices.Equal(got.Nameservers, want) {
		t.Errorf("name servers are %q, want %q", got.Nameservers, want)
	}
	if len(got.Unfinished) > 0 || got.TotalInterfaces == 0 || len(got.Interfaces) != got.TotalInterfaces {
		t.Errorf("got %d of %d interfaces, unfinished %q, want all", len(got.Interfaces), got.TotalInterfaces, got.Unfinished)
	}
}

func TestNetworkOfOneInterface(t *testing.T) {
	m := networkTree(t)
	got := m.Network(within(t, 10*time.Second), NetworkQuery{Interface: "lo"})
	if got.TotalInterfaces == 0 {
		t.Skip("this machine has no loopback interface")
	}
	if got.TotalInterfaces != 1 || got.TotalRoutes != 0 {
		t.Fatalf("got %+v, want lo, which has no route", got)
	}
	lo := got.Interfaces[0]
	want := Counters{BytesIn: 1000, BytesOut: 2000, PacketsIn: 10, PacketsOut: 20, ErrorsIn: 1, ErrorsOut: 3, DroppedIn: 2, DroppedOut: 4}
	if lo.Name != "lo" || !lo.Loopback || lo.Counters == nil || *lo.Counters != want {
		t.Errorf("got %+v with %+v, want counters %+v", lo, lo.Counters, want)
	}
	// The name is part of a path below /sys.
	if got := m.Network(within(t, 10*time.Second), NetworkQuery{Interface: "../../etc"}); got.TotalInterfaces != 0 || len(got.Interfaces) != 0 {
		t.Errorf("got %+v for a name that no interface has", got)
	}
}

// The last page begins within the routes.
func TestNetworkPages(t *testing.T) {
	m := networkTree(t)
	all := m.Network(within(t, 10*time.Second), NetworkQuery{})
	got := m.Network(within(t, 10*time.Second), NetworkQuery{Skip: all.TotalInterfaces + 3})
	if len(got.Interfaces) != 0 || !slices.Equal(got.Routes, routes[3:]) || got.Nameservers != nil {
		t.Errorf("got %+v, want the last route only", got)
	}
}
