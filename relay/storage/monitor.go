package storage

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"
)

// Intervals of Monitor.Run. A fault that is over shows after about four seconds at most if nobody writes:
// the rest of a probeInterval, and a checkInterval. retryAfterMS is a little more.
const (
	checkInterval = time.Second
	probeInterval = 3 * time.Second
	logInterval   = 6 * time.Second // between lines on average: 10 a minute
	maxLogBurst   = 6

	// probeGrace is how long Run waits at its end for a probe, which a hung disk holds.
	probeGrace = time.Second
)

// Options of a Monitor.
type Options struct {
	Logger *zap.Logger // default none
}

// Monitor watches the stores of one relay: each has a Watch, which Monitor.Watch makes before Run. Run
// logs and probes only. Health, Stuck and Watch.Err compute their answers from the operations when they
// are called, so that readyz shows a fault before the next check of Run.
type Monitor struct {
	log     *zap.Logger
	limit   *rate.Limiter // of logged lines
	skipped int           // lines that limit has left out since the last one; used by Run

	mu      sync.Mutex // protects watches; taken before Watch.mu
	watches []*Watch
}

// New makes a Monitor without stores.
func New(o Options) *Monitor {
	return &Monitor{log: cmp.Or(o.Logger, zap.NewNop()), limit: rate.NewLimiter(rate.Every(logInterval), maxLogBurst)}
}

// Watch returns the Watch of a store, and makes it at the first call. Health lists the stores in the order
// of these calls.
func (m *Monitor) Watch(name string) *Watch {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.watches {
		if w.name == name {
			return w
		}
	}
	w := NewWatch(name)
	m.watches = append(m.watches, w)
	return w
}

// Health is the state of one store.
type Health struct {
	Store    string    `json:"store"`
	Problems []Problem `json:"problems"` // the worst first; empty for none
	Stats    Stats     `json:"-"`
}

// OK reports whether the store works: it has no problem but warnings.
func (h *Health) OK() bool {
	for _, p := range h.Problems {
		if !p.Warning {
			return false
		}
	}
	return true
}

// Health returns the state of every store. It reads memory only, so that it answers while a
// disk hangs.
func (m *Monitor) Health() []Health {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Health, 0, len(m.watches))
	for _, w := range m.watches {
		h := Health{Store: w.name, Problems: w.Problems(), Stats: w.Stats()}
		if h.Problems == nil {
			h.Problems = []Problem{} // a list in JSON
		}
		list = append(list, h)
	}
	return list
}

// Stuck returns the error of the first store of which an operation has been in flight for
// longer than d, nil for none.
func (m *Monitor) Stuck(d time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.watches {
		if err := w.Stuck(d); err != nil {
			return err
		}
	}
	return nil
}

// Run logs changes and probes stores with a fault, until ctx ends. It then waits for probes,
// except for one that hangs: its goroutine is left behind, since nothing can end it. Each probe has a
// goroutine, so that one that hangs delays neither the probes of other stores nor the log.
func (m *Monitor) Run(ctx context.Context) error {
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	done := make(chan *Watch)
	running := 0
	for {
		select {
		case <-ctx.Done():
			m.awaitProbes(done, running)
			return nil
		case w := <-done:
			w.probing = false
			running--
		case <-tick.C:
			m.mu.Lock()
			watches := append([]*Watch(nil), m.watches...)
			m.mu.Unlock()
			for _, w := range watches {
				m.logChange(w)
				if probe := w.dueProbe(); probe != nil {
					w.probing = true
					running++
					go w.runProbe(ctx, probe, done)
				}
			}
		}
	}
}

// awaitProbes waits for the probes in flight, up to probeGrace.
func (m *Monitor) awaitProbes(done <-chan *Watch, running int) {
	grace := time.NewTimer(probeGrace)
	defer grace.Stop()
	for ; running > 0; running-- {
		select {
		case <-done:
		case <-grace.C:
			m.log.Warn("a probe of the disk hangs and is left behind", zap.Int("probes", running))
			go func() { // take the results when the disk lets go
				for ; running > 0; running-- {
					<-done
				}
			}()
			return
		}
	}
}

// dueProbe returns the probe that is to run now, nil for none: while a fault lasts, none is
// running, and the last one is probeInterval ago. An operation in flight is a probe itself.
func (w *Watch) dueProbe() func(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	if w.probing || w.probe == nil || len(w.faults) == 0 || now.Sub(w.probedAt) < probeInterval {
		return nil
	}
	if _, hung := w.oldestLocked(now); hung {
		return nil
	}
	w.probedAt = now
	return w.probe
}

// runProbe brackets a probe like any operation: it can set a fault, and while it hangs it is in flight,
// so that Problems reports the store as hung.
func (w *Watch) runProbe(ctx context.Context, probe func(context.Context) error, done chan<- *Watch) {
	op := w.Begin(probeName)
	err := probe(ctx)
	if ctx.Err() != nil && Classify(err) == "" {
		err = nil // Run ended it
	}
	op.End(err)
	done <- w
}

// logChange logs when the worst problem of a store changes. Of a fault that comes and goes many times a
// minute it logs some changes only, with the number of lines that were left out. The stores share the
// limit: mostly they are on one disk and fail together.
func (m *Monitor) logChange(w *Watch) {
	problems := w.Problems()
	state := ""
	if len(problems) > 0 {
		state = string(problems[0].Kind)
	}
	if state == w.lastState {
		return
	}
	if !m.limit.Allow() {
		m.skipped++
		return // lastState stays, so that the final state is logged
	}
	w.lastState = state
	var fields []zap.Field
	if m.skipped > 0 {
		fields = append(fields, zap.Int("lines_left_out", m.skipped))
		m.skipped = 0
	}
	if state == "" {
		m.log.Info(w.name+" works again", fields...)
		return
	}
	p := problems[0]
	fields = append(fields, zap.String("problem", state), zap.Time("since", p.Since))
	if p.Operation != "" {
		fields = append(fields, zap.String("operation", p.Operation))
	}
	if p.Detail != "" {
		fields = append(fields, zap.String("detail", p.Detail))
	}
	if p.Warning {
		m.log.Warn(w.name+" "+predicates[p.Kind], fields...)
	} else {
		m.log.Error(w.name+" "+predicates[p.Kind], fields...)
	}
}

// predicates make a sentence of a kind, with the store's name before them.
var predicates = map[Kind]string{
	Slow:       "is slow",
	Hung:       "does not answer",
	Full:       "is full",
	ReadOnly:   "cannot be written",
	Failing:    "reports errors",
	Locked:     "is locked by another process",
	Damaged:    "is damaged",
	Missing:    "is not in use",
	Lost:       "lost data",
	NearlyFull: "is nearly full",
}

// Describe says in one line what is wrong with a store, for readyz and people. It leaves out Detail,
// which can have paths and errors: readyz answers without a token.
func Describe(store string, p Problem, now time.Time) string {
	var b strings.Builder
	b.WriteString(store + " " + predicates[p.Kind])
	if p.Operation != "" {
		b.WriteString(" (" + p.Operation + ")")
	}
	b.WriteString(" since " + p.Since.UTC().Format(time.RFC3339))
	if age := now.Sub(p.Since); age >= time.Second {
		b.WriteString(", " + age.Truncate(time.Second).String())
	}
	return b.String()
}
