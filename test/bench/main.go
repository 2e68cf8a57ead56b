//go:build linux

// Command bench measures agentctl against its performance bars, side by side with plain
// references in one run. test/bench.sh (make bench) builds what it needs and runs it;
// docs/performance.md describes what is measured and why.
//
//	bench [flags]      measure and print the table
//	bench soak [flags] load and faults for a while (make soak)
//	bench serve KIND   a reference server, or the relay with profiles
//
// Every server is a separate process, whose CPU time is read from outside; the load comes
// from this process. The sides of a comparison alternate, and medians are reported.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// plan is how long and how often to measure.
type plan struct {
	rounds  int           // rounds of each side; medians are over these
	unary   time.Duration // one round of the echo
	events  time.Duration // one round of a stream of events, in each of the two ways
	stall   time.Duration // one round with, or without, a stalled reader; twice as many
	idle    time.Duration // the idle fleet's CPU
	devices int           // linked while the echo is measured
	samples int           // of the device daemon before its memory counts
	daemon  time.Duration // one window of the device daemon's CPU
	count   int           // runs of the sampler's benchmark, and of the version command
}

var (
	full = plan{rounds: 5, unary: 3 * time.Second, events: 3 * time.Second, stall: 7 * time.Second, idle: 30 * time.Second,
		devices: 3000, samples: 600, daemon: 24 * time.Second, count: 5}
	quick = plan{rounds: 2, unary: 600 * time.Millisecond, events: time.Second, stall: 2 * time.Second, idle: 7 * time.Second,
		devices: 3000, samples: 60, daemon: 5 * time.Second, count: 3}
)

type bench struct {
	plan
	ctx               context.Context
	dir               string // state, certificates, sockets; removed at the end
	self              string
	isQuick           bool
	agentctl, board   string // the builds
	exporter, mercure string // programs that they are compared with
	names             int    // see newName
	shared            bool   // other programs use the machine
	subscribers       []int  // of the event streams, instead of the plan's; empty: the plan's
	profile           string // where CPU profiles of the relay go; "": none
	report            report
}

func main() {
	switch arg := append(os.Args, "")[1]; arg {
	case "serve":
		if err := serve(os.Args[2:]); err != nil {
			fail(err)
		}
	case "soak":
		if err := withDir(func(ctx context.Context, dir string) error { return soak(ctx, dir, os.Args[2:]) }); err != nil {
			fail(err)
		}
	default:
		if err := withDir(measure); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintf(os.Stderr, "bench: %s\n", err)
	os.Exit(1)
}

// withDir runs fn with a temporary directory and a context that ends at SIGINT.
func withDir(fn func(ctx context.Context, dir string) error) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "agentctl-bench")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := raiseFiles(); err != nil {
		return err
	}
	return fn(ctx, dir)
}

// raiseFiles raises the soft limit of open files; children inherit it.
func raiseFiles() error {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	lim.Cur = lim.Max
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim)
}

// parts are the bars by name, in the order of running.
var parts = []struct {
	name string
	run  func(*bench) error
}{
	{"unary", (*bench).unaryBars},
	{"stream", (*bench).streamBar},
	{"stall", (*bench).stallBar},
	{"events", (*bench).eventsBars},
	{"kernel", (*bench).kernelBars},
	{"idle", (*bench).idleBars},
	{"fleet", (*bench).fleetBars},
	{"toolset", (*bench).toolsetBars},
	{"start", (*bench).startBars},
	{"build", (*bench).buildBars},
	{"sampler", (*bench).samplerBars},
	{"flash", (*bench).flashBar},
	{"daemon", (*bench).daemonBars},
}

func measure(ctx context.Context, dir string) error {
	b := &bench{ctx: ctx, dir: dir, plan: full}
	var only string
	flag.StringVar(&b.agentctl, "agentctl", "bin/agentctl", "the full build")
	flag.StringVar(&b.board, "board", "bin/agentctl-board", "the board build")
	flag.StringVar(&b.exporter, "node-exporter", "", "node_exporter, which the daemon is compared with")
	flag.StringVar(&b.mercure, "mercure", "", "the Mercure hub, which the event gateway is compared with")
	flag.BoolVar(&b.isQuick, "quick", false, "a subset of five minutes; its figures are rough")
	flag.StringVar(&only, "only", "", "comma-separated `PARTS` instead of all: unary, stream, stall, events, kernel, idle, fleet, toolset, start, build, sampler, flash, daemon")
	flag.BoolVar(&b.shared, "shared", false, "other programs use the machine: the time in which a server waits for its core counts as busy; for ratios while you work, not for publication")
	flag.Func("subscribers", "comma-separated `NUMBERS` of subscribers of a stream, instead of 200, 1000 and 5000", func(s string) error {
		for _, n := range strings.Split(s, ",") {
			size, err := strconv.Atoi(n)
			if err != nil || size < 1 {
				return fmt.Errorf("not a number of subscribers: %q", n)
			}
			b.subscribers = append(b.subscribers, size)
		}
		return nil
	})
	flag.StringVar(&b.profile, "profile", "", "write the relay's profiles into `DIR`; the relay is then a part of this program, and slower")
	flag.Parse()
	if b.isQuick {
		b.plan = quick
	}
	var err error
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	for _, p := range []*string{&b.agentctl, &b.board, &b.exporter, &b.mercure, &b.profile} {
		if *p != "" {
			if *p, err = filepath.Abs(*p); err != nil {
				return err
			}
		}
	}
	started := time.Now()
	fmt.Printf("%d cores, %s, %s; load %s; medians of %d\n", runtime.NumCPU(), kernelVersion(), runtime.Version(), loadavg(), b.rounds)

	// The daemon needs ten minutes to its plateau: it gets there beside the others, and
	// is measured alone at the end.
	if selected(only, "daemon") {
		pair, err := b.startDaemons()
		if err != nil {
			b.report.missing("daemon", err)
		} else {
			b.report.pair = pair
			defer pair.stop()
		}
	}
	for _, p := range parts {
		if !selected(only, p.name) || ctx.Err() != nil || (p.name == "daemon" && b.report.pair == nil) {
			continue
		}
		fmt.Printf("\n# %s (load %s)\n", p.name, loadavg())
		if err := p.run(b); err != nil {
			b.report.missing(p.name, err)
		}
	}
	fmt.Printf("\n%s", b.report.table())
	fmt.Printf("took %s; load at the end %s\n", time.Since(started).Round(time.Second), loadavg())
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return b.report.err()
}

func selected(only, part string) bool {
	return only == "" || slices.Contains(strings.Split(only, ","), part)
}

// sleep waits unless the run is over.
func (b *bench) sleep(d time.Duration) {
	select {
	case <-b.ctx.Done():
	case <-time.After(d):
	}
}
