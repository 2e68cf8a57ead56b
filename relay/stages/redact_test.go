package stages_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

const canary = "hunter2-canary"

// The document that a plugin answers, with a secret in each place where one may be, and what a client
// gets of it.
var (
	secretDoc = `{"a":1.50,"password":{"deep":["` + canary + `"]},"list":[{"PassWord":"` + canary + `"},"say ` + strings.ReplaceAll(canary, "h", `\u0068`) + `!"],"` +
		canary + `":true,"n":4242424242424242,"text":"{\"inner\":{\"password\":\"` + canary + `\"}}"}`
	redactedDoc = `{"a":1.50,"password":"[redacted]","list":[{"PassWord":"[redacted]"},"say [redacted]!"],"[redacted]":true,"n":"[redacted]","text":"{\"inner\":{\"password\":\"[redacted]\"}}"}`
)

// newRedactingKernel redacts the field password, the canary and a number.
func newRedactingKernel(t *testing.T, p *plugin) *kernel.Kernel {
	t.Helper()
	k, m := newKernel(t, stages.Options{}, p)
	enable(t, m, "redact", `{"fields":["password"],"patterns":["hunter2-[a-z]+","42{1}[0-9]{14}"]}`)
	return k
}

// wantRedacted checks that a text has no secret, but something in place of one.
func wantRedacted(t *testing.T, text string) {
	t.Helper()
	if strings.Contains(text, "hunter2") || strings.Contains(text, "4242") || !strings.Contains(text, "[redacted]") {
		t.Errorf("got %s, want [redacted] in place of each secret", text)
	}
}

// TestRedactedResults: no part of an answer has a secret. The plugin gets its arguments as they were
// sent, and may return one result to several callers.
func TestRedactedResults(t *testing.T) {
	for name, result := range map[string]*kernel.Result{
		"structured":     {Structured: json.RawMessage(secretDoc)},
		"content":        {Content: []json.RawMessage{[]byte(secretDoc)}},
		"meta":           {Meta: json.RawMessage(secretDoc)},
		"input requests": {InputRequests: json.RawMessage(secretDoc), RequestState: canary},
		"JSON-RPC error": {RPCError: &kernel.RPCError{Message: canary, Data: json.RawMessage(secretDoc)}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return result, nil }}
			k := newRedactingKernel(t, p)
			before := fmt.Sprintf("%+v", result)
			for range 2 {
				res, err := k.Call(t.Context(), request(agent(), "p.do", `{"password":"`+canary+`"}`, ""))
				if err != nil {
					t.Fatal(err)
				}
				all := fmt.Sprintf("%s %s %s %s %s", res.Structured, res.Content, res.Meta, res.InputRequests, res.RequestState)
				if e := res.RPCError; e != nil {
					all += e.Message + string(e.Data)
				}
				wantRedacted(t, all)
				if len(result.Structured) > 0 && string(res.Structured) != redactedDoc {
					t.Errorf("got  %s\nwant %s", res.Structured, redactedDoc)
				}
			}
			if got, want := p.last(), `{"password":"`+canary+`"}`; got != want {
				t.Errorf("the plugin got %s, want %s", got, want)
			}
			if after := fmt.Sprintf("%+v", result); after != before {
				t.Errorf("the plugin's result was changed to %s", after)
			}
		})
	}
}

// TestRedactedError: the message of an error has no secret.
func TestRedactedError(t *testing.T) {
	k := newRedactingKernel(t, &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) {
		return nil, manifest.E(manifest.BadRequest, "no "+canary)
	}})
	_, err := k.Call(t.Context(), request(agent(), "p.do", `{}`, ""))
	wantRedacted(t, fmt.Sprint(err))
}

