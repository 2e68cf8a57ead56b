package gateway

import (
	"slices"
	"strconv"
	"strings"
)

// A topic is a name like log/level. A subscription names topics and prefixes (log/*); an
// identity may be bound to a list of the same form. An event is delivered by:
//
//	tenant       its own; the relay's events ("") go to the default tenant and admins
//	topic        audit and kernel, and those below them, need the scope kernel:admin
//	granted      the topics that the identity's token is bound to, if any
//	requested    the topics that the subscription names, if any

// maxTopics bounds a subscription.
const maxTopics = 64

// isValidTopic matches [A-Za-z0-9_][A-Za-z0-9_./-]{0,127}.
func isValidTopic(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_':
		case i > 0 && (c == '.' || c == '/' || c == '-'):
		default:
			return false
		}
	}
	return len(s) > 0 && len(s) <= 128
}

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

// topicPatterns are topics, and prefixes that end in "/*". Nil matches every topic.
type topicPatterns []string

func (p topicPatterns) match(topic string) bool {
	return p == nil || slices.ContainsFunc(p, func(pattern string) bool {
		prefix, isPrefix := strings.CutSuffix(pattern, "*")
		return pattern == topic || (isPrefix && strings.HasPrefix(topic, prefix))
	})
}

func (p topicPatterns) String() string {
	if p == nil {
		return "*"
	}
	return strings.Join(p, ",")
}

// parseTopics reads the values of ?topics=a,b,log/*. None and "*" are all topics.
func parseTopics(values []string) (p topicPatterns, ok bool) {
	for t := range strings.SplitSeq(strings.Join(values, ","), ",") {
		t = strings.TrimSpace(t)
		switch {
		case t == "":
			continue
		case t == "*":
			return nil, true
		case !isValidTopic(strings.TrimSuffix(t, "/*")) || len(p) >= maxTopics:
			return nil, false
		}
		p = append(p, t)
	}
	slices.Sort(p)
	return slices.Compact(p), true
}

// eventFilter selects the events of a subscriber. Subscribers with equal filters share the
// work of matching and joining events.
type eventFilter struct {
	tenant  string
	isAdmin bool
	topics  topicPatterns // that the request names
	granted topicPatterns // that the identity is bound to
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
	return f.topics.match(topic) && f.granted.match(topic) && (f.isAdmin || !isAdminTopic(topic))
}

// visible is what matches can be true for.
func (f *eventFilter) visible() Visible {
	v := Visible{Tenants: []string{f.tenant}, NoAudit: !f.matches(f.tenant, "audit")}
	if f.tenant != "" && (f.tenant == DefaultTenant || f.isAdmin) {
		v.Tenants = append(v.Tenants, "")
	}
	return v
}
