//go:build linux

package control

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/prober"
)

var (
	snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	uuid4     = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
)

func TestHello(t *testing.T) {
	const good = `{"app_version":"1.0.0","protocol_version":1,"token":"x"}`
	tests := []struct {
		name, params string
		code         int
		field        any
	}{
		{"good", good, 0, nil},
		{"capabilities", `{"app_version":"1.0.0","protocol_version":1,"token":"x","capabilities":["metrics_stream","burst_mode","history_query"]}`, 0, nil},
		{"no capabilities", `{"app_version":"1.0.0","protocol_version":1,"token":"x","capabilities":null}`, 0, nil},
		{"version as 1.0", `{"app_version":"1.0.0","protocol_version":1.0,"token":"x"}`, 0, nil},
		{"no params", ``, CodeInvalidParams, "app_version"},
		{"no app_version", `{"protocol_version":1,"token":"x"}`, CodeInvalidParams, "app_version"},
		{"app_version is a number", `{"app_version":1,"protocol_version":1,"token":"x"}`, CodeInvalidParams, "app_version"},
		{"long app_version", `{"app_version":"` + strings.Repeat("1", 257) + `","protocol_version":1,"token":"x"}`, CodeInvalidParams, "app_version"},
		{"no version", `{"app_version":"1","token":"x"}`, CodeInvalidParams, "protocol_version"},
		{"version is a string", `{"app_version":"1","protocol_version":"1","token":"x"}`, CodeInvalidParams, "protocol_version"},
		{"version 1.5", `{"app_version":"1","protocol_version":1.5,"token":"x"}`, CodeInvalidParams, "protocol_version"},
		{"version 2", `{"app_version":"1","protocol_version":2,"token":"x"}`, CodeNotSupported, "protocol_version"},
		{"version 2 with what it brings", `{"protocol_version":2,"auth":{}}`, CodeNotSupported, "protocol_version"},
		{"no token", `{"app_version":"1","protocol_version":1}`, CodeUnauthorized, nil},
		{"empty token", `{"app_version":"1","protocol_version":1,"token":""}`, CodeUnauthorized, nil},
		{"token is a number", `{"app_version":"1","protocol_version":1,"token":5}`, CodeInvalidParams, "token"},
		{"long token", `{"app_version":"1","protocol_version":1,"token":"` + strings.Repeat("t", 4097) + `"}`, CodeInvalidParams, "token"},
		{"unknown capability", `{"app_version":"1","protocol_version":1,"token":"x","capabilities":["telepathy"]}`, CodeNotSupported, "capabilities"},
		{"capabilities is a string", `{"app_version":"1","protocol_version":1,"token":"x","capabilities":"burst_mode"}`, CodeInvalidParams, "capabilities"},
		{"unknown key", `{"app_version":"1","protocol_version":1,"token":"x","user":"me"}`, CodeInvalidParams, "user"},
		{"key in other case", `{"app_version":"1","protocol_version":1,"Token":"x"}`, CodeUnauthorized, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, Options{Version: "9.9"}, func(t *testing.T, r *rig) {
				p := r.peer()
				m := p.call("hello", tt.params)
				if m.code() != tt.code || m.field() != tt.field {
					t.Fatalf("got %v, want code %d and field %v", m, tt.code, tt.field)
				}
				if tt.code != 0 {
					if m := p.call("snapshot", ""); m.code() != CodeUnauthorized {
						t.Errorf("after a bad hello snapshot gives %v", m)
					}
					p.ok("hello", good) // the connection is as good as before
					return
				}
				res := m.result()
				if id := fmt.Sprint(res["session_id"]); !uuid4.MatchString(id) {
					t.Errorf("session_id %q is not a UUID v4", id)
				}
				delete(res, "session_id")
				want := map[string]any{"server_version": "9.9", "protocol_version": 1.0, "capabilities": []any{"metrics_stream", "burst_mode"}}
				if !reflect.DeepEqual(res, want) {
					t.Errorf("got %v, want %v", res, want)
				}
			})
		})
	}
}