// TestRedactedMessages: what a plugin sends to the client during a call has no secret.
func TestRedactedMessages(t *testing.T) {
	k := newRedactingKernel(t, &plugin{name: "p", call: func(r *kernel.Request) (*kernel.Result, error) {
		_ = r.Session.Notify(t.Context(), "notifications/message", json.RawMessage(secretDoc))
		_, _ = r.Session.Request(t.Context(), "elicitation/create", json.RawMessage(secretDoc))
		return &kernel.Result{Structured: json.RawMessage(`{}`)}, nil
	}})
	session := &progress{}
	r := request(agent(), "p.do", `{}`, "")
	r.Session = session
	if _, err := k.Call(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	want := []string{"notifications/message " + redactedDoc, "elicitation/create " + redactedDoc}
	if !slices.Equal(session.notified, want) {
		t.Errorf("the client got %q, want %q", session.notified, want)
	}
}

// TestRedactedResources: JSON and text are redacted. Binary data is not text, and passes unchanged.
func TestRedactedResources(t *testing.T) {
	for _, tt := range []struct{ name, data, want string }{
		{"JSON", secretDoc, redactedDoc},
		{"text", "plain text with " + canary, "plain text with [redacted]"},
		{"binary", "\xff\xfe binary", "\xff\xfe binary"},
	} {
		k := newRedactingKernel(t, &plugin{name: "p", read: tt.data})
		if _, data, err := k.Read(t.Context(), agent(), "mcp://p/all.json"); err != nil || string(data) != tt.want {
			t.Errorf("%s: got %q, %v, want %q", tt.name, data, err, tt.want)
		}
	}
}

func TestRedactLeavesTheRestAlone(t *testing.T) {
	p := &plugin{name: "p"}
	k, m := newKernel(t, stages.Options{}, p)
	if err := m.Enable("redact", ""); err != nil { // its defaults
		t.Fatal(err)
	}
	var given string
	p.call = func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(given)}, nil
	}
	tests := []struct{ given, want string }{
		{`{ "n" : 1.0e3, "s" : "\u0041", "tokens" : 5 }`, `{ "n" : 1.0e3, "s" : "\u0041", "tokens" : 5 }`}, // byte for byte
		{`{"token":5}`, `{"token":"[redacted]"}`},
		{`{"token":"[redacted]"}`, `{"token":"[redacted]"}`}, // and again
		{`"eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ4In0.c2ln"`, `"[redacted]"`},
		{`{"k":"-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n"}`, `{"k":"[redacted]\n"}`},
		{`{"a":1,"a":{"secret":2}}`, `{"a":1,"a":{"secret":"[redacted]"}}`}, // whatever a client may still read
		{"", ""},
	}
	for _, tt := range tests {
		given = tt.given
		res, err := k.Call(t.Context(), request(agent(), "p.do", "", ""))
		if err != nil || string(res.Structured) != tt.want {
			t.Errorf("%s: got %s, %v", tt.given, res.Structured, err)
		}
	}
	for _, given = range []string{`{"a":`, `{} {}`, `{"a" 1}`, `nope`} { // fails closed
		_, err := k.Call(t.Context(), request(agent(), "p.do", "", ""))
		wantCode(t, given, err, manifest.Internal, "redact")
	}
}

// FuzzRedact: whatever comes out has no secret in any string, name or number that a
// client may read out of it, also in documents inside of strings, and a second pass
// finds nothing more.
func FuzzRedact(f *testing.F) {
	for _, seed := range []string{`{"a":["hunter2-canary"]}`, `"{\"b\":\"\\u0068unter2-x\"}"`, `{"password":{"a":1},"n":42}`, `{"\u0068unter2-a":1}`, `[1,{}]`, `"[\"hunter2-\\u0061\"]"`} {
		f.Add(seed)
	}
	p := &plugin{name: "p"}
	k := kernel.New(kernel.Options{})
	m, err := stages.New(k.Pipeline(), stages.Options{})
	if err != nil || k.Load(p, false) != nil {
		f.Fatal(err)
	}
	if err := m.Configure("redact", "", []byte(`{"fields":["password"],"patterns":["hunter2-[a-z]"]}`)); err != nil {
		f.Fatal(err)
	}
	if err := m.Enable("redact", ""); err != nil {
		f.Fatal(err)
	}
	clean := func(t *testing.T, doc string) (string, bool) {
		p.call = func(*kernel.Request) (*kernel.Result, error) {
			return &kernel.Result{Structured: json.RawMessage(doc)}, nil
		}
		res, err := k.Call(t.Context(), request(agent(), "p.do", "", ""))
		if err != nil {
			return "", false
		}
		return string(res.Structured), true
	}
	f.Fuzz(func(t *testing.T, doc string) {
		out, ok := clean(t, doc)
		if !ok {
			return
		}
		var v any
		dec := json.NewDecoder(strings.NewReader(out))
		dec.UseNumber() // one may be beyond what a float64 holds
		if !json.Valid([]byte(out)) || dec.Decode(&v) != nil {
			if json.Valid([]byte(doc)) {
				t.Fatalf("%q became %q", doc, out)
			}
			return
		}
		noSecret(t, v, 0)
		if again, ok := clean(t, out); !ok || again != out {
			t.Errorf("%q, then %q, then %q", doc, out, again)
		}
	})
}

