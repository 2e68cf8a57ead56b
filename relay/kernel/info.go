package kernel

import (
	"cmp"
	"slices"
	"sync/atomic"
)

// counters count calls and reads by outcome. They are monotonic between resets, but for
// inFlight.
type counters struct {
	calls, errors, panics, timeouts, refused atomic.Int64
	inFlight                                 atomic.Int64
}

// totals are the counters of the whole kernel.
type totals struct {
	counters
	unlogged atomic.Int64
}

// add adds the outcomes of another set, but not its calls in flight.
func (c *counters) add(o *counters) {
	c.calls.Add(o.calls.Load())
	c.errors.Add(o.errors.Load())
	c.panics.Add(o.panics.Load())
	c.timeouts.Add(o.timeouts.Load())
	c.refused.Add(o.refused.Load())
}

func (c *counters) reset() {
	for _, n := range []*atomic.Int64{&c.calls, &c.errors, &c.panics, &c.timeouts, &c.refused} {
		n.Store(0)
	}
}

// States of a plugin.
const (
	StateLoaded   = "loaded"
	StateOpen     = "open"      // its breaker refuses calls
	StateHalfOpen = "half_open" // its breaker lets one call try
	StateDown     = "down"      // its program ended or does not answer, and is started again
)

// HealthReporter is a plugin whose program may be down while the plugin is loaded.
type HealthReporter interface {
	// Health is called under the kernel's lock: it must not block nor call the kernel.
	Health() Health
}

// Health is the state of a plugin's program.
type Health struct {
	Down     bool
	Failures int // how often it ended or did not start
	// LastError says why it was down the last time, in printable characters; the program may have
	// written part of it.
	LastError string
	// Notes say what else an operator should know, such as why a tool is not offered.
	Notes []string
}

// PluginInfo is the state of a loaded plugin.
type PluginInfo struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Tenant   string `json:"tenant,omitempty"`
	State    string `json:"state"`
	InFlight int64  `json:"in_flight"`
	// Calls are the calls and reads that reached the plugin; Errors of those were answered
	// with an error.
	Calls     int64  `json:"calls"`
	Errors    int64  `json:"errors"`
	Panics    int64  `json:"panics"`
	Timeouts  int64  `json:"timeouts"`
	Tools     int    `json:"tools"`
	Resources int    `json:"resources"`
	Sandbox   string `json:"sandbox,omitempty"` // of Manifest
	// Failures and LastError are those of Health.
	Failures  int      `json:"failures,omitempty"`
	LastError string   `json:"last_error,omitempty"`
	Notes     []string `json:"notes,omitempty"` // of Health
	// Digest and Declaration are those of a Declarer.
	Digest      string    `json:"digest,omitempty"`
	Declaration any       `json:"-"` // nil: it was not declared by a document
	Manifest    *Manifest `json:"-"` // read only
}

// Info lists the loaded plugins and the stages in force.
type Info struct {
	Plugins []PluginInfo `json:"plugins"` // ascending by name
	Stages  []string     `json:"stages"`
}

// Info returns the loaded plugins and the stages in force.
func (k *Kernel) Info() Info {
	k.mu.RLock()
	in := Info{Plugins: make([]PluginInfo, 0, len(k.plugins))}
	for _, l := range k.plugins {
		in.Plugins = append(in.Plugins, l.info())
	}
	k.mu.RUnlock()
	slices.SortFunc(in.Plugins, func(a, b PluginInfo) int { return cmp.Compare(a.Name, b.Name) })
	in.Stages = k.pipe.Names()
	return in
}

func (l *loaded) info() PluginInfo {
	m, c := l.manifest, &l.counts
	i := PluginInfo{Name: m.Name, Version: m.Version, Tenant: m.Tenant, State: l.state(), InFlight: c.inFlight.Load(),
		Calls: c.calls.Load(), Errors: c.errors.Load(), Panics: c.panics.Load(), Timeouts: c.timeouts.Load(),
		Tools: len(m.Tools), Resources: len(m.Resources), Sandbox: m.Sandbox, Manifest: m}
	if r, ok := l.plugin.(HealthReporter); ok {
		h := r.Health()
		i.Failures, i.LastError, i.Notes = h.Failures, h.LastError, h.Notes
		if h.Down {
			i.State = StateDown
		}
	}
	if d, ok := l.plugin.(Declarer); ok {
		i.Declaration, i.Digest = d.Declaration()
	}
	return i
}

