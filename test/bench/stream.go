//go:build linux

package main

import (
	"fmt"
	"strings"
	"time"
)

// The metric stream of one device to many subscribers, beside a loop that writes and flushes and
// knows no slow reader. Saturated, the device sends as soon as the relay keeps up; paced, it sends a frame a
// second, the most that RFC-0009 allows.

func (b *bench) streamBar() error {
	unpin, err := pinClient()
	if err != nil {
		return err
	}
	defer unpin()
	for _, n := range b.subscriberCounts() {
		naive := &fanoutSide{name: "naive loop", start: func() (*fanoutServer, error) { return b.naiveServer("naive-metrics") }}
		ours := &fanoutSide{name: "metric stream", start: b.metricServer}
		if err := b.alternateFanout([]*fanoutSide{naive, ours}, n, b.events, time.Second); err != nil {
			return err
		}
		limits := [2]float64{}
		if n <= 1000 {
			limits = [2]float64{0.85, 1}
		}
		b.compareFanout(fmt.Sprintf("metric stream, %d subscribers: events per CPU second / naive loop", n), ours, naive, limits)
		b.report.add(bar{name: fmt.Sprintf("metric stream: RSS a subscriber of %d", n), measured: median(ours.memory), required: 16, stretch: 6, format: "%.1f KiB"})
	}
	return nil
}

// maxFrames is below the 1,000 frames that a relay takes from a device at once before it ends the
// link (and 500 a second): few subscribers are served faster than that.
const maxFrames = 800

func metricsTool(node string) string { return "sys." + node + ".metrics.subscribe" }

// metricServer is a relay with a device that sends when it is pushed.
func (b *bench) metricServer() (*fanoutServer, error) {
	r, err := b.startRelay(b.newName("stream"), relayOptions{devices: 1, onCore: true})
	if err != nil {
		return nil, err
	}
	ticks := make(chan time.Time)
	unlink, err := (&frameSource{ticks: ticks}).link(b.ctx, r)
	if err != nil {
		r.stop()
		return nil, err
	}
	// One identity may have half of the relay's connections, which is less than 5,000 subscribers.
	second, err := output(b.ctx, b.agentctl, "token", "create", "--state-dir", r.state, "--class", "agent", "--ttl", "24h")
	if err != nil {
		unlink()
		r.stop()
		return nil, err
	}
	tool := metricsTool(r.nodes[0])
	return &fanoutServer{name: "relay", server: r.process, addr: r.addr, stop: func() { unlink(); r.stop() },
		subscribe: [][]byte{subscribeMetrics(r.addr, r.token, tool), subscribeMetrics(r.addr, strings.TrimSpace(second), tool)}, started: headEnd, mark: []byte("event: metric"), maxEvents: maxFrames,
		push: func() bool {
			select {
			case ticks <- time.Now():
				return true
			default:
				return false
			}
		}}, nil
}
