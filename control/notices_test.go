//go:build linux

package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
)

// TestAlertsAreNotLost checks that neither metrics nor states displace an alert, and that
// alerts beyond maxNotices are dropped and counted.
func TestAlertsAreNotLost(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		plain := r.peer().hello("")
		nc := r.dial()
		defer nc.Close()
		nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t","capabilities":["metrics_stream"]}}`)))
		in := newFrameReader(nc, maxAnswer)
		read := func() (m msg) {
			n, err := in.header()
			if err != nil {
				t.Fatal(err)
			}
			body := make([]byte, n)
			if err := in.body(body); err != nil {
				t.Fatal(err)
			}
			json.Unmarshal(body, &m)
			return m
		}
		read() // the answer to hello; from now on this client does not read for 3 s
		synctest.Wait()
		r.srv.PublishAlert(Alert{Value: nan(), RuleID: "no number"}) // is logged and not sent
		for i := range maxNotices + 8 {
			r.srv.PublishAlert(Alert{Level: "warn", Metric: "cpu_pct", Value: float64(i), Threshold: 1, Message: "m", TS: 5})
			r.srv.publishState("start", "start", nil)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		var alerts []string
		states := 0
		for !slices.Contains(alerts, "31") || states < maxQueue/2 {
			switch m := read(); m["method"] {
			case EventAlert:
				alerts = append(alerts, fmt.Sprint(m.params()["value"]))
			case EventState:
				states++
			}
		}
		for i, v := range alerts {
			if v != fmt.Sprint(i) {
				t.Fatalf("alerts came as %v", alerts)
			}
		}
		if d := r.srv.Stats().Dropped; d < 8 {
			t.Errorf("%d events are counted as lost", d)
		}
		if got := plain.take(""); len(got) != 0 {
			t.Errorf("a connection without metrics_stream got %v", got)
		}
	})
}

func TestUpdateReady(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		announced := func(p *peer) (versions []string) {
			synctest.Wait()
			for _, m := range p.take(EventUpdateReady) {
				versions = append(versions, fmt.Sprint(m.params()["component"], " ", m.params()["version"]))
			}
			return versions
		}
		early, plain := r.peer().hello(bridge), r.peer().hello("")
		r.srv.PublishUpdateReady("agentctl", "1.1")
		r.srv.PublishUpdateReady("agentctl", "1.1")
		late := r.peer().hello(bridge)
		for name, p := range map[string]*peer{"early": early, "late": late} {
			if got := announced(p); fmt.Sprint(got) != "[agentctl 1.1]" {
				t.Errorf("the %s client got %q", name, got)
			}
		}
		late.hello(bridge) // again, on the same connection
		plain.hello(bridge)
		if got := announced(late); got != nil {
			t.Errorf("it was announced twice: %q", got)
		}
		if got := announced(plain); fmt.Sprint(got) != "[agentctl 1.1]" {
			t.Errorf("a client that subscribed later got %q", got)
		}
		r.srv.PublishUpdateReady("agentctl", "1.2")
		if got := announced(early); fmt.Sprint(got) != "[agentctl 1.2]" {
			t.Errorf("for the next version it got %q", got)
		}
		r.srv.PublishUpdateReady("agentctl", "")
		if got := append(announced(r.peer().hello(bridge)), announced(early)...); got != nil {
			t.Errorf("after the withdrawal it got %q", got)
		}
	})
}

func TestPing(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		plain := r.peer().hello("")
		p := r.peer().hello(bridge)
		p.ok("stop", "")
		time.Sleep(pingInterval - 1)
		synctest.Wait()
		if got := p.take(EventPing); len(got) != 0 {
			t.Errorf("too early: %v", got)
		}
		time.Sleep(2*pingInterval + 1)
		synctest.Wait()
		if got := p.take(EventPing); len(got) != 3 || fmt.Sprint(got[0]) != "map[jsonrpc:2.0 method:ping params:map[]]" {
			t.Errorf("in three times %v came %v", pingInterval, got)
		}
		if got := plain.take(""); len(got) != 0 {
			t.Errorf("a connection without metrics_stream got %v", got)
		}
	})
}

