package relay

import (
	"context"

	"agentctl/manifest"
	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/fleet"
	"agentctl/relay/storage"
)

// fleetEvents is the event log for the plugin fleet.
type fleetEvents struct {
	r *Relay
	// slots bounds the searches at a time, below the connections of the log's reader: the gateway
	// replays with the others.
	slots chan struct{}
}

var _ fleet.Events = fleetEvents{}

// maxSearches and maxSearchRows bound searches in the event log. Tests change the rows of one search,
// which are about 50 ms.
const maxSearches = 2

var maxSearchRows = 100_000

// Newest implements fleet.Events. It reads from the end of the log, and at most maxSearchRows, so that
// no question reads a log of millions; next is where another one may continue.
func (f fleetEvents) Newest(ctx context.Context, q fleet.EventQuery, fn func(kernel.Event) bool) (next uint64, err error) {
	if f.r.events == nil {
		return 0, errDegraded()
	}
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return 0, &manifest.Error{Code: manifest.RateLimited, Message: "other searches of the event log are running; retry in a moment", Reason: "queue", RetryAfterMS: 1000}
	}
	next, err = f.r.events.SelectNewest(ctx, eventlog.NewestQuery{
		Query:   eventlog.Query{Tenant: q.Tenant, Types: q.Types, Aggregates: q.Aggregates, To: q.Before},
		SinceMS: q.SinceMS, MaxRows: maxSearchRows,
	}, fn)
	return next, storage.TimedOut(storeEvents, err)
}

// TicketBoard implements fleet.Events.
func (f fleetEvents) TicketBoard(tenant, id string) string {
	if f.r.tickets == nil {
		return ""
	}
	return f.r.tickets.BoardOf(tenant, id)
}

// TicketsAbout implements fleet.Events.
func (f fleetEvents) TicketsAbout(tenant, nodeID string, limit int) []string {
	if f.r.tickets == nil {
		return nil
	}
	return f.r.tickets.About(tenant, nodeID, limit)
}
