//go:build linux

package control

import (
	"context"
	"testing"
)

// FuzzSession sends any message between two valid requests. The second one must be answered,
// and every answer must have the form of the contract.
func FuzzSession(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t","capabilities":["metrics_stream"]}}`,
		`{"jsonrpc":"2.0","id":1,"method":"set_config","params":{"base_interval_ms":100,"module_intervals":{"cpu":300,"memory":1e3},"persist":true}}`,
		`{"jsonrpc":"2.0","id":1,"method":"burst_subscribe","params":{"modules":["net"],"interval_ms":100,"ttl_ms":1000}}`,
		`{"jsonrpc":"2.0","method":"start","params":{"modules":["load"]}}`,
		`{"jsonrpc":"2.0","id":1,"method":"subscribe_metrics","params":{"enable":false}}`,
		`{"jsonrpc":"2.0","id":"q1","method":"snapshot","params":{"modules":["mem"]}}`,
		`{"jsonrpc":"2.0","id":1,"method":"status","params":null}`, `{"jsonrpc":"2.0","id":1,"method":"stop"}`, `[]`, `x`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) > MaxMessage {
			return
		}
		o := Options{Status: func(context.Context) any { return nil }}
		inBubble(t, o, func(t *testing.T, r *rig) {
			p := r.peer().hello("")
			if err := p.raw(string(frame(body))); err != nil {
				t.Fatal(err)
			}
			p.ok("snapshot", "")
			if s := r.srv.Sampling(); s.IntervalMS < 100 || s.IntervalMS > 60000 || len(s.Modules) == 0 {
				t.Errorf("%q leaves the sampling at %+v", body, s)
			}
		})
	})
}