// TenantSubscriptions are the subscriptions of one tenant.
type TenantSubscriptions struct {
	Tenant      string `json:"tenant"`
	Subscribers int    `json:"subscribers"`
	Waiting     int    `json:"waiting"` // subscribers with nothing pending
}

// WatchInfo is a watched resource.
type WatchInfo struct {
	Tenant   string `json:"tenant"`
	URI      string `json:"uri"`
	Watchers int    `json:"watchers"`
}

// Subscriptions are all subscriptions and watches.
type Subscriptions struct {
	Tenants []TenantSubscriptions `json:"tenants"` // ascending
	Watches []WatchInfo           `json:"watches"` // ascending by tenant and URI
}

// Stats are figures of the whole kernel. Counters begin at the start or at the last
// ResetCounters; gauges are current values.
type Stats struct {
	Plugins       int `json:"plugins"`
	Tools         int `json:"tools"`
	Resources     int `json:"resources"`
	Subscriptions int `json:"subscriptions"`
	Watches       int `json:"watches"`
	Presences     int `json:"presences"`
	BreakersOpen  int `json:"breakers_open"`

	InFlight int64 `json:"in_flight"`
	// Pending are the subscriptions with changes that were not taken yet.
	Pending int `json:"pending"`

	// Calls are calls and reads, refused ones included; Errors of those were answered with
	// an error. Unlogged are events that a full log did not take.
	Calls    int64 `json:"calls"`
	Errors   int64 `json:"errors"`
	Refused  int64 `json:"refused"`
	Panics   int64 `json:"panics"`
	Timeouts int64 `json:"timeouts"`
	Unlogged int64 `json:"unlogged"`

	// Changes were pushed to the notifier. Subscribers took the Delivered ones; Coalesced
	// ones were merged into others before that. Dropped counts how often a subscriber got
	// Change.Missed.
	Changes   int64 `json:"changes"`
	Delivered int64 `json:"delivered"`
	Coalesced int64 `json:"coalesced"`
	Dropped   int64 `json:"dropped"`

	// The latency from a change until a subscriber took it, microseconds.
	FanoutP50US int64 `json:"fanout_p50_us"`
	FanoutP95US int64 `json:"fanout_p95_us"`
	FanoutP99US int64 `json:"fanout_p99_us"`
}

// SubscriptionsInfo returns the subscriptions by tenant and the watches.
func (k *Kernel) SubscriptionsInfo() Subscriptions {
	return Subscriptions{Tenants: k.notify.info(), Watches: k.watcher.info()}
}

// Stats returns the current figures. Their parts are read one after the other, so sums may
// be off by requests in flight.
func (k *Kernel) Stats() Stats {
	c := &k.total
	s := Stats{Calls: c.calls.Load(), Errors: c.errors.Load(), Refused: c.refused.Load(), Panics: c.panics.Load(),
		Timeouts: c.timeouts.Load(), InFlight: c.inFlight.Load(), Unlogged: c.unlogged.Load()}
	k.mu.RLock()
	for _, l := range k.plugins {
		if l.breaker.Load() != nil && l.state() == StateOpen {
			s.BreakersOpen++
		}
	}
	k.mu.RUnlock()
	s.Plugins, s.Tools, s.Resources = k.Counts()
	s.Watches = len(k.watcher.info())
	k.notify.stats(&s)
	k.presence.mu.RLock()
	s.Presences = len(k.presence.entries)
	k.presence.mu.RUnlock()
	return s
}

// ResetCounters sets all counters to zero; gauges stay.
func (k *Kernel) ResetCounters() {
	k.total.reset()
	k.total.unlogged.Store(0)
	k.notify.reset()
	k.mu.RLock()
	defer k.mu.RUnlock()
	k.unloadedBoards.reset()
	for _, l := range k.plugins {
		l.counts.reset()
	}
}
