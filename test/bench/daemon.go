//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// The device daemon next to node_exporter: both read the same machine once a second,
// the daemon by its own clock, with its link up, its socket open and its history on, the
// exporter because it is scraped.

type daemons struct {
	relay           *relayProc
	agent, exporter *process
	started         time.Time
	cancel          context.CancelFunc
	scraping        sync.WaitGroup

	mu      sync.Mutex // protects the fields below
	scrapes int
	failed  error
}

func (b *bench) startDaemons() (d *daemons, err error) {
	if _, err := os.Stat(b.exporter); err != nil {
		return nil, fmt.Errorf("no node_exporter to compare with, give -node-exporter: %w", err)
	}
	d = &daemons{cancel: func() {}}
	defer func() {
		if err != nil {
			d.stop()
		}
	}()
	if d.relay, err = b.startRelay("daemon", relayOptions{devices: 1}); err != nil {
		return nil, err
	}
	if err = seedHistory(b.ctx, filepath.Join(b.boardState(), "history.db"), seededHours); err != nil {
		return nil, err
	}
	d.agent, _, err = start(20*time.Second, isReady, b.board, "run", "--relay", "ws"+strings.TrimPrefix(d.relay.url, "http"),
		"--token-file", d.relay.tokens, "--interval", "1s", "--state-dir", b.boardState(), "--socket", b.boardSocket(),
		// A commit in each window; by default there would be one in twelve.
		"--history-flush", b.daemon.String())
	if err != nil {
		return nil, err
	}
	if err := d.relay.listNodes(1); err != nil {
		return nil, err
	}
	addr, err := freePort()
	if err != nil {
		return nil, err
	}
	d.exporter, _, err = start(20*time.Second, func(l string) bool {
		return strings.Contains(l, "Listening on") || strings.Contains(l, "TLS is disabled")
	},
		b.exporter, "--collector.disable-defaults", "--collector.cpu", "--collector.meminfo", "--collector.filesystem", "--collector.loadavg",
		"--web.listen-address="+addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(b.ctx)
	d.cancel, d.started = cancel, time.Now()
	d.scraping.Go(func() { d.scrape(ctx, "http://"+addr+"/metrics") })
	return d, nil
}

// scrape fetches the exporter's page once a second over one connection, as Prometheus does.
func (d *daemons) scrape(ctx context.Context, url string) {
	client := &http.Client{Timeout: 5 * time.Second}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := func() error {
			res, err := client.Get(url)
			if err != nil {
				return err
			}
			defer func() { _ = res.Body.Close() }()
			page, err := io.ReadAll(res.Body)
			if err == nil && (res.StatusCode != http.StatusOK || !strings.Contains(string(page), "node_memory_MemAvailable_bytes") ||
				!strings.Contains(string(page), "node_filesystem_avail_bytes")) {
				err = fmt.Errorf("%s without the readings", res.Status)
			}
			return err
		}()
		d.mu.Lock()
		if d.scrapes++; err != nil && ctx.Err() == nil {
			d.failed = fmt.Errorf("scrape: %w", err)
		}
		d.mu.Unlock()
	}
}

func (d *daemons) stop() {
	d.cancel()
	d.scraping.Wait()
	d.agent.stop()
	d.exporter.stop()
	if d.relay != nil {
		d.relay.stop()
	}
}

