package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/relay/kernel"
)

// slowBoard is a board whose echo waits, if its arguments say so, until the call ends or the test
// lets it go on.
type slowBoard struct {
	*board
	started  chan struct{}
	goOn     chan struct{}
	ended    chan error  // of a call whose context has ended
	isDirect chan bool   // of each call
	answer   chan string // to answer with, instead of the echo
}

func newSlowBoard() *slowBoard {
	return &slowBoard{board: newBoard("default", nodeA), started: make(chan struct{}, 8), goOn: make(chan struct{}), ended: make(chan error, 8),
		isDirect: make(chan bool, 4096), answer: make(chan string, 1)}
}

func (b *slowBoard) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	b.isDirect <- errors.Is(r.Session.Notify(ctx, "nothing", nil), errNoMessages)
	if strings.Contains(string(r.Arguments), `"wait"`) {
		b.started <- struct{}{}
		select {
		case <-b.goOn:
		case <-ctx.Done():
			b.ended <- context.Cause(ctx)
			return nil, ctx.Err()
		}
	}
	select {
	case a := <-b.answer:
		return &kernel.Result{Structured: json.RawMessage(a)}, nil
	default:
	}
	res, err := b.board.Call(ctx, r)
	if err == nil && res.Structured != nil {
		info, _ := json.Marshal(map[string]any{"token": r.Session.ProgressToken(), "caps": r.Session.Capabilities(), "meta": r.Meta, "session": r.ConnID != ""})
		res.Structured = json.RawMessage(strings.TrimSuffix(string(res.Structured), "}") + `,"info":` + string(info) + "}")
	}
	return res, err
}

// bothWays are two handlers with equal boards; the second one passes every call to the SDK.
func bothWays(t *testing.T) (envs [2]*env, boards [2]*slowBoard) {
	for i := range envs {
		envs[i], boards[i] = newEnv(t, Options{}), newSlowBoard()
		envs[i].h.neverDirect = i == 1
		envs[i].load(boards[i])
		envs[i].load(newBoard("other", nodeB))
	}
	return envs, boards
}

var traceID = regexp.MustCompile(`[0-9a-f]{32}`)

// answerOf is an answer without what differs between two runs and between HTTP framings.
func answerOf(res *http.Response, body string) string {
	h := maps.Clone(map[string][]string(res.Header))
	for _, name := range []string{"Date", "Content-Length", "Content-Encoding", "Vary", "Mcp-Session-Id"} {
		delete(h, name)
	}
	events := strings.Split(traceID.ReplaceAllString(body, "TRACE"), "\n\n")
	slices.Sort(events) // the answers to a batch come in any order
	return fmt.Sprintf("%d %v\n%s", res.StatusCode, h, strings.Join(events, "\n\n"))
}

// directCase is a POST that both handlers get.
type directCase struct {
	name, body string
	head       map[string]string // in addition to those of the era
	direct     bool              // it is served directly in a session, if it reaches the board
	modern     bool              // it is sent in the modern era, too
}

