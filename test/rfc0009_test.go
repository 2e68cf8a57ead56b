package test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay"
	"agentctl/relay/auth"
	"agentctl/transport/link"
	"agentctl/transport/sse"
)

var frameFields = []string{"ts_ms", "node_id", "cpu_pct", "mem_bytes", "mem_total_bytes", "disk_pct", "load_1m", "load_5m", "load_15m"}

// RFC-0009 §1, §5.1, §11: the snapshot is one frame, passed on as the device wrote it.
func TestRFC0009Snapshot(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		a := r.call(m.snapshotTool(), `{}`)
		if a.status != http.StatusOK || a.body != m.sample(1) || a.header.Get("Content-Type") != "application/json" {
			t.Fatalf("got %d %s %s", a.status, a.header, a.body)
		}
		for _, ref := range []string{"system.metrics.snapshot.output@1.0.0", "system.metrics.subscribe.frame@1.0.0"} {
			if err := r.schema(ref).Validate(decoded(t, a.body)); err != nil {
				t.Error(err)
			}
		}
		s := m.subscribe(`{"interval_ms":1000}`)
		frame := s.metric(time.Second)
		for _, body := range []string{a.body, frame} {
			if got := keys(t, body); !slices.Equal(got, sorted(frameFields)) {
				t.Errorf("fields %v", got)
			}
		}
	})
}

// RFC-0009 §3, §5, §10: the head, the bytes of the events, and what is not there.
func TestRFC0009Wire(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	m := r.device(mockOptions{cadence: true})
	s := r.stream(m.subscribeTool(), `{"interval_ms":1000}`, streamOptions{header: map[string]string{
		"Accept-Encoding": "gzip", "Last-Event-ID": "7", "Connection": "keep-alive"}})
	h := s.resp.Header
	if s.resp.Proto != "HTTP/1.1" || h.Get("Content-Type") != "text/event-stream; charset=utf-8" || h.Get("Cache-Control") != "no-store" {
		t.Errorf("head %s %v", s.resp.Proto, h)
	}
	for _, k := range []string{"Content-Encoding", "Retry-After", "Content-Length", "Trailer"} {
		if h.Get(k) != "" {
			t.Errorf("%s: %s", k, h.Get(k))
		}
	}
	if first, want := s.metric(time.Second), m.sample(1); first[22:] != want[22:] { // the clock went on
		t.Errorf("got %s, want %s", first, want)
	}
	if !strings.HasPrefix(s.raw.String(), "event: metric\ndata: {\"ts_ms\":") {
		t.Errorf("the wire begins with %q", s.raw.String())
	}
	s.halfClose()
	s.waitEnd(sse.Normal, 2*time.Second)
	r.waitAudited("decision=close", "reason=close=1000", "tool="+m.subscribeTool(), "node_id="+m.node)
	if strings.Contains(s.raw.String(), "not_implemented") {
		t.Error("not_implemented")
	}
}

// RFC-0009 §3: which Accept opens a stream, which a unary answer, and which nothing.
func TestRFC0009Accept(t *testing.T) {
	t.Parallel()
	tests := []struct {
		accept          string
		stream, unaryOK bool
	}{
		{"", false, true},
		{"*/*", false, true},
		{"application/json", false, true},
		{"application/*", false, true},
		{"application/json; charset=utf-8", false, true},
		{"application/json;q=0.1, text/html", false, true},
		{"text/event-stream", true, false},
		{"TEXT/Event-Stream", true, false},
		{"text/event-stream; charset=utf-8", true, false},
		{"text/event-stream;q=0.5", true, false},
		{"application/json, text/event-stream", true, true},
		{"text/event-stream, application/json;q=0", true, false},
		{"text/event-stream;q=0", false, false},
		{"text/event-stream;q=0.000, application/json", false, true},
		{"text/event-stream;q=high", false, false},
		{"text/event-stream;q=-1", false, false},
		{"text/event-streams", false, false},
		{"text/*", false, false},
		{"text/html", false, false},
		{"application/json;q=0", false, false},
		{";;;", false, false},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		for _, tt := range tests {
			time.Sleep(time.Second)
			s := r.post(`{"tool":"`+m.subscribeTool()+`","arguments":{}}`, streamOptions{header: map[string]string{"Accept": tt.accept}})
			if got := s.resp.StatusCode == http.StatusOK && strings.HasPrefix(s.resp.Header.Get("Content-Type"), "text/event-stream"); got != tt.stream {
				t.Errorf("Accept %q: a stream is %v, want %v", tt.accept, got, tt.stream)
			}
			_ = s.conn.Close()
			if !tt.stream {
				m.expectNoCommand(func() {
					r.wantRefusal(r.call(m.subscribeTool(), `{}`, "Accept", tt.accept), http.StatusBadRequest, manifest.BadRequest)
				})
			}
			if a := r.call(m.echoTool(), `{"message":"x"}`, "Accept", tt.accept); (a.status == http.StatusOK) != tt.unaryOK {
				t.Errorf("Accept %q: echo got %d %s", tt.accept, a.status, a.body)
			} else if a.header.Get("Content-Type") != "application/json" {
				t.Errorf("Accept %q: echo answered as %s", tt.accept, a.header.Get("Content-Type"))
			} else if !tt.unaryOK {
				r.wantRefusal(a, http.StatusBadRequest, manifest.BadRequest)
			}
		}
	})
}

