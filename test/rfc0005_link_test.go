package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/strictjson"
	"agentctl/transport/link"
)

// refusedLinkCode makes a handshake that must fail and gives the close code.
func (r *testRelay) refusedLinkCode(o mockOptions) int {
	r.t.Helper()
	m, err := r.link(o)
	var ce *websocket.CloseError
	if !errors.As(err, &ce) {
		r.t.Errorf("the handshake ended with %v", err)
		if err == nil {
			m.kill()
		}
		return 0
	}
	return ce.Code
}

// capability is a capability as a board announces it, with the first occurrence of each old text replaced:
// edits are pairs of old and new.
func capability(t *testing.T, v manifest.Capability, edits ...string) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	s := string(b)
	for i := 0; i+1 < len(edits); i += 2 {
		if !strings.Contains(s, edits[i]) {
			t.Fatalf("%s is not in %s", edits[i], s)
		}
		s = strings.Replace(s, edits[i], edits[i+1], 1)
	}
	return s
}

// RFC-0005 §9, RFC-0009 §8: what a relay accepts in an announce. Each tool is named in the answer, and can be
// called.
func TestRFC0005Announce(t *testing.T) {
	t.Parallel()
	echo := func(edits ...string) string { return capability(t, manifest.Echo(), edits...) }
	metrics := func(edits ...string) string { return capability(t, manifest.Metrics(), edits...) }
	const subscribeOnly = "mcp://schemas/system.metrics.subscribe.input@1.0.0"
	tests := []struct {
		name, caps string
		tools      string // without the node, separated by commas
	}{
		{"both", echo() + "," + metrics(), "sysecho echo invoke, sys metrics snapshot, sys metrics subscribe"},
		{"echo alone", echo(), "sysecho echo invoke"},
		{"subscribe alone", metrics(`["snapshot","subscribe"]`, `["subscribe"]`, "mcp://schemas/system.metrics.snapshot.input@1.0.0", subscribeOnly), "sys metrics subscribe"},
		{"another cap_id", echo(`"cap_id":"echo"`, `"cap_id":"echo_2"`), "sysecho echo_2 invoke"},
		{"two of a kind", echo() + "," + echo(`"cap_id":"echo"`, `"cap_id":"b"`), "sysecho echo invoke, sysecho b invoke"},
		{"two metrics", metrics() + "," + metrics(`"cap_id":"metrics"`, `"cap_id":"more"`), "sys metrics snapshot, sys metrics subscribe, sys more snapshot, sys more subscribe"},
		{"other limits", echo(`"rate_limit_rps":10`, `"rate_limit_rps":1`), "sysecho echo invoke"},
		{"keys in any order", `{"verbs":["invoke"],` + strings.Replace(echo()[1:], `"verbs":["invoke"],`, "", 1), "sysecho echo invoke"},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, tt := range tests {
			m := r.device(mockOptions{caps: "[" + tt.caps + "]"})
			var want []string
			for tool := range strings.SplitSeq(tt.tools, ", ") {
				want = append(want, strings.Join(slices.Insert(strings.Fields(tool), 1, m.node), "."))
			}
			if !slices.Equal(m.ack.Tools, want) || len(m.ack.Rejected) != 0 {
				t.Errorf("%s: got %v, want %v", tt.name, m.ack, want)
			}
			for _, tool := range want {
				args := `{}`
				switch {
				case strings.HasSuffix(tool, ".subscribe"):
					continue
				case strings.HasSuffix(tool, ".invoke"):
					args = `{"message":"ping"}`
				}
				if a := r.call(tool, args); a.status != http.StatusOK {
					t.Errorf("%s: %s: %d %s", tt.name, tool, a.status, a.body)
				}
			}
			m.kill()
		}
	})
}