// toolsCall is the body of a tools/call. id and params are JSON, params without its braces.
func toolsCall(id, params string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{` + params + `}}`
}

// Params of a call of the board's echo.
const (
	echoName = `"name":"` + echoA + `"`
	echoArgs = echoName + `,"arguments":{"message":"hi \"<&>\" \u2028\u00e9"}`
)

// callCases are calls with whatever the params, the id, the envelope or the headers can be.
func callCases() []directCase {
	const name, args = echoName, echoArgs
	call := toolsCall
	flat := `"name":"` + strings.ReplaceAll(echoA, ".", "_") + `"`
	return []directCase{
		{name: "echo", body: call("1", args), direct: true, modern: true},
		{name: "flat name", body: call("1", flat), direct: true},
		{name: "upper case name", body: call("1", `"name":"`+strings.ToUpper(echoA)+`"`), direct: true, modern: true},
		{name: "no arguments", body: call("1", name), direct: true, modern: true},
		{name: "null arguments", body: call("1", name+`,"arguments":null`), direct: true, modern: true},
		{name: "arguments in an array", body: call("1", name+`,"arguments":[1]`), direct: true, modern: true},
		{name: "arguments are text", body: call("1", name+`,"arguments":"x"`), direct: true, modern: true},
		{name: "unknown params", body: call("1", args+`,"task":{},"requestId":1`), direct: true, modern: true},
		{name: "escaped keys", body: call("1", `"n\u0061me":"`+echoA+`","\u0061rguments":{"a":1}`), direct: true, modern: true},
		{name: "keys in capitals", body: call("1", `"Name":"`+echoA+`"`), modern: true},
		{name: "white space", body: " \r\n" + strings.ReplaceAll(call("1", name+`, "arguments" : { "a" : [ 1 , 2 ] } `), ",", " ,\n"), direct: true, modern: true},
		{name: "refused arguments", body: call("1", name+`,"arguments":{"bad":1}`), direct: true, modern: true},
		{name: "progress token", body: call("1", args+`,"_meta":{"progressToken":"p"}`), direct: true, modern: true},
		{name: "progress token, a number", body: call("1", args+`,"_meta":{"progressToken":7}`), direct: true, modern: true},
		{name: "_meta for stages", body: call("1", args+`,"_meta":{"agentctl/sign":{"a":[1,"b"]},"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`), direct: true, modern: true},
		{name: "empty _meta", body: call("1", args+`,"_meta":{ }`), direct: true},
		{name: "null _meta", body: call("1", args+`,"_meta":null`)},
		{name: "_meta in an array", body: call("1", args+`,"_meta":[]`)},
		{name: "_meta with an old version", body: call("1", args+`,"_meta":{"io.modelcontextprotocol/protocolVersion":"2025-11-25"}`)},
		{name: "_meta with a wrong version", body: call("1", args+`,"_meta":{"io.modelcontextprotocol/protocolVersion":7}`), direct: true},
		{name: "input", body: call("1", args+`,"inputResponses":{}`), modern: true},
		{name: "input of a wrong type", body: call("1", args+`,"inputResponses":7`), modern: true},
		{name: "request state", body: call("1", args+`,"requestState":"x"`), modern: true},
		{name: "name is a number", body: call("1", `"name":7`)},
		{name: "name is null", body: call("1", `"name":null`)},
		{name: "name is empty", body: call("1", `"name":""`)},
		{name: "no name", body: call("1", "")},
		{name: "unknown tool", body: call("1", `"name":"nothing"`)},
		{name: "unknown verb", body: call("1", `"name":"sysecho.`+nodeA+`.echo.other"`)},
		{name: "another's board", body: call("1", `"name":"sysecho.`+nodeB+`.echo.invoke"`)},
		{name: "no scope", body: call("1", args), head: map[string]string{"Authorization": "Bearer default/anybody/tools:list"}, direct: true},
		{name: "ended token", body: call("1", args), head: map[string]string{"Authorization": "Bearer default/gone"}, modern: true},
		{name: "stream with wrong bounds", body: call("1", `"name":"`+streamA+`","_meta":{"agentctl/max_frames":0}`)},

		{name: "id of letters", body: call(`"a b"`, args), direct: true, modern: true},
		{name: "empty id", body: call(`""`, args), direct: true, modern: true},
		{name: "id with escapes", body: call(`"\u0041\n\u2028é<&\/\u0007"`, args), direct: true, modern: true},
		{name: "exponent", body: call("1e3", args), direct: true, modern: true},
		{name: "negative id", body: call("-7", args), direct: true, modern: true},
		{name: "negative zero", body: call("-0", args), direct: true, modern: true},
		{name: "largest id", body: call("9007199254740991", args), direct: true, modern: true},
		{name: "id too large", body: call("9007199254740992", args)},
		{name: "huge id", body: call(strings.Repeat("9", 300), args)},
		{name: "overflowing id", body: call("1e999", args)},
		{name: "long id", body: call(`"`+strings.Repeat("x", 5000)+`"`, args), direct: true, modern: true},
		{name: "fraction", body: call("1.5", args)},
		{name: "whole fraction", body: call("1.0", args), direct: true, modern: true},
		{name: "id null", body: call("null", args)},
		{name: "id true", body: call("true", args)},
		{name: "id is an object", body: call("{}", args)},
		{name: "no id", body: `{"jsonrpc":"2.0","method":"tools/call","params":{` + args + `}}`},

		{name: "no params", body: `{"jsonrpc":"2.0","id":1,"method":"tools/call"}`},
		{name: "null params", body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":null}`},
		{name: "params in an array", body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":["` + echoA + `"]}`},
		{name: "method and result", body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","result":{},"params":{` + args + `}}`},
		{name: "method and error", body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","error":{"code":1,"message":"x"},"params":{` + args + `}}`},
		{name: "duplicate key", body: call("1", args+`,"name":"x"`)},
		{name: "duplicate key by escape", body: call("1", args+`,"n\u0061me":"x"`)},
		{name: "duplicate key in arguments", body: call("1", name+`,"arguments":{"a":1,"a":2}`)},
		{name: "duplicate id", body: `{"id":2,` + call("1", args)[1:]},
		{name: "bad UTF-8", body: call("1", name+`,"arguments":{"a":"`+"\xff"+`"}`)},
		{name: "lone surrogate", body: call("1", name+`,"arguments":{"a":"\ud800"}`)},
		{name: "too deep", body: call("1", name+`,"arguments":{"a":`+strings.Repeat("[", 20)+strings.Repeat("]", 20)+`}`)},
		{name: "trailing bytes", body: call("1", args) + "{}"},
		{name: "unfinished", body: call("1", args)[:40]},
		{name: "another version of JSON-RPC", body: strings.Replace(call("1", args), `"2.0"`, `"1.0"`, 1)},
		{name: "a batch", body: "[" + call("1", args) + "]"},
		{name: "an old batch", body: "[" + call("1", args) + "," + call(`"2"`, args) + "]", head: map[string]string{"Mcp-Protocol-Version": "2025-03-26"}},

		{name: "no version", body: call("1", args), head: map[string]string{"Mcp-Protocol-Version": ""}, direct: true},
		{name: "an old version", body: call("1", args), head: map[string]string{"Mcp-Protocol-Version": "2024-11-05"}, direct: true},
		{name: "an unknown version", body: call("1", args), head: map[string]string{"Mcp-Protocol-Version": "2020-01-01"}},
		{name: "Last-Event-ID", body: call("1", args), head: map[string]string{"Last-Event-ID": "x_1"}},
		{name: "unknown session", body: call("1", args), head: map[string]string{"Mcp-Session-Id": "NOBODY"}},
		{name: "another's session", body: call("1", args), head: map[string]string{"Authorization": "Bearer other/anybody"}},
		{name: "no session", body: call("1", args), head: map[string]string{"Mcp-Session-Id": ""}},
		{name: "wrong Accept", body: call("1", args), head: map[string]string{"Accept": "application/json"}, modern: true},
		{name: "wildcard Accept", body: call("1", args), head: map[string]string{"Accept": "*/*"}, direct: true, modern: true},
		{name: "wrong Content-Type", body: call("1", args), head: map[string]string{"Content-Type": "text/plain"}, modern: true},
		{name: "Content-Type with charset", body: call("1", args), head: map[string]string{"Content-Type": `application/json; charset="UTF-8"`}, direct: true, modern: true},
		{name: "wrong Host", body: call("1", args), head: map[string]string{"Host": "evil.example"}, modern: true},
		{name: "wrong Origin", body: call("1", args), head: map[string]string{"Origin": "https://evil.example"}, modern: true},
		{name: "header of another method", body: call("1", args), head: map[string]string{"Mcp-Method": "tools/list"}, direct: true, modern: true},
		{name: "header of another name", body: call("1", args), head: map[string]string{"Mcp-Name": "x"}, direct: true, modern: true},
	}
}

// listCases are requests for lists.
func listCases() (cases []directCase) {
	for _, method := range []string{"tools/list", "resources/list"} {
		add := func(name, id, params string, modern bool) {
			cases = append(cases, directCase{
				name: method + ", " + name, body: `{"jsonrpc":"2.0","id":` + id + `,"method":"` + method + `"` + params + `}`,
				head: map[string]string{"Mcp-Name": "", "Mcp-Method": method}, modern: modern,
			})
		}
		add("no params", "1", "", false)
		add("null params", "1", `,"params":null`, false)
		add("params in an array", "1", `,"params":[]`, false)
		add("empty params", `"\u0041"`, `,"params":{"x":1}`, true)
		add("_meta", "1", `,"params":{"_meta":{"progressToken":1}}`, true)
		add("null _meta", "1", `,"params":{"_meta":null}`, false)
		for _, cursor := range []string{`""`, `"MXN5c2VjaG8uMA"`, `"wrong"`, `"` + strings.Repeat("x", 2000) + `"`, "null", "7", "{}"} {
			add("cursor "+cursor[:min(len(cursor), 9)], "-5", `,"params":{"cursor":`+cursor+`}`, true)
		}
	}
	return cases
}

// handlerPair are the two handlers of bothWays, with a session in each: 0 answers directly, 1 by the SDK.
type handlerPair struct {
	envs     [2]*env
	boards   [2]*slowBoard
	sessions [2]string
}

func newHandlerPair(t *testing.T) *handlerPair {
	t.Helper()
	p := &handlerPair{}
	p.envs, p.boards = bothWays(t)
	for i, e := range p.envs {
		p.sessions[i] = e.initialize("")
		e.revoke("default/gone")
	}
	return p
}

// request returns the headers and the body with which a case is sent to a handler in an era.
func (p *handlerPair) request(i int, tt *directCase, version string) (head map[string]string, body string) {
	body = tt.body
	head = map[string]string{"Mcp-Protocol-Version": version, "Mcp-Session-Id": p.sessions[i]}
	if version == modernEra {
		if strings.Contains(body, `"_meta":{`) {
			body = strings.Replace(body, `"_meta":{`, modernMeta[:len(modernMeta)-1]+`,`, 1)
		} else {
			body = strings.Replace(body, `"params":{`, `"params":{`+modernMeta+`,`, 1)
		}
		delete(head, "Mcp-Session-Id")
		head["Mcp-Method"], head["Mcp-Name"] = "tools/call", echoA
		if upper := strings.ToUpper(echoA); strings.Contains(body, upper) {
			head["Mcp-Name"] = upper
		}
	}
	maps.Copy(head, tt.head)
	return head, body
}

// reply is what came of a request.
type reply struct {
	answer, audit string
	isDirect      bool // it reached the board directly
}

// send sends a case to a handler in an era.
func (p *handlerPair) send(t *testing.T, i int, tt *directCase, version string) (r reply) {
	t.Helper()
	e := p.envs[i]
	before := len(e.records())
	head, body := p.request(i, tt, version)
	res := e.do("POST", head, body)
	r.answer = answerOf(res, readAll(t, res))
	for _, rec := range e.records()[before:] {
		r.audit += traceID.ReplaceAllString(fmt.Sprintf("%+v\n", rec), "TRACE")
	}
	for len(p.boards[i].isDirect) > 0 {
		r.isDirect = <-p.boards[i].isDirect || r.isDirect
	}
	return r
}

// wantSame sends a case to both handlers, which must answer and audit the same. It returns what came of it at
// the direct one.
func (p *handlerPair) wantSame(t *testing.T, tt *directCase, version string) reply {
	t.Helper()
	direct, sdk := p.send(t, 0, tt, version), p.send(t, 1, tt, version)
	if direct.answer != sdk.answer {
		t.Errorf("directly:\n%s\nby the SDK:\n%s", direct.answer, sdk.answer)
	}
	if direct.audit != sdk.audit {
		t.Errorf("audit, directly:\n%s\nby the SDK:\n%s", direct.audit, sdk.audit)
	}
	if sdk.isDirect {
		t.Error("the handler that passes every call to the SDK served it directly")
	}
	return direct
}

// hasReachedBoard reports whether an answer is the board's.
func (r *reply) hasReachedBoard() bool {
	return strings.Contains(r.answer, `"structuredContent":{"node_id"`)
}

// TestDirectIsTheSame: status, headers, body and audit records are the same whether a request is served
// directly or by the SDK, and only what should is served directly.
func TestDirectIsTheSame(t *testing.T) {
	p := newHandlerPair(t)
	for _, tt := range append(callCases(), listCases()...) {
		t.Run(tt.name+"/"+legacyEra, func(t *testing.T) {
			if r := p.wantSame(t, &tt, legacyEra); r.hasReachedBoard() && r.isDirect != tt.direct {
				t.Errorf("served directly: %v, want %v", r.isDirect, tt.direct)
			}
		})
		if tt.modern {
			t.Run(tt.name+"/"+modernEra, func(t *testing.T) { p.wantSame(t, &tt, modernEra) })
		}
	}
	for i, e := range p.envs {
		e.h.mu.RLock()
		if n := len(e.h.sessions[p.sessions[i]].requests); n != 0 {
			t.Errorf("%d requests are registered after their end", n)
		}
		e.h.mu.RUnlock()
	}
}

func TestModernCallsAreDirect(t *testing.T) {
	r := newHandlerPair(t).send(t, 0, &directCase{body: toolsCall("1", echoArgs)}, modernEra)
	if !r.isDirect || !r.hasReachedBoard() {
		t.Errorf("served directly: %v: %s", r.isDirect, r.answer)
	}
}

// Results with line breaks, which an event cannot have, and large ones are the same, too.
func TestDirectResultsAreTheSame(t *testing.T) {
	p := newHandlerPair(t)
	for name, structured := range map[string]string{
		"line breaks": "{\"a\": [1,\r\n 2],\n\"b\":\" \\n \"}",
		"large":       `{"long":"` + strings.Repeat("x", 5000) + `"}`,
	} {
		for _, version := range []string{legacyEra, modernEra} {
			t.Run(name+"/"+version, func(t *testing.T) {
				for _, b := range p.boards {
					b.answer <- structured
				}
				p.wantSame(t, &directCase{body: toolsCall("1", echoArgs)}, version)
			})
		}
	}
}

// TestSessionVersions: every version with sessions that the SDK serves is one whose calls are
// direct.
func TestSessionVersions(t *testing.T) {
	want := map[string]bool{"": true}
	for _, v := range sdk.SupportedProtocolVersions() {
		if v < modernVersion {
			want[v] = v < "2025-06-18"
		}
	}
	if !maps.Equal(want, sessionVersions) {
		t.Errorf("%v, want %v", sessionVersions, want)
	}
}

// TestDirectConcurrent: each of many calls of one session gets its own answer, and a canceled one
// disturbs no other.
func TestDirectConcurrent(t *testing.T) {
	e, b := newEnv(t, Options{}), newSlowBoard()
	b.isDirect = make(chan bool, 1<<12)
	e.load(b)
	head := sessionHead("", e.initialize(""))
	slow := e.pending(t, head, fmt.Sprintf(waitBody, `"slow"`))
	wait(t, "call", b.started)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := range 10 {
				id := fmt.Sprintf(`"%d-%d"`, i, j)
				got := readAll(t, e.do("POST", head, `{"jsonrpc":"2.0","id":`+id+`,"method":"tools/call","params":{"name":"`+echoA+`","arguments":{"who":`+id+`}}}`))
				if !strings.Contains(got, `"id":`+id+`,"result"`) || !strings.Contains(got, `"arguments":{"who":`+id+`}`) {
					t.Errorf("%s got %s", id, got)
				}
				e.do("POST", head, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":`+id+`}}`) // too late
			}
		})
	}
	wg.Wait()
	b.goOn <- struct{}{}
	if got := wait(t, "answer", slow); !strings.Contains(got, `"id":"slow","result"`) {
		t.Errorf("the slow call got %s", got)
	}
}

// pending sends a call that waits, and gives its answer.
func (e *env) pending(t *testing.T, head map[string]string, body string) <-chan string {
	t.Helper()
	c := make(chan string, 1)
	go func() {
		res, err := e.srv.Client().Do(newRequest(t, e, head, body))
		if err != nil {
			c <- err.Error()
			return
		}
		defer res.Body.Close()
		got, err := io.ReadAll(res.Body)
		c <- fmt.Sprint(answerOf(res, string(got)), err)
	}()
	return c
}

const waitBody = `{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":"` + echoA + `","arguments":{"wait":1}}}`

// TestDirectCancel: notifications/cancelled ends a call in progress, and no other.
func TestDirectCancel(t *testing.T) {
	envs, boards := bothWays(t)
	var answers [2][]string
	for i, e := range envs {
		b, id := boards[i], e.initialize("")
		head := sessionHead("", id)
		cancel := func(head map[string]string, requestID string) {
			t.Helper()
			if res := e.do("POST", head, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":`+requestID+`,"reason":"x"}}`); res.StatusCode != 202 {
				t.Errorf("cancel: %d, want 202", res.StatusCode)
			}
		}
		for _, ids := range [][2]string{{"5", "5.0"}, {`"5"`, `"\u0035"`}} {
			answer := e.pending(t, head, fmt.Sprintf(waitBody, ids[0]))
			wait(t, "call", b.started)
			for _, other := range []string{"6", `"6"`, "null", "{}", "[5]", "true", `"5 "`} {
				cancel(head, other)
			}
			cancel(sessionHead("", e.initialize("")), ids[0]) // of another session
			select {
			case got := <-answer:
				t.Fatalf("answered: %s", got)
			case <-b.ended:
				t.Fatal("canceled by another id")
			default:
			}
			cancel(head, ids[1])
			wait(t, "end of the call", b.ended)
			answers[i] = append(answers[i], wait(t, "answer", answer))
		}
		if e.records()[len(e.records())-1].Reason != "cancelled" {
			t.Errorf("audit %+v, want cancelled", e.records())
		}
	}
	if !slices.Equal(answers[0], answers[1]) {
		t.Errorf("directly:\n%s\nby the SDK:\n%s", answers[0], answers[1])
	}
}

// TestDirectDuplicateID: an id that is in use is refused, whichever way its calls go.
func TestDirectDuplicateID(t *testing.T) {
	envs, boards := bothWays(t)
	var answers [2][]string
	for i, e := range envs {
		b, head := boards[i], sessionHead("", e.initialize(""))
		try := func(body string) {
			res := e.do("POST", head, body)
			body = strings.TrimSpace(readAll(t, res))
			answers[i] = append(answers[i], fmt.Sprint(res.StatusCode, " ", res.Header["Content-Type"], body))
		}
		streamBody := `{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":"` + streamA + `"}}`
		for _, id := range []string{"5", `"five"`} {
			first := e.pending(t, head, fmt.Sprintf(waitBody, id))
			wait(t, "call", b.started)
			try(fmt.Sprintf(waitBody, id))
			try(fmt.Sprintf(streamBody, id))
			try(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"ping"}`, id))
			try(`{"jsonrpc":"2.0","id":"other","method":"ping"}`)
			b.goOn <- struct{}{}
			answers[i] = append(answers[i], wait(t, "answer", first))

			first = e.pending(t, head, fmt.Sprintf(streamBody, id))
			f := wait(t, "stream", b.streams)
			try(fmt.Sprintf(waitBody, id))
			f.send(frame(1))
			f.end(io.EOF)
			answers[i] = append(answers[i], wait(t, "answer", first))
			try(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"ping"}`, id)) // free again
		}
	}
	for k := range answers[0] {
		if answers[0][k] != answers[1][k] {
			t.Errorf("directly:\n%s\nby the SDK:\n%s", answers[0][k], answers[1][k])
		}
	}
}

