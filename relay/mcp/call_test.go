//lint:file-ignore SA1019 sampling belongs to the versions with sessions.

package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/plugins/conformance"
)

const echoA = "sysecho." + nodeA + ".echo.invoke"

func callTool(t *testing.T, cs *sdk.ClientSession, name string, args any) *sdk.CallToolResult {
	t.Helper()
	res, err := cs.CallTool(context.Background(), &sdk.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Fatalf("call %s: %v", name, err)
	}
	return res
}

// errorOf is the error object of a result, whose text must be the same JSON.
func errorOf(t *testing.T, res *sdk.CallToolResult) map[string]any {
	t.Helper()
	if !res.IsError {
		t.Fatalf("no error: %+v", res)
	}
	data, err := json.Marshal(res.StructuredContent)
	if err != nil {
		t.Fatal(err)
	}
	var s, x struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(res.Content[0].(*sdk.TextContent).Text), &x); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(s) != fmt.Sprint(x) {
		t.Errorf("text %v, want that of structuredContent %v", x, s)
	}
	return s.Error
}

func TestCall(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		e.load(newBoard("default", nodeA))
		cs := e.client("", version, nil)
		for _, name := range []string{echoA, "sysecho_" + nodeA + "_echo_invoke"} {
			res := callTool(t, cs, name, map[string]any{"message": "hi \"<&>\" \u2028"})
			if res.IsError {
				t.Fatalf("%s: %+v", name, errorOf(t, res))
			}
			got := res.StructuredContent.(map[string]any)
			if got["node_id"] != nodeA || got["arguments"].(map[string]any)["message"] != "hi \"<&>\" \u2028" {
				t.Errorf("%s: got %v", name, got)
			}
			var again map[string]any
			if err := json.Unmarshal([]byte(res.Content[0].(*sdk.TextContent).Text), &again); err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
				t.Errorf("text %v (%v), want the structured content", again, err)
			}
		}
		if recs := e.records(); len(recs) != 2 || recs[0].Decision != kernel.Allowed || recs[0].Actor != "anybody" {
			t.Errorf("audit %+v, want two allowed calls", recs)
		}
	})
}

func TestCallErrors(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		a := newBoard("default", nodeA)
		var fail error
		a.online = func() error { return fail }
		e.load(a)
		e.load(newBoard("other", nodeB))
		cs := e.client("", version, nil)
		poor := e.client("default/poor/tools:list", version, nil)

		tests := []struct {
			name      string
			cs        *sdk.ClientSession
			tool      string
			args      any
			fail      error
			code      manifest.Code
			retryable bool
			after     float64
		}{
			{"bad arguments", cs, echoA, map[string]any{"bad": 1}, nil, manifest.ManifestInvalid, false, 0},
			{"offline", cs, echoA, nil, manifest.E(manifest.NodeOffline, "the board is offline"), manifest.NodeOffline, true, 0},
			{"rate", cs, echoA, nil, &manifest.Error{Code: manifest.RateLimited, Message: "slow down", RetryAfterMS: 90}, manifest.RateLimited, true, 90},
			{"unknown error", cs, echoA, nil, errors.New("secret of the relay"), manifest.Internal, true, 0},
			{"another's board", cs, "sysecho." + nodeB + ".echo.invoke", nil, nil, manifest.SafetyDenied, false, 0},
			{"no scope", poor, echoA, nil, nil, manifest.SafetyDenied, false, 0},
		}
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				fail = tt.fail
				got := errorOf(t, callTool(t, tt.cs, tt.tool, tt.args))
				if got["code"] != string(tt.code) || got["retryable"] != tt.retryable || len(got["trace_id"].(string)) != 32 {
					t.Errorf("got %v, want %s", got, tt.code)
				}
				if after, _ := got["retry_after_ms"].(float64); after != tt.after {
					t.Errorf("retry_after_ms %v, want %v", after, tt.after)
				}
				if strings.Contains(fmt.Sprint(got), "secret") {
					t.Errorf("%v reveals internals", got)
				}
			})
		}
		fail = nil
		for _, name := range []string{"nothing", "sysecho." + nodeA + ".echo.other", strings.Repeat("x", 200), "a.b.c"} {
			_, err := cs.CallTool(context.Background(), &sdk.CallToolParams{Name: name})
			var f *jsonrpc.Error
			if name == "sysecho."+nodeA+".echo.other" && err == nil {
				continue // what a well-formed name of a board means is for the composing package to decide
			}
			if !errors.As(err, &f) || f.Code != jsonrpc.CodeInvalidParams {
				t.Errorf("tool %q: %v, want invalid params", name, err)
			}
		}
	})
}

