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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentctl/relay/gateway"
)

// The event gateway beside a loop that writes and flushes, and does nothing else. Both
// get the same events by the same POST and write the same frames to the same clients.
// The gateway signs each event, filters by topic, counts, and could resume any client.

const (
	eventsTopic = "bench/frame"
	fillTopic   = "bench/fill"
	stalledOf   = 50 // stalled subscribers
)

// eventsSize is one measurement: subscribers, and the events they get in a round.
type eventsSize struct {
	subscribers, events int
	every               time.Duration
}

func (b *bench) eventSizes() []eventsSize {
	return []eventsSize{{1000, b.events, 50 * time.Millisecond}, {5000, b.events / 4, 250 * time.Millisecond}}
}

// eventsBars measures the events a second of server CPU, memory, and stalled readers.
func (b *bench) eventsBars() error {
	for _, size := range b.eventSizes() {
		var naive, ours, memory []float64
		for range b.rounds {
			n, _, err := b.eventsRound("naive-events", size)
			if err != nil {
				return fmt.Errorf("naive loop: %w", err)
			}
			o, kib, err := b.eventsRound("gateway", size)
			if err != nil {
				return fmt.Errorf("gateway: %w", err)
			}
			naive, ours, memory = append(naive, n), append(ours, o), append(memory, kib)
		}
		fmt.Printf("events a second of server CPU, %d subscribers: naive %.0f (%s), gateway %.0f (%s); RSS a subscriber %s KiB\n", size.subscribers,
			median(naive), list(naive, "%.0f"), median(ours), list(ours, "%.0f"), list(memory, "%.1f"))
		b.report.add(bar{name: fmt.Sprintf("event gateway: events per CPU second, %d subscribers / naive loop", size.subscribers), more: true,
			measured: median(ratios(ours, naive)), required: 1, stretch: 1.15, format: "%.2f x"})
		if size.subscribers == 5000 {
			b.report.add(bar{name: "event gateway: RSS a subscriber of 5,000", measured: median(memory), required: 16, stretch: 10, format: "%.1f KiB"})
		}
	}
	return b.eventsStall()
}

// reference starts one of the two servers.
func (b *bench) reference(kind string) (*process, string, error) {
	return start(10*time.Second, func(l string) bool { _, _, err := net.SplitHostPort(l); return err == nil }, b.self, "serve", kind)
}

// eventsRound is one server with all its subscribers, from its start.
func (b *bench) eventsRound(kind string, size eventsSize) (perCPU, kib float64, err error) {
	p, addr, err := b.reference(kind)
	if err != nil {
		return 0, 0, err
	}
	defer p.stop()
	warm := &subscriberPool{addr: addr} // the server's first requests are not its subscribers' memory
	if err := errors.Join(warm.add(20, eventsTopic, 0), warm.play(b, 5, 10*time.Millisecond)); err != nil {
		return 0, 0, err
	}
	warm.close()
	b.sleep(100 * time.Millisecond)
	before := p.memory("VmRSS")
	a := &subscriberPool{addr: addr}
	defer a.close()
	if err := errors.Join(a.add(size.subscribers, eventsTopic, 0), a.play(b, 3, size.every)); err != nil {
		return 0, 0, err
	}
	cpu, got := p.cpu(), a.got.Load()
	if err := a.play(b, size.events, size.every); err != nil {
		return 0, 0, err
	}
	cpu, got = p.cpu()-cpu, a.got.Load()-got
	return float64(got) / cpu.Seconds(), (p.memory("VmRSS") - before) / float64(size.subscribers), nil
}

// eventsStall compares the delays of 5,000 readers without and with 50 that do not read.
func (b *bench) eventsStall() error {
	p, addr, err := b.reference("gateway")
	if err != nil {
		return err
	}
	defer p.stop()
	size := b.eventSizes()[1]
	size.events = max(size.events/2, 1) // more and shorter rounds, because the machine's speed varies too
	a := &subscriberPool{addr: addr}
	defer a.close()
	if err := errors.Join(a.add(size.subscribers-stalledOf, eventsTopic, 0), a.play(b, 3, size.every)); err != nil {
		return err
	}
	var calm, stalled []float64
	for range 2 * b.rounds {
		a.delays(true)
		if err := a.play(b, size.events, size.every); err != nil {
			return err
		}
		calm = append(calm, quantile(a.delays(false), 0.99))
		bad := &subscriberPool{addr: addr}
		if err := bad.add(stalledOf, eventsTopic+","+fillTopic, 1); err != nil {
			return err
		}
		before, err := bad.fill(b)
		if err != nil {
			return err
		}
		a.delays(true)
		err = a.play(b, size.events, size.every)
		stalled = append(stalled, quantile(a.delays(false), 0.99))
		after, cerr := counter(addr, "mcp_sse_events_dropped")
		bad.close()
		if err = errors.Join(err, cerr); err != nil {
			return err
		}
		if want := stalledOf * size.events; after-before != want {
			return fmt.Errorf("%d events were dropped, want %d: those of the stalled readers", after-before, want)
		}
	}
	fmt.Printf("p99 delay of %d readers: calm %.1f ms (%s), %d stalled %.1f ms (%s); RSS %.0f MiB\n", size.subscribers-stalledOf, median(calm), list(calm, "%.1f"),
		stalledOf, median(stalled), list(stalled, "%.1f"), p.memory("VmRSS")/1024)
	b.report.add(bar{name: "event gateway: 50 stalled of 5,000: p99 delay of the others / without", measured: median(stalled) / median(calm), required: 1.25, format: "%.2f x"})
	return nil
}

