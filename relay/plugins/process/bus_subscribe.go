package process

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Subscriptions of a plugin: to topics of the event log, or to a resource. Each has a goroutine,
// which ends with the subscription, the consent or the connection. A plugin that does not read for
// sendTimeout loses its connection, so one that cannot keep up unsubscribes and subscribes again
// with `after`.

// maxSince bounds since_s of a subscription, seconds.
const maxSince = 24 * 60 * 60

// adminTopics are topics that no plugin may follow: they need kernel:admin elsewhere too.
var adminTopics = []string{"audit", "kernel", "log/gap"}

// subscription is one subscription of a connection.
type subscription struct {
	id     string
	ctx    context.Context
	cancel context.CancelFunc
}

// busEvent is the parameters of the notification agentctl/event.
type busEvent struct {
	Subscription string          `json:"subscription"`
	Tenant       string          `json:"tenant"`
	URI          string          `json:"uri,omitempty"` // of a resource that changed
	Topic        string          `json:"topic,omitempty"`
	Seq          uint64          `json:"seq,omitempty"`
	Type         string          `json:"type,omitempty"`
	Aggregate    string          `json:"aggregate_id,omitempty"`
	CreatedMS    int64           `json:"created_at,omitempty"`
	Payload      json.RawMessage `json:"payload,omitempty"`
}

// subscribe answers agentctl/subscribe with the id of the subscription, and the seq of the newest
// event when it began.
func (bc *busConn) subscribe(p *busParams) (any, error) {
	granted, tenants := bc.consent()
	switch {
	case p.Meta.Call != "":
		return nil, manifest.E(manifest.BadRequest, "a subscription outlives the call: leave out _meta")
	case len(tenants) == 0:
		return nil, errNoConsent
	case p.SinceS < 0 || p.SinceS > maxSince || p.SinceS > 0 && p.After != nil:
		return nil, manifest.E(manifest.BadRequest, "since_s is 1 to 86400, and not given together with after")
	case (p.URI == "") == (len(p.Topics) == 0) || len(p.Topics) > 32:
		return nil, manifest.E(manifest.BadRequest, "a subscription has 1 to 32 topics, or a uri")
	case p.URI != "":
		return bc.subscribeResource(p, granted)
	case bc.bus.o.Events == nil:
		return nil, &manifest.Error{Code: manifest.Internal, Reason: "storage", Message: "the relay has no event log now"}
	}
	for _, t := range p.Topics {
		if !covers(bc.declared().Subscribe, t) || slices.Contains(adminTopics, t) {
			return nil, &manifest.Error{Code: manifest.SafetyDenied, Reason: "manifest", ShowReason: true, Message: "plugin.json does not ask for this topic under bus.subscribe, or no plugin may follow it"}
		}
	}
	if p.Tenant != "" {
		if !covers(tenants, p.Tenant) || !manifest.ValidTenant(p.Tenant) {
			return nil, errTenant
		}
		tenants = []string{p.Tenant}
	}
	if slices.Contains(tenants, AllTenants) {
		tenants = nil
	}
	return bc.subscribeTopics(p, granted, tenants)
}

// subscribeTopics starts a subscription to topics in some tenants; nil: in all.
func (bc *busConn) subscribeTopics(p *busParams, granted context.Context, tenants []string) (any, error) {
	// Read before the log is followed, so that events appended meanwhile are delivered: their seq is greater.
	last := bc.bus.o.Log.Last()
	after := last
	if p.After != nil {
		after = *p.After
	} else if p.SinceS > 0 {
		ctx, cancel := context.WithTimeout(bc.ctx, appendTimeout)
		defer cancel()
		var err error
		if after, err = bc.bus.o.Events.SeqAt(ctx, time.Duration(p.SinceS)*time.Second); err != nil {
			return nil, err
		}
	}
	id, err := bc.start(granted, func(s *subscription) {
		err := bc.bus.o.Events.Follow(s.ctx, after, tenants, func(topic string, e *kernel.Event) error {
			// An event without a tenant is the relay's, which no consent covers.
			if e.Tenant == "" || slices.Contains(adminTopics, topic) || !covers(p.Topics, topic) {
				return nil
			}
			return bc.conn.rpc.Notify(s.ctx, "agentctl/event", &busEvent{
				Subscription: s.id, Tenant: e.Tenant, Topic: topic, Seq: e.Seq, Type: e.Type, Aggregate: e.Aggregate, CreatedMS: e.CreatedMS, Payload: e.Payload,
			})
		})
		if err != nil && s.ctx.Err() == nil {
			bc.ended(s, "the event log cannot be followed from there; subscribe again")
		}
	})
	return map[string]any{"subscription": id, "seq": last}, err
}