// panickingPlugin panics in a method beyond tools.
type panickingPlugin struct{ *board }

func (panickingPlugin) Methods() []string { return []string{"prompts/list"} }

func (panickingPlugin) HandleMethod(context.Context, *kernel.Caller, kernel.Session, string, json.RawMessage) (json.RawMessage, error) {
	panic("a secret value")
}

func TestPanic(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		e.load(panickingPlugin{newBoard("default", nodeA)})
		cs := e.client("", version, nil)
		_, err := cs.ListPrompts(context.Background(), nil)
		var f *jsonrpc.Error
		if !errors.As(err, &f) || f.Code != RPCCode(manifest.Internal) || strings.Contains(err.Error(), "secret") {
			t.Errorf("got %v, want a neutral internal error", err)
		}
		if n := e.kernel.Stats().Panics; n != 1 { // the kernel caught it before it got here
			t.Errorf("%d panics were counted, want one", n)
		}
		if _, err := cs.ListTools(context.Background(), nil); err != nil {
			t.Errorf("after a panic: %v", err)
		}
	})
}

// TestRequestMetaReachesStages: what the mux keeps back from the SDK still reaches the stages.
func TestRequestMetaReachesStages(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	e.load(conformance.New(e.kernel))
	meta := modernMeta[:len(modernMeta)-1] + `,"progressToken":"t","io.modelcontextprotocol/logLevel":"%s"}`
	send := func(method, name, level, params string) string {
		head := map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": method}
		if name != "" {
			head["Mcp-Name"], params = name, params+`"name":"`+name+`",`
		}
		return readAll(t, e.do("POST", head, `{"jsonrpc":"2.0","id":1,"method":"`+method+`","params":{`+params+fmt.Sprintf(meta, level)+`}}`))
	}
	if got := send("tools/list", "", "info", ""); !strings.Contains(got, echoA) {
		t.Errorf("tools/list: %s", got)
	}
	for level, logs := range map[string]bool{"debug": true, "info": true, "warning": false, "loud": false} {
		if got := send("tools/call", "test_logging_tool", level, ""); strings.Contains(got, "notifications/message") != logs || !strings.Contains(got, "Logged once") {
			t.Errorf("level %s: %s, want a message %v", level, got, logs)
		}
	}
	got := send("tools/call", "test_tool_with_progress", "error", `"arguments":{},`)
	if strings.Count(got, `"progressToken":"t"`) != 3 {
		t.Errorf("progress: %s", got)
	}
	for _, bad := range []string{`"io.modelcontextprotocol/clientCapabilities":7`, `"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":7`} {
		res := e.do("POST", map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/list"},
			`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",`+bad+`}}}`)
		if body := readAll(t, res); res.StatusCode != 400 || !strings.Contains(body, "-32602") {
			t.Errorf("%s: %d %s, want 400 and -32602", bad, res.StatusCode, body)
		}
	}
}

