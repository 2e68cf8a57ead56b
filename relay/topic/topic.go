// Package topic is the grammar of topics of events and of patterns that select them:
//
//	log/level    a topic: [A-Za-z0-9_][A-Za-z0-9_./-]{0,127}
//	log/*        a pattern for every topic that begins with log/; not for log itself
//
// A subscription names patterns, and a token may be limited to some.
package topic

import (
	"fmt"
	"slices"
	"strings"
)

// Bounds of topics and lists of patterns.
const (
	MaxLen      = 128 // bytes of a topic
	MaxPatterns = 64  // of one list
)

// Valid reports whether s is a topic. It matches [A-Za-z0-9_][A-Za-z0-9_./-]{0,127}.
func Valid(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_':
		case i > 0 && (c == '.' || c == '/' || c == '-'):
		default:
			return false
		}
	}
	return len(s) > 0 && len(s) <= MaxLen
}

// Patterns are topics, and prefixes that end in "/*". Nil matches every topic. Nobody changes a
// list after it was made.
type Patterns []string

// Parse reads lists such as "a,b,log/*". Without a pattern, and with "*" among them, the result
// is nil, which matches every topic. Otherwise it is sorted and has no pattern twice.
func Parse(lists ...string) (p Patterns, err error) {
	for t := range strings.SplitSeq(strings.Join(lists, ","), ",") {
		t = strings.TrimSpace(t)
		switch {
		case t == "":
			continue
		case t == "*":
			return nil, nil
		case !Valid(strings.TrimSuffix(t, "/*")):
			return nil, fmt.Errorf("not a topic: %.140q (use a name such as log/level, or log/* for all below log: at most %d of A-Z a-z 0-9 _ . / -, beginning with a letter, a digit or _)", t, MaxLen)
		case len(p) >= MaxPatterns:
			return nil, fmt.Errorf("more than %d topics; use prefixes such as log/*", MaxPatterns)
		}
		p = append(p, t)
	}
	slices.Sort(p)
	return slices.Compact(p), nil
}

// Match reports whether a topic matches one of the patterns.
func (p Patterns) Match(topic string) bool {
	return p == nil || slices.ContainsFunc(p, func(pattern string) bool {
		prefix, isPrefix := strings.CutSuffix(pattern, "*")
		return pattern == topic || isPrefix && strings.HasPrefix(topic, prefix)
	})
}

// Covers reports whether every topic that matches a pattern, which may be a topic, matches p.
func (p Patterns) Covers(pattern string) bool {
	prefix, isPrefix := strings.CutSuffix(pattern, "*")
	if !isPrefix {
		return p.Match(pattern)
	}
	return p == nil || slices.ContainsFunc(p, func(own string) bool {
		wider, ok := strings.CutSuffix(own, "*")
		return ok && strings.HasPrefix(prefix, wider)
	})
}

// CoversAll reports whether every topic that matches q matches p.
func (p Patterns) CoversAll(q Patterns) bool {
	return p == nil || q != nil && !slices.ContainsFunc(q, func(pattern string) bool { return !p.Covers(pattern) })
}

// Overlaps reports whether some topic matches both p and a pattern, which may be a topic.
func (p Patterns) Overlaps(pattern string) bool {
	prefix, isPrefix := strings.CutSuffix(pattern, "*")
	return p.Covers(pattern) || isPrefix && slices.ContainsFunc(p, func(own string) bool { return strings.HasPrefix(own, prefix) })
}

// String is the list as Parse reads it; "*" for every topic.
func (p Patterns) String() string {
	if p == nil {
		return "*"
	}
	return strings.Join(p, ",")
}
