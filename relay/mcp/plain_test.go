package mcp

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/conformance"
)

// TestPlainIsTheSame sends the same requests the short way and through the SDK: the
// answers must be the same JSON with the same status.
func TestPlainIsTheSame(t *testing.T) {
	requests := []struct{ method, name, params string }{
		{"tools/list", "", ``},
		{"tools/list", "", `"cursor":""`},
		{"tools/list", "", `"cursor":"` + makeCursor(echoA) + `"`},
		{"tools/list", "", `"cursor":"nonsense"`},
		{"tools/list", "", `"cursor":7`},
		{"resources/list", "", ``},
		{"resources/list", "", `"cursor":"` + makeCursor("z") + `"`},
		{"resources/read", "mcp://devices/" + nodeA + "/metrics.json", ``},
		{"resources/read", "test://static-text", ``},
		{"resources/read", "test://static-binary", ``},
		{"resources/read", "test://template/1/data", ``},
		{"resources/read", "test://nothing", ``},
		{"tools/call", echoA, ``},
		{"tools/call", echoA, `"arguments":{"message":"a\u0000\"<>&\u2028 \ud83d\ude00"}`},
		{"tools/call", echoA, `"arguments":{ "a" : [1 , 2.50, 1e2] , "b":{}}`},
		{"tools/call", echoA, `"arguments":null`},
		{"tools/call", echoA, `"arguments":[1]`},
		{"tools/call", echoA, `"arguments":"x"`},
		{"tools/call", echoA, `"arguments":{"bad":1}`},
		{"tools/call", "sysecho_" + nodeA + "_echo_invoke", `"arguments":{}`},
		{"tools/call", "sysecho." + nodeB + ".echo.invoke", ``},
		{"tools/call", "sysecho." + nodeA + ".echo.nothing", ``},
		{"tools/call", "nothing", ``},
		{"tools/call", "nothing.at.all", ``},
		{"tools/call", "test_simple_text", ``},
		{"tools/call", "test_multiple_content_types", ``},
		{"tools/call", "test_error_handling", ``},
		{"tools/call", "test_missing_capability", ``},
		{"tools/call", "test_input_required_result_list_roots", ``},
		{"tools/call", "test_input_required_result_elicitation", `"inputResponses":{"user_name":{"action":"accept","content":{"name":"Ada"}}}`},
		{"tools/call", "test_input_required_result_elicitation", `"inputResponses":7`},
		{"tools/call", "test_input_required_result_request_state", `"requestState":"forged"`},
		{"tools/call", "test_input_required_result_request_state", `"requestState":7`},
		{"tools/call", "test_tool_with_progress", ``},
		{"tools/call", streamA, `"arguments":{}`},
	}
	for _, version := range []string{legacyEra, modernEra} {
		var envs [2]*env
		var head [2]map[string]string
		for i := range envs {
			throughSDK = i == 1
			envs[i] = newEnv(t, Options{})
			throughSDK = false
			b := newBoard("default", nodeA)
			envs[i].load(b)
			envs[i].load(newBoard("other", nodeB))
			envs[i].load(conformance.New(envs[i].kernel))
			envs[i].load(spaced{})
			go func() {
				for f := range b.streams {
					f.send("{\"seq\":\n 1}", `{"seq":2}`)
					f.end(manifest.E(manifest.NodeOffline, "gone"))
				}
			}()
			t.Cleanup(func() { close(b.streams) })
			head[i] = map[string]string{"Mcp-Protocol-Version": version}
			if version == legacyEra {
				head[i]["Mcp-Session-Id"] = envs[i].initialize("")
			}
		}
		for _, q := range append(requests, struct{ method, name, params string }{"tools/call", "spaced", ``}) {
			t.Run(version+" "+q.method+" "+q.name+" "+q.params, func(t *testing.T) {
				var got [2]any
				var status [2]int
				for i, e := range envs {
					key := "name"
					if q.method == "resources/read" {
						key = "uri"
					}
					h := map[string]string{}
					for k, v := range head[i] {
						h[k] = v
					}
					params := []string{}
					if q.params != "" {
						params = append(params, q.params)
					}
					if q.name != "" {
						params = append(params, fmt.Sprintf("%q:%q", key, q.name))
					}
					if version == modernEra {
						params = append(params, modernMeta[:len(modernMeta)-1]+`,"progressToken":"p"}`)
						h["Mcp-Method"] = q.method
						if q.name != "" {
							h["Mcp-Name"] = q.name
						}
					} else {
						params = append(params, `"_meta":{"progressToken":"p"}`)
					}
					res := e.do("POST", h, `{"jsonrpc":"2.0","id":"q","method":"`+q.method+`","params":{`+strings.Join(params, ",")+`}}`)
					status[i], got[i] = res.StatusCode, messages(t, res)
				}
				if status[0] != status[1] || !reflect.DeepEqual(got[0], got[1]) {
					t.Errorf("the short way: %d %v\nthrough the SDK: %d %v", status[0], got[0], status[1], got[1])
				}
			})
		}
	}
}

