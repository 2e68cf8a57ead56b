package mcp

import (
	"fmt"
	"io"
	"strings"
	"testing"
)

// TestBodyIsNotAMessage: JSON that is not a JSON-RPC message is refused with a JSON-RPC error,
// under its own id where it has one.
func TestBodyIsNotAMessage(t *testing.T) {
	e := newEnv(t, Options{})
	legacy := sessionHead("", e.initialize(""))
	tests := []struct{ name, body, want string }{
		{"not JSON", `{`, `"id":null,"error":{"code":-32700,`},
		{"equal keys", `{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}`, `"id":null,"error":{"code":-32700,`},
		{"no method", `{"jsonrpc":"2.0","id":1}`, `"id":1,"error":{"code":-32600,`},
		{"no object", `"ping"`, `"id":null,"error":{"code":-32600,`},
		{"empty batch", `[]`, `"id":null,"error":{"code":-32600,`},
		{"bad in a batch", `[{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":2}]`, `"id":null,"error":{"code":-32600,`},
		{"no version", `{"id":1,"method":"ping"}`, `"id":1,"error":{"code":-32600,"message":"a message has \"jsonrpc\":\"2.0\""}`},
		{"another version", `{"jsonrpc":"1.0","id":"a","method":"ping"}`, `"id":"a","error":{"code":-32600,`},
		{"params in an array", `{"jsonrpc":"2.0","id":1,"method":"ping","params":[1]}`, `"id":1,"error":{"code":-32600,"message":"params are an object"}`},
		{"id is an object", `{"jsonrpc":"2.0","id":{},"method":"ping"}`, `"id":null,"error":{"code":-32600,`},
		{"id is a truth", `{"jsonrpc":"2.0","id":true,"method":"ping"}`, `"id":null,"error":{"code":-32600,`},
		{"id is a fraction", `{"jsonrpc":"2.0","id":1.5,"method":"ping"}`, `"id":null,"error":{"code":-32600,`},
		{"id would be rounded", `{"jsonrpc":"2.0","id":9007199254740993,"method":"ping"}`, `"id":null,"error":{"code":-32600,`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, head := range []map[string]string{legacy, {"Mcp-Protocol-Version": modernEra}} {
				res := e.do("POST", head, tt.body)
				if body := readAll(t, res); res.StatusCode != 400 || !strings.Contains(body, tt.want) || strings.Contains(body, "strictjson") {
					t.Errorf("%d %s, want 400 with %s", res.StatusCode, body, tt.want)
				}
			}
		})
	}
	for _, id := range []string{`1e3`, `-7`, `"a b"`, `9007199254740991`} {
		if body := readAll(t, e.do("POST", legacy, `{"jsonrpc":"2.0","id":`+id+`,"method":"ping"}`)); !strings.Contains(body, `"result":{}`) {
			t.Errorf("id %s: %s, want an answer", id, body)
		}
	}
}

// TestAccept: the refusal is the envelope.
func TestAccept(t *testing.T) {
	e := newEnv(t, Options{})
	legacy := sessionHead("", e.initialize(""))
	for accept, want := range map[string]int{
		"application/json": 400, "text/event-stream": 400, "text/html": 400, "": 400,
		"*/*": 200, "application/*, Text/Event-Stream;q=0.5": 200, "application/json, text/event-stream": 200,
	} {
		legacy["Accept"] = accept
		res := e.do("POST", legacy, listBody)
		if body := readAll(t, res); res.StatusCode != want || want == 400 && !strings.HasPrefix(body, `{"error":{"code":"E_BAD_REQUEST"`) {
			t.Errorf("Accept %q: %d %s, want %d", accept, res.StatusCode, body, want)
		}
	}
	legacy["Accept"] = "application/json"
	if res := e.do("GET", legacy, ""); res.StatusCode != 400 || !strings.HasPrefix(readAll(t, res), `{"error":{"code":"E_BAD_REQUEST"`) {
		t.Errorf("GET without text/event-stream: %d, want 400 and the envelope", res.StatusCode)
	}
}

