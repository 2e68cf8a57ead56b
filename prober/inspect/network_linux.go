package inspect

import (
	"bytes"
	"context"
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	gopsnet "github.com/shirou/gopsutil/v4/net"
)

// Bounds of what is read of the network.
const (
	maxNameservers = 8
	maxRoutesRead  = 1_000_000 // lines; a full internet routing table has as many
)

// Network returns a page of interfaces and routes. It reads them from the kernel and sends nothing to
// the network. Addresses take one request for each interface, so it asks for those of the page only.
func (m *Machine) Network(ctx context.Context, q NetworkQuery) Network {
	out := Network{Interfaces: []Interface{}, Routes: []Route{}}
	var found []net.Interface
	var counters map[string]*Counters
	var routes routeList
	parts := []part[Network]{
		{"interfaces", func(context.Context) func(*Network) {
			list, err := interfacesNamed(q.Interface)
			if err != nil {
				return nil
			}
			return func(n *Network) { found, n.TotalInterfaces = list, len(list) }
		}},
		{"counters", func(ctx context.Context) func(*Network) {
			c := m.counters(ctx)
			if c == nil {
				return nil
			}
			return func(*Network) { counters = c }
		}},
		{"routes", func(ctx context.Context) func(*Network) {
			r := routeList{only: q.Interface}
			if !m.readRoutes(ctx, &r) {
				return nil
			}
			return func(n *Network) { routes, n.TotalRoutes = r, r.total }
		}},
	}
	if q.Skip == 0 {
		parts = append(parts, part[Network]{"nameservers", m.nameservers})
	}
	out.Unfinished = collect(ctx, &m.guard, &out, parts...)

	// One cursor counts through both lists: routes begin on the page that has the last interface.
	page := pageOf(found, q.Skip, MaxInterfaces)
	for i := range page {
		out.Interfaces = append(out.Interfaces, describe(&page[i], counters))
	}
	if q.Skip+len(page) >= len(found) {
		out.Routes = append(out.Routes, pageOf(routes.list, q.Skip-len(found), MaxRoutes)...)
	}
	var addresses []Interface
	late := collect(ctx, &m.guard, &addresses, part[[]Interface]{"addresses", func(ctx context.Context) func(*[]Interface) {
		got := make([]Interface, len(page))
		for i := range page {
			if ctx.Err() != nil {
				return nil
			}
			got[i] = m.addresses(&page[i])
		}
		return func(a *[]Interface) { *a = got }
	}})
	for i, a := range addresses {
		out.Interfaces[i].Addresses, out.Interfaces[i].SpeedMbps = a.Addresses, a.SpeedMbps
	}
	out.Unfinished = append(out.Unfinished, late...)
	return out
}

// interfacesNamed returns the interface of that name, if there is one, or all for "". A name that
// no interface has is no error: the list is empty then, and so is that of the routes.
func interfacesNamed(name string) ([]net.Interface, error) {
	list, err := net.Interfaces()
	if err != nil || name == "" {
		return list, err
	}
	for i := range list {
		if list[i].Name == name {
			return list[i : i+1], nil
		}
	}
	return nil, nil
}

// describe returns what is known of an interface without asking the kernel again.
func describe(i *net.Interface, counters map[string]*Counters) Interface {
	return Interface{
		// IFF_RUNNING: packets can be sent. A cable is plugged in, or an access point was joined.
		Name: Text(i.Name, maxName), Up: i.Flags&net.FlagUp != 0 && i.Flags&net.FlagRunning != 0,
		Loopback: i.Flags&net.FlagLoopback != 0, MAC: Text(i.HardwareAddr.String(), maxName), MTU: max(i.MTU, 0),
		Counters: counters[i.Name],
	}
}

// addresses reads the addresses of one interface, and its speed, for which some drivers ask the
// hardware. The result has no other fields. A driver that hangs there costs the answer the
// addresses of all interfaces of the page.
func (m *Machine) addresses(i *net.Interface) (out Interface) {
	list, _ := i.Addrs()
	for _, a := range pageOf(list, 0, maxAddresses) {
		out.Addresses = append(out.Addresses, Text(a.String(), maxName))
	}
	if !strings.ContainsAny(i.Name, "/\x00") && i.Name != "." && i.Name != ".." {
		speed, _ := strconv.Atoi(readText(m.path("sys/class/net", i.Name, "speed"), maxName))
		out.SpeedMbps = max(speed, 0) // the kernel has -1 for unknown
	}
	return out
}

// counters reads the counters of /proc/net/dev by name of the interface; nil if it cannot be read.
func (m *Machine) counters(ctx context.Context) map[string]*Counters {
	list, err := gopsnet.IOCountersWithContext(m.env(ctx), true)
	if err != nil {
		return nil
	}
	out := make(map[string]*Counters, len(list))
	for _, c := range list {
		out[c.Name] = &Counters{
			BytesIn: min(c.BytesRecv, maxCount), BytesOut: min(c.BytesSent, maxCount),
			PacketsIn: min(c.PacketsRecv, maxCount), PacketsOut: min(c.PacketsSent, maxCount),
			ErrorsIn: min(c.Errin, maxCount), ErrorsOut: min(c.Errout, maxCount),
			DroppedIn: min(c.Dropin, maxCount), DroppedOut: min(c.Dropout, maxCount),
		}
	}
	return out
}

