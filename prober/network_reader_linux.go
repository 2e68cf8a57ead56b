package prober

import "time"

const (
	// maxIfaces bounds the interfaces that are counted; the kernel lists those of the
	// machine first and those of containers later.
	maxIfaces = 64
	// arphrdPPP is the type of a modem's or tunnel's line, of if_arp.h.
	arphrdPPP = "512"
)

// networkReader adds up the traffic of the interfaces. It sums differences, so that an
// interface that disappears or is reset does not decrease the sum.
type networkReader struct {
	dev          procFile
	sys          string
	ifaces       map[string]*iface
	generation   uint64      // of the newest reading
	physical     netCounters // sum of the interfaces that lead out of the machine
	all          netCounters // sum of every interface but loopback
	epoch        *int        // changes when totals are made of other interfaces
	usesPhysical bool        // totals are of physical, not of all
	last         netTotals
}

// iface is an interface as it was last counted.
type iface struct {
	last       netCounters
	generation uint64
	isPhysical bool // it has a device behind it, or is a ppp line
}

func newNetworkReader(root string) *networkReader {
	return &networkReader{
		dev:    newProcFile(root+"proc/net/dev", 16<<10),
		sys:    root + "sys/class/net/",
		ifaces: make(map[string]*iface),
	}
}

// Read sets Network from the second reading of an epoch on. A new epoch begins when the first interface
// that leads out of the machine appears, or the last one goes: the sum is then of other interfaces, and
// its difference to the sum before would be no traffic.
func (n *networkReader) Read(m *ModuleReadings) error {
	b, err := n.dev.readAll()
	if err != nil {
		return err
	}
	now := time.Now()
	n.generation++
	if err := parseNetDev(b, n.count); err != nil {
		return n.dev.wrapErr(err)
	}
	hasPhysical := false
	for name, i := range n.ifaces {
		if i.generation != n.generation {
			delete(n.ifaces, name)
		} else if i.isPhysical {
			hasPhysical = true
		}
	}
	if n.epoch == nil || hasPhysical != n.usesPhysical {
		n.epoch, n.usesPhysical = new(int), hasPhysical
	}
	to := netTotals{now, n.epoch, n.all}
	if hasPhysical {
		to.netCounters = n.physical
	}
	if n.last.epoch == to.epoch {
		m.Network = newNetwork(n.last, to)
	}
	n.last = to
	return nil
}

// count adds what an interface counted since the last reading.
func (n *networkReader) count(name []byte, c netCounters) {
	if string(name) == "lo" {
		return
	}
	i := n.ifaces[string(name)]
	if i == nil {
		if len(n.ifaces) >= maxIfaces {
			return
		}
		dir := n.sys + string(name)
		i = &iface{last: c, isPhysical: exists(dir+"/device") || readText(dir+"/type") == arphrdPPP}
		n.ifaces[string(name)] = i
	}
	// A counter that decreased means that the interface, or its driver, was restarted.
	if c[bytesIn] >= i.last[bytesIn] && c[bytesOut] >= i.last[bytesOut] {
		grown := c.sub(i.last)
		n.all = n.all.add(grown)
		if i.isPhysical {
			n.physical = n.physical.add(grown)
		}
	}
	i.last, i.generation = c, n.generation
}

// Close closes /proc/net/dev.
func (n *networkReader) Close() error {
	n.dev.close()
	return nil
}
