package manifest

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"time"
)

// Version is the manifest_version that a device announces. A relay refuses another one.
const Version = 1

// Bounds of an announce and of the tool names that come from it.
const (
	MaxCapabilities = 32
	MaxToolNameLen  = 64
)

// Capability is one entry of announce.payload.capabilities (RFC-0005 §9): what a device can
// do, in words of the kind registry.
type Capability struct {
	CapID       string      `json:"cap_id"`
	Kind        string      `json:"kind"`
	SchemaRef   string      `json:"schema_ref"` // input of Verbs[0]
	Verbs       []string    `json:"verbs"`
	SafetyClass SafetyClass `json:"safety_class"`
	Constraints Constraints `json:"constraints"`
}

// Constraints bound the use of a capability. The relay enforces them for all callers
// together, and the device again, since it need not trust its relay.
type Constraints struct {
	RateLimitRPS      int `json:"rate_limit_rps"`      // calls in any one second, 1..100
	MaxConcurrency    int `json:"max_concurrency"`     // calls in flight, 1..64
	DeadlineMSDefault int `json:"deadline_ms_default"` // handler budget in ms, 1..5000
}

// DefaultConstraints are those of RFC-0005 §9.
var DefaultConstraints = Constraints{RateLimitRPS: 10, MaxConcurrency: 4, DeadlineMSDefault: 2000}

// Deadline returns the time that a handler on the device has for a call.
func (c Constraints) Deadline() time.Duration {
	if c.DeadlineMSDefault <= 0 {
		return 2 * time.Second
	}
	return time.Duration(c.DeadlineMSDefault) * time.Millisecond
}

// Echo is the capability object of RFC-0005 §9. It proves that a device answers, so every
// device has it.
func Echo() Capability {
	return Capability{CapID: "echo", Kind: KindEcho, SchemaRef: "mcp://schemas/system.echo.invoke.input@1.0.0",
		Verbs: []string{VerbInvoke}, SafetyClass: ReadOnly, Constraints: DefaultConstraints}
}

// Metrics is the capability object of the machine's metrics: one reading, or a stream. Both
// share its constraints, so an open stream takes one of the calls in flight.
func Metrics() Capability {
	return Capability{CapID: "metrics", Kind: KindMetrics, SchemaRef: "mcp://schemas/system.metrics.snapshot.input@1.0.0",
		Verbs: []string{VerbSnapshot, VerbSubscribe}, SafetyClass: ReadOnly, Constraints: DefaultConstraints}
}

// History is the capability object of what a device has recorded. A page costs the device up
// to two seconds of reading its disk, so few may run at a time.
func History() Capability {
	return Capability{CapID: "history", Kind: KindHistory, SchemaRef: "mcp://schemas/system.history.query.input@1.0.0",
		Verbs: []string{VerbQuery}, SafetyClass: ReadOnly, Constraints: Constraints{RateLimitRPS: 5, MaxConcurrency: 2, DeadlineMSDefault: 2000}}
}

// Inspection is the capability object of a kind with one verb that reads something of the machine:
// all kinds since system.info. Reading may cost up to two seconds of a small board, so few run at
// a time.
func Inspection(kind string) Capability {
	k, ok := LookupKind(kind)
	if !ok || len(k.Verbs) != 1 {
		panic("manifest: not a kind with one verb: " + kind)
	}
	return Capability{CapID: strings.TrimPrefix(kind, "system."), Kind: k.Name, SchemaRef: k.Verbs[0].Input,
		Verbs: []string{k.Verbs[0].Name}, SafetyClass: ReadOnly, Constraints: Constraints{RateLimitRPS: 5, MaxConcurrency: 2, DeadlineMSDefault: 2000}}
}

// Check reports whether c is a capability of this release: known kind and verbs, the kind's
// safety class, the right schema reference, constraints in range. The error is always
// E_MANIFEST_INVALID and quotes nothing of c, which a device has sent.
func (c *Capability) Check() error {
	const badVerbs = "verbs must name at least one verb of the kind, each once"
	k, ok := LookupKind(c.Kind)
	switch {
	case !ValidCapID(c.CapID):
		return E(ManifestInvalid, "cap_id must match ^[a-z0-9_]{1,24}$")
	case !ok:
		return E(ManifestInvalid, "kind is not one of the kinds this relay knows")
	case c.SafetyClass != k.Safety:
		return E(ManifestInvalid, "safety_class is not the one this kind admits")
	case len(c.Verbs) == 0 || len(c.Verbs) > len(k.Verbs):
		return E(ManifestInvalid, badVerbs)
	}
	for i, name := range c.Verbs {
		if _, ok := k.Verb(name); !ok {
			return E(ManifestInvalid, "a verb is not one of the kind's verbs")
		}
		if slices.Contains(c.Verbs[:i], name) {
			return E(ManifestInvalid, badVerbs)
		}
	}
	if v, _ := k.Verb(c.Verbs[0]); c.SchemaRef != v.Input {
		return E(ManifestInvalid, "schema_ref must name the input schema of the first verb")
	}
	return c.Constraints.check()
}

// check reports whether the constraints are in the ranges of RFC-0005 §9. The zero value is
// not, so a device has to state each of them.
func (c Constraints) check() error {
	if c.RateLimitRPS < 1 || c.RateLimitRPS > 100 || c.MaxConcurrency < 1 || c.MaxConcurrency > 64 ||
		c.DeadlineMSDefault < 1 || c.DeadlineMSDefault > 5000 {
		return E(ManifestInvalid, "constraints are out of range: rate_limit_rps 1..100, max_concurrency 1..64, deadline_ms_default 1..5000")
	}
	return nil
}

// Hash returns manifest_sha256: the hex SHA-256 of the raw bytes of `capabilities` as sent.
// The relay answers with it, so that a device sees that its announce arrived unchanged.
func Hash(rawCapabilities []byte) string {
	sum := sha256.Sum256(rawCapabilities)
	return hex.EncodeToString(sum[:])
}

// ValidCapID reports whether s may be a cap_id: ^[a-z0-9_]{1,24}$.
func ValidCapID(s string) bool { return isWord(s, 24, '_') }
