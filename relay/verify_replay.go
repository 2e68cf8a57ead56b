package relay

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
)

// VerifyReplay works like this:
//
//	1. ask the running relay, if there is one, for its state, and for the first and the last event
//	   between which it read that state (LiveState)
//	2. rebuild the state up to the last of them from the log, twice, and compare the two
//	3. compare the live state with the rebuilt one, and where they differ with the rebuilt states
//	   from the first event on
//	4. check the hashes of the events, since two rebuilds from a changed log are the same
//
// If anything differs, all of this is repeated, because retention may have removed events meanwhile;
// only what differs in each attempt is reported. At most one rebuilt state and the digests of three
// are in memory.

// maxVerifyAttempts bounds how often the comparison is repeated.
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
	log, err := eventlog.OpenReader(filepath.Join(stateDir, eventlog.FileName))
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
		if isTicket(name) {
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

// compareLive returns the differences between the running relay and the log. rebuilt is the state after
// live.Through.
//
// The relay read its state while events arrived: each ticket and presence is as it was after some
// event from live.Before to live.Through, each after another one. So only a digest that none of
// these events produces is a difference.
func compareLive(ctx context.Context, log *eventlog.Reader, rebuilt map[string]string, live *LiveState) ([]Difference, error) {
	differ := liveDifferences(rebuilt, live)
	if len(differ) > 0 && live.Before != live.Through {
		if err := dropEarlierStates(ctx, log, differ, live); err != nil {
			return nil, err
		}
	}
	return slices.Collect(maps.Values(differ)), nil
}

// liveDifferences returns by aggregate what is not the same in the rebuilt and in the live state.
func liveDifferences(rebuilt map[string]string, live *LiveState) map[string]Difference {
	presences := 0
	for name := range live.Digests {
		if !isTicket(name) {
			presences++
		}
	}
	differ := make(map[string]Difference)
	for _, d := range compareStates("live", rebuilt, live.Digests) {
		switch {
		case isTicket(d.Aggregate) && !live.HasTickets:
		case !isTicket(d.Aggregate) && d.Other == "" && presences >= kernel.MaxPresences: // a full relay forgets some without an event
		default:
			differ[d.Aggregate] = d
		}
	}
	return differ
}

// dropEarlierStates removes the differences of those aggregates that the live state has as they
// were after live.Before, or after a later event up to live.Through.
func dropEarlierStates(ctx context.Context, log *eventlog.Reader, differ map[string]Difference, live *LiveState) error {
	c := newStateCopy()
	at := uint64(0)
	replayTo := func(seq uint64) error {
		if err := c.replay(ctx, log, eventlog.Query{After: at, To: seq}); err != nil {
			return err
		}
		at = seq
		state, err := c.digests(ctx)
		maps.DeleteFunc(differ, func(name string, d Difference) bool { return state[name] == d.Other })
		return err
	}
	if err := replayTo(live.Before); err != nil {
		return err
	}
	var seqs []uint64
	err := log.Select(ctx, eventlog.Query{After: live.Before, To: live.Through, Class: eventlog.ClassState, Types: []string{"ticket.*", "presence.*"}}, func(e kernel.Event) error {
		if touchesAny(differ, e.Tenant, e.Aggregate) && len(seqs) < maxSteps {
			seqs = append(seqs, e.Seq)
		}
		return nil
	})
	for _, seq := range seqs {
		if err != nil || len(differ) == 0 {
			break
		}
		err = replayTo(seq)
	}
	return err
}

// isTicket reports whether the name of an aggregate in LiveState.Digests is that of a ticket.
func isTicket(name string) bool { return strings.HasPrefix(name, "ticket ") }

// maxSteps bounds the events after which dropEarlierStates compares. The relay takes milliseconds to
// read its state; what is not found among so many events is compared again in the next attempt.
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