// TestModulesBeyondTheFrame checks that start enables optional modules, that a reading is
// sent once, and that a client which connects later gets the present ones.
func TestModulesBeyondTheFrame(t *testing.T) {
	var asked []string
	var enable func([]string) error
	o := Options{
		EnableModules: func(names []string) error {
			asked = append(asked, fmt.Sprint(names))
			return enable(names)
		},
	}
	inBubble(t, o, func(t *testing.T, r *rig) {
		enable = r.prober.SetModules
		p := r.peer().hello(bridge)
		// The first sample is taken without the modules: it is due now, and would else be
		// taken before or after start.
		synctest.Wait()
		if got := fmt.Sprint(p.ok("start", `{"modules":["wear","cpu","temperature","power"]}`)["started_modules"]); got != "[cpu temperature power wear]" {
			t.Errorf("started are %s", got)
		}
		count := func(d time.Duration) map[string]int {
			n := map[string]int{}
			for _, m := range p.run(d) {
				for key := range m.params() {
					n[key]++
				}
			}
			return n
		}
		if n := count(20 * time.Second); n["cpu"] < 20 || n["temperature"] != 4 || n["wear"] != 1 || n["memory"] > 1 {
			t.Errorf("in 20 s came %v", n)
		}
		r.peer().hello(bridge) // a later client gets all modules as well
		if n := count(3 * time.Second); n["wear"] != 1 || n["temperature"] < 1 || n["memory"] != 3 {
			t.Errorf("after another client came %v", n)
		}
		p.ok("set_config", `{"module_intervals":{"temperature":1000}}`)
		if n := count(10 * time.Second); n["temperature"] < 9 {
			t.Errorf("with an interval of 1 s the temperature came %v", n)
		}
		for method, params := range map[string]string{"snapshot": ``, "query_history": `"from_ts":0,"to_ts":0,`} {
			b, _ := json.Marshal(p.ok(method, `{`+params+`"modules":["temperature","power","wear","network"]}`))
			for _, want := range []string{`"hottest_c":`, `"power":{"under_voltage":false}`, `"pre_eol":"normal"`} {
				if !strings.Contains(string(b), want) {
					t.Errorf("%s has no %s: %s", method, want, b)
				}
			}
			if strings.Contains(string(b), "network") {
				t.Errorf("%s has a network: %s", method, b)
			}
		}
		p.ok("stop", "")
		p.ok("start", "")
		want := "[[temperature power wear] []]"
		if got := fmt.Sprint(asked); got != want {
			t.Errorf("asked for %s, want %s", got, want)
		}
		enable = func([]string) error { return errors.New("too hot") }
		if m := p.call("start", `{"modules":["temperature"]}`); m.code() != CodeInternal || !strings.Contains(fmt.Sprint(m), "too hot") {
			t.Errorf("modules that cannot be had give %v", m)
		}
		if got := fmt.Sprint(r.srv.Sampling().Modules); got != "[cpu mem]" {
			t.Errorf("after a failed start %s are started", got)
		}
	})
}

func TestRecording(t *testing.T) {
	var calls []bool
	inBubble(t, Options{OnRecording: func(on bool) { calls = append(calls, on) }}, func(t *testing.T, r *rig) {
		p := r.peer().hello(bridge)
		for _, method := range []string{"start", "stop", "stop", "start", "stop"} {
			p.ok(method, "")
		}
		r.peer().hello(bridge)
		if want := []bool{false, true, false, true}; !slices.Equal(calls, want) {
			t.Errorf("OnRecording was called with %v, want %v", calls, want)
		}
	})
}

func TestConfigure(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello(bridge)
		cpuIn10s := func() (n int) {
			for _, m := range p.run(10 * time.Second) {
				if m.params()["cpu"] != nil {
					n++
				}
			}
			return n
		}
		for _, bad := range []Config{
			{BaseIntervalMS: 99}, {BaseIntervalMS: -1}, {BaseIntervalMS: 60_001},
			{BaseIntervalMS: 2000, ModuleIntervals: map[string]int64{"gpu": 1000}},
			{BaseIntervalMS: 2000, ModuleIntervals: map[string]int64{"cpu": 1}},
		} {
			if err := r.srv.Configure(bad); err == nil {
				t.Errorf("%+v is taken", bad)
			}
		}
		if got := r.prober.Interval(); got != time.Second {
			t.Errorf("refused configurations changed the interval to %v", got)
		}
		for _, tt := range []struct {
			c    Config
			want int
		}{
			{Config{ModuleIntervals: map[string]int64{"cpu": 500, "memory": 2000, "wear": 5000}}, 20},
			{Config{BaseIntervalMS: 2000}, 20},
			{Config{ModuleIntervals: map[string]int64{}}, 5},
		} {
			if err := r.srv.Configure(tt.c); err != nil {
				t.Fatal(err)
			}
			p.run(2 * time.Second) // what was due before
			if got := cpuIn10s(); got != tt.want {
				t.Errorf("%+v: cpu came %d times in 10 s, want %d", tt.c, got, tt.want)
			}
		}
	})
}

