package audit

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// Bounds of the table of refusals: addresses in one minute, and different reasons of one of them.
// What is beyond is counted under "others" and "other", so that a flood from any number of addresses
// writes at most 513 lines a minute.
const (
	maxRefusalAddresses = 512
	maxRefusalReasons   = 8
)

// refusals counts refused requests without a valid identity by address, until the writer takes
// them, once a minute. While the disk hangs, the same table goes on counting, so that it stays
// bounded and loses nothing.
type refusals struct {
	total atomic.Uint64

	mu        sync.Mutex // protects the fields below; a leaf
	byAddress map[netip.Prefix]*refusal
	others    *refusal
}

// refusal is what one address, or all others, did. An IPv6 address counts with its /64 (edge.AddressKey),
// since one machine can use all addresses of it.
type refusal struct {
	first, last int64 // Unix nanoseconds
	count       uint64
	reasons     []reasonCount
	traceID     string // of the first
}

type reasonCount struct {
	tool, reason string
	count        uint64
}

// reset empties the table. mu is held, or the table is not shared yet.
func (t *refusals) reset() { t.byAddress, t.others = make(map[netip.Prefix]*refusal), nil }

// add counts a refusal.
func (t *refusals) add(r *kernel.Record) {
	t.total.Add(1)
	now, key := time.Now().UnixNano(), edge.AddressKey(r.Address)
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.byAddress[key]
	switch {
	case f != nil:
	case len(t.byAddress) < maxRefusalAddresses:
		f = &refusal{first: now, traceID: r.TraceID}
		t.byAddress[key] = f
	default:
		if t.others == nil {
			t.others = &refusal{first: now, traceID: r.TraceID}
		}
		f = t.others
	}
	f.last = now
	f.count++
	f.countReason(r.Tool, r.Reason)
}

// countReason counts one more of a reason. Once the table is full, further reasons are counted in its
// last entry, which becomes "other".
func (f *refusal) countReason(tool, reason string) {
	for i := range f.reasons {
		if c := &f.reasons[i]; c.tool == tool && c.reason == reason {
			c.count++
			return
		}
	}
	if len(f.reasons) >= maxRefusalReasons {
		last := &f.reasons[len(f.reasons)-1]
		last.tool, last.reason = "", "other"
		last.count++
		return
	}
	f.reasons = append(f.reasons, reasonCount{tool, reason, 1})
}

// take empties the table and returns its lines; none while the lines of before are not written
// (isIdle).
func (t *refusals) take(isIdle bool) []byte {
	t.mu.Lock()
	if !isIdle || len(t.byAddress) == 0 {
		t.mu.Unlock()
		return nil
	}
	byAddress, others := t.byAddress, t.others
	t.reset()
	t.mu.Unlock()
	b := make([]byte, 0, 200*(len(byAddress)+1))
	for key, f := range byAddress {
		name := "unknown"
		if key.IsSingleIP() {
			name = key.Addr().String()
		} else if key.IsValid() {
			name = key.String()
		}
		b = f.appendLine(b, name)
	}
	if others != nil {
		b = others.appendLine(b, "others")
	}
	return b
}

func (f *refusal) appendLine(b []byte, address string) []byte {
	b = append(b, `{"ts":"`...)
	b = appendTime(b, f.first)
	b = append(b, `","until":"`...)
	b = appendTime(b, f.last)
	b = append(b, '"')
	b = appendField(b, "address", address)
	b = append(b, `,"count":`...)
	b = appendCount(b, f.count)
	b = append(b, `,"reasons":{`...)
	for i, c := range f.reasons {
		if i > 0 {
			b = append(b, ',')
		}
		name := c.reason
		if c.tool != "" {
			name = c.tool + " " + c.reason
		}
		if name == "" {
			name = "other"
		}
		b = append(appendString(b, name), ':')
		b = appendCount(b, c.count)
	}
	b = append(b, '}')
	b = appendField(b, "trace_id", f.traceID)
	return append(b, "}\n"...)
}
