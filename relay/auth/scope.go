package auth

import (
	"fmt"
	"slices"
	"strings"

	"agentctl/manifest"
)

// Token classes (claim cls), a closed set.
const (
	ClassAgent  = "agent_runtime"  // people, programs, LLM agents: the relay's HTTP doors
	ClassDevice = "device_runtime" // one node: the device link
	ClassEnroll = "enroll"         // a board that has no identity yet
)

// PresetAdmin is a word for Mint, not a class: an agent token with every scope that is
// of use to an agent, kernel:admin included.
const PresetAdmin = "admin"

// Scopes is a set of scopes from the closed list manifest.Scopes.
type Scopes uint16

// Bits of Scopes. The order is that of print.
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
)

var scopeWords = [...]string{
	manifest.ScopeCallReadOnly, manifest.ScopeToolsList, manifest.ScopeEventsSubscribe,
	manifest.ScopeEventsIngest, manifest.ScopeTicketsRead, manifest.ScopeTicketsWrite,
	manifest.ScopeKernelAdmin, manifest.ScopeDeviceConnect, manifest.ScopeDeviceEnroll,
}

// What each class may hold at all, and what it gets when nothing is asked for.
const (
	agentScopes   = bitCallReadOnly | bitToolsList | bitEventsSubscribe | bitEventsIngest | bitTicketsRead | bitTicketsWrite | bitKernelAdmin
	agentDefaults = bitCallReadOnly | bitToolsList | bitEventsSubscribe | bitTicketsRead
)

// scopeBit is the bit of one scope word, 0 for a word outside the closed list.
func scopeBit(word string) Scopes {
	switch word {
	case manifest.ScopeCallReadOnly:
		return bitCallReadOnly
	case manifest.ScopeToolsList:
		return bitToolsList
	case manifest.ScopeEventsSubscribe:
		return bitEventsSubscribe
	case manifest.ScopeEventsIngest:
		return bitEventsIngest
	case manifest.ScopeTicketsRead:
		return bitTicketsRead
	case manifest.ScopeTicketsWrite:
		return bitTicketsWrite
	case manifest.ScopeKernelAdmin:
		return bitKernelAdmin
	case manifest.ScopeDeviceConnect:
		return bitDeviceConnect
	case manifest.ScopeDeviceEnroll:
		return bitDeviceEnroll
	}
	return 0
}

// ParseScopes makes a set of words; a word outside the closed list is an error that
// names it.
func ParseScopes(words ...string) (Scopes, error) {
	var set Scopes
	for _, w := range words {
		b := scopeBit(w)
		if b == 0 {
			return 0, fmt.Errorf("%q is not a scope; the scopes are %s", w, strings.Join(scopeWords[:], " "))
		}
		set |= b
	}
	return set, nil
}

// knownScopes reads a scope claim. Words outside the closed list grant nothing.
func knownScopes(claim string) Scopes {
	var set Scopes
	for claim != "" {
		var word string
		word, claim, _ = strings.Cut(claim, " ")
		set |= scopeBit(word)
	}
	return set
}

// Has reports whether the set holds the scope. It does not allocate; a word outside
// the closed list is never held.
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

// String is the set as a scope claim: words with one space between.
func (s Scopes) String() string { return strings.Join(s.Words(), " ") }

// MarshalText is String, so that JSON output shows words and not bits.
func (s Scopes) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is the inverse of MarshalText; unknown words are an error.
func (s *Scopes) UnmarshalText(text []byte) (err error) {
	*s, err = ParseScopes(strings.Fields(string(text))...)
	return err
}

// classScopes is what a class may hold; nothing for a class outside the closed set.
func classScopes(class string) Scopes {
	switch class {
	case ClassAgent:
		return agentScopes
	case ClassDevice:
		return bitDeviceConnect
	case ClassEnroll:
		return bitDeviceEnroll
	}
	return 0
}

// resolveClass turns the class words of the command line, and the claim values
// themselves, into the class claim and the scopes to grant when none are asked for.
func resolveClass(word string) (class string, defaults Scopes, err error) {
	switch word {
	case "agent", ClassAgent:
		return ClassAgent, agentDefaults, nil
	case PresetAdmin:
		return ClassAgent, agentScopes, nil
	case "device", ClassDevice:
		return ClassDevice, bitDeviceConnect, nil
	case ClassEnroll:
		return ClassEnroll, bitDeviceEnroll, nil
	}
	return "", 0, fmt.Errorf("%q is not a token class; use agent, device, enroll or admin", word)
}

// resolveScopes is the set to mint for a class: the words asked for, or the defaults.
func resolveScopes(class string, words []string, defaults Scopes) (Scopes, error) {
	if len(words) == 0 {
		return defaults, nil
	}
	set, err := ParseScopes(words...)
	if err != nil {
		return 0, err
	}
	if extra := set &^ classScopes(class); extra != 0 {
		return 0, fmt.Errorf("a token of class %s cannot hold %s; it may hold %s", class, extra, classScopes(class))
	}
	return set, nil
}

// classMatches reports whether class is one of the wanted ones; none wanted is any.
func classMatches(class string, want []string) bool {
	return len(want) == 0 || slices.Contains(want, class)
}
