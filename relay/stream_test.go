package relay

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// streamPlugin has a tool that answers with a stream, and keeps the request of the last call.
type streamPlugin struct{ last *kernel.Request }

func (p *streamPlugin) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "streams", Version: "1.0.0", Inline: true, Tools: []*kernel.Tool{{Name: "streams.open", ToolInfo: &kernel.ToolInfo{
		Description: "Opens a stream.", InputSchema: []byte(`{"type":"object"}`), Scope: manifest.ScopeCallReadOnly, Streams: true, SafetyClass: manifest.ReadOnly,
		CheckArguments: func(args []byte) ([]byte, error) { return args, nil }}}}}
}

func (p *streamPlugin) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	p.last = r
	return &kernel.Result{Stream: silentStream{}}, nil
}

// silentStream is a stream without frames.
type silentStream struct{}

func (silentStream) Notify(func())                 {}
func (silentStream) Next() (*manifest.Frame, bool) { return nil, false }
func (silentStream) Err() error                    { return nil }
func (silentStream) Close()                        {}

// A stream that the kernel has opened has an audit record of its end, also if its client gets an error.
func TestRefusedStreamIsAudited(t *testing.T) {
	t.Parallel()
	var records []kernel.Record
	k := kernel.New(kernel.Options{Audit: func(rec kernel.Record) { records = append(records, rec) }})
	p := &streamPlugin{}
	if err := k.Load(p, false); err != nil {
		t.Fatal(err)
	}
	address := netip.MustParseAddr("192.0.2.7")
	r := &Relay{kernel: k, metrics: newCounters(), streamEngine: sse.NewEngine(), streamPool: edge.NewPool(4)}
	if err := r.streams.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, reason string
		status       int
		hold         int64 // units of the pool
	}{
		{"the relay drains", "stopping", http.StatusServiceUnavailable, 0},
		{"the pool is used up", "share", http.StatusTooManyRequests, 2},
	} {
		kr := &kernel.Request{Caller: &kernel.Caller{Tenant: "default", Actor: "ci", Address: address, Transport: "http", Scopes: anonymousScopes},
			Tool: "streams.open", Arguments: []byte("{}"), Stream: true, TraceID: manifest.NewTraceID()}
		res, err := k.Call(t.Context(), kr)
		if err != nil {
			t.Fatal(err)
		}
		if tt.hold > 0 && !r.streamPool.TryAcquire(identityOf(kr.Caller), tt.hold) {
			t.Fatal("the pool is smaller than expected")
		}
		w := httptest.NewRecorder()
		records = nil
		r.openStream(w, httptest.NewRequest(http.MethodPost, "/mcp/tools/call", nil), p.last, res.Stream)
		if w.Code != tt.status {
			t.Errorf("%s: status %d, want %d", tt.name, w.Code, tt.status)
		}
		if len(records) != 1 || records[0].Decision != kernel.Closed || records[0].Reason != tt.reason || records[0].Address != address || records[0].TraceID != kr.TraceID {
			t.Errorf("%s: audit records %+v, want one of the end with reason %s", tt.name, records, tt.reason)
		}
	}
}
