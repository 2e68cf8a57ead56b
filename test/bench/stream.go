//go:build linux

package main

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// The metric stream at a frame a second, as the RFC allows at most, to many subscribers
// of one device, beside a loop that writes and flushes and knows no slow reader.

func (b *bench) streamBar() error {
	r, err := b.startRelay("stream", relayOptions{devices: 1})
	if err != nil {
		return err
	}
	defer r.stop()
	fleet, err := b.startFleet(r, 1)
	if err != nil {
		return err
	}
	defer fleet.stop()
	if err := r.listNodes(1); err != nil {
		return err
	}
	plain, plainAddr, err := start(10*time.Second, func(l string) bool { _, _, err := net.SplitHostPort(l); return err == nil }, b.self, "serve", "naive")
	if err != nil {
		return err
	}
	defer plain.stop()
	tool := metricsTool(r.nodes[0])
	var naive, ours []float64
	for range b.rounds {
		n, err := b.streamRound(plain, plainAddr, "", tool)
		if err != nil {
			return fmt.Errorf("naive loop: %w", err)
		}
		o, err := b.streamRound(r.process, r.addr, r.token, tool)
		if err != nil {
			return fmt.Errorf("relay: %w", err)
		}
		naive, ours = append(naive, n), append(ours, o)
	}
	fmt.Printf("events a second of server CPU: naive %.0f (%s), relay %.0f (%s)\n", median(naive), list(naive, "%.0f"), median(ours), list(ours, "%.0f"))
	b.report.add(bar{name: fmt.Sprintf("metric stream: events per CPU second, %d subscribers / naive loop", b.subscribers), more: true,
		measured: median(ratios(ours, naive)), required: 0.75, stretch: 0.85, format: "%.2f x"})
	return nil
}

func metricsTool(node string) string { return "sys." + node + ".metrics.subscribe" }

// streamRound connects the subscribers, waits until each has had a frame, and counts
// events and the server's CPU over some whole periods.
func (b *bench) streamRound(server *process, addr, token, tool string) (perCPU float64, err error) {
	var got, started atomic.Int64
	var wg sync.WaitGroup
	subs := make([]*subscriber, 0, b.subscribers)
	defer func() {
		for _, s := range subs {
			_ = s.conn.Close()
		}
		wg.Wait()
	}()
	for range b.subscribers {
		s, err := subscribe(addr, "", token, tool, 0)
		if err != nil {
			return 0, err
		}
		subs = append(subs, s)
		wg.Go(func() {
			first := true
			_, _ = s.frames(func([]byte) {
				got.Add(1)
				if first {
					first = false
					started.Add(1)
				}
			})
		})
	}
	for end := time.Now().Add(10 * time.Second); started.Load() < int64(b.subscribers); b.sleep(20 * time.Millisecond) {
		if time.Now().After(end) || b.ctx.Err() != nil {
			return 0, fmt.Errorf("%d of %d subscribers got a frame", started.Load(), b.subscribers)
		}
	}
	settle := func() { // between two beats: nothing was received for 300 ms
		for n := got.Load(); ; n = got.Load() {
			b.sleep(300 * time.Millisecond)
			if got.Load() == n || b.ctx.Err() != nil {
				return
			}
		}
	}
	b.sleep(time.Second)
	settle()
	cpu, n := server.cpu(), got.Load()
	b.sleep(b.stream)
	settle()
	cpu, n = server.cpu()-cpu, got.Load()-n
	if want := int64(b.subscribers) * int64(b.stream/time.Second-1); n < want {
		return 0, fmt.Errorf("%d events in %s, want %d or more", n, b.stream, want)
	}
	return float64(n) / cpu.Seconds(), nil
}
