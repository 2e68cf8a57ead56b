//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentctl/relay/gateway"
)

// The event gateway beside a loop that writes and flushes, and does nothing else. Both
// get the same events by the same POST and write the same frames to the same clients.
// The gateway signs each event, writes it to its log on the disk before it accepts it, filters
// by topic, counts, and could resume any client. nchan and Mercure are what others would use;
// each has its documented settings, and keeps as many events for clients that come back.

const (
	eventsTopic = "bench/frame"
	fillTopic   = "bench/fill"
	stalledOf   = 50 // stalled subscribers
)

// framesPerSecond is what all subscribers together are sent in the paced comparison.
const framesPerSecond = 20_000

// subscriberCounts are the sizes of the comparisons of event streams.
func (b *bench) subscriberCounts() []int {
	switch {
	case len(b.subscribers) > 0:
		return b.subscribers
	case b.isQuick:
		return []int{1000}
	}
	return []int{200, 1000, 5000}
}

// eventsBars compares the gateway, with its log on the disk, with the naive loop and with others'
// servers.
func (b *bench) eventsBars() error {
	unpin, err := pinClient()
	if err != nil {
		return err
	}
	defer unpin()
	limits := map[int][2]float64{1000: {1.15, 1.3}, 5000: {1.15, 1.3}}
	absent := make(map[string]error)
	for _, n := range b.subscriberCounts() {
		naive := &fanoutSide{name: "naive loop", start: func() (*fanoutServer, error) { return b.naiveServer("naive-events") }}
		ours := &fanoutSide{name: "event gateway", start: b.gatewayServer}
		nchan := &fanoutSide{name: "nchan", start: b.nchanServer, peer: true, absent: absent["nchan"]}
		mercure := &fanoutSide{name: "Mercure", start: b.mercureServer, peer: true, absent: absent["Mercure"]}
		sides := []*fanoutSide{naive, ours, nchan, mercure}
		if err := b.alternateFanout(sides, n, b.events, time.Duration(n)*time.Second/framesPerSecond); err != nil {
			return err
		}
		row := fmt.Sprintf("event gateway, %d subscribers: events per CPU second / ", n)
		b.compareFanout(row+"naive loop", ours, naive, limits[n])
		for _, peer := range []*fanoutSide{nchan, mercure} {
			if peer.absent == nil {
				b.compareFanout(row+peer.name, ours, peer, [2]float64{})
			} else if absent[peer.name] == nil {
				absent[peer.name] = peer.absent
				b.report.absent(peer.name, peer.absent)
			}
		}
		b.report.add(bar{name: fmt.Sprintf("event gateway: RSS a subscriber of %d", n), measured: median(ours.memory), required: 16, stretch: 10, format: "%.1f KiB"})
	}
	return b.eventsStall()
}

// compareFanout adds two rows: the events per CPU second of a side by those of another, saturated and paced.
// The limits, must and stretch, apply to the saturated one.
func (b *bench) compareFanout(name string, s, than *fanoutSide, limits [2]float64) {
	row := bar{name: name + ", saturated", more: true, required: limits[0], stretch: limits[1], format: "%.2f x",
		measured: median(ratios(fanoutPerCPU(s.saturated), fanoutPerCPU(than.saturated)))}
	for _, o := range []*fanoutSide{s, than} {
		if busy := medianOf(o.saturated, func(r fanoutRound) float64 { return saturation(r.busy, r.waited, b.shared) }); busy < minBusy && row.void == "" {
			row.void = fmt.Sprintf("%s used %.0f %% of its core", o.name, 100*busy)
		}
	}
	b.report.add(row)
	row = bar{name: name + ", paced", more: true, format: "%.2f x", measured: median(ratios(fanoutPerCPU(s.paced), fanoutPerCPU(than.paced)))}
	rates := []float64{medianOf(s.paced, func(r fanoutRound) float64 { return r.rate }), medianOf(than.paced, func(r fanoutRound) float64 { return r.rate })}
	if slices.Min(rates) < 0.95*slices.Max(rates) {
		row.void = fmt.Sprintf("%s got %.0f and %s %.0f events a second", s.name, rates[0], than.name, rates[1])
	}
	b.report.add(row)
}

