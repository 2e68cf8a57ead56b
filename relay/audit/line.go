package audit

import (
	"encoding/json"
	"strconv"
	"time"
)

// maxField bounds a member in bytes; more is cut. The longest that the product makes itself is a
// tool name of 128.
const maxField = 256

// appendLine appends the line of a record. An IPv4 address that came as IPv6 is written as IPv4; a zone,
// which means something on this machine only, is left out.
func appendLine(b []byte, e *entry) []byte {
	r := &e.record
	b = append(b, `{"ts":"`...)
	b = appendTime(b, e.unixNano)
	b = append(b, '"')
	b = appendField(b, "tenant", r.Tenant)
	b = appendField(b, "actor", r.Actor)
	b = appendField(b, "via", r.Via)
	if r.Address.IsValid() {
		b = append(b, `,"address":"`...)
		b = r.Address.Unmap().WithZone("").AppendTo(b)
		b = append(b, '"')
	}
	b = appendField(b, "tool", r.Tool)
	b = appendField(b, "node_id", r.NodeID)
	b = appendField(b, "target", r.Target)
	b = appendField(b, "decision", string(r.Decision))
	b = appendField(b, "code", string(r.Code))
	b = appendField(b, "reason", r.Reason)
	b = appendField(b, "trace_id", r.TraceID)
	return append(b, "}\n"...)
}

func appendTime(b []byte, unixNano int64) []byte {
	return time.Unix(0, unixNano).UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z")
}

// appendField appends a JSON member, or nothing for an empty value.
func appendField(b []byte, key, value string) []byte {
	if value == "" {
		return b
	}
	b = append(b, `,"`...)
	b = append(b, key...)
	b = append(b, `":`...)
	return appendString(b, value)
}

// appendString appends a JSON string. One of printable ASCII, as nearly all are, is copied without
// encoding/json, which would allocate. If the cut divides a character, json.Marshal writes U+FFFD for
// its rest.
func appendString(b []byte, value string) []byte {
	value = value[:min(len(value), maxField)]
	for i := 0; i < len(value); i++ {
		if c := value[i]; c < 0x20 || c > 0x7e || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(value) // a string cannot fail
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), value...), '"')
}

func appendCount(b []byte, n uint64) []byte { return strconv.AppendUint(b, n, 10) }
