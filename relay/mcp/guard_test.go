package mcp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

func TestGuard(t *testing.T) {
	e := newEnv(t, Options{Guard: edge.NewGuard(edge.GuardOptions{CheckHost: true, Hosts: []string{"relay.example"}, Origins: []string{"https://App.example"}})})
	id := e.initialize("")
	own := e.srv.Listener.Addr().String()
	tests := []struct {
		name   string
		header map[string]string
		ok     bool
	}{
		{"plain", nil, true},
		{"its own origin", map[string]string{"Origin": "http://" + own}, true},
		{"an allowed origin", map[string]string{"Origin": "https://app.example"}, true},
		{"a foreign origin", map[string]string{"Origin": "https://evil.example"}, false},
		{"the allowed origin over http", map[string]string{"Origin": "http://app.example"}, false},
		{"an opaque origin", map[string]string{"Origin": "null"}, false},
		{"another port", map[string]string{"Origin": "http://127.0.0.1:1"}, false},
		{"an allowed name within another", map[string]string{"Origin": "https://app.example.evil.example"}, false},
		{"a foreign host", map[string]string{"Host": "evil.example"}, false},
		{"a foreign host and origin", map[string]string{"Host": "evil.example", "Origin": "http://evil.example"}, false},
		{"localhost", map[string]string{"Host": "localhost:80"}, true},
		{"loopback of version 6", map[string]string{"Host": "[::1]:80"}, true},
		{"an allowed host", map[string]string{"Host": "relay.example"}, true},
		{"an allowed host with a port", map[string]string{"Host": "RELAY.example:443", "Origin": "https://relay.example:443"}, true},
		{"loopback within a name", map[string]string{"Host": "127.0.0.1.evil.example"}, false},
	}
	for _, tt := range tests {
		for _, m := range []string{"POST", "DELETE", "GET"} {
			t.Run(tt.name+" "+m, func(t *testing.T) {
				h := sessionHead("", id)
				for k, v := range tt.header {
					h[k] = v
				}
				body := ""
				switch m {
				case "POST":
					body = listBody
				default:
					h["Mcp-Session-Id"] = "NOBODY" // 404 when it gets so far
				}
				res := e.do(m, h, body)
				if got := res.StatusCode != http.StatusForbidden; got != tt.ok {
					t.Errorf("status %d, want passed %v", res.StatusCode, tt.ok)
				}
				if !tt.ok && !strings.Contains(readAll(t, res), `"E_SAFETY_DENIED"`) {
					t.Error("the refusal is not an envelope")
				}
			})
		}
	}
}

// endless is a body that never stops.
type endless struct{ n int }

func (e *endless) Read(p []byte) (int, error) { e.n += len(p); return len(p), nil }

