package relay

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"agentctl/relay/eventlog"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
)

// The gateway publishes the kernel's event log. Both share one id space, and every event of
// the log that has a topic is an event of the gateway:
//
//	log: type         topic                 data
//	event             its aggregate id      payload.data, as a client has sent it
//	call.*            audit                 the whole event (eventData)
//	ticket.*          ticket                the whole event, and so on for presence,
//	                                        alert, join and kernel
//	plugin.NAME.*     plugin/NAME           the whole event
//	log.gap           log/gap               the whole event
//	*.snapshot        none: retention has written old state again

// topicEventType is the type of events that were sent to a topic. The topic is their
// aggregate id, since a topic may hold what a type may not.
const topicEventType = "event"

// topicName returns the topic of an event of the log, "" for none.
func topicName(e *kernel.Event) string {
	switch e.Type {
	case "ticket.snapshot", "ticket.comments", "presence.snapshot":
		return ""
	}
	switch group, _, _ := strings.Cut(e.Type, "."); group {
	case topicEventType:
		return e.Aggregate
	case "call":
		return "audit"
	case "ticket", "presence", "alert", "join", "kernel":
		return group
	case "plugin":
		return pluginTopic(e.Type)
	case "log": // eventqueue.GapType
		return "log/gap"
	}
	return ""
}

// relayTopics are topics that a token for ingest may not publish to: an alert is a board's,
// a ticket was made here. The gateway itself protects audit and kernel.
var relayTopics = []string{"ticket", "presence", "alert", "join", "log/gap", "plugin/*"}

// topicPayload is the payload of a topicEventType event: the log takes objects only.
type topicPayload struct {
	Data json.RawMessage `json:"data"`
}

// MaxTopicData bounds the data of a topic event in the log, in bytes: topicPayload needs
// some of kernel.MaxPayload.
const MaxTopicData = kernel.MaxPayload - 16

// toTopicEvent converts an event of the log; ok is false if it has no topic, or if a
// subscriber could not take its data.
func toTopicEvent(e *kernel.Event) (_ gateway.Event, ok bool) {
	g := gateway.Event{ID: e.Seq, Tenant: e.Tenant, Topic: topicName(e), TimeMS: e.CreatedMS}
	if g.Topic == "" {
		return g, false
	}
	if e.Type == topicEventType {
		var p topicPayload
		if json.Unmarshal(e.Payload, &p) != nil {
			return g, false
		}
		g.Data = p.Data
	} else {
		if !jsontext.Value(e.Payload).IsValid() {
			return g, false
		}
		g.Data = appendEventData(make([]byte, 0, len(e.Payload)+len(e.Type)+len(e.Aggregate)+80), e)
	}
	return g, len(g.Data) > 0 && len(g.Data) <= gateway.MaxData
}

// appendEventData appends what the gateway publishes of the product's own events. It is written by hand,
// like the payload of a call: encoding/json takes four times as long, and each call passes here.
func appendEventData(b []byte, e *kernel.Event) []byte {
	b, _ = jsontext.AppendQuote(append(b, `{"type":`...), e.Type) // an error reports that U+FFFD replaced bad UTF-8
	b, _ = jsontext.AppendQuote(append(b, `,"aggregate_id":`...), e.Aggregate)
	b = strconv.AppendInt(append(b, `,"created_at":`...), e.CreatedMS, 10)
	return append(append(append(b, `,"payload":`...), e.Payload...), '}')
}

// toLogEvent wraps the data as it is: json.Marshal would escape it.
func toLogEvent(e *gateway.Event) kernel.Event {
	payload := append(append([]byte(`{"data":`), e.Data...), '}')
	return kernel.Event{Tenant: e.Tenant, Type: topicEventType, Aggregate: e.Topic, Payload: payload, CreatedMS: e.TimeMS}
}

// gatewayLog is the event log as the gateway sees it: events without a topic are skipped, so
// the ids that subscribers see have gaps.
type gatewayLog struct {
	store  *eventlog.Store
	append func(context.Context, ...kernel.Event) (uint64, error)
}

// NewGatewayLog returns an event log for a gateway, which publishes its events and appends
// what clients send.
func NewGatewayLog(store *eventlog.Store) gateway.Log {
	return gatewayLog{store, func(ctx context.Context, events ...kernel.Event) (uint64, error) {
		last, err := store.Append(ctx, events...)
		return last, storage.TimedOut(storeEvents, err)
	}}
}

// Append implements gateway.Log.
func (l gatewayLog) Append(ctx context.Context, e gateway.Event) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	id, err := l.append(ctx, toLogEvent(&e))
	if errors.Is(err, kernel.ErrLogFull) {
		err = gateway.ErrBusy
	}
	return id, err
}

// Offer implements gateway.Log.
func (l gatewayLog) Offer(e gateway.Event) bool { return l.store.Offer(toLogEvent(&e)) }

// Follow implements gateway.Log.
func (l gatewayLog) Follow(ctx context.Context, after uint64, fn func(gateway.Event) error) error {
	return l.store.Follow(ctx, eventlog.Query{After: after}, topicEventsOnly(fn))
}

// Select implements gateway.Log.
func (l gatewayLog) Select(ctx context.Context, after, to uint64, v gateway.Visible, fn func(gateway.Event) error) error {
	q := visibleEvents(v)
	q.After, q.To = after, to
	return l.store.Select(ctx, q, topicEventsOnly(fn))
}

// visibleEvents selects what a subscriber may get. Calls are the topic audit (topicName).
func visibleEvents(v gateway.Visible) eventlog.Query {
	q := eventlog.Query{Tenants: v.Tenants}
	if v.NoAudit {
		q.Class = eventlog.ClassState
	}
	return q
}

// topicEventsOnly adapts fn to the event log's callback: it is called with the events that
// have a topic.
func topicEventsOnly(fn func(gateway.Event) error) func(kernel.Event) error {
	return func(k kernel.Event) error {
		if g, ok := toTopicEvent(&k); ok {
			return fn(g)
		}
		return nil
	}
}

// CanResume implements gateway.Log.
func (l gatewayLog) CanResume(after uint64, v gateway.Visible) bool {
	return l.store.CanResume(after, visibleEvents(v))
}

// Last implements gateway.Log. An empty log continues the numbering of an earlier one.
func (l gatewayLog) Last() uint64 { return max(l.store.Last(), l.store.StartSeq()-1) }
