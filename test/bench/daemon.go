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
	sides := []*process{d.agent, d.exporter}
	var cpu [2][]float64 // ms per 60 samples, by window
	for range max(b.rounds, b.count) {
		var before [2]time.Duration
		for i, p := range sides {
			before[i] = p.cpu()
		}
		b.sleep(b.daemon)
		for i, p := range sides {
			cpu[i] = append(cpu[i], (p.cpu()-before[i]).Seconds()*1000*60/b.daemon.Seconds())
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
		fmt.Printf("%-14s after %d samples: RSS %.0f KiB, anonymous %.0f KiB, CPU %.1f ms per 60 samples (%s)\n",
			name, scrapes, rss[i], anon[i], median(cpu[i]), list(cpu[i], "%.1f"))
	}
	b.report.add(bar{name: "device daemon / node_exporter: RSS", measured: rss[0] / rss[1], required: 0.75, stretch: 0.60, format: "%.2f x"})
	b.report.add(bar{name: "device daemon / node_exporter: anonymous memory", measured: anon[0] / anon[1], required: 0.65, stretch: 0.35, format: "%.2f x"})
	b.report.add(bar{name: "device daemon / node_exporter: CPU per 60 samples", measured: median(ratios(cpu[0], cpu[1])), required: 0.35, stretch: 0.20, format: "%.2f x"})
	if err := b.hostileBar(d.agent); err != nil {
		return err
	}
	if err := b.firstSampleBar(); err != nil {
		return err
	}
	return b.startCost()
}

// startCost compares what a start costs: the version command of both.
func (b *bench) startCost() error {
	var agent, exporter []float64
	for range 3 * b.count {
		for _, side := range []struct {
			to   *[]float64
			name string
			arg  string
		}{{&agent, b.board, "version"}, {&exporter, b.exporter, "--version"}} {
			cmd := exec.CommandContext(b.ctx, side.name, side.arg)
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("%s %s: %w", side.name, side.arg, err)
			}
			*side.to = append(*side.to, (cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()).Seconds()*1000)
		}
	}
	fmt.Printf("CPU of a start: agentctl-board version %.1f ms, node_exporter --version %.1f ms\n", median(agent), median(exporter))
	b.report.add(bar{name: "version command / node_exporter --version: CPU", measured: median(ratios(agent, exporter)), required: 1.0, format: "%.2f x"})
	return nil
}