// A capability that breaks a rule is rejected, and the others of the announce are served. An announce of
// rejected ones alone closes the link.
func TestRFC0005AnnounceRejected(t *testing.T) {
	t.Parallel()
	echo := func(edits ...string) string { return capability(t, manifest.Echo(), edits...) }
	metrics := func(edits ...string) string { return capability(t, manifest.Metrics(), edits...) }
	tests := []struct{ name, cap string }{
		{"kind", metrics(`"kind":"system.metrics"`, `"kind":"system.foo"`)},
		{"class", metrics(`"read_only"`, `"mutating"`)},
		{"no such class", metrics(`"read_only"`, `"harmless"`)},
		{"verb", metrics(`"snapshot","subscribe"`, `"snapshot","stream"`)},
		{"no verb", metrics(`["snapshot","subscribe"]`, `[]`)},
		{"verb twice", metrics(`"snapshot","subscribe"`, `"snapshot","snapshot"`)},
		{"verb of another", metrics(`"snapshot","subscribe"`, `"invoke"`)},
		{"schema of echo", metrics("system.metrics.snapshot.input", "system.echo.invoke.input")},
		{"a schema", metrics(`"schema_ref":"mcp://schemas/system.metrics.snapshot.input@1.0.0"`, `"schema_ref":{"type":"object"}`)},
		{"schema from file", metrics("mcp://schemas/system.metrics.snapshot.input@1.0.0", "file:///etc/passwd")},
		{"cap_id", metrics(`"cap_id":"metrics"`, `"cap_id":"Metrics"`)},
		{"long name", metrics(`"cap_id":"metrics"`, `"cap_id":"`+strings.Repeat("m", 25)+`"`)},
		{"cap_id twice", metrics(`"cap_id":"metrics"`, `"cap_id":"echo"`)},
		{"no constraints", metrics(`,"constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}`, "")},
		{"rate 0", metrics(`"rate_limit_rps":10`, `"rate_limit_rps":0`)},
		{"rate 1000", metrics(`"rate_limit_rps":10`, `"rate_limit_rps":1000`)},
		{"concurrency", metrics(`"max_concurrency":4`, `"max_concurrency":65`)},
		{"deadline", metrics(`"deadline_ms_default":2000`, `"deadline_ms_default":60000`)},
		{"extra key", metrics(`"cap_id"`, `"description":"IGNORE","cap_id"`)},
		{"cost", metrics(`"cap_id"`, `"streaming_cost":1,"cap_id"`)},
		{"no object", `"metrics"`},
		{"echo that calls", echo(`"cap_id":"echo"`, `"cap_id":"e"`, `"invoke"`, `"call"`)},
		{"echo that writes", echo(`"cap_id":"echo"`, `"cap_id":"e"`, `"read_only"`, `"destructive"`)},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, tt := range tests {
			m := r.device(mockOptions{caps: "[" + echo() + "," + tt.cap + "]"})
			if len(m.ack.Tools) != 1 || m.ack.Tools[0] != m.echoTool() || len(m.ack.Rejected) != 1 || m.ack.Rejected[0].Code != manifest.ManifestInvalid {
				t.Errorf("%s: got %+v, want the echo, and one rejected", tt.name, m.ack)
			}
			m.expectNoCommand(func() {
				if a := r.call(m.snapshotTool(), `{}`); a.status != http.StatusBadRequest || a.code() != string(manifest.BadRequest) {
					t.Errorf("%s: a call of its tool: %d %s", tt.name, a.status, a.body)
				}
			})
			m.kill()
			if tt.name == "cap_id twice" { // alone it is good
				continue
			}
			time.Sleep(time.Minute) // virtual: refused links are limited by address
			if code := r.refusedLinkCode(mockOptions{caps: "[" + tt.cap + "]", token: m.token}); code != link.CloseManifestInvalid {
				t.Errorf("%s, alone: close %d, want %d", tt.name, code, link.CloseManifestInvalid)
			}
		}
	})
}

// An announce that is not one closes the link.
func TestRFC0005AnnounceRefused(t *testing.T) {
	t.Parallel()
	echo := func() string { return capability(t, manifest.Echo()) }
	tests := []struct {
		name string
		edit func(body string) string
		code int
	}{
		{"wrong hash", func(b string) string { return strings.Replace(b, `"manifest_sha256":"`, `"manifest_sha256":"0`, 1) }, link.CloseManifestInvalid},
		{"version", func(b string) string { return strings.Replace(b, `"manifest_version":1`, `"manifest_version":2`, 1) }, link.CloseManifestInvalid},
		{"none", func(string) string { return announceBody(`[]`) }, link.CloseManifestInvalid},
		{"no array", func(string) string { return announceBody(`{}`) }, link.CloseManifestInvalid},
		{"too many", func(string) string { return announceBody("[" + strings.Repeat(echo()+",", 32) + echo() + "]") }, link.CloseManifestInvalid},
		{"too large", func(string) string { return announceBody("[" + echo() + strings.Repeat(" ", link.MaxAnnounce) + "]") }, link.CloseTooLarge},
		{"an extra key", func(b string) string { return strings.Replace(b, "{", `{"x":1,`, 1) }, link.CloseManifestInvalid},
		{"a case", func(b string) string { return strings.Replace(b, "capabilities", "Capabilities", 1) }, link.CloseManifestInvalid},
		{"a second time", func(b string) string { return b[:len(b)-1] + `,"manifest_version":1}` }, link.CloseBadFrame},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for _, tt := range tests {
			time.Sleep(time.Minute) // virtual: refused links are limited by address
			if code := r.refusedLinkCode(mockOptions{announce: tt.edit}); code != tt.code {
				t.Errorf("%s: close %d, want %d", tt.name, code, tt.code)
			}
		}
	})
}

