package auth

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"agentctl/manifest"
	"agentctl/relay/topic"
)

// grantRequest.resolve decides what a token or an invite grants, whether an operator or the holder of a
// token makes it:
//
//	request   the scopes that it names, or those of the class; and the topics
//	creator   a token cannot give a scope or a topic that it lacks itself, but for device:connect
//	plugins   a scope of a plugin must be one that a plugin declares
//	topics    limit events:subscribe and events:ingest, so one of these scopes must be granted

// maxTopicsSize bounds the topics of one token, bytes: a token has at most MaxTokenLen.
const maxTopicsSize = 768

// grant is what a token or an invite gives.
type grant struct {
	class  string         // claim cls
	scopes Scopes         // never empty
	topics topic.Patterns // nil: all
}

// grantRequest is what somebody wants a token or an invite to grant.
type grantRequest struct {
	class     string    // a word of classWords
	scopes    []string  // in place of those of the class
	addScopes []string  // besides them
	topics    []string  // nil: all that the creator has
	plugins   []string  // scopes that plugins declare
	creator   *Identity // nil: the operator
	cannot    string    // of an error: "a token cannot hold" or "an invite cannot grant"
}

// resolve decides a request. The error wraps ErrRequest, or is an *Error of kind ErrGrant.
func (r *grantRequest) resolve() (g grant, err error) {
	c, ok := classWords[r.class]
	if !ok {
		return g, requestError{fmt.Errorf("not a token class: %q (use agent, device, enroll, tenant-admin, operator or admin)", r.class)}
	}
	g.class = c.class
	named, unknown := makeScopes(slices.Values(slices.Concat(r.scopes, r.addScopes)))
	if unknown != "" {
		return g, requestError{&ScopeError{unknown, r.knownTo()}}
	}
	g.scopes = named
	if len(r.scopes) == 0 {
		g.scopes.relay |= c.defaults
	}
	if extra := g.scopes.without(g.scopes.ofClass(g.class)); !extra.IsZero() {
		return g, requestError{fmt.Errorf("a token of class %s cannot hold %s; it may hold %s", g.class, extra, Scopes{relay: classes[g.class].allowed})}
	}
	if err := r.limitToCreator(&g, named); err != nil {
		return g, err
	}
	for _, scope := range strings.Fields(g.scopes.plugins) {
		if !slices.Contains(r.plugins, scope) {
			return g, requestError{&ScopeError{scope, r.knownTo()}}
		}
	}
	if len(g.scopes.plugins) > maxPluginScopes {
		return g, requestError{fmt.Errorf("the scopes of plugins take %d bytes, and a token has space for %d; make several tokens", len(g.scopes.plugins), maxPluginScopes)}
	}
	return g, r.limitTopics(&g)
}

// limitToCreator cuts the defaults of an agent down to what the creator has. Scopes and presets
// that are asked for by name are refused if the creator lacks one. A preset gives boards:inspect
// only if the creator has it, because administrators' tokens that are older than this scope go on
// making presets. An invite for a board, and a device token, need no more than the right to make it.
func (r *grantRequest) limitToCreator(g *grant, named Scopes) error {
	if r.creator == nil {
		return nil
	}
	own := r.creator.Scopes.union(Scopes{relay: bitDeviceConnect})
	if len(r.scopes) == 0 && named.relay&bitBoardsInspect == 0 {
		g.scopes.relay &^= bitBoardsInspect &^ own.relay
	}
	granted := g.scopes.intersect(own)
	lacking := g.scopes.without(granted)
	if len(r.scopes) == 0 && classWords[r.class] == classWords[ClassAgent] {
		lacking = lacking.intersect(named)
	}
	if !lacking.IsZero() || granted.IsZero() {
		return &Error{ErrGrant, "scope", r.cannot + " scopes that the token that makes it lacks: " + g.scopes.without(granted).String()}
	}
	g.scopes = granted
	return nil
}

// limitTopics reads the topics. Without any, a token has those of its creator.
func (r *grantRequest) limitTopics(g *grant) (err error) {
	usesTopics := g.class == ClassAgent && g.scopes.relay&(bitEventsSubscribe|bitEventsIngest) != 0
	own := r.creator.Topics()
	if r.topics == nil {
		if usesTopics {
			g.topics = own
		}
		return nil
	}
	if g.topics, err = topic.Parse(r.topics...); err != nil {
		return requestError{err}
	}
	switch {
	case g.topics == nil: // of an empty variable of a script, which must not lift the limit
		return requestError{errors.New(`a topic is a name such as log/level, or a prefix such as log/*; for all topics, give none`)}
	case !usesTopics:
		return requestError{fmt.Errorf("topics limit the scopes %s and %s; grant one of them, or leave the topics out", manifest.ScopeEventsSubscribe, manifest.ScopeEventsIngest)}
	case len(g.topics.String()) > maxTopicsSize:
		return requestError{fmt.Errorf("the topics take %d bytes, and a token has space for %d; use prefixes such as log/*", len(g.topics.String()), maxTopicsSize)}
	case !own.CoversAll(g.topics):
		return &Error{ErrGrant, "topic", r.cannot + " topics that the token that makes it lacks"}
	}
	return nil
}

// knownTo returns the scopes of plugins that an error may name: to a creator only those that it has.
func (r *grantRequest) knownTo() []string {
	if r.creator == nil {
		return r.plugins
	}
	return slices.DeleteFunc(slices.Clone(r.plugins), func(s string) bool { return !r.creator.Scopes.hasPlugins(s) })
}

// topicsText is how topics are stored and stand in a token: "" for all of them.
func topicsText(p topic.Patterns) string {
	if p == nil {
		return ""
	}
	return p.String()
}

// readTopics reads topicsText of a row, after the error of the scan, which wins. A text that
// topicsText did not write is an error: it must not mean all topics.
func readTopics(text string, err error) (topic.Patterns, error) {
	if err != nil || text == "" {
		return nil, err
	}
	p, err := topic.Parse(text)
	if err == nil && p == nil {
		err = fmt.Errorf("not a list of topics: %q", text)
	}
	return p, err
}
