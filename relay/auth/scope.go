package auth

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
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

// Scopes is a set of scopes from the closed list manifest.Scopes.
type Scopes uint16

// Bits of Scopes, in the order in which scopes are printed.
const (
	bitCallReadOnly Scopes = 1 << iota
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
	allowed     Scopes // what Verify grants at most, whatever the claim says
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
	defaults Scopes
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

// scopeBit returns the bit of one scope word, 0 for a word outside the closed list. The
// list is short enough that a scan beats a map; nearly all words differ in length.
func scopeBit(word string) Scopes {
	if i := slices.Index(scopeWords[:], word); i >= 0 {
		return 1 << i
	}
	return 0
}

// ParseScopes makes a set of words. The error names a word outside the closed list.
func ParseScopes(words ...string) (Scopes, error) {
	var set Scopes
	for _, w := range words {
		b := scopeBit(w)
		if b == 0 {
			return 0, fmt.Errorf("not a scope: %q (the scopes are %s)", w, strings.Join(scopeWords[:], " "))
		}
		set |= b
	}
	return set, nil
}

// knownScopes reads a scope claim. A word outside the closed list grants nothing, so
// that a token of a newer relay keeps working with what both relays know.
func knownScopes(claim string) (set Scopes) {
	for word := range strings.SplitSeq(claim, " ") {
		set |= scopeBit(word)
	}
	return set
}

// Has reports whether the set holds the scope. It does not allocate. A word outside the
// closed list is not held by any set.
func (s Scopes) Has(scope string) bool { return s&scopeBit(scope) != 0 }

// Words lists the set in a fixed order.
func (s Scopes) Words() []string {
	var words []string
	for i, w := range scopeWords {
		if s&(1<<i) != 0 {
			words = append(words, w)
		}
	}
	return words
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

// resolveScopes returns the claim and the scopes of the tokens that a request asks for.
func resolveScopes(classWord string, words []string) (class string, set Scopes, err error) {
	c, ok := classWords[classWord]
	if !ok {
		return "", 0, fmt.Errorf("not a token class: %q (use agent, device, enroll, tenant-admin, operator or admin)", classWord)
	}
	if len(words) == 0 {
		return c.class, c.defaults, nil
	}
	if set, err = ParseScopes(words...); err != nil {
		return "", 0, err
	}
	allowed := classes[c.class].allowed
	if extra := set &^ allowed; extra != 0 {
		return "", 0, fmt.Errorf("a token of class %s cannot hold %s; it may hold %s", c.class, extra, allowed)
	}
	return c.class, set, nil
}
