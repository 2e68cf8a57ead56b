//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// One stalled reader among fifty. A device of this process sends numbered frames and
// remembers when, so that each reader's delay is known and a missing frame is noticed. Rounds
// with a stalled reader alternate with rounds without. There is always one, though the
// relay cuts each after a while.

const (
	stallReaders = 50
	stallEvery   = 200 * time.Millisecond // five times the RFC's pace: more frames per round
)

// frameSource is a device that sends a numbered frame at each tick: the number is in mem_bytes.
type frameSource struct {
	ticks <-chan time.Time

	mu   sync.Mutex // protects sent
	sent []time.Time
}

func (d *frameSource) Capabilities() []manifest.Capability {
	return []manifest.Capability{manifest.Metrics()}
}

func (d *frameSource) Call(_ context.Context, tool manifest.ToolName, _ []byte) ([]byte, link.StreamFunc, error) {
	if tool.Verb != manifest.VerbSubscribe {
		return nil, nil, manifest.E(manifest.Internal, "this device only streams")
	}
	return []byte(`{"interval_ms":1000}`), func(ctx context.Context, send func([]byte) error) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-d.ticks:
			}
			d.mu.Lock()
			n := len(d.sent)
			d.sent = append(d.sent, time.Now())
			d.mu.Unlock()
			err := send(fmt.Appendf(nil, `{"ts_ms":%d,"node_id":%q,"cpu_pct":12.4,"mem_bytes":%d,"mem_total_bytes":8589934592,`+
				`"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}`, time.Now().UnixMilli(), tool.NodeID, n))
			if err != nil {
				return err
			}
		}
	}, nil
}

// link connects the device to the relay, of which it is the only one. unlink waits for its end.
func (d *frameSource) link(ctx context.Context, r *relayProc) (unlink func(), err error) {
	token, err := os.ReadFile(r.tokens)
	if err != nil {
		return nil, err
	}
	client := link.NewClient(link.ClientOptions{
		Dial:  func(ctx context.Context) (link.Conn, error) { return link.Dial(ctx, r.url, link.DialOptions{}) },
		Token: func() (string, error) { return strings.TrimSpace(string(token)), nil }, Version: "bench",
		InstanceID: strings.Repeat("0", 31) + "1", Handler: d,
	})
	ctx, cancel := context.WithCancel(ctx)
	var linked sync.WaitGroup
	linked.Go(func() { _ = client.Run(ctx) })
	unlink = func() { cancel(); linked.Wait() }
	if err := r.listNodes(1); err != nil {
		unlink()
		return nil, err
	}
	return unlink, nil
}

// delay is how long ago frame n was sent, ms.
func (d *frameSource) delay(n int, now time.Time) float64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n < 0 || n >= len(d.sent) {
		return 0
	}
	return now.Sub(d.sent[n]).Seconds() * 1000
}

// frameNumber reads mem_bytes.
func frameNumber(data []byte) int {
	_, after, _ := bytes.Cut(data, []byte(`"mem_bytes":`))
	digits, _, _ := bytes.Cut(after, []byte(","))
	n, err := strconv.Atoi(string(digits))
	if err != nil {
		return -1
	}
	return n
}

func (b *bench) stallBar() error {
	r, err := b.startRelay("stall", relayOptions{devices: 1})
	if err != nil {
		return err
	}
	defer r.stop()
	tick := time.NewTicker(stallEvery)
	defer tick.Stop()
	d := &frameSource{ticks: tick.C}
	unlink, err := d.link(b.ctx, r)
	if err != nil {
		return err
	}
	defer unlink()
	var calm, stalled, share []float64
	for range 2 * b.rounds {
		for _, with := range []bool{false, true} {
			p99, got, err := b.stallRound(r, d, with)
			if err != nil {
				return err
			}
			share = append(share, got)
			if with {
				stalled = append(stalled, p99)
			} else {
				calm = append(calm, p99)
			}
		}
	}
	worst := quantile(share, 0)
	fmt.Printf("p99 delay of %d readers: calm %.2f ms (%s), one stalled %.2f ms (%s)\n", stallReaders, median(calm), list(calm, "%.2f"), median(stalled), list(stalled, "%.2f"))
	b.report.add(bar{name: "one stalled reader of 50: frames that the others get", measured: 100 * worst, required: 100, more: true, format: "%.2f %%"})
	b.report.add(bar{name: "one stalled reader of 50: p99 delay of the others / without", measured: median(stalled) / median(calm), required: 1.5, format: "%.2f x"})
	return nil
}

// stallRound runs the readers for one round and returns the p99 of their delays and the
// share of frames that they got, of those that were sent between each one's first and
// last.
func (b *bench) stallRound(r *relayProc, d *frameSource, with bool) (p99, share float64, err error) {
	ctx, cancel := context.WithCancel(b.ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	tool := metricsTool(r.nodes[0])
	var mu sync.Mutex // protects what follows
	var delays []float64
	var got, want int
	var ended error
	for range stallReaders {
		s, err := subscribe(r.addr, r.token, tool, false)
		if err != nil {
			return 0, 0, err
		}
		stop := context.AfterFunc(ctx, func() { _ = s.conn.Close() })
		wg.Go(func() {
			defer stop()
			first, last, count := -1, -1, 0
			var mine []float64
			closed, err := s.frames(func(data []byte) {
				n := frameNumber(data)
				if first < 0 {
					first = n // the joiner's frame may be an old one
					return
				}
				last, count, mine = n, count+1, append(mine, d.delay(n, time.Now()))
			})
			mu.Lock()
			defer mu.Unlock()
			delays, got, want = append(delays, mine...), got+count, want+last-first
			if ctx.Err() == nil {
				ended = fmt.Errorf("a reader's stream ended: %w %s", err, closed)
			}
		})
	}
	if with {
		wg.Go(func() {
			if err := stalledReaders(ctx, r, tool); err != nil {
				mu.Lock()
				ended = errors.Join(ended, err)
				mu.Unlock()
			}
		})
	}
	b.sleep(b.stall)
	cancel()
	wg.Wait()
	if ended != nil || want < stallReaders {
		return 0, 0, errors.Join(ended, fmt.Errorf("%d frames", got))
	}
	return quantile(delays, 0.99), float64(got) / float64(want), nil
}

// stalledReaders opens streams with the smallest window and reads nothing, one after the
// other. The relay cuts each after some seconds, which the kernel does not report to a
// reader with a full window; so the next one comes before that.
func stalledReaders(ctx context.Context, r *relayProc, tool string) error {
	for ctx.Err() == nil {
		s, err := subscribe(r.addr, r.token, tool, true)
		if err != nil {
			return err
		}
		defer func() { _ = s.conn.Close() }() // at the end of the round
		pause(ctx, 2*time.Second)
	}
	return nil
}
