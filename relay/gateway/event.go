package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"slices"
	"strconv"
	"strings"
	"sync"

	"agentctl/transport/sse"
)

// Event is one topic event.
type Event struct {
	ID     uint64
	Tenant string // "" is the relay itself: for tenant "default" and for kernel:admin
	Topic  string
	Data   []byte // compact JSON without CR and LF, at most MaxData
	TimeMS int64  // wall clock, milliseconds since 1970
}

// DefaultTenant is that of the holders of the configured tokens, and of everybody where
// there are none.
const DefaultTenant = "default"

// event is an Event as subscribers get it: encoded once, shared by all.
type event struct {
	id            uint64
	tenant, topic string
	frame         []byte
}

func (e *event) chunk() chunk { return chunk{b: e.frame, events: 1, first: e.id, last: e.id} }

// validTopic: [A-Za-z0-9_][A-Za-z0-9_./-]{0,127}
func validTopic(s string) bool {
	for i := 0; i < len(s); i++ {
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

// reserved are the names that the gateway itself puts on a stream.
func reserved(topic string) bool {
	return topic == "heartbeat" || topic == "gateway" || strings.HasPrefix(topic, "gateway/")
}

// adminTopic: audit and kernel, and what lies below them, need kernel:admin.
func adminTopic(topic string) bool {
	for _, t := range [...]string{"audit", "kernel"} {
		if rest, ok := strings.CutPrefix(topic, t); ok && (rest == "" || rest[0] == '/' || rest[0] == '.') {
			return true
		}
	}
	return false
}

// patterns are topics, and prefixes that end in "/*". Nil: all.
type patterns []string

func (p patterns) match(topic string) bool {
	if p == nil {
		return true
	}
	for _, t := range p {
		if prefix, ok := strings.CutSuffix(t, "*"); t == topic || (ok && strings.HasPrefix(topic, prefix)) {
			return true
		}
	}
	return false
}

// maxTopics bounds a subscription.
const maxTopics = 64

// parseTopics reads ?topics=a,b,log/*. Blank and "*" are all topics.
func parseTopics(values []string) (patterns, bool) {
	var p patterns
	for _, t := range strings.Split(strings.Join(values, ","), ",") {
		t = strings.TrimSpace(t)
		switch {
		case t == "":
			continue
		case t == "*":
			return nil, true
		case !validTopic(strings.TrimSuffix(t, "/*")) || len(p) >= maxTopics:
			return nil, false
		}
		p = append(p, t)
	}
	slices.Sort(p)
	return slices.Compact(p), true
}

// eventFilter is what a subscriber may see and asked for. Subscribers with equal views share
// the work of filtering and joining.
type eventFilter struct {
	tenant  string
	admin   bool
	topics  patterns // asked for
	granted patterns // granted by the identity
}

func (v *eventFilter) key() string {
	all := func(p patterns) string {
		if p == nil {
			return "*"
		}
		return strings.Join(p, ",")
	}
	return v.tenant + "\n" + strconv.FormatBool(v.admin) + "\n" + all(v.topics) + "\n" + all(v.granted)
}

func (v *eventFilter) matches(tenant, topic string) bool {
	if tenant != v.tenant && (tenant != "" || (v.tenant != DefaultTenant && !v.admin)) {
		return false
	}
	return v.topics.match(topic) && v.granted.match(topic) && (v.admin || !adminTopic(topic))
}

// signer adds the HMAC line: over "topic\nid\nts\nd", d being the SHA-256 of the data.
type signer struct {
	mu  sync.Mutex
	mac hash.Hash
}

func newSigner(secret []byte) *signer {
	if len(secret) == 0 {
		return nil
	}
	return &signer{mac: hmac.New(sha256.New, secret)}
}

// digest is d, hex; nil for a gateway that does not sign.
func (s *signer) digest(data []byte) []byte {
	if s == nil {
		return nil
	}
	sum := sha256.Sum256(data)
	return hex.AppendEncode(nil, sum[:])
}

// encode makes the frame of e; d is its digest. normalizeEvent has checked Topic and Data:
// neither has a CR or LF.
func (s *signer) encode(e *Event, d []byte) *event {
	var idBuf [20]byte
	id := strconv.AppendUint(idBuf[:0], e.ID, 10)
	size := len(e.Topic) + len(e.Data) + 48
	lines := [2][]byte{e.Data}
	n := 1
	if s != nil {
		var sigBuf [signatureSize]byte
		lines[1] = s.appendSignature(sigBuf[:0], e, d)
		size += len(lines[1])
		n = 2
	}
	frame, _ := sse.AppendEventID(make([]byte, 0, size), id, e.Topic, lines[:n]...)
	return &event{id: e.ID, tenant: e.Tenant, topic: e.Topic, frame: frame}
}

// signatureSize holds the second data line of a signed event.
const signatureSize = 192

// appendSignature appends {"sig":"...","ts":...,"d":"..."}.
func (s *signer) appendSignature(dst []byte, e *Event, d []byte) []byte {
	dst = append(dst, `{"sig":"`...)
	dst = s.appendMAC(dst, e, d)
	dst = append(dst, `","ts":`...)
	dst = strconv.AppendInt(dst, e.TimeMS, 10)
	dst = append(dst, `,"d":"`...)
	dst = append(dst, d...)
	return append(dst, `"}`...)
}

// appendMAC appends the HMAC in hex.
func (s *signer) appendMAC(dst []byte, e *Event, d []byte) []byte {
	var buf [256]byte
	msg := append(append(buf[:0], e.Topic...), '\n')
	msg = append(strconv.AppendUint(msg, e.ID, 10), '\n')
	msg = append(strconv.AppendInt(msg, e.TimeMS, 10), '\n')
	msg = append(msg, d...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mac.Reset()
	s.mac.Write(msg)
	return hex.AppendEncode(dst, s.mac.Sum(msg[:0]))
}
