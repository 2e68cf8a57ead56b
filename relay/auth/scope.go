package auth

import (
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
	"agentctl/suggest"
)

// Token classes (claim cls), a closed set.
const (
	ClassAgent  = "agent_runtime"  // people, programs, LLM agents: the relay's HTTP API
	ClassDevice = "device_runtime" // one node: the device link
	ClassEnroll = "enroll"         // a board that has no identity yet
)

// Presets are class words for Mint, not claims: each makes an agent token with the scopes
// of one role. A role of a tenant and the role of the whole relay are kept apart, because
// kernel:admin reaches beyond the tenant of its holder.
const (
	PresetTenantAdmin = "tenant-admin" // administers one tenant: its nodes, tokens, invites and tickets
	PresetOperator    = "operator"     // operates the relay: kernel:admin, and reading tools and events
	PresetAdmin       = "admin"        // every scope that an agent may hold, kernel:admin included
)

// relayScopes is a set of the relay's scopes (manifest.Scopes).
type relayScopes uint16

// Scopes is a set of scopes: of the relay, and of plugins (manifest.PluginScope). Equal sets are
// equal with ==. It does not know which plugins there are: a scope of a plugin that is not loaded
// is a word that nothing asks for.
type Scopes struct {
	relay   relayScopes
	plugins string // sorted words, with one space between
}

// Bits of relayScopes, in the order in which scopes are printed.
const (
	bitCallReadOnly relayScopes = 1 << iota
	bitToolsList
	bitEventsSubscribe
	bitEventsIngest
	bitTicketsRead
	bitTicketsWrite
	bitKernelAdmin
	bitDeviceConnect
	bitDeviceEnroll
	bitNodesWrite
	bitTokensWrite
	bitInvitesWrite
	bitBoardsInspect
)

// maxPluginScopes bounds the scopes of plugins in one token, bytes: a token has at most MaxTokenLen.
const maxPluginScopes = 768

// scopeWords names the bits: scopeWords[i] is the word of 1<<i.
var scopeWords = [...]string{
	manifest.ScopeCallReadOnly, manifest.ScopeToolsList, manifest.ScopeEventsSubscribe,
	manifest.ScopeEventsIngest, manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite,
	manifest.ScopeKernelAdmin, manifest.ScopeDeviceConnect, manifest.ScopeDeviceEnroll,
	manifest.ScopeNodesWrite, manifest.ScopeTokensWrite, manifest.ScopeInvitesWrite,
	manifest.ScopeBoardsInspect,
}

// agentScopes are what an agent token may hold; agentDefaults what it gets when a request
// names no scopes. Publishing events, every kind of writing and kernel:admin have to be
// asked for. An operator's token reads no boards and no tickets of its tenant: it lists
// tools, because the control plane is tools, and follows the topics audit and kernel.
const (
	agentScopes       = agentDefaults | tenantAdminScopes | operatorScopes | bitEventsIngest
	agentDefaults     = bitCallReadOnly | bitToolsList | bitEventsSubscribe | bitTicketsRead | bitBoardsInspect
	tenantAdminScopes = agentDefaults | bitTicketsWrite | bitNodesWrite | bitTokensWrite | bitInvitesWrite
	operatorScopes    = bitKernelAdmin | bitToolsList | bitEventsSubscribe
)

const day = 24 * time.Hour

// classes holds the rules of each class. Default lifetimes are long because a token of Mint
// cannot be refreshed; every token can be revoked. Tokens of those that have joined live
// shorter (BoardTokenTTL, AgentTokenTTL).
var classes = map[string]struct {
	allowed     relayScopes // what Verify grants at most, whatever the claim says; agents also those of plugins
	ttl, maxTTL time.Duration
}{
	ClassAgent:  {agentScopes, 90 * day, MaxTTL},
	ClassDevice: {bitDeviceConnect, 365 * day, MaxTTL},
	ClassEnroll: {bitDeviceEnroll, time.Hour, time.Hour},
}

// classWords maps the class words of a MintRequest, claim values included, to the claim
// and to the scopes that a token gets when the request names none.
var classWords = map[string]struct {
	class    string
	defaults relayScopes
}{
	"agent":           {ClassAgent, agentDefaults},
	ClassAgent:        {ClassAgent, agentDefaults},
	PresetTenantAdmin: {ClassAgent, tenantAdminScopes},
	PresetOperator:    {ClassAgent, operatorScopes},
	PresetAdmin:       {ClassAgent, agentScopes},
	"device":          {ClassDevice, bitDeviceConnect},
	ClassDevice:       {ClassDevice, bitDeviceConnect},
	ClassEnroll:       {ClassEnroll, bitDeviceEnroll},
}

// scopeBit returns the bit of one scope of the relay, 0 for another word. The list is short
// enough that a scan beats a map; nearly all words differ in length.
func scopeBit(word string) relayScopes {
	if i := slices.Index(scopeWords[:], word); i >= 0 {
		return 1 << i
	}
	return 0
}

