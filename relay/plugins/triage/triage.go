// Package triage is a plugin that opens a ticket when a board raises an alert, and resolves it when
// the alert clears. It is part of the relay's binary and knows the relay only by the protocol of
// plugins (docs/kernel.md, "On the bus"), as a program in another process would:
//
//	initialize, agentctl/consent       from the relay, when a connection begins
//	agentctl/subscribe                 to the topics alert and ticket
//	agentctl/event                     an alert, or a change of a ticket
//	agentctl/call tickets.*            what follows from it
//
// It stores nothing. The tickets are its state: on a connection it reads those that it made, and
// the events of the last hour, and skips what the tickets show as done.
package triage

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/creachadair/jrpc2"
	"github.com/creachadair/jrpc2/channel"
	"github.com/creachadair/jrpc2/handler"
)

// Name is the name of the plugin.
const Name = "triage"

// Manifest is its plugin.json.
//
//go:embed plugin.json
var Manifest []byte

// Config configures the plugin.
type Config struct {
	// Priorities are those of new tickets, by rule or by level (error, warn, info) of the alert. A
	// rule has precedence. Default: high for error, normal for warn, low for info.
	Priorities map[string]string
}

var defaultPriorities = map[string]string{"error": "high", "warn": "normal", "info": "low"}

// Bounds of what one board can cause.
const (
	maxOpen         = 32               // open tickets of a board
	commentInterval = 10 * time.Minute // between comments of a ticket
	changeInterval  = time.Minute      // between changes of its status, for an alert that flaps
	skippedInterval = time.Hour        // between events about alerts without a ticket, of a board or tenant
	closeAfter      = 24 * time.Hour   // a resolved ticket is closed: it counts as unfinished until then
	closeInterval   = time.Hour        // between searches for such tickets

	maxQueue       = 1024 // events that wait; with more the plugin subscribes again later
	maxTracked     = 4096 // tickets of a tenant in memory before finished ones are forgotten
	maxPages       = 40   // of 100 tickets when a tenant's are read
	catchUpSeconds = 3600 // of events that a connection begins with

	minRetry, maxRetry = time.Second, 30 * time.Second
)

// event is the parameters of agentctl/event, as far as the plugin needs them.
type event struct {
	Subscription string          `json:"subscription"`
	Tenant       string          `json:"tenant"`
	Seq          uint64          `json:"seq"`
	Type         string          `json:"type"`
	Aggregate    string          `json:"aggregate_id"`
	CreatedMS    int64           `json:"created_at"`
	Payload      json.RawMessage `json:"payload"`
}

// plugin is one connection. Its fields belong to the goroutine of run, but for the channels, which the
// notifications of the relay fill:
//
//	relay ── methods ── events, consents, ended, overflow ── run ── ask ──> relay
//
// run waits for each answer before it takes the next event, so that events are handled in their order. While it
// waits, events queue up; beyond maxQueue they are dropped, and the plugin subscribes again from the last one
// that it has handled.
type plugin struct {
	cfg Config
	srv *jrpc2.Server

	events   chan event
	consents chan []string // capacity 1: the newest
	ended    chan string   // capacity 1: the id of a subscription that the relay ended
	overflow chan struct{} // capacity 1: an event was dropped
	// abandoned is the subscription of an event that was dropped. Its later ones are ignored, since
	// all of them come again with the next subscription. Only notifications use it.
	abandoned string

	subscription string
	hasConsent   bool
	last         uint64 // seq of the newest event that was handled or skipped
	replayed     uint64 // events up to here happened before the first subscription
	isFollowing  bool   // there was a subscription: replayed is set
	tenants      map[string]*tenant
	skipped      map[skipKey]time.Time // when triage.skipped was appended
	due          map[*ticket]struct{}  // whose status is to change
}