func TestBody(t *testing.T) {
	e := newEnv(t, Options{MaxBody: 64 << 10})
	e.load(newBoard("default", nodeA))
	ping := `{"jsonrpc":"2.0","id":1,"method":"ping"}`
	id := e.initialize("")
	head := sessionHead("", id)
	with := func(k, v string) map[string]string {
		h := maps.Clone(head)
		h[k] = v
		return h
	}
	long := func(n int) string {
		return `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":"` + strings.Repeat("x", n) + `"}}`
	}
	var batch, many []string
	for i := range maxBatch + 1 {
		m := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"ping"}`, i)
		if i < 3 {
			batch = append(batch, m)
		}
		many = append(many, m)
	}
	old := with("Mcp-Protocol-Version", "2025-03-26")
	tests := []struct {
		name string
		head map[string]string
		body string
		want int
	}{
		{"ping", head, ping, 200},
		{"with a charset", with("Content-Type", "application/json; charset=UTF-8"), ping, 200},
		{"form", with("Content-Type", "application/x-www-form-urlencoded"), ping, 400},
		{"text", with("Content-Type", "text/plain"), ping, 400},
		{"other charset", with("Content-Type", "application/json; charset=utf-16"), ping, 400},
		{"no type", with("Content-Type", ""), ping, 400},
		{"near the limit", head, long(63 << 10), 200},
		{"above the limit", head, long(65 << 10), 413},
		{"empty", head, " ", 400},
		{"no JSON", head, `{"jsonrpc":`, 400},
		{"no object", head, `"ping"`, 400},
		{"method in capitals", head, `{"jsonrpc":"2.0","id":1,"METHOD":"ping"}`, 400},
		{"method twice", head, `{"jsonrpc":"2.0","id":1,"method":"tools/list","method":"ping"}`, 400},
		{"method twice in two cases", head, `{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/list"}`, 200},
		{"name twice deep inside", head, `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"a":1,"a":2}}}`, 400},
		{"trailing bytes", head, ping + ping, 400},
		{"bad UTF-8", head, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{\"x\":\"\xff\"}}", 400},
		{"too deep", head, `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}}`, 400},
		{"batch", old, "[" + strings.Join(batch, ",") + "]", 200},
		{"batch of a later version", head, "[" + strings.Join(batch, ",") + "]", 400},
		{"batch too long", old, "[" + strings.Join(many, ",") + "]", 400},
		{"empty batch", old, "[]", 400},
		{"batch of numbers", old, "[1]", 400},
		{"wrong accept", with("Accept", "text/html"), ping, 400},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if res := e.do("POST", tt.head, tt.body); res.StatusCode != tt.want {
				t.Errorf("status %d %s, want %d", res.StatusCode, readAll(t, res), tt.want)
			}
		})
	}
	t.Run("endless", func(t *testing.T) {
		src := &endless{}
		req, err := http.NewRequest("POST", e.url, src)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		res, err := e.srv.Client().Do(req)
		if err != nil {
			t.Skipf("the client did not wait for the answer: %v", err)
		}
		defer res.Body.Close()
		if res.StatusCode != 413 {
			t.Errorf("status %d, want 413", res.StatusCode)
		}
		_, _ = io.Copy(io.Discard, res.Body)
	})
}

// TestSlowBody: a body that does not arrive is not waited for, whether it is wanted or
// refused.
func TestSlowBody(t *testing.T) {
	for origin, want := range map[string]int{"": 400, "Origin: https://evil.example\r\n": 403} {
		e := newEnv(t, Options{})
		e.h.bodyTimeout = 50 * time.Millisecond
		c := dial(t, e.srv.Listener.Addr().String())
		if _, err := fmt.Fprintf(c.c, "POST /mcp HTTP/1.1\r\nHost: %s\r\n%sContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", c.addr, origin); err != nil {
			t.Fatal(err)
		}
		_ = c.c.SetReadDeadline(time.Now().Add(20 * time.Second))
		res, err := http.ReadResponse(c.r, nil)
		if err != nil || res.StatusCode != want {
			t.Fatalf("%v %v, want %d", res, err, want)
		}
		if _, err := io.Copy(io.Discard, c.r); err != nil {
			t.Errorf("the connection stays open: %v", err)
		}
	}
}

// TestOrderOfChecks: the first check that fails decides.
func TestOrderOfChecks(t *testing.T) {
	e := newEnv(t, Options{MaxBody: 1000, Authenticate: func(*http.Request) (*kernel.Caller, error) {
		return nil, manifest.E(manifest.SafetyDenied, "no token")
	}})
	big := strings.Repeat("x", 2000)
	tests := []struct {
		method string
		header map[string]string
		body   string
		want   int
	}{
		{"PATCH", map[string]string{"Origin": "https://evil.example"}, big, 405},
		{"POST", map[string]string{"Origin": "https://evil.example"}, big, 403},
		{"POST", nil, big, 413},
		{"POST", map[string]string{"Content-Type": "text/plain"}, "x", 401},
		{"GET", nil, "", 401},
		{"DELETE", nil, "", 401},
	}
	for _, tt := range tests {
		if res := e.do(tt.method, tt.header, tt.body); res.StatusCode != tt.want {
			t.Errorf("%s %v: %d, want %d", tt.method, tt.header, res.StatusCode, tt.want)
		}
	}
	if s := e.h.Stats(); s.Refused != uint64(len(tests)) || s.Tenants != 0 {
		t.Errorf("stats %+v, want %d refusals and no tenant", s, len(tests))
	}
}