// TestDirectEnds: a call whose session is deleted is answered; one whose client goes away, or whose
// tenant's relay stops, ends.
func TestDirectEnds(t *testing.T) {
	e, b := newEnv(t, Options{SessionIdleTimeout: time.Minute}), newSlowBoard()
	e.load(b)
	id := e.initialize("")
	head := sessionHead("", id)
	answer := e.pending(t, head, fmt.Sprintf(waitBody, `"c"`))
	wait(t, "call", b.started)
	e.h.sweep(time.Now().Add(time.Hour)) // a session with a call is not idle
	if res := e.do("DELETE", head, ""); res.StatusCode != 204 {
		t.Errorf("DELETE: %d, want 204", res.StatusCode)
	}
	if got := wait(t, "answer", answer); !strings.HasPrefix(got, "200") || !strings.Contains(got, `{"jsonrpc":"2.0","id":"c","error":{"code":-32600,"message":"the session has ended; initialize again"}}`) {
		t.Errorf("after DELETE: %s", got)
	}
	wait(t, "end of the call", b.ended)
	if got := readAll(t, e.do("POST", head, fmt.Sprintf(waitBody, "1"))); !strings.Contains(got, "no such session") {
		t.Errorf("a call after DELETE: %s", got)
	}

	for _, version := range []string{legacyEra, modernEra} {
		head, body := sessionHead("", e.initialize("")), fmt.Sprintf(waitBody, "1")
		if version == modernEra {
			head = map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": "tools/call", "Mcp-Name": echoA}
			body = strings.Replace(body, `"params":{`, `"params":{`+modernMeta+`,`, 1)
		}
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			res, err := e.srv.Client().Do(newRequest(t, e, head, body).WithContext(ctx))
			if err == nil {
				_ = res.Body.Close()
			}
		}()
		wait(t, "call", b.started)
		leave()
		wait(t, "end of the call", b.ended)
	}
	for len(b.isDirect) > 0 {
		if !<-b.isDirect {
			t.Error("a call was not direct")
		}
	}
}