// RFC-0009 §4: the schema of the arguments, and what the device gets.
func TestRFC0009Interval(t *testing.T) {
	t.Parallel()
	tests := []struct {
		args string
		want string // interval_ms in the cmd; "" is a refusal
	}{
		{`{}`, "5000"}, {`{"interval_ms":1000}`, "1000"}, {`{"interval_ms":60000}`, "60000"},
		{`{"interval_ms":5000.0}`, "5000"}, {`{"interval_ms":5e3}`, "5000"}, {`{"interval_ms":1.5e3}`, "1500"},
		{`{"interval_ms":999}`, ""}, {`{"interval_ms":60001}`, ""}, {`{"interval_ms":0}`, ""}, {`{"interval_ms":-5000}`, ""},
		{`{"interval_ms":1500.5}`, ""}, {`{"interval_ms":"5000"}`, ""}, {`{"interval_ms":null}`, ""}, {`{"interval_ms":true}`, ""},
		{`{"interval_ms":[5000]}`, ""}, {`{"interval_ms":1e300}`, ""}, {`{"x":1}`, ""}, {`{"interval_ms":5000,"x":1}`, ""},
		{`{"Interval_ms":5000}`, ""}, {`{"interval_ms":9007199254740993000}`, ""},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		for _, tt := range tests {
			time.Sleep(time.Second)
			if tt.want == "" {
				m.expectNoCommand(func() {
					r.wantRefusal(r.call(m.subscribeTool(), tt.args, "Accept", "text/event-stream"), http.StatusUnprocessableEntity, manifest.ManifestInvalid)
				})
				continue
			}
			s := m.subscribe(tt.args)
			s.metric(time.Second)
			_ = s.conn.Close()
			c := m.cmds()
			if got := string(c[len(c)-1].cmd.Arguments); got != `{"interval_ms":`+tt.want+`}` {
				t.Errorf("%s: the device got %s", tt.args, got)
			}
		}
	})
}

// RFC-0009 §5.1: a frame that breaks the schema is never forwarded, and the stream lives on.
func TestRFC0009BadFrames(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		s := m.subscribe(`{"interval_ms":1000}`)
		s.metric(time.Second)
		id := m.lastStream()
		good := m.sample(2)
		seq := int64(1)
		for _, bad := range []string{
			`{}`,
			replaceField(good, "ts_ms", "0"), replaceField(good, "ts_ms", "1699999999999"), replaceField(good, "ts_ms", "1745300000000.5"),
			replaceField(good, "node_id", `"01hzx9k3m4p7q8r9s0t1v2w3xy"`), replaceField(good, "node_id", `"`+strings.ToUpper(m.node)+`"`),
			replaceField(good, "cpu_pct", "100.1"), replaceField(good, "cpu_pct", "-0.1"), replaceField(good, "cpu_pct", `"7"`),
			replaceField(good, "mem_bytes", "-1"), replaceField(good, "mem_bytes", "1.5"), replaceField(good, "mem_total_bytes", "0"),
			replaceField(good, "disk_pct", "101"), replaceField(good, "load_1m", "-1"), replaceField(good, "load_15m", "null"),
			strings.Replace(good, `"load_1m":0.42,`, "", 1), strings.Replace(good, `{`, `{"x":1,`, 1),
		} {
			seq++
			m.metric(id, seq, bad)
		}
		seq++
		m.metric(id, seq, m.sample(42))
		if got := s.metric(time.Second); !strings.Contains(got, `"cpu_pct":42.5`) {
			t.Errorf("a bad frame was forwarded: %s", got)
		}
		if err := r.schema("system.metrics.subscribe.frame@1.0.0").Validate(decoded(t, good)); err != nil {
			t.Error(err)
		}
		r.waitAudited("reason=bad_sample", "node_id="+m.node)
		_ = s.conn.Close()
	})
}

// lastStream is the id that the mock gave to its last stream.
func (m *mockDevice) lastStream() string {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streamID == "" {
		m.t.Fatal("no stream was opened")
	}
	return m.streamID
}

