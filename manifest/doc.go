// Package manifest is the vocabulary of agentctl: node ids, kinds, verbs, safety
// classes, scopes, capabilities, tool names, error codes and the schema registry.
//
// It is words only. A device announces []Capability; Project turns one capability
// into the tools that a relay offers; Validate checks a JSON value against a
// registered schema by its reference. Both ends of the link and every door of the
// relay use the same words, so they cannot drift apart.
package manifest
