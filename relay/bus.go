package relay

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/control"
	"agentctl/relay/plugins/process"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/plugins/triage"
	"agentctl/relay/storage"
)

// What the bus of package process needs of the relay. Over the bus an external plugin makes calls and
// reads for itself, follows events and appends some:
//
//	consent     in which tenants a plugin may act, by the digest of its manifest
//	busEvents   the event log; a degraded relay has none, and the bus then serves no events
//	consents    the operators' decisions, for kernel.plugin.show, allow and disallow
//
// The plugin triage is part of the binary and speaks the same protocol inside the process
// (bundledPlugins).

// newBus makes the bus of external plugins.
func (r *Relay) newBus() *process.Bus {
	o := process.BusOptions{Kernel: r.kernel, Log: r.queue, Consent: r.consent}
	if r.events != nil {
		o.Events = busEvents{r, make(chan struct{}, 1)}
	}
	return process.NewBus(o)
}

// consent returns the tenants in which a plugin whose manifest has that digest may act for itself.
// What is part of the binary needs no consent, unless an operator decided otherwise.
func (r *Relay) consent(plugin, digest string) []string {
	c, isDecided := r.store.Consent(plugin)
	isBundled := plugin == triage.Name && r.triageEnabled()
	switch {
	case isDecided && (isBundled || c.Digest == digest):
		return c.Tenants
	case isBundled && !isDecided:
		return []string{process.AllTenants}
	}
	return nil
}

// busEvents is the event log for subscriptions of plugins.
type busEvents struct {
	r         *Relay
	searching chan struct{} // capacity 1: held by SeqAt
}

// Follow implements process.Events. Calls are no events of a topic that plugins may follow.
func (b busEvents) Follow(ctx context.Context, after uint64, tenants []string, fn func(topic string, e *kernel.Event) error) error {
	return b.r.events.Follow(ctx, eventlog.Query{After: after, Tenants: tenants, Class: eventlog.ClassState}, func(e kernel.Event) error {
		if topic := topicName(&e); topic != "" {
			return fn(topic, &e)
		}
		return nil
	})
}

// SeqAt implements process.Events. It reads all events within age, however many there are: a plugin
// must not miss one. So one plugin reads at a time.
func (b busEvents) SeqAt(ctx context.Context, age time.Duration) (uint64, error) {
	select {
	case b.searching <- struct{}{}:
		defer func() { <-b.searching }()
	case <-ctx.Done():
		return 0, &manifest.Error{Code: manifest.RateLimited, Message: "another plugin is reading the event log; retry in a moment", Reason: "queue", RetryAfterMS: 1000}
	}
	since, oldest := b.r.opt.Now().Add(-age).UnixMilli(), b.r.events.Last()+1
	_, err := b.r.events.SelectNewest(ctx, eventlog.NewestQuery{Query: eventlog.Query{Class: eventlog.ClassState}, SinceMS: since, MaxRows: math.MaxInt}, func(e kernel.Event) bool {
		oldest = min(oldest, e.Seq)
		return true
	})
	return oldest - 1, storage.TimedOut(storeEvents, err)
}

// consents are the operators' decisions for the control plane.
type consents struct{ r *Relay }

// Show implements control.Consents.
func (c consents) Show(name string) (*control.PluginBus, error) {
	p, err := c.r.processes.Consentable(name)
	if err != nil {
		return nil, err
	}
	return c.describe(p), nil
}

// describe is what a plugin asks for, with the decision on it.
func (c consents) describe(p *process.Consentable) *control.PluginBus {
	list := func(s []string) []string { return append([]string{}, s...) }
	tenants := c.r.consent(p.Name, p.Digest)
	out := &control.PluginBus{Name: p.Name, Version: p.Version, Digest: p.Digest, Call: list(p.Bus.Call), Read: list(p.Bus.Read),
		Subscribe: list(p.Bus.Subscribe), Append: list(p.Bus.Append), Allowed: len(tenants) > 0, Tenants: list(tenants)}
	if d, ok := c.r.store.Consent(p.Name); ok && out.Allowed {
		out.By, out.AtMS = d.Actor, d.AtMS
	}
	return out
}

// Set implements control.Consents.
func (c consents) Set(ctx context.Context, name, digest string, tenants []string, actor string) (*control.PluginBus, error) {
	p, err := c.r.processes.Consentable(name)
	if d, ok := c.r.store.Consent(name); err != nil && ok && len(tenants) == 0 {
		// The version that runs has its consent until it is taken back, whatever has become of the folder.
		p, err = &process.Consentable{Name: name, Digest: d.Digest}, nil
	}
	if err != nil {
		return nil, err
	}
	if digest != "" && digest != p.Digest {
		return nil, manifest.E(manifest.BadRequest, "plugin.json has changed since: look at it again with kernel.plugin.show")
	}
	if slices.Contains(tenants, process.AllTenants) {
		tenants = []string{process.AllTenants}
	}
	for _, t := range tenants {
		if t != process.AllTenants && !manifest.ValidTenant(t) {
			return nil, fmt.Errorf("not a tenant: %q", t)
		}
	}
	if len(tenants) > 0 && len(p.Bus.Call)+len(p.Bus.Read)+len(p.Bus.Subscribe)+len(p.Bus.Append) == 0 {
		return nil, manifest.E(manifest.BadRequest, "plugin.json asks for nothing: it has no key bus")
	}
	// Once the decision is durable, connections of the plugin learn what they may do from now on, and
	// what is not allowed any more ends: also if that is after ctx, on a disk that hangs.
	refresh := func() { c.r.bus.Refresh(name) }
	if _, err := c.r.store.SetConsent(ctx, auth.Consent{Plugin: name, Digest: p.Digest, Tenants: tenants, Actor: actor}, refresh); err != nil {
		return nil, err
	}
	return c.describe(p), nil
}

// pluginTopic returns the topic of an event that a plugin appended: plugin/NAME.
func pluginTopic(eventType string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(eventType, process.EventPrefix), ".")
	return "plugin/" + name
}

// triageEnabled reports whether alerts open tickets.
func (r *Relay) triageEnabled() bool {
	return r.pluginEnabled(PluginTriage) && r.pluginEnabled(PluginTickets)
}

// bundledPlugins are the plugins of the binary that speak the protocol of external ones.
func (r *Relay) bundledPlugins() map[string]process.Bundled {
	if !r.triageEnabled() {
		return nil
	}
	cfg := triage.Config{Priorities: r.opt.TriagePriorities}
	return map[string]process.Bundled{triage.Name: {Manifest: triage.Manifest, Serve: func(ctx context.Context, conn io.ReadWriteCloser) error {
		return triage.Serve(ctx, conn, cfg)
	}}}
}

// checkTriage checks the priorities of tickets that alerts open: a level or a rule, and a priority.
func checkTriage(priorities map[string]string) error {
	for k, v := range priorities {
		if !isWord(k) || !slices.Contains(tickets.Priorities, v) {
			return badOption("TriagePriorities", "not a level or rule with a priority: %q (use error=urgent, disk_root=high or the like, with %s)", k+"="+v, strings.Join(tickets.Priorities, ", "))
		}
	}
	return nil
}
