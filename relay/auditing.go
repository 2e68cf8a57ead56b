package relay

import (
	"context"
	"encoding/json"
	"net/http"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/audit"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// What the relay writes into the audit log:
//
//	recordDecision   each call, read and stream, from the kernel and the endpoints
//	auditDevice      device links (device_link.go)
//	exchange         joining (join.go)
//	beginChange      an administrative change, on the disk before it is made
//	endChange        its outcome
//
// Only the last two wait for the disk.

// recordDecision receives the kernel's audit records: one for each call, read and opened
// stream, and one for each closed stream. It runs in the caller's goroutine on every call,
// so none of the three waits for a client that reads slowly, or for the disk.
func (r *Relay) recordDecision(rec kernel.Record) {
	r.audit.Write(&rec)
	r.metrics.countDecision(&rec)
	r.publishRefusal(&rec)
}

// beginChange records an administrative change before it is made, and returns once the record is
// on the disk. After an error the change must not be made; the error is for the caller. So an
// attacker who fills the disk changes nothing without a trace. The outcome of the change is
// another record with the same trace id.
func (r *Relay) beginChange(ctx context.Context, rec kernel.Record) error {
	rec.Decision = kernel.Begun
	rec.Target = r.logFilter.Clean(rec.Target) // text of an administrator's choice
	return r.audit.Commit(ctx, &rec)
}

// endChange records the outcome of a change that was begun. The change is made whatever the disk
// says, so that an error is logged only; the caller waits for 2 s at most.
func (r *Relay) endChange(ctx context.Context, rec *kernel.Record) {
	if err := r.audit.Commit(context.WithoutCancel(ctx), rec); err != nil {
		r.log.Error("the outcome of a change is not in the audit log", zap.String("change", rec.Tool), zap.String("trace_id", rec.TraceID), zap.Error(err))
	}
}

// eventAuditLost is appended when records were lost, at most once a minute.
const eventAuditLost = "kernel.audit"

// onAuditLost is called by the audit log when records were lost.
func (r *Relay) onAuditLost(lost []audit.Loss) {
	n := uint64(0)
	for _, l := range lost {
		n += l.Lines
	}
	r.log.Warn("audit lines were lost", zap.Uint64("lines", n), zap.Any("by", lost))
	payload, err := json.Marshal(struct {
		Action string       `json:"action"`
		Lines  uint64       `json:"lines"`
		By     []audit.Loss `json:"by"`
	}{"lost", n, lost})
	if err == nil {
		r.queue.Offer(kernel.Event{Type: eventAuditLost, Aggregate: audit.FileName, Payload: payload})
	}
}

// clientAddr is the address of a request's client, behind the trusted proxies.
func (r *Relay) clientAddr(req *http.Request) netip.Addr { return r.opt.TrustedProxies.ClientAddr(req) }

// Bounds of log lines about strangers: one for each address and minute. If the table is full
// addresses there is no line; refusals.jsonl and the metrics count what is left out.
const (
	strangerLines        = 1.0 / 60 // per second
	maxStrangerAddresses = 256
)

// mayLogStranger reports whether a log line about an address without an identity may be written.
func (r *Relay) mayLogStranger(a netip.Addr) bool {
	return r.strangers.Take(edge.AddressKey(a).String(), strangerLines, 1, time.Now()) == 0
}
