package relay

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/tickets"
	"agentctl/relay/storage"
)

// A degraded relay runs without its event log (Options.StartDegraded): the log is damaged,
// missing or not the one that relay.json records, and boards have to be served meanwhile. Calls
// of boards, metric streams, links, tokens and the audit log work. Tickets answer with reason
// "storage", since what they would show is not true; nothing is published, and the event gateway
// is not served. The files of the log stay as they are.
//
// It says so in readyz and `agentctl relay status`, in the metrics, to MCP clients with
// initialize, and in the log once a minute.

// degradedInterval is the time between two lines of the log that say so.
const degradedInterval = time.Minute

// degradedNotice is the notice for MCP clients.
const degradedNotice = "This relay runs without its event log: tools of boards work, tickets answer with an error, and changes are not recorded. "

// startDegraded records why the relay runs without its event log.
func (r *Relay) startDegraded(cause error) {
	if r.events != nil { // opened, and then refused
		_ = r.events.Close()
		r.events = nil
	}
	r.degraded = cause
	r.storage.Watch(storeEvents).Report("degraded", storage.Problem{Kind: storage.Missing, Detail: cause.Error(), Warning: true})
}

// CanStartDegraded reports whether an error of Open is one of the event log that a relay can
// run without.
func CanStartDegraded(err error) bool {
	e, ok := errors.AsType[*storage.Error](err)
	return ok && e.Store == storeEvents && e.Kind == storage.Damaged
}

// remindDegraded logs that the relay is degraded, at once and every minute until ctx ends.
func (r *Relay) remindDegraded(ctx context.Context) {
	remind := func() {
		r.log.Error("this relay runs without its event log; tickets are not available and nothing is recorded; stop it and repair the log: agentctl relay check",
			zap.Error(r.degraded))
	}
	remind()
	every(ctx, degradedInterval, remind)
}

// notice is the text for MCP clients about the relay's state; "" for none.
func (r *Relay) notice() string {
	if r.degraded == nil {
		return ""
	}
	return degradedNotice
}

// eventStats are the figures of the event log, the zero value of a degraded relay.
func (r *Relay) eventStats() eventlog.Stats {
	if r.events == nil {
		return eventlog.Stats{}
	}
	return r.events.Stats()
}

// newestEvent is the time of the newest event, the zero time of a degraded relay.
func (r *Relay) newestEvent() time.Time {
	if r.events == nil {
		return time.Time{}
	}
	return r.events.Newest()
}

// unavailableTickets offers the tools of tickets and refuses every call: an empty list would
// look as if there were none.
type unavailableTickets struct{ *tickets.Plugin }

// Call implements kernel.Plugin.
func (unavailableTickets) Call(context.Context, *kernel.Request) (*kernel.Result, error) {
	return nil, errDegraded()
}

// Read implements kernel.Reader.
func (unavailableTickets) Read(context.Context, *kernel.Caller, string) ([]byte, error) {
	return nil, errDegraded()
}

// Watch implements kernel.Watcher.
func (unavailableTickets) Watch(ctx context.Context, _ string, _ func()) error {
	// The kernel would retry a watch that ends each second.
	<-ctx.Done()
	return ctx.Err()
}

func errDegraded() error {
	return manifest.AsError(&storage.Error{Store: storeEvents, Kind: storage.Missing})
}
