package relay

import (
	"encoding/json"
	"math"
	"strings"
	"unicode"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/link"
)

// Types of alert events in the event log. Their payload is an alert with its node.
const (
	eventAlertRaised  = "alert.raised"
	eventAlertCleared = "alert.cleared"
)

// alert is an alert as a board sends it, or one of the relay about a board (docs/control.md, event alert).
type alert struct {
	NodeID    string   `json:"node_id,omitempty"` // set by the relay
	Level     string   `json:"level"`
	Metric    string   `json:"metric"`
	Value     float64  `json:"value"`
	Threshold *float64 `json:"threshold,omitempty"`
	RuleID    string   `json:"rule_id,omitempty"`
	Message   string   `json:"message"`
	Cleared   bool     `json:"cleared,omitempty"`
	TS        int64    `json:"ts"` // Unix ms by the board's clock, not trusted
}

// valid checks the strings of a board before they reach the event log and agents: names are
// plain words, and the message is one printable line of at most 512 bytes. It bounds what a
// compromised board can write into the context of a language model.
func (a *alert) valid() bool {
	switch {
	case a.NodeID != "" || (a.Level != "info" && a.Level != "warn" && a.Level != "error"):
	case !isWord(a.Metric) || (a.RuleID != "" && !isWord(a.RuleID)) || len(a.Message) == 0 || len(a.Message) > 512:
	case math.IsNaN(a.Value) || a.TS < 0:
	default:
		return !strings.ContainsFunc(a.Message, func(r rune) bool { return !unicode.IsPrint(r) })
	}
	return false
}

// isWord is ^[a-z0-9_.-]{1,64}$.
func isWord(s string) bool {
	return s != "" && len(s) <= 64 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_.-") == ""
}

// onDeviceEvent takes an event that a board sent by itself: an alert goes into the event
// log. It runs in the link's session and must not block, so it offers the alert and drops it
// when the log is behind. An unknown topic or a bad alert is audited, and the link stays.
func (r *Relay) onDeviceEvent(n *hub.Node, topic string, data []byte) {
	var a alert
	if topic != link.TopicAlert || strictjson.Unmarshal(data, &a) != nil || !a.valid() {
		r.auditDevice(hub.AuditEvent{Kind: "bad_event", Tenant: n.Tenant(), NodeID: n.ID(), Code: manifest.BadRequest})
		return
	}
	a.NodeID = n.ID()
	r.offerAlert(n.Tenant(), &a)
}

// offerAlert offers an alert to the event log.
func (r *Relay) offerAlert(tenant string, a *alert) {
	payload, err := json.Marshal(a)
	if err != nil {
		return // cannot happen: numbers are finite
	}
	typ := eventAlertRaised
	if a.Cleared {
		typ = eventAlertCleared
	}
	// One that is refused is counted, and log.gap says so later.
	r.queue.Offer(kernel.Event{Tenant: tenant, Type: typ, Aggregate: a.NodeID, Payload: payload})
}