// subscriberPool is some subscribers of one server.
type subscriberPool struct {
	addr  string
	conns []net.Conn
	wg    sync.WaitGroup
	got   atomic.Int64 // events received, by all
	slow  bool         // they do not read

	mu     sync.Mutex // protects took
	timed  atomic.Bool
	took   []float64
	posted atomic.Int64 // when, ns
}

// add connects n more; window is as in subscribe, and 0 for those that read.
func (a *subscriberPool) add(n int, topics string, window int) error {
	a.slow = window > 0
	for range n {
		d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if window > 0 {
				e := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, window) })
				err = errors.Join(err, e)
			}
			return err
		}}
		c, err := d.Dial("tcp", a.addr)
		if err != nil {
			return err
		}
		a.conns = append(a.conns, c)
		if _, err := fmt.Fprintf(c, "GET %s?topics=%s HTTP/1.1\r\nHost: %s\r\n\r\n", gateway.StreamPath, topics, a.addr); err != nil {
			return err
		}
		in := bufio.NewReaderSize(c, 1024)
		if line, err := in.ReadSlice('\n'); err != nil || !bytes.Contains(line, []byte(" 200 ")) {
			return fmt.Errorf("subscribe: %q %w", line, err)
		}
		for line := []byte(nil); !bytes.HasPrefix(line, []byte(": stream start")); { // from here on it is subscribed
			if line, err = in.ReadSlice('\n'); err != nil {
				return fmt.Errorf("subscribe: %w", err)
			}
		}
		if !a.slow {
			a.wg.Go(func() { a.read(in) })
		}
	}
	return nil
}

// read counts events by their id lines.
func (a *subscriberPool) read(in *bufio.Reader) {
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return
		}
		if !bytes.HasPrefix(line, []byte("id: ")) {
			continue
		}
		if a.timed.Load() {
			took := float64(time.Now().UnixNano()-a.posted.Load()) / 1e6
			a.mu.Lock()
			a.took = append(a.took, took)
			a.mu.Unlock()
		}
		a.got.Add(1)
	}
}

// delays returns what was collected, and goes on collecting or not.
func (a *subscriberPool) delays(collect bool) []float64 {
	a.timed.Store(collect)
	a.mu.Lock()
	defer a.mu.Unlock()
	took := a.took
	a.took = nil
	return took
}

// fill posts what only these subscribers see until each loses it, and returns how many
// events were dropped.
func (a *subscriberPool) fill(b *bench) (dropped int, err error) {
	data := `"` + strings.Repeat("x", 60<<10) + `"`
	for range 1000 {
		was := dropped
		if err := errors.Join(b.ctx.Err(), post(a.addr, fillTopic, data)); err != nil {
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

// play posts n events, each when all have had the one before.
func (a *subscriberPool) play(b *bench, n int, every time.Duration) error {
	data := `{"ts_ms":1234567890123,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,"disk_pct":31.2,"load_1m":0.42}`
	for range n {
		want := a.got.Load() + int64(len(a.conns))
		next := time.Now().Add(every)
		a.posted.Store(time.Now().UnixNano())
		if err := post(a.addr, eventsTopic, data); err != nil {
			return err
		}
		for end := time.Now().Add(20 * time.Second); a.got.Load() < want; b.sleep(time.Millisecond) {
			if b.ctx.Err() != nil || time.Now().After(end) {
				return fmt.Errorf("%d of %d subscribers got the event", int64(len(a.conns))+a.got.Load()-want, len(a.conns))
			}
		}
		b.sleep(time.Until(next))
	}
	return nil
}

func (a *subscriberPool) close() {
	for _, c := range a.conns {
		_ = c.Close()
	}
	a.wg.Wait()
}

func post(addr, topic, data string) error {
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
