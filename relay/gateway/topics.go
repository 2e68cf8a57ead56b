package gateway

import (
	"strconv"
	"strings"

	"agentctl/relay/topic"
)

// A subscription names topics and prefixes, see package topic; an identity may be limited to a
// list of the same form. An event is delivered by:
//
//	tenant       its own; the relay's events ("") go to the default tenant and admins
//	topic        audit and kernel, and those below them, need the scope kernel:admin
//	granted      the topics that the identity's token is limited to, if any
//	requested    the topics that the subscription names, if any

// isReservedTopic reports whether the gateway itself uses the topic as an event type.
func isReservedTopic(topic string) bool {
	return topic == "heartbeat" || topic == "gateway" || strings.HasPrefix(topic, "gateway/")
}

// isAdminTopic reports whether the topic needs kernel:admin: audit and kernel, and what is
// below them.
func isAdminTopic(topic string) bool {
	for _, t := range [...]string{"audit", "kernel"} {
		if below, ok := strings.CutPrefix(topic, t); ok && (below == "" || below[0] == '/' || below[0] == '.') {
			return true
		}
	}
	return false
}

// eventFilter selects the events of a subscriber. Subscribers with equal filters share the
// work of matching and joining events.
type eventFilter struct {
	tenant  string
	isAdmin bool
	topics  topic.Patterns // that the request names
	granted topic.Patterns // that the identity is limited to
}

// key is equal for equal filters.
func (f *eventFilter) key() string {
	return strings.Join([]string{f.tenant, strconv.FormatBool(f.isAdmin), f.topics.String(), f.granted.String()}, "\n")
}

// matches reports whether an event is delivered to the subscriber. Events of the relay
// itself, which have no tenant, are for the default tenant and for kernel:admin.
func (f *eventFilter) matches(tenant, topic string) bool {
	if tenant != f.tenant && (tenant != "" || (f.tenant != DefaultTenant && !f.isAdmin)) {
		return false
	}
	return f.topics.Match(topic) && f.granted.Match(topic) && (f.isAdmin || !isAdminTopic(topic))
}

// visible is what matches can be true for.
func (f *eventFilter) visible() Visible {
	v := Visible{Tenants: []string{f.tenant}, NoAudit: !f.matches(f.tenant, "audit")}
	if f.tenant != "" && (f.tenant == DefaultTenant || f.isAdmin) {
		v.Tenants = append(v.Tenants, "")
	}
	return v
}