// makeScopes makes a set of words, and returns the first word that is not a scope.
func makeScopes(words iter.Seq[string]) (set Scopes, unknown string) {
	var plugins []string
	for w := range words {
		if b := scopeBit(w); b != 0 {
			set.relay |= b
		} else if _, _, ok := manifest.PluginScope(w); ok {
			plugins = append(plugins, w)
		} else if unknown == "" {
			unknown = w
		}
	}
	slices.Sort(plugins)
	set.plugins = strings.Join(slices.Compact(plugins), " ")
	return set, unknown
}

// ParseScopes makes a set of words. It knows the form of a plugin's scope, not which ones there
// are. The error is a *ScopeError.
func ParseScopes(words ...string) (Scopes, error) {
	set, unknown := makeScopes(slices.Values(words))
	if unknown != "" {
		return Scopes{}, &ScopeError{Scope: unknown}
	}
	return set, nil
}

// knownScopes reads a scope claim. A word that is not a scope grants nothing, so that a token of
// a newer relay keeps working with what both relays know.
func knownScopes(claim string) Scopes {
	set, _ := makeScopes(strings.SplitSeq(claim, " "))
	return set
}

// ScopeError is a word that is not a scope, or the scope of a plugin that there is not.
type ScopeError struct {
	Scope   string
	Plugins []string // the scopes of plugins that may be granted
}

func (e *ScopeError) Error() string {
	near := suggest.Hint(e.Scope, slices.Concat(scopeWords[:], e.Plugins))
	if plugin, _, ok := manifest.PluginScope(e.Scope); ok {
		prefix := plugin + ":"
		own := slices.DeleteFunc(slices.Clone(e.Plugins), func(s string) bool { return !strings.HasPrefix(s, prefix) })
		if len(own) > 0 {
			return fmt.Sprintf("not a scope: %+.80q%s (plugin %s has %s)", e.Scope, near, plugin, strings.Join(own, " "))
		}
		if near == "" {
			return fmt.Sprintf("not a scope: %+.80q (there is no plugin %s that declares it%s)", e.Scope, plugin, pluginsHave(e.Plugins))
		}
	}
	return fmt.Sprintf("not a scope: %+.80q%s (the scopes are %s%s)", e.Scope, near, strings.Join(scopeWords[:], " "), pluginsHave(e.Plugins))
}

// pluginsHave lists the scopes of plugins at the end of an error, if there are any.
func pluginsHave(scopes []string) string {
	if len(scopes) == 0 {
		return ""
	}
	return "; plugins have " + strings.Join(scopes, " ")
}

// Has reports whether the set holds the scope. It does not allocate. A word that is not a scope is
// not held by any set.
func (s Scopes) Has(scope string) bool {
	return s.relay&scopeBit(scope) != 0 || s.plugins != "" && s.hasPlugins(scope)
}

// hasPlugins reports whether the set holds a scope of a plugin.
func (s Scopes) hasPlugins(scope string) bool {
	for word, rest := "", s.plugins; rest != ""; {
		if word, rest, _ = strings.Cut(rest, " "); word == scope {
			return true
		}
	}
	return false
}

// IsZero reports whether the set is empty.
func (s Scopes) IsZero() bool { return s == Scopes{} }

// union returns the scopes that s or other has.
func (s Scopes) union(other Scopes) Scopes {
	if other.plugins != "" {
		both := strings.Fields(s.plugins + " " + other.plugins)
		slices.Sort(both)
		s.plugins = strings.Join(slices.Compact(both), " ")
	}
	s.relay |= other.relay
	return s
}

// filter returns the scopes of plugins for which keep is true, and those of the relay in mask.
func (s Scopes) filter(mask relayScopes, keep func(scope string) bool) Scopes {
	s.relay &= mask
	s.plugins = strings.Join(slices.DeleteFunc(strings.Fields(s.plugins), func(w string) bool { return !keep(w) }), " ")
	return s
}

// intersect returns the scopes that both have.
func (s Scopes) intersect(other Scopes) Scopes { return s.filter(other.relay, other.hasPlugins) }

// without returns the scopes that s has and other has not.
func (s Scopes) without(other Scopes) Scopes {
	return s.filter(^other.relay, func(w string) bool { return !other.hasPlugins(w) })
}

// ofClass returns the scopes that a token of a class may hold.
func (s Scopes) ofClass(class string) Scopes {
	s.relay &= classes[class].allowed
	if class != ClassAgent {
		s.plugins = ""
	}
	return s
}

// Words lists the set in a fixed order: the relay's scopes, then those of plugins by name.
func (s Scopes) Words() []string {
	var words []string
	for i, w := range scopeWords {
		if s.relay&(1<<i) != 0 {
			words = append(words, w)
		}
	}
	return append(words, strings.Fields(s.plugins)...)
}

// String formats the set as a scope claim: words with one space between.
func (s Scopes) String() string { return strings.Join(s.Words(), " ") }

// MarshalText implements encoding.TextMarshaler, so that JSON shows words and not bits.
func (s Scopes) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. Unknown words are an error.
func (s *Scopes) UnmarshalText(text []byte) (err error) {
	*s, err = ParseScopes(strings.Fields(string(text))...)
	return err
}
