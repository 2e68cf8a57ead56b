package prober

import "time"

const (
	// maxIfaces bounds the interfaces that are told apart; the kernel lists the
	// machine's own first, those of containers later.
	maxIfaces = 64
	// arphrdPPP is the type of a modem's or tunnel's line, of if_arp.h.
	arphrdPPP = "512"
)

// netReader adds up the traffic of the interfaces. It owns the differences: counters
// of an interface that went away or began anew must not make the sum go back.
type netReader struct {
	dev    procFile
	sys    string
	ifaces map[string]*iface
	round  uint64 // of the newest reading
	ours   netCounters
	all    netCounters
	row    *int // changes when the sum is made of other interfaces
	real   bool // the sum is ours
	last   netTotals
}

type iface struct {
	last  netCounters
	round uint64
	real  bool // it has a device behind it, or is a ppp line
}

func newNet(root string) *netReader {
	return &netReader{
		dev:    procFile{path: root + "proc/net/dev", fd: -1, buf: make([]byte, 16<<10)},
		sys:    root + "sys/class/net/",
		ifaces: make(map[string]*iface),
	}
}

func (n *netReader) Read(m *ModuleReadings) error {
	b, err := n.dev.readAll()
	if err != nil {
		return err
	}
	now := time.Now()
	n.round++
	if err := parseNetDev(b, n.count); err != nil {
		return n.dev.explain(err)
	}
	hasReal := false
	for name, i := range n.ifaces {
		if i.round != n.round {
			delete(n.ifaces, name)
		} else if i.real {
			hasReal = true
		}
	}
	if n.row == nil || hasReal != n.real {
		n.row, n.real = new(int), hasReal
	}
	to := netTotals{now, n.row, n.all}
	if hasReal {
		to.netCounters = n.ours
	}
	if n.last.row == to.row {
		m.Network = newNetwork(n.last, to)
	}
	n.last = to
	return nil
}

// count books one interface.
func (n *netReader) count(name []byte, c netCounters) {
	if string(name) == "lo" {
		return
	}
	i := n.ifaces[string(name)]
	if i == nil {
		if len(n.ifaces) >= maxIfaces {
			return
		}
		dir := n.sys + string(name)
		i = &iface{last: c, real: exists(dir+"/device") || word(dir+"/type") == arphrdPPP}
		n.ifaces[string(name)] = i
	}
	// Less than before: the interface, or its driver, began anew.
	if c.bytesIn >= i.last.bytesIn && c.bytesOut >= i.last.bytesOut {
		grown := c.sub(i.last)
		n.all = n.all.add(grown)
		if i.real {
			n.ours = n.ours.add(grown)
		}
	}
	i.last, i.round = c, n.round
}

func (n *netReader) Close() error {
	n.dev.close()
	return nil
}