func noSecret(t *testing.T, v any, nested int) {
	switch v := v.(type) {
	case map[string]any:
		for name, x := range v {
			if strings.EqualFold(name, "password") && x != stages.Redacted {
				t.Errorf("a password: %v", x)
			}
			noSecret(t, name, nested)
			noSecret(t, x, nested)
		}
	case []any:
		for _, x := range v {
			noSecret(t, x, nested)
		}
	case string:
		if i := strings.Index(v, "hunter2-"); i >= 0 && i+8 < len(v) && v[i+8] >= 'a' && v[i+8] <= 'z' {
			t.Errorf("a secret: %q", v)
		}
		var inner any
		if s := strings.TrimSpace(v); nested < 4 && s != "" && (s[0] == '{' || s[0] == '[') && json.Unmarshal([]byte(s), &inner) == nil {
			noSecret(t, inner, nested+1)
		}
	}
}

// methods is a plugin with prompts.
type methods struct{ plugin }

func (*methods) Methods() []string { return []string{"prompts/get", "prompts/list"} }

func (*methods) HandleMethod(_ context.Context, _ *kernel.Caller, _ kernel.Session, method string, _ json.RawMessage) (json.RawMessage, error) {
	if method == "prompts/list" {
		return nil, &kernel.RPCError{Code: -32000, Message: "no " + canary}
	}
	return json.RawMessage(`{"messages":[{"content":{"type":"text","text":"say ` + canary + `"}}],"password":1}`), nil
}

// TestRedactMethods: methods that do not pass the stages are redacted too, and rules hide them.
func TestRedactMethods(t *testing.T) {
	k, m := newKernel(t, stages.Options{})
	if err := k.Load(&methods{plugin{name: "p"}}, false); err != nil {
		t.Fatal(err)
	}
	get := func(method string) string {
		h, ok := k.MethodHandler(agent(), "", method)
		if !ok {
			return "not found"
		}
		data, err := h.HandleMethod(t.Context(), agent(), nil, method, json.RawMessage(`{}`))
		return fmt.Sprint(string(data), " ", err)
	}
	if got := get("prompts/get"); !strings.Contains(got, canary) {
		t.Errorf("off: %s", got)
	}
	enable(t, m, "redact", `{"fields":["password"],"patterns":["hunter2-[a-z]+"]}`)
	if got := get("prompts/get"); got != `{"messages":[{"content":{"type":"text","text":"say [redacted]"}}],"password":"[redacted]"} <nil>` {
		t.Errorf("redacted: %s", got)
	}
	if got := get("prompts/list"); got != " no [redacted]" {
		t.Errorf("an error: %s", got)
	}
	for rules, want := range map[string]bool{`[{"effect":"deny","method":"prompts/get"}]`: false, `[{"effect":"deny"}]`: false, `[{"effect":"deny","tool":"*"}]`: true} {
		enable(t, m, "acl", `{"rules":`+rules+`}`)
		if got := get("prompts/list"); (got != "not found") != want {
			t.Errorf("%s: prompts/list: %s", rules, got)
		}
		if got := get("prompts/get"); (got != "not found") != want {
			t.Errorf("%s: prompts/get: %s", rules, got)
		}
	}
}
