package eventlog

import (
	"encoding/hex"
	"strings"
)

// Class divides events by what they are for. Each class of a tenant has its own retention and
// its own chain of hashes.
type Class string

// The classes.
const (
	ClassState Class = "state" // everything that a replay rebuilds state from: all events but calls
	ClassCalls Class = "calls" // records of calls: type "call", and "call." with more
)

// callType is the type of events about calls.
const callType = "call"

// classOf returns the class of an event type.
func classOf(eventType string) Class {
	if rest, ok := strings.CutPrefix(eventType, callType); ok && (rest == "" || rest[0] == '.') {
		return ClassCalls
	}
	return ClassState
}

// classesOf reports which classes can have a type that matches one of the patterns (Query.Types).
// A query then reads the rows of these classes alone: it finds tickets without reading the calls,
// which are most of a log.
func classesOf(patterns []string) (state, calls bool) {
	for _, p := range patterns {
		prefix, isPrefix := strings.CutSuffix(p, "*")
		// "call*" selects both classes, since a type "callback" would be state; "call.*" selects calls.
		isBelowCalls := strings.HasPrefix(prefix, callType+".")
		if isPrefix {
			state = state || !isBelowCalls
			calls = calls || isBelowCalls || strings.HasPrefix(callType, prefix)
			continue
		}
		isCall := classOf(p) == ClassCalls
		state, calls = state || !isCall, calls || isCall
	}
	return state || len(patterns) == 0, calls || len(patterns) == 0
}

// callRow is the payload of a call as the table calls has it: kind + actor + trace in
// hexadecimal + rest. kind and actor are texts that many calls share:
//
//	kind   {"tool":"sys.….snapshot","node_id":"…","decision":"allow","code":"","actor":
//	actor  "ci","trace_id":"
//	trace  16 bytes, which are different in each call
//	rest   "}
//
// The four parts are joined as bytes and not parsed: the payload must come back byte for byte, or its
// hash does not fit.
type callRow struct {
	kind, actor string
	trace       [16]byte
	hasTrace    bool
	rest        string
}

const (
	actorKey = `"actor":`
	traceKey = `"trace_id":"`
	traceEnd = `"}`
	maxWord  = 512 // bytes of a shared text
)

// splitCall splits a payload at its actor and its trace id, which the kernel writes last. What
// has another form is kept as it is, in rest.
func splitCall(payload string) (r callRow) {
	const traceLen = 2 * len(r.trace)
	at := len(payload) - len(traceEnd) - traceLen
	if at < len(traceKey) || payload[at-len(traceKey):at] != traceKey || !strings.HasSuffix(payload, traceEnd) {
		return callRow{rest: payload}
	}
	digits := payload[at : at+traceLen]
	for i := range len(digits) { // capitals would come back as small letters
		if c := digits[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return callRow{rest: payload}
		}
	}
	_, _ = hex.Decode(r.trace[:], []byte(digits)) // does not allocate: the copy is small
	r.hasTrace, r.rest = true, traceEnd
	r.kind = payload[:at]
	// The split decides only how many rows share the words; the joined payload is the same.
	if i := strings.LastIndex(r.kind, actorKey); i >= 0 {
		i += len(actorKey)
		r.kind, r.actor = payload[:i], payload[i:at]
	}
	if len(r.kind) > maxWord || len(r.actor) > maxWord {
		return callRow{rest: payload}
	}
	return r
}