func TestHelloFirst(t *testing.T) {
	inBubble(t, Options{Status: func(context.Context) any { return 1 }}, func(t *testing.T, r *rig) {
		p := r.peer()
		for _, method := range []string{"snapshot", "status", "start", "stop", "set_config", "burst_subscribe", "subscribe_metrics", "query_history", "get_config", "capabilities", "call", "nope", "rpc.serverInfo"} {
			if m := p.call(method, ""); m.code() != CodeUnauthorized {
				t.Errorf("%s before hello gives %v", method, m)
			}
		}
		if !r.srv.Sampling().Running {
			t.Error("stop worked before hello")
		}
		p.hello("")
		for _, method := range []string{"nope", "rpc.serverInfo", "set_log_level", "update_check", "Snapshot", "ping"} {
			if m := p.call(method, ""); m.code() != CodeMethodNotFound {
				t.Errorf("%s gives %v", method, m)
			}
		}
		first := p.ok("hello", `{"app_version":"t","protocol_version":1,"token":"t"}`)["session_id"]
		if again := p.ok("hello", `{"app_version":"t","protocol_version":1,"token":"t"}`)["session_id"]; again != first {
			t.Errorf("a second hello changes the session from %v to %v", first, again)
		}
	})
}

func TestConfiguredToken(t *testing.T) {
	inBubble(t, Options{Token: "s3cret"}, func(t *testing.T, r *rig) {
		p := r.peer()
		if m := p.call("hello", `{"app_version":"t","protocol_version":1,"token":"t"}`); m.code() != CodeUnauthorized {
			t.Errorf("a wrong token gives %v", m)
		}
		p.ok("hello", `{"app_version":"t","protocol_version":1,"token":"s3cret"}`)
	})
}

func TestSnapshot(t *testing.T) {
	cpu := map[string]any{"usage_percent": 12.5}
	memory := map[string]any{"total": 16000.0, "used": 2048.0} // both rounded down
	disk := map[string]any{"usage_percent": 40.25}
	load := map[string]any{"load_1m": 0.5, "load_5m": 0.25, "load_15m": 0.1}
	tests := []struct {
		params string
		want   map[string]any
	}{
		{``, map[string]any{"cpu": cpu, "memory": memory}},
		{`{}`, map[string]any{"cpu": cpu, "memory": memory}},
		{`{"modules":null}`, map[string]any{"cpu": cpu, "memory": memory}},
		{`{"modules":[]}`, map[string]any{"cpu": cpu, "memory": memory}},
		{`{"modules":["memory"]}`, map[string]any{"memory": memory}},
		{`{"modules":["mem","memory","mem"]}`, map[string]any{"memory": memory}},
		{`{"modules":["load","disk","cpu"]}`, map[string]any{"cpu": cpu, "disk": disk, "load": load}},
	}
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		for _, tt := range tests {
			got := p.ok("snapshot", tt.params)
			if ts := int64(got["ts"].(float64)); ts != time.Now().UnixMilli() {
				t.Errorf("snapshot %s: ts %d, want %d", tt.params, ts, time.Now().UnixMilli())
			}
			delete(got, "ts")
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("snapshot %s: got %v, want %v", tt.params, got, tt.want)
			}
		}
		time.Sleep(5 * time.Second)
		r.source.setFail(prober.ErrDisk) // a dead mount stops only itself
		time.Sleep(5 * time.Second)
		if got := p.ok("snapshot", `{"modules":["cpu","disk"]}`); got["disk"] != nil || !reflect.DeepEqual(got["cpu"], cpu) {
			t.Errorf("without its disk the machine says %v, want cpu alone", got)
		}
		r.source.setFail(errors.New("proc is gone"))
		time.Sleep(5 * time.Second)
		if m := p.call("snapshot", ""); m.code() != CodeInternal || !strings.Contains(fmt.Sprint(m), "proc is gone") {
			t.Errorf("a machine that says nothing gives %v", m)
		}
	})
}

// TestParamsAllowed: an empty array is no params, modules have several names, and each interval may
// be set to its default.
func TestParamsAllowed(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		for _, params := range []string{`[]`, `[ ]`, `null`} {
			p.ok("stop", params)
		}
		for params, want := range map[string]string{
			`{"module_intervals":{"wear":3600000}}`:           "map[wear:3.6e+06]",
			`{"module_intervals":{"net":1000,"memory":2000}}`: "map[mem:2000 network:1000]",
		} {
			if got := fmt.Sprint(p.ok("set_config", params)["effective_intervals"]); got != want {
				t.Errorf("%s gives %s, want %s", params, got, want)
			}
		}
		if got := fmt.Sprint(p.ok("start", `{"modules":["net"]}`)["started_modules"]); got != "[network]" {
			t.Errorf("started are %s, want network", got)
		}
		for method, params := range map[string]string{"set_config": `{"base_interval_ms":1e300}`, "query_history": `{"from_ts":9007199254740994,"to_ts":0}`,
			"burst_subscribe": `{"interval_ms":100,"ttl_ms":1e17}`} {
			if m := p.call(method, params); m.code() != CodeInvalidParams || !strings.Contains(fmt.Sprint(m), "too large") {
				t.Errorf("%s %s gives %v, want that it is too large", method, params, m)
			}
		}
	})
}