// A second announce replaces the manifest in one step.
func TestRFC0005AnnounceAgain(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		m := r.device(mockOptions{})
		echo, _ := json.Marshal(manifest.Echo())
		_ = m.send(link.TypeAnnounce, "", strictjson.Raw(announceBody("["+string(echo)+"]")))
		eventually(t, "announce_ack", func() bool { return m.count(link.TypeAnnounceAck) == 2 })
		m.expectNoCommand(func() {
			r.wantRefusal(r.call(m.snapshotTool(), `{}`), http.StatusBadRequest, manifest.BadRequest)
		})
	})
}

// RFC-0002 §2.3 and the order of the handshake: a message that is late or out of order closes the link.
func TestRFC0005Handshake(t *testing.T) {
	t.Parallel()
	ulid := manifest.NewULID
	frame := func(typ, payload string) string {
		return `{"type":"` + typ + `","msg_id":"` + ulid() + `","payload":` + payload + `}`
	}
	tests := map[string]struct {
		send   string
		code   int
		after  time.Duration
		binary bool
	}{
		"nothing":          {code: link.CloseTimeout, after: link.AuthTimeout},
		"announce first":   {send: frame("announce", announceBody(defaultCaps())), code: link.CloseBadFrame},
		"a relay's word":   {send: frame("cmd", `{"tool":"a.b.c.d","arguments":{}}`), code: link.CloseBadFrame},
		"unknown type":     {send: frame("login", `{}`), code: link.CloseBadFrame},
		"no JSON":          {send: `hello`, code: link.CloseBadFrame},
		"no msg_id":        {send: `{"type":"auth","payload":{}}`, code: link.CloseBadFrame},
		"bad msg_id":       {send: strings.Replace(frame("auth", `{}`), `"msg_id":"`, `"msg_id":"I`, 1), code: link.CloseBadFrame},
		"extra key":        {send: strings.Replace(frame("auth", `{}`), "{", `{"x":1,`, 1), code: link.CloseBadFrame},
		"TYPE":             {send: strings.Replace(frame("auth", `{}`), "type", `TYPE`, 1), code: link.CloseBadFrame},
		"type twice":       {send: strings.Replace(frame("auth", `{}`), "{", `{"type":"auth",`, 1), code: link.CloseBadFrame},
		"no token":         {send: frame("auth", `{"agent_version":"x","boot_id":"`+ulid()+`","instance_id":"`+strings.Repeat("0", 32)+`"}`), code: link.CloseAuthFailed},
		"binary":           {send: frame("auth", `{}`), code: link.CloseBadFrame, binary: true},
		"64 KiB and more":  {send: frame("auth", `{"token":"`+strings.Repeat("x", link.MaxFrame)+`"}`), code: link.CloseTooLarge},
		"256 KiB and more": {send: strings.Repeat("x", link.MaxAnnounce+1), code: link.CloseTooLarge},
	}
	bubble(t, func(t *testing.T, r *testRelay) {
		for name, tt := range tests {
			time.Sleep(time.Minute) // virtual: refused links are limited by address
			ws, err := r.websocket()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			start := time.Now()
			typ := websocket.TextMessage
			if tt.binary {
				typ = websocket.BinaryMessage
			}
			if tt.send != "" {
				go func() { _ = ws.WriteMessage(typ, []byte(tt.send)) }() // may be cut while it writes
			}
			_ = ws.SetReadDeadline(start.Add(time.Minute))
			_, hello, err := ws.ReadMessage()
			if err != nil || !strings.Contains(string(hello), `"type":"hello"`) {
				t.Fatalf("%s: hello: %s %v", name, hello, err)
			}
			_, _, err = ws.ReadMessage()
			var ce *websocket.CloseError
			if !errors.As(err, &ce) || ce.Code != tt.code {
				t.Errorf("%s: ended with %v, want close %d", name, err, tt.code)
			}
			if took := time.Since(start); took < tt.after || took > tt.after+time.Second {
				t.Errorf("%s: closed after %s, want %s", name, took, tt.after)
			}
			_ = ws.Close()
		}
	})
}

