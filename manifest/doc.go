// Package manifest is the vocabulary of agentctl: node ids, kinds, verbs, safety classes,
// scopes, capabilities, tool names, error codes and the schema registry.
//
// A device announces []Capability; Project derives the tools that a relay offers:
//
//	capability  {"cap_id":"metrics","kind":"system.metrics","verbs":["snapshot",…],…}
//	tool        sys.NODE_ID.metrics.snapshot
//
// Validate checks a JSON value against a registered schema by its reference; CheckArgs,
// CheckResult and CheckFrame do so for calls. Both ends of the link and every endpoint of
// the relay use these definitions, so that they cannot drift apart.
package manifest