func TestBadParams(t *testing.T) {
	tests := []struct{ method, params, field string }{
		{"snapshot", `{"modules":["gpu"]}`, "modules"},
		{"snapshot", `{"modules":"cpu"}`, "modules"},
		{"snapshot", `{"modules":[1]}`, "modules"},
		{"snapshot", `{"modules":["cpu"],"all":true}`, "all"},
		{"snapshot", `{"modules":[` + strings.Repeat(`"cpu",`, 64) + `"cpu"]}`, "modules"},
		{"status", `{"x":1}`, "x"},
		{"start", `{"modules":["cpu",""]}`, "modules"},
		{"start", `{"module":["cpu"]}`, "module"},
		{"stop", `{"modules":[]}`, "modules"},
		{"set_config", `{"base_interval_ms":99}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":60001}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":0}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":-1000}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":"1000"}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":1000.5}`, "base_interval_ms"},
		{"set_config", `{"base_interval_ms":1e18}`, "base_interval_ms"},
		{"set_config", `{"module_intervals":{"cpu":99}}`, "module_intervals"},
		{"set_config", `{"module_intervals":{"gpu":1000}}`, "module_intervals"},
		{"set_config", `{"module_intervals":{"mem":1000,"memory":1000}}`, "module_intervals"},
		{"set_config", `{"module_intervals":[1000]}`, "module_intervals"},
		{"set_config", `{"base_interval_ms":2000,"module_intervals":{"cpu":1}}`, "module_intervals"},
		{"set_config", `{"base_interval_ms":2000,"persist":1}`, "persist"},
		{"set_config", `{"base_interval_ms":2000,"interval":1}`, "interval"},
		{"burst_subscribe", ``, "interval_ms"},
		{"burst_subscribe", `{"interval_ms":1000}`, "ttl_ms"},
		{"burst_subscribe", `{"ttl_ms":1000}`, "interval_ms"},
		{"burst_subscribe", `{"interval_ms":99,"ttl_ms":1000}`, "interval_ms"},
		{"burst_subscribe", `{"interval_ms":100,"ttl_ms":600001}`, "ttl_ms"},
		{"burst_subscribe", `{"interval_ms":100,"ttl_ms":0}`, "ttl_ms"},
		{"burst_subscribe", `{"interval_ms":100,"ttl_ms":1000,"modules":"cpu"}`, "modules"},
		{"subscribe_metrics", ``, "enable"},
		{"subscribe_metrics", `{"enable":1}`, "enable"},
		{"subscribe_metrics", `{"enable":null}`, "enable"},
		{"query_history", `{"to_ts":0}`, "from_ts"},
		{"query_history", `{"from_ts":0}`, "to_ts"},
		{"query_history", `{"from_ts":-1,"to_ts":0}`, "from_ts"},
		{"query_history", `{"from_ts":2,"to_ts":1}`, "to_ts"},
		{"query_history", `{"from_ts":0,"to_ts":0,"step_ms":-1}`, "step_ms"},
		{"query_history", `{"from_ts":0,"to_ts":0,"step_ms":0.5}`, "step_ms"},
		{"query_history", `{"from_ts":0,"to_ts":0,"limit":-1}`, "limit"},
		{"query_history", `{"from_ts":0,"to_ts":0,"modules":["gpu"]}`, "modules"},
		{"query_history", `{"from_ts":0,"to_ts":0,"order":"desc"}`, "order"},
		{"get_config", `{"x":1}`, "x"},
		{"capabilities", `{"x":1}`, "x"},
		{"call", `{}`, "tool"},
		{"call", `{"tool":""}`, "tool"},
		{"call", `{"tool":"x","arguments":[]}`, "arguments"},
		{"call", `{"tool":"x","commit_token":"x"}`, "commit_token"},
	}
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		before := r.srv.Sampling()
		for _, tt := range tests {
			if m := p.call(tt.method, tt.params); m.code() != CodeInvalidParams || m.field() != tt.field {
				t.Errorf("%s %s: got %v, want field %s", tt.method, tt.params, m, tt.field)
			}
		}
		if after := r.srv.Sampling(); !reflect.DeepEqual(before, after) {
			t.Errorf("refused requests changed %v to %v", before, after)
		}
		for method, params := range map[string]string{"status": ``, "get_config": ``, "capabilities": ``, "call": `{"tool":"x"}`} {
			if m := p.call(method, params); m.code() != CodeNotSupported {
				t.Errorf("%s gives %v", method, m)
			}
		}
	})
}