// Serve serves one connection to the relay until it or ctx ends. It closes the connection.
func Serve(ctx context.Context, conn io.ReadWriteCloser, cfg Config) error {
	p := &plugin{
		cfg: cfg, events: make(chan event, maxQueue), consents: make(chan []string, 1), ended: make(chan string, 1), overflow: make(chan struct{}, 1),
		tenants: make(map[string]*tenant), skipped: make(map[skipKey]time.Time), due: make(map[*ticket]struct{}),
	}
	// AllowPush allows Callback: the plugin is an MCP server, and also sends requests to the relay.
	p.srv = jrpc2.NewServer(p.methods(), &jrpc2.ServerOptions{AllowPush: true, Concurrency: 4})
	p.srv.Start(channel.Line(conn, conn))
	ctx, cancel := context.WithCancel(ctx)
	// Not p.srv.Stop: a message that arrives at that moment makes jrpc2 panic, and this goroutine is one
	// of the relay's.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	ended := make(chan error, 1)
	go func() {
		err := p.srv.Wait()
		cancel()
		ended <- err
	}()
	defer cancel()
	p.run(ctx) // in this goroutine, where process.Bundled recovers a panic
	return <-ended
}

// methods answers the relay. Notifications only fill channels, so that the connection is always
// read: the relay ends one that is not.
func (p *plugin) methods() handler.Map {
	notification := func(fn func(req *jrpc2.Request)) handler.Func {
		return func(_ context.Context, req *jrpc2.Request) (any, error) {
			fn(req)
			return nil, nil
		}
	}
	return handler.Map{
		"initialize": func(_ context.Context, req *jrpc2.Request) (any, error) {
			var offer struct {
				ProtocolVersion string `json:"protocolVersion"`
			}
			err := req.UnmarshalParams(&offer)
			return map[string]any{"protocolVersion": offer.ProtocolVersion, "capabilities": map[string]any{}, "serverInfo": map[string]any{"name": Name, "version": "1.0.0"}}, err
		},
		"ping":                      func(context.Context, *jrpc2.Request) (any, error) { return struct{}{}, nil },
		"notifications/initialized": notification(func(*jrpc2.Request) {}),
		"notifications/cancelled":   notification(func(*jrpc2.Request) {}),
		"agentctl/consent": notification(func(req *jrpc2.Request) {
			var c struct{ Tenants []string }
			if req.UnmarshalParams(&c) == nil {
				replace(p.consents, c.Tenants)
			}
		}),
		"agentctl/ended": notification(func(req *jrpc2.Request) {
			var e struct{ Subscription string }
			if req.UnmarshalParams(&e) == nil {
				replace(p.ended, e.Subscription)
			}
		}),
		"agentctl/event": notification(func(req *jrpc2.Request) {
			var e event
			if req.UnmarshalParams(&e) != nil || e.Subscription == p.abandoned {
				return
			}
			select {
			case p.events <- e:
			default:
				p.abandoned = e.Subscription
				replace(p.overflow, struct{}{})
			}
		}),
	}
}

// replace puts v into a channel of capacity 1, in place of what is there. Notifications come one
// after the other, so nobody else sends.
func replace[T any](c chan T, v T) {
	select {
	case <-c:
	default:
	}
	c <- v
}

// run handles what arrives until ctx ends. Without a subscription that the consent would allow it tries again
// every maxRetry.
func (p *plugin) run(ctx context.Context) {
	// closeOld schedules changes; changeDue makes those that are due.
	closing := time.NewTicker(closeInterval)
	defer closing.Stop()
	for ctx.Err() == nil {
		var retry <-chan time.Time
		if p.hasConsent && p.subscription == "" {
			retry = time.After(maxRetry)
		} else if len(p.due) > 0 {
			retry = time.After(p.untilNextChange())
		}
		select {
		case <-ctx.Done():
		case tenants := <-p.consents:
			p.hasConsent = len(tenants) > 0
			p.subscribe(ctx)
		case id := <-p.ended:
			if id == p.subscription {
				p.subscription = ""
				p.subscribe(ctx)
			}
		case <-retry:
			p.subscribe(ctx)
		case <-closing.C:
			p.closeOld()
		case e := <-p.events:
			p.handleEvent(ctx, e)
		}
		p.changeDue(ctx)
		p.resubscribeAfterOverflow(ctx)
	}
}