// TestUnknownNotification: it gets no answer and is not an error.
func TestUnknownNotification(t *testing.T) {
	e := newEnv(t, Options{})
	id := e.initialize("")
	for _, method := range []string{"notifications/of_tomorrow", "notifications/roots/list_changed", "notifications/initialized"} {
		if res := e.do("POST", sessionHead("", id), `{"jsonrpc":"2.0","method":"`+method+`"}`); res.StatusCode != 202 || readAll(t, res) != "" {
			t.Errorf("%s: %d, want 202 and no body", method, res.StatusCode)
		}
	}
	if res := e.do("POST", sessionHead("", "NOBODY"), `{"jsonrpc":"2.0","method":"notifications/of_tomorrow"}`); res.StatusCode != 404 {
		t.Errorf("without a session: %d, want 404", res.StatusCode)
	}
}

// TestInitializeTwice: a client that initializes its session again keeps it, and the
// tenant has no session more than before.
func TestInitializeTwice(t *testing.T) {
	e := newEnv(t, Options{MaxSessions: 2})
	id := e.initialize("")
	again := `{"jsonrpc":"2.0","id":2,"method":"initialize","params":{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`
	for _, body := range []string{again, again, "[" + again + "]"} {
		head := sessionHead("", id)
		if body[0] == '[' {
			head["Mcp-Protocol-Version"] = "2025-03-26"
		}
		if got := readAll(t, e.do("POST", head, body)); !strings.Contains(got, "-32600") {
			t.Errorf("again: %s, want -32600", got)
		}
		if res := e.do("POST", sessionHead("", id), listBody); res.StatusCode != 200 {
			t.Fatalf("the session afterwards: %d, want 200", res.StatusCode)
		}
	}
	if res := e.do("DELETE", sessionHead("", id), ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d, want 204", res.StatusCode)
	}
	e.initialize("") // a session is free again
}

// TestStopAnswersOpenCalls: a call that has begun to stream is answered when the relay stops.
func TestStopAnswersOpenCalls(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	e.load(b)
	go func() { (<-b.streams).send(frame(0)) }()
	events := dial(t, e.srv.Listener.Addr().String()).stream("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: "+streamA+"\r\n",
		`{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{"name":"`+streamA+`",`+modernMeta[:len(modernMeta)-1]+`,"progressToken":1}}}`)
	wait(t, "first progress", events)
	wait(t, "frame", events)
	e.h.mu.RLock()
	e.h.tenants["default"].mux.shutDown()
	e.h.mu.RUnlock()
	got := wait(t, "answer", events)
	if f, ok := got["error"].(map[string]any); !ok || got["id"] != "c" || f["code"] != -31503.0 || !strings.Contains(fmt.Sprint(f["data"]), "outcome:unknown reason:stopping") {
		t.Errorf("got %v, want an error of the call", got)
	}
}

// TestDeleteAnswersOpenCalls: so is a call of a session that ends, whether it has begun to stream
// or not.
func TestDeleteAnswersOpenCalls(t *testing.T) {
	e := newEnv(t, Options{})
	b := newBoard("default", nodeA)
	e.load(b)
	for _, begun := range []bool{true, false} {
		id := e.initialize("")
		head, ends := make(chan bool, 1), make(chan string, 1)
		go func() {
			res, err := e.srv.Client().Do(newRequest(t, e, sessionHead("", id),
				`{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{"name":"`+streamA+`","_meta":{"progressToken":1}}}`))
			if err != nil {
				ends <- err.Error()
				return
			}
			head <- true // which comes with the first event
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			ends <- res.Status + " " + string(body) + fmt.Sprint(err)
		}()
		f := wait(t, "stream", b.streams)
		if begun {
			f.send(frame(0))
			wait(t, "event", head)
		}
		if res := e.do("DELETE", sessionHead("", id), ""); res.StatusCode != 204 {
			t.Errorf("DELETE: %d", res.StatusCode)
		}
		// The answer is ours, or that of the cancelled call if it was quicker.
		if got := wait(t, "answer", ends); strings.Count(got, `"id":"c",`) != 1 || !strings.HasPrefix(got, "200") {
			t.Errorf("begun %v: got %s, want 200 and one answer", begun, got)
		}
	}
}
