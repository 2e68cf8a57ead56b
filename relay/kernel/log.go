package kernel

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json/jsontext"
)

// Event is one row of the event log. Events of plugins carry their own domain data;
// events about device calls carry ids, decision and code, never arguments or results
// (RFC-0005 §12).
type Event struct {
	// Seq is assigned by the log, in ascending order.
	Seq    uint64 `json:"seq"`
	Tenant string `json:"tenant,omitempty"`
	// Type is "ticket.created", "presence.offline", "call" or the like: a-z, 0-9, dot and
	// underscore, at most 64 bytes.
	Type string `json:"type"`
	// Aggregate is the id of what the event is about: a ticket, a node, an agent, a tool;
	// at most 128 bytes.
	Aggregate string `json:"aggregate_id"`
	// Payload is a JSON object of at most MaxPayload bytes; nil means {}.
	Payload json.RawMessage `json:"payload"`
	// CreatedMS is the wall clock, milliseconds since 1970; 0: the log sets it.
	CreatedMS int64 `json:"created_at"`
}

// MaxPayload bounds the payload of an Event, bytes.
const MaxPayload = 64 << 10

// ErrLogFull is returned by a log whose queue is full; nothing was appended.
var ErrLogFull = errors.New("kernel: the event log is behind, try again")

// Log is an append-only event log: relay/eventlog on disk, MemoryLog in memory. Its
// methods may be called from any goroutine.
type Log interface {
	// Append appends events, all or none, in their order. It returns the seq of the last
	// one after they are durable.
	Append(ctx context.Context, events ...Event) (last uint64, err error)
	// Offer queues an event without waiting; false when the queue is full. The log keeps the payload,
	// which the caller does not change any more.
	Offer(e Event) bool
	// Replay calls fn with the events above seq after, ascending, and returns its error.
	// fn must not append. With types it selects events that MatchesType: a log then need
	// not read the others.
	Replay(ctx context.Context, after uint64, fn func(Event) error, types ...string) error
	// Last is the seq of the newest event, 0 for none.
	Last() uint64
}

// FaultReporter is a Log that knows why it takes no events: its disk hangs, is full or is
// damaged. nil while it works.
type FaultReporter interface{ Fault() error }

// PresenceReplayer is a Log that knows which events about presence later ones have replaced.
type PresenceReplayer interface {
	// ReplayPresence is Replay of all events of PresenceTypes, of which it may leave out those that a
	// later one about the same device or agent has replaced.
	ReplayPresence(ctx context.Context, fn func(Event) error) error
}

// ReplayPresence is Log.Replay of the events about presence, without those that the log knows to be
// replaced.
func ReplayPresence(ctx context.Context, l Log, fn func(Event) error) error {
	if r, ok := l.(PresenceReplayer); ok {
		return r.ReplayPresence(ctx, fn)
	}
	return l.Replay(ctx, 0, fn, PresenceTypes...)
}

// LogFault returns why a log takes no events, as far as it says; nil for a log that works.
func LogFault(l Log) error {
	if f, ok := l.(FaultReporter); ok {
		return f.Fault()
	}
	return nil
}

// Check returns an error for an event of the wrong form.
func (e *Event) Check() error {
	switch {
	case e.Type == "" || len(e.Type) > 64 || strings.ContainsFunc(e.Type, notInEventType):
		return fmt.Errorf("kernel: not an event type: %q (use a-z, 0-9, dot and underscore, 1 to 64 bytes)", e.Type)
	case len(e.Aggregate) > 128 || len(e.Tenant) > 64:
		return errors.New("kernel: an event's aggregate_id has at most 128 bytes and its tenant 64")
	case len(e.Payload) > MaxPayload:
		return fmt.Errorf("kernel: an event's payload has at most %d bytes", MaxPayload)
	case len(e.Payload) > 0 && (e.Payload[0] != '{' || !jsontext.Value(e.Payload).IsValid(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))):
		return errors.New("kernel: an event's payload is a JSON object")
	}
	return nil
}

func notInEventType(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '.' && r != '_'
}

// MatchesType reports whether a type of events is one of types, or begins with one that ends in *
// ("ticket.*"). No types match all.
func MatchesType(types []string, eventType string) bool {
	return len(types) == 0 || slices.ContainsFunc(types, func(t string) bool {
		prefix, isPrefix := strings.CutSuffix(t, "*")
		return t == eventType || isPrefix && strings.HasPrefix(eventType, prefix)
	})
}

// MemoryLog is a Log in memory, of the newest Max events, for tests and for a kernel
// without a disk. The zero value is ready.
type MemoryLog struct {
	Max int // events kept; default 10,000

	mu     sync.Mutex // protects the fields below
	events []Event
	last   uint64
}

// Append implements Log.
func (l *MemoryLog) Append(_ context.Context, events ...Event) (uint64, error) {
	for i := range events {
		if err := events[i].Check(); err != nil {
			return 0, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range events {
		l.last++
		e.Seq = l.last
		if e.CreatedMS == 0 {
			e.CreatedMS = time.Now().UnixMilli()
		}
		if len(e.Payload) == 0 {
			e.Payload = json.RawMessage("{}")
		}
		l.events = append(l.events, e)
	}
	if n, limit := len(l.events), cmp.Or(l.Max, 10_000); n > limit {
		l.events = slices.Clone(l.events[n-limit:])
	}
	return l.last, nil
}

// Offer implements Log.
func (l *MemoryLog) Offer(e Event) bool {
	_, err := l.Append(context.Background(), e)
	return err == nil
}

// Replay implements Log.
func (l *MemoryLog) Replay(ctx context.Context, after uint64, fn func(Event) error, types ...string) error {
	l.mu.Lock()
	events := slices.Clone(l.events)
	l.mu.Unlock()
	for _, e := range events {
		if e.Seq <= after || !MatchesType(types, e.Type) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	return nil
}

// Last implements Log.
func (l *MemoryLog) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}