// messages are the JSON messages of an answer, without what differs from call to call.
func messages(t *testing.T, res *http.Response) []any {
	t.Helper()
	body := readAll(t, res)
	lines := []string{body}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		lines = nil
		for _, l := range strings.Split(body, "\n") {
			if d, ok := strings.CutPrefix(l, "data: "); ok {
				lines = append(lines, d)
			}
		}
	}
	var all []any
	for _, l := range lines {
		var v any
		if err := json.Unmarshal([]byte(l), &v); err != nil {
			t.Fatalf("%q: %v", l, err)
		}
		all = append(all, same(v))
	}
	return all
}

// same replaces trace ids, signed states and the words of malformed params, which the
// SDK chooses with the names of its Go types.
func same(v any) any {
	switch v := v.(type) {
	case map[string]any:
		if code, ok := v["code"].(float64); ok {
			msg, _ := v["message"].(string)
			// The SDK takes a wrong type anywhere in params for a header that does not match.
			if code == -32602 || code == -32020 && strings.HasPrefix(msg, "failed to extract name") {
				return "invalid params"
			}
		}
		for k := range v {
			switch k {
			case "trace_id", "trace", "requestState":
				v[k] = "*"
			case "text":
				if s, ok := v[k].(string); ok && strings.HasPrefix(s, "{") {
					var in any
					if json.Unmarshal([]byte(s), &in) == nil {
						v[k] = same(in)
					}
				}
			default:
				v[k] = same(v[k])
			}
		}
	case []any:
		for i := range v {
			v[i] = same(v[i])
		}
	}
	return v
}

// spaced answers with JSON over many lines, which must not break an event.
type spaced struct{}

func (spaced) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "spaced", Version: "1.0.0", Tools: []*kernel.Tool{
		{Name: "spaced", Description: "d", Scope: manifest.ScopeCallReadOnly, InputSchema: json.RawMessage("{\n\t\"type\": \"object\"\r\n}")},
		{Name: "broken", Description: "d", Scope: manifest.ScopeCallReadOnly},
	}}
}

func (spaced) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	_ = r.Session.Notify(ctx, "notifications/progress", json.RawMessage("{\n\"progress\": 1\n}"))
	if r.Tool == "broken" {
		return &kernel.Result{Structured: json.RawMessage(`{"a":`)}, nil
	}
	return &kernel.Result{Structured: json.RawMessage("{\n \"a\": [1,\r\n 2]}")}, nil
}

// TestBroken: a plugin's malformed JSON reaches nobody.
func TestBroken(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(spaced{})
	if _, m := e.modern("tools/call", "broken", `"name":"broken"`, nil); m["error"] == nil || m["error"].(map[string]any)["code"] != float64(codeInternal) {
		t.Errorf("got %v, want an internal error", m)
	}
}

// TestCancelPlain: notifications/cancelled ends a plain request of the same session only.
func TestCancelPlain(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	e.load(b)
	ids := []string{e.initialize("default/a"), e.initialize("default/a")}
	var streams []*frames
	answers := make(chan string, 2)
	for _, id := range ids {
		go func() {
			res, err := e.srv.Client().Do(newRequest(t, e, sessionHead("default/a", id), `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"`+streamA+`"}}`))
			if err != nil {
				answers <- err.Error()
				return
			}
			defer res.Body.Close()
			body := make([]byte, 4096)
			n, _ := res.Body.Read(body)
			answers <- fmt.Sprint(res.StatusCode, string(body[:n]))
		}()
		streams = append(streams, wait(t, "stream", b.streams))
	}
	twice := e.do("POST", sessionHead("default/a", ids[0]), `{"jsonrpc":"2.0","id":3,"method":"tools/list"}`)
	if twice.StatusCode != 400 {
		t.Errorf("an id in use: %d, want 400", twice.StatusCode)
	}
	for _, params := range []string{`{"requestId":"3"}`, `{"requestId":4}`, `{}`} { // not it
		e.do("POST", sessionHead("default/a", ids[0]), `{"jsonrpc":"2.0","method":"notifications/cancelled","params":`+params+`}`)
	}
	if res := e.do("POST", sessionHead("default/a", ids[0]), `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}`); res.StatusCode != 202 {
		t.Errorf("cancel: %d, want 202", res.StatusCode)
	}
	wait(t, "close of the stream", streams[0].closed)
	if got := wait(t, "answer", answers); !strings.Contains(got, `"error"`) {
		t.Errorf("the cancelled request got %s, want an error", got)
	}
	select {
	case <-streams[1].closed:
		t.Error("the request of another session was cancelled")
	default:
	}
	streams[1].send(frame(1))
	streams[1].end(errTest)
	wait(t, "other answer", answers)
}
