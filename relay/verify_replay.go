package relay

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
)

// VerifyReplay works like this:
//
//	1. ask the running relay, if there is one, for its state and for the events that it is between
//	2. rebuild the state up to the last of these events, twice, one after the other
//	3. compare both; then compare the live state with the rebuilt one at the first of these events,
//	   and where it differs with the states after each later event
//	4. check the hashes of the events, since two rebuilds from a changed log are the same
//
// What differs is looked at again from the start: retention may have removed events meanwhile. Only
// what differs each time is reported. In memory are at most one rebuilt state and the digests of
// three.

// maxVerifyAttempts bounds how often a difference is looked at.
const maxVerifyAttempts = 3

// maxDifferences bounds the differences that are listed.
const maxDifferences = 100

// Replayed is the result of VerifyReplay.
type Replayed struct {
	Seq       uint64 `json:"seq"` // the state after this event
	Tickets   int    `json:"tickets"`
	Presences int    `json:"presences"` // boards and agents, online or not
	Live      bool   `json:"live"`      // a running relay was compared, too
	PID       int    `json:"pid,omitempty"`
	// Differences are what is not the same, at most 100; Total counts all.
	Differences []Difference `json:"differences"`
	Total       int          `json:"total_differences"`
	// Faults are where the hashes show that the log was changed, at most one for each tenant.
	Faults []eventlog.Fault `json:"faults"`
}

// Difference is a ticket, board or agent whose states differ.
type Difference struct {
	Aggregate string `json:"aggregate"` // "ticket TENANT/ID", "device TENANT/ID" or "agent TENANT/ID"
	// Between is "rebuilds", or "live" for the running relay and the log.
	Between string `json:"between"`
	// Log and Other are digests of both states; "" where it does not exist.
	Log   string `json:"log"`
	Other string `json:"other"`
}

// VerifyReplay rebuilds tickets and presence from the event log of a state directory twice, and
// compares both, and the state of the relay that runs there, if one does. It checks the hashes of the
// events that it rebuilds from. It writes nothing.
func VerifyReplay(ctx context.Context, stateDir string) (*Replayed, error) {
	var previous map[Difference]bool
	for attempt := 1; ; attempt++ {
		res, found, err := verifyReplay(ctx, stateDir)
		if errors.Is(err, eventlog.ErrRemoved) && attempt < maxVerifyAttempts {
			continue
		}
		if err != nil {
			return nil, err
		}
		if previous != nil { // what differed before
			found = slices.DeleteFunc(found, func(d Difference) bool { return !previous[Difference{Aggregate: d.Aggregate, Between: d.Between}] })
		}
		if len(found) > 0 && attempt < maxVerifyAttempts {
			previous = make(map[Difference]bool, len(found))
			for _, d := range found {
				previous[Difference{Aggregate: d.Aggregate, Between: d.Between}] = true
			}
			continue
		}
		slices.SortFunc(found, func(a, b Difference) int {
			return cmp.Or(cmp.Compare(a.Between, b.Between), cmp.Compare(a.Aggregate, b.Aggregate))
		})
		res.Total = len(found)
		res.Differences = append([]Difference{}, found[:min(len(found), maxDifferences)]...)
		return res, nil
	}
}

// verifyReplay is one attempt.
func verifyReplay(ctx context.Context, stateDir string) (*Replayed, []Difference, error) {
	log, err := openEvents(stateDir)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = log.Close() }()
	live, err := ReadLiveState(ctx, stateDir)
	if err != nil && !errors.Is(err, ErrNotRunning) {
		return nil, nil, err
	}
	res := &Replayed{}
	if live != nil {
		res.Live, res.PID, res.Seq = true, live.PID, live.Through
	} else if res.Seq, err = log.LastGiven(ctx); err != nil {
		return nil, nil, err
	}
	first, err := rebuild(ctx, log, res.Seq)
	if err != nil {
		return nil, nil, err
	}
	second, err := rebuild(ctx, log, res.Seq)
	if err != nil {
		return nil, nil, err
	}
	for name := range first {
		if strings.HasPrefix(name, "ticket ") {
			res.Tickets++
		}
	}
	res.Presences = len(first) - res.Tickets
	found := compareStates("rebuilds", first, second)
	if live != nil {
		differ, err := compareLive(ctx, log, first, live)
		if err != nil {
			return nil, nil, err
		}
		found = append(found, differ...)
	}
	hashes, err := log.Verify(ctx, eventlog.VerifyOptions{Class: eventlog.ClassState})
	if err != nil {
		return nil, nil, err
	}
	res.Faults = append([]eventlog.Fault{}, hashes.Faults...)
	return res, found, nil
}