// TestDirectPanic: a panic on the way is answered, and shows nothing.
func TestDirectPanic(t *testing.T) {
	e := newEnv(t, Options{})
	e.load(newBoard("default", nodeA))
	tn := &tenant{h: e.h}
	_, err := tn.answerDirectly(&exchange{tenant: tn}, &envelope{method: "tools/call", name: echoA}, echoA, &kernel.Tool{Name: echoA}) // there is no caller
	if err == nil || err.Error() != "the relay failed to answer this request" {
		t.Errorf("got %v, want a neutral error", err)
	}
}

// TestListCompressed: both lists are compressed in both eras for clients that accept it; of the other
// answers those of 2 KiB or more, where they are JSON and not events.
func TestListCompressed(t *testing.T) {
	e := newEnv(t, Options{})
	for i := range 100 {
		e.load(newBoard("default", fmt.Sprintf("01j8zz3f0v4q7k2m9x5c1b%04d", i)))
	}
	id := e.initialize("")
	tool := "sysecho.01j8zz3f0v4q7k2m9x5c1b0001.echo.invoke"
	for _, tt := range []struct {
		method, params string
		legacy, modern bool // compressed
	}{
		{"tools/list", `{}`, true, true}, {"resources/list", `{}`, true, true}, {"tools/list", `{"cursor":"wrong"}`, false, false},
		{"tools/call", `{"name":"` + tool + `","arguments":{"message":"` + strings.Repeat("x", 5000) + `"}}`, false, true},
		{"tools/call", `{"name":"` + tool + `","arguments":{"message":"short"}}`, false, false},
		{"resources/read", `{"uri":"mcp://devices/01j8zz3f0v4q7k2m9x5c1b0001/metrics.json"}`, false, false},
	} {
		for _, version := range []string{legacyEra, modernEra} {
			head, params, want := sessionHead("", id), tt.params, tt.legacy
			if version == modernEra {
				want = tt.modern
				head = map[string]string{"Mcp-Protocol-Version": modernEra, "Mcp-Method": tt.method}
				if tt.method == "tools/call" {
					head["Mcp-Name"] = tool
				} else if tt.method == "resources/read" {
					head["Mcp-Name"] = "mcp://devices/01j8zz3f0v4q7k2m9x5c1b0001/metrics.json"
				}
				params = "{" + modernMeta + strings.TrimSuffix(","+tt.params[1:], ",}")
				if tt.params == "{}" {
					params = "{" + modernMeta + "}"
				}
			}
			body := `{"jsonrpc":"2.0","id":1,"method":"` + tt.method + `","params":` + params + `}`
			read := func(res *http.Response) string { return traceID.ReplaceAllString(readAll(t, res), "TRACE") }
			plain := read(e.do("POST", with(head, "Accept-Encoding", "identity"), body))
			unpacked := e.do("POST", head, body) // Go's client asks for gzip, and unpacks it
			if got := read(unpacked); unpacked.Uncompressed != want || got != plain || !strings.Contains(got, `"jsonrpc":"2.0"`) {
				t.Errorf("%s %s %s: compressed %v, want %v; %d bytes, %d plain", version, tt.method, tt.params, unpacked.Uncompressed, want, len(got), len(plain))
			}
			packed := e.do("POST", with(head, "Accept-Encoding", "gzip"), body)
			if size := len(readAll(t, packed)); (packed.Header.Get("Content-Encoding") == "gzip") != want || want && size > len(plain)/5 {
				t.Errorf("%s %s: %v, %d bytes of %d", version, tt.method, packed.Header, size, len(plain))
			}
		}
	}
	// A batch is not compressed: it may hold other answers.
	head := with(with(sessionHead("", id), "Accept-Encoding", "gzip"), "Mcp-Protocol-Version", "2025-03-26")
	if res := e.do("POST", head, "["+listBody+"]"); res.StatusCode != 200 || res.Header.Get("Content-Encoding") != "" {
		t.Errorf("a batch: %d %v", res.StatusCode, res.Header)
	}
}

func with(head map[string]string, key, value string) map[string]string {
	head = maps.Clone(head)
	head[key] = value
	return head
}