// subscribeResource starts a subscription to the changes of a resource.
func (bc *busConn) subscribeResource(p *busParams, granted context.Context) (any, error) {
	if !covers(bc.declared().Subscribe, p.URI) || isControl(p.URI) {
		return nil, &manifest.Error{Code: manifest.SafetyDenied, Reason: "manifest", ShowReason: true, Message: "plugin.json does not ask for this resource under bus.subscribe"}
	}
	r, err := bc.rights("", p.Tenant)
	if err != nil {
		return nil, err
	}
	r.cancel() // its context; the subscription has another
	k := bc.bus.o.Kernel
	release, err := k.Watch(r.caller, p.URI)
	if err != nil {
		return nil, manifest.E(manifest.BadRequest, "this resource does not exist or does not report changes")
	}
	changes, err := k.Subscribe(r.caller.Tenant)
	if err != nil {
		release()
		return nil, &manifest.Error{Code: manifest.RateLimited, Reason: "subscriptions", Message: "the relay has as many subscriptions as it can"}
	}
	id, err := bc.start(granted, func(s *subscription) {
		defer release()
		defer changes.Close()
		for {
			select {
			case <-s.ctx.Done():
				return
			case <-changes.Ready():
			}
			// changes is about all resources of the tenant. If some were missed, this one may be
			// among them.
			if c := changes.Next(); c.Missed || slices.Contains(c.Updated, p.URI) {
				if bc.conn.rpc.Notify(s.ctx, "agentctl/event", &busEvent{Subscription: s.id, Tenant: r.caller.Tenant, URI: p.URI}) != nil {
					return
				}
			}
		}
	})
	if err != nil {
		changes.Close()
		release()
	}
	return map[string]any{"subscription": id, "seq": bc.bus.o.Log.Last()}, err
}

// start runs a subscription in a goroutine that close waits for. granted ends with the consent that
// was checked for it, which may have changed since.
func (bc *busConn) start(granted context.Context, run func(*subscription)) (id string, err error) {
	bc.mu.Lock()
	defer bc.mu.Unlock()
	switch {
	case bc.isClosed:
		return "", context.Canceled
	case len(bc.subs) >= maxSubscriptions:
		return "", &manifest.Error{Code: manifest.RateLimited, Reason: "subscriptions", Message: "a plugin has at most 16 subscriptions; end one with agentctl/unsubscribe"}
	}
	bc.lastSub++
	s := &subscription{id: strconv.Itoa(bc.lastSub)}
	s.ctx, s.cancel = context.WithCancel(granted)
	bc.subs[s.id] = s
	bc.wg.Go(func() {
		run(s)
		if granted.Err() != nil && bc.ctx.Err() == nil {
			bc.ended(s, "the consent was changed")
		}
		s.cancel()
		bc.mu.Lock()
		defer bc.mu.Unlock()
		delete(bc.subs, s.id)
	})
	return s.id, nil
}

// ended notifies the plugin that a subscription has ended without its wish.
func (bc *busConn) ended(s *subscription, reason string) {
	bc.notify("agentctl/ended", map[string]string{"subscription": s.id, "reason": reason})
}

// unsubscribe ends a subscription, and reports whether there was one of that id. An event that is
// being sent may still arrive.
func (bc *busConn) unsubscribe(id string) bool {
	bc.mu.Lock()
	defer bc.mu.Unlock()
	s := bc.subs[id]
	if s != nil {
		s.cancel()
	}
	return s != nil
}
