package doctor

import (
	"context"
	"slices"
	"sync"
	"time"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/prober"
)

// Inside examines an installation from inside its daemon, which knows its own state: the checks of
// Examine less those of the socket, of systemd's view and of the way to the relay, over which the
// question came. Its zero value is ready, and its methods may be called from any goroutine.
type Inside struct {
	mu      sync.Mutex     // protects running
	running map[string]int // checks that run, by name
}

// maxRunning bounds the goroutines of one check that waits for a disk.
const maxRunning = 2

// Examine runs the checks. It returns when ctx ends at the latest; unfinished are the names of the
// checks that did not. A check that hangs in the kernel keeps its goroutine.
func (i *Inside) Examine(ctx context.Context, version string, builtAt time.Time, c *config.Config, s *daemon.Status, r *prober.ModuleReadings) (report *Report, unfinished []string) {
	t := &target{
		Options: Options{Version: version, BuiltAt: builtAt}, config: c,
		relay: c.Text("relay"), tokenFile: c.Text("token_file"), stateDir: c.Text("state_dir"),
	}
	found := []Finding{daemonFinding(s, version), samplingFinding(s), linkFinding(s), storageFinding(s), powerFinding(r), heatFinding(r), wearFinding(r), t.checkClock(ctx)}
	onDisk := []struct {
		name string
		run  func() Finding
	}{
		{"state_dir", func() Finding { return t.checkStateDir(s) }},
		{"join", func() Finding { return t.checkJoin(s) }},
		{"token", func() Finding { return t.checkToken(s, time.Now()) }},
	}
	results := make(chan Finding, len(onDisk)) // a check that comes too late has no receiver
	waiting := 0
	for _, check := range onDisk {
		unfinished = append(unfinished, check.name)
		if !i.start(check.name) {
			continue
		}
		waiting++
		go func() {
			f := check.run()
			i.end(check.name) // first: the caller may ask again at once
			results <- f
		}()
	}
	for waiting > 0 {
		select {
		case f := <-results:
			waiting--
			found = append(found, f)
			unfinished = slices.DeleteFunc(unfinished, func(name string) bool { return name == f.Name })
		case <-ctx.Done():
			waiting = 0
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return rank(a.Status) - rank(b.Status) })
	return newReport(found), unfinished
}

// rank orders findings: what needs a person comes first.
func rank(s Status) int { return slices.Index([]Status{Fail, Warn, OK, Skip}, s) }

// start counts a check that runs; false if too many of that name hang.
func (i *Inside) start(name string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.running[name] >= maxRunning {
		return false
	}
	if i.running == nil {
		i.running = make(map[string]int)
	}
	i.running[name]++
	return true
}

func (i *Inside) end(name string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.running[name]--
}
