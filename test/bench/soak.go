//go:build linux

package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The soak: a relay, 200 mock boards in four processes, callers and readers, of which
// some are slow and some stalled; an external plugin that is killed, stages
// that are swapped, tickets that are written (soakkernel.go). In the first half boards and relay are killed at
// random; in the second the relay lives on, so that growth shows. The invariants are
// checked all the time, and at the end, when everybody has left.
const (
	soakBoards    = 200
	soakProcesses = 4
	soakCallers   = 16
	soakReaders   = 40
	soakSlow      = 5
	soakStalled   = 5

	callBound  = 5250 * time.Millisecond // of every call, whatever is killed meanwhile
	soakMemory = 256 << 10               // KiB of the relay
)

type soaker struct {
	*bench
	relayAddr, metricsAddr string
	boards                 [soakProcesses]*process
	started                time.Time
	kills                  atomic.Int64 // of the relay
	admin                  string       // token

	mu       sync.Mutex // protects the fields below
	relay    *relayProc
	counts   map[string]int
	broken   map[string]int // broken invariants
	worst    time.Duration  // of a call
	resident float64        // most of the relay's memory, KiB
}

func soak(ctx context.Context, dir string, args []string) error {
	b := &bench{ctx: ctx, dir: dir}
	s := &soaker{bench: b, started: time.Now(), counts: map[string]int{}, broken: map[string]int{}}
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	length := f.Duration("for", time.Hour, "how long")
	f.StringVar(&b.agentctl, "agentctl", "bin/agentctl", "the full build")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *length < time.Minute {
		return fmt.Errorf("a soak of %s shows nothing; it takes a minute at least", *length)
	}
	var err error
	if b.agentctl, err = filepath.Abs(b.agentctl); err != nil {
		return err
	}
	if err := s.open(); err != nil {
		return err
	}
	defer s.close()
	if err := s.run(*length); err != nil {
		return err
	}
	return s.checkResult()
}

// open starts the relay and the boards.
func (s *soaker) open() (err error) {
	if s.relayAddr, err = freePort(); err != nil {
		return err
	}
	if s.metricsAddr, err = freePort(); err != nil {
		return err
	}
	s.relay = &relayProc{state: filepath.Join(s.dir, "soak"), addr: s.relayAddr, url: "http://" + s.relayAddr}
	if err := os.MkdirAll(s.relay.state, 0o700); err != nil {
		return err
	}
	if err := s.relay.createTokens(s.bench, relayOptions{devices: soakBoards}); err != nil {
		return err
	}
	all, err := os.ReadFile(s.relay.tokens)
	if err != nil {
		return err
	}
	tokens := strings.Fields(string(all))
	for i := range s.boards {
		part := strings.Join(tokens[i*soakBoards/soakProcesses:(i+1)*soakBoards/soakProcesses], "\n")
		if err := os.WriteFile(s.tokenFile(i), []byte(part), 0o600); err != nil {
			return err
		}
	}
	if err := s.openPlugin(); err != nil {
		return err
	}
	if err := s.startRelay(); err != nil {
		return err
	}
	for i := range s.boards {
		if err := s.startBoards(i); err != nil {
			return err
		}
	}
	return s.relay.listNodes(soakBoards)
}

func (s *soaker) tokenFile(i int) string { return filepath.Join(s.dir, fmt.Sprint("boards", i)) }

func (s *soaker) startRelay() error {
	p, _, err := start(30*time.Second, func(l string) bool { return strings.Contains(l, `"ready":true`) }, s.agentctl, "relay",
		"--listen", s.relayAddr, "--metrics-listen", s.metricsAddr, "--state-dir", s.relay.state, "--log-level", "warn", "--plugin", soakPlugin)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.relay.process = p
	s.mu.Unlock()
	return nil
}

func (s *soaker) startBoards(i int) error {
	p, _, err := start(3*time.Minute, isReady, s.agentctl, "run", "--mock", fmt.Sprint(soakBoards/soakProcesses), "--relay", "ws://"+s.relayAddr,
		"--token-file", s.tokenFile(i), "--state-dir", filepath.Join(s.dir, "fleet"))
	s.boards[i] = p
	return err
}

func (s *soaker) close() {
	for _, p := range append(s.boards[:], s.relay.process) {
		p.stop()
	}
}

// run keeps callers, readers and the random kills going for that long, then ends all of them.
func (s *soaker) run(length time.Duration) error {
	ctx, cancel := context.WithTimeout(s.ctx, length)
	defer cancel()
	var wg sync.WaitGroup
	for i := range soakCallers {
		wg.Go(func() { s.caller(ctx, i) })
	}
	for range soakReaders {
		wg.Go(func() { s.reader(ctx, 0) })
	}
	for range soakSlow {
		wg.Go(func() { s.reader(ctx, 3*time.Second) })
	}
	for range soakStalled {
		wg.Go(func() { s.stalled(ctx) })
	}
	s.kernelFaults(ctx, &wg)
	err := s.injectFaults(ctx, length)
	cancel()
	wg.Wait()
	return err
}