func TestCallTool(t *testing.T) {
	tests := []struct {
		err  error
		code int
		tool string
	}{
		{manifest.E(manifest.ManifestInvalid, "m"), CodeInvalidParams, "E_MANIFEST_INVALID"},
		{manifest.E(manifest.BadRequest, "m"), CodeInvalidParams, "E_BAD_REQUEST"},
		{fmt.Errorf("wrapped: %w", manifest.E(manifest.RateLimited, "m")), CodeRateLimited, "E_RATE_LIMITED"},
		{manifest.E(manifest.SafetyDenied, "m"), CodeUnauthorized, "E_SAFETY_DENIED"},
		{manifest.E(manifest.Internal, "m"), CodeInternal, "E_INTERNAL"},
		{manifest.E(manifest.NodeOffline, "m"), CodeInternal, "E_NODE_OFFLINE"},
		{errors.New("m"), CodeInternal, ""},
	}
	var fail error
	r := onSocket(t, Options{
		Capabilities: func() any { return map[string]any{"node_id": "n", "capabilities": []string{}} },
		GetConfig:    func(context.Context) any { return map[string]int{"x": 1} },
		Call: func(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
			return json.RawMessage(fmt.Sprintf(`{"tool":%q,"args":%s}`, tool, args)), fail
		},
	})
	c, err := Dial(t.Context(), r.srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for args, want := range map[string]string{``: `{"tool":"a.b.c.d","args":{}}`, `{"x":[1]}`: `{"tool":"a.b.c.d","args":{"x":[1]}}`} {
		if got, err := c.CallTool(t.Context(), "a.b.c.d", json.RawMessage(args)); err != nil || string(got) != want {
			t.Errorf("with %s: %s, %v", args, got, err)
		}
	}
	for _, tt := range tests {
		fail = tt.err
		var e *Error
		if _, err := c.CallTool(t.Context(), "x", nil); !errors.As(err, &e) || e.Code != tt.code || e.ToolCode != tt.tool || !strings.Contains(e.Error(), "m") {
			t.Errorf("%v becomes %#v", tt.err, err)
		}
	}
	var got struct {
		NodeID string `json:"node_id"`
		X      int
	}
	if err := errors.Join(c.Capabilities(t.Context(), &got), c.GetConfig(t.Context(), &got)); err != nil || got.NodeID != "n" || got.X != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestToolThatHangs(t *testing.T) {
	hang := func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	inBubble(t, Options{Call: hang}, func(t *testing.T, r *rig) {
		m := r.peer().hello("").call("call", `{"tool":"x"}`)
		if m.code() != CodeInternal || !strings.Contains(fmt.Sprint(m), "code:E_DEADLINE_EXCEEDED") {
			t.Errorf("got %v", m)
		}
	})
}

// TestStandingAlerts: a client that connects late, or asks for events late, gets the alerts that still hold,
// once and after the answer to its hello.
func TestStandingAlerts(t *testing.T) {
	var standing []Alert
	inBubble(t, Options{Alerts: func() []Alert { return standing }}, func(t *testing.T, r *rig) {
		alerts := func(p *peer) (rules []string) {
			synctest.Wait()
			for _, m := range p.take(EventAlert) {
				rules = append(rules, fmt.Sprint(m.params()["rule_id"]))
			}
			return rules
		}
		if got := alerts(r.peer().hello(bridge)); got != nil {
			t.Errorf("no alert holds, and it got %q", got)
		}
		standing = []Alert{{Level: "warn", RuleID: "hot", Metric: "temperature_c", Value: 80, Threshold: 75}, {RuleID: "broken", Value: math.NaN()}, {RuleID: "full", Level: "error"}}
		late, plain := r.peer().hello(bridge), r.peer().hello("")
		if got := alerts(late); fmt.Sprint(got) != "[hot full]" {
			t.Errorf("a late client got %q", got)
		}
		late.hello(bridge) // again, on the same connection
		if got := append(alerts(late), alerts(plain)...); got != nil {
			t.Errorf("it was notified twice, or without asking: %q", got)
		}
		plain.hello(bridge)
		r.srv.PublishAlert(Alert{RuleID: "new"})
		if got := alerts(plain); fmt.Sprint(got) != "[hot full new]" {
			t.Errorf("a client that asked late got %q", got)
		}
	})
}