// eventsStall compares the delays of 5,000 readers without and with 50 that do not read.
func (b *bench) eventsStall() error {
	f, err := b.gatewayServer()
	if err != nil {
		return err
	}
	defer f.stop()
	const subs, every = 5000 - stalledOf, 250 * time.Millisecond
	next := 0
	l, err := openFanout(f, subs, &next)
	if err != nil {
		return err
	}
	defer l.close()
	events := int(2 * b.events / every)
	p99 := func() (float64, error) {
		if err := l.reset(); err != nil {
			return 0, err
		}
		l.timed = true
		err := l.play(events, 0, maxInFlight, every)
		return quantile(l.delay, 0.99), err
	}
	var calm, stalled []float64
	for range b.rounds {
		without, err := p99()
		if err != nil {
			return err
		}
		bad := &eventStallers{addr: f.addr}
		before, err := bad.open(b)
		if err != nil {
			return err
		}
		with, err := p99()
		after, cerr := counter(f.addr, "mcp_sse_events_dropped")
		bad.close()
		if err = errors.Join(err, cerr); err != nil {
			return err
		}
		if want := stalledOf * events; after-before != want {
			return fmt.Errorf("%d events were dropped, want %d: those of the stalled readers", after-before, want)
		}
		calm, stalled = append(calm, without), append(stalled, with)
	}
	fmt.Printf("p99 delay of %d readers: calm %.1f ms (%s), %d stalled %.1f ms (%s); RSS %.0f MiB\n", subs, median(calm), list(calm, "%.1f"),
		stalledOf, median(stalled), list(stalled, "%.1f"), f.server.memory("VmRSS")/1024)
	b.report.add(bar{name: "event gateway: 50 stalled of 5,000: p99 delay of the others / without", measured: median(stalled) / median(calm), required: 1.25, format: "%.2f x"})
	return nil
}

// eventStallers subscribe and do not read.
type eventStallers struct {
	addr  string
	conns []net.Conn
}

// open connects them, posts what only they see until each loses it, and returns how many events
// were dropped.
func (a *eventStallers) open(b *bench) (dropped int, err error) {
	for range stalledOf {
		d := net.Dialer{Control: smallWindow}
		c, err := d.Dial("tcp", a.addr)
		if err != nil {
			return 0, err
		}
		a.conns = append(a.conns, c)
		if _, err := fmt.Fprintf(c, "GET %s?topics=%s HTTP/1.1\r\nHost: %s\r\n\r\n", gateway.StreamPath, eventsTopic+","+fillTopic, a.addr); err != nil {
			return 0, err
		}
		in := bufio.NewReaderSize(c, 1024)
		for line := []byte(nil); !bytes.HasPrefix(line, []byte(": stream start")); { // from here on it is subscribed
			if line, err = in.ReadSlice('\n'); err != nil {
				return 0, fmt.Errorf("subscribe: %w", err)
			}
		}
	}
	data := `"` + strings.Repeat("x", 60<<10) + `"`
	for range 1000 {
		was := dropped
		if err := errors.Join(b.ctx.Err(), publish(a.addr, fillTopic, data)); err != nil {
			return 0, err
		}
		for last := -1; last != dropped; { // until it stops growing
			last = dropped
			b.sleep(20 * time.Millisecond)
			if dropped, err = counter(a.addr, "mcp_sse_events_dropped"); err != nil {
				return 0, err
			}
		}
		if dropped-was == len(a.conns) {
			return dropped, nil
		}
	}
	return 0, errors.New("the stalled subscribers take everything")
}

func (a *eventStallers) close() {
	for _, c := range a.conns {
		_ = c.Close()
	}
}

func publish(addr, topic, data string) error {
	res, err := http.Post("http://"+addr+gateway.IngestPath, "application/json", strings.NewReader(`{"topic":"`+topic+`","data":`+data+`}`))
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	if res.StatusCode != http.StatusAccepted {
		return fmt.Errorf("post: %s", res.Status)
	}
	return nil
}

// counter reads one of the gateway's metrics.
func counter(addr, name string) (int, error) {
	res, err := http.Get("http://" + addr + gateway.MetricsPath)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(body), "\n"+name+" ")
	line, _, _ := strings.Cut(after, "\n")
	return strconv.Atoi(line)
}
