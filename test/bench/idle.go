//go:build linux

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Idle fleets: what a linked device that does nothing but stay alive costs the relay, at rest and
// again 90 s after each was called once. A relay collects what arrivals and calls left behind and
// gives it back by itself. The fleets of all sizes are idle at the same time, each with a relay of
// its own: memory and CPU are read of each process, and waiting once is enough.

// restTime is from the last call to when the relay must have given memory back.
const restTime = 90 * time.Second

// callEachTime bounds the calls to each board once, on a machine that other programs use as well.
const callEachTime = time.Minute

// idleFleet is a relay with its idle boards.
type idleFleet struct {
	kind   string // plain or TLS
	boards int
	tools  int // that each board announces
	relay  *relayProc
	fleet  *process
	empty  float64 // RSS without boards, KiB
}

func (f *idleFleet) stop() {
	f.fleet.stop()
	f.relay.stop()
}

func (f *idleFleet) name() string {
	if f.tools != mockTools {
		return fmt.Sprintf("idle board of %d with %d tools, %s", f.boards, f.tools, f.kind)
	}
	return fmt.Sprintf("idle board of %d, %s", f.boards, f.kind)
}

// perBoard is what the boards add to the relay's memory, KiB each.
func (f *idleFleet) perBoard() float64 {
	return (f.relay.memory("VmRSS") - f.empty) / float64(f.boards)
}

func (b *bench) idleBars() error {
	sizes := []int{500, 2000, 5000, 10000}
	if b.isQuick {
		sizes = []int{500, 2000}
	}
	for _, kind := range []string{"plain", "TLS"} {
		if err := b.idleFleets(kind, sizes); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
	return nil
}

// idleFleets measures one fleet of each size, and those whose boards announce three and twelve tools.
func (b *bench) idleFleets(kind string, sizes []int) error {
	var fleets []*idleFleet
	defer func() {
		for _, f := range fleets {
			f.stop()
		}
	}()
	for _, n := range sizes {
		fleets = append(fleets, &idleFleet{kind: kind, boards: n, tools: mockTools})
	}
	if !b.isQuick {
		for _, tools := range []int{3, 12} {
			fleets = append(fleets, &idleFleet{kind: kind, boards: 2000, tools: tools})
		}
	}
	for i, f := range fleets {
		if err := b.startIdle(f); err != nil {
			fleets = fleets[:i]
			return fmt.Errorf("%s: %w", f.name(), err)
		}
	}
	b.sleep(b.idle)
	limits := bar{required: 14, stretch: 10, format: "%.1f KiB"}
	if kind == "TLS" {
		limits.required, limits.stretch = 22, 16
	}
	report := func(fleets []*idleFleet, when string, value func(*idleFleet) float64, limits bar) {
		for _, f := range fleets {
			row := limits
			row.name, row.measured = f.name()+", "+when, value(f)
			if f.tools != mockTools { // no limit was ever set for these
				row.required, row.stretch = 0, 0
			}
			b.report.add(row)
		}
	}
	report(fleets, "at rest: relay RSS", (*idleFleet).perBoard, limits)

	// The relay's own timers are most of what it uses with few boards.
	large := slices.DeleteFunc(slices.Clone(fleets), func(f *idleFleet) bool { return f.boards < 2000 || f.tools != mockTools })
	cpu, at := make(map[*idleFleet]time.Duration), time.Now()
	for _, f := range large {
		cpu[f] = f.relay.cpu()
	}
	b.sleep(b.idle)
	seconds := time.Since(at).Seconds()
	report(large, "at rest: relay CPU for 1,000", func(f *idleFleet) float64 {
		return 100 * (f.relay.cpu() - cpu[f]).Seconds() / seconds / float64(f.boards) * 1000
	}, bar{required: 0.15, format: "%.3f %%"})
	if b.isQuick || b.ctx.Err() != nil {
		return b.ctx.Err()
	}

	for _, f := range fleets {
		if err := f.callEach(); err != nil {
			return fmt.Errorf("%s: %w", f.name(), err)
		}
	}
	b.sleep(restTime)
	report(fleets, "90 s after each was called: relay RSS", (*idleFleet).perBoard, limits)
	if b.profile != "" {
		for _, f := range fleets {
			summary, err := f.relay.collect()
			if err != nil {
				return err
			}
			fmt.Printf("%s: %s\n", f.name(), summary)
		}
	}
	return b.ctx.Err()
}

func (b *bench) startIdle(f *idleFleet) (err error) {
	if f.relay, err = b.startRelay(b.newName("idle-"+f.kind), relayOptions{devices: f.boards, tls: f.kind == "TLS"}); err != nil {
		return err
	}
	b.sleep(2 * time.Second)
	f.empty = f.relay.memory("VmRSS")
	begin := time.Now()
	if f.tools == mockTools {
		f.fleet, err = b.startFleet(f.relay, f.boards)
	} else {
		f.fleet, err = b.startBoards(f.relay, f.boards, f.tools)
	}
	if err == nil {
		err = f.relay.listNodes(f.boards)
	}
	if err != nil {
		f.relay.stop()
		f.fleet.stop()
		return err
	}
	fmt.Printf("%s: linked in %s; RSS %.1f MiB empty, %.1f MiB linked\n", f.name(), time.Since(begin).Round(100*time.Millisecond), f.empty/1024, f.relay.memory("VmRSS")/1024)
	return b.ctx.Err()
}

// callEach calls echo on each board once, at the pace of the paced comparison at most.
func (f *idleFleet) callEach() error {
	if f.kind == "TLS" {
		return f.relay.callEachTLS(f.boards)
	}
	next := 0
	c, err := openCallers(plainHTTP(f.relay.addr, f.relay.unaryRequest), firstCallers, &next)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.runAt(time.Now().Add(callEachTime), min(pace, f.boards), f.boards); err != nil {
		return err
	}
	if c.failed > 0 || c.done < f.boards*99/100 {
		return errors.Join(fmt.Errorf("%d of %d calls succeeded", c.done-c.failed, f.boards), c.err)
	}
	return nil
}