// RFC-0005 §5: which tokens a device may link with, and with which install.
func TestRFC0005DeviceTokens(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		node := manifest.NewNodeID()
		theirs := r.mint(auth.MintRequest{Class: "device", Tenant: "other"}).NodeID
		forged := func(edit func(c map[string]any)) string {
			return r.forge(func(_, c map[string]any) {
				c["sub"], c["cls"], c["scope"], c["gen"] = node, auth.ClassDevice, manifest.ScopeDeviceConnect, 1
				edit(c)
			})
		}
		revoked := r.mint(auth.MintRequest{Class: "device"})
		if _, err := r.relay.Store().Revoke(t.Context(), auth.RevokeRequest{JTI: revoked.JTI}); err != nil {
			t.Fatal(err)
		}
		now := time.Now().Unix()
		tests := map[string]struct {
			token string
			code  int
		}{
			"agent":          {r.agent, link.CloseForbidden},
			"enroll":         {r.mint(auth.MintRequest{Class: "enroll"}).Token, link.CloseForbidden},
			"no scope":       {forged(func(c map[string]any) { c["scope"] = nil }), link.CloseForbidden},
			"other scope":    {forged(func(c map[string]any) { c["scope"] = manifest.ScopeCallReadOnly }), link.CloseForbidden},
			"other install":  {forged(func(c map[string]any) { c["iid"] = strings.Repeat("0", 64) }), link.CloseForbidden},
			"foreign node":   {forged(func(c map[string]any) { c["sub"] = theirs }), link.CloseForbidden},
			"no node":        {forged(func(c map[string]any) { c["sub"] = "attic" }), link.CloseAuthFailed},
			"upper case":     {forged(func(c map[string]any) { c["sub"] = strings.ToUpper(node) }), link.CloseAuthFailed},
			"expired":        {forged(func(c map[string]any) { c["exp"] = now - 100 }), link.CloseAuthFailed},
			"other audience": {forged(func(c map[string]any) { c["aud"] = "other" }), link.CloseAuthFailed},
			"revoked":        {revoked.Token, link.CloseAuthFailed},
			"garbage":        {"x", link.CloseAuthFailed},
		}
		for name, tt := range tests {
			if code := r.refusedLinkCode(mockOptions{token: tt.token}); code != tt.code {
				t.Errorf("%s: close %d, want %d", name, code, tt.code)
			}
		}
		m := r.device(mockOptions{token: forged(func(map[string]any) {})})
		if m.node != node {
			t.Errorf("linked as %s", m.node)
		}
		cut := r.mint(auth.MintRequest{Class: "device"})
		live := r.device(mockOptions{token: cut.Token})
		start := time.Now()
		if _, err := r.relay.Store().Revoke(t.Context(), auth.RevokeRequest{JTI: cut.JTI}); err != nil {
			t.Fatal(err)
		}
		if code := live.waitClosed(); code != link.CloseAuthFailed || time.Since(start) > 5*time.Second {
			t.Errorf("close %d after %s", code, time.Since(start))
		}
	})
}

// RFC-0005 §8: an own node without a ready link is offline, also in the middle of a call,
// also after the relay was restarted, and never "not there".
func TestRFC0005Offline(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		never := r.mint(auth.MintRequest{Class: "device"}).NodeID
		r.wantRefusal(r.call("sysecho."+never+".echo.invoke", text("x")), http.StatusServiceUnavailable, manifest.NodeOffline)
		m := r.device(mockOptions{name: "attic", script: func(m *mockDevice) func(string, link.Cmd) {
			return func(string, link.Cmd) { _ = m.ws.NetConn().Close() }
		}})
		r.wantRefusal(r.call(m.echoTool(), text("x")), http.StatusServiceUnavailable, manifest.NodeOffline)
		if n := len(m.cmds()); n != 1 {
			t.Errorf("%d commands", n)
		}
		r.wantRefusal(r.call(m.subscribeTool(), `{}`, "Accept", "text/event-stream"), http.StatusServiceUnavailable, manifest.NodeOffline)
		r.wantRefusal(r.call(m.tool("sysecho.nosuch.invoke"), text("x")), http.StatusBadRequest, manifest.BadRequest)
		a := r.do(http.MethodGet, "/v1/nodes", "", r.headers())
		var list struct {
			Nodes []struct {
				NodeID       string `json:"node_id"`
				Name         string
				Online       bool
				LastSeenMS   int64 `json:"last_seen_ms"`
				Capabilities []manifest.Capability
			}
		}
		if err := json.Unmarshal([]byte(a.body), &list); err != nil || len(list.Nodes) != 2 {
			t.Fatalf("%d %s: %v", a.status, a.body, err)
		}
		for _, n := range list.Nodes {
			if n.Online || (n.NodeID == m.node) != (n.Name == "attic") || (n.NodeID == m.node) != (len(n.Capabilities) == 2) ||
				(n.NodeID == m.node) != (time.Since(time.UnixMilli(n.LastSeenMS)) < time.Minute) {
				t.Errorf("got %+v", n)
			}
		}
	})
}