// injectFaults kills and restarts processes, watches the relay's memory, and prints once a minute how it
// goes. Its error means that something could not be started again.
func (s *soaker) injectFaults(ctx context.Context, length time.Duration) error {
	next := func(least, most time.Duration) time.Time { return time.Now().Add(least + rand.N(most-least)) }
	boards, relay, report := next(10*time.Second, 30*time.Second), next(20*time.Second, 90*time.Second), time.Now().Add(time.Minute)
	half := s.started.Add(length / 2)
	baseline := ""
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			continue
		case <-time.After(time.Second):
		}
		s.watchMemory()
		now := time.Now()
		switch {
		case now.After(boards):
			i := rand.N(len(s.boards))
			s.boards[i].kill()
			s.count("killed: 50 boards")
			if err := s.startBoards(i); err != nil {
				return err
			}
			boards = next(10*time.Second, 60*time.Second)
		case now.After(relay) && now.Before(half):
			s.kills.Add(1)
			s.relay.kill()
			s.count("killed: relay")
			if err := s.startRelay(); err != nil {
				return err
			}
			relay = next(30*time.Second, 120*time.Second)
		case now.After(half) && baseline == "":
			baseline = s.footprint()
			fmt.Printf("%s the relay lives on from here: %s\n", s.clock(), baseline)
		case now.After(report):
			fmt.Printf("%s %s; %s\n", s.clock(), s.footprint(), s.summary())
			report = now.Add(time.Minute)
		}
	}
	return nil
}

func (s *soaker) clock() string {
	return time.Since(s.started).Round(time.Second).String()
}

func (s *soaker) watchMemory() {
	rss := s.relay.memory("VmRSS")
	s.mu.Lock()
	s.resident = max(s.resident, rss)
	s.mu.Unlock()
	if rss > soakMemory {
		s.recordFailure("the relay's memory is above its bound")
	}
}

// footprint describes the relay as it is.
func (s *soaker) footprint() string {
	return fmt.Sprintf("relay %.1f MiB, %d files, %.0f goroutines, %.0f boards", s.relay.memory("VmRSS")/1024, s.relay.files(),
		s.metric("go_goroutines"), s.metric("agentctl_devices_connected"))
}

// metric reads one value of the relay's /metrics; -1 if there is none.
func (s *soaker) metric(name string) float64 {
	res, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + s.metricsAddr + "/metrics")
	if err != nil {
		return -1
	}
	defer func() { _ = res.Body.Close() }()
	var page strings.Builder
	if err := res.Write(&page); err != nil {
		return -1
	}
	_, after, found := strings.Cut(page.String(), "\n"+name+" ")
	v := -1.0
	if found {
		_, _ = fmt.Sscan(after, &v)
	}
	return v
}

func (s *soaker) count(what string) {
	s.mu.Lock()
	s.counts[what]++
	s.mu.Unlock()
}

// recordFailure notes a broken invariant.
func (s *soaker) recordFailure(what string) {
	s.mu.Lock()
	s.broken[what]++
	s.mu.Unlock()
}

func (s *soaker) summary() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(s.counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, s.counts[k]))
	}
	return strings.Join(parts, ", ")
}

// checkResult waits until the relay has released everything and reports what was observed.
func (s *soaker) checkResult() error {
	s.checkKernel()
	limit := soakBoards + 60 // a board is a file and a goroutine
	var files int
	var goroutines, streams float64
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end) && s.ctx.Err() == nil; time.Sleep(time.Second) {
		files, goroutines, streams = s.relay.files(), s.metric("go_goroutines"), s.metric("agentctl_sse_streams")
		if files <= limit && goroutines >= 0 && goroutines <= float64(limit) && streams == 0 && s.metric("agentctl_devices_connected") == soakBoards {
			break
		}
	}
	if files > limit || goroutines > float64(limit) || goroutines < 0 {
		s.recordFailure(fmt.Sprintf("the relay still holds %d files and %.0f goroutines for %d boards", files, goroutines, soakBoards))
	}
	if n := s.metric("agentctl_devices_connected"); n != soakBoards {
		s.recordFailure(fmt.Sprintf("only %.0f of %d boards came back", n, soakBoards))
	}
	if streams != 0 {
		s.recordFailure(fmt.Sprintf("%.0f streams are left over", streams))
	}
	fmt.Printf("\nafter %s: %s\n%s\nlongest call %s, most memory of the relay %.1f MiB\n", s.clock(), s.footprint(), s.summary(), s.worst.Round(time.Millisecond), s.resident/1024)
	if len(s.broken) == 0 {
		fmt.Println("every invariant held")
		return s.ctx.Err()
	}
	for _, k := range slices.Sorted(maps.Keys(s.broken)) {
		fmt.Printf("BROKEN %d times: %s\n", s.broken[k], k)
	}
	return fmt.Errorf("%d invariants were broken", len(s.broken))
}
