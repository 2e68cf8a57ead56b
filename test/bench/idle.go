//go:build linux

package main

import (
	"fmt"
	"time"
)

// An idle fleet: what a linked device that does nothing but stay alive costs the relay.
// A calm relay collects what the arrivals left behind and gives it back by itself; its
// memory is read after that, and once more after the CPU window.

func (b *bench) idleBars() error {
	for _, tls := range []bool{false, true} {
		if err := b.idleFleet(tls); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) idleFleet(tls bool) error {
	kind, required, stretch := "plain", 16.0, 10.0
	if tls {
		kind, required, stretch = "TLS", 28, 20
	}
	r, err := b.startRelay("idle-"+kind, relayOptions{devices: b.fleet, tls: tls})
	if err != nil {
		return err
	}
	defer r.stop()
	b.sleep(2 * time.Second)
	empty := r.memory("VmRSS")
	begin := time.Now()
	fleet, err := b.startFleet(r, b.fleet)
	if err != nil {
		return err
	}
	defer fleet.stop()
	linked, most := time.Since(begin), r.memory("VmRSS")
	b.settle(r)
	cpu, at := r.cpu(), time.Now()
	b.sleep(b.idle)
	busy := float64(r.cpu()-cpu) / float64(time.Since(at))
	full := r.memory("VmRSS")
	if b.profile != "" {
		summary, err := r.collect()
		if err != nil {
			return err
		}
		fmt.Println(summary)
	}
	n := float64(b.fleet)
	fmt.Printf("%s: %d devices linked in %s; RSS %.1f MiB empty, %.1f MiB linked, %.1f MiB calm; all of it per device %.1f KiB\n",
		kind, b.fleet, linked.Round(100*time.Millisecond), empty/1024, most/1024, full/1024, full/n)
	b.report.add(bar{name: fmt.Sprintf("idle device of %d, %s: relay RSS", b.fleet, kind), measured: (full - empty) / n, required: required, stretch: stretch, format: "%.1f KiB"})
	b.report.add(bar{name: fmt.Sprintf("idle fleet of %d, %s: CPU per 1,000 devices", b.fleet, kind), measured: 100 * busy / n * 1000, required: 0.15, format: "%.3f %%"})
	return b.ctx.Err()
}

// settle waits until the relay has given memory back, at most half a minute: it does so
// after five calm seconds.
func (b *bench) settle(r *relayProc) {
	most := r.memory("VmRSS")
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end) && b.ctx.Err() == nil; b.sleep(time.Second) {
		now := r.memory("VmRSS")
		if most = max(most, now); now < 0.9*most {
			break
		}
	}
	b.sleep(2 * time.Second)
}