// While a device comes, its tools are offline or there, never refused for another reason.
func TestRFC0005CallsDuringConnect(t *testing.T) {
	t.Parallel()
	r := newTestRelay(t)
	minted := r.mint(auth.MintRequest{Class: "device"})
	tool := "sysecho." + minted.NodeID + ".echo.invoke"
	stop, done := make(chan struct{}), make(chan map[int]int)
	go func() {
		seen := make(map[int]int)
		defer func() { done <- seen }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			a, err := r.tryRequest(http.MethodPost, "/mcp/tools/call", strings.NewReader(`{"tool":"`+tool+`","arguments":{}}`), r.headers())
			if err != nil {
				t.Error(err)
				return
			}
			seen[a.status]++
		}
	}()
	for range 5 {
		m := r.device(mockOptions{token: minted.Token})
		m.kill()
		eventually(t, "the node is offline", func() bool { return !m.online() })
	}
	close(stop)
	seen := <-done
	delete(seen, http.StatusServiceUnavailable)  // not there yet, or gone
	delete(seen, http.StatusUnprocessableEntity) // there: the arguments are bad
	if len(seen) != 0 {
		t.Errorf("other answers: %v", seen)
	}
}

// RFC-0005 §12: the relay never repeats a command by itself. Devices that drop the link in
// the middle of everything count what they execute.
func TestRFC0005AtMostOnce(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		minted := r.mint(auth.MintRequest{Class: "device"})
		executed := make(map[string]int)
		offline := 0
		for i := range 10 {
			m := r.device(mockOptions{token: minted.Token, script: func(m *mockDevice) func(string, link.Cmd) {
				return func(id string, c link.Cmd) {
					executed[string(c.Arguments)]++
					if i%2 == 0 {
						_ = m.ws.NetConn().Close()
						return
					}
					m.answer(id, c)
				}
			}})
			if a := r.call(m.echoTool(), text(fmt.Sprint("message ", i))); a.status == http.StatusServiceUnavailable {
				offline++
			} else if a.status != http.StatusOK {
				t.Errorf("%d %s", a.status, a.body)
			}
			m.kill()
			time.Sleep(3 * time.Second)
		}
		for args, n := range executed {
			if n != 1 {
				t.Errorf("%s was executed %d times", args, n)
			}
		}
		if len(executed) != 10 || offline != 5 {
			t.Errorf("%d messages executed, %d calls got offline", len(executed), offline)
		}
	})
}

// The newest link of a node wins. Two installs of one node are a clone: its owner is
// warned, and if both keep connecting, neither is served.
func TestRFC0005Takeover(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T, r *testRelay) {
		minted := r.mint(auth.MintRequest{Class: "device"})
		instance := func(n int) string { return fmt.Sprintf("%032x", n) }
		a := r.device(mockOptions{token: minted.Token, instance: instance(1)})
		b := r.device(mockOptions{token: minted.Token, instance: instance(1)})
		if code := a.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("close %d", code)
		}
		b.expectNoCommand(func() {})
		time.Sleep(time.Second)
		if strings.Contains(fmt.Sprint(r.audit()), "clone_suspected") {
			t.Error("a half-open leftover of one install was taken for a clone")
		}
		c := r.device(mockOptions{token: minted.Token, instance: instance(2)})
		if code := b.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("close %d", code)
		}
		r.waitAudited("reason=clone_suspected", "node_id="+minted.NodeID)
		d := r.device(mockOptions{token: minted.Token, instance: instance(1)})
		if code := c.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("close %d", code)
		}
		if code := r.refusedLinkCode(mockOptions{token: minted.Token, instance: instance(2)}); code != link.CloseSuperseded { // instead of the announce_ack
			t.Errorf("close %d", code)
		}
		if code := d.waitClosed(); code != link.CloseSuperseded {
			t.Errorf("close %d", code)
		}
		if code := r.refusedLinkCode(mockOptions{token: minted.Token, instance: instance(1)}); code != link.CloseSuperseded {
			t.Errorf("close %d", code)
		}
		time.Sleep(61 * time.Second)
		r.device(mockOptions{token: minted.Token, instance: instance(1)}).expectNoCommand(func() {})
	})
}
