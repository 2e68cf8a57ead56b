package relay

import (
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
	"agentctl/transport/fanout"
	"agentctl/transport/sse"
)

// A metric stream of a client, from the result of the kernel to its end:
//
//	openStream ── no unit of the pool, or draining ──> error envelope
//	           ├─ over a quota that is enforced ─────> 200, and at once the close event 4429
//	           └─> a shard of streamEngine ── source or client ends, token revoked, reader stalls ──> OnEnd
//
// A stream holds a unit of streamPool, a count of its tenant and its source; OnEnd releases them. The
// sources of many clients may share one stream of a board (hub.Node.Subscribe).

// encodeFrame returns the SSE event of a metric frame (RFC-0009 §5.1), nil if it cannot be
// one; CheckFrame has refused line breaks before.
func encodeFrame(sample []byte) []byte {
	b, err := sse.AppendEvent(make([]byte, 0, len(sample)+24), "metric", sample)
	if err != nil {
		return nil
	}
	return b
}

// metricStream is an open stream of a client.
type metricStream struct {
	sse.Stream
	relay  *Relay
	source kernel.Stream
	caller *kernel.Caller
	closed kernel.Record // the audit record of its end, without the reason
}

// openStream hands a stream over to a shard. From its first byte on the client learns the
// reason of an end from the stream, not from an HTTP status (RFC-0009 §3). The kernel has audited that
// the stream was opened, so each way out of here has an audit record of its end.
func (r *Relay) openStream(w http.ResponseWriter, req *http.Request, kr *kernel.Request, source kernel.Stream) {
	m := &metricStream{relay: r, source: source, caller: kr.Caller, closed: kernel.Record{Tenant: kr.Caller.Tenant, Actor: kr.Caller.Actor, Address: kr.Caller.Address,
		Tool: kr.Tool, NodeID: kr.Target().NodeID, Decision: kernel.Closed, TraceID: kr.TraceID}}
	if !r.streamPool.TryAcquire(identityOf(kr.Caller), 1) {
		source.Close()
		e := edge.Exhausted("too many metric streams of this identity are open; close some", time.Second)
		m.closed.Code, m.closed.Reason = e.Code, e.Reason
		r.kernel.Audit(m.closed)
		r.writeError(w, http.StatusTooManyRequests, e, kr.TraceID)
		return
	}
	overQuota := r.tenantStreams.add(kr.Caller.Tenant, int(r.endpoints.streamQuota.Load()))
	var err error
	if m.Writer, err = r.streams.Open(w, req, sse.Options{}); err != nil {
		m.release()
		m.closed.Reason = "close=0" // the connection broke: there was no close event
		if errors.Is(err, sse.ErrDraining) {
			e := &manifest.Error{Code: manifest.NodeOffline, Message: "the relay is stopping; connect again", RetryAfterMS: 1000, Reason: "stopping", Outcome: manifest.NotSent}
			m.closed.Code, m.closed.Reason = e.Code, e.Reason
			r.writeError(w, edge.Status(e.Code), e, kr.TraceID)
		}
		r.kernel.Audit(m.closed)
		return
	}
	m.Handler, m.Active = m, kr.Caller.Active
	if overQuota {
		r.metrics.overQuota.Add(1)
		if r.endpoints.enforceQuota.Load() {
			m.OnEnd(errOverQuota)
			return
		}
	}
	if err := r.streamEngine.Next().Add(&m.Stream); err != nil {
		m.OnEnd(err)
		return
	}
	// After Add: Notify wakes the shard for frames that are queued already, and a stream without a
	// shard cannot be woken.
	source.Notify(m.Wake)
}

// OnReady implements sse.Handler: it writes the frames that are queued.
func (m *metricStream) OnReady(uint64) error {
	for f, ok := m.source.Next(); ok; f, ok = m.source.Next() {
		if _, err := m.Send(f.Event, 1); err != nil {
			return err
		}
	}
	return m.source.Err()
}

// OnEnd implements sse.Handler. It runs in the shard's goroutine, or in that of the request if the
// stream has no shard.
func (m *metricStream) OnEnd(err error) {
	code := closeCode(err)
	_ = m.Close(code)
	m.closed.Reason = "close=" + strconv.Itoa(int(code))
	m.relay.kernel.Audit(m.closed)
	m.release()
}

// release gives back what the stream holds besides its connection.
func (m *metricStream) release() {
	m.source.Close()
	m.relay.tenantStreams.remove(m.caller.Tenant)
	m.relay.streamPool.Release(identityOf(m.caller), 1)
}

var errOverQuota = errors.New("relay: the tenant has as many streams as it may have")

// closeCode maps the end of a stream to a close code of RFC-0009 §7. An overflow comes from
// the fan-out before the client, which the client sees as its own back-pressure.
func closeCode(err error) sse.Code {
	switch {
	case errors.Is(err, hub.ErrOffline):
		return sse.DeviceOffline
	case errors.Is(err, fanout.ErrOverflow): // the client took nothing for a whole queue
		return sse.Backpressure
	case errors.Is(err, errOverQuota):
		return sse.RateLimited
	}
	return sse.CodeOf(err)
}

// maxStreams bounds the metric streams of all clients, an edge.Pool.
const maxStreams = 16384

// tenantStreams counts the open streams of each tenant. The quota is per tenant rather than per
// token, since a tenant may have any number of tokens.
type tenantStreams struct {
	mu   sync.Mutex     // protects open; a leaf
	open map[string]int // by tenant
}

// add counts a stream; overQuota reports that the tenant has more than quota (0: no quota).
func (t *tenantStreams) add(tenant string, quota int) (overQuota bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = make(map[string]int)
	}
	t.open[tenant]++
	return quota > 0 && t.open[tenant] > quota
}

// remove undoes add.
func (t *tenantStreams) remove(tenant string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open[tenant]--; t.open[tenant] == 0 {
		delete(t.open, tenant)
	}
}
