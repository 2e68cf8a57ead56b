package kernel_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// wordy is a plugin whose tool answers with a given result.
type wordy struct {
	untrusted bool
	res       kernel.Result
}

func (p *wordy) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "wordy", Version: "1.0.0", Inline: true, Untrusted: p.untrusted, Tools: []*kernel.Tool{{Name: "wordy.say", ToolInfo: &kernel.ToolInfo{
		Title: "Say", Description: "Says it.", InputSchema: json.RawMessage(`{"type":"object"}`),
		SafetyClass: manifest.ReadOnly, Scope: manifest.ScopeToolsList,
	}}}}
}

func (p *wordy) Call(context.Context, *kernel.Request) (*kernel.Result, error) { return &p.res, nil }

// TestInvisibleCharacters checks that a model sees what text of boards and callers hides, in
// either spelling of JSON, and that nothing else changes.
func TestInvisibleCharacters(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"nothing to show", `{"a":"plain \\ \"text\" ünïcode 😀 \n\t","b":[1,true,null]}`, ""},
		{"zero width space", "{\"a\":\"x\u200by\"}", `{"a":"x\\u200By"}`},
		{"its escape", `{"a":"x\u200by"}`, `{"a":"x\\u200By"}`},
		{"an escaped backslash before u200b is text", `{"a":"x\\u200by"}`, ""},
		{"bidirectional override", "{\"a\":\"\u202eevil\u202c\"}", `{"a":"\\u202Eevil\\u202C"}`},
		{"C1 control", "{\"a\":\"\u0085\u009b\"}", `{"a":"\\u0085\\u009B"}`},
		{"escape of the terminal", `{"a":"\u001b[31m"}`, `{"a":"\\u001B[31m"}`},
		{"tag characters", "{\"a\":\"\U000E0041\U000E0001\"}", `{"a":"\\U000E0041\\U000E0001"}`},
		{"tag character as a pair", `{"a":"\udb40\udc41"}`, `{"a":"\\U000E0041"}`},
		{"emoji as a pair", `{"a":"\ud83d\ude00"}`, ""},
		{"lone surrogate", `{"a":"\udb40 \udc41"}`, ""},
		{"soft hyphen and byte order mark in a key", "{\"\ufeffa\":\"so\u00adft\"}", `{"\\uFEFFa":"so\\u00ADft"}`},
		{"variation selector", "{\"a\":\"v\U000E0100\"}", `{"a":"v\\U000E0100"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			if want == "" {
				want = c.in
			}
			p := &wordy{untrusted: true, res: kernel.Result{Structured: json.RawMessage(c.in), Content: []json.RawMessage{json.RawMessage(`{}`), json.RawMessage(c.in)}}}
			k := kernel.New(kernel.Options{})
			if err := k.Load(p, false); err != nil {
				t.Fatal(err)
			}
			call := func(mark bool) *kernel.Result {
				res, err := k.Call(context.Background(), &kernel.Request{Caller: caller("a", manifest.ScopeToolsList), Tool: "wordy.say", MarkUntrusted: mark})
				if err != nil {
					t.Fatal(err)
				}
				return res
			}
			res := call(true)
			if string(res.Structured) != want || string(res.Content[1]) != want || !json.Valid(res.Structured) {
				t.Errorf("got %s and %s\nwant %s", res.Structured, res.Content[1], want)
			}
			if string(res.Meta) != `{"agentctl/untrusted":true}` {
				t.Errorf("_meta %s", res.Meta)
			}
			if string(p.res.Structured) != c.in || string(p.res.Content[1]) != c.in || p.res.Meta != nil {
				t.Error("the plugin's own result was changed")
			}
			if res := call(false); string(res.Structured) != c.in || res.Meta != nil {
				t.Errorf("without the mark: %s, %s", res.Structured, res.Meta)
			}
		})
	}
}

// TestJoinMeta checks that whatever a plugin calls its _meta, the result is an object with ours.
func TestJoinMeta(t *testing.T) {
	for _, theirs := range []string{``, `null`, `{}`, "{ \n}", `[]`, `"x"`, `{"a":1}`, ` { "a" : {} } `} {
		joined := kernel.JoinMeta(kernel.UntrustedMeta, json.RawMessage(theirs))
		var m map[string]any
		if err := json.Unmarshal(joined, &m); err != nil || m[kernel.MetaUntrusted] != true || (len(m) == 2) != strings.Contains(theirs, "a") {
			t.Errorf("%q: %s (%v)", theirs, joined, err)
		}
	}
}