// TestModernHeaders: a request whose headers say something else than its body goes to
// the SDK, which refuses it with the protocol's code.
func TestModernHeaders(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	params := `"name":"` + echoA + `"`
	tests := []struct {
		name   string
		header map[string]string
		status int
		code   float64
	}{
		{"as it should be", nil, 200, 0},
		{"another method", map[string]string{"Mcp-Method": "tools/list"}, 400, -32020},
		{"no method", map[string]string{"Mcp-Method": ""}, 400, -32020},
		{"another name", map[string]string{"Mcp-Name": "x"}, 400, -32020},
		{"no version", map[string]string{"Mcp-Protocol-Version": ""}, 400, -32020},
		{"an old version", map[string]string{"Mcp-Protocol-Version": legacyEra}, 400, -32020},
		{"an unknown version", map[string]string{"Mcp-Protocol-Version": "2099-01-01"}, 400, -32020},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			res, m := e.modern("tools/call", echoA, params, tt.header)
			var code float64
			if f, ok := m["error"].(map[string]any); ok {
				code, _ = f["code"].(float64)
			}
			if res.StatusCode != tt.status || code != tt.code || m["id"] != 7.0 {
				t.Errorf("%d %v, want %d and code %v", res.StatusCode, m, tt.status, tt.code)
			}
		})
	}
	for method, status := range map[string]int{"nothing/known": 404, "ping": 404, "resources/subscribe": 404, "prompts/list": 404} {
		if res, m := e.modern(method, "", "", nil); res.StatusCode != status || m["error"].(map[string]any)["code"] != -32601.0 {
			t.Errorf("%s: %d %v, want 404 and -32601", method, res.StatusCode, m)
		}
	}
	if res, m := e.modern("tools/call", "nothing", `"name":"nothing"`, nil); res.StatusCode != 400 || m["error"].(map[string]any)["code"] != -32602.0 {
		t.Errorf("unknown tool: %d %v, want 400 and -32602", res.StatusCode, m)
	}
}

func FuzzScanBody(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"ping"}`, `[{"id":"a","method":"x"},{"id":null}]`,
		`{"method":"tools/call","params":{"name":"n","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}`,
		`{"m\u0065thod":"a","params":[1,{"name":2}]}`, `{ "params" : { "uri" : "u" } , "method" : "resources/read" }`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		msgs, batch, err := scanBody(body)
		if err != nil {
			return
		}
		var want []map[string]json.RawMessage
		if batch {
			err = json.Unmarshal(body, &want)
		} else {
			var one map[string]json.RawMessage
			err = json.Unmarshal(body, &one)
			want = append(want, one)
		}
		if err != nil || len(want) != len(msgs) {
			t.Fatalf("%q: %d messages, encoding/json says %d %v", body, len(msgs), len(want), err)
		}
		for i, m := range msgs {
			if w := bytes.TrimSpace(want[i]["params"]); !bytes.Equal(bytes.TrimSpace(m.params), w) {
				t.Fatalf("%q: params %q, want %q", body, m.params, w)
			}
			if id := want[i]["id"]; string(id) != "null" && !bytes.Equal(m.id, id) {
				t.Fatalf("%q: id %q, want %q", body, m.id, id)
			}
			var method string
			if json.Unmarshal(want[i]["method"], &method) != nil {
				method = ""
			}
			if m.method != method {
				t.Fatalf("%q: method %q, want %q", body, m.method, method)
			}
		}
	})
}

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "plain", "a\"b\\c\n\x00\x1f\x7f", "\u00e9\u2028\U0001f600", "\xff\xc3", "\xed\xa0\x80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b := appendString(nil, s)
		var got string
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%q gives %q: %v", s, b, err)
		}
		if want := strings.ToValidUTF8(s, ""); strings.ToValidUTF8(strings.ReplaceAll(got, "\ufffd", ""), "") != strings.ReplaceAll(want, "\ufffd", "") {
			t.Fatalf("%q comes back as %q", s, got)
		}
		if string(appendString(nil, []byte(s))) != string(b) {
			t.Fatalf("%q is quoted in two ways", s)
		}
	})
}

func TestCursor(t *testing.T) {
	for _, name := range []string{"a", echoA, "mcp://devices/x/metrics.json"} {
		if got, ok := parseCursor(makeCursor(name)); !ok || got != name {
			t.Errorf("%q comes back as %q %v", name, got, ok)
		}
	}
}