// resubscribeAfterOverflow subscribes again after events were dropped, once the others are handled: those that were
// dropped come again.
func (p *plugin) resubscribeAfterOverflow(ctx context.Context) {
	if len(p.events) > 0 {
		return
	}
	select {
	case <-p.overflow:
		_, _ = p.ask(ctx, "unsubscribe", map[string]any{"subscription": p.subscription})
		p.subscription = ""
		p.subscribe(ctx)
	default:
	}
}

// subscribe subscribes if there is a consent and no subscription: from the last event on, or at
// first with those of the last hour. Without success run tries again.
func (p *plugin) subscribe(ctx context.Context) {
	if !p.hasConsent || p.subscription != "" {
		return
	}
	params := map[string]any{"topics": []string{"alert", "ticket"}}
	if p.last > 0 {
		// A subscription that was lost is continued from its last event, however long ago that was.
		params["after"] = p.last
	} else {
		params["since_s"] = catchUpSeconds
	}
	raw, err := p.ask(ctx, "subscribe", params)
	var s struct {
		Subscription string `json:"subscription"`
		Seq          uint64 `json:"seq"`
	}
	if err != nil || json.Unmarshal(raw, &s) != nil {
		return
	}
	p.subscription = s.Subscription
	// Seq is that of the newest event at the subscription. Events up to there may have been handled on an
	// earlier connection, so they are compared with the tickets (replayed).
	if !p.isFollowing { // the log may have been empty: a replayed of 0 is none
		p.isFollowing, p.replayed = true, s.Seq
	}
}

// refusal is an error of the relay.
type refusal struct {
	Code       string `json:"code"`
	Reason     string `json:"reason"`
	RetryAfter int64  `json:"retry_after_ms"`
}

func (r *refusal) Error() string { return r.Code + " " + r.Reason }

// isTransient reports whether the same request may succeed later.
func isTransient(err error) bool {
	r, ok := errors.AsType[*refusal](err)
	return ok && (r.Code == "E_RATE_LIMITED" && r.Reason != "full" || r.Code == "E_INTERNAL" || r.Code == "E_DEADLINE_EXCEEDED")
}

// ask sends a request to the relay, again and again while the refusal is transient: the events that
// arrive meanwhile are queued, or come again. It has no deadline: ctx ends with the connection.
func (p *plugin) ask(ctx context.Context, method string, params map[string]any) (json.RawMessage, error) {
	for wait := minRetry; ; wait = min(2*wait, maxRetry) {
		rsp, err := p.srv.Callback(ctx, "agentctl/"+method, params)
		if err == nil {
			return json.RawMessage(rsp.ResultString()), nil
		}
		if rpc, ok := errors.AsType[*jrpc2.Error](err); ok {
			r := &refusal{Code: rpc.Code.String()}
			_ = json.Unmarshal(rpc.Data, r) // or it stays as it is
			err = r
		}
		if !isTransient(err) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// call calls a tool of the tenant's tickets and decodes its answer.
func (p *plugin) call(ctx context.Context, tenant, tool string, args map[string]any, answer any) error {
	raw, err := p.ask(ctx, "call", map[string]any{"name": "tickets." + tool, "arguments": args, "tenant": tenant})
	if err != nil {
		return err
	}
	var res struct {
		IsError    bool            `json:"isError"`
		Structured json.RawMessage `json:"structuredContent"`
	}
	if err := json.Unmarshal(raw, &res); err != nil {
		return err
	}
	if res.IsError {
		var e struct {
			Error struct {
				refusal
				Status string `json:"status"`
			} `json:"error"`
		}
		_ = json.Unmarshal(res.Structured, &e) // without a form it is a refusal without a code
		return &illegalChange{e.Error.refusal, e.Error.Status}
	}
	return json.Unmarshal(res.Structured, answer)
}

// illegalChange is the refusal of a status that a ticket cannot change to, with its present one.
type illegalChange struct {
	refusal
	status string
}
