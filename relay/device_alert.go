package relay

import (
	"encoding/json"
	"math"
	"strings"
	"unicode"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/link"
)

// Event types of the log about alerts of boards; the payload is an alert with its node.
const (
	eventAlertRaised  = "alert.raised"
	eventAlertCleared = "alert.cleared"
)

// alert is an alert as a board tells it (docs/control.md, event alert).
type alert struct {
	NodeID    string   `json:"node_id,omitempty"` // ours: a board does not say it
	Level     string   `json:"level"`
	Metric    string   `json:"metric"`
	Value     float64  `json:"value"`
	Threshold *float64 `json:"threshold,omitempty"`
	RuleID    string   `json:"rule_id,omitempty"`
	Message   string   `json:"message"`
	Cleared   bool     `json:"cleared,omitempty"`
	TS        int64    `json:"ts"` // the board's clock, milliseconds since 1970: not trusted
}

// valid holds what a board says against its form: words are words, and the message is
// one printable line.
func (a *alert) valid() bool {
	switch {
	case a.NodeID != "" || (a.Level != "info" && a.Level != "warn" && a.Level != "error"):
	case !word(a.Metric) || (a.RuleID != "" && !word(a.RuleID)) || len(a.Message) == 0 || len(a.Message) > 512:
	case math.IsNaN(a.Value) || a.TS < 0:
	default:
		return !strings.ContainsFunc(a.Message, func(r rune) bool { return !unicode.IsPrint(r) })
	}
	return false
}

func word(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' && c != '.' {
			return false
		}
	}
	return len(s) > 0 && len(s) <= 64
}

// onDeviceEvent takes an event of a board: an alert goes into the event log.
func (r *Relay) onDeviceEvent(n *hub.Node, topic string, data []byte) {
	var a alert
	if topic != link.TopicAlert || strictjson.Unmarshal(data, &a) != nil || !a.valid() {
		r.auditDevice(hub.AuditEvent{Kind: "bad_event", Tenant: n.Tenant(), NodeID: n.ID(), Code: manifest.BadRequest})
		return
	}
	a.NodeID = n.ID()
	payload, err := json.Marshal(&a)
	if err != nil {
		return // finite numbers and checked strings
	}
	typ := eventAlertRaised
	if a.Cleared {
		typ = eventAlertCleared
	}
	if !r.events.Offer(kernel.Event{Tenant: n.Tenant(), Type: typ, Aggregate: n.ID(), Payload: payload}) {
		r.log.Warn("alert not kept: the event log is behind", zap.String("node_id", n.ID()))
	}
}
