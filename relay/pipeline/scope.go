package pipeline

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Kind is what a Scope selects by. A larger kind is narrower and wins.
type Kind uint8

// Kinds of scopes.
const (
	Global     Kind = iota // every request
	Transport              // those that came in by one transport
	Plugin                 // those for one plugin
	Connection             // those of one connection or session
)

var kindWords = [...]string{"global", "transport", "plugin", "connection"}

// Scope selects the requests that an entry applies to.
type Scope struct {
	Kind Kind
	Name string // of the transport, plugin or connection; empty for Global
}

// String returns the scope in the form that ParseScope reads.
func (s Scope) String() string {
	if s.Kind == Global || int(s.Kind) >= len(kindWords) {
		return "global"
	}
	return kindWords[s.Kind] + "=" + s.Name
}

// MaxScopeName bounds the name in a Scope, bytes.
const MaxScopeName = 512

// ParseScope reads "global" (or ""), "transport=NAME", "plugin=NAME" and
// "connection=ID". A name has 1 to MaxScopeName printable ASCII characters.
func ParseScope(text string) (Scope, error) {
	if text == "" || text == "global" {
		return Scope{}, nil
	}
	word, name, ok := strings.Cut(text, "=")
	kind := slices.Index(kindWords[:], word)
	if !ok || kind <= 0 || name == "" || len(name) > MaxScopeName {
		return Scope{}, errScope
	}
	if strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return Scope{}, errScope
	}
	return Scope{Kind(kind), name}, nil
}

var errScope = fmt.Errorf("a scope is global, transport=NAME, plugin=NAME or connection=ID, with a name of 1 to %d printable characters without spaces", MaxScopeName)

// Entry is a stage in a scope.
type Entry[Req, Res any] struct {
	Stage   Stage[Req, Res]
	Scope   Scope
	Enabled bool            // false: switched off for this scope
	Config  json.RawMessage // what the stage was made from; unused by the pipeline
	// Match reports whether a request is in the scope. It may be nil in a Global entry, which
	// then costs a request nothing.
	Match func(req Req) bool
}

// narrowest returns the entry of a stage that decides about req: the first that matches, since the
// narrowest are first. nil: none matches.
func narrowest[Req, Res any](group []Entry[Req, Res], req Req) *Entry[Req, Res] {
	for i := range group {
		if e := &group[i]; e.Match == nil || e.Match(req) {
			return e
		}
	}
	return nil
}

// wrap makes a handler from the entries of one stage, the narrowest first, and the next handler.
// Each request takes the branch of the narrowest entry that matches, or else that of the global
// entry.
func wrap[Req, Res any](group []Entry[Req, Res], next Handler[Req, Res]) (Handler[Req, Res], error) {
	type branch struct {
		match  func(Req) bool
		handle Handler[Req, Res]
	}
	var branches []branch
	fallback := next // for a request that no branch matches
	for _, e := range group {
		h := next
		if e.Enabled {
			if h = e.Stage.Wrap(next); h == nil {
				return nil, fmt.Errorf("pipeline: the Wrap of stage %q returns no handler", e.Stage.Name)
			}
		}
		if e.Match == nil { // global, and so the last
			fallback = h
		} else {
			branches = append(branches, branch{e.Match, h})
		}
	}
	if len(branches) == 0 {
		return fallback, nil
	}
	return func(ctx context.Context, req Req) (Res, error) {
		for i := range branches {
			if branches[i].match(req) {
				return branches[i].handle(ctx, req)
			}
		}
		return fallback(ctx, req)
	}, nil
}
