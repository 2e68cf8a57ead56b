package relay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/tickets"
)

// A relay rebuilds tickets and presence from its event log when it starts. LiveState is what a
// running relay has of both, for a comparison with a rebuild of another process (verify_replay.go).

// LiveState is the state of a running relay, a digest for each ticket, board and agent. It is the
// state after some event from Before to Through of the log: each ticket and presence has got all
// events up to Before, and none after Through.
type LiveState struct {
	PID     int    `json:"pid"`
	Before  uint64 `json:"before_seq"`
	Through uint64 `json:"through_seq"`
	// HasTickets is false if the relay runs without the plugin.
	HasTickets bool              `json:"has_tickets"`
	Digests    map[string]string `json:"digests"`
	// Error is why the state cannot be read; the rest is then empty.
	Error string `json:"error,omitempty"`
}

// Bounds of the live state.
const (
	stateTimeout  = 20 * time.Second // until the event log has stored what the state contains
	maxStateBytes = 32 << 20         // of a document that ReadLiveState takes
)

// liveState reads the state. One at a time is read: it may have 40,000 digests.
func (r *Relay) liveState(ctx context.Context) *LiveState {
	if !r.readingState.CompareAndSwap(false, true) {
		return &LiveState{Error: "another agentctl reads the state; try again"}
	}
	defer r.readingState.Store(false)
	if r.events == nil {
		return &LiveState{Error: "the relay runs without its event log (--start-degraded)"}
	}
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	// Before is read first, and Through last, when the events of all that was read are stored. So each
	// ticket and presence is as it was at some event between the two.
	s := &LiveState{PID: os.Getpid(), Before: r.queue.Last(), HasTickets: r.tickets != nil, Digests: make(map[string]string)}
	if s.HasTickets {
		if err := r.tickets.Digests(ctx, s.addTicket); err != nil {
			return &LiveState{Error: "tickets wait for the event log: " + err.Error()}
		}
	}
	var mark uint64
	r.kernel.HoldPresence(func(list []kernel.Presence) {
		mark = r.queue.Mark()
		for i := range list {
			s.addPresence(&list[i])
		}
	})
	// Events of presence are queued before they are stored.
	if err := r.queue.Wait(ctx, mark); err != nil {
		return &LiveState{Error: "events wait for the disk; see: agentctl relay status"}
	}
	s.Through = r.queue.Last()
	return s
}

func (s *LiveState) addTicket(tenant, id, digest string) {
	s.Digests["ticket "+tenant+"/"+id] = digest
}

// addPresence adds who is online, or was not long ago: both forget the others by their clocks. Name
// and transport follow each heartbeat, which is no event.
func (s *LiveState) addPresence(p *kernel.Presence) {
	const margin = time.Hour
	age := time.Duration(time.Now().UnixMilli()-p.LastPingMS) * time.Millisecond
	if p.Status == kernel.Offline && age > kernel.PresenceRetention-margin {
		return
	}
	digest := p.Status
	if p.CloneSuspected {
		digest += " clone_suspected"
	}
	s.Digests[p.Kind+" "+p.Tenant+"/"+p.ID] = digest
}

// ReadLiveState asks the relay that runs on a state directory. ErrNotRunning if there is none.
func ReadLiveState(ctx context.Context, stateDir string) (*LiveState, error) {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout+statusTimeout)
	defer cancel()
	var s LiveState
	if err := askRelay(ctx, stateDir, requestState, maxStateBytes, &s); err != nil {
		return nil, err
	}
	switch {
	case s.Error != "":
		return nil, errors.New(s.Error)
	case s.Digests == nil: // the status
		return nil, errors.New("the relay that runs is of an older agentctl, which does not show its state; restart it")
	}
	return &s, nil
}

// stateCopy is a state that was rebuilt from the log by another process than the relay.
type stateCopy struct {
	kernel  *kernel.Kernel
	tickets *tickets.Plugin
}

func newStateCopy() *stateCopy {
	k := kernel.New(kernel.Options{})
	return &stateCopy{k, tickets.New(k, nil)}
}

// replay applies the events above one seq up to another, of some aggregates or of all.
func (c *stateCopy) replay(ctx context.Context, log *eventlog.Reader, q eventlog.Query) error {
	part := logPart{Reader: log, query: q}
	if err := c.kernel.RestorePresence(ctx, part); err != nil {
		return fmt.Errorf("rebuild presence: %w", err)
	}
	_, err := c.tickets.Restore(ctx, part)
	return err
}

// digests returns the state as LiveState has it.
func (c *stateCopy) digests(ctx context.Context) (map[string]string, error) {
	s := &LiveState{Digests: make(map[string]string)}
	c.kernel.HoldPresence(func(list []kernel.Presence) {
		for i := range list {
			s.addPresence(&list[i])
		}
	})
	return s.Digests, c.tickets.Digests(ctx, s.addTicket)
}

// logPart is a kernel.Log to read, of the events that a query selects.
type logPart struct {
	*eventlog.Reader
	query eventlog.Query
}

// Replay implements kernel.Log.
func (l logPart) Replay(ctx context.Context, _ uint64, fn func(kernel.Event) error, types ...string) error {
	if l.query.To == 0 {
		return nil // an empty log; for Select it is the newest event
	}
	q := l.query
	q.Types = types
	return l.Select(ctx, q, fn)
}

// Append implements kernel.Log: a copy appends nothing.
func (logPart) Append(context.Context, ...kernel.Event) (uint64, error) {
	return 0, errors.New("the event log is only read")
}

// Offer implements kernel.Log.
func (logPart) Offer(kernel.Event) bool { return false }

// Last implements kernel.Log.
func (l logPart) Last() uint64 { return l.query.To }