func TestStatus(t *testing.T) {
	type status struct {
		NodeID  string `json:"node_id"`
		UptimeS int    `json:"uptime_s"`
	}
	inBubble(t, Options{Status: func(ctx context.Context) any {
		if _, ok := ctx.Deadline(); !ok {
			t.Error("status has no deadline")
		}
		return status{"n", 5}
	}}, func(t *testing.T, r *rig) {
		got := r.peer().hello("").ok("status", "{}")
		if want := map[string]any{"node_id": "n", "uptime_s": 5.0}; !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
	for name, f := range map[string]func(context.Context) any{
		"panic":      func(context.Context) any { panic("a bug") },
		"unsayable":  func(context.Context) any { return func() {} },
		"nil result": func(context.Context) any { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Options{Status: f}, func(t *testing.T, r *rig) {
				p := r.peer().hello("")
				m := p.call("status", "")
				if name == "nil result" {
					if _, ok := m["result"]; !ok {
						t.Errorf("got %v", m)
					}
				} else if m.code() != CodeInternal {
					t.Errorf("got %v", m)
				}
				p.ok("snapshot", "")
			})
		})
	}
}

// TestOrder sends many requests in one write: they are handled in their order, the
// connection's hello first.
func TestOrder(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer()
		var all strings.Builder
		all.WriteString(string(frame([]byte(`{"jsonrpc":"2.0","id":0,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t"}}`))))
		for i := 1; i < 200; i += 2 {
			fmt.Fprintf(&all, "%s%s", frame(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,"method":"start","params":{"modules":["load"]}}`, i)),
				frame(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,"method":"stop"}`, i+1)))
		}
		go p.raw(all.String())
		synctest.Wait()
		got := p.take("")
		if len(got) != 201 {
			t.Fatalf("got %d answers, want 201", len(got))
		}
		for i, m := range got {
			if m["id"] != float64(i) || m["error"] != nil {
				t.Fatalf("answer %d is %v", i, m)
			}
		}
		if s := r.srv.Sampling(); s.Running {
			t.Errorf("after the last stop it is %v", s)
		}
	})
}

func TestNotificationsGetNoAnswer(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		for _, body := range []string{
			`{"jsonrpc":"2.0","method":"nope"}`,
			`{"jsonrpc":"2.0","method":"$/cancelRequest","params":{"id":1}}`,
			`{"jsonrpc":"2.0","method":"snapshot","params":{"modules":["gpu"]}}`,
			`{"jsonrpc":"2.0","method":"snapshot","params":[]}`,
			`{"jsonrpc":"2.0","id":9,"result":null}`,
			`{"jsonrpc":"2.0","method":"stop"}`,
		} {
			if err := p.send(body); err != nil {
				t.Fatal(err)
			}
		}
		p.ok("snapshot", "")
		if got := p.take(""); len(got) != 0 {
			t.Errorf("got %v", got)
		}
		if r.srv.Sampling().Running {
			t.Error("stop as a notification did nothing")
		}
	})
}

// TestGarbageKeepsConnection checks that an invalid message is answered with an error and the
// connection stays usable.
func TestGarbageKeepsConnection(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		garbage := []string{``, `}`, `[`, `nul`, `{"jsonrpc":"2.0","id":1,"method":"stop"`, "\x00\x01", `[{}]`, `{"id":{}}`}
		for _, body := range garbage {
			if err := p.send(body); err != nil {
				t.Fatal(err)
			}
		}
		p.ok("snapshot", "")
		got := p.take("")
		if len(got) != len(garbage) {
			t.Fatalf("got %d answers, want %d: %v", len(got), len(garbage), got)
		}
		for i, m := range got {
			id, has := m["id"]
			if c := m.code(); (c != CodeParse && c != CodeInvalidRequest) || id != nil || !has {
				t.Errorf("%q gives %v", garbage[i], m)
			}
		}
	})
}
