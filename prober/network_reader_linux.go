package prober

import "time"

const (
	// maxIfaces bounds the interfaces that are told apart; the kernel lists the
	// machine's own first, those of containers later.
	maxIfaces = 64
	// arphrdPPP is the type of a modem's or tunnel's line, of if_arp.h.
	arphrdPPP = "512"
)

// networkReader adds up the traffic of the interfaces. It owns the differences: counters
// of an interface that went away or began anew must not make the sum go back.
type networkReader struct {
	dev          procFile
	sys          string
	ifaces       map[string]*iface
	generation   uint64 // of the newest reading
	physical     netCounters
	all          netCounters
	epoch        *int // changes when the sum is made of other interfaces
	usesPhysical bool // the sum is ours
	last         netTotals
}

type iface struct {
	last       netCounters
	generation uint64
	isPhysical bool // it has a device behind it, or is a ppp line
}

func newNetworkReader(root string) *networkReader {
	return &networkReader{
		dev:    procFile{path: root + "proc/net/dev", fd: -1, buf: make([]byte, 16<<10)},
		sys:    root + "sys/class/net/",
		ifaces: make(map[string]*iface),
	}
}

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
	hasReal := false
	for name, i := range n.ifaces {
		if i.generation != n.generation {
			delete(n.ifaces, name)
		} else if i.isPhysical {
			hasReal = true
		}
	}
	if n.epoch == nil || hasReal != n.usesPhysical {
		n.epoch, n.usesPhysical = new(int), hasReal
	}
	to := netTotals{now, n.epoch, n.all}
	if hasReal {
		to.netCounters = n.physical
	}
	if n.last.epoch == to.epoch {
		m.Network = newNetwork(n.last, to)
	}
	n.last = to
	return nil
}

// count books one interface.
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
	// Less than before: the interface, or its driver, began anew.
	if c.bytesIn >= i.last.bytesIn && c.bytesOut >= i.last.bytesOut {
		grown := c.sub(i.last)
		n.all = n.all.add(grown)
		if i.isPhysical {
			n.physical = n.physical.add(grown)
		}
	}
	i.last, i.generation = c, n.generation
}

func (n *networkReader) Close() error {
	n.dev.close()
	return nil
}