// rebuild returns the digests of the state after an event.
func rebuild(ctx context.Context, log *eventlog.Reader, to uint64) (map[string]string, error) {
	c := newStateCopy()
	if err := c.replay(ctx, log, eventlog.Query{To: to}); err != nil {
		return nil, err
	}
	return c.digests(ctx)
}

// compareStates returns what is not the same in two states.
func compareStates(between string, log, other map[string]string) (found []Difference) {
	for name, digest := range log {
		if other[name] != digest {
			found = append(found, Difference{name, between, digest, other[name]})
		}
	}
	for name, digest := range other {
		if _, ok := log[name]; !ok {
			found = append(found, Difference{name, between, "", digest})
		}
	}
	return found
}

// compareLive returns what a relay has otherwise than the log. rebuilt is the state at the last of
// the events that the relay is between.
func compareLive(ctx context.Context, log *eventlog.Reader, rebuilt map[string]string, live *LiveState) ([]Difference, error) {
	open := make(map[string]Difference)
	presences := 0
	for _, d := range compareStates("live", rebuilt, live.Digests) {
		open[d.Aggregate] = d
	}
	for name := range live.Digests {
		if !strings.HasPrefix(name, "ticket ") {
			presences++
		}
	}
	maps.DeleteFunc(open, func(name string, d Difference) bool {
		isTicket := strings.HasPrefix(name, "ticket ")
		// A relay with so many presences forgets some without an event.
		return isTicket && !live.HasTickets || !isTicket && d.Other == "" && presences >= kernel.MaxPresences
	})
	if len(open) == 0 || live.Before == live.Through {
		return slices.Collect(maps.Values(open)), nil
	}
	// The relay may be at an earlier event, of each aggregate at another one.
	c := newStateCopy()
	if err := c.replay(ctx, log, eventlog.Query{To: live.Before}); err != nil {
		return nil, err
	}
	settle := func() error {
		state, err := c.digests(ctx)
		maps.DeleteFunc(open, func(name string, d Difference) bool { return state[name] == d.Other })
		return err
	}
	if err := settle(); err != nil {
		return nil, err
	}
	var seqs []uint64
	err := log.Select(ctx, eventlog.Query{After: live.Before, To: live.Through, Class: eventlog.ClassState, Types: []string{"ticket.*", "presence.*"}}, func(e kernel.Event) error {
		if touchesAny(open, e.Tenant, e.Aggregate) && len(seqs) < maxSteps {
			seqs = append(seqs, e.Seq)
		}
		return nil
	})
	at := live.Before
	for _, seq := range seqs {
		if err != nil || len(open) == 0 {
			break
		}
		if err = c.replay(ctx, log, eventlog.Query{After: at, To: seq}); err == nil {
			err = settle()
		}
		at = seq
	}
	return slices.Collect(maps.Values(open)), err
}

// maxSteps bounds the events after each of which compareLive looks at the state. The relay takes
// milliseconds to read its own; what is not found in so many events is looked at in the next attempt.
const maxSteps = 256

// touchesAny reports whether an event is about one of the aggregates.
func touchesAny(open map[string]Difference, tenant, id string) bool {
	for _, kind := range []string{"ticket ", kernel.PresenceDevice + " ", kernel.PresenceAgent + " "} {
		if _, ok := open[kind+tenant+"/"+id]; ok {
			return true
		}
	}
	return false
}