// replaceField puts another value into one field of a flat object.
func replaceField(object, field, value string) string {
	i := strings.Index(object, `"`+field+`":`) + len(field) + 3
	j := i + strings.IndexAny(object[i:], ",}")
	return object[:i] + value + object[j:]
}

// A sample with a line break in it could forge an event, and one that is no object is no
// metric: both end the link, and nothing of them is on the wire.
func TestRFC0009NoSample(t *testing.T) {
	t.Parallel()
	broken := func(brk string) func(string) string {
		return func(good string) string { return strings.Replace(good, ",", ","+brk+brk, 1) }
	}
	samples := map[string]func(good string) string{
		"LF": broken("\n"), "CR": broken("\r"), "CRLF": broken("\r\n"),
		"null": func(string) string { return "null" }, "array": func(good string) string { return "[" + good + "]" },
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for name, sample := range samples {
			m := r.device(mockOptions{})
			s := m.subscribe(`{}`)
			s.metric(time.Second)
			m.metric(m.lastStream(), 2, sample(m.sample(2)))
			if code := m.waitClosed(); code != link.CloseBadFrame {
				t.Errorf("%s: close %d, want %d", name, code, link.CloseBadFrame)
			}
			if n, _ := s.waitEnd(sse.DeviceOffline, time.Second); n != 0 {
				t.Errorf("%s: %d more frames", name, n)
			}
		}
	})
}

// RFC-0009 §5.2: a ping every 25 s from the opening, whatever the cadence, and also when
// the device says nothing.
func TestRFC0009Ping(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, args := range []string{`{"interval_ms":1000}`, `{"interval_ms":60000}`, `{"interval_ms":7000}`} {
			for _, silent := range []bool{false, true} {
				t.Log("the stream of this case:", args, "silent:", silent) // shown if one fails
				m := r.device(mockOptions{cadence: !silent})
				s := m.subscribe(args)
				opened := time.Now()
				s.metric(time.Second)
				for i := 1; i <= 3; {
					if ev := s.next(26 * time.Second); ev.Type == "metric" {
						continue
					} else if ev.Type != "ping" || string(ev.Data) != "{}" {
						t.Fatalf("got %s %s", ev.Type, ev.Data)
					}
					if at := time.Since(opened) - time.Duration(i)*25*time.Second; at < -time.Second || at > time.Second {
						t.Errorf("ping %d came after %s", i, time.Since(opened))
					}
					i++
				}
				m.kill()
				s.waitEnd(sse.DeviceOffline, time.Second)
			}
		}
	})
}

// RFC-0009 §7, §9 fixture 3: however the device goes, the stream ends with 4503.
func TestRFC0009DeviceGone(t *testing.T) {
	t.Parallel()
	ends := map[string]func(m *mockDevice){
		"reset": func(m *mockDevice) { m.kill() },
		"close": func(m *mockDevice) { _ = m.ws.Close() },
		"stream_end": func(m *mockDevice) {
			_ = m.send(link.TypeStreamEnd, "", link.StreamEnd{StreamID: m.lastStream(), Reason: link.EndShutdown})
		},
		"garbage": func(m *mockDevice) { _ = m.write("garbage") },
		"silence": func(m *mockDevice) { m.deaf.Store(true); time.Sleep(3 * time.Minute) },
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for name, end := range ends {
			t.Log("the end of this case:", name) // shown if one fails
			m := r.device(mockOptions{})
			s := m.subscribe(`{}`)
			s.metric(time.Second)
			end(m)
			s.waitEnd(sse.DeviceOffline, 2*time.Second)
			r.waitAudited("decision=close", "reason=close=4503", "node_id="+m.node)
			m.kill()
		}
	})
}

// RFC-0009 §7: a relay that stops ends its streams with 1000, and the device links after.
func TestRFC0009Shutdown(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	m := r.device(mockOptions{cadence: true})
	var streams []*stream
	for range 5 {
		s := m.subscribe(`{"interval_ms":1000}`)
		s.metric(time.Second)
		streams = append(streams, s)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	for _, s := range streams {
		s.waitEnd(sse.Normal, 2*time.Second)
	}
	if code := m.waitClosed(); code != link.CloseDraining {
		t.Errorf("the device got %d", code)
	}
}

// A token that expires during a stream ends the stream with 1000; the next request says
// which it was.
func TestRFC0009TokenEnds(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{cadence: true})
		ctx := t.Context()
		cut := r.mint(auth.MintRequest{Class: "agent"})
		ttl := r.mint(auth.MintRequest{Class: "agent", TTL: 20 * time.Second}).Token
		other := m.subscribe(`{}`)
		a := r.stream(m.subscribeTool(), `{}`, streamOptions{token: cut.Token})
		b := r.stream(m.subscribeTool(), `{}`, streamOptions{token: ttl})
		a.metric(time.Second)
		revoked := time.Now()
		if _, err := r.relay.Store().Revoke(ctx, auth.RevokeRequest{JTI: cut.JTI}); err != nil {
			t.Fatal(err)
		}
		a.waitEnd(sse.Normal, 5*time.Second)
		if d := time.Since(revoked); d > 5*time.Second {
			t.Errorf("the stream went on for %s after the revocation", d)
		}
		r.wantRefusal(r.call(m.snapshotTool(), `{}`, "Authorization", "Bearer "+cut.Token), http.StatusForbidden, manifest.SafetyDenied)
		b.waitEnd(sse.Normal, 20*time.Second+auth.Leeway+5*time.Second)
		r.wantRefusal(r.call(m.snapshotTool(), `{}`, "Authorization", "Bearer "+ttl), http.StatusUnauthorized, manifest.SafetyDenied)
		other.metric(6 * time.Second)
		_ = other.conn.Close()
	})
}