// routeList counts routes and keeps the first maxRoutesKept of them.
type routeList struct {
	only  string // name of an interface, whose routes count; "": all
	list  []Route
	total int
}

// maxRoutesKept bounds the routes that a caller can page to. More are counted in
// Network.TotalRoutes, but no page has them.
const maxRoutesKept = 5000

// add adds a route; false: no more routes are to be read.
func (r *routeList) add(route Route) bool {
	if r.only != "" && route.Interface != r.only {
		return true
	}
	if r.total++; r.total <= maxRoutesKept {
		route.Interface = Text(route.Interface, maxName)
		r.list = append(r.list, route)
	}
	return r.total < maxRoutesRead
}

// readRoutes reads the routes of IPv4 and IPv6, of which a machine may have only one. It returns
// false if neither can be read, or ctx ended. /proc/net/route is the main table of IPv4 (its first line
// has titles, which parse refuses); /proc/net/ipv6_route is all tables of IPv6, also those that only
// policy routing uses.
func (m *Machine) readRoutes(ctx context.Context, r *routeList) bool {
	each := func(parse func([]byte) (Route, bool)) func([]byte) bool {
		return func(line []byte) bool {
			route, ok := parse(line)
			return !ok || r.add(route)
		}
	}
	err4 := eachLine(ctx, m.path("proc/net/route"), each(parseRoute4))
	err6 := eachLine(ctx, m.path("proc/net/ipv6_route"), each(parseRoute6))
	return ctx.Err() == nil && (err4 == nil || err6 == nil)
}

// Flags of a route, as in linux/route.h and linux/ipv6_route.h.
const (
	routeUp      = 0x0001
	routeReject  = 0x0200
	routeAnycast = 0x0010_0000
	routeLocal   = 0x8000_0000
)

// parseRoute4 parses a line of /proc/net/route: interface, destination, gateway, flags, three
// counters of which the last is the metric, mask. Addresses are 32-bit words in the byte order of
// the machine, which is little-endian on all platforms of agentctl.
func parseRoute4(line []byte) (Route, bool) {
	f := bytes.Fields(line)
	if len(f) < 8 {
		return Route{}, false
	}
	destination, ok1 := parseHex(f[1], 4)
	gateway, ok2 := parseHex(f[2], 4)
	mask, ok3 := parseHex(f[7], 4)
	flags, err := strconv.ParseUint(string(f[3]), 16, 32)
	if !ok1 || !ok2 || !ok3 || err != nil || flags&routeUp == 0 || flags&routeReject != 0 {
		return Route{}, false
	}
	bits, _ := net.IPMask(mask.AsSlice()).Size()
	metric, _ := parseUint(f[6])
	return newRoute(destination, bits, gateway, string(f[0]), metric), true
}

// parseRoute6 parses a line of /proc/net/ipv6_route: destination, length, source, length, next hop,
// metric, two counters, flags, interface. It leaves out multicast routes and routes to this machine.
func parseRoute6(line []byte) (Route, bool) {
	f := bytes.Fields(line)
	if len(f) < 10 {
		return Route{}, false
	}
	destination, ok1 := parseHex(f[0], 16)
	gateway, ok2 := parseHex(f[4], 16)
	bits, err1 := strconv.ParseUint(string(f[1]), 16, 8)
	metric, err2 := strconv.ParseUint(string(f[5]), 16, 32)
	flags, err3 := strconv.ParseUint(string(f[8]), 16, 32)
	if !ok1 || !ok2 || err1 != nil || bits > 128 || err2 != nil || err3 != nil ||
		flags&routeUp == 0 || flags&(routeReject|routeAnycast|routeLocal) != 0 || destination.IsMulticast() || string(f[9]) == "lo" {
		return Route{}, false
	}
	return newRoute(destination, int(bits), gateway, string(f[9]), metric), true
}

// parseHex parses an address of size bytes in hex.
func parseHex(b []byte, size int) (netip.Addr, bool) {
	raw := make([]byte, size)
	if len(b) != 2*size {
		return netip.Addr{}, false
	}
	if _, err := hex.Decode(raw, b); err != nil {
		return netip.Addr{}, false
	}
	if size == 4 {
		slices.Reverse(raw) // a little-endian word
	}
	return netip.AddrFromSlice(raw)
}

// newRoute writes the addresses of a route as text. Without a gateway, destinations are on the link
// itself.
func newRoute(destination netip.Addr, bits int, gateway netip.Addr, name string, metric uint64) Route {
	r := Route{Destination: "default", Interface: name, Metric: int64(min(metric, maxCount))}
	if bits > 0 || !destination.IsUnspecified() {
		r.Destination = netip.PrefixFrom(destination, bits).String()
	}
	if !gateway.IsUnspecified() {
		r.Gateway = gateway.String()
	}
	return r
}

// nameservers reads resolv.conf(5).
func (m *Machine) nameservers(ctx context.Context) func(*Network) {
	var list []string
	err := eachLine(ctx, m.path("etc/resolv.conf"), func(line []byte) bool {
		if f := bytes.Fields(line); len(f) >= 2 && string(f[0]) == "nameserver" {
			if s := Text(string(f[1]), maxName); s != "" {
				list = append(list, s)
			}
		}
		return len(list) < maxNameservers
	})
	if err != nil {
		return nil
	}
	return func(n *Network) { n.Nameservers = list }
}