func TestTrace(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	const (
		inHeader = "0af7651916cd43dd8448eb211c80319c"
		inMeta   = "1af7651916cd43dd8448eb211c80319c"
	)
	trace := func(m map[string]any) string {
		got := m["result"].(map[string]any)["structuredContent"].(map[string]any)
		if got["traced"] != true {
			t.Error("the plugin does not see that the caller traces")
		}
		return got["trace"].(string)
	}
	head := map[string]string{"Traceparent": "00-" + inHeader + "-b7ad6b7169203331-01"}
	_, m := e.modern("tools/call", echoA, `"name":"`+echoA+`"`, head)
	if got := trace(m); got != inHeader {
		t.Errorf("from the header: %s, want %s", got, inHeader)
	}
	res := e.do("POST", map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": echoA, "Traceparent": head["Traceparent"]},
		`{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{"name":"`+echoA+`","_meta":{"traceparent":"00-`+inMeta+`-b7ad6b7169203331-01",`+modernMeta[9:]+`}}`)
	if err := json.NewDecoder(res.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	if got := trace(m); got != inMeta || m["id"] != "x" {
		t.Errorf("from _meta: %s of id %v, want %s", got, m["id"], inMeta)
	}
}

// TestConcurrentCallsWithEqualID sends the same JSON-RPC id from many clients at once: all share one SDK
// session, and each must get its own answer.
func TestConcurrentCallsWithEqualID(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			for j := range 10 {
				who := fmt.Sprintf("%d-%d", i, j)
				res := e.do("POST", map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": echoA},
					`{"jsonrpc":"2.0","id":1.50,"method":"tools/call","params":{`+modernMeta+`,"name":"`+echoA+`","arguments":{"who":"`+who+`"}}}`)
				b, err := io.ReadAll(res.Body)
				if err != nil || !strings.Contains(string(b), `\"who\":\"`+who+`\"`) || !strings.Contains(string(b), `"id":1.50,`) {
					t.Errorf("%s got %s (%v)", who, b, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestToolAsksForInput lets tools ask for input in both eras: by requests during the call, or by
// results that want more.
func TestToolAsksForInput(t *testing.T) {
	eras(t, func(t *testing.T, version string) {
		e := newEnv(t, Options{})
		e.load(conformance.New(e.kernel))
		opt := &sdk.ClientOptions{
			CreateMessageHandler: func(context.Context, *sdk.CreateMessageRequest) (*sdk.CreateMessageResult, error) {
				return &sdk.CreateMessageResult{Role: "assistant", Model: "m", Content: &sdk.TextContent{Text: "Good day"}}, nil
			},
			ElicitationHandler: func(context.Context, *sdk.ElicitRequest) (*sdk.ElicitResult, error) {
				return &sdk.ElicitResult{Action: "accept", Content: map[string]any{"name": "Ada", "color": "green", "ok": true}}, nil
			},
		}
		cs := e.client("", version, opt)
		want := map[string]string{
			"test_input_required_result_elicitation":     "Hello, Ada!",
			"test_input_required_result_sampling":        "The model says: Good day",
			"test_input_required_result_request_state":   "state-ok: the state came back unchanged and the user has confirmed.",
			"test_input_required_result_multiple_inputs": "Good day Ada, you have 0 roots.",
			"test_input_required_result_multi_round":     "Ada likes green.",
		}
		if version == legacyEra {
			want["test_sampling"] = "LLM response: Good day"
		}
		for tool, text := range want {
			res := callTool(t, cs, tool, map[string]any{"prompt": "x"})
			if got := res.Content[0].(*sdk.TextContent).Text; got != text {
				t.Errorf("%s: %q, want %q", tool, got, text)
			}
		}
		if version == modernEra { // the era has no requests to clients
			if res := callTool(t, cs, "test_sampling", map[string]any{"prompt": "x"}); !res.IsError {
				t.Errorf("test_sampling asked a modern client: %+v", res.Content[0])
			}
		}
		dull := e.client("default/dull", version, nil)
		_, err := dull.CallTool(context.Background(), &sdk.CallToolParams{Name: "test_missing_capability"})
		var f *jsonrpc.Error
		if !errors.As(err, &f) || f.Code != sdk.CodeMissingRequiredClientCapabilities {
			t.Errorf("without the capability: %v, want %d", err, sdk.CodeMissingRequiredClientCapabilities)
		}
	})
}

// TestLargeArguments: arguments that the SDK does not get reach the tool as those do that it gets.
func TestLargeArguments(t *testing.T) {
	e := newEnv(t, Options{})
	e.h.neverDirect = true
	e.load(newBoard("default", nodeA))
	for _, size := range []int{10, maxSDKArguments, 100 << 10} {
		text := strings.Repeat("a", size)
		_, got := e.modern("tools/call", echoA, `"name":"`+echoA+`","arguments":{"message":"`+text+`","n":[1,{"x":null}]}`, nil)
		result, _ := got["result"].(map[string]any)
		echo, _ := result["structuredContent"].(map[string]any)
		if want := map[string]any{"message": text, "n": []any{1.0, map[string]any{"x": nil}}}; !reflect.DeepEqual(echo["arguments"], want) {
			t.Errorf("arguments of %d bytes: %.200v", size, got)
		}
		_, got = e.modern("tools/call", echoA, `"name":"`+echoA+`","arguments":{"message":"`+text+`bad"}`, nil)
		if result, _ = got["result"].(map[string]any); result["isError"] != true {
			t.Errorf("bad arguments of %d bytes: %.200v", size, got)
		}
	}
}
