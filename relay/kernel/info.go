package kernel

import (
	"cmp"
	"slices"
	"sync/atomic"
)

// counters count what happened to calls and reads.
type counters struct {
	calls, errors, panics, timeouts, refused atomic.Int64
	inFlight                                 atomic.Int64
}

// totals are the counters of the whole kernel.
type totals struct {
	counters
	unlogged atomic.Int64
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
)

// PluginInfo is what can be told about a loaded plugin.
type PluginInfo struct {
	Name      string    `json:"name"`
	Version   string    `json:"version"`
	Tenant    string    `json:"tenant,omitempty"`
	State     string    `json:"state"`
	InFlight  int64     `json:"in_flight"`
	Calls     int64     `json:"calls"`  // handed to the plugin, reads included
	Errors    int64     `json:"errors"` // of those, answered with an error
	Panics    int64     `json:"panics"`
	Timeouts  int64     `json:"timeouts"`
	Tools     int       `json:"tools"`
	Resources int       `json:"resources"`
	Manifest  *Manifest `json:"-"` // read only
}

// Info is what can be told about the router.
type Info struct {
	Plugins []PluginInfo `json:"plugins"` // ascending by name
	Stages  []string     `json:"stages"`
}

// Info tells about the loaded plugins.
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
	return PluginInfo{Name: m.Name, Version: m.Version, Tenant: m.Tenant, State: l.state(), InFlight: c.inFlight.Load(),
		Calls: c.calls.Load(), Errors: c.errors.Load(), Panics: c.panics.Load(), Timeouts: c.timeouts.Load(),
		Tools: len(m.Tools), Resources: len(m.Resources), Manifest: m}
}

// TenantSubscriptions are the subscriptions of one tenant.
type TenantSubscriptions struct {
	Tenant      string `json:"tenant"`
	Subscribers int    `json:"subscribers"`
	Waiting     int    `json:"waiting"` // of those, nothing is pending for
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

// Stats are figures of the whole kernel. The counters begin at the start or at the last
// ResetCounters; gauges are of now.
type Stats struct {
	Plugins       int `json:"plugins"`
	Tools         int `json:"tools"`
	Resources     int `json:"resources"`
	Subscriptions int `json:"subscriptions"`
	Watches       int `json:"watches"`
	Presences     int `json:"presences"`
	BreakersOpen  int `json:"breakers_open"`

	InFlight int64 `json:"in_flight"`
	Pending  int   `json:"pending"` // subscriptions that something waits for

	Calls    int64 `json:"calls"`  // calls and reads, refused ones included
	Errors   int64 `json:"errors"` // of those, answered with an error
	Refused  int64 `json:"refused"`
	Panics   int64 `json:"panics"`
	Timeouts int64 `json:"timeouts"`
	Unlogged int64 `json:"unlogged"` // events that a full log did not take

	Changes   int64 `json:"changes"`   // told to the notifier
	Delivered int64 `json:"delivered"` // taken by subscribers
	Coalesced int64 `json:"coalesced"` // merged into others before they were taken
	Dropped   int64 `json:"dropped"`   // times a subscriber had to be told that it missed some

	FanoutP50US int64 `json:"fanout_p50_us"` // from a change until a subscriber took it
	FanoutP95US int64 `json:"fanout_p95_us"`
	FanoutP99US int64 `json:"fanout_p99_us"`
}

// SubscriptionsInfo tells who listens.
func (k *Kernel) SubscriptionsInfo() Subscriptions {
	return Subscriptions{Tenants: k.notify.info(), Watches: k.watcher.info()}
}

// Stats gives the figures of now.
func (k *Kernel) Stats() Stats {
	c := &k.total
	s := Stats{Calls: c.calls.Load(), Errors: c.errors.Load(), Refused: c.refused.Load(), Panics: c.panics.Load(), Timeouts: c.timeouts.Load(), InFlight: c.inFlight.Load(), Unlogged: c.unlogged.Load()}
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

// ResetCounters begins all counters anew; gauges stay.
func (k *Kernel) ResetCounters() {
	k.total.reset()
	k.total.unlogged.Store(0)
	k.notify.reset()
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, l := range k.plugins {
		l.counts.reset()
	}
}