func (b *bench) daemonBars() error {
	d := b.report.pair
	if left := time.Duration(b.samples)*time.Second - time.Since(d.started); left > 0 {
		fmt.Printf("the daemons have %s to their plateau\n", left.Round(time.Second))
		b.sleep(left)
	}
	if err := b.queryBars(d.agent); err != nil {
		return err
	}
	if err := b.hourOfCommands(); err != nil {
		return err
	}
	b.sleep(b.daemon) // what the last command asked for, such as a burst of samples, has ended
	sides := []*process{d.agent, d.exporter}
	var cpu, wakeups [2][]float64 // ms per 60 samples, and wake-ups a second, by window
	for range max(b.rounds, b.count) {
		var before [2]time.Duration
		var slept [2]int
		for i, p := range sides {
			before[i], slept[i] = p.cpu(), p.wakeups()
		}
		at := time.Now()
		b.sleep(b.daemon)
		seconds := time.Since(at).Seconds()
		for i, p := range sides {
			cpu[i] = append(cpu[i], (p.cpu()-before[i]).Seconds()*1000*60/seconds)
			wakeups[i] = append(wakeups[i], float64(p.wakeups()-slept[i])/seconds)
		}
	}
	if b.ctx.Err() != nil {
		return b.ctx.Err()
	}
	d.mu.Lock()
	scrapes, failed := d.scrapes, d.failed
	d.mu.Unlock()
	if ids, err := d.relay.online(); err != nil || len(ids) != 1 {
		failed = errors.Join(failed, fmt.Errorf("the board's link is down: %w", err))
	}
	if err := askBoard(b.boardSocket()); err != nil {
		failed = errors.Join(failed, err)
	}
	failed = errors.Join(failed, b.isRecording())
	if failed != nil || !d.agent.alive() || !d.exporter.alive() {
		return errors.Join(errors.New("a daemon is not well"), failed)
	}
	rss := [2]float64{d.agent.memory("VmRSS"), d.exporter.memory("VmRSS")}
	anon := [2]float64{d.agent.memory("RssAnon"), d.exporter.memory("RssAnon")}
	for i, name := range []string{"agentctl run", "node_exporter"} {
		fmt.Printf("%-14s after %d samples: RSS %.0f KiB, anonymous %.0f KiB, CPU %.1f ms per 60 samples (%s), %.1f wake-ups a second\n",
			name, scrapes, rss[i], anon[i], median(cpu[i]), list(cpu[i], "%.1f"), median(wakeups[i]))
	}
	b.report.add(bar{name: "device daemon / node_exporter after an hour of commands: RSS", measured: rss[0] / rss[1], required: 0.70, stretch: 0.60, format: "%.2f x"})
	b.report.add(bar{name: "device daemon / node_exporter after an hour of commands: anonymous memory", measured: anon[0] / anon[1], required: 0.50, stretch: 0.35, format: "%.2f x"})
	b.report.add(bar{name: "device daemon / node_exporter after an hour of commands: CPU per 60 samples", measured: median(ratios(cpu[0], cpu[1])), required: 0.20, stretch: 0.16, format: "%.2f x"})
	b.report.add(bar{name: "device daemon: wake-ups a second", measured: median(wakeups[0]), required: 8, stretch: 4, format: "%.1f"})
	if err := b.hostileBar(d.agent); err != nil {
		return err
	}
	if err := b.firstSampleBar(); err != nil {
		return err
	}
	return b.startCost()
}

// startCost compares what a start costs: the version command of both builds, and status, which
// asks the daemon.
func (b *bench) startCost() error {
	sides := []*struct {
		name              string
		command           []string
		required, stretch float64
		cpu               []float64 // ms
	}{
		{name: "node_exporter --version", command: []string{b.exporter, "--version"}},
		{name: "version, board build", command: []string{b.board, "version"}, required: 1},
		{name: "version, full build", command: []string{b.agentctl, "version"}, required: 1.7, stretch: 1.5},
		{name: "status, board build", command: []string{b.board, "status", "--socket", b.boardSocket()}},
		{name: "status, full build", command: []string{b.agentctl, "status", "--socket", b.boardSocket()}},
	}
	for range 5 * b.count {
		for _, side := range sides {
			cmd := exec.CommandContext(b.ctx, side.command[0], side.command[1:]...)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", strings.Join(side.command, " "), err, out)
			}
			side.cpu = append(side.cpu, (cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()).Seconds()*1000)
		}
	}
	for i, side := range sides {
		fmt.Printf("CPU of a start: %-24s %.1f ms\n", side.name, median(side.cpu))
		if i > 0 {
			b.report.add(bar{name: side.name + " / node_exporter --version: CPU", measured: median(ratios(side.cpu, sides[0].cpu)), required: side.required, stretch: side.stretch, format: "%.2f x"})
		}
	}
	return nil
}