// RFC-0009 §7, §10: a quota counts by default and closes with 4429 when it is enforced.
func TestRFC0009Quota(t *testing.T) {
	t.Parallel()
	for _, enforce := range []bool{false, true} {
		r := newTestRelay(t, withMetrics, func(o *relay.Options) { o.StreamQuota, o.EnforceQuota = 2, enforce })
		m := r.device(mockOptions{})
		for i := range 4 {
			s := m.subscribe(`{}`)
			if enforce && i >= 2 {
				s.waitEnd(sse.RateLimited, time.Second)
				continue
			}
			s.metric(time.Second)
		}
		if want := "agentctl_streams_over_quota_total 2\n"; !strings.Contains(metricsText(t, r), want) {
			t.Errorf("enforce %v: no %s", enforce, want)
		}
	}
}

// RFC-0009 §10: no quota by default. The device serves one stream, however many read it,
// and is canceled when the last one leaves.
func TestRFC0009OneDeviceStream(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{cadence: true})
		streams := make([]*stream, 50)
		for i := range streams {
			streams[i] = m.subscribe(`{"interval_ms":5000}`)
		}
		for _, s := range streams { // a joiner gets the last frame at once
			s.metric(time.Second)
		}
		if n := len(m.cmds()); n != 1 {
			t.Errorf("the device got %d commands", n)
		}
		for range 3 {
			want := ""
			for i, s := range streams {
				got := s.metric(6 * time.Second)
				if i > 0 && got != want {
					t.Errorf("reader %d got another frame", i)
				}
				want = got
			}
		}
		slow := m.subscribe(`{"interval_ms":6000}`)
		slow.metric(time.Second)
		if n := len(m.cmds()); n != 2 {
			t.Errorf("another cadence: %d commands", n)
		}
		for _, s := range streams[1:] {
			_ = s.conn.Close()
		}
		time.Sleep(10 * time.Second)
		if n := m.count(link.TypeCmdCancel); n != 0 {
			t.Error("the stream was cancelled while it had a reader")
		}
		streams[0].metric(6 * time.Second)
		_ = streams[0].conn.Close()
		eventually(t, "cmd_cancel", func() bool { return m.count(link.TypeCmdCancel) == 1 })
		slow.metric(7 * time.Second)
	})
}

// RFC-0009 §8: (read_only, call or subscribe) needs tools:call:read_only and nothing else does.
func TestRFC0009Scopes(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		for _, scope := range manifest.Scopes {
			if scope == manifest.ScopeDeviceConnect || scope == manifest.ScopeDeviceEnroll {
				continue // no agent's
			}
			time.Sleep(time.Second)
			token := r.agentOf(auth.DefaultTenant, scope)
			for tool, args := range map[string]string{m.echoTool(): `{"message":"x"}`, m.snapshotTool(): `{}`, m.subscribeTool(): `{}`} {
				s := r.post(`{"tool":"`+tool+`","arguments":`+args+`}`, streamOptions{token: token,
					header: map[string]string{"Accept": "text/event-stream, application/json"}})
				want := http.StatusForbidden
				if scope == manifest.ScopeCallReadOnly {
					want = http.StatusOK
				}
				if s.resp.StatusCode != want {
					t.Errorf("scope %s, tool %s: got %d", scope, tool, s.resp.StatusCode)
				}
				_ = s.conn.Close()
			}
		}
		if n := len(m.cmds()); n != 3 {
			t.Errorf("the device got %d commands, want 3", n)
		}
	})
}

func keys(t testing.TB, object string) []string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(object), &m); err != nil {
		t.Fatalf("%s: %v", object, err)
	}
	var list []string
	for k := range m {
		list = append(list, k)
	}
	return sorted(list)
}

func sorted(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}
